//! A joiner: takes its share of a run, computes, and answers to the broker.
//!
//! One thread computes; everything else is asynchronous. Between them stand a [`Mailbox`] for what comes in and an [`Outbox`] per connection for what goes out, so that computing waits for
//! nothing but what its Program waits for.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fusionllm_backend::Backend;
use fusionllm_compress::Codec;
use fusionllm_exec::{Communicator, EncodeOptions, ExecError, Executor, PassStats, Snapshot};
use fusionllm_graph::{HostTensor, ValueId, ValueKind};
use fusionllm_plan::{Device, Instruction, PeerId, Program, Slot, Verdict};
use fusionllm_protocol::{
    Assignment, BulkHeader, FromPeer, Hello, Inbox, MAX_ASSIGNMENT_BYTES, PassReport, TensorHeader, ToPeer, VERSION,
    decode, encode,
};
use fusionllm_transport::{
    Allowed, ConnectError, Connection, DisconnectReason, Endpoint, EndpointOptions, Lanes, PeerAddr, Receiver, Ticket,
};

use crate::coding::{Codecs, Watch};
use crate::survey::Surveyed;
use crate::wire::{self, Mailbox, Outbox};
use crate::{NodeError, memory};

/// How a joiner takes part.
pub struct JoinOptions {
    /// The broker's ticket.
    pub ticket: Ticket,
    /// What to compute with.
    pub backend: Arc<dyn Backend>,
    /// What to be called; empty leaves it to the broker.
    pub name: String,
    /// Where to listen and talk to none but the addresses that are given, for emulated links; `None` in real networks.
    pub pinned: Option<SocketAddr>,
    /// How many times slower than this machine to be, at least 1. If more, the backend gets one thread.
    pub slowdown: f64,
    /// What was measured of this machine; `None` to measure it briefly where the broker asks.
    pub profile: Option<Device>,
    /// Bytes of memory that the run may count on; `None` for what is free.
    pub memory: Option<u64>,
}

/// How many passes may be under way; the broker issues no more.
pub const WINDOW: u64 = 3;

/// How long peers may take to find each other once they are assigned.
const MEETING: Duration = Duration::from_secs(120);

/// Smaller messages tell nothing of a link's rate: they come in a few packets at once, the first of which is there when the clock starts.
const TELLING: usize = 8 << 10;

/// Payload bytes of large messages and the seconds that they took to come, by sender, in the pass under way.
type Throughput = Arc<Mutex<BTreeMap<PeerId, (u64, f64)>>>;

/// Takes part in a run until the broker ends it. Whether it had a share in it: a plan may leave machines out.
pub async fn join(options: JoinOptions) -> Result<bool, NodeError> {
    let (allowed, pinned) = (Allowed::Only(BTreeSet::new()), options.pinned);
    let endpoint =
        Endpoint::bind(EndpointOptions { allowed, listen: pinned, pinned: pinned.is_some(), ..EndpointOptions::new() })
            .await?;
    let result = take_part(&endpoint, options).await;
    let reason = result.as_ref().err().map(NodeError::to_string).unwrap_or_default();
    endpoint.close(&reason).await;
    result
}

async fn take_part(endpoint: &Endpoint, options: JoinOptions) -> Result<bool, NodeError> {
    let JoinOptions { ticket, backend, name, slowdown, profile, memory, .. } = options;
    let (broker, mut lanes) =
        endpoint.connect(&ticket.addr).await.map_err(|e| NodeError::Network(format!("the broker: {e}")))?;
    let hello = Hello {
        version: VERSION,
        secret: *ticket.secret.as_bytes(),
        name,
        backend: backend.name().into(),
        device: backend.device().name,
        addr: encode(&endpoint.addr()).map_err(NodeError::Protocol)?,
    };
    wire::send_control(&broker, &FromPeer::Hello(hello)).await?;
    let surveyed = Surveyed {
        endpoint,
        broker: &ticket.addr,
        backend: backend.clone(),
        slowdown,
        profile,
        memory,
        peers: Vec::new(),
        answering: None,
    };
    let Some(assignment) = assignment(&broker, &mut lanes, surveyed).await? else { return Ok(false) };
    tracing::info!(peer = assignment.peer.0, nodes = assignment.train.nodes.len(), "assigned");
    let failing = broker.clone();
    match run(endpoint, broker, lanes, assignment, backend, slowdown).await {
        Ok(()) => Ok(true),
        Err(e) => {
            let message = match &e {
                NodeError::LostPeer { peer, reason, .. } => FromPeer::PeerLost { peer: *peer, reason: reason.clone() },
                e => FromPeer::Failed { reason: e.to_string() },
            };
            // The broker may be what is gone.
            if wire::send_control(&failing, &message).await.is_ok() {
                let _ = tokio::time::timeout(Duration::from_secs(1), failing.finish()).await;
            }
            Err(e)
        }
    }
}

