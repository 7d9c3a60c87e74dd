//! Before a run: peers come in, and say what their machines can do where nobody knows.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use fusionllm_plan::{Cluster, PeerId, Plan};
use fusionllm_protocol::{ExpectedPeers, FromPeer, Lobby, Member, Survey, ToPeer};
use fusionllm_transport::{Allowed, Connection, Endpoint, Lanes, PeerAddr, Ticket};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::Peers;
use super::incoming::Incoming;
use crate::NodeError;
use crate::emulation::{Emulation, free_addresses};
use crate::local::{Entrance, LocalPeer};
use crate::observer::{Event, Observer};
use crate::probe::Answering;
use crate::wire;

/// Peers to start on this machine, each with its way in.
type LocalPeers = Vec<(LocalPeer, Entrance)>;

/// One that came in.
pub(super) type Guest = (Member, Connection, Lanes);

/// Where peers come in.
pub(super) struct Door {
    pub(super) endpoint: Endpoint,
    pub(super) ticket: Ticket,
}

impl Door {
    /// The peers to start here, each with its way in, and what emulates the links between them if that is wanted.
    pub(super) fn local(
        &self,
        peers: &Peers,
        cluster: Option<Cluster>,
    ) -> Result<(Option<Emulation>, LocalPeers), NodeError> {
        let entrance = |pinned: Option<SocketAddr>, broker: PeerAddr| Entrance {
            ticket: Ticket { addr: broker, secret: self.ticket.secret.clone() },
            pinned,
        };
        match (peers, cluster) {
            (Peers::Emulated { backend, .. }, Some(cluster)) => {
                let devices = cluster.devices().to_vec();
                let PeerAddr { key, addrs } = self.endpoint.addr();
                let broker =
                    addrs.first().copied().ok_or_else(|| NodeError::State("the broker has no address".into()))?;
                let addresses = free_addresses(devices.len())?;
                let mut emulation = Emulation::start(cluster, broker, addresses.clone())?;
                let mut local = Vec::with_capacity(devices.len());
                for ((i, device), pinned) in (0..).zip(devices).zip(addresses) {
                    let broker = emulation.address(PeerId(i), PeerId::BROKER)?;
                    let peer = LocalPeer {
                        name: device.name,
                        backend: device.backend.unwrap_or_else(|| backend.clone()),
                        threads: 1,
                        slowdown: device.slowdown,
                    };
                    local.push((peer, entrance(Some(pinned), PeerAddr { key, addrs: vec![broker] })));
                }
                Ok((Some(emulation), local))
            }
            (Peers::Local(local), _) => {
                Ok((None, local.iter().map(|p| (p.clone(), entrance(None, self.ticket.addr.clone()))).collect()))
            }
            _ => Ok((None, Vec::new())),
        }
    }

