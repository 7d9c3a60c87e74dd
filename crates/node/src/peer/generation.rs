//! One generation on this peer: its connections, its tasks and its computing thread.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use fusionllm_exec::Coder;
use fusionllm_graph::{Advice, HostTensor};
use fusionllm_program::{PASSES_IN_FLIGHT, PassKind, PeerId, TensorKey, Verdict};
use fusionllm_protocol::{Assignment, ComputeCommand, Inbox, MemberId, PeerHello};
use fusionllm_transport::{Connection, DisconnectReason, Lanes, PeerAddr, Receiver, obstacle_to};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet};

use super::assigned::Assigned;
use super::compute::{Arrivals, Codecs, Loading, Mailbox, Messages, NetLink, Recorder, Throughput, Watched};
use super::computing::Compute;
use super::copies::Fetch;
use super::cuts::{Kept, Spool, state};
use super::events::Event;
use super::shared::Shared;
use crate::NodeError;
use crate::net::Outbox;
use crate::net::dial::dial;

/// The time in which neighbours have to reach each other once they are assigned.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(120);

/// The waits between attempts to copy a member's share double from the first of these up to the second.
const COPY_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The reason with which a peer closes the connections of a generation that is over for it. The broker knows of that,
/// so the other side reports nothing.
pub(super) const MOVED_ON: &str = "regroup";

/// A generation in which this peer has a part. Dropping it stops it, and [`Event::Ended`] follows.
pub(super) struct Generation {
    shared: Arc<Shared>,
    assignment: Arc<Assignment>,
    addresses: BTreeMap<MemberId, PeerAddr>,
    mailbox: Arc<Mailbox>,
    loading: tokio::sync::mpsc::Sender<Loading>,
    commands: mpsc::Sender<ComputeCommand>,
    links: BTreeMap<PeerId, Connection>,
    /// The neighbours' tensors lanes, until the start.
    lanes: BTreeMap<PeerId, Receiver>,
    copies: BTreeMap<MemberId, AbortHandle>,
    tasks: JoinSet<()>,
    /// Ends when the last cut for the broker is streamed.
    saved: Option<oneshot::Receiver<()>>,
    /// The reason that the neighbours read when the links are closed.
    farewell: &'static str,
}

impl Generation {
    /// Starts the computing thread, which waits for tensors.
    pub(super) fn begin(assigned: Assigned, shared: &Arc<Shared>) -> Result<Self, NodeError> {
        let Assigned { assignment, addresses, loading, loads } = assigned;
        let mailbox = Arc::new(Mailbox::new(assignment.passes_before));
        let (commands, queue) = mpsc::channel();
        let (shared, mailbox_of_thread) = (shared.clone(), mailbox.clone());
        let compute = Compute {
            assignment: assignment.clone(),
            shared: shared.clone(),
            mailbox: mailbox_of_thread,
            loads,
            commands: queue,
        };
        compute.start()?;
        Ok(Self {
            shared,
            assignment,
            addresses,
            mailbox,
            loading,
            commands,
            links: BTreeMap::new(),
            lanes: BTreeMap::new(),
            copies: BTreeMap::new(),
            saved: None,
            tasks: JoinSet::new(),
            farewell: MOVED_ON,
        })
    }

    pub(super) fn number(&self) -> u32 {
        self.assignment.generation
    }

    /// Stops, and lets the neighbours report that this peer is gone.
    pub(super) fn abandon(mut self) {
        self.farewell = "it ended early";
    }

    /// Draws tensors from the seed.
    pub(super) fn draw(&mut self, keys: Vec<TensorKey>) {
        let (assignment, loading) = (self.assignment.clone(), self.loading.clone());
        self.load_on_a_thread(move || state::draw(&assignment, keys, into(loading)));
    }

    /// Loads tensors of a cut that is here.
    pub(super) fn take(&mut self, keys: Vec<TensorKey>, kept: Vec<Kept>) {
        let loading = self.loading.clone();
        self.load_on_a_thread(move || state::read(keys, kept, into(loading)));
    }

    fn load_on_a_thread(&mut self, load: impl FnOnce() -> Result<(), NodeError> + Send + 'static) {
        let (shared, generation) = (self.shared.clone(), self.number());
        self.tasks.spawn_blocking(move || {
            if let Err(e) = load() {
                shared.send(Event::Failed { generation, reason: e.one_line() });
            }
        });
    }

