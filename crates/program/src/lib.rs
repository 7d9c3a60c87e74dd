//! Programs: each peer's share of a Plan, as the list of instructions that it runs in one pass.

mod address;
mod check;
mod display;
mod effects;
mod error;
mod frees;
mod memory;
mod offload;
mod optimizer;
mod pass;
mod poison;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use fusionllm_compress::{Codec, Element, HEADER_BYTES, exact_bytes};
use fusionllm_graph::{DType, Node, NodeId, TensorType, Value, ValueId};
use serde::{Deserialize, Serialize};

pub use address::{Address, TensorKey};
pub use effects::Access;
pub use error::ProgramError;
pub use memory::{Bytes, Memory, shares_storage, storage};
pub use offload::{Medium, OffloadedBytes};
pub use optimizer::{LearningRate, Optimizer, ParameterGroup, Verdict, clip_factor, share_of_loss};
pub use pass::{PASSES_IN_FLIGHT, PassKind, PerPass};
pub use poison::{Cause, Poison};

/// Index of a peer in the list of a Plan, or [`PeerId::BROKER`], the machine with the data.
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

/// One instruction of a Program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Instruction {
    /// Waits for a message.
    Receive {
        /// The tensor that the message carries.
        tensor: Address,
        /// The sender.
        from: PeerId,
    },
    /// Runs a node.
    Run {
        /// The node.
        node: NodeId,
        /// The micro-batch whose values it reads.
        micro_batch: u32,
    },
    /// Hands a message to the network and continues.
    Send {
        /// The tensor that the message carries.
        tensor: Address,
        /// The receiver.
        to: PeerId,
    },
    /// Frees a value that nothing reads any more.
    Free {
        /// The value.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Adds a value to a part of a parameter's gradient.
    Accumulate {
        /// The parameter.
        parameter: ValueId,
        /// Index in [`Reduction::parts`].
        part: u32,
        /// The value that is added.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Writes a value to a buffer.
    UpdateState {
        /// The buffer.
        buffer: ValueId,
        /// Its new content.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Sends a scalar to the broker.
    Report {
        /// Index in [`Program::reports`].
        report: u32,
        /// The scalar.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Adds a complete part to the first of the parts with which it is sent. See [`Reduction::joined`].
    Join {
        /// The parameter.
        parameter: ValueId,
        /// Index in [`Reduction::parts`].
        part: u32,
    },
    /// Adds a parameter's terms into its gradient. See [`Reduction::terms`].
    Reduce {
        /// The parameter.
        parameter: ValueId,
    },
    /// Sends the squared norms of the owned gradients to the broker and waits for its verdict. The verdict is the
    /// factor that clips, or says that the step is not applied.
    Clip,
    /// Applies the optimizer to an owned parameter.
    Update {
        /// The parameter.
        parameter: ValueId,
    },
    /// Moves a tensor out of the device's memory. Nothing uses it until it is loaded. A tensor need not be copied if it
    /// has not changed since it was loaded.
    Offload {
        /// The tensor.
        tensor: Address,
        /// The medium that it goes to.
        to: Medium,
    },
    /// Moves a tensor back into the device's memory.
    Load {
        /// The tensor.
        tensor: Address,
        /// The medium that it comes from.
        from: Medium,
    },
}

impl Instruction {
    /// The micro-batch that it belongs to, if any.
    pub fn micro_batch(&self) -> Option<u32> {
        match *self {
            Self::Receive { tensor, .. }
            | Self::Send { tensor, .. }
            | Self::Offload { tensor, .. }
            | Self::Load { tensor, .. } => tensor.micro_batch(),
            Self::Run { micro_batch, .. }
            | Self::Free { micro_batch, .. }
            | Self::Accumulate { micro_batch, .. }
            | Self::UpdateState { micro_batch, .. }
            | Self::Report { micro_batch, .. } => Some(micro_batch),
            Self::Join { .. } | Self::Reduce { .. } | Self::Clip | Self::Update { .. } => None,
        }
    }

    /// The same instruction for another micro-batch. One that belongs to none stays as it is.
    pub fn of_micro_batch(mut self, other: u32) -> Self {
        match &mut self {
            Self::Receive { tensor, .. }
            | Self::Send { tensor, .. }
            | Self::Offload { tensor, .. }
            | Self::Load { tensor, .. } => *tensor = tensor.of_micro_batch(other),
            Self::Run { micro_batch, .. }
            | Self::Free { micro_batch, .. }
            | Self::Accumulate { micro_batch, .. }
            | Self::UpdateState { micro_batch, .. }
            | Self::Report { micro_batch, .. } => *micro_batch = other,
            Self::Join { .. } | Self::Reduce { .. } | Self::Clip | Self::Update { .. } => {}
        }
        self
    }
}

/// One use's part of a parameter's gradient, summed over the micro-batches of one turn. Turns
/// are those of a Plan's stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GradientPart {
    /// The peer that sums it.
    pub peer: PeerId,
    /// The value that is summed.
    pub value: ValueId,
    /// The number of micro-batches.
    pub micro_batches: u32,
}

/// How the parts of a parameter's gradient are added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduction {
    /// The peer that adds the parts and applies the update.
    pub owner: PeerId,
    /// The parts, in the order in which they are added.
    pub parts: Vec<GradientPart>,
    /// This many parts in succession are added first, and then these sums. It is the number of uses if all of them have
    /// the same number of turns, and else 1.
    pub bracket: u32,
}

impl Reduction {
    /// The parts with which one is added before it is sent: the first ones of a bracket, if one peer sums them and does
    /// not own the parameter. Any other part stays alone.
    pub fn joined(&self, part: u32) -> Range<u32> {
        let first = part - part % self.bracket.max(1);
        let bracket = self.parts.iter().skip(first as usize).take(self.bracket as usize);
        let peer = self.parts.get(first as usize).map(|p| p.peer).filter(|peer| *peer != self.owner);
        let together = first..first + bracket.take_while(|p| Some(p.peer) == peer).count() as u32;
        if together.contains(&part) { together } else { part..part + 1 }
    }

    /// The parts that the owner adds, by number of the bracket. The others are joined with one of them.
    pub fn terms(&self) -> impl Iterator<Item = (u32, u32)> {
        let bracket = self.bracket.max(1);
        (0..(self.parts.len() as u32).div_ceil(bracket)).flat_map(move |number| {
            let first = number * bracket;
            let end = (first + bracket).min(self.parts.len() as u32);
            std::iter::once(first).chain(self.joined(first).end..end).map(move |part| (number, part))
        })
    }
}

/// A tensor that a peer keeps from step to step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The parameter, buffer or constant.
    pub value: ValueId,
    /// Whether this peer's copy is updated and saved.
    pub owner: bool,
}

