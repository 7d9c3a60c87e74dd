//! When values are freed.

use std::collections::HashSet;

use fusionllm_graph::{ValueId, ValueKind};

use super::{Instruction, Program, Slot};

impl Program {
    /// Puts an [`Instruction::Free`] behind the last use of each value of each micro-batch. A value that is computed
    /// again is freed before that, too. No instruction frees anything yet.
    pub(crate) fn insert_frees(&mut self) {
        let mut unused: HashSet<(ValueId, u32)> = HashSet::new();
        let mut reversed = Vec::with_capacity(self.instructions.len() * 2);
        for i in std::mem::take(&mut self.instructions).into_iter().rev() {
            let made: &[ValueId] = match i {
                Instruction::Run { node, .. } => self.nodes.get(&node).map_or(&[], |node| &node.outputs),
                _ => &[],
            };
            for value in self.values_of(&i) {
                let Some(micro_batch) = i.micro_batch() else { continue };
                if unused.insert((value, micro_batch)) {
                    reversed.push(Instruction::Free { value, micro_batch });
                }
                // Earlier uses are of the value as it was computed before.
                if made.contains(&value) {
                    unused.remove(&(value, micro_batch));
                }
            }
            reversed.push(i);
        }
        reversed.reverse();
        self.instructions = reversed;
    }

    /// The values of its micro-batch that an instruction reads or makes.
    pub(crate) fn values_of(&self, i: &Instruction) -> Vec<ValueId> {
        let of_micro_batches = |v: &ValueId| {
            let kind = self.values.get(v).map(|v| &v.kind);
            matches!(kind, Some(ValueKind::Result { .. } | ValueKind::Input))
        };
        let mut values = match *i {
            Instruction::Run { node, .. } => {
                self.nodes.get(&node).map_or_else(Vec::new, |n| n.inputs.iter().chain(&n.outputs).copied().collect())
            }
            Instruction::Receive { slot: Slot::Value { value, .. }, .. }
            | Instruction::Send { slot: Slot::Value { value, .. }, .. }
            | Instruction::Accumulate { value, .. }
            | Instruction::UpdateState { value, .. }
            | Instruction::Report { value, .. } => vec![value],
            _ => Vec::new(),
        };
        values.retain(of_micro_batches);
        values
    }
}