    /// Fetches tensors of a cut from another member.
    pub(super) fn fetch(&mut self, from: MemberId, step: u64, keys: Vec<TensorKey>) {
        let (shared, generation) = (self.shared.clone(), self.number());
        let types = self.assignment.tensor_types();
        let wanted = keys.into_iter().filter_map(|key| types.get(&key).map(|ty| (key.clone(), (*ty).clone())));
        let Some(to) = self.addresses.get(&from).cloned() else { return self.unreachable(from) };
        let mut fetch = Fetch::new(to, step, None, wanted);
        let loading = self.loading.clone();
        self.tasks.spawn(async move {
            loop {
                match fetch.next(&shared).await {
                    Ok(None) => return,
                    Ok(Some((key, tensor))) => {
                        // The thread ends only with the generation.
                        if loading.send(Loading::Tensor(key, tensor)).await.is_err() {
                            return;
                        }
                    }
                    Err(e) => return shared.send(Event::Lost { generation, member: from, reason: e.one_line() }),
                }
            }
        });
    }

    /// Copies tensors of another member's share for the vault, however many attempts that takes.
    pub(super) fn copy(&mut self, of: MemberId, step: u64, keys: Vec<TensorKey>, bytes_per_s: Option<f64>) {
        if let Some(older) = self.copies.remove(&of) {
            older.abort();
        }
        // Tasks that have ended would add up over a long generation.
        while self.tasks.try_join_next().is_some() {}
        let (shared, generation) = (self.shared.clone(), self.number());
        let Some(to) = self.addresses.get(&of).cloned() else { return self.unreachable(of) };
        let Some(types) = self.assignment.mirrors.get(&of) else { return };
        let wanted = keys.into_iter().filter_map(|key| types.get(&key).map(|ty| (key.clone(), ty.clone())));
        let mut fetch = Fetch::new(to, step, bytes_per_s, wanted);
        let task = self.tasks.spawn(async move {
            let mut tensors = Vec::new();
            let mut spool = Spool::new(shared.observer.clone());
            let mut delay = COPY_DELAYS.0;
            loop {
                match fetch.next(&shared).await {
                    Ok(Some((key, tensor))) => {
                        let keep = move || (spool.keep(tensor), spool);
                        // The task is cancelled only with the process.
                        let Ok((kept, rest)) = tokio::task::spawn_blocking(keep).await else { return };
                        spool = rest;
                        tensors.push((key, kept));
                    }
                    Ok(None) => return shared.send(Event::Copied { generation, step, of, tensors }),
                    Err(e) => {
                        tracing::debug!("{of} was not copied yet: {}", e.one_line());
                        tokio::time::sleep(delay).await;
                        delay = (delay * 2).min(COPY_DELAYS.1);
                    }
                }
            }
        });
        self.copies.insert(of, task);
    }

    /// Connects to the neighbours. Of two peers the one with the lower number dials.
    pub(super) fn connect(&mut self, with: BTreeSet<MemberId>) {
        for member in with {
            let (shared, generation) = (self.shared.clone(), self.number());
            let Some(to) = self.addresses.get(&member).cloned() else { return self.unreachable(member) };
            let dials = self.place(member).is_some_and(|place| place > self.assignment.peer);
            self.tasks.spawn(async move {
                if !dials {
                    tokio::time::sleep(CONNECT_TIMEOUT).await;
                    return shared.send(Event::Overdue { generation, member, obstacle: obstacle_to(&to) });
                }
                let hello = PeerHello::Exchange { generation };
                shared.send(match dial(&shared.endpoint, &to, &hello, CONNECT_TIMEOUT).await {
                    Ok((connection, lanes)) => Event::Linked { generation, member, connection, lanes },
                    Err(e) => Event::Lost { generation, member, reason: e.one_line() },
                });
            });
        }
    }

    /// Uses a connection to a neighbour.
    pub(super) fn link(&mut self, member: MemberId, connection: Connection, lanes: Lanes) {
        let Some(place) = self.place(member) else { return };
        self.links.insert(place, connection);
        self.lanes.insert(place, lanes.tensors);
    }

