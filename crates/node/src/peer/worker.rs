//! The computing thread of a peer, and its connection to the tasks around it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use fusionllm_compress::Codec;
use fusionllm_exec::{Communicator, EncodeOptions, ExecError, Executor, PassStats, Snapshot, StableRanks};
use fusionllm_graph::{HostTensor, ValueId};
use fusionllm_plan::{PassKind, PeerId, Program, Slot, Verdict};
use fusionllm_protocol::{
    CodecError, CodecSpectrum, FromPeer, Inbox, PassReport, ReceivedBytes, SentBytes, TensorHeader, ToPeer,
};

use super::codecs::{Codecs, Watch};
use super::mailbox::Mailbox;
use super::receive::Throughput;
use crate::NodeError;
use crate::machine::memory;
use crate::net::Outbox;

/// The computing thread.
pub(super) struct Worker {
    pub(super) executor: Executor,
    pub(super) train: Program,
    pub(super) eval: Program,
    pub(super) link: NetLink,
    pub(super) inbox: Arc<Mutex<Inbox>>,
    /// Steps from one measurement of spectra to the next; 0 for never.
    pub(super) spectral_watch: u64,
}

impl Worker {
    /// Carries out commands until the broker stops the run. `save` sends a snapshot of a step.
    pub(super) fn work(
        mut self,
        commands: mpsc::Receiver<ToPeer>,
        save: impl Fn(Snapshot, u64),
    ) -> Result<(), NodeError> {
        while let Ok(command) = commands.recv() {
            match command {
                ToPeer::Run { pass, version, kind, step } => {
                    if version != self.train.version {
                        let ours = self.train.version;
                        return Err(NodeError::Protocol(format!(
                            "pass {pass} needs version {version} of the plan, but the last one sent is {ours}"
                        )));
                    }
                    let program = match kind {
                        PassKind::Train => &self.train,
                        PassKind::Eval => &self.eval,
                    };
                    self.link.kind = kind;
                    self.link.watched = self.watched(step);
                    let stats = self.executor.run(program, pass, step, &mut self.link)?;
                    self.inbox.lock().unwrap_or_else(PoisonError::into_inner).passes_done(pass);
                    self.link.done(pass, stats)?;
                }
                // The lane keeps its order: all earlier passes are over.
                ToPeer::SetCodecs { version, codecs } => {
                    self.train.set_codecs(version, codecs)?;
                    self.link.codecs.set_codecs()?;
                }
                ToPeer::Snapshot { step } => save(self.executor.snapshot(&self.train), step),
                ToPeer::Stop { reason } if reason.is_empty() => return Ok(()),
                ToPeer::Stop { reason } => return Err(NodeError::Stopped(reason)),
                ToPeer::Refused { reason } => return Err(NodeError::Refused(reason)),
                // Verdicts go to the mailbox.
                ToPeer::Verdict { .. } => {}
                ToPeer::Measure { .. } | ToPeer::Probe { .. } | ToPeer::StopProbing => {
                    return Err(NodeError::Protocol("the broker asked for measurements in the middle of a run".into()));
                }
            }
        }
        Err(NodeError::Network("the broker is gone".into()))
    }

    /// What to measure in the step after `step` steps. Micro-batches take turns.
    fn watched(&self, step: u64) -> Watched {
        let micro_batch = (step % u64::from(self.train.micro_batches)) as u32;
        let spectra = self.spectral_watch > 0 && (step + 1).is_multiple_of(self.spectral_watch);
        Watched { micro_batch, watch: if spectra { Watch::Spectrum } else { Watch::Error } }
    }
}

/// Sends and receives for the executor.
pub(super) struct NetLink {
    mailbox: Arc<Mailbox>,
    outboxes: BTreeMap<PeerId, Outbox>,
    control: Outbox,
    throughput: Throughput,
    codecs: Codecs,
    /// The kind of the pass in flight.
    kind: PassKind,
    watched: Watched,
    /// Bytes sent in this pass without a codec.
    sent: BTreeMap<PeerId, u64>,
}

