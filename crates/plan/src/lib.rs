//! Plans and Programs: who runs which operators, and in which order.
//!
//! A [`Plan`] is plain data: the stages of a graph, the peer of each, the number of micro-batches and the schedule. Nothing about placement is decided
//! anywhere else. [`compile`] turns it into one [`Program`] per peer: the list of run, send, receive, free and update steps that the
//! executor carries out and the simulator times.

mod auto;
pub mod bound;
mod check;
mod cluster;
mod compile;
mod compression;
mod cut;
mod emit;
mod error;
mod estimate;
pub mod exact;
pub mod fence;
mod optimizer;
mod pass;
pub mod picture;
mod placement;
mod plan;
mod print;
mod program;
mod saved;
mod schedule;
mod scheduler;
mod simulate;
mod what_if;

pub use cluster::{Cluster, Device, Line, Link, Path, Place, Rates, SharedId, Site};
pub use compile::{compile, compile_forward};
pub use compression::{Compression, Compressor, LinkCodec, Traffic};
pub use cut::{equal_compute, equal_number};
pub use error::PlanError;
pub use estimate::{
    Coding, Copying, Curve, Curves, Flow, Kept, NodeSeconds, OperatorWork, ParameterWork, TRAFFIC, Work, is_view, kind,
    kind_of, work,
};
pub use optimizer::{LearningRate, Optimizer, Verdict, clip_factor, share_of_loss};
pub use pass::{PASSES_IN_FLIGHT, PassKind, PerPass};
pub use placement::Placement;
pub use plan::{FORMAT_VERSION, Plan, Stage};
pub use program::{GradientPart, Holding, Instruction, PeerId, Program, Reduction, Slot};
pub use saved::{Origin, SavedPlan};
pub use schedule::{Schedule, TaskKind};
pub use scheduler::{Options, Scheduled, Scheduler, Workload, schedule};
pub use simulate::{
    Conditions, Doing, LinkLoad, PeerLoad, SharedLoad, Simulation, Span, Transfer, message_bytes, simulate,
};
pub use what_if::{Change, WhatIf, what_if};
