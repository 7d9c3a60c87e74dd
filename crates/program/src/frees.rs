//! The instructions that free values, and where they stand.

use foldhash::{HashSet, HashSetExt};
use fusionllm_graph::ValueId;

use crate::{Access, Address, Instruction, Program};

impl Program {
    /// Puts an [`Instruction::Free`] behind the last use of each value of each micro-batch. A value that is computed
    /// again is also freed before that. The Program may not have any `Free` yet.
    pub fn insert_frees(&mut self) {
        let mut unused: HashSet<(ValueId, u32)> = HashSet::new();
        let mut reversed = Vec::with_capacity(self.instructions.len() * 2);
        for i in std::mem::take(&mut self.instructions).into_iter().rev() {
            self.values_of(&i, |value, micro_batch, access| {
                if unused.insert((value, micro_batch)) {
                    reversed.push(Instruction::Free { value, micro_batch });
                }
                // Earlier uses are of the value as it was computed before.
                if access == Access::Make {
                    unused.remove(&(value, micro_batch));
                }
            });
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
