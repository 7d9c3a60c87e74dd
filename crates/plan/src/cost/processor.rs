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
    /// How many times as long operators take in a crowd that would keep so many cores busy, since its members share
    /// caches and the bus to memory. What they wait for a core is counted apart.
    pub crowded: f64,
    /// The cores that this crowd would keep busy.
    pub crowd: f64,
}

impl Processor {
    /// How many times as long operators take while computing devices would keep `busy` cores busy. A device that has the
    /// processor to itself needs the time that was measured. Beyond the number of cores, devices divide them.
    pub(crate) fn times_longer(&self, busy: f64) -> f64 {
        let others = self.crowd - self.busy;
        let share = if others > 0.0 { ((busy - self.busy) / others).clamp(0.0, 1.0) } else { 0.0 };
        (1.0 + (self.crowded - 1.0) * share) * (busy / self.cores).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_take_longer_in_a_crowd_and_divide_the_cores() {
        let processor = Processor { name: "pc".into(), cores: 2.0, busy: 1.0, crowded: 1.75, crowd: 4.0 };
        let longer = [0.5, 1.0, 2.0, 4.0, 8.0].map(|busy| processor.times_longer(busy));
        assert_eq!(longer, [1.0, 1.0, 1.25, 3.5, 7.0]);
        let all = Processor { busy: 4.0, cores: 4.0, ..processor };
        assert_eq!([4.0, 8.0].map(|busy| all.times_longer(busy)), [1.0, 2.0]);
    }
}
