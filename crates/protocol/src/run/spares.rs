//! Members that come and go while a generation runs: whether a newcomer helps, and how one leaves in good order.

use super::{Phase, Run};
use crate::notice::Open;
use crate::{Action, Farewell, Formation, IncidentKind, MemberId, Standing, Survey, ToPeer};
use fusionllm_events::Event;

impl Run {
    /// A generation runs: measures newcomers, and sees whether they help.
    pub(super) fn scout(&mut self) -> Vec<Action> {
        let Phase::Running(running) = &self.phase else { return Vec::new() };
        let spare = self.usable().into_iter().any(|m| !running.formation.members.contains(&m));
        if !spare || self.newcomers.is_empty() || self.scout.is_some() || !running.machine.is_started() {
            return Vec::new();
        }
        if !self.options.measured {
            // Nothing is known about any machine, so one more is used as long as places are free.
            self.newcomers.clear();
            let free = running.formation.members.len() < self.roster.wanted();
            return if free { self.drain() } else { Vec::new() };
        }
        let present = self.usable();
        if !Survey::is_needed(&present, &self.atlas) {
            return self.weigh();
        }
        let mut survey = Survey::new(&present, &self.atlas, &self.options.programs);
        let requests = survey.next_requests();
        self.watch.restart(&present, self.now);
        self.scout = Some(survey);
        let mut actions = self.introduce(&present);
        actions.extend(requests.into_iter().map(|(to, message)| Action::Send(to, message)));
        actions
    }

    /// Asks for a plan for all who are there, to compare it with the plan that runs.
    pub(super) fn weigh(&mut self) -> Vec<Action> {
        let members = self.usable();
        if !matches!(self.phase, Phase::Running(_)) || self.weighing || members.is_empty() {
            return Vec::new();
        }
        self.newcomers.clear();
        self.weighing = true;
        vec![self.plan(members)]
    }

    /// Ends the generation for a better plan, if that pays.
    pub(super) fn compare(&mut self, formation: &Formation) -> Vec<Action> {
        let Phase::Running(running) = &self.phase else { return Vec::new() };
        let all_there = formation.members.iter().all(|m| self.roster.is_present(*m));
        let Some((now, then)) = running.step_s.zip(formation.predicted_step_s) else {
            return Vec::new();
        };
        let steps = self.options.settings.steps.saturating_sub(self.progress.step) as f64;
        let gain = (now - then) * steps;
        let names = formation.members.iter().filter(|m| !running.formation.members.contains(m));
        let peers: Vec<String> = names.map(|m| self.roster.display_name(*m).to_owned()).collect();
        if !all_there || then > 0.95 * now || gain < 2.0 * formation.move_s {
            return Vec::new();
        }
        let mut actions = vec![Action::event(Event::Better { peers, gain_s: gain })];
        actions.extend(self.drain());
        actions
    }

    pub(super) fn drain(&mut self) -> Vec<Action> {
        let Phase::Running(running) = &mut self.phase else { return Vec::new() };
        let actions = running.machine.drain();
        self.follow(actions)
    }

    /// A member wants to leave: at once if it has no share, or else after a cut.
    pub(super) fn leave(&mut self, member: MemberId) -> Vec<Action> {
        if !self.leaving.insert(member) {
            return Vec::new();
        }
        match &self.phase {
            Phase::Running(r) if r.formation.members.contains(&member) => {
                if r.machine.is_started() && !self.usable().is_empty() {
                    self.incidents.push(Open::begin(
                        IncidentKind::Left,
                        member,
                        self.progress.step,
                        self.now,
                        self.now,
                    ));
                    return self.drain();
                }
                // Those who wait for a cut would wait for ever, since it needs all members.
                let present = |m: &MemberId| self.roster.is_present(*m);
                let leavers: Vec<MemberId> = self.leaving.iter().copied().filter(present).collect();
                leavers.into_iter().flat_map(|m| self.dismiss(m)).collect()
            }
            _ => self.dismiss(member),
        }
    }

    /// Lets a member go that wanted to.
    pub(super) fn dismiss(&mut self, member: MemberId) -> Vec<Action> {
        let stop = ToPeer::Stop(Farewell::Left);
        let mut actions = vec![Action::Send(member, stop), Action::Dismiss(member)];
        actions.extend(self.lose(member, "it left", Standing::Out, IncidentKind::Left));
        self.custody.lose(member);
        self.watch.forget(member);
        actions
    }
}
