//! One generation, as the broker's driver knows it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fusionllm_graph::ValueId;
use fusionllm_plan::{Plan, Simulation};
use fusionllm_program::{Address, PeerId, PerPass, Program};
use fusionllm_protocol::MemberId;
use fusionllm_workbench::model::Model;
use fusionllm_workspace::config::Job;
use tokio::task::JoinSet;

use super::codec_updates::CodecAdvisor;
use super::evaluation::Evaluation;
use super::records::PeerFacts;

/// A membership and its plan. Dropping it stops the tasks that still send.
pub(super) struct Generation {
    pub(super) number: u32,
    /// The job, with every choice made.
    pub(super) job: Job,
    pub(super) model: Arc<Model>,
    pub(super) plan: Plan,
    pub(super) evaluation: Evaluation,
    pub(super) predicted: Option<Simulation>,
    /// The peers, by their numbers.
    pub(super) peers: Vec<Peer>,
    pub(super) advisor: CodecAdvisor,
    pub(super) loading: Loading,
}

/// A peer with its share of the plan.
pub(super) struct Peer {
    pub(super) member: MemberId,
    pub(super) name: String,
    pub(super) backend: String,
    pub(super) device: String,
    /// Seconds that a message from the broker is on its way, where that is known.
    pub(super) latency_s: f64,
    /// Operators of the training program.
    pub(super) operators: usize,
    /// Bytes of the tensors that the training program sends to each peer, before any codec.
    pub(super) sends: BTreeMap<PeerId, u64>,
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

/// The tasks that send assignments and tensors, and how far they are.
#[derive(Default)]
pub(super) struct Loading {
    pub(super) tasks: JoinSet<()>,
    pub(super) sent: Arc<AtomicU64>,
    /// Bytes of all tensors to send.
    pub(super) total: u64,
    /// Bytes of all tensors that no peer of the generation had itself, from whomever they come.
    pub(super) moved: u64,
}

impl Loading {
    /// Bytes sent, of how many.
    pub(super) fn progress(&self) -> (u64, u64) {
        (self.sent.load(Relaxed), self.total)
    }
}

impl Generation {
    /// The facts about each peer that the summary has besides its passes.
    pub(super) fn facts(&self) -> Vec<PeerFacts> {
        let loads = self.predicted.as_ref().map(|s| &s.peers[..]).unwrap_or_default();
        let facts = |(i, p): (usize, &Peer)| PeerFacts {
            name: p.name.clone(),
            backend: p.backend.clone(),
            device: p.device.clone(),
            operators: p.operators,
            predicted: loads.get(i).copied(),
            latency_s: p.latency_s,
            sends: p.sends.clone(),
        };
        self.peers.iter().enumerate().map(facts).collect()
    }
}

/// The inputs that a program receives from the broker.
pub(super) fn inputs(program: &Program) -> Vec<PeerInput> {
    let incoming = program.incoming().into_iter().filter_map(|(tensor, (from, _))| match tensor {
        Address::Value { value, micro_batch } if from == PeerId::BROKER => {
            Some(PeerInput { value, micro_batch, name: program.values[&value].name.clone() })
        }
        _ => None,
    });
    incoming.collect()
}

/// Bytes of the tensors that a program sends to each peer, before any codec.
pub(super) fn sends(program: &Program) -> BTreeMap<PeerId, u64> {
    let mut sends = BTreeMap::new();
    for (tensor, to) in program.sends() {
        *sends.entry(to).or_default() += program.bytes(tensor);
    }
    sends
}