    /// Waits until all peers are there.
    pub(super) async fn gather(
        &self,
        places: ExpectedPeers,
        incoming: &mut mpsc::UnboundedReceiver<Incoming>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Guest>, NodeError> {
        let wanted = places.count();
        let mut lobby = Lobby::new(places, *self.ticket.secret.as_bytes());
        let mut connections: BTreeMap<u64, (Connection, Lanes)> = BTreeMap::new();
        loop {
            match incoming.recv().await {
                Some(Incoming::Hello(number, connection, lanes, hello)) => match lobby.join(number, hello) {
                    Ok(member) => {
                        let member = member.clone();
                        connections.insert(number, (connection, *lanes));
                        observer.event(Event::Joined { member: &member, present: lobby.members().len(), wanted });
                    }
                    Err(reason) => {
                        observer.event(Event::TurnedAway { reason: &reason });
                        tokio::spawn(part(connection, *lanes, ToPeer::Refused { reason }));
                    }
                },
                Some(Incoming::Gone(number)) => {
                    connections.remove(&number);
                    if let Some(member) = lobby.leave(number) {
                        observer.event(Event::Left { name: &member.name });
                    }
                }
                Some(Incoming::Interrupt) => {
                    return Err(NodeError::Stopped("interrupted before all peers had joined".into()));
                }
                Some(Incoming::Child(reason)) => return Err(NodeError::Run(reason)),
                Some(_) | None => return Err(NodeError::State("the broker's endpoint closed".into())),
            }
            if let Some(members) = lobby.complete() {
                return Ok(members
                    .into_iter()
                    .filter_map(|m| connections.remove(&m.connection).map(|(c, l)| (m, c, l)))
                    .collect());
            }
        }
    }

    /// Lets nobody in but those who are there.
    pub(super) fn close(&self, guests: &[Guest]) {
        self.endpoint.allow(Allowed::Only(guests.iter().map(|(_, c, _)| c.peer()).collect()));
    }

    /// Has all who came in measure their machines, and the links between them and to here. Yields them again, with what they found and what people should know of it.
    pub(super) async fn survey(
        &self,
        guests: Vec<Guest>,
        incoming: &mut mpsc::UnboundedReceiver<Incoming>,
    ) -> Result<(Vec<Guest>, Cluster, Vec<String>), NodeError> {
        let names: BTreeMap<u64, String> = guests.iter().map(|(m, _, _)| (m.connection, m.name.clone())).collect();
        let _answering = Answering::start(&self.endpoint, guests.iter().map(|(_, c, _)| c.peer()).collect());
        let mut survey = Survey::new(guests.iter().map(|(m, _, _)| m.clone()).collect());
        let mut here: BTreeMap<PeerId, Guest> = (0..).map(PeerId).zip(guests).collect();
        loop {
            let mut asked = JoinSet::new();
            for (peer, message) in survey.ask() {
                if let Some(guest) = here.remove(&peer) {
                    asked.spawn(async move { ask(peer, guest, message).await });
                }
            }
            if asked.is_empty() {
                break;
            }
            while !asked.is_empty() {
                tokio::select! {
                    Some(answered) = asked.join_next() => {
                        let (peer, guest, answer) = answered.map_err(|e| NodeError::State(e.to_string()))?;
                        let name = &guest.0.name;
                        let answer = answer.map_err(|e| lost(name, &e.to_string()))?;
                        survey.answer(peer, answer).map_err(|reason| NodeError::Run(format!("peer {name:?}: {reason}")))?;
                        here.insert(peer, guest);
                    }
                    event = incoming.recv() => match event {
                        Some(Incoming::Gone(number)) => {
                            if let Some(name) = names.get(&number) {
                                return Err(lost(name, "it left"));
                            }
                        }
                        Some(Incoming::Interrupt) => {
                            return Err(NodeError::Stopped("interrupted while machines and links were measured".into()));
                        }
                        Some(Incoming::Child(reason)) => return Err(NodeError::Run(reason)),
                        // Whoever came too late.
                        Some(_) => {}
                        None => return Err(NodeError::State("the broker's endpoint closed".into())),
                    }
                }
            }
        }
        let (cluster, notes) = survey.finish()?;
        Ok((here.into_values().collect(), cluster, notes))
    }
}

/// An end before the plan.
fn lost(name: &str, reason: &str) -> NodeError {
    NodeError::Run(format!("lost peer {name:?} while machines and links were measured: {reason}"))
}

async fn ask(peer: PeerId, mut guest: Guest, message: ToPeer) -> (PeerId, Guest, Result<FromPeer, NodeError>) {
    let (_, connection, lanes) = &mut guest;
    let answer = async {
        wire::send_control(connection, &message).await?;
        let answer = wire::next_control(&mut lanes.control).await?;
        answer.ok_or_else(|| NodeError::Protocol("it fell silent".into()))
    };
    let answer = answer.await;
    (peer, guest, answer)
}

/// Those who hold a share of a plan, in its order. The others are told that they may go, and have gone once this returns.
pub(super) async fn take(plan: &Plan, guests: Vec<Guest>) -> Vec<Guest> {
    let place = |guest: &Guest| plan.peers.iter().position(|name| *name == guest.0.name);
    let (mut taken, left): (Vec<Guest>, Vec<Guest>) = guests.into_iter().partition(|g| place(g).is_some());
    taken.sort_by_key(place);
    let leaving =
        left.into_iter().map(|(_, connection, lanes)| part(connection, lanes, ToPeer::Stop { reason: String::new() }));
    leaving.collect::<JoinSet<()>>().join_all().await;
    taken
}

/// Tells a joiner that it may go, and why. Once it has read that it leaves; whoever does not is left after a moment.
async fn part(connection: Connection, lanes: Lanes, message: ToPeer) {
    if wire::send_control(&connection, &message).await.is_ok() {
        let _ = tokio::time::timeout(Duration::from_secs(2), connection.closed()).await;
    }
    drop(lanes);
}
