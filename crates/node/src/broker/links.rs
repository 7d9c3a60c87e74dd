//! The connections to members.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Duration;

use fusionllm_graph::TensorType;
use fusionllm_program::TensorKey;
use fusionllm_protocol::{MemberId, PeerHello, Roster, Standing, ToPeer, decode};
use fusionllm_transport::{Connection, Endpoint, Lanes, PeerAddr};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;

use super::entry::{GOODBYE_TIMEOUT, Incoming, SavedShare, receive_bulk, receive_control};
use super::records::Inbox;
use crate::NodeError;
use crate::net::Outbox;
use crate::net::dial::dial;

/// How often a member is called. It believes a call only once its old connection has been silent for a while.
const CALLS: usize = 4;

/// The time from one call to the next.
const CALL_PERIOD: Duration = Duration::from_secs(2);

/// The time in which a silent member's machine has to say that the member's process has ended.
const PORT_TIMEOUT: Duration = Duration::from_secs(2);

/// A member's connection.
pub(super) struct Link {
    /// The connection's number. A member that comes back has a new one.
    pub(super) number: u64,
    pub(super) connection: Connection,
    pub(super) outbox: Outbox,
    saved: SavedShare,
}

/// The connections to members.
#[derive(Default)]
pub(super) struct Links(BTreeMap<MemberId, Link>);

impl Links {
    /// Takes a member's new connection, and starts the tasks that read it.
    pub(super) fn add(
        &mut self,
        member: MemberId,
        number: u64,
        connection: Connection,
        lanes: Lanes,
        keeper: Inbox,
        events: &UnboundedSender<Incoming>,
    ) {
        let saved = SavedShare::default();
        tokio::spawn(receive_control(lanes.control, (member, number), events.clone()));
        tokio::spawn(receive_bulk(lanes.bulk, (member, number), saved.clone(), keeper, events.clone()));
        let outbox = Outbox::new(connection.clone());
        if let Some(old) = self.0.insert(member, Link { number, connection, outbox, saved }) {
            old.connection.close("a newer connection replaces this one");
        }
    }

    pub(super) fn get(&self, member: MemberId) -> Option<&Link> {
        self.0.get(&member)
    }

    /// Whether this is the member's present connection.
    pub(super) fn is_current(&self, member: MemberId, number: u64) -> bool {
        self.0.get(&member).is_some_and(|link| link.number == number)
    }

    pub(super) fn remove(&mut self, member: MemberId) {
        self.0.remove(&member);
    }

    /// Asks a silent member's machine whether its process has ended. If so, nobody has to wait for it any longer.
    pub(super) fn look_after(&self, member: MemberId, events: &UnboundedSender<Incoming>) {
        let Some(Link { number, connection, .. }) = self.0.get(&member) else { return };
        let (number, connection, events) = (*number, connection.clone(), events.clone());
        tokio::spawn(async move {
            if connection.port_is_closed(PORT_TIMEOUT).await {
                let reason =
                    format!("its process has ended: its machine says that nobody listens at its port; {OF_MEMORY}");
                let _ = events.send(Incoming::Ended((member, number), reason));
            }
        });
    }

    /// Queues a message. A member without a connection gets nothing, and its loss is reported elsewhere.
    pub(super) fn send(&self, member: MemberId, message: &ToPeer) -> Result<(), NodeError> {
        self.0.get(&member).map_or(Ok(()), |link| link.outbox.control(message))
    }

    /// Sets the tensors that a member may send for checkpoints.
    pub(super) fn expect(&self, member: MemberId, share: BTreeMap<TensorKey, TensorType>) {
        if let Some(link) = self.0.get(&member) {
            *link.saved.lock().unwrap_or_else(PoisonError::into_inner) = share;
        }
    }

    /// Closes a member's connection once it has read all messages to it, or after a moment.
    pub(super) fn dismiss(&mut self, member: MemberId) {
        if let Some(link) = self.0.remove(&member) {
            tokio::spawn(async move {
                let _ = tokio::time::timeout(GOODBYE_TIMEOUT, link.connection.closed()).await;
                link.connection.close("");
            });
        }
    }

    /// Waits until all members have hung up, or for a moment.
    pub(super) async fn goodbye(&mut self) {
        let wait = |link: Link| async move {
            let _ = tokio::time::timeout(GOODBYE_TIMEOUT, link.connection.closed()).await;
        };
        std::mem::take(&mut self.0).into_values().map(wait).collect::<JoinSet<()>>().join_all().await;
    }
}

/// A process that the system kills for memory has no last word.
const OF_MEMORY: &str = "if memory ran out there, join with --memory";

/// Tells the members of a run, each in a task of its own, that their broker was started again. Those that cannot be
/// reached find out by themselves, when their old connections time out.
pub(super) fn call_back(endpoint: &Endpoint, roster: &Roster) {
    let away = roster.members().iter().filter(|m| m.standing == Standing::Away);
    for addr in away.filter_map(|m| decode::<PeerAddr>(&m.addr).ok()) {
        let endpoint = endpoint.clone();
        tokio::spawn(async move {
            let mut calls = tokio::time::interval(CALL_PERIOD);
            for _ in 0..CALLS {
                calls.tick().await;
                let called = dial(&endpoint, &addr, &PeerHello::Restarted, Duration::ZERO).await;
                if let Ok((connection, _lanes)) = called {
                    let _ = tokio::time::timeout(GOODBYE_TIMEOUT, connection.closed()).await;
                }
            }
        });
    }
}
