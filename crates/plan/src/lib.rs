//! Plans: which peer runs which operators, and in which order.
//!
//! A [`Plan`] is plain data: the stages of a graph, the peers of each, the number of micro-batches, and the schedule.
//! Nothing else decides where an operator runs. [`compile`] makes one [`Program`](fusionllm_program::Program) per peer
//! from it: a list of run, send, receive, free and update instructions. The executor runs Programs, and [`simulate`]
//! predicts their time.

mod codecs;
mod compile;
mod cost;
mod error;
mod graph_facts;
mod offload;
mod parallel;
mod plan;
mod saved;
mod schedule;
mod scheduler;
pub mod search;
mod simulate;

pub use codecs::{Compression, Compressor, LinkCodec, LossBudget, SLACK, Traffic};
pub use compile::{NodeStages, compile, compile_forward};
pub use cost::{
    Card, Cluster, CodecStep, CopyDirection, Curve, Curves, Device, DirectLink, Disk, ExtraOperator, Flow,
    HOST_LINK_RATE, HeldTensor, Line, Link, Measured, NodeSeconds, OperatorCurves, OperatorWork, ParameterWork, Place,
    Processor, Rates, Route, Site, Work, congestion, message_bytes, node_signature, signature, work_units,
};
pub use error::PlanError;
pub use offload::PeerOffload;
pub use plan::{FORMAT_VERSION, Plan, Stage};
pub use saved::{Origin, PlanDetail, SavedPlan};
pub use schedule::{Schedule, TaskKind};
pub use scheduler::{
    Made, PlanOptions, PreparedPlan, Scheduled, Scheduler, Unused, Workload, advise, equal_compute, equal_number,
    idle_note, prepare, schedule, schedule_unknown, schedule_until, unused,
};
pub use simulate::{
    Activity, Change, LineLoad, LinkLoad, PROCESS_BYTES, PeerLoad, SimulateOptions, Simulation, Span, Transfer, WhatIf,
    activities, simulate, what_if, what_if_sentences,
};