/// Waits for the assignment, and answers for its machine until then; `None` if the run was called off in good order before it began, or goes on without this peer.
async fn assignment(
    broker: &Connection,
    lanes: &mut Lanes,
    mut surveyed: Surveyed<'_>,
) -> Result<Option<Assignment>, NodeError> {
    loop {
        tokio::select! {
            message = wire::next_control::<ToPeer>(&mut lanes.control) => match message? {
                Some(ToPeer::Refused { reason }) => return Err(NodeError::Refused(reason)),
                Some(ToPeer::Stop { reason }) if reason.is_empty() => return Ok(None),
                Some(ToPeer::Stop { reason }) => return Err(NodeError::Stopped(reason)),
                Some(message) => {
                    let answer = surveyed.answer(message).await?;
                    wire::send_control(broker, &answer).await?;
                }
                None => return Err(NodeError::Protocol("the broker closed its control lane".into())),
            },
            frame = lanes.bulk.next() => {
                let Some(frame) = frame? else {
                    return Err(NodeError::Protocol("the broker closed its bulk lane".into()));
                };
                return match decode(frame.header()).map_err(NodeError::Protocol)? {
                    BulkHeader::Assign => {
                        let bytes = frame.read(MAX_ASSIGNMENT_BYTES).await?;
                        Ok(Some(decode(&bytes).map_err(|e| NodeError::Protocol(format!("the assignment: {e}")))?))
                    }
                    other => Err(NodeError::Protocol(format!("the broker sent {other:?} before an assignment"))),
                };
            }
        }
    }
}

/// What kernels compute with: all threads of the process, or one where pacing counts its time.
pub(crate) fn threads(slowdown: f64) -> Result<rayon::ThreadPool, NodeError> {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(usize::from(slowdown > 1.0)).build();
    threads.map_err(|e| NodeError::State(format!("cannot start threads: {e}")))
}

/// The peers that a peer's programs exchange tensors with.
pub(crate) fn neighbours(programs: &[&Program]) -> BTreeSet<PeerId> {
    programs
        .iter()
        .flat_map(|p| &p.instructions)
        .filter_map(|i| match i {
            Instruction::Receive { from, .. } => Some(*from),
            Instruction::Send { to, .. } => Some(*to),
            _ => None,
        })
        .filter(|p| *p != PeerId::BROKER)
        .collect()
}

