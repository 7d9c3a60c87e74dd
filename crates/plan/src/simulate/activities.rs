//! The activity of a peer at each of its instructions.

use fusionllm_graph::Phase;
use fusionllm_program::{Address, Instruction, Program};

use super::Activity;

/// The activities of a peer, whose instructions are given in their order.
pub(super) struct Activities {
    /// By node number less the first.
    phases: Vec<Phase>,
    first_node: u32,
    /// By micro-batch.
    backward_begun: Vec<bool>,
    last: (Activity, Option<u32>),
}

impl Activities {
    pub(super) fn new(program: &Program) -> Self {
        let first_node = program.nodes.keys().next().map_or(0, |n| n.0);
        let nodes = program.nodes.keys().next_back().map_or(0, |n| (n.0 - first_node) as usize + 1);
        let mut phases = vec![Phase::Forward; nodes];
        for (id, node) in &program.nodes {
            phases[(id.0 - first_node) as usize] = node.phase;
        }
        let backward_begun = vec![false; program.micro_batches as usize];
        Self { phases, first_node, backward_begun, last: (Activity::Forward, None) }
    }

    /// The activity that the next instruction belongs to, and its micro-batch, if it is for one. Instructions may be
    /// left out if backward of their micro-batch has begun as [`Self::set_begun`] says.
    pub(super) fn of(&mut self, instruction: &Instruction) -> (Activity, Option<u32>) {
        self.last = match *instruction {
            Instruction::Receive { tensor, .. } | Instruction::Send { tensor, .. } => {
                let activity = match tensor {
                    Address::Value { micro_batch, .. } if self.has_begun(micro_batch) => Activity::Backward,
                    Address::Value { .. } | Address::BufferAfter { .. } => Activity::Forward,
                    _ => Activity::Update,
                };
                (activity, tensor.micro_batch())
            }
            Instruction::Run { node, micro_batch } => {
                let place = node.0.checked_sub(self.first_node).map(|place| place as usize);
                let phase = place.and_then(|place| self.phases.get(place).copied()).unwrap_or(Phase::Forward);
                let activity = match phase {
                    // This is a forward node that backward runs again.
                    Phase::Forward if self.has_begun(micro_batch) => Activity::Backward,
                    Phase::Forward => Activity::Forward,
                    Phase::InputGrad => Activity::Backward,
                    Phase::WeightGrad => Activity::WeightGrad,
                };
                if phase != Phase::Forward {
                    self.set_begun(micro_batch, true);
                }
                (activity, Some(micro_batch))
            }
            Instruction::Accumulate { micro_batch, .. } => (Activity::WeightGrad, Some(micro_batch)),
            Instruction::Join { .. } => (Activity::WeightGrad, None),
            Instruction::Reduce { .. } | Instruction::Clip | Instruction::Update { .. } => (Activity::Update, None),
            Instruction::Offload { tensor, .. } | Instruction::Load { tensor, .. } => {
                (Activity::Offload, tensor.micro_batch())
            }
            // These take no time of their own.
            Instruction::Free { .. } | Instruction::UpdateState { .. } | Instruction::Report { .. } => self.last,
        };
        self.last
    }

    /// Whether backward of this micro-batch has begun.
    pub(super) fn has_begun(&self, micro_batch: u32) -> bool {
        self.backward_begun.get(micro_batch as usize).is_some_and(|begun| *begun)
    }

    pub(super) fn set_begun(&mut self, micro_batch: u32, has_begun: bool) {
        self.backward_begun.get_mut(micro_batch as usize).into_iter().for_each(|begun| *begun = has_begun);
    }
}

/// The activity that each instruction of a training program belongs to, and its micro-batch, if it is for one.
pub fn activities(program: &Program) -> Vec<(Activity, Option<u32>)> {
    let mut activities = Activities::new(program);
    program.instructions.iter().map(|instruction| activities.of(instruction)).collect()
}
