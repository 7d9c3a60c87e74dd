//! Tells people, and the summary, what happens to a run's members.

use fusionllm_events::{Event, IncidentSummary};
use fusionllm_protocol::{Incident, MemberId, Notice};

use super::conductor::Conductor;
use crate::NodeError;

impl Conductor<'_> {
    pub(super) fn notice(&mut self, notice: &Notice) -> Result<(), NodeError> {
        let roster = self.run.roster();
        let name = |m: MemberId| roster.display_name(m).to_owned();
        let event = match notice {
            Notice::Event(Event::Waiting { reason }) if self.children.is_some() => {
                // No other joiner can come.
                return Err(NodeError::Run(format!("those who are left cannot go on: {reason}")));
            }
            Notice::Event(event) => event.clone(),
            Notice::Silent { member, seconds } => {
                let event = Event::Silent { peer: name(*member), seconds: *seconds };
                self.links.look_after(*member, &self.events);
                event
            }
            Notice::Lost { member, reason, used, step } => {
                // Without others, nobody takes over its share.
                let used = *used && roster.present().next().is_some();
                Event::Lost { peer: name(*member), reason: reason.clone(), used, step: *step }
            }
            Notice::Poisoned { member, step, what, advice, micro_batch } => {
                let peer = member.map_or_else(|| "the broker".to_owned(), name);
                // Step 1 trains on the first batch.
                let batch = self.current.as_ref().map_or(0, |current| current.job.train.batch);
                let first = step.saturating_sub(1) * batch as u64;
                let row = self.data.not_finite(first, batch);
                let row = row.or_else(|| micro_batch.map(|m| self.samples(first, m)));
                let what = format!("{what}{}", row.map(|row| format!(" ({row})")).unwrap_or_default());
                let named = if member.is_some() { format!("{peer:?}") } else { peer.clone() };
                self.store.poisoned(format!("{named} {what}"), advice);
                Event::Poisoned { peer, step: *step, what, advice: (*advice).to_owned() }
            }
            Notice::Started { incidents, .. } => {
                let moved = self.current.as_ref().map_or(0, |current| current.loading.moved);
                let incidents: Vec<_> = incidents.iter().map(|i| summary(i, &name(i.member), moved)).collect();
                incidents.iter().for_each(|incident| self.store.incident(incident.clone()));
                Event::Started { incidents }
            }
        };
        self.tell(event);
        Ok(())
    }

    /// The places that the samples of a micro-batch come from. `first` samples were drawn before its batch.
    fn samples(&self, first: u64, micro_batch: u32) -> String {
        const NAMED: usize = 4;
        let size = self.current.as_ref().map_or(0, |current| current.model.micro_batch);
        let first = first + u64::from(micro_batch) * size as u64;
        let mut places: Vec<String> =
            (first..).take(size.min(NAMED)).map(|consumed| self.data.train_origin(consumed)).collect();
        if size > NAMED {
            places.push(format!("{} more", size - NAMED));
        }
        format!("its samples: {}", places.join("; "))
    }
}

fn summary(incident: &Incident, peer: &str, restored_bytes: u64) -> IncidentSummary {
    IncidentSummary {
        kind: incident.kind.name().to_owned(),
        peer: peer.to_owned(),
        step: incident.step,
        restarted_at: incident.restarted_at,
        detected_s: incident.detected_s,
        replanned_s: incident.replanned_s,
        restored_s: incident.restored_s,
        restored_bytes,
        lost_work_s: incident.lost_work_s,
    }
}
