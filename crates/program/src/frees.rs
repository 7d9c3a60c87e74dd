//! The instructions that free values, and where they stand.

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use fusionllm_graph::ValueId;

use crate::{Access, Address, Instruction, Program};

impl Program {
    /// Puts an [`Instruction::Free`] behind the last use of each value of each micro-batch. A value that is computed
    /// again is also freed before that. The Program may not have any `Free` yet.
    pub fn insert_frees(&mut self) {
        let mut unused: HashSet<(ValueId, u32)> = HashSet::new();
        // An instruction uses the same values of every micro-batch.
        let mut uses: HashMap<Instruction, Vec<(ValueId, Access)>> = HashMap::new();
        let mut reversed = Vec::with_capacity(self.instructions.len() * 2);
        for i in std::mem::take(&mut self.instructions).into_iter().rev() {
            let used = uses.entry(i.of_micro_batch(0)).or_insert_with(|| {
                let mut used = Vec::new();
                self.values_of(&i, |value, _, access| used.push((value, access)));
                used
            });
            let micro_batch = i.micro_batch().unwrap_or_default();
            for &mut (value, access) in used {
                if unused.insert((value, micro_batch)) {
                    reversed.push(Instruction::Free { value, micro_batch });
                }
                // Earlier uses are of the value as it was computed before.
                if access == Access::Make {
                    unused.remove(&(value, micro_batch));
                }
            }
            reversed.push(i);
        }
        reversed.reverse();
        self.instructions = reversed;
    }

    /// Calls `each` for every value of a micro-batch that an instruction uses.
    pub fn values_of(&self, i: &Instruction, mut each: impl FnMut(ValueId, u32, Access)) {
        i.effects(self, 0, |tensor, access| {
            if let Address::Value { value, micro_batch } = tensor {
                each(value, micro_batch, access);
            }
        });
    }
}