async fn run(
    endpoint: &Endpoint,
    broker: Connection,
    mut lanes: Lanes,
    assignment: Assignment,
    backend: Arc<dyn Backend>,
    slowdown: f64,
) -> Result<(), NodeError> {
    assignment.validate()?;
    let peer = assignment.peer;
    let addresses = assignment
        .peers
        .iter()
        .map(|(name, addr)| Ok((name.clone(), decode::<PeerAddr>(addr).map_err(NodeError::Protocol)?)))
        .collect::<Result<Vec<_>, NodeError>>()?;
    endpoint.allow(Allowed::Only(addresses.iter().map(|(_, a)| a.key).collect()));
    let wanted = neighbours(&[&assignment.train, &assignment.eval]);

    let name_of = |p: PeerId| addresses[p.0 as usize].0.clone();
    let meeting = meet(endpoint, peer, &addresses, &wanted);
    let mut executor = Executor::new(backend, assignment.optimizer, assignment.seed);
    executor.set_slowdown(slowdown);
    let loading = load(&mut lanes.bulk, &assignment, executor);
    let (connections, mut executor) = tokio::try_join!(meeting, loading)?;
    let Assignment { train, eval, compression, .. } = assignment;
    executor.prepare(&train)?;
    executor.prepare(&eval)?;

    let mailbox = Arc::new(Mailbox::default());
    let inbox = Arc::new(Mutex::new(Inbox::new(&train, &eval, WINDOW)));
    let (commands, queue) = mpsc::channel();
    let throughput = Throughput::default();
    let codecs = Codecs::start(mailbox.clone(), commands.clone(), compression.error_feedback)?;
    let mut outboxes = BTreeMap::new();
    outboxes.insert(PeerId::BROKER, Outbox::new(broker.clone()));
    let mut tasks = tokio::task::JoinSet::new();
    let arrivals = Arrivals {
        inbox: inbox.clone(),
        mailbox: mailbox.clone(),
        codecs: codecs.clone(),
        throughput: throughput.clone(),
        commands: commands.clone(),
    };
    tasks.spawn(receive_tensors(lanes.tensors, PeerId::BROKER, "the broker".into(), arrivals.clone()));
    for (p, (connection, lanes)) in connections {
        outboxes.insert(p, Outbox::new(connection));
        tasks.spawn(receive_tensors(lanes.tensors, p, name_of(p), arrivals.clone()));
    }

    drop(arrivals);
    tasks.spawn(receive_commands(lanes.control, mailbox.clone(), commands));
    let control = outboxes[&PeerId::BROKER].clone();
    control.control(&FromPeer::Ready)?;

    let runtime = tokio::runtime::Handle::current();
    // Kernels share their work among these threads. That the Program runs on one of them saves a hand-over at every kernel, and where there is
    // but one, its CPU time is the kernels'.
    let threads = threads(slowdown)?;
    let worker = std::thread::Builder::new().name("compute".into()).spawn({
        let mailbox = mailbox.clone();
        let saver = broker.clone();
        move || {
            let worker = Worker {
                executor,
                train,
                eval,
                link: NetLink {
                    mailbox,
                    outboxes,
                    control,
                    throughput,
                    train: true,
                    watched: (0, Watch::Off),
                    codecs,
                    sent: BTreeMap::new(),
                },
                spectral_watch: compression.spectral_watch,
                inbox,
            };
            let save = |snapshot, step| drop(runtime.spawn(stream_snapshot(saver.clone(), snapshot, step)));
            threads.install(move || worker.work(queue, save))
        }
    });
    let worker = worker.map_err(|e| NodeError::State(format!("cannot start a thread: {e}")))?;
    let result = tokio::task::spawn_blocking(move || worker.join())
        .await
        .map_err(|e| NodeError::State(e.to_string()))?
        .unwrap_or_else(|_| {
            Err(NodeError::State("the computing thread panicked; this is a bug, please report it".into()))
        });
    tasks.abort_all();
    // A lost peer is the reason, not the computation that waited for it.
    match (result, mailbox.lost()) {
        (Err(_), Some((p, reason))) if p != PeerId::BROKER => {
            Err(NodeError::LostPeer { peer: p, name: name_of(p), reason })
        }
        (Err(_), Some((_, reason))) => Err(NodeError::Network(format!("lost the broker: {reason}"))),
        (result, _) => result,
    }
}

