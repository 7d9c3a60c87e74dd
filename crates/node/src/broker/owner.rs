//! Answers the run's owner, who is no member.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use fusionllm_events::Event;
use fusionllm_graph::units::counted;
use fusionllm_protocol::{
    Action, Answer, IncidentStatus, MAX_CONTROL_BYTES, MAX_LISTED, Question, Request, RunPhase, RunStatus, TicketRole,
    VERSION, other_version,
};
use fusionllm_transport::{Connection, Lanes, PeerKey};
use tokio::sync::OwnedSemaphorePermit;

use super::entry::{invite, part};
use crate::broker::conductor::Conductor;
use crate::broker::generation::Generation;
use crate::broker::records::PeerFacts;
use crate::web::{Look, Viewer};
use crate::{NodeError, net};

/// Sends the answer, and closes the connection once it is read.
async fn reply(connection: Connection, lanes: Lanes, answer: Answer) {
    if net::send_control(&connection, &answer).await.is_ok() {
        part(connection, lanes).await;
    }
}

/// The most owners that watch the run's page at once. Each takes a share of the broker's line.
pub(super) const MAX_OWNERS: usize = 16;

/// The least time between two pages for an owner.
const PAGE_EVERY: Duration = Duration::from_secs(1);

/// The bytes of a message that are left for all but the HTML of a page.
const NOT_HTML: u64 = 4096;

