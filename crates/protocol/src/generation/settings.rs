//! The settings of a generation.

use fusionllm_program::LearningRate;

use super::ExpectedReports;
use crate::{MemberId, ToPeer, TrainingProgress};

/// The steps after which the model is evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalSchedule {
    /// Steps between evaluations. There is one after the last step in any case.
    pub steps: u64,
    /// Passes per evaluation, which depend on the plan.
    pub passes: u64,
}

/// A run's settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunSettings {
    /// Version of the plan at the start.
    pub version: u32,
    /// Progress at the start.
    pub start: TrainingProgress,
    /// Steps in total, including those before `start`.
    pub steps: u64,
    /// Micro-batches per pass.
    pub micro_batches: u32,
    /// The schedule of evaluations, if there are any.
    pub eval: Option<EvalSchedule>,
    /// Steps between checkpoints; 0 takes only one at the end, `None` takes none.
    pub checkpoint: Option<u64>,
    /// Most checkpoints on their way to the disk at once, at least 1.
    pub checkpoints_under_way: usize,
    /// The rate of each update.
    pub learning_rate: LearningRate,
    /// Maximum global norm of the gradient; `None` does not clip.
    pub clip: Option<f64>,
    /// Most passes in flight, at least 1.
    pub window: u64,
    /// The number of the last pass of earlier generations.
    pub passes_before: u64,
}

/// A peer, as the broker's state machine knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Participant {
    /// The member.
    pub member: MemberId,
    /// The member's name.
    pub name: String,
    /// The reports and norms that the peer must send.
    pub expected: ExpectedReports,
}

/// New codecs of a run in progress.
#[derive(Debug, Clone, PartialEq)]
pub struct AppliedCodecs {
    /// The version of the plan that has them.
    pub version: u32,
    /// The first step that uses them, counted from 1.
    pub step: u64,
    /// The messages that tell the peers.
    pub messages: Vec<(MemberId, ToPeer)>,
}
