//! Programs on a virtual clock.
//!
//! What runs here are the very [`Program`]s that peers run. A peer computes one instruction after the other for as long as its device takes; sends never
//! block, receives wait. Messages from one machine to another go one after the other, both directions at once; those that share an uplink, or
//! a line as a broker and the device beside it do, share its bandwidth evenly, and less of it where they have more for it than its queue takes.
//! Norms and verdicts overtake tensors, as they do on the wire. The broker streams the inputs of up to three passes ahead. No update is made
//! before the verdict, so that steps overlap by what the verdict leaves open: a peer begins the next step as soon as its own updates are made.

mod engine;
mod load;

use crate::{Cluster, Optimizer, PeerId, PlanError, Program, SharedId, Slot};

/// Bytes that a peer's process takes besides tensors: 3.1 MB that iroh sets aside to receive packets into, and what runtime, connections and Programs of
/// the testbeds of the bench `prediction` took.
const PROCESS: u64 = 5_600_000;

/// Fewest and most steps that are run to find how long one takes once they follow each other.
const STEPS: std::ops::RangeInclusive<usize> = 3..=8;

/// Two steps are taken to be alike whose times differ by no more than this share.
pub(crate) const ALIKE: f64 = 1e-3;

/// What a simulation needs to know besides Programs and cluster.
#[derive(Debug, Clone, Copy)]
pub struct Conditions {
    /// How parameters are updated.
    pub optimizer: Optimizer,
    /// Whether spans and transfers are kept.
    pub record: bool,
}

/// How a training step goes once steps follow each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// Seconds from step to step.
    pub step_s: f64,
    /// Seconds that the simple formula gives: the sum over peers of computing and sending one micro-batch, and for each further micro-batch the slowest
    /// of these times; what precedes and follows the pipeline not included.
    pub closed_form_s: f64,
    /// By peer.
    pub peers: Vec<PeerLoad>,
    /// Every pair of machines of which one sends to the other, by sender and receiver.
    pub links: Vec<LinkLoad>,
    /// Shared uplinks that carry anything.
    pub shared: Vec<SharedLoad>,
    /// What peers do in one step, by peer and time, if it was to be recorded. Its times begin with the step's first span.
    pub spans: Vec<Span>,
    /// Messages of one step, by sender, receiver and time, if they were to be recorded. Times as in [`Self::spans`].
    pub transfers: Vec<Transfer>,
}

/// A peer in one step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PeerLoad {
    /// Seconds of computing: operators, copies of what is sent and received, and what the network takes from them ([`TRAFFIC`](crate::TRAFFIC)).
    pub compute_s: f64,
    /// Of them, forward.
    pub forward_s: f64,
    /// Seconds waiting for messages and for the verdict.
    pub wait_s: f64,
    /// Most bytes held at once: parameters, optimiser state, sums of gradients, activations, messages that come, wait to be read or leave, and the process itself.
    pub peak_bytes: u64,
}

/// One direction between two machines in one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkLoad {
    /// The sender.
    pub from: PeerId,
    /// The receiver.
    pub to: PeerId,
    /// Bytes of tensors, before framing.
    pub bytes: u64,
    /// Messages.
    pub messages: u32,
    /// Seconds in which it carried something.
    pub busy_s: f64,
}

/// One direction of a shared uplink in one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedLoad {
    /// Which.
    pub id: SharedId,
    /// Bytes of tensors, before framing.
    pub bytes: u64,
    /// Seconds in which it carried something.
    pub busy_s: f64,
}

/// What a peer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Doing {
    /// Forward operators.
    Forward,
    /// Backward operators.
    Backward,
    /// Backward operators that make gradients of parameters alone, put off by the schedule.
    WeightGrad,
    /// Sums of gradients, their norms, and the optimiser.
    Update,
    /// Waiting for a message.
    Wait,
    /// Waiting for the verdict.
    Verdict,
}

/// A time in which a peer did one thing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Who.
    pub peer: PeerId,
    /// What.
    pub doing: Doing,
    /// The micro-batch it worked on or waited for, if one.
    pub micro_batch: Option<u32>,
    /// Seconds.
    pub start: f64,
    /// Seconds.
    pub end: f64,
}

/// A message on its way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transfer {
    /// The sender.
    pub from: PeerId,
    /// The receiver.
    pub to: PeerId,
    /// What it carries.
    pub slot: Slot,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// When it was handed to the network.
    pub sent: f64,
    /// When its first byte left.
    pub start: f64,
    /// When its last byte had left.
    pub end: f64,
    /// When it could be read.
    pub arrived: f64,
}

/// Runs the Programs of a training step, device `i` of the cluster as peer `i`, until steps follow each other evenly.
///
/// # Errors
///
/// The cluster has another number of devices, a message finds no way, or the Programs wait for what nobody sends.
pub fn simulate(programs: &[Program], cluster: &Cluster, conditions: &Conditions) -> Result<Simulation, PlanError> {
    if programs.len() != cluster.devices().len() {
        return Err(PlanError::Cluster(format!("{} devices for {} peers", cluster.devices().len(), programs.len())));
    }
    let load = load::Load::new(programs, cluster, conditions)?;
    engine::Engine::new(&load, cluster, conditions.record).run()
}

/// Bytes on the line for a tensor's bytes: QUIC's datagrams carry 1,416 of them in 1,480 with the headers of IP, UDP, QUIC and the stream, and every
/// message has a header of its own.
pub fn message_bytes(payload: u64) -> f64 {
    const HEADER: f64 = 40.0;
    (payload as f64 + HEADER) * (1480.0 / 1416.0)
}
