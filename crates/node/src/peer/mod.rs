//! A joiner: takes its share of a run, computes it, and reports to the broker.
//!
//! One thread computes, and everything else is asynchronous. A [`Mailbox`] holds what arrived for that thread, and an
//! [`Outbox`] per connection queues what it sends. So the thread waits only where its Program waits.

mod codecs;
mod connect;
mod mailbox;
mod receive;
mod state;
mod survey;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use codecs::Codecs;
use connect::connect;
use fusionllm_backend::Backend;
use fusionllm_exec::Executor;
use fusionllm_plan::{Device, PASSES_IN_FLIGHT, PeerId};
use fusionllm_protocol::{
    Assignment, BulkHeader, FromPeer, Hello, Inbox, MAX_ASSIGNMENT_BYTES, ToPeer, VERSION, decode, encode,
};
use fusionllm_transport::{Allowed, Connection, Endpoint, EndpointOptions, Lanes, PeerAddr, Ticket};
use mailbox::Mailbox;
use receive::{Arrivals, Throughput, receive_commands, receive_tensors};
use state::{load, stream_snapshot};
use survey::Surveyed;
use tokio::task::JoinSet;
use worker::{NetLink, Worker};

use crate::NodeError;
use crate::machine::compute_threads;
use crate::net::{self, Outbox, neighbours};

/// How a joiner takes part.
pub struct JoinOptions {
    /// The broker's ticket.
    pub ticket: Ticket,
    /// What to compute with.
    pub backend: Arc<dyn Backend>,
    /// The peer's name; if empty, the broker chooses one.
    pub name: String,
    /// For emulated links: the address to listen at. The peer then talks to no address but those it is given. `None` in
    /// real networks.
    pub pinned: Option<SocketAddr>,
    /// How many times slower than this machine to compute, at least 1. Above 1, the backend gets one thread.
    pub slowdown: f64,
    /// A profile of this machine; `None` to measure it briefly if the broker asks.
    pub profile: Option<Device>,
    /// Bytes of memory that the run may use; `None` for all that is free.
    pub memory: Option<u64>,
}

/// How long a failed peer tries to tell the broker why.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);

/// Takes part in a run until the broker ends it. Returns whether this peer had a share, as a plan may leave machines
/// out.
///
/// # Errors
///
/// The broker refuses this peer or stops the run, a connection is lost, or computing fails.
pub async fn join(options: JoinOptions) -> Result<bool, NodeError> {
    let (allowed, pinned) = (Allowed::Only(BTreeSet::new()), options.pinned);
    let endpoint =
        Endpoint::bind(EndpointOptions { allowed, listen: pinned, pinned: pinned.is_some(), ..EndpointOptions::new() })
            .await?;
    let result = take_part(&endpoint, options).await;
    let reason = result.as_ref().err().map(NodeError::one_line).unwrap_or_default();
    endpoint.close(&reason).await;
    result
}

async fn take_part(endpoint: &Endpoint, options: JoinOptions) -> Result<bool, NodeError> {
    let JoinOptions { ticket, backend, name, slowdown, profile, memory, .. } = options;
    let (broker, mut lanes) = endpoint.connect(&ticket.addr).await.map_err(NodeError::BrokerUnreachable)?;
    let hello = Hello {
        version: VERSION,
        secret: *ticket.secret.as_bytes(),
        name,
        backend: backend.name().into(),
        device: backend.device().name,
        addr: encode(&endpoint.addr()).map_err(NodeError::Protocol)?,
    };
    net::send_control(&broker, &FromPeer::Hello(hello)).await?;
    let surveyed = Surveyed {
        endpoint,
        broker: &ticket.addr,
        backend: backend.clone(),
        slowdown,
        profile,
        memory,
        peers: Vec::new(),
        responder: None,
    };
    let Some(assignment) = assignment(&broker, &mut lanes, surveyed).await? else { return Ok(false) };
    tracing::info!(peer = assignment.peer.0, nodes = assignment.train.nodes.len(), "assigned");
    match run(endpoint, broker.clone(), lanes, assignment, backend, slowdown).await {
        Ok(()) => Ok(true),
        Err(e) => {
            let message = match &e {
                NodeError::LostPeer { peer, reason, .. } => FromPeer::PeerLost { peer: *peer, reason: reason.clone() },
                e => FromPeer::Failed { reason: e.one_line() },
            };
            // The broker itself may be gone.
            if net::send_control(&broker, &message).await.is_ok() {
                let _ = tokio::time::timeout(FAREWELL_TIMEOUT, broker.finish()).await;
            }
            Err(e)
        }
    }
}

