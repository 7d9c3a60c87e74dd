//! Programs on a virtual clock.
//!
//! The simulator runs the same [`Program`]s as peers do. A peer computes one instruction after the other, each for as
//! long as its device takes. Peers on one processor slow each other down. A send never blocks; a receive waits. Messages from one machine to another go one after
//! the other, and both directions at once. Channels that share a network card, an uplink or a link
//! divide its bandwidth fairly. They get less of it when more bytes wait than its queue holds. Norms and verdicts overtake tensors, as on the wire. The
//! broker sends the inputs of up to [`PASSES_IN_FLIGHT`](fusionllm_program::PASSES_IN_FLIGHT) passes ahead. No update
//! is applied before the verdict. A peer begins its next step as soon as its own updates are applied, so steps overlap.

mod activities;
mod engine;
mod load;
mod messages;
mod network;
mod processors;
mod steps;
mod stretches;
mod what_if;

pub use activities::activities;
pub(crate) use steps::node_seconds;
pub use what_if::{Change, WhatIf, what_if, what_if_sentences};
pub(crate) use what_if::{candidates, worthwhile};

use fusionllm_program::{Address, Optimizer, PeerId, Program};
use serde::{Deserialize, Serialize};

use crate::cost::{Cluster, Line, Link};
use crate::error::PlanError;

/// Bytes that a peer's process holds besides tensors. 3.1 MB of them are iroh's receive buffers. The rest is the
/// runtime, connections and Programs. It was fitted on nine testbeds, none of which the bench `prediction` uses.
pub const PROCESS_BYTES: u64 = 5_600_000;

/// Fewest and most steps that are simulated to find the time of a steady step.
const STEPS: std::ops::RangeInclusive<usize> = 3..=8;

/// Steps are steady once two in a row differ by at most this share. Plans whose steps differ by less are equally
/// fast.
pub(crate) const STEADY_TOLERANCE: f64 = 1e-3;

/// The settings of a simulation, besides the Programs and the cluster.
#[derive(Debug, Clone, Copy)]
pub struct SimulateOptions {
    /// How parameters are updated.
    pub optimizer: Optimizer,
    /// Whether [`Simulation::spans`] and [`Simulation::transfers`] are recorded.
    pub record: bool,
}

impl SimulateOptions {
    /// Options that record nothing.
    pub fn new(optimizer: Optimizer) -> Self {
        Self { optimizer, record: false }
    }
}

/// A steady training step.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// Seconds from step to step.
    pub step_s: f64,
    /// Seconds by the simple pipeline formula. It adds up, over peers, the time to compute and send one micro-batch.
    /// For each further micro-batch it adds the slowest of these times. The slowest update comes last. The broker's
    /// inputs are left out.
    pub closed_form_s: f64,
    /// By peer.
    pub peers: Vec<PeerLoad>,
    /// The links that carry tensors, by sender and receiver.
    pub links: Vec<LinkLoad>,
    /// The cards, uplinks and links that carry tensors, in the order of [`Line`].
    pub lines: Vec<LineLoad>,
    /// The activities of peers in one step, sorted by peer and time, if recorded. Times start at the step's first span.
    pub spans: Vec<Span>,
    /// The messages of one step, by sender, receiver and time, if recorded. Times start as in [`Self::spans`].
    pub transfers: Vec<Transfer>,
}

impl Simulation {
    /// The line that limits the step, if one is busy for nearly all of it.
    pub fn limiting_line(&self) -> Option<&LineLoad> {
        const NEARLY_ALL: f64 = 0.95;
        let busiest = self.lines.iter().max_by(|a, b| a.busy_s.total_cmp(&b.busy_s))?;
        (busiest.busy_s >= NEARLY_ALL * self.step_s).then_some(busiest)
    }
}

