//! Tensors that leave the device's memory for a while.

use std::collections::BTreeMap;
use std::fmt;

use fusionllm_graph::ValueId;
use serde::{Deserialize, Serialize};

use super::{Instruction, Program};

/// Where a tensor is while it is not in the device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Medium {
    /// The memory of the device's host, if the device has memory of its own.
    Host,
    /// The peer's disk.
    Disk,
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host memory",
            Self::Disk => "disk",
        })
    }
}

/// A tensor that can leave the device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Movable {
    /// A value of one micro-batch.
    Value {
        /// The value.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// A part of a parameter's gradient, while it is summed.
    Part {
        /// Index in [`Program::reductions`].
        reduction: u32,
        /// Index in [`Reduction::parts`](super::Reduction::parts).
        part: u32,
    },
    /// A complete gradient, until it is applied.
    Gradient {
        /// Index in [`Program::reductions`].
        reduction: u32,
    },
    /// A parameter. Between passes it is away.
    Parameter {
        /// The parameter.
        parameter: ValueId,
    },
    /// A slot of an owned parameter's optimizer state. Between passes it is away.
    Slot {
        /// Index in [`Program::reductions`].
        reduction: u32,
        /// Index of the optimizer's slot.
        slot: u32,
    },
}

impl Movable {
    /// Whether the tensor stays from pass to pass.
    pub fn is_state(self) -> bool {
        matches!(self, Self::Parameter { .. } | Self::Slot { .. })
    }
}

/// Bytes that a peer has outside its device's memory, by what they are. Each is the most at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OffloadedBytes {
    /// Optimizer state.
    pub optimizer: u64,
    /// Gradients and their sums.
    pub gradients: u64,
    /// Activations of micro-batches between forward and backward.
    pub activations: u64,
    /// Parameters.
    pub parameters: u64,
}

impl OffloadedBytes {
    /// All of them. No more are ever away at once.
    pub fn total(&self) -> u64 {
        let kinds = [self.optimizer, self.gradients, self.activations, self.parameters];
        kinds.into_iter().fold(0, u64::saturating_add)
    }

    fn of(&mut self, what: Movable) -> &mut u64 {
        match what {
            Movable::Value { .. } => &mut self.activations,
            Movable::Part { .. } | Movable::Gradient { .. } => &mut self.gradients,
            Movable::Parameter { .. } => &mut self.parameters,
            Movable::Slot { .. } => &mut self.optimizer,
        }
    }
}

impl Program {
    /// The value whose type a movable tensor has. `None` if the program does not have it.
    pub fn movable_value(&self, what: Movable) -> Option<ValueId> {
        match what {
            Movable::Value { value: v, .. } | Movable::Parameter { parameter: v } => Some(v),
            Movable::Part { reduction, .. } | Movable::Gradient { reduction } | Movable::Slot { reduction, .. } => {
                self.reductions.get(reduction as usize).map(|r| r.parameter)
            }
        }
    }

    /// Bytes of a movable tensor; 0 if the program does not have it.
    pub fn movable_bytes(&self, what: Movable) -> u64 {
        let value = self.movable_value(what).and_then(|v| self.values.get(&v));
        value.map_or(0, |v| v.ty.bytes() as u64)
    }

    /// The parameters and slots that are away between passes.
    pub fn resting(&self) -> BTreeMap<Movable, Medium> {
        let moves = self.instructions.iter().filter_map(|i| match *i {
            Instruction::Offload { what, to } if what.is_state() => Some((what, to)),
            _ => None,
        });
        moves.collect()
    }

    /// Bytes that stay in memory from pass to pass. `slots` is the number of optimizer slots of a parameter.
    pub fn kept_bytes(&self, slots: usize) -> u64 {
        let bytes = |v: ValueId| self.values.get(&v).map_or(0, |v| v.ty.bytes() as u64);
        let held = self.holdings.iter().fold(0u64, |sum, h| sum.saturating_add(bytes(h.value)));
        let state = |sum: u64, v: ValueId| sum.saturating_add(bytes(v).saturating_mul(slots as u64));
        let all = self.owned().fold(held, |sum, (_, r)| state(sum, r.parameter));
        self.resting().keys().fold(all, |sum, what| sum.saturating_sub(self.movable_bytes(*what)))
    }

    /// Bytes that the program has on `medium`.
    pub fn offloaded_bytes(&self, medium: Medium) -> OffloadedBytes {
        let mut now = OffloadedBytes::default();
        for (what, _) in self.resting().into_iter().filter(|(_, to)| *to == medium) {
            *now.of(what) = now.of(what).saturating_add(self.movable_bytes(what));
        }
        let mut most = now;
        for i in &self.instructions {
            // What stays from pass to pass keeps its place outside while it is in memory.
            match *i {
                Instruction::Offload { what, to } if to == medium && !what.is_state() => {
                    *now.of(what) = now.of(what).saturating_add(self.movable_bytes(what));
                    *most.of(what) = (*now.of(what)).max(*most.of(what));
                }
                Instruction::Load { what, from } if from == medium && !what.is_state() => {
                    *now.of(what) = now.of(what).saturating_sub(self.movable_bytes(what));
                }
                _ => {}
            }
        }
        most
    }
}
