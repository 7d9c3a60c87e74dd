//! Before a run: joiners come in, and measure their machines where nobody knows them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use fusionllm_plan::{Cluster, PeerId, Plan};
use fusionllm_protocol::{ExpectedPeers, FromPeer, Lobby, Member, Survey, ToPeer};
use fusionllm_transport::{Allowed, Connection, Endpoint, Lanes, PeerAddr, Ticket};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::Peers;
use super::emulation::{Emulation, free_addresses};
use super::incoming::Incoming;
use super::local::{Invitation, LocalPeer};
use super::observer::{Event, Observer};
use crate::NodeError;
use crate::net;
use crate::net::probe::ProbeResponder;

/// How long a joiner that was sent away may take to hang up.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

/// A joiner that the lobby accepted.
pub(super) struct Candidate {
    pub(super) member: Member,
    pub(super) connection: Connection,
    pub(super) lanes: Lanes,
}

/// What the survey of all candidates found.
pub(super) struct Surveyed {
    pub(super) candidates: Vec<Candidate>,
    pub(super) cluster: Cluster,
    /// Sentences for people.
    pub(super) notes: Vec<String>,
}

/// Peers to start on this machine, and the links between them if those are emulated.
pub(super) struct LocalPeers {
    pub(super) emulation: Option<Emulation>,
    pub(super) peers: Vec<(LocalPeer, Invitation)>,
}

/// Where joiners come in.
pub(super) struct Admission {
    pub(super) endpoint: Endpoint,
    pub(super) ticket: Ticket,
}

impl Admission {
    /// The peers to start on this machine, each with its invitation.
    pub(super) fn local(&self, peers: &Peers, cluster: Option<Cluster>) -> Result<LocalPeers, NodeError> {
        let invitation = |pinned: Option<SocketAddr>, broker: PeerAddr| Invitation {
            ticket: Ticket { addr: broker, ..self.ticket.clone() },
            pinned,
        };
        match (peers, cluster) {
            (Peers::Emulated { backend, .. }, Some(cluster)) => {
                let devices = cluster.devices().to_vec();
                let PeerAddr { key, addrs, .. } = self.endpoint.addr();
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
                    local.push((peer, invitation(Some(pinned), PeerAddr::new(key, vec![broker]))));
                }
                Ok(LocalPeers { emulation: Some(emulation), peers: local })
            }
            (Peers::Local(local), _) => {
                let invited = |p: &LocalPeer| (p.clone(), invitation(None, self.ticket.addr.clone()));
                Ok(LocalPeers { emulation: None, peers: local.iter().map(invited).collect() })
            }
            _ => Ok(LocalPeers { emulation: None, peers: Vec::new() }),
        }
    }

    /// Waits until every place is taken.
    pub(super) async fn gather(
        &self,
        places: ExpectedPeers,
        incoming: &mut mpsc::UnboundedReceiver<Incoming>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Candidate>, NodeError> {
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
                        tokio::spawn(send_away(connection, *lanes, ToPeer::Refused { reason }));
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
                let candidate = |member: Member| {
                    let (connection, lanes) = connections.remove(&member.connection)?;
                    Some(Candidate { member, connection, lanes })
                };
                return Ok(members.into_iter().filter_map(candidate).collect());
            }
        }
    }

    /// Refuses every connection except those of the candidates.
    pub(super) fn close(&self, candidates: &[Candidate]) {
        self.endpoint.allow(Allowed::Only(candidates.iter().map(|c| c.connection.peer()).collect()));
    }

    /// Has every candidate measure its machine, and its links to the others and to the broker.
    pub(super) async fn survey(
        &self,
        candidates: Vec<Candidate>,
        incoming: &mut mpsc::UnboundedReceiver<Incoming>,
    ) -> Result<Surveyed, NodeError> {
        let names: BTreeMap<u64, String> =
            candidates.iter().map(|c| (c.member.connection, c.member.name.clone())).collect();
        let keys = candidates.iter().map(|c| c.connection.peer()).collect();
        let _responder = ProbeResponder::start(&self.endpoint, keys);
        let mut survey = Survey::new(candidates.iter().map(|c| c.member.clone()).collect());
        let mut idle: BTreeMap<PeerId, Candidate> = (0..).map(PeerId).zip(candidates).collect();
        loop {
            let mut asked = JoinSet::new();
            for (peer, message) in survey.next_requests() {
                if let Some(candidate) = idle.remove(&peer) {
                    asked.spawn(async move { ask(peer, candidate, message).await });
                }
            }
            if asked.is_empty() {
                break;
            }
            while !asked.is_empty() {
                tokio::select! {
                    Some(answered) = asked.join_next() => {
                        let (peer, candidate, answer) = answered.map_err(|e| NodeError::State(e.to_string()))?;
                        let name = &candidate.member.name;
                        let answer = answer.map_err(|e| lost(name, &e.one_line()))?;
                        survey.answer(peer, answer).map_err(|reason| NodeError::Run(format!("peer {name:?}: {reason}")))?;
                        idle.insert(peer, candidate);
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
                        // A joiner that came too late.
                        Some(_) => {}
                        None => return Err(NodeError::State("the broker's endpoint closed".into())),
                    }
                }
            }
        }
        let (cluster, notes) = survey.finish()?;
        Ok(Surveyed { candidates: idle.into_values().collect(), cluster, notes })
    }
}

fn lost(name: &str, reason: &str) -> NodeError {
    NodeError::Run(format!("lost peer {name:?} while machines and links were measured: {reason}"))
}

async fn ask(
    peer: PeerId,
    mut candidate: Candidate,
    message: ToPeer,
) -> (PeerId, Candidate, Result<FromPeer, NodeError>) {
    let answer = async {
        net::send_control(&candidate.connection, &message).await?;
        let answer = net::next_control(&mut candidate.lanes.control).await?;
        answer.ok_or_else(|| NodeError::Protocol("it stopped answering".into()))
    };
    let answer = answer.await;
    (peer, candidate, answer)
}

/// The candidates that the plan uses, in its order. The others are sent away, and are gone once this returns.
pub(super) async fn take(plan: &Plan, candidates: Vec<Candidate>) -> Vec<Candidate> {
    let place = |c: &Candidate| plan.peers.iter().position(|name| *name == c.member.name);
    let (mut taken, left): (Vec<Candidate>, Vec<Candidate>) = candidates.into_iter().partition(|c| place(c).is_some());
    taken.sort_by_key(place);
    let goodbye = |c: Candidate| send_away(c.connection, c.lanes, ToPeer::Stop { reason: String::new() });
    left.into_iter().map(goodbye).collect::<JoinSet<()>>().join_all().await;
    taken
}

/// Tells a joiner why it may go, and waits a moment until it hangs up.
async fn send_away(connection: Connection, lanes: Lanes, message: ToPeer) {
    if net::send_control(&connection, &message).await.is_ok() {
        let _ = tokio::time::timeout(GOODBYE_TIMEOUT, connection.closed()).await;
    }
    drop(lanes);
}