/// A peer in one step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PeerLoad {
    /// Seconds of computing: operators, copies of tensors that are sent and received, and the processor time of the
    /// network.
    pub compute_s: f64,
    /// The seconds of them in forward.
    pub forward_s: f64,
    /// Seconds waiting for messages and for the verdict.
    pub wait_s: f64,
    /// Most bytes held at once: parameters, optimizer state, sums of gradients, activations, buffered messages, the
    /// places that top-k sent, and [`PROCESS_BYTES`].
    pub peak_bytes: u64,
}

/// One direction between two machines in one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkLoad {
    /// The sender.
    pub from: PeerId,
    /// The receiver.
    pub to: PeerId,
    /// Bytes of tensors, without framing.
    pub bytes: u64,
    /// Number of messages.
    pub messages: u32,
    /// Seconds in which it carried anything.
    pub busy_s: f64,
}

/// A network card, an uplink or a link in one step, in one direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LineLoad {
    /// The line.
    pub line: Line,
    /// Its latency and bandwidth.
    pub link: Link,
    /// Bytes of tensors, without framing.
    pub bytes: u64,
    /// Seconds that all bytes on the wire take at its full rate.
    pub busy_s: f64,
}

/// An activity of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// Runs forward operators.
    Forward,
    /// Runs backward operators.
    Backward,
    /// Runs only weight gradients that the schedule delayed.
    WeightGrad,
    /// Sums gradients, computes their norms, or runs the optimizer.
    Update,
    /// Moves tensors out of the device's memory, or back.
    Offload,
    /// Waits for a message.
    Wait,
    /// Waits for the verdict.
    Verdict,
}

impl Activity {
    /// Whether the peer's device is busy.
    pub fn computes(self) -> bool {
        !matches!(self, Self::Wait | Self::Verdict)
    }
}

/// A time in which a peer did one thing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// The peer.
    pub peer: PeerId,
    /// The activity.
    pub activity: Activity,
    /// The micro-batch that it worked on or waited for, if one.
    pub micro_batch: Option<u32>,
    /// Seconds.
    pub start: f64,
    /// Seconds.
    pub end: f64,
}

/// A message on a link. All times are in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transfer {
    /// The sender.
    pub from: PeerId,
    /// The receiver.
    pub to: PeerId,
    /// The address of the tensor that the message carries.
    pub tensor: Address,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// When it was handed to the network.
    pub sent: f64,
    /// When its first byte left.
    pub start: f64,
    /// When its last byte had left.
    pub end: f64,
    /// When its last byte arrived.
    pub arrived: f64,
}

/// Simulates the Programs of training steps until steps are steady. Device `i` of the cluster runs peer `i`.
///
/// # Errors
///
/// The cluster has fewer or more devices than there are peers. Or no link leads from a sender to its receiver. Or a
/// Program waits for a message that no other sends.
pub fn simulate(programs: &[Program], cluster: &Cluster, options: &SimulateOptions) -> Result<Simulation, PlanError> {
    Simulator::new(programs, cluster, options)?.run(options.record)
}

/// Programs that are simulated again and again with other codecs. The work of their operators is added up once.
pub(crate) struct Simulator<'a> {
    cluster: &'a Cluster,
    load: load::Load,
}

impl<'a> Simulator<'a> {
    /// The errors are those of [`simulate`].
    pub(crate) fn new(
        programs: &[Program],
        cluster: &'a Cluster,
        options: &SimulateOptions,
    ) -> Result<Self, PlanError> {
        if programs.len() != cluster.devices().len() {
            return Err(PlanError::Cluster(format!(
                "{} devices for {} peers",
                cluster.devices().len(),
                programs.len()
            )));
        }
        Ok(Self { cluster, load: load::Load::new(programs, cluster, options)? })
    }

    /// Takes over the codecs of the same programs.
    pub(crate) fn set_codecs(&mut self, programs: &[Program]) -> Result<(), PlanError> {
        self.load.code(programs, self.cluster)
    }

    /// Simulates steps until they are steady.
    pub(crate) fn run(&self, record: bool) -> Result<Simulation, PlanError> {
        engine::Engine::new(&self.load, self.cluster, record).run()
    }
}
