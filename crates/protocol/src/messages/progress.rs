//! The progress of a run.

use serde::{Deserialize, Serialize};

/// The progress of training.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainingProgress {
    /// Batches trained on.
    pub step: u64,
    /// Updates applied. Steps whose gradients were not finite apply none.
    pub updates: u64,
}
