//! Runs Programs on a backend.
//!
//! An [`Executor`] keeps a peer's parameters, buffers and optimizer state, and runs Programs. A [`Script`] is a Program
//! cut into segments, which a backend runs as a whole. The executor reaches other peers and the broker only through a
//! [`Communicator`]. [`local`] runs all peers of a plan in this process.

mod coding;
mod communicator;
mod error;
mod executor;
mod inspect;
pub mod local;
mod pace;
mod pass;
mod script;
mod state;
mod storage;

pub use coding::{Coder, EncodeOptions, Fidelity, Message, StableRanks, message_seed};
pub use communicator::Communicator;
pub use error::ExecError;
pub use executor::Executor;
pub use pace::Pace;
pub use pass::{PassStats, rng_key};
pub use script::Script;
pub use state::{Snapshot, SnapshotTensor};
pub use storage::{HostMemory, Storage, Stored};
