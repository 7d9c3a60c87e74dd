//! Programs: each peer's share of a Plan, as the list of instructions that it runs in one pass.

mod check;
mod display;
mod pass;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use fusionllm_compress::{Codec, HEADER, exact_bytes};
use fusionllm_graph::{Node, NodeId, TensorType, Value, ValueId};
use serde::{Deserialize, Serialize};

pub use pass::{PASSES_IN_FLIGHT, PassKind, PerPass};

use crate::error::PlanError;

/// Index of a peer in [`Plan::peers`](crate::Plan::peers); [`PeerId::BROKER`] is the machine with the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PeerId(pub u32);

impl PeerId {
    /// The broker.
    pub const BROKER: Self = Self(u32::MAX);
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::BROKER => f.write_str("broker"),
            Self(p) => write!(f, "peer {p}"),
        }
    }
}

/// What one message between peers carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Slot {
    /// A value of one micro-batch: an input, an activation or a gradient.
    Value {
        /// The value.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// A part of a parameter's gradient, summed over the sender's micro-batches.
    Part {
        /// The parameter.
        parameter: ValueId,
        /// Index in [`Reduction::parts`].
        part: u32,
    },
    /// A parameter's new value, from its owner to its other holders.
    Parameter {
        /// The parameter.
        parameter: ValueId,
    },
    /// What a micro-batch left in a buffer that forward changes: for the peer that runs the next one, or, after the last, for all others that keep it.
    Buffer {
        /// The buffer.
        buffer: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
}

impl Slot {
    /// The value whose type the message has.
    pub fn value(self) -> ValueId {
        match self {
            Self::Value { value: v, .. }
            | Self::Part { parameter: v, .. }
            | Self::Parameter { parameter: v }
            | Self::Buffer { buffer: v, .. } => v,
        }
    }
}

/// One thing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Instruction {
    /// Waits for a message.
    Receive {
        /// What it carries.
        slot: Slot,
        /// Who sends it.
        from: PeerId,
    },
    /// Runs a node.
    Run {
        /// The node.
        node: NodeId,
        /// On which micro-batch's values.
        micro_batch: u32,
    },
    /// Hands a message to the network and goes on.
    Send {
        /// What it carries.
        slot: Slot,
        /// Who gets it.
        to: PeerId,
    },
    /// Gives up a value; nothing reads it any more.
    Free {
        /// The value.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Adds a value to a part of a parameter's gradient.
    Accumulate {
        /// Index in [`Program::reductions`].
        reduction: u32,
        /// Index in [`Reduction::parts`].
        part: u32,
        /// What is added.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Leaves a value in a buffer.
    UpdateState {
        /// The buffer.
        buffer: ValueId,
        /// Its new content.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Tells the broker a scalar.
    Report {
        /// Index in [`Program::reports`].
        report: u32,
        /// The scalar.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Adds a parameter's parts in order into its gradient.
    Reduce {
        /// Index in [`Program::reductions`].
        reduction: u32,
    },
    /// Sends the squared norms of the owned gradients to the broker and waits for its verdict: the factor that clips, or that the step is not applied.
    Clip,
    /// Applies the optimiser to an owned parameter.
    Update {
        /// Index in [`Program::reductions`].
        reduction: u32,
    },
}

impl Instruction {
    /// The micro-batch it works on, if on one alone.
    pub fn micro_batch(&self) -> Option<u32> {
        match *self {
            Self::Receive { slot: Slot::Value { micro_batch, .. } | Slot::Buffer { micro_batch, .. }, .. }
            | Self::Send { slot: Slot::Value { micro_batch, .. } | Slot::Buffer { micro_batch, .. }, .. }
            | Self::Run { micro_batch, .. }
            | Self::Free { micro_batch, .. }
            | Self::Accumulate { micro_batch, .. }
            | Self::UpdateState { micro_batch, .. }
            | Self::Report { micro_batch, .. } => Some(micro_batch),
            _ => None,
        }
    }
}

/// A part of a parameter's gradient: one use's, summed over the micro-batches of one turn of its stage (see [`Stage::peers`](crate::Stage::peers)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GradientPart {
    /// Who sums it.
    pub peer: PeerId,
    /// The value that is summed.
    pub value: ValueId,
    /// Over how many micro-batches.
    pub micro_batches: u32,
}

/// How a parameter's gradient comes together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduction {
    /// The parameter.
    pub parameter: ValueId,
    /// Who adds the parts and applies the update.
    pub owner: PeerId,
    /// Its parts, in the order in which they are added.
    pub parts: Vec<GradientPart>,
}

/// A tensor that stays on a peer from step to step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The parameter, buffer or constant.
    pub value: ValueId,
    /// Whether this peer's copy is the one that is updated and saved.
    pub owner: bool,
}

/// A peer's share of a graph, and what it does with it in one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Whose it is.
    pub peer: PeerId,
    /// [`Plan::version`](crate::Plan::version).
    pub version: u32,
    /// Micro-batches a step.
    pub micro_batches: u32,
    /// The values it touches.
    pub values: BTreeMap<ValueId, Value>,
    /// The nodes it runs.
    pub nodes: BTreeMap<NodeId, Node>,
    /// What it keeps.
    pub holdings: Vec<Holding>,
    /// The gradients it has a part in, in graph order.
    pub reductions: Vec<Reduction>,
    /// Names of the scalars it reports.
    pub reports: Vec<String>,
    /// What it does.
    pub instructions: Vec<Instruction>,
    /// The values sent or received that may go through a codec: activations and their gradients, in training.
    pub coded: BTreeSet<ValueId>,
    /// Of gradients that are sent: the values received that they are gradients of, where what was left out of these is to be left out of the gradient. Each has as
    /// many elements, in the same order.
    pub masks: BTreeMap<ValueId, BTreeSet<ValueId>>,
    /// The codecs of its links, by receiver. They may change while it trains; whoever receives needs no codec to read what comes.
    pub codecs: BTreeMap<PeerId, Codec>,
}

