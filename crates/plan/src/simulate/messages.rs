//! The messages of a training step.

use foldhash::HashMap;
use fusionllm_graph::{TensorType, ValueId};
use fusionllm_program::{Address, PeerId, Program, ProgramError};

use crate::error::PlanError;

/// A message of every training step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Message {
    pub(super) from: PeerId,
    pub(super) to: PeerId,
    pub(super) tensor: Address,
    /// Bytes of the tensor as it is sent.
    pub(super) payload: u64,
    /// Bytes on the wire.
    pub(super) bytes: f64,
    pub(super) channel: u32,
    /// The first message that differs in its micro-batch alone, which may be this one.
    pub(super) like: u32,
    /// Seconds of the sender's codec thread.
    pub(super) encode: f64,
    /// Seconds of the receiver's codec thread.
    pub(super) decode: f64,
    /// Seconds of computing that the sender and the receiver lose to the message.
    pub(super) lost: [f64; 2],
    /// Whether top-k sends it.
    pub(super) sparse: bool,
    /// Bytes of the places that top-k sends. Both ends keep them until the gradient goes back.
    pub(super) mask: u64,
    /// Bytes of the masks that both ends give up with this gradient.
    pub(super) given_up: u64,
}

impl Message {
    /// A message whose size and codec are not known yet.
    pub(super) fn new((from, to): (PeerId, PeerId), tensor: Address, channel: u32, like: u32) -> Self {
        let (payload, bytes, encode, decode, lost) = (0, 0.0, 0.0, 0.0, [0.0; 2]);
        let (sparse, mask, given_up) = (false, 0, 0);
        Self { from, to, tensor, payload, bytes, channel, like, encode, decode, lost, sparse, mask, given_up }
    }
}

/// The messages of a step. A sender finds the message it sends by receiver and tensor.
pub(super) struct Messages {
    pub(super) all: Vec<Message>,
    pub(super) index: HashMap<(PeerId, Address), u32>,
}

impl Messages {
    pub(super) fn find(&self, to: PeerId, tensor: Address) -> Option<(u32, &Message)> {
        let id = *self.index.get(&(to, tensor))?;
        Some((id, &self.all[id as usize]))
    }
}

/// The type of a value that a Program names.
pub(super) fn value_type(p: &Program, v: ValueId) -> Result<&TensorType, PlanError> {
    let value = p.values.get(&v).ok_or_else(|| ProgramError(format!("{} does not know value {v}", p.peer)))?;
    Ok(&value.ty)
}