/// Waits for the assignment, and answers the broker's survey until then. Returns `None` if the run ended before it
/// began, or if its plan does not use this peer.
async fn assignment(
    broker: &Connection,
    lanes: &mut Lanes,
    mut surveyed: Surveyed<'_>,
) -> Result<Option<Assignment>, NodeError> {
    loop {
        tokio::select! {
            message = net::next_control::<ToPeer>(&mut lanes.control) => match message? {
                Some(ToPeer::Refused { reason }) => return Err(NodeError::Refused(reason)),
                Some(ToPeer::Stop { reason }) if reason.is_empty() => return Ok(None),
                Some(ToPeer::Stop { reason }) => return Err(NodeError::Stopped(reason)),
                Some(message) => {
                    let answer = surveyed.answer(message).await?;
                    net::send_control(broker, &answer).await?;
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

/// Connects to the neighbours, loads the peer's tensors, and computes until the run ends.
async fn run(
    endpoint: &Endpoint,
    broker: Connection,
    mut lanes: Lanes,
    assignment: Assignment,
    backend: Arc<dyn Backend>,
    slowdown: f64,
) -> Result<(), NodeError> {
    assignment.validate()?;
    let addresses = assignment
        .peers
        .iter()
        .map(|(name, addr)| Ok((name.clone(), decode::<PeerAddr>(addr).map_err(NodeError::Protocol)?)))
        .collect::<Result<Vec<_>, NodeError>>()?;
    endpoint.allow(Allowed::Only(addresses.iter().map(|(_, a)| a.key).collect()));
    let neighbours = neighbours(&[&assignment.train, &assignment.eval]);
    let mut executor = Executor::new(backend, assignment.optimizer, assignment.seed);
    executor.set_slowdown(slowdown);
    let connecting = connect(endpoint, assignment.peer, &addresses, &neighbours);
    let loading = load(&mut lanes.bulk, &assignment, executor);
    let (connections, mut executor) = tokio::try_join!(connecting, loading)?;
    let Assignment { train, eval, compression, .. } = assignment;
    executor.prepare(&train)?;
    executor.prepare(&eval)?;

    let mailbox = Arc::new(Mailbox::default());
    let inbox = Arc::new(Mutex::new(Inbox::new(&train, &eval, PASSES_IN_FLIGHT as u64)));
    let (commands, queue) = mpsc::channel();
    let throughput = Throughput::default();
    let codecs = Codecs::start(mailbox.clone(), commands.clone(), compression.error_feedback)?;
    let arrivals = Arrivals {
        inbox: inbox.clone(),
        mailbox: mailbox.clone(),
        codecs: codecs.clone(),
        throughput: throughput.clone(),
        commands: commands.clone(),
    };
    let name_of = |p: PeerId| addresses[p.0 as usize].0.clone();
    let mut outboxes = BTreeMap::from([(PeerId::BROKER, Outbox::new(broker.clone()))]);
    let mut tasks = JoinSet::new();
    tasks.spawn(receive_tensors(lanes.tensors, PeerId::BROKER, "the broker".into(), arrivals.clone()));
    for (p, (connection, lanes)) in connections {
        outboxes.insert(p, Outbox::new(connection));
        tasks.spawn(receive_tensors(lanes.tensors, p, name_of(p), arrivals.clone()));
    }
    drop(arrivals);
    tasks.spawn(receive_commands(lanes.control, mailbox.clone(), commands));
    let control = outboxes[&PeerId::BROKER].clone();
    control.control(&FromPeer::Ready)?;
    let link = NetLink::new(mailbox.clone(), outboxes, control, throughput, codecs);
    let worker = Worker { executor, train, eval, link, inbox, spectral_watch: compression.spectral_watch };
    let result = compute(worker, queue, broker, slowdown).await;
    tasks.abort_all();
    // If a peer was lost, that is the reason, and not the computation that waited for it.
    match (result, mailbox.lost()) {
        (Err(_), Some((p, reason))) if p != PeerId::BROKER => {
            Err(NodeError::LostPeer { peer: p, name: name_of(p), reason })
        }
        (Err(_), Some((_, reason))) => Err(NodeError::Network(format!("lost the broker: {reason}"))),
        (result, _) => result,
    }
}

/// Runs the worker on a thread of its own until it ends.
async fn compute(
    worker: Worker,
    commands: mpsc::Receiver<ToPeer>,
    broker: Connection,
    slowdown: f64,
) -> Result<(), NodeError> {
    let runtime = tokio::runtime::Handle::current();
    let save = move |snapshot, step| drop(runtime.spawn(stream_snapshot(broker.clone(), snapshot, step)));
    // The Program runs on one of the kernels' threads, which saves a hand-over at every kernel. If there is only one
    // thread, its processor time is that of the kernels.
    let threads = compute_threads(slowdown)?;
    let work = move || threads.install(move || worker.work(commands, save));
    let thread = std::thread::Builder::new().name("compute".into()).spawn(work);
    let thread = thread.map_err(|e| NodeError::State(format!("cannot start a thread: {e}")))?;
    let ended = tokio::task::spawn_blocking(move || thread.join()).await;
    ended.map_err(|e| NodeError::State(e.to_string()))?.unwrap_or_else(|_| {
        Err(NodeError::State("the computing thread panicked; this is a bug, please report it".into()))
    })
}
