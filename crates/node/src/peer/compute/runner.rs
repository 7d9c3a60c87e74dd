//! The computing thread of a peer in one generation, and its connection to the tasks around it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use fusionllm_backend::machine::memory::resident_peak;
use fusionllm_compress::Codec;
use fusionllm_exec::{Communicator, EncodeOptions, ExecError, Executor, PassStats, Script, Snapshot, StableRanks};
use fusionllm_graph::{HostTensor, ValueId};
use fusionllm_plan::Activity;
use fusionllm_program::{Address, PassKind, PeerId, Program, Verdict};
use fusionllm_protocol::{
    Assignment, CodecError, CodecSpectrum, ComputeCommand, FromPeer, Inbox, MemberId, PassReport, ReceivedBytes,
    SentBytes, TensorHeader,
};
use fusionllm_workbench::machine::memory;

use super::codecs::{Codecs, Watch};
use super::mailbox::Mailbox;
use super::receive::Throughput;
use super::recorder::Recorder;
use crate::NodeError;
use crate::net::Outbox;
use crate::peer::progress::Progress;

/// The computing thread, once everything is loaded.
pub(crate) struct ProgramRunner {
    pub(crate) executor: Executor,
    pub(crate) assignment: Arc<Assignment>,
    pub(crate) train: Program,
    pub(crate) link: NetLink,
}

impl ProgramRunner {
    /// Carries out commands until their sender is dropped. `keep` gets each snapshot, its step, and whether to save it.
    pub(crate) fn work(
        mut self,
        commands: &mpsc::Receiver<ComputeCommand>,
        keep: impl Fn(Snapshot, u64, bool) -> Result<(), NodeError>,
    ) -> Result<(), NodeError> {
        tracing::info!("everything is loaded");
        let scripts = [self.executor.prepare(&self.train)?, self.executor.prepare(&self.assignment.eval)?];
        self.link.control.control(&FromPeer::Ready { generation: self.assignment.generation })?;
        loop {
            let next = self.link.progress.while_waiting(MemberId::BROKER, || commands.recv());
            match next {
                Err(_) => return Ok(()),
                Ok(ComputeCommand::Run { pass, version, kind, step, inspect }) => {
                    let _span = tracing::info_span!("pass", number = pass, ?kind, step).entered();
                    self.executor.set_inspect(inspect);
                    self.run(&scripts, pass, version, kind, step)?;
                }
                // The lane keeps its order: all earlier passes are over.
                Ok(ComputeCommand::SetCodecs { version, codecs }) => self.train.set_codecs(version, codecs)?,
                Ok(ComputeCommand::Snapshot { step, save }) => keep(self.executor.snapshot(&self.train), step, save)?,
            }
        }
    }

    /// `scripts` are those of training and evaluation.
    fn run(
        &mut self,
        [train, eval]: &[Script; 2],
        pass: u64,
        version: u32,
        kind: PassKind,
        step: u64,
    ) -> Result<(), NodeError> {
        if version != self.train.version {
            let ours = self.train.version;
            return Err(NodeError::Protocol(format!(
                "pass {pass} needs version {version} of the plan, but the last one sent is {ours}"
            )));
        }
        self.link.kind = kind;
        self.link.watched = self.watched(step);
        let (program, script) = match kind {
            PassKind::Train => (&self.train, train),
            PassKind::Eval => (&self.assignment.eval, eval),
        };
        tracing::debug!("begins");
        self.link.recorder.begin(kind == PassKind::Train);
        let stats = self.executor.run(program, script, pass, step, &mut self.link)?;
        tracing::debug!(compute_s = stats.compute_s, wait_s = stats.wait_s, "is done");
        self.link.done(pass, stats)
    }

    /// The measurements in the step after `step` steps. Micro-batches take turns.
    fn watched(&self, step: u64) -> Watched {
        let every = self.assignment.compression.spectral_watch;
        let micro_batch = (step % u64::from(self.train.micro_batches)) as u32;
        let spectra = every > 0 && (step + 1).is_multiple_of(every);
        Watched { micro_batch, watch: if spectra { Watch::Spectrum } else { Watch::Error } }
    }
}

/// Sends and receives for the executor.
pub(crate) struct NetLink {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) inbox: Arc<Mutex<Inbox>>,
    pub(crate) outboxes: BTreeMap<PeerId, Outbox>,
    /// The members, by their place in the plan.
    pub(crate) members: Vec<MemberId>,
    /// The queue of messages to the broker.
    pub(crate) control: Outbox,
    pub(crate) throughput: Throughput,
    pub(crate) codecs: Codecs,
    pub(crate) progress: Arc<Progress>,
    /// The kind of the pass in flight.
    pub(crate) kind: PassKind,
    pub(crate) watched: Watched,
    /// Whether tensors are in this process's memory.
    pub(crate) on_host: bool,
    /// Bytes sent in this pass without a codec.
    pub(crate) sent: BTreeMap<PeerId, u64>,
    pub(crate) recorder: Recorder,
}

