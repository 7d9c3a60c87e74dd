//! A disk to which tensors are offloaded.

use serde::{Deserialize, Serialize};

use super::measured::CopyDirection;

/// The bytes/s of a disk in each direction.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Disk {
    /// Bytes/s that it reads.
    pub read: f64,
    /// Bytes/s that it writes.
    pub write: f64,
}

impl Disk {
    /// A disk that was not measured: about a SATA solid-state drive.
    pub const UNKNOWN: Self = Self::new(5e8);

    /// A disk with the same rate in both directions.
    pub const fn new(rate: f64) -> Self {
        Self { read: rate, write: rate }
    }

    /// Whether nothing is known of it.
    pub fn is_unknown(&self) -> bool {
        *self == Self::UNKNOWN
    }

    /// The bytes/s of tensors that leave the device's memory or return to it.
    pub(super) fn rate(self, direction: CopyDirection) -> f64 {
        match direction {
            CopyDirection::Download => self.write,
            CopyDirection::Upload => self.read,
        }
    }

    /// The bytes/s of tensors that leave and return equally often.
    pub(super) fn to_and_fro(self) -> f64 {
        2.0 / (1.0 / self.read + 1.0 / self.write)
    }
}

impl Default for Disk {
    fn default() -> Self {
        Self::UNKNOWN
    }
}
