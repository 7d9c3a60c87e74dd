//! The actions that the broker's machines ask of their driver, and the records that they report.

use fusionllm_plan::{Cluster, PassKind};

use crate::{MemberId, Notice, Order, PassReport, ToPeer, TrainingProgress};

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
    /// One number per report of the program. The first is the loss, a mean over all targets. The others are sums
    /// divided by the number of targets.
    pub means: Vec<f64>,
}

/// An action for the broker's driver.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
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
    /// The generation is over, as [`GenerationMachine::drain`](crate::GenerationMachine::drain) asked. The peers
    /// were asked for a cut here.
    Drained(TrainingProgress),
    /// Forget the checkpoint in progress.
    AbandonCheckpoint(u64),
    /// Close a member's connection, after what was sent to it.
    Dismiss(MemberId),
    /// Make a plan for these members, and call [`Run::planned`](crate::Run::planned) or
    /// [`Run::not_planned`](crate::Run::not_planned).
    Plan {
        /// The members.
        members: Vec<MemberId>,
        /// Their machines and links, if they are measured: device `i` is member `i` of the list.
        cluster: Option<Cluster>,
        /// Sentences about them.
        notes: Vec<String>,
    },
    /// Training goes back, so the records of later steps are void.
    Rewind(TrainingProgress),
    /// Write [`Run::state`](crate::Run::state) to the disk before the next action.
    Persist,
    /// A generation begins: send every member its assignment.
    Assign(Order),
    /// Put a member out for this reason. [`Run`](crate::Run) does it.
    Expel(MemberId, String),
    /// Tell people about this.
    Notice(Notice),
    /// The run is complete.
    Finish(TrainingProgress),
    /// The run failed for this reason.
    Fail(String),
}
