//! A peer's loop: one event after another, from the first connection to the broker to the end of the run.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use fusionllm_graph::Advice;
use fusionllm_plan::Device;
use fusionllm_program::TensorKey;
use fusionllm_protocol::{Farewell, Follower, FollowerAction, FromPeer, Greeting, MemberId, PeerHello, ToPeer};
use fusionllm_transport::{Connection, Lanes, PeerAddr, PeerKey};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinSet;

use super::assigned::{Assigned, addresses};
use super::broker::{BrokerConnection, Introduction};
use super::copies::{Request, watch_request};
use super::events::{Event, FromBroker};
use super::generation::{Generation, MOVED_ON};
use super::observer::{JoinEvent, PartEnd, Participation};
use super::shared::Shared;
use super::survey::{measure, measure_links};
use crate::NodeError;
use crate::machine::interrupts::Stop;
use crate::net::printable;

/// The time in which the computing thread has to end once the run is over.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// The end of a session.
pub(super) type Ending = Result<Participation, NodeError>;

/// A connection that was silent for no longer than this is alive, because QUIC's own packets come more often.
const ALIVE: Duration = Duration::from_secs(2);

/// The result of an event: the end of the session, or actions.
type Outcome = ControlFlow<Ending, Vec<FollowerAction>>;

/// A peer in a run.
pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) events: mpsc::UnboundedReceiver<Event>,
    pub(super) introduction: Arc<Introduction>,
    pub(super) follower: Follower,
    /// The connection to the broker, while there is one.
    pub(super) broker: Option<BrokerConnection>,
    /// The number of that connection.
    pub(super) number: u64,
    /// A profile of this machine, if there is one.
    pub(super) profile: Option<Device>,
    /// The members that the broker named besides those of an assignment.
    pub(super) contacts: BTreeMap<MemberId, PeerAddr>,
    /// The members of the newest assignment.
    pub(super) members: BTreeMap<MemberId, PeerAddr>,
    /// The newest assignment, until its generation begins.
    pub(super) assigned: Option<Assigned>,
    pub(super) generation: Option<Generation>,
    /// Neighbours whose assignment arrived before this peer's.
    pub(super) early: BTreeMap<PeerKey, (u32, Connection, Lanes)>,
    pub(super) requests: BTreeMap<u64, AskedFor>,
    pub(super) next_request: u64,
    pub(super) took_part: bool,
    pub(super) leaving: bool,
    pub(super) tasks: JoinSet<()>,
}

/// A request for copies that is not answered yet.
pub(super) struct AskedFor {
    pub(super) step: u64,
    pub(super) keys: Vec<TensorKey>,
    pub(super) request: Request,
}

impl Session {
    /// Takes part until the run is over for this peer.
    pub(super) async fn run(&mut self, connection: Connection, lanes: Lanes) -> Ending {
        self.reached(connection, lanes);
        loop {
            let Some(event) = self.events.recv().await else {
                return Err(NodeError::State("the peer's loop lost its events".into()));
            };
            match self.handle(event) {
                ControlFlow::Continue(actions) => self.carry_out(actions),
                ControlFlow::Break(ending) => {
                    self.finish(ending.is_ok()).await;
                    return ending;
                }
            }
            // While the computing thread runs, it notes the member that it waits for.
            if !self.follower.is_running() {
                self.shared.progress.wait_for(self.follower.waits_for());
            }
        }
    }

    fn reached(&mut self, connection: Connection, lanes: Lanes) {
        self.number += 1;
        self.broker = Some(BrokerConnection::new(connection, lanes, self.number, &self.shared));
    }