    /// Lets the computing thread begin. `control` leads to the broker.
    pub(super) fn start(&mut self, control: Outbox) -> Result<(), NodeError> {
        let (assignment, generation) = (self.assignment.clone(), self.number());
        let Assignment { train, eval, passes_before, .. } = &*assignment;
        let inbox = Arc::new(Mutex::new(Inbox::new(train, eval, PASSES_IN_FLIGHT as u64, *passes_before)));
        let throughput = Throughput::default();
        let messages = Messages::default();
        let shared = self.shared.clone();
        let failed = move |reason| shared.send(Event::Failed { generation, reason });
        let codecs = Codecs::start(self.mailbox.clone(), Coder::new(&train.masks), failed)?;
        let arrivals = Arrivals {
            generation,
            inbox: inbox.clone(),
            mailbox: self.mailbox.clone(),
            codecs: codecs.clone(),
            throughput: throughput.clone(),
            messages: messages.clone(),
            progress: self.shared.progress.clone(),
        };
        self.shared.set_arrivals(Some(arrivals.clone()));
        let mut outboxes = BTreeMap::from([(PeerId::BROKER, control.clone())]);
        outboxes.extend(self.links.iter().map(|(place, connection)| (*place, Outbox::new(connection.clone()))));
        for (place, lane) in std::mem::take(&mut self.lanes) {
            let contact = &assignment.peers[place.0 as usize];
            let (arrivals, shared) = (arrivals.clone(), self.shared.clone());
            let (member, name) = (contact.member, contact.name.as_str().into());
            self.tasks.spawn(async move {
                if let Some(reason) = end_of_link(arrivals.take_all(lane, place, &name).await) {
                    shared.send(Event::Lost { generation, member, reason });
                }
            });
        }
        let link = NetLink {
            mailbox: self.mailbox.clone(),
            inbox,
            outboxes,
            members: assignment.peers.iter().map(|contact| contact.member).collect(),
            control,
            throughput,
            codecs,
            progress: self.shared.progress.clone(),
            kind: PassKind::Train,
            watched: Watched::NOTHING,
            on_host: self.shared.backend.device().threads.is_some(),
            sent: BTreeMap::new(),
            recorder: Recorder::new(&assignment.train, messages),
        };
        // All tensors are loaded, so there is room in the queue.
        let started = self.loading.try_send(Loading::Start(Box::new(link)));
        started.map_err(|_| NodeError::State("the computing thread has ended".into()))
    }

    /// Hands a command to the computing thread.
    pub(super) fn command(&self, command: ComputeCommand) {
        // A thread that has ended reports that itself.
        let _ = self.commands.send(command);
    }

    pub(super) fn judge(&self, pass: u64, verdict: Verdict) {
        self.mailbox.judge(pass, verdict);
    }

    /// Streams a cut to the broker, after those before it.
    pub(super) fn save(&mut self, broker: Connection, tensors: Vec<(TensorKey, Kept)>, step: u64) {
        let (shared, generation) = (self.shared.clone(), self.number());
        let (done, saved) = oneshot::channel::<()>();
        let before = self.saved.replace(saved);
        self.tasks.spawn(async move {
            let _saving = shared.begin_saving();
            if let Some(before) = before {
                // Nothing is sent: the channel is closed at the end.
                let _ = before.await;
            }
            let _done = done;
            if let Err(e) = state::save(broker, tensors, step, &shared.progress).await {
                let reason = format!("a snapshot could not be read: {}", e.one_line());
                shared.send(Event::Failed { generation, reason });
            }
        });
    }

    fn place(&self, member: MemberId) -> Option<PeerId> {
        let place = self.assignment.peers.iter().position(|contact| contact.member == member)?;
        Some(PeerId(place as u32))
    }

    fn unreachable(&self, member: MemberId) {
        let reason = "its address is unknown".into();
        self.shared.send(Event::Lost { generation: self.number(), member, reason });
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.mailbox.fail("the generation was stopped".into());
        self.shared.set_arrivals(None);
        for connection in self.links.values() {
            connection.close(self.farewell);
        }
    }
}

/// Hands tensors to the computing thread, as long as it wants them.
fn into(loading: tokio::sync::mpsc::Sender<Loading>) -> impl FnMut(TensorKey, HostTensor) -> bool {
    move |key, tensor| loading.blocking_send(Loading::Tensor(key, tensor)).is_ok()
}

/// The report about the end of a link; `None` if the generation is over for one of its ends.
fn end_of_link(error: NodeError) -> Option<String> {
    match error {
        NodeError::Lost(DisconnectReason::ClosedHere(_)) => None,
        NodeError::Lost(DisconnectReason::ClosedByPeer(reason)) if reason == MOVED_ON => None,
        NodeError::Lost(cause) => Some(cause.to_string()),
        e => Some(format!("it broke the protocol: {}", e.one_line())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_ends_is_reported_unless_its_generation_is_over() {
        let closed = |reason: &str| end_of_link(NodeError::Lost(DisconnectReason::ClosedByPeer(reason.into())));
        assert_eq!(closed(MOVED_ON), None);
        // A peer that ends gives no reason. The others would wait for it forever.
        assert_eq!(closed(""), Some("it closed the connection without a reason".into()));
        assert!(end_of_link(NodeError::Protocol("two frames".into())).unwrap().contains("broke the protocol"));
        assert_eq!(end_of_link(NodeError::Lost(DisconnectReason::ClosedHere(String::new()))), None);
    }
}
