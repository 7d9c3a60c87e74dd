//! The instructions that free values, and where they stand.

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use fusionllm_graph::ValueId;

use crate::{Access, Address, Instruction, Program};

impl Program {
    /// Puts an [`Instruction::Free`] behind the last use of each value of each micro-batch. A value that is computed
    /// again is also freed before that. The Program may not have any `Free` yet.
    pub fn insert_frees(&mut self) {
        let mut own: HashMap<u32, Vec<usize>> = HashMap::new();
        for (at, i) in self.instructions.iter().enumerate() {
            i.micro_batch().into_iter().for_each(|micro_batch| own.entry(micro_batch).or_default().push(at));
        }
        // Most micro-batches have the same instructions as another one.
        let mut known: Vec<(&[usize], Vec<Vec<ValueId>>)> = Vec::new();
        let mut of: HashMap<u32, usize> = HashMap::new();
        for (micro_batch, own) in &own {
            let same = |other: &usize, at: &usize| {
                self.instructions[*other].of_micro_batch(*micro_batch) == self.instructions[*at]
            };
            let like = |(others, _): &(&[usize], _)| {
                others.len() == own.len() && others.iter().zip(own).all(|(a, b)| same(a, b))
            };
            let place = known.iter().position(like).unwrap_or_else(|| {
                known.push((own, self.last_uses(own)));
                known.len() - 1
            });
            of.insert(*micro_batch, place);
        }
        let mut done: HashMap<u32, usize> = HashMap::new();
        let mut all = Vec::with_capacity(self.instructions.len() * 2);
        for i in &self.instructions {
            all.push(*i);
            let Some(micro_batch) = i.micro_batch() else { continue };
            let done = done.entry(micro_batch).or_default();
            let values = &known[of[&micro_batch]].1[*done];
            all.extend(values.iter().map(|value| Instruction::Free { value: *value, micro_batch }));
            *done += 1;
        }
        self.instructions = all;
    }

    /// By instruction of one micro-batch: the values that no later one uses before it makes them again.
    fn last_uses(&self, own: &[usize]) -> Vec<Vec<ValueId>> {
        let mut unused: HashSet<ValueId> = HashSet::new();
        let last = |at: &usize| {
            let mut last = Vec::new();
            self.values_of(&self.instructions[*at], |value, _, access| {
                if unused.insert(value) {
                    last.push(value);
                }
                // Earlier uses are of the value as it was computed before.
                if access == Access::Make {
                    unused.remove(&value);
                }
            });
            last.reverse();
            last
        };
        let mut all: Vec<Vec<ValueId>> = own.iter().rev().map(last).collect();
        all.reverse();
        all
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
