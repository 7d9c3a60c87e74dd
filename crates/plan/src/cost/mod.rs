//! The cost of a model's work on a cluster: devices, links, measured operators, and the bytes and operators of a step.

mod card;
mod cluster;
pub mod congestion;
mod curve;
mod device;
mod disk;
mod extra;
mod measured;
mod operators;
mod processor;
mod work;

pub use card::Card;
pub use cluster::{Cluster, DirectLink, Line, Link, Place, Route, Site};
pub use congestion::message_bytes;
pub use curve::{Curve, Curves};
pub(crate) use device::classes;
pub use device::{Device, HOST_LINK_RATE, Rates};
pub use disk::Disk;
pub use extra::ExtraOperator;
pub(crate) use extra::{squared_norm, sum, update};
pub use measured::{CodecStep, CopyDirection, Measured, OperatorCurves};
pub use operators::{node_signature, signature, work_units};
pub use processor::Processor;
pub use work::{Flow, HeldTensor, NodeSeconds, OperatorWork, ParameterWork, Work};
