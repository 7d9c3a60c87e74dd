//! A peer's connection to the broker. Its tasks outlive generations, and end with the connection.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fusionllm_backend::machine::cores;
use fusionllm_graph::{Advice, HostTensor, TensorType};
use fusionllm_program::PeerId;
use fusionllm_protocol::{
    Assignment, BulkHeader, ComputesOn, FromPeer, Heartbeat, Hello, MAX_ASSIGNMENT_BYTES, ToPeer, VERSION, decode,
    encode,
};
use fusionllm_transport::{ConnectError, Connection, DisconnectReason, Lanes, Receiver, Ticket};
use fusionllm_workbench::machine::memory;
use tokio::task::JoinSet;

use super::assigned::{Assigned, Stream};
use super::compute::Loading;
use super::events::{Event, FromBroker};
use super::observer::JoinEvent;
use super::shared::Shared;
use crate::NodeError;
use crate::machine::disk;
use crate::net::reach::reach;
use crate::net::{self, Outbox};

/// The time from one heartbeat to the next.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The waits between attempts to reach a broker that is gone double from the first of these up to the second.
const REDIAL_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// The time for which a broker that fell silent is tried. It may be starting again.
const REDIAL_SILENT: Duration = Duration::from_secs(3600);

/// The time for which a broker that closed the connection is tried. It is alive, or it ended in good order.
const REDIAL_CLOSED: Duration = Duration::from_secs(60);

/// The facts with which a peer introduces itself.
#[derive(Clone)]
pub(super) struct Introduction {
    pub(super) ticket: Ticket,
    pub(super) name: String,
    /// Tells this process from a later one with the same key.
    pub(super) process: u64,
    /// Whether there is a profile of this machine.
    pub(super) profiled: bool,
}

impl Introduction {
    /// Connects to the broker for the first time, and says hello. A person waits.
    pub(super) async fn dial(&self, shared: &Shared) -> Result<(Connection, Lanes), NodeError> {
        let at: Vec<String> = self.ticket.addr.addrs.iter().map(ToString::to_string).collect();
        let waiting = |seconds| shared.observer.tell(JoinEvent::Waiting { at: at.join(", "), seconds });
        let (connection, lanes) = reach(&shared.endpoint, &self.ticket.addr, waiting).await?;
        self.say_hello(shared, &connection).await?;
        Ok((connection, lanes))
    }

    async fn say_hello(&self, shared: &Shared, connection: &Connection) -> Result<(), NodeError> {
        let hello = Hello {
            version: VERSION,
            secret: *self.ticket.secret.as_bytes(),
            process: self.process,
            name: self.name.clone(),
            backend: shared.backend.name().into(),
            device: shared.backend.device().name,
            slow_bf16: shared.backend.slow_bf16(),
            addr: encode(&shared.endpoint.addr()).map_err(NodeError::Protocol)?,
            processor: self.processor(shared),
        };
        net::send_control(connection, &FromPeer::Hello(hello)).await
    }

    /// The processor that this process computes on, if its tensors are there. Outside the run, its number says nothing
    /// about the machine.
    fn processor(&self, shared: &Shared) -> Option<ComputesOn> {
        shared.backend.device().threads?;
        let cores = cores()?;
        let mut hasher = blake3::Hasher::new_derive_key("FusionLLM 2026-11-28 processor of a member");
        hasher.update(self.ticket.addr.key.as_bytes()).update(cores.identity.as_bytes());
        let mut id = [0; 16];
        hasher.finalize_xof().fill(&mut id);
        let count = u32::try_from(cores.count).ok()?;
        let busy = (shared.threads.current_num_threads() as f64 / shared.slowdown).min(f64::from(count));
        Some(ComputesOn { id, cores: count, busy, profiled: self.profiled })
    }

    async fn dial_again(&self, shared: &Shared) -> Result<(Connection, Lanes), NodeError> {
        let connected = shared.endpoint.connect(&self.ticket.addr).await;
        let (connection, lanes) = connected.map_err(NodeError::BrokerUnreachable)?;
        self.say_hello(shared, &connection).await?;
        Ok((connection, lanes))
    }

    /// Tries to reach a broker whose connection ended in this way.
    pub(super) async fn redial(&self, shared: &Shared, lost: &NodeError) -> Result<(Connection, Lanes), NodeError> {
        let limit = match lost {
            NodeError::Lost(DisconnectReason::ClosedByPeer(_)) => REDIAL_CLOSED,
            _ => REDIAL_SILENT,
        };
        let begun = Instant::now();
        let mut delay = REDIAL_DELAYS.0;
        loop {
            tokio::time::sleep(delay).await;
            match self.dial_again(shared).await {
                Err(NodeError::BrokerUnreachable(e @ ConnectError::Version(_))) => {
                    return Err(NodeError::BrokerUnreachable(e));
                }
                Err(e) if begun.elapsed() > limit => return Err(e),
                Err(e) => tracing::debug!("{}", e.one_line()),
                Ok(dialled) => return Ok(dialled),
            }
            delay = (delay * 2).min(REDIAL_DELAYS.1);
        }
    }
}

/// An open connection to the broker.
pub(super) struct BrokerConnection {
    pub(super) connection: Connection,
    pub(super) outbox: Outbox,
    /// Ends with the connection. Answers to the broker's questions may be added.
    pub(super) tasks: JoinSet<()>,
}