/// The smallest tensor that codecs take, in bytes. What they would save of a smaller one is next to nothing beside the
/// packet that carries it: one number in int8 takes 11 bytes.
const MIN_CODED_BYTES: usize = 256;

/// The numbers of this type, as codecs know them. `None` if codecs do not take them.
pub fn element(dtype: DType) -> Option<Element> {
    match dtype {
        DType::F32 => Some(Element::F32),
        DType::BF16 => Some(Element::Bf16),
        DType::F64 | DType::F16 | DType::I64 | DType::I32 | DType::Bool => None,
    }
}

/// Whether codecs take tensors of a type.
pub fn takes_codec(ty: &TensorType) -> bool {
    element(ty.dtype).is_some() && ty.bytes() >= MIN_CODED_BYTES
}

/// The encoded bytes of a tensor, if the codec makes it smaller.
pub fn encoded_bytes(codec: &Codec, ty: &TensorType) -> Option<usize> {
    let bytes = codec.bytes(ty.numel(), element(ty.dtype)?);
    (bytes < ty.bytes()).then_some(bytes)
}

/// A peer's share of a graph, and what it does in one pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// The peer.
    pub peer: PeerId,
    /// The version of the Plan that it belongs to.
    pub version: u32,
    /// Micro-batches per pass.
    pub micro_batches: u32,
    /// The values that it uses.
    pub values: BTreeMap<ValueId, Value>,
    /// The nodes it runs.
    pub nodes: BTreeMap<NodeId, Node>,
    /// The tensors that it keeps.
    pub holdings: Vec<Holding>,
    /// The gradients that it has a part in, by parameter.
    pub reductions: BTreeMap<ValueId, Reduction>,
    /// Names of the scalars it reports.
    pub reports: Vec<String>,
    /// The instructions, in order.
    pub instructions: Vec<Instruction>,
    /// The values, sent or received, that a codec may apply to: in training, activations that have a gradient, and
    /// their gradients, unless they are small.
    pub coded: BTreeSet<ValueId>,
    /// By gradient and the peer that it goes to or comes from: the values that it is a gradient of and that came from
    /// or went to that peer. If top-k left entries out of these, they are left out of the gradient, too. All have the
    /// same number of elements, in the same order.
    pub masks: BTreeMap<(ValueId, PeerId), BTreeSet<ValueId>>,
    /// The codecs of its links, by receiver. They may change during a run. A receiver needs no codec to read a
    /// message.
    pub codecs: BTreeMap<PeerId, Codec>,
}