    /// Stops the computing thread, and waits a moment for its end.
    async fn finish(&mut self, in_good_order: bool) {
        let Some(generation) = self.generation.take() else { return };
        let number = generation.number();
        match in_good_order {
            true => drop(generation),
            false => generation.abandon(),
        }
        let ended = async {
            while let Some(event) = self.events.recv().await {
                if matches!(event, Event::Ended { generation, .. } if generation == number) {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(END_TIMEOUT, ended).await;
    }

    fn handle(&mut self, event: Event) -> Outcome {
        ControlFlow::Continue(match event {
            Event::Broker(number, _) if number != self.number || self.broker.is_none() => Vec::new(),
            Event::Broker(_, FromBroker::Message(message)) => self.told(message)?,
            Event::Broker(_, FromBroker::Assigned(assigned)) => self.assigned(*assigned),
            Event::Broker(_, FromBroker::Unfit { generation, reason }) => {
                if self.follower.is_new(generation) {
                    self.assigned = None;
                }
                self.follower.unfit(generation, reason)
            }
            Event::Broker(_, FromBroker::Gone(reason)) => self.lost_broker(reason)?,
            Event::Dialled(Ok((connection, lanes))) => {
                self.shared.observer.tell(JoinEvent::BrokerBack);
                self.reached(connection, lanes);
                Vec::new()
            }
            Event::Dialled(Err(e)) | Event::Broken(e) => return ControlFlow::Break(Err(e)),
            Event::Greeted { connection, hello: PeerHello::Restarted, .. } => self.called_back(&connection)?,
            Event::Greeted { connection, lanes, hello, place } => self.greeted(connection, lanes, hello, place),
            Event::Linked { generation, member, connection, lanes } => self.link(member, generation, connection, lanes),
            Event::Overdue { generation, member, obstacle } => {
                let advice = obstacle.as_deref().unwrap_or("check that no firewall keeps UDP between the two");
                self.follower.overdue(generation, member, format!("it did not connect; {advice}"))
            }
            Event::Loaded { generation, key, shelved } => {
                if shelved {
                    self.follower.shelved(&key);
                }
                self.follower.loaded(generation, &key)
            }
            Event::Lost { generation, member, reason } => {
                let reason = printable(&reason);
                let actions = self.follower.lost(generation, member, reason.clone());
                if !actions.is_empty() {
                    tracing::info!("lost {member}: {reason}");
                }
                actions
            }
            Event::Failed { generation, reason } => self.follower.failed(generation, printable(&reason)),
            Event::CutTaken { generation, step, save } => {
                if let (Some(tensors), Some(broker), Some(current)) = (save, &self.broker, &mut self.generation)
                    && current.number() == generation
                {
                    current.save(broker.connection.clone(), tensors, step);
                }
                self.follower.cut_taken(generation, step)
            }
            Event::Copied { generation, step, of, tensors } => {
                if self.follower.wants_copy(generation, step, of) {
                    self.shared.vault.keep(step, tensors);
                }
                self.follower.copied(generation, step, of)
            }
            Event::RequestOver(request) => self.follower.request_over(request),
            Event::Ended { generation, failure } => {
                self.follower.ended(generation, failure.map(|text| printable(&text)))
            }
            Event::Interrupt(stop) => self.interrupted(stop)?,
        })
    }

    /// A control message of the broker.
    fn told(&mut self, message: ToPeer) -> Outcome {
        let end = |ending| ControlFlow::Break(ending);
        let mut actions = Vec::new();
        match message {
            ToPeer::Refused { reason } => return end(Err(NodeError::Refused(printable(&reason)))),
            ToPeer::Stop(farewell) => return end(self.parted(farewell)),
            ToPeer::Contacts(contacts) => match addresses(contacts.iter()) {
                Ok(known) => {
                    self.contacts = known;
                    self.allow();
                }
                Err(e) => return end(Err(NodeError::Protocol(e))),
            },
            ToPeer::Measure { programs } => {
                let (shared, profile) = (self.shared.clone(), self.profile.clone());
                self.answer(async move { measure(&shared, profile, programs).await });
            }
            ToPeer::Probe { with, patience_s } => {
                let shared = self.shared.clone();
                let addr = match with {
                    MemberId::BROKER => Some(self.introduction.ticket.addr.clone()),
                    member => self.address(member),
                };
                self.answer(async move { Ok(measure_links(&shared, with, addr, patience_s).await) });
            }
            ToPeer::Regroup { generation } => {
                if self.assigned.as_ref().is_some_and(|a| a.assignment.generation < generation) {
                    self.assigned = None;
                }
                actions = self.follower.regroup(generation);
            }
            ToPeer::Mirror { step, of, bytes_per_s } => actions = self.follower.mirror(step, of, bytes_per_s),
            ToPeer::Release { before } => actions = self.follower.release(before),
            ToPeer::Verdict { pass, verdict } => {
                if let Some(generation) = self.commanded() {
                    generation.judge(pass, verdict);
                }
            }
            ToPeer::Compute(command) => {
                if let Some(generation) = self.commanded() {
                    generation.command(command);
                }
            }
            ToPeer::Welcome { .. } => {
                return end(Err(NodeError::Protocol("the broker welcomed a member as a visitor".into())));
            }
        }
        ControlFlow::Continue(actions)
    }

    /// The end of this peer's part, as the broker's last message says it.
    fn parted(&self, farewell: Farewell) -> Ending {
        let took_part = self.took_part && !self.leaving;
        match farewell {
            Farewell::Over { step, steps } => Ok(Participation { took_part, end: PartEnd::Over { step, steps } }),
            Farewell::Left => Ok(Participation { took_part, end: PartEnd::Left }),
            Farewell::PutOut { reason } => Err(NodeError::PutOut(printable(&reason))),
            Farewell::Failed { reason } => Err(NodeError::Failed(printable(&reason))),
        }
    }

    /// The generation that commands of the broker are for, if they are not for one that was stopped.
    fn commanded(&self) -> Option<&Generation> {
        self.generation.as_ref().filter(|_| self.follower.takes_commands())
    }

    /// Sends the broker an answer once it is there.
    fn answer(&mut self, answer: impl Future<Output = Result<FromPeer, NodeError>> + Send + 'static) {
        let Some(broker) = &mut self.broker else { return };
        let (outbox, shared) = (broker.outbox.clone(), self.shared.clone());
        broker.tasks.spawn(async move {
            if let Err(e) = answer.await.and_then(|message| outbox.control(&message)) {
                shared.send(Event::Broken(e));
            }
        });
    }

    fn assigned(&mut self, assigned: Assigned) -> Vec<FollowerAction> {
        let role = assigned.role();
        if !self.follower.is_new(role.generation) {
            return Vec::new();
        }
        let assignment = &assigned.assignment;
        tracing::info!(generation = role.generation, peer = assignment.peer.0, "assigned");
        if let Some(me) = assignment.peers.get(assignment.peer.0 as usize)
            && self.introduction.name.is_empty()
        {
            // After a lost connection, the peer asks for the name that it has.
            self.introduction =
                Arc::new(Introduction { name: me.name.clone(), ..Introduction::clone(&self.introduction) });
        }
        self.members = assigned.addresses.clone();
        self.allow();
        self.assigned = Some(assigned);
        self.follower.assign(role)
    }

    fn lost_broker(&mut self, reason: NodeError) -> Outcome {
        if let Some(broker) = self.broker.take() {
            broker.connection.close("the connection is of no more use");
        }
        self.assigned = None;
        if self.leaving {
            return ControlFlow::Break(Ok(Participation { took_part: false, end: PartEnd::Left }));
        }
        self.shared.observer.tell(JoinEvent::BrokerLost { reason: printable(&reason.one_line()) });
        let (introduction, shared) = (self.introduction.clone(), self.shared.clone());
        self.tasks.spawn(async move {
            let dialled = introduction.redial(&shared, &reason).await;
            shared.send(Event::Dialled(dialled));
        });
        ControlFlow::Continue(self.follower.disconnected())
    }

    /// Handles the message of a member that the broker was started again.
    fn called_back(&mut self, by: &Connection) -> Outcome {
        by.close("");
        let broken = self.broker.as_ref().is_some_and(|b| b.connection.silent_for() > ALIVE);
        match broken && by.peer() == self.introduction.ticket.addr.key {
            true => self.lost_broker(NodeError::Network("it was started again".into())),
            false => ControlFlow::Continue(Vec::new()),
        }
    }

    fn interrupted(&mut self, stop: Stop) -> Outcome {
        if stop == Stop::AtOnce || self.broker.is_none() {
            return ControlFlow::Break(Err(NodeError::Stopped("this machine left at once".into())));
        }
        self.leaving = true;
        self.shared.observer.tell(JoinEvent::Leaving);
        ControlFlow::Continue(vec![FollowerAction::Tell(FromPeer::Leaving)])
    }

    /// A member connected to this peer.
    fn greeted(
        &mut self,
        connection: Connection,
        lanes: Lanes,
        hello: PeerHello,
        place: OwnedSemaphorePermit,
    ) -> Vec<FollowerAction> {
        let key = connection.peer();
        let Some(from) = self.member(key) else {
            connection.close("this is no member of the run");
            return Vec::new();
        };
        match hello {
            PeerHello::Exchange { generation } => self.link(from, generation, connection, lanes),
            PeerHello::Fetch { step, tensors, bytes_per_s } => {
                let number = self.next_request;
                self.next_request += 1;
                while self.tasks.try_join_next().is_some() {}
                self.tasks.spawn(watch_request(number, connection.clone(), self.shared.clone()));
                let request = Request { connection, lanes, bytes_per_s, place };
                self.requests.insert(number, AskedFor { step, keys: tensors.clone(), request });
                self.follower.request(number, from, step, tensors)
            }
            // Answered where it was accepted.
            PeerHello::Probe | PeerHello::Restarted => Vec::new(),
        }
    }

    /// A connection for exchanging tensors of a generation.
    pub(super) fn link(
        &mut self,
        member: MemberId,
        number: u32,
        connection: Connection,
        lanes: Lanes,
    ) -> Vec<FollowerAction> {
        match (self.follower.greeted(member, number), &mut self.generation) {
            (Greeting::Use, Some(generation)) => {
                generation.link(member, connection, lanes);
                return self.follower.connected(number, member);
            }
            (Greeting::Keep, _) => {
                if let Some((_, older, _)) = self.early.insert(connection.peer(), (number, connection, lanes)) {
                    older.close(MOVED_ON);
                }
            }
            _ => connection.close(MOVED_ON),
        }
        Vec::new()
    }

    fn address(&self, member: MemberId) -> Option<PeerAddr> {
        self.contacts.get(&member).or_else(|| self.members.get(&member)).cloned()
    }

    /// The member with this key.
    pub(super) fn member(&self, key: PeerKey) -> Option<MemberId> {
        let mut known = self.members.iter().chain(&self.contacts);
        known.find(|(_, addr)| addr.key == key).map(|(member, _)| *member)
    }

    /// Lets the broker and the known members in, and nobody else.
    fn allow(&self) {
        let known = self.members.values().chain(self.contacts.values());
        let keys = known.chain([&self.introduction.ticket.addr]).map(|addr| addr.key).collect();
        self.shared.endpoint.allow(fusionllm_transport::Allowed::Only(keys));
    }
}