/// Sends the run's page to its owner, and then what changes, until the run is over or the owner hangs up.
async fn show(connection: Connection, lanes: Lanes, mut viewer: Viewer, place: OwnedSemaphorePermit) {
    let mut has = BTreeMap::new();
    let mut sent: Option<Instant> = None;
    loop {
        let drawing = tokio::select! {
            _ = connection.closed() => return,
            drawing = async { if sent.is_none() { viewer.fresh().await } else { viewer.next().await } } => drawing,
        };
        let Some(drawing) = drawing else { continue };
        let is_last = drawing.is_last;
        if !is_last && sent.is_some_and(|when| when.elapsed() < PAGE_EVERY) {
            continue;
        }
        sent = Some(Instant::now());
        let is_new = |(name, html): &&(&'static str, Arc<str>)| has.get(name) != Some(html);
        let news: Vec<_> = drawing.parts.iter().filter(is_new).cloned().collect();
        let parts: Vec<_> = news.iter().map(|(name, html)| ((*name).to_owned(), html.to_string())).collect();
        if parts.iter().map(|(_, html)| html.len() as u64).sum::<u64>() > MAX_CONTROL_BYTES - NOT_HTML {
            let reason = "the run's page is too large to be sent".to_owned();
            return reply(connection, lanes, Answer::Refused { reason }).await;
        }
        has.extend(news);
        // A page without news says that the broker is there.
        let page = Answer::Page { parts, is_last };
        if is_last {
            reply(connection, lanes, page).await;
            // Until then, the end of the run waits for this viewer.
            return drop((viewer, place));
        }
        if net::send_control(&connection, &page).await.is_err() {
            return;
        }
    }
}

impl Conductor<'_> {
    /// Carries out an owner's request, and answers it.
    pub(crate) fn asked(
        &mut self,
        connection: Connection,
        lanes: Lanes,
        request: Request,
    ) -> Result<Vec<Action>, NodeError> {
        let mut actions = Vec::new();
        // The owner's decision has to outlive this broker.
        let decides = !matches!(request.question, Question::Status | Question::Page);
        let answer = match self.permit(&request) {
            Ok(()) => match request.question {
                Question::Status => Answer::Status(Box::new(self.status(&self.facts()))),
                Question::Kick { name } => match self.run.kick(&name, self.now()) {
                    Ok((member, done)) => {
                        actions = done;
                        if let Some(member) = self.run.roster().get(member) {
                            let key = PeerKey::from_bytes(member.identity);
                            self.known.write().unwrap_or_else(PoisonError::into_inner).remove(&key);
                        }
                        Answer::Done { what: format!("{name} is out of the run, and its key cannot come back") }
                    }
                    Err(reason) => Answer::Refused { reason },
                },
                Question::Revoke { secret } => match self.run.admission_mut().revoke(secret.as_ref()) {
                    0 => Answer::Refused { reason: "no such ticket is valid".into() },
                    count => Answer::Done { what: format!("{} revoked; members stay", counted(count, "ticket")) },
                },
                Question::Invite { seconds, uses } => {
                    let valid = seconds.map(Duration::from_secs);
                    let (ticket, invitation) = invite(self.ticket.addr.clone(), TicketRole::Peer, valid, uses);
                    match self.run.admission_mut().invite(invitation) {
                        Ok(()) => Answer::Ticket { text: ticket.to_string() },
                        Err(reason) => Answer::Refused { reason },
                    }
                }
                Question::Page => match self.owners.clone().try_acquire_owned() {
                    Ok(place) => {
                        tokio::spawn(show(connection, lanes, Viewer::new(&self.site), place));
                        return Ok(actions);
                    }
                    Err(_) => Answer::Refused { reason: "too many watch the run's page through its broker".into() },
                },
            },
            Err(reason) => {
                self.tell(Event::TurnedAway { reason: reason.clone() });
                Answer::Refused { reason }
            }
        };
        if decides {
            self.persist()?;
        }
        tokio::spawn(reply(connection, lanes, answer));
        Ok(actions)
    }

    fn permit(&self, request: &Request) -> Result<(), String> {
        if !self.run.roster().admission().is_owner(&request.secret) {
            return Err(
                "this is not the owner's ticket of this run; it is in the run directory, in owner-ticket".into()
            );
        }
        match request.version {
            VERSION => Ok(()),
            version => Err(other_version(version)),
        }
    }

    /// The figures of the run for its page.
    pub(crate) fn look(&self) -> Look {
        let facts = self.facts();
        let summary = self.current.as_ref().map(|current| {
            let predicted_step_s = current.predicted.as_ref().map(|s| s.step_s);
            self.store.figures().summary(&current.plan, &facts, predicted_step_s, self.run.progress())
        });
        Look { status: self.status(&facts), summary, last_step: self.store.figures().last_step(&facts) }
    }

    /// The facts about the peers of the present generation.
    fn facts(&self) -> Vec<PeerFacts> {
        self.current.as_ref().map(Generation::facts).unwrap_or_default()
    }

    /// How the run is doing, with these facts about its peers.
    pub(crate) fn status(&self, facts: &[PeerFacts]) -> RunStatus {
        let mut status = self.run.status(self.now());
        let figures = self.store.figures();
        (status.loss, status.step_s) = figures.last();
        status.saved = self.store.safe_step();
        let step_s = status.step_s.or(status.predicted_step_s);
        let step_s = step_s.filter(|_| status.phase == RunPhase::Training);
        status.left_s = step_s.map(|s| s * status.steps.saturating_sub(status.step) as f64);
        let incidents = figures.incidents();
        let earlier = incidents.len().saturating_sub(MAX_LISTED);
        status.more_incidents = earlier as u64;
        status.incidents = incidents[earlier..]
            .iter()
            .map(|i| IncidentStatus {
                kind: i.kind.clone(),
                peer: i.peer.clone(),
                step: i.step,
                restarted_at: i.restarted_at,
                pause_s: i.detected_s + i.replanned_s + i.restored_s,
                lost_work_s: i.lost_work_s,
            })
            .collect();
        if let Some(current) = &self.current {
            if !self.run.is_training() && !self.run.peers().is_empty() {
                status.loading = Some(current.loading.progress());
            }
            for member in &mut status.members {
                let Some((place, facts)) = member.peer.map(|p| p as usize).and_then(|p| Some((p, facts.get(p)?)))
                else {
                    continue;
                };
                let peer = figures.peer(place, facts);
                member.operators = Some(peer.operators);
                (member.compute_s, member.predicted_compute_s) = (peer.compute_s, peer.predicted_compute_s);
            }
        }
        status
    }
}