impl Program {
    /// The messages that it waits for in one pass, with their senders, in its order.
    pub fn receives(&self) -> impl Iterator<Item = (Address, PeerId)> {
        self.instructions.iter().filter_map(|i| match *i {
            Instruction::Receive { tensor, from } => Some((tensor, from)),
            _ => None,
        })
    }

    /// The messages that it sends in one pass, with their receivers, in its order.
    pub fn sends(&self) -> impl Iterator<Item = (Address, PeerId)> {
        self.instructions.iter().filter_map(|i| match *i {
            Instruction::Send { tensor, to } => Some((tensor, to)),
            _ => None,
        })
    }

    /// The messages that it waits for in one pass, with their senders and types. A peer accepts no others.
    pub fn incoming(&self) -> BTreeMap<Address, (PeerId, TensorType)> {
        let typed = |(tensor, from): (Address, PeerId)| {
            self.values.get(&tensor.value()).map(|v| (tensor, (from, v.ty.clone())))
        };
        self.receives().filter_map(typed).collect()
    }

    /// Switches to the plan's next version, which differs in the codecs of this peer's links.
    ///
    /// # Errors
    ///
    /// It is not the next version, or the codecs do not fit this program. The program then stays as it was.
    pub fn set_codecs(&mut self, version: u32, codecs: BTreeMap<PeerId, Codec>) -> Result<(), ProgramError> {
        if Some(version) != self.version.checked_add(1) {
            let now = self.version;
            return Err(ProgramError(format!("version {version} of the plan cannot follow version {now}")));
        }
        self.check_codecs(&codecs).map_err(ProgramError)?;
        (self.version, self.codecs) = (version, codecs);
        Ok(())
    }

    /// The codec of a message. It is the link's, if that may apply and makes the tensor smaller.
    pub fn codec(&self, tensor: Address, to: PeerId) -> Codec {
        let smaller = |codec: &&Codec| {
            let value = self.values.get(&tensor.value());
            value.is_some_and(|v| encoded_bytes(codec, &v.ty).is_some())
        };
        let codec = self.codecs.get(&to).filter(|_| self.may_be_coded(tensor)).filter(smaller);
        codec.copied().unwrap_or_default()
    }

    /// Whether a codec may apply to a message.
    pub fn may_be_coded(&self, tensor: Address) -> bool {
        matches!(tensor, Address::Value { value, .. } if self.coded.contains(&value))
    }

    /// The least and most payload bytes of an encoded message. `None` if no codec may apply to it.
    pub fn coded_bytes(&self, tensor: Address) -> Option<(u64, u64)> {
        let ty = &self.values.get(&tensor.value()).filter(|_| self.may_be_coded(tensor))?.ty;
        Some((HEADER_BYTES as u64, exact_bytes(ty.numel(), element(ty.dtype)?) as u64))
    }

    /// The payload bytes of a message that this program sends to another. A tensor that the codec cannot encode is
    /// longer, up to the most of [`Self::coded_bytes`]. `None` if the program does not have the value.
    pub fn payload(&self, tensor: Address, to: &Self) -> Option<usize> {
        let ty = &self.values.get(&tensor.value())?.ty;
        let codec = self.codec(tensor, to.peer);
        // Of a single activation, the receiver knows which entries it has sent.
        let kept = match (element(ty.dtype), self.masks.get(&(tensor.value(), to.peer))) {
            (Some(element), Some(of)) if of.len() == 1 => {
                let activation = of.first().zip(tensor.micro_batch());
                let activation = activation.map(|(value, micro_batch)| Address::Value { value: *value, micro_batch });
                match activation.map(|activation| to.codec(activation, self.peer)) {
                    Some(Codec::TopK(top)) => Some((element, top.kept_entries(ty.numel(), element))),
                    _ => None,
                }
            }
            _ => None,
        };
        let encoded = match kept {
            Some((element, kept)) if codec != Codec::None => Some(codec.bytes_under(ty.numel(), element, kept)),
            _ => encoded_bytes(&codec, ty),
        };
        Some(encoded.unwrap_or(ty.bytes()))
    }

    /// The reductions of the parameters that this peer owns, in graph order.
    pub fn owned(&self) -> impl Iterator<Item = (ValueId, &Reduction)> {
        self.reductions.iter().filter(|(_, r)| r.owner == self.peer).map(|(parameter, r)| (*parameter, r))
    }
}
