//! A peer of the run, as the broker knows it.

use fusionllm_graph::ValueId;
use fusionllm_plan::{PerPass, Program};
use fusionllm_protocol::ExpectedReports;
use fusionllm_transport::Connection;

use crate::net::Outbox;

/// A peer with its share of the plan.
pub(super) struct Peer {
    pub(super) name: String,
    pub(super) backend: String,
    pub(super) connection: Connection,
    pub(super) outbox: Outbox,
    pub(super) expected: ExpectedReports,
    /// The training program.
    pub(super) train: Program,
    /// The inputs that it reads.
    pub(super) inputs: PerPass<Vec<PeerInput>>,
}

/// An input that a peer reads from the broker.
pub(super) struct PeerInput {
    pub(super) value: ValueId,
    pub(super) micro_batch: u32,
    /// The input's name in the graph.
    pub(super) name: String,
}