/// Connects to the neighbours: to those with a higher number ourselves, the others come to us.
async fn meet(
    endpoint: &Endpoint,
    me: PeerId,
    addresses: &[(String, PeerAddr)],
    wanted: &BTreeSet<PeerId>,
) -> Result<BTreeMap<PeerId, (Connection, Lanes)>, NodeError> {
    let mut met = BTreeMap::new();
    let dialling = async {
        let mut dialled = Vec::new();
        for &p in wanted.iter().filter(|p| **p > me) {
            let (_, addr) = &addresses[p.0 as usize];
            let link = loop {
                match endpoint.connect(addr).await {
                    Ok(link) => break link,
                    // It has not been told of us yet.
                    Err(ConnectError::Refused(_)) => tokio::time::sleep(Duration::from_millis(20)).await,
                    Err(e) => return Err(NodeError::Network(e.to_string())),
                }
            };
            dialled.push((p, link));
        }
        Ok(dialled)
    };
    let expected = wanted.iter().filter(|p| **p < me).count();
    let answering = async {
        let mut answered: BTreeMap<PeerId, (Connection, Lanes)> = BTreeMap::new();
        while answered.len() < expected {
            let Some((connection, lanes)) = endpoint.accept().await else {
                return Err(NodeError::Network("the endpoint was closed".into()));
            };
            let key = connection.peer();
            let who = addresses.iter().position(|(_, a)| a.key == key).map(|i| PeerId(i as u32));
            match who {
                Some(p) if p < me && wanted.contains(&p) => {
                    answered.insert(p, (connection, lanes));
                }
                _ => connection.close("there is nothing to exchange"),
            }
        }
        Ok(answered)
    };
    let both = async { tokio::try_join!(dialling, answering) };
    match tokio::time::timeout(MEETING, both).await {
        Ok(result) => {
            let (dialled, answered) = result?;
            met.extend(answered);
            met.extend(dialled);
            Ok(met)
        }
        Err(_) => Err(NodeError::Network(format!(
            "not all peers could reach each other within {} s; check that no firewall keeps UDP between them",
            MEETING.as_secs()
        ))),
    }
}

/// Fills the executor: what the broker streams as it comes, the rest drawn from the seed.
async fn load(bulk: &mut Receiver, assignment: &Assignment, mut executor: Executor) -> Result<Executor, NodeError> {
    let kept = assignment.kept();
    let mut loads = assignment.loads.clone();
    for (name, value) in &kept {
        if loads.contains(&(name.to_string(), None)) {
            continue;
        }
        match &value.kind {
            ValueKind::Parameter(init) | ValueKind::Buffer(init) => {
                executor.load(name, &init.draw(assignment.seed, name, &value.ty)?)?
            }
            _ => return Err(NodeError::Protocol(format!("constant {name:?} is not among what is loaded"))),
        }
    }
    while !loads.is_empty() {
        let Some(frame) = bulk.next().await? else {
            return Err(NodeError::Protocol("the broker stopped before all was loaded".into()));
        };
        let BulkHeader::Load { name, slot } = decode(frame.header()).map_err(NodeError::Protocol)? else {
            return Err(NodeError::Protocol("the broker sent something else than what is to be loaded".into()));
        };
        let key = (name, slot);
        let Some(value) = kept.get(key.0.as_str()).filter(|_| loads.remove(&key)) else {
            return Err(NodeError::Protocol(format!("the broker sent {:?}, which is not to be loaded", key.0)));
        };
        let ty = value.ty.clone();
        let mut bytes = vec![0; ty.bytes()];
        frame.read_into(&mut bytes).await?;
        let tensor = HostTensor::from_bytes(ty, bytes)?;
        match key {
            (name, None) => executor.load(&name, &tensor)?,
            (name, Some(slot)) => executor.load_slot(&name, &slot, &tensor)?,
        }
    }
    Ok(executor)
}

/// Where what comes from other peers goes.
#[derive(Clone)]
struct Arrivals {
    inbox: Arc<Mutex<Inbox>>,
    mailbox: Arc<Mailbox>,
    codecs: Codecs,
    throughput: Throughput,
    commands: mpsc::Sender<ToPeer>,
}

