//! Joins the pure crates to clock, disk and network: brokers and peers.
//!
//! [`conduct`] runs a broker from the first joiner to the summary. [`join`] takes a joiner's part in a run.

mod broker;
mod client;
#[cfg(feature = "decoders")]
pub mod decoders;
mod error;
mod keys;
mod machine;
mod net;
mod peer;
mod relay;
mod web;

pub use broker::{BrokerOptions, Entry, LocalPeer, Observer, Peers, Resume, conduct};
pub use client::{doctor, owner, page};
pub use error::NodeError;
pub use fusionllm_transport::{Relay, RelayUrl, Ticket};
pub use machine::interrupts::{interrupted, tether};
pub use net::traffic::measure_traffic;
pub use peer::{JoinEvent, JoinObserver, JoinOptions, PartEnd, Participation, join};
pub use relay::{RelayCommand, relay};
pub use web::Dashboard;