/// The micro-batch whose encoded messages are measured in a pass.
#[derive(Clone, Copy)]
struct Watched {
    micro_batch: u32,
    watch: Watch,
}

impl NetLink {
    pub(super) fn new(
        mailbox: Arc<Mailbox>,
        outboxes: BTreeMap<PeerId, Outbox>,
        control: Outbox,
        throughput: Throughput,
        codecs: Codecs,
    ) -> Self {
        let watched = Watched { micro_batch: 0, watch: Watch::Off };
        Self { mailbox, outboxes, control, throughput, codecs, kind: PassKind::Train, watched, sent: BTreeMap::new() }
    }

    /// Reports a finished pass to the broker.
    fn done(&mut self, pass: u64, stats: PassStats) -> Result<(), NodeError> {
        let PassStats { compute_s, wait_s, total_s, peak_bytes } = stats;
        let tally = self.codecs.tally()?;
        for (to, bytes) in tally.sent {
            *self.sent.entry(to).or_default() += bytes;
        }
        let sent = std::mem::take(&mut self.sent);
        let received = std::mem::take(&mut *self.throughput.lock().unwrap_or_else(PoisonError::into_inner));
        let received = received.into_iter().map(|(from, a)| ReceivedBytes { from, bytes: a.bytes, seconds: a.seconds });
        // Without a counting allocator, the tensors are all that is known.
        let peak_bytes = if memory::live_bytes() > 0 { memory::take_peak() } else { peak_bytes };
        let resident_bytes = memory::resident_peak();
        let error = |(to, relative_error)| CodecError { to, relative_error };
        let spectrum =
            |(to, ranks): (PeerId, StableRanks)| CodecSpectrum { to, exact: ranks.exact, decoded: ranks.decoded };
        let report = PassReport {
            compute_s,
            wait_s,
            total_s,
            peak_bytes,
            resident_bytes,
            codec_s: tally.seconds,
            sent: sent.into_iter().map(|(to, bytes)| SentBytes { to, bytes }).collect(),
            errors: tally.errors.into_iter().map(error).collect(),
            spectra: tally.spectra.into_iter().map(spectrum).collect(),
            received: received.collect(),
        };
        self.mailbox.done(pass);
        self.control.control(&FromPeer::PassDone { pass, report })
    }
}

fn link_error(e: NodeError) -> ExecError {
    ExecError::Communication(e.to_string())
}

impl Communicator for NetLink {
    fn receive(&mut self, pass: u64, slot: Slot, _from: PeerId) -> Result<HostTensor, ExecError> {
        self.mailbox.take(&TensorHeader { pass, kind: self.kind, slot, coded: false }).map_err(ExecError::Communication)
    }

    fn send(
        &mut self,
        pass: u64,
        slot: Slot,
        to: PeerId,
        tensor: HostTensor,
        coding: EncodeOptions,
    ) -> Result<(), ExecError> {
        let outbox = self
            .outboxes
            .get(&to)
            .ok_or_else(|| ExecError::Communication(format!("there is no connection to peer {}", to.0)))?;
        let header = TensorHeader { pass, kind: self.kind, slot, coded: false };
        if coding.codec != Codec::None {
            let watch = match slot {
                Slot::Value { micro_batch, .. } if micro_batch == self.watched.micro_batch => self.watched.watch,
                _ => Watch::Off,
            };
            return self.codecs.send(header, tensor, coding, watch, to, outbox);
        }
        *self.sent.entry(to).or_default() += tensor.bytes().len() as u64;
        outbox.tensor(&header, tensor).map_err(link_error)
    }

    fn report(&mut self, pass: u64, report: u32, micro_batch: u32, value: f64) -> Result<(), ExecError> {
        self.control.control(&FromPeer::Report { pass, report, micro_batch, value }).map_err(link_error)
    }

    fn verdict(&mut self, pass: u64, squared_norms: Vec<(ValueId, f64)>) -> Result<Verdict, ExecError> {
        self.control.control(&FromPeer::Norms { pass, squared_norms }).map_err(link_error)?;
        self.mailbox.verdict(pass).map_err(ExecError::Communication)
    }
}
