//! Tells people, and the summary, what happens to a run's members.

use fusionllm_graph::units::counted;
use fusionllm_protocol::{Incident, MemberId, Notice};
use fusionllm_workspace::run_dir::IncidentSummary;

use super::conductor::Conductor;
use super::observer::Event;
use crate::NodeError;

impl Conductor<'_> {
    pub(super) fn notice(&mut self, notice: &Notice) -> Result<(), NodeError> {
        let roster = self.run.roster();
        let name = |m: MemberId| roster.display_name(m);
        match notice {
            Notice::Joined { member, present, wanted } => {
                if let Some(member) = roster.get(*member) {
                    let (present, wanted, spare) = (*present, *wanted, self.run.has_begun());
                    self.observer.event(Event::Joined { member, present, wanted, spare });
                }
            }
            Notice::Silent { member, seconds } => {
                self.observer.event(Event::Silent { name: name(*member), seconds: *seconds });
                self.links.look_after(*member, &self.events);
            }
            Notice::Answers { member } => self.observer.event(Event::Answers { name: name(*member) }),
            Notice::Lost { member, reason, used, step } => {
                // Without others, nobody takes over its share.
                let used = *used && self.run.roster().present().next().is_some();
                let event = Event::Lost { name: name(*member), reason, used, step: *step };
                self.observer.event(event);
            }
            Notice::LinkLost { from, to, reason } => {
                self.observer.event(Event::LinkLost { from: name(*from), to: name(*to), reason });
            }
            Notice::Measuring => self.observer.event(Event::Measuring),
            Notice::Waiting { reason } => {
                if self.children.is_some() {
                    // No other joiner can come.
                    return Err(NodeError::Run(format!("those who are left cannot go on: {reason}")));
                }
                self.observer.event(Event::Waiting { reason });
            }
            Notice::Speed { member, times } => {
                self.observer.event(Event::Speed { name: name(*member), times: *times });
            }
            Notice::Poisoned { member, step, what, advice, micro_batch } => {
                let name = member.map_or("the broker", name);
                // Step 1 trains on the first batch.
                let batch = self.current.as_ref().map_or(0, |current| current.job.train.batch);
                let first = step.saturating_sub(1) * batch as u64;
                let row = self.data.not_finite(first, batch);
                let row = row.or_else(|| micro_batch.map(|m| self.samples(first, m)));
                let what = format!("{what}{}", row.map(|row| format!(" ({row})")).unwrap_or_default());
                self.observer.event(Event::Poisoned { name, step: *step, what: &what, advice });
                let named = if member.is_some() { format!("{name:?}") } else { name.to_owned() };
                self.store.poisoned(format!("{named} {what}"), advice);
            }
            Notice::Skipping { step, skipped, of, why } => {
                let why = why.as_deref();
                self.observer.event(Event::Skipping { step: *step, skipped: *skipped, of: *of, why });
            }
            Notice::Better { members, gain_s } => {
                let names: Vec<&str> = members.iter().map(|m| name(*m)).collect();
                self.observer.event(Event::Better { names: &names, gain_s: *gain_s });
            }
            Notice::CheckpointLeftOut { step, under_way } => {
                let others = counted(*under_way, "checkpoint");
                let are = if *under_way == 1 { "is" } else { "are" };
                let text = format!(
                    "the checkpoint of step {step} is left out: {others} {are} still on the way to the disk, and \
                     training does not wait; a larger checkpoint.every leaves time for each"
                );
                self.observer.event(Event::Note { text: &text });
            }
            Notice::Started { incidents, .. } => {
                let incidents: Vec<_> = incidents.iter().map(|i| summary(i, name(i.member))).collect();
                self.observer.event(Event::Started { incidents: &incidents });
                for incident in incidents {
                    self.store.incident(incident);
                }
            }
        }
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

fn summary(incident: &Incident, peer: &str) -> IncidentSummary {
    IncidentSummary {
        kind: incident.kind.name().to_owned(),
        peer: peer.to_owned(),
        step: incident.step,
        restarted_at: incident.restarted_at,
        detected_s: incident.detected_s,
        replanned_s: incident.replanned_s,
        restored_s: incident.restored_s,
        lost_work_s: incident.lost_work_s,
    }
}