impl BrokerConnection {
    /// Reads the connection's lanes from now on, and sends heartbeats. `number` marks its events.
    pub(super) fn new(connection: Connection, lanes: Lanes, number: u64, shared: &Arc<Shared>) -> Self {
        let outbox = Outbox::new(connection.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(receive_control(lanes.control, number, shared.clone()));
        tasks.spawn(receive_bulk(lanes.bulk, number, shared.clone()));
        tasks.spawn(receive_tensors(lanes.tensors, shared.clone()));
        tasks.spawn(send_heartbeats(outbox.clone(), shared.clone()));
        Self { connection, outbox, tasks }
    }
}

async fn send_heartbeats(outbox: Outbox, shared: Arc<Shared>) {
    let mut ticks = tokio::time::interval(HEARTBEAT);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let heartbeat = Heartbeat { disk_free: disk::room(), ..shared.progress.heartbeat() };
        if let Err(e) = outbox.control(&FromPeer::Heartbeat(heartbeat)) {
            return shared.send(Event::Broken(e));
        }
    }
}

async fn receive_control(mut lane: Receiver, number: u64, shared: Arc<Shared>) {
    loop {
        let event = match net::next_control::<ToPeer>(&mut lane).await {
            Ok(Some(message)) => FromBroker::Message(message),
            Ok(None) => FromBroker::Gone(NodeError::Network("it closed its control lane".into())),
            Err(e @ NodeError::Lost(_)) => FromBroker::Gone(e),
            Err(e) => return shared.send(Event::Broken(e)),
        };
        let gone = matches!(event, FromBroker::Gone(_));
        shared.send(Event::Broker(number, event));
        if gone {
            return;
        }
    }
}

/// Puts tensors from the broker into the mailbox of the present generation.
async fn receive_tensors(mut lane: Receiver, shared: Arc<Shared>) {
    let name: Arc<str> = "the broker".into();
    // The control lane reports a lost connection.
    while let Ok(Some(frame)) = lane.next().await {
        // If no generation runs, the frame belongs to one that was stopped.
        let Some(arrivals) = shared.arrivals() else { continue };
        match arrivals.take(frame, PeerId::BROKER, &name).await {
            Ok(()) => {}
            Err(NodeError::Lost(_)) => return,
            Err(e) => shared.send(Event::Failed {
                generation: arrivals.generation,
                reason: format!("the broker: {}", e.one_line()),
            }),
        }
    }
}

/// Receives assignments, and the tensors that the broker streams behind them.
async fn receive_bulk(mut lane: Receiver, number: u64, shared: Arc<Shared>) {
    match receive_assignments(&mut lane, number, &shared).await {
        // The control lane reports a lost connection.
        Ok(()) | Err(NodeError::Lost(_)) => {}
        Err(e) => shared.send(Event::Broken(e)),
    }
}

async fn receive_assignments(lane: &mut Receiver, number: u64, shared: &Shared) -> Result<(), NodeError> {
    let mut stream: Option<Stream> = None;
    while let Some(frame) = lane.next().await? {
        match decode(frame.header()).map_err(NodeError::Protocol)? {
            BulkHeader::Assign => {
                let bytes = frame.read(MAX_ASSIGNMENT_BYTES).await?;
                let assignment: Assignment =
                    decode(&bytes).map_err(|e| NodeError::Protocol(format!("the assignment: {e}")))?;
                let generation = assignment.generation;
                let event = match Assigned::new(assignment, shared.memory.or_else(memory::limit), disk::room()) {
                    Ok((assigned, tensors)) => {
                        stream = Some(tensors);
                        FromBroker::Assigned(Box::new(assigned))
                    }
                    Err(reason) => {
                        stream = None;
                        FromBroker::Unfit { generation, reason }
                    }
                };
                shared.send(Event::Broker(number, event));
            }
            BulkHeader::Load { generation, key, dtype } => {
                let current = |s: &&mut Stream| s.generation == generation && s.loading.strong_count() > 0;
                let Some(stream) = stream.as_mut().filter(current) else { continue };
                let Some(ty) = stream.types.get(&key) else {
                    return Err(NodeError::Protocol(format!("the broker sent {key}, which this peer does not load")));
                };
                // Its bytes are checked against the tensor's before anything is allocated.
                let elements = frame.payload_len() / dtype.size() as u64;
                let whole = elements * dtype.size() as u64 == frame.payload_len();
                let alike = dtype == ty.dtype || (dtype.is_float() && ty.dtype.is_float());
                let left = ty.numel() - stream.begun.get(&key).map_or(0, Vec::len) / ty.dtype.size();
                if !whole || !alike || elements > left as u64 {
                    let payload = frame.payload_len();
                    let message =
                        format!("the broker sent {payload} bytes of {dtype} for {key}, which lacks {left} of {ty}");
                    return Err(NodeError::Protocol(message));
                }
                let mut bytes = vec![0; frame.payload_len() as usize];
                frame.read_into_with(&mut bytes, || shared.progress.bump()).await?;
                let piece = HostTensor::from_bytes(TensorType::new(dtype, [elements as usize]), bytes)?;
                let content = stream.begun.entry(key.clone()).or_insert_with(|| Vec::with_capacity(ty.bytes()));
                content.extend_from_slice(piece.cast(ty.dtype)?.bytes());
                if content.len() < ty.bytes() {
                    continue;
                }
                let (content, ty) = (stream.begun.remove(&key), stream.types.remove(&key));
                // The generation may have been stopped meanwhile.
                if let (Some(content), Some(ty), Some(loading)) = (content, ty, stream.loading.upgrade()) {
                    let _ = loading.send(Loading::Tensor(key, HostTensor::from_bytes(ty, content)?)).await;
                }
            }
            other => return Err(NodeError::Protocol(format!("the broker sent {other:?}"))),
        }
    }
    Ok(())
}
