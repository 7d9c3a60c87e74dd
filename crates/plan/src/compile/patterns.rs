//! The instructions of micro-batches, written once for all that have the same done to them.

use std::collections::BTreeMap;

use foldhash::{HashMap, HashMapExt};
use fusionllm_program::{Instruction, PeerId};

use super::compiler::{Compiler, Pass};
use super::emit::Emitter;
use super::tasks::Task;
use super::uses::Uses;
use crate::schedule::TaskKind;

/// The tasks that a peer runs for a micro-batch, in order, and the turn of the micro-batch.
type Sequence = (u32, Vec<(TaskKind, u32)>);

/// The instructions of a peer's tasks, in order.
pub(super) fn instructions(
    c: &Compiler<'_>,
    peer: PeerId,
    uses: &Uses,
    passes: &BTreeMap<(TaskKind, u32), Pass>,
    tasks: &[Task],
) -> Vec<Instruction> {
    let mut sequences: HashMap<u32, Sequence> = HashMap::new();
    for task in tasks.iter().filter(|task| c.repeats(task.micro_batch)) {
        let new = || (c.turn(task.micro_batch), Vec::new());
        sequences.entry(task.micro_batch).or_insert_with(new).1.push((task.kind, task.stage));
    }
    // By sequence: the instructions of each of its tasks.
    let mut patterns: HashMap<&Sequence, Vec<Vec<Instruction>>> = HashMap::new();
    for (&micro_batch, sequence) in &sequences {
        patterns.entry(sequence).or_insert_with(|| {
            let mut alone = Emitter::new(c, peer, uses);
            let of_task = |task| {
                passes.get(task).into_iter().for_each(|pass| alone.pass(pass, micro_batch));
                std::mem::take(&mut alone.out)
            };
            sequence.1.iter().map(of_task).collect()
        });
    }
    let mut emitter = Emitter::new(c, peer, uses);
    let mut done: HashMap<u32, usize> = HashMap::new();
    for Task { kind, stage, micro_batch } in tasks {
        match sequences.get(micro_batch) {
            Some(sequence) => {
                let done = done.entry(*micro_batch).or_default();
                emitter.out.extend(patterns[sequence][*done].iter().map(|i| i.of_micro_batch(*micro_batch)));
                *done += 1;
            }
            None => passes.get(&(*kind, *stage)).into_iter().for_each(|pass| emitter.pass(pass, *micro_batch)),
        }
    }
    if c.plan.used().contains(&peer) {
        emitter.finish_pass(c.kind);
    }
    emitter.out
}