/// The micro-batch whose encoded messages are measured in a pass.
#[derive(Clone, Copy)]
pub(crate) struct Watched {
    micro_batch: u32,
    watch: Watch,
}

impl Watched {
    /// Nothing is measured.
    pub(crate) const NOTHING: Self = Self { micro_batch: 0, watch: Watch::Off };
}

impl NetLink {
    /// Reports a finished pass to the broker.
    fn done(&mut self, pass: u64, stats: PassStats) -> Result<(), NodeError> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).passes_done(pass);
        let PassStats { compute_s, wait_s, total_s, peak_bytes, poison } = stats;
        let tally = self.codecs.tally()?;
        for (to, bytes) in tally.sent {
            *self.sent.entry(to).or_default() += bytes;
        }
        let sent = std::mem::take(&mut self.sent);
        let received = std::mem::take(&mut *self.throughput.lock().unwrap_or_else(PoisonError::into_inner));
        let received = received.into_iter().map(|(from, a)| ReceivedBytes { from, bytes: a.bytes, seconds: a.seconds });
        // Without a counting allocator, or on another device, only the bytes of tensors are known.
        let peak_bytes = if self.on_host && memory::live_bytes() > 0 { memory::take_peak() } else { peak_bytes };
        let resident_bytes = resident_peak();
        let error = |(to, relative_error)| CodecError { to, relative_error };
        let spectrum =
            |(to, ranks): (PeerId, StableRanks)| CodecSpectrum { to, exact: ranks.exact, decoded: ranks.decoded };
        let (spans, arrivals) = self.recorder.take();
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
            spans,
            arrivals,
            poison,
        };
        self.mailbox.done(pass);
        self.control.control(&FromPeer::PassDone { pass, report })
    }

    fn member(&self, peer: PeerId) -> MemberId {
        self.members.get(peer.0 as usize).copied().unwrap_or(MemberId::BROKER)
    }
}

fn link_error(e: NodeError) -> ExecError {
    ExecError::Communication(e.to_string())
}

impl Communicator for NetLink {
    fn receive(&mut self, pass: u64, tensor: Address, from: PeerId) -> Result<HostTensor, ExecError> {
        let header = TensorHeader { pass, kind: self.kind, tensor, coded: false };
        let member = self.member(from);
        tracing::trace!("needs {tensor} from {member}");
        let taken = self.progress.while_waiting(member, || self.mailbox.take(&header));
        self.recorder.until_now(Activity::Wait, tensor.micro_batch());
        taken.map_err(ExecError::Communication)
    }

    fn send(
        &mut self,
        pass: u64,
        tensor: Address,
        to: PeerId,
        content: HostTensor,
        coding: EncodeOptions,
    ) -> Result<(), ExecError> {
        let outbox = self
            .outboxes
            .get(&to)
            .ok_or_else(|| ExecError::Communication(format!("there is no connection to peer {}", to.0)))?;
        let header = TensorHeader { pass, kind: self.kind, tensor, coded: false };
        if coding.codec != Codec::None {
            let watch = match tensor {
                Address::Value { micro_batch, .. } if micro_batch == self.watched.micro_batch => self.watched.watch,
                _ => Watch::Off,
            };
            return self.codecs.send(header, content, coding, watch, to, outbox);
        }
        *self.sent.entry(to).or_default() += content.bytes().len() as u64;
        outbox.tensor(&header, content).map_err(link_error)
    }

    fn report(&mut self, pass: u64, report: u32, micro_batch: u32, value: f64) -> Result<(), ExecError> {
        self.control.control(&FromPeer::Report { pass, report, micro_batch, value }).map_err(link_error)
    }

    fn verdict(&mut self, pass: u64, squared_norms: Vec<(ValueId, f64)>) -> Result<Verdict, ExecError> {
        tracing::debug!("needs the verdict");
        self.control.control(&FromPeer::Norms { pass, squared_norms }).map_err(link_error)?;
        self.recorder.until_now(Activity::Update, None);
        let verdict = self.progress.while_waiting(MemberId::BROKER, || self.mailbox.verdict(pass));
        self.recorder.until_now(Activity::Verdict, None);
        verdict.map_err(ExecError::Communication)
    }

    fn instruction_done(&mut self, index: usize) -> Result<(), ExecError> {
        self.progress.bump();
        self.recorder.done(index);
        // A generation that was stopped ends at once, and not only where its program waits.
        match self.mailbox.failure() {
            Some(reason) => Err(ExecError::Communication(reason)),
            None => Ok(()),
        }
    }
}
