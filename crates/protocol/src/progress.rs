//! How far a run has come.

use serde::{Deserialize, Serialize};

/// How far training has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainingProgress {
    /// Batches trained on.
    pub step: u64,
    /// Updates applied. Steps whose gradients were not finite apply none.
    pub updates: u64,
}