/// Puts a peer's tensors into the mailbox, each checked before it is allocated; what is coded goes by way of the codecs.
async fn receive_tensors(mut lane: Receiver, from: PeerId, name: String, arrivals: Arrivals) {
    let Arrivals { inbox, mailbox, codecs, throughput, commands } = arrivals;
    let sender: Arc<str> = name.as_str().into();
    let result: Result<(), NodeError> = async {
        while let Some(frame) = lane.next().await? {
            let header: TensorHeader = decode(frame.header()).map_err(NodeError::Protocol)?;
            let ty = {
                let mut inbox = inbox.lock().unwrap_or_else(PoisonError::into_inner);
                inbox.admit(from, &header, frame.payload_len()).map_err(|v| NodeError::Protocol(v.to_string()))?
            };
            let mut bytes = vec![0; frame.payload_len() as usize];
            let begun = Instant::now();
            frame.read_into(&mut bytes).await?;
            if bytes.len() >= TELLING && from != PeerId::BROKER {
                let mut throughput = throughput.lock().unwrap_or_else(PoisonError::into_inner);
                let (sum, seconds) = throughput.entry(from).or_default();
                *sum += bytes.len() as u64;
                *seconds += begun.elapsed().as_secs_f64();
            }
            if header.coded {
                codecs.receive(header, bytes, ty, &sender)?;
            } else {
                mailbox.put(header, HostTensor::from_bytes(ty, bytes)?);
            }
        }
        Ok(())
    }
    .await;
    let reason = match result {
        // A peer that was told to stop before this one was leaves in good order.
        Ok(()) => return,
        Err(NodeError::Lost(DisconnectReason::ClosedByPeer(reason))) if reason.is_empty() => return,
        Err(NodeError::Lost(cause)) => {
            mailbox.lose(from, cause.to_string());
            format!("lost {name}: {cause}")
        }
        Err(e) => {
            mailbox.fail(format!("{name}: {e}"));
            format!("{name}: {e}")
        }
    };
    // The computing thread may be waiting for a command rather than for a tensor. If it is gone, all is said.
    let _ = commands.send(ToPeer::Stop { reason });
}

/// Hands the broker's commands on, and its verdicts to whoever waits for them.
async fn receive_commands(mut lane: Receiver, mailbox: Arc<Mailbox>, commands: mpsc::Sender<ToPeer>) {
    loop {
        match wire::next_control::<ToPeer>(&mut lane).await {
            Ok(Some(ToPeer::Verdict { pass, verdict })) => mailbox.judge(pass, verdict),
            Ok(Some(message)) => {
                if let ToPeer::Stop { reason } = &message
                    && !reason.is_empty()
                {
                    mailbox.fail(format!("the broker stopped the run: {reason}"));
                }
                if commands.send(message).is_err() {
                    return;
                }
            }
            Ok(None) => return,
            Err(e) => {
                match &e {
                    NodeError::Lost(cause) => mailbox.lose(PeerId::BROKER, cause.to_string()),
                    e => mailbox.fail(format!("the broker: {e}")),
                }
                let _ = commands.send(ToPeer::Stop { reason: e.to_string() });
                return;
            }
        }
    }
}

/// Streams a snapshot to the broker behind everything more urgent.
async fn stream_snapshot(broker: Connection, snapshot: Snapshot, step: u64) {
    let snapshot = Arc::new(snapshot);
    for i in 0..snapshot.tensors.len() {
        let s = snapshot.clone();
        let Ok(Ok(tensor)) = tokio::task::spawn_blocking(move || s.download(&s.tensors[i])).await else {
            let reason = "a snapshot could not be read".into();
            // If the broker is gone, nobody waits for it.
            let _ = wire::send_control(&broker, &FromPeer::Failed { reason }).await;
            return;
        };
        let t = &snapshot.tensors[i];
        let header =
            BulkHeader::Saved { step, name: t.name.clone(), slot: t.slot.map(str::to_owned), ty: tensor.ty().clone() };
        if wire::send_bulk(&broker, &header, vec![Bytes::from(tensor.into_bytes())]).await.is_err() {
            return;
        }
    }
    // Whether the broker is still there shows elsewhere.
    let _ = wire::send_bulk(&broker, &BulkHeader::SavedAll { step }, Vec::new()).await;
}

/// The computing thread.
struct Worker {
    executor: Executor,
    train: Program,
    eval: Program,
    link: NetLink,
    inbox: Arc<Mutex<Inbox>>,
    /// Steps from one measurement of spectra to the next, if there are any.
    spectral_watch: u64,
}

