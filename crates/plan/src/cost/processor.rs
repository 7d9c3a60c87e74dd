//! A processor that several devices compute on.

use serde::{Deserialize, Serialize};

/// A processor, and what one device takes of it. Devices whose processors have the same name share it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Processor {
    /// The name that its devices share.
    pub name: String,
    /// Its cores.
    pub cores: f64,
    /// The cores that the device keeps busy while it computes.
    pub busy: f64,
    /// How many times as long operators take while all cores are busy, since these share caches and the bus to memory.
    /// It is at least 1.
    pub crowded: f64,
}

impl Processor {
    /// How many times as long operators take while `busy` cores are busy. A device that has the processor to itself
    /// needs the time that was measured. Beyond the number of cores, devices divide them.
    pub(crate) fn times_longer(&self, busy: f64) -> f64 {
        let others = self.cores - self.busy;
        let crowd = if others > 0.0 { ((busy - self.busy) / others).clamp(0.0, 1.0) } else { 0.0 };
        (1.0 + (self.crowded - 1.0) * crowd) * (busy / self.cores).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_take_longer_as_cores_fill_and_then_divide_them() {
        let processor = Processor { name: "pc".into(), cores: 4.0, busy: 1.0, crowded: 1.5 };
        let longer = [0.5, 1.0, 2.5, 4.0, 8.0].map(|busy| processor.times_longer(busy));
        assert_eq!(longer, [1.0, 1.0, 1.25, 1.5, 3.0]);
        let all = Processor { busy: 4.0, ..processor };
        assert_eq!([4.0, 8.0].map(|busy| all.times_longer(busy)), [1.0, 2.0]);
    }
}
