//! The address of a tensor in a peer's Program, and its name from one Program to the next.

use std::fmt;

use fusionllm_graph::{ValueId, ValueKind};
use serde::{Deserialize, Serialize};

use crate::Program;
use crate::optimizer::Optimizer;

/// The address of a tensor on a peer. It names a place in that peer's Program, and a message in which the tensor goes
/// from one peer to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Address {
    /// A value of one micro-batch: an input, an activation or a gradient.
    Value {
        /// The value.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// A part of a parameter's gradient, summed over one peer's micro-batches.
    Part {
        /// The parameter.
        parameter: ValueId,
        /// Index in [`Reduction::parts`](crate::Reduction::parts).
        part: u32,
    },
    /// A parameter's complete gradient: the sum of its parts.
    Gradient {
        /// The parameter.
        parameter: ValueId,
    },
    /// A parameter, buffer or constant. It stays from pass to pass.
    Held {
        /// The parameter, buffer or constant.
        value: ValueId,
    },
    /// One slot of an owned parameter's optimizer state. It stays from pass to pass.
    OptimizerState {
        /// The parameter.
        parameter: ValueId,
        /// Index in [`Optimizer::slots`].
        slot: u32,
    },
    /// The content of a buffer after a micro-batch, in a message. It goes to the peer that runs the next micro-batch,
    /// and after the last one to all other peers that keep the buffer. A peer that receives it writes it to
    /// [`Self::Held`].
    BufferAfter {
        /// The buffer.
        buffer: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
}

impl Address {
    /// The value whose type the tensor has.
    pub fn value(self) -> ValueId {
        match self {
            Self::Value { value: v, .. }
            | Self::Part { parameter: v, .. }
            | Self::Gradient { parameter: v }
            | Self::Held { value: v }
            | Self::OptimizerState { parameter: v, .. }
            | Self::BufferAfter { buffer: v, .. } => v,
        }
    }

    /// The micro-batch that the tensor belongs to, if any.
    pub fn micro_batch(self) -> Option<u32> {
        match self {
            Self::Value { micro_batch, .. } | Self::BufferAfter { micro_batch, .. } => Some(micro_batch),
            _ => None,
        }
    }

    /// The same tensor of another micro-batch. One that belongs to none stays as it is.
    pub fn of_micro_batch(mut self, other: u32) -> Self {
        if let Self::Value { micro_batch, .. } | Self::BufferAfter { micro_batch, .. } = &mut self {
            *micro_batch = other;
        }
        self
    }

    /// The place on a peer where the tensor of a message is.
    pub fn place(self) -> Self {
        match self {
            Self::BufferAfter { buffer: value, .. } => Self::Held { value },
            place => place,
        }
    }

    /// Whether the tensor stays from pass to pass.
    pub fn stays(self) -> bool {
        matches!(self, Self::Held { .. } | Self::OptimizerState { .. })
    }
}

/// Says what kind of tensor it is, as pictures show it. Its name is in the program.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value { micro_batch, .. } => write!(f, "micro-batch {micro_batch}"),
            Self::Part { part, .. } => write!(f, "part {part} of a gradient"),
            Self::Gradient { .. } => f.write_str("gradient"),
            Self::Held { .. } => f.write_str("parameter"),
            Self::OptimizerState { slot, .. } => write!(f, "slot {slot} of optimizer state"),
            Self::BufferAfter { micro_batch, .. } => write!(f, "buffer after micro-batch {micro_batch}"),
        }
    }
}

/// The name of a tensor that stays from pass to pass: a parameter, buffer or constant, or one slot of a parameter's
/// optimizer state. Unlike an [`Address`], it is the same in every Plan for a graph.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TensorKey {
    /// The parameter, buffer or constant.
    pub name: String,
    /// The slot, for optimizer state.
    pub slot: Option<String>,
}

impl TensorKey {
    /// A parameter, buffer or constant.
    pub fn value(name: impl Into<String>) -> Self {
        Self { name: name.into(), slot: None }
    }

    /// A slot of a parameter's optimizer state.
    pub fn slot(name: impl Into<String>, slot: impl Into<String>) -> Self {
        Self { name: name.into(), slot: Some(slot.into()) }
    }
}

impl From<&str> for TensorKey {
    fn from(name: &str) -> Self {
        Self::value(name)
    }
}

impl From<&String> for TensorKey {
    fn from(name: &String) -> Self {
        Self::value(name)
    }
}

impl fmt::Display for TensorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.slot {
            None => write!(f, "{:?}", self.name),
            Some(slot) => write!(f, "{slot} of {:?}", self.name),
        }
    }
}

impl Program {
    /// The name of a tensor that stays from pass to pass. `None` for other tensors, and if the program or the optimizer
    /// does not have it.
    pub fn key(&self, tensor: Address, optimizer: Optimizer) -> Option<TensorKey> {
        let name = &self.values.get(&tensor.value())?.name;
        match tensor {
            Address::Held { .. } => Some(TensorKey::value(name)),
            Address::OptimizerState { slot, .. } => {
                optimizer.slots().get(slot as usize).map(|slot| TensorKey::slot(name, *slot))
            }
            _ => None,
        }
    }

    /// The place of an operand in a micro-batch. `None` for the key of random numbers, which is computed where it is
    /// needed, and if the program does not have the value.
    pub fn operand(&self, value: ValueId, micro_batch: u32) -> Option<Address> {
        match self.values.get(&value)?.kind {
            ValueKind::RngKey => None,
            ValueKind::Parameter(_) | ValueKind::Frozen(_) | ValueKind::Buffer(_) | ValueKind::Constant => {
                Some(Address::Held { value })
            }
            ValueKind::Input | ValueKind::Result { .. } => Some(Address::Value { value, micro_batch }),
        }
    }

    /// Bytes of a tensor; 0 if the program does not have it.
    pub fn bytes(&self, tensor: Address) -> u64 {
        self.values.get(&tensor.value()).map_or(0, |v| v.ty.bytes() as u64)
    }
}
