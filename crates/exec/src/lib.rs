//! Runs a Program on a backend.
//!
//! An [`Executor`] keeps a peer's parameters, buffers and optimiser state, and carries out Programs instruction by instruction. What lies outside the peer it reaches
//! through a [`Communicator`] alone. [`local`] runs all the peers of a plan in this process.

mod coding;
mod error;
mod executor;
pub mod local;
mod pace;

pub use coding::{Coder, EncodeOptions, Fidelity, message_seed};
pub use error::ExecError;
pub use executor::{Communicator, Executor, PassStats, Snapshot, SnapshotTensor, rng_key};
pub use pace::Pace;
