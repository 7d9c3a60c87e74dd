//! The operators of a job's model that a joiner cannot measure.

use std::fmt;

use fusionllm_graph::units::{bytes, counted};

/// Operators of a job's model that are not measured. Predictions estimate them by other operators of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeftOut {
    /// Kinds of operators that were to be measured one after the other.
    pub of: usize,
    /// Kinds that need more memory than the machine gives the run.
    pub too_large: usize,
    /// The most bytes that one of these kinds needs.
    pub needed: u64,
    /// The memory that the machine gives the run, if it is limited.
    pub memory: Option<u64>,
    /// Kinds for which there was no time, as the other joiners wait.
    pub too_slow: usize,
    /// Kinds that the backend cannot compute.
    pub failed: usize,
}

impl LeftOut {
    pub(super) fn new(memory: Option<u64>) -> Self {
        Self { of: 0, too_large: 0, needed: 0, memory, too_slow: 0, failed: 0 }
    }

    /// Kinds of operators that are not measured.
    pub fn count(&self) -> usize {
        self.too_large + self.too_slow + self.failed
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = counted(self.of, "kind");
        write!(f, "{} of {all} of operators could not be measured, so their times are estimated: ", self.count())?;
        let mut reasons = Vec::new();
        if let (Some(memory), true) = (self.memory, self.too_large > 0) {
            let (needed, memory) = (bytes(self.needed), bytes(memory));
            reasons.push(format!("{} need up to {needed} of memory, and the run may use {memory}", self.too_large));
        }
        if self.too_slow > 0 {
            reasons.push(format!("{} would take too long", self.too_slow));
        }
        if self.failed > 0 {
            reasons.push(format!("{} cannot be computed here", self.failed));
        }
        f.write_str(&reasons.join("; "))
    }
}
