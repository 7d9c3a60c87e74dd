//! Stretches of a Program that do for one micro-batch what they did for an earlier one.

use std::ops::Range;

use foldhash::{HashMap, HashMapExt};
use fusionllm_program::{Instruction, Program};

/// A stretch that was met: consecutive instructions of one micro-batch.
struct Known<T> {
    range: Range<usize>,
    /// The caller's result for it. `None` if it does something that later micro-batches do not do, such as beginning a
    /// sum.
    found: Option<T>,
}

/// The stretches of a Program as they are met, from its first instruction to its last, with what was found out about
/// each. That is the same for every micro-batch that comes to a stretch in the same way.
pub(super) struct Stretches<'a, T> {
    instructions: &'a [Instruction],
    known: Vec<Known<T>>,
    /// The stretches that came after each stretch of the same micro-batch; those that came first, after `None`.
    after: HashMap<Option<usize>, Vec<usize>>,
    /// By micro-batch: its last stretch. What a stretch does follows from those before it.
    last: HashMap<u32, usize>,
    /// Whether nothing that a stretch does for one micro-batch depends on what others did, but for sums that begin.
    repeats: bool,
}

impl<'a, T> Stretches<'a, T> {
    pub(super) fn new(program: &'a Program) -> Self {
        // A tensor that is offloaded need not be copied if another micro-batch has loaded it and changed nothing.
        let moves = |i: &Instruction| matches!(i, Instruction::Offload { .. } | Instruction::Load { .. });
        Self {
            instructions: &program.instructions,
            known: Vec::new(),
            after: HashMap::new(),
            last: HashMap::new(),
            repeats: !program.instructions.iter().any(moves),
        }
    }

    /// The same stretches, of which none counts as a repetition.
    #[cfg(test)]
    pub(super) fn never_repeated(self) -> Self {
        Self { repeats: false, ..self }
    }

    /// The stretch that begins here.
    pub(super) fn starting_at(&self, at: usize) -> Range<usize> {
        let of = self.instructions[at].micro_batch();
        let length = self.instructions[at..].iter().take_while(|i| i.micro_batch() == of).count();
        at..at + length
    }

    /// The micro-batch of a stretch, and what was found out about an earlier one that does the same. `None` if there is
    /// none.
    pub(super) fn repeated(&mut self, range: &Range<usize>) -> Option<(u32, &T)> {
        let micro_batch = self.micro_batch(range)?;
        let before = self.last.get(&micro_batch).copied();
        let like = |known: &usize| {
            let Known { range: other, found } = &self.known[*known];
            let (ours, theirs) = (&self.instructions[range.clone()], &self.instructions[other.clone()]);
            found.is_some()
                && ours.len() == theirs.len()
                && ours.iter().zip(theirs).all(|(a, b)| *a == b.of_micro_batch(micro_batch))
        };
        let known = self.after.get(&before)?.iter().copied().find(like)?;
        self.last.insert(micro_batch, known);
        Some((micro_batch, self.known[known].found.as_ref()?))
    }

    /// Remembers a stretch that repeats none.
    pub(super) fn remember(&mut self, range: Range<usize>, found: Option<T>) {
        let Some(micro_batch) = self.micro_batch(&range) else { return };
        let known = self.known.len();
        self.after.entry(self.last.insert(micro_batch, known)).or_default().push(known);
        self.known.push(Known { range, found });
    }

    /// The micro-batch of a stretch that may repeat another one.
    fn micro_batch(&self, range: &Range<usize>) -> Option<u32> {
        self.instructions[range.start].micro_batch().filter(|_| self.repeats)
    }
}
