//! Joins the pure crates to clock, disk and network: brokers and peers.
//!
//! [`conduct`] is a broker's run from the first joiner to the summary, [`join`] a joiner's part in it. [`config`] reads the job file, [`data`] the batches, [`run_dir`] keeps what a run did.

mod broker;
pub mod check;
pub mod checkpoint;
mod coding;
pub mod config;
pub mod data;
mod disk;
mod emulation;
mod error;
pub mod export;
mod feeds;
pub mod generate;
pub mod imported;
mod keeper;
mod local;
pub mod memory;
pub mod model;
mod observer;
mod peer;
pub mod planning;
mod probe;
pub mod profile;
pub mod run_dir;
mod saved;
mod store;
mod survey;
pub mod weights;
mod wire;

pub use broker::{BrokerOptions, Peers, conduct};
pub use disk::DiskError;
pub use error::NodeError;
pub use local::LocalPeer;
pub use observer::{Event, Observer};
pub use peer::{JoinOptions, WINDOW, join};
pub use saved::SavedModel;
