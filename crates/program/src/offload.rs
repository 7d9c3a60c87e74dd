//! Tensors that leave the device's memory for a while.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Address, Instruction, Program};

/// The place of a tensor while it is not in the device's memory.
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

/// Bytes that a peer has outside its device's memory, by kind of tensor. Each figure is the most at one time.
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
    /// The sum of all kinds. No more bytes are ever away at once.
    pub fn total(&self) -> u64 {
        let kinds = [self.optimizer, self.gradients, self.activations, self.parameters];
        kinds.into_iter().fold(0, u64::saturating_add)
    }

    fn of(&mut self, tensor: Address) -> &mut u64 {
        match tensor {
            Address::Value { .. } | Address::BufferAfter { .. } => &mut self.activations,
            Address::Part { .. } | Address::Gradient { .. } => &mut self.gradients,
            Address::Held { .. } => &mut self.parameters,
            Address::OptimizerState { .. } => &mut self.optimizer,
        }
    }
}

impl Program {
    /// The parameters and optimizer state that are away between passes.
    pub fn resting(&self) -> BTreeMap<Address, Medium> {
        let moves = self.instructions.iter().filter_map(|i| match *i {
            Instruction::Offload { tensor, to } if tensor.stays() => Some((tensor, to)),
            _ => None,
        });
        moves.collect()
    }

    /// Bytes that stay in memory from pass to pass. `slots` is the number of optimizer slots of a parameter.
    pub fn kept_bytes(&self, slots: usize) -> u64 {
        let held = self.holdings.iter().map(|h| self.bytes(Address::Held { value: h.value }));
        let slot = |parameter| self.bytes(Address::OptimizerState { parameter, slot: 0 });
        let state = self.owned().map(|(parameter, _)| slot(parameter).saturating_mul(slots as u64));
        let all = held.chain(state).fold(0, u64::saturating_add);
        self.resting().keys().fold(all, |sum, tensor| sum.saturating_sub(self.bytes(*tensor)))
    }

    /// Bytes that the program has on `medium`.
    pub fn offloaded_bytes(&self, medium: Medium) -> OffloadedBytes {
        let mut now = OffloadedBytes::default();
        for (tensor, _) in self.resting().into_iter().filter(|(_, to)| *to == medium) {
            *now.of(tensor) = now.of(tensor).saturating_add(self.bytes(tensor));
        }
        let mut most = now;
        for i in &self.instructions {
            // A tensor that stays from pass to pass keeps its place outside while it is in memory.
            match *i {
                Instruction::Offload { tensor, to } if to == medium && !tensor.stays() => {
                    *now.of(tensor) = now.of(tensor).saturating_add(self.bytes(tensor));
                    *most.of(tensor) = (*now.of(tensor)).max(*most.of(tensor));
                }
                Instruction::Load { tensor, from } if from == medium && !tensor.stays() => {
                    *now.of(tensor) = now.of(tensor).saturating_sub(self.bytes(tensor));
                }
                _ => {}
            }
        }
        most
    }
}