impl Worker {
    fn work(mut self, commands: mpsc::Receiver<ToPeer>, save: impl Fn(Snapshot, u64)) -> Result<(), NodeError> {
        while let Ok(command) = commands.recv() {
            match command {
                ToPeer::Run { pass, version, train, step } => {
                    if version != self.train.version {
                        let ours = self.train.version;
                        return Err(NodeError::Protocol(format!(
                            "pass {pass} is to run by version {version} of the plan, the last one sent is {ours}"
                        )));
                    }
                    let program = if train { &self.train } else { &self.eval };
                    self.link.train = train;
                    self.link.watched = self.watched(step);
                    let stats = self.executor.run(program, pass, step, &mut self.link)?;
                    self.inbox.lock().unwrap_or_else(PoisonError::into_inner).done(pass);
                    self.link.done(pass, stats)?;
                }
                // All passes that it came behind are over.
                ToPeer::SetCodecs { version, codecs } => {
                    self.train.set_codecs(version, codecs)?;
                    self.link.codecs.recode()?;
                }
                ToPeer::Snapshot { step } => save(self.executor.snapshot(&self.train), step),
                ToPeer::Stop { reason } if reason.is_empty() => return Ok(()),
                ToPeer::Stop { reason } => return Err(NodeError::Stopped(reason)),
                ToPeer::Refused { reason } => return Err(NodeError::Refused(reason)),
                // Went to the mailbox.
                ToPeer::Verdict { .. } => {}
                ToPeer::Measure { .. } | ToPeer::Probe { .. } | ToPeer::StopProbing => {
                    return Err(NodeError::Protocol("the broker asked for measurements in the middle of a run".into()));
                }
            }
        }
        Err(NodeError::Network("the broker is gone".into()))
    }

    /// The micro-batch whose messages are watched in the step after `step` ones, each in its turn, and how closely.
    fn watched(&self, step: u64) -> (u32, Watch) {
        let micro_batch = (step % u64::from(self.train.micro_batches)) as u32;
        let spectra = self.spectral_watch > 0 && (step + 1).is_multiple_of(self.spectral_watch);
        (micro_batch, if spectra { Watch::Spectrum } else { Watch::Error })
    }
}

/// The executor's way out of this process.
struct NetLink {
    mailbox: Arc<Mailbox>,
    outboxes: BTreeMap<PeerId, Outbox>,
    control: Outbox,
    throughput: Throughput,
    /// Whether the pass under way trains.
    train: bool,
    /// Which micro-batch's messages are watched in it, and how closely.
    watched: (u32, Watch),
    codecs: Codecs,
    /// Bytes sent in this pass, less those that the codecs tally.
    sent: BTreeMap<PeerId, u64>,
}

impl NetLink {
    fn done(&mut self, pass: u64, stats: PassStats) -> Result<(), NodeError> {
        let PassStats { compute_s, wait_s, total_s, peak_bytes } = stats;
        let tally = self.codecs.tally()?;
        for (to, bytes) in tally.sent {
            *self.sent.entry(to).or_default() += bytes;
        }
        let sent = std::mem::take(&mut self.sent).into_iter().collect();
        let received = std::mem::take(&mut *self.throughput.lock().unwrap_or_else(PoisonError::into_inner));
        let received = received.into_iter().map(|(from, (bytes, seconds))| (from, bytes, seconds)).collect();
        // A program whose allocator does not count knows its tensors at least.
        let peak_bytes = if memory::live_bytes() > 0 { memory::take_peak() } else { peak_bytes };
        let resident_bytes = memory::resident_peak();
        let report = PassReport {
            compute_s,
            wait_s,
            total_s,
            peak_bytes,
            resident_bytes,
            codec_s: tally.seconds,
            sent,
            errors: tally.errors.into_iter().collect(),
            spectra: tally.spectra.into_iter().map(|(to, (meant, received))| (to, meant, received)).collect(),
            received,
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
        self.mailbox
            .take(&TensorHeader { pass, train: self.train, slot, coded: false })
            .map_err(ExecError::Communication)
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
        let header = TensorHeader { pass, train: self.train, slot, coded: false };
        if coding.codec != Codec::None {
            let watch = match slot {
                Slot::Value { micro_batch, .. } if micro_batch == self.watched.0 => self.watched.1,
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
