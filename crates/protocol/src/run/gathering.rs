//! A run between generations: members are gathered, measured and planned for.

use super::{Phase, Run};
use crate::{Action, Formation, FromPeer, Member, MemberId, Survey, ToPeer};
use fusionllm_events::Event;

impl Run {
    pub(super) fn measured(&mut self, from: MemberId, message: FromPeer) -> Result<Vec<Action>, String> {
        let survey = match (&mut self.phase, &mut self.scout) {
            (Phase::Surveying(survey), _) | (_, Some(survey)) => survey,
            _ => return Ok(Vec::new()),
        };
        survey.answer(from, message, &mut self.atlas)?;
        Ok(self.survey_on())
    }

    /// Asks for what is to be measured next, or goes on with what was measured.
    pub(super) fn survey_on(&mut self) -> Vec<Action> {
        let (survey, scouting) = match (&mut self.phase, &mut self.scout) {
            (Phase::Surveying(survey), _) => (survey, false),
            (_, Some(survey)) => (survey, true),
            _ => return Vec::new(),
        };
        if !survey.is_over() {
            return survey.next_requests().into_iter().map(|(to, message)| Action::Send(to, message)).collect();
        }
        if scouting {
            self.scout = None;
            return self.weigh();
        }
        self.phase = Phase::Gathering { short: false };
        self.advance()
    }

    /// Call with the plan that [`Action::Plan`] asked for.
    pub fn planned(&mut self, formation: Formation, now: f64) -> Vec<Action> {
        self.now = now;
        if std::mem::take(&mut self.weighing) {
            return self.compare(&formation);
        }
        if !matches!(self.phase, Phase::Planning) {
            return Vec::new();
        }
        if !formation.members.iter().all(|m| self.roster.is_present(*m)) {
            self.phase = Phase::Gathering { short: false };
            return self.advance();
        }
        self.incidents.iter_mut().for_each(|open| open.planned(now));
        self.assign(formation)
    }

    /// Call if no plan can be made for the members that [`Action::Plan`] named.
    pub fn not_planned(&mut self, reason: &str, now: f64) -> Vec<Action> {
        self.now = now;
        if std::mem::take(&mut self.weighing) || !matches!(self.phase, Phase::Planning) {
            return Vec::new();
        }
        self.phase = Phase::Gathering { short: true };
        let mut actions = vec![Action::event(Event::Waiting { reason: reason.to_owned() })];
        actions.extend(self.give_up_saving());
        actions
    }

    /// Begins the survey or the plan that the run waits for, if the members who are there suffice.
    pub(super) fn advance(&mut self) -> Vec<Action> {
        let Phase::Gathering { short } = self.phase else { return self.scout() };
        // Requests that were sent while a generation ran will still be answered.
        if let Some(survey) = self.scout.take().filter(|s| !s.is_over()) {
            self.phase = Phase::Surveying(survey);
            return Vec::new();
        }
        let present = self.usable();
        if self.begun && (self.waits_for_return() || self.watch.all_silent(&present, self.now)) {
            return Vec::new();
        }
        let wanted = if self.begun { 1 } else { self.roster.wanted() };
        if present.len() < wanted || (short && self.newcomers.is_empty()) {
            return Vec::new();
        }
        if self.options.measured && Survey::is_needed(&present, &self.atlas) {
            let mut survey = Survey::new(&present, &self.atlas, &self.options.programs);
            let requests = survey.next_requests();
            self.watch.restart(&present, self.now);
            self.phase = Phase::Surveying(survey);
            let mut actions = self.introduce(&present);
            actions.push(Action::event(Event::Measuring));
            actions.extend(requests.into_iter().map(|(to, message)| Action::Send(to, message)));
            return actions;
        }
        self.newcomers.clear();
        self.phase = Phase::Planning;
        vec![self.plan(present)]
    }

    /// The members that plans may use, in order.
    pub(super) fn usable(&self) -> Vec<MemberId> {
        self.roster.in_order().into_iter().filter(|m| !self.leaving.contains(m)).collect()
    }

    /// Tells members of each other, so that they let each other in.
    pub(super) fn introduce(&self, members: &[MemberId]) -> Vec<Action> {
        let contacts: Vec<_> = members.iter().filter_map(|m| self.roster.get(*m)).map(Member::contact).collect();
        members.iter().map(|m| Action::Send(*m, ToPeer::Contacts(contacts.clone()))).collect()
    }

    pub(super) fn plan(&self, members: Vec<MemberId>) -> Action {
        let known: Vec<&Member> = members.iter().filter_map(|m| self.roster.get(*m)).collect();
        let (cluster, notes) = match self.options.measured.then(|| self.atlas.cluster(&known)) {
            Some(Ok((cluster, notes))) => (Some(cluster), notes),
            _ => (None, Vec::new()),
        };
        Action::Plan { members, cluster, notes }
    }
}