impl Program {
    /// The messages it waits for in one step, with their senders and types: what a peer may be sent.
    pub fn incoming(&self) -> BTreeMap<Slot, (PeerId, TensorType)> {
        self.instructions
            .iter()
            .filter_map(|i| match *i {
                Instruction::Receive { slot, from } => {
                    self.values.get(&slot.value()).map(|v| (slot, (from, v.ty.clone())))
                }
                _ => None,
            })
            .collect()
    }

    /// Goes on by the plan's next version, which differs in the codecs of this peer's links.
    ///
    /// # Errors
    ///
    /// It is not the next version, or the codecs are none for this program, which then stays as it was.
    pub fn set_codecs(&mut self, version: u32, codecs: BTreeMap<PeerId, Codec>) -> Result<(), PlanError> {
        if Some(version) != self.version.checked_add(1) {
            let now = self.version;
            return Err(PlanError::Program(format!("version {version} of the plan cannot follow version {now}")));
        }
        self.check_codecs(&codecs).map_err(PlanError::Program)?;
        (self.version, self.codecs) = (version, codecs);
        Ok(())
    }

    /// What a message goes through.
    pub fn codec(&self, slot: Slot, to: PeerId) -> Codec {
        let codec = self.codecs.get(&to).filter(|_| self.may_be_coded(slot));
        codec.copied().unwrap_or_default()
    }

    /// Whether a message may come, or go, coded.
    pub fn may_be_coded(&self, slot: Slot) -> bool {
        matches!(slot, Slot::Value { value, .. } if self.coded.contains(&value))
    }

    /// The least and most payload bytes of a message in coded form; `None` if it may not come so.
    pub fn coded_bytes(&self, slot: Slot) -> Option<(u64, u64)> {
        let value = self.values.get(&slot.value()).filter(|_| self.may_be_coded(slot))?;
        Some((HEADER as u64, exact_bytes(value.ty.numel()) as u64))
    }

    /// The payload bytes of a message that this program sends; one that no codec can hold is longer, up to the most of [`Self::coded_bytes`]. `None` if it
    /// knows no such value.
    pub fn payload(&self, slot: Slot, to: PeerId) -> Option<usize> {
        let ty = &self.values.get(&slot.value())?.ty;
        Some(match self.codec(slot, to) {
            Codec::None => ty.bytes(),
            codec => codec.bytes(ty.numel()),
        })
    }

    /// The reductions whose parameter this peer updates, in graph order, with their indices.
    pub fn owned(&self) -> impl Iterator<Item = (u32, &Reduction)> {
        (0..).zip(&self.reductions).filter(|(_, r)| r.owner == self.peer)
    }
}
