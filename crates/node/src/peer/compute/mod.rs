//! The part of a peer that computes: tensors come in, a program runs, and tensors go out.

mod codecs;
mod mailbox;
mod receive;
mod recorder;
mod runner;
mod scratch;

pub(crate) use codecs::Codecs;
pub(crate) use mailbox::Mailbox;
pub(crate) use receive::{Arrivals, Throughput};
pub(crate) use recorder::{Messages, Recorder};
pub(crate) use runner::{NetLink, ProgramRunner, Watched};
pub(crate) use scratch::Scratch;

use fusionllm_graph::HostTensor;
use fusionllm_program::TensorKey;

/// A tensor or the start, on its way to the computing thread before it computes.
pub(crate) enum Loading {
    /// A tensor to load.
    Tensor(TensorKey, HostTensor),
    /// All tensors are loaded.
    Start(Box<NetLink>),
}
