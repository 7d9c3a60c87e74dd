//! The activity of a peer at each of its instructions.

use fusionllm_graph::Phase;
use fusionllm_program::{Address, Instruction, Program};

use super::Activity;

/// The activity that each instruction of a training program belongs to, and its micro-batch, if it is for one.
pub fn activities(program: &Program) -> Vec<(Activity, Option<u32>)> {
    let mut backward_begun = vec![false; program.micro_batches as usize];
    // By node number less the first.
    let first = program.nodes.keys().next().map_or(0, |n| n.0);
    let mut phases = vec![Phase::Forward; program.nodes.keys().next_back().map_or(0, |n| (n.0 - first) as usize + 1)];
    for (id, node) in &program.nodes {
        phases[(id.0 - first) as usize] = node.phase;
    }
    let mut last = (Activity::Forward, None);
    let mut of = |instruction: &Instruction| {
        last = match *instruction {
            Instruction::Receive { tensor, .. } | Instruction::Send { tensor, .. } => {
                let activity = match tensor {
                    Address::Value { micro_batch, .. } => match backward_begun.get(micro_batch as usize) {
                        Some(true) => Activity::Backward,
                        _ => Activity::Forward,
                    },
                    Address::BufferAfter { .. } => Activity::Forward,
                    _ => Activity::Update,
                };
                (activity, tensor.micro_batch())
            }
            Instruction::Run { node, micro_batch } => {
                let place = node.0.checked_sub(first).map(|place| place as usize);
                let phase = place.and_then(|place| phases.get(place).copied()).unwrap_or(Phase::Forward);
                let begun = backward_begun.get_mut(micro_batch as usize);
                let begun = begun.map(|begun| {
                    *begun |= phase != Phase::Forward;
                    *begun
                });
                let activity = match phase {
                    // This is a forward node that backward runs again.
                    Phase::Forward if begun == Some(true) => Activity::Backward,
                    Phase::Forward => Activity::Forward,
                    Phase::InputGrad => Activity::Backward,
                    Phase::WeightGrad => Activity::WeightGrad,
                };
                (activity, Some(micro_batch))
            }
            Instruction::Accumulate { micro_batch, .. } => (Activity::WeightGrad, Some(micro_batch)),
            Instruction::Join { .. } => (Activity::WeightGrad, None),
            Instruction::Reduce { .. } | Instruction::Clip | Instruction::Update { .. } => (Activity::Update, None),
            Instruction::Offload { tensor, .. } | Instruction::Load { tensor, .. } => {
                (Activity::Offload, tensor.micro_batch())
            }
            // These take no time of their own.
            Instruction::Free { .. } | Instruction::UpdateState { .. } | Instruction::Report { .. } => last,
        };
        last
    };
    program.instructions.iter().map(&mut of).collect()
}
