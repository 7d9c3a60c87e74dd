//! The actions that the machine of a generation asks for, and the records that it reports.

use fusionllm_program::PassKind;

use crate::{MemberId, Notice, PassReport, ToPeer, TrainingProgress};

/// The batch of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchId {
    /// A training batch.
    Train {
        /// Batches trained on before it.
        step: u64,
    },
    /// A batch of the evaluation after `step` steps.
    Eval {
        /// Batches trained on before the evaluation.
        step: u64,
        /// Index of the pass within the evaluation.
        index: u64,
    },
}

impl BatchId {
    /// The kind of the pass.
    pub fn kind(self) -> PassKind {
        match self {
            Self::Train { .. } => PassKind::Train,
            Self::Eval { .. } => PassKind::Eval,
        }
    }

    /// Batches trained on before the pass.
    pub fn step(self) -> u64 {
        match self {
            Self::Train { step } | Self::Eval { step, .. } => step,
        }
    }
}

/// A completed training step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepRecord {
    /// Batches trained on, including this one.
    pub step: u64,
    /// Version of the plan that the step used.
    pub version: u32,
    /// The batch's loss.
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Whether the update was applied. It is skipped if the loss or the gradient is not finite.
    pub applied: bool,
    /// Seconds since the previous step ended, or since the start. Evaluations do not count.
    pub step_s: f64,
    /// Bytes of tensors sent between peers.
    pub bytes_sent: u64,
    /// Each peer's report, indexed by peer.
    pub peers: Vec<PassReport>,
}

/// A completed evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalRecord {
    /// Batches trained on before it.
    pub step: u64,
    /// One number per report of the program, each a weighted sum over all micro-batches: see
    /// [`GenerationMachine::set_weights`](crate::GenerationMachine::set_weights).
    pub means: Vec<f64>,
}

/// An action that a generation asks of its run.
#[derive(Debug, Clone, PartialEq)]
pub enum GenerationAction {
    /// Send a message to a member.
    Send(MemberId, ToPeer),
    /// Stream the batch of the pass with this number to the peers that read it, and call
    /// [`GenerationMachine::set_weights`](crate::GenerationMachine::set_weights).
    Feed(u64, BatchId),
    /// Record a completed step.
    Step(StepRecord),
    /// Record a completed evaluation.
    Evaluated(EvalRecord),
    /// The peers were asked for a cut at this step.
    Cut(u64),
    /// Expect snapshots of this step.
    BeginCheckpoint(u64),
    /// All snapshots have arrived: complete the checkpoint, and call
    /// [`GenerationMachine::checkpoint_committed`](crate::GenerationMachine::checkpoint_committed).
    Commit(TrainingProgress),
    /// A member contradicts itself for this reason: put it out, or fail if it is the last one. The generation is over.
    Expel(MemberId, String),
    /// Tell people about this.
    Notice(Notice),
    /// The generation is over, as [`GenerationMachine::drain`](crate::GenerationMachine::drain) asked. The peers
    /// were asked for a cut here.
    Drained(TrainingProgress),
    /// The run is complete.
    Finish(TrainingProgress),
    /// The run failed for this reason.
    Fail(String),
}
