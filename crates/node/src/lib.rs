//! Joins the pure crates to clock, disk and network: brokers and peers.
//!
//! [`conduct`] runs a broker from the first joiner to the summary. [`join`] takes a joiner's part in a run. [`model`]
//! builds graphs from a job, a checkpoint or a file from elsewhere.

mod broker;
mod client;
#[cfg(feature = "decoders")]
pub mod decoders;
mod error;
mod keys;
mod machine;
pub mod model;
mod net;
mod peer;
pub mod planning;
pub mod profile;
mod relay;

pub use broker::{BrokerOptions, Entry, Event, LocalPeer, Observer, Peers, Resume, conduct};
pub use client::{doctor, owner};
pub use error::NodeError;
pub use fusionllm_transport::{Relay, RelayUrl, Ticket};
pub use machine::interrupts::tether;
pub use machine::memory;
pub use model::{SavedModel, check, export, generate, imported};
pub use peer::{JoinEvent, JoinObserver, JoinOptions, PartEnd, Participation, join};
pub use relay::{RelayCommand, relay};
