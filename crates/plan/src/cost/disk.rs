//! A disk to which tensors are offloaded.

use serde::{Deserialize, Deserializer, Serialize};

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
        // Equal rates give the same number again.
        self.read * 2.0 / (1.0 + self.read / self.write)
    }
}

impl Default for Disk {
    fn default() -> Self {
        Self::UNKNOWN
    }
}

/// Reads a disk from a plan file. Older files have one number for both directions.
pub(super) fn in_plan_file<'de, D: Deserializer<'de>>(file: D) -> Result<Disk, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Rate(f64),
        Disk(Disk),
    }
    Ok(match Written::deserialize(file)? {
        Written::Rate(rate) => Disk::new(rate),
        Written::Disk(disk) => disk,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{Device, Rates};

    #[test]
    fn older_plan_files_have_one_rate() {
        let rates = Rates { matmul: 1.0, convolution: 1.0, memory: 1.0, overhead: 0.0 };
        let device = Device { disk: Disk { read: 3e9, write: 1e9 }, ..Device::new("a", rates, 1) };
        let mut written = serde_json::to_value(&device).unwrap();
        assert_eq!(serde_json::from_value::<Device>(written.clone()).unwrap(), device);
        written["disk"] = 2e9.into();
        let older = serde_json::from_value::<Device>(written).unwrap();
        assert_eq!(older.disk, Disk::new(2e9));
        assert_eq!(older.disk.to_and_fro(), 2e9);
    }

    #[test]
    fn a_byte_that_leaves_and_returns_waits_for_both() {
        let disk = Disk { read: 3e9, write: 1e9 };
        assert_eq!([CopyDirection::Download, CopyDirection::Upload].map(|to| disk.rate(to)), [1e9, 3e9]);
        assert!((disk.to_and_fro() / 1.5e9 - 1.0).abs() < 1e-12);
    }
}
