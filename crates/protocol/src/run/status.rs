//! The view of a run for its owner, and the owner's decisions about members.

use super::{Phase, Run};
use crate::{
    Action, Farewell, IncidentKind, MAX_LISTED, Member, MemberId, MemberStatus, RunPhase, RunStatus, Standing, ToPeer,
};

impl Run {
    /// The run as its machines know it. The figures of steps, loading, checkpoints and incidents are missing.
    pub fn status(&self, now: f64) -> RunStatus {
        let members: Vec<MemberStatus> =
            self.roster.not_out().take(MAX_LISTED).map(|m| self.member_status(m, now)).collect();
        let (predicted_step_s, saving) = match &self.phase {
            Phase::Running(r) => (r.formation.predicted_step_s, r.machine.saving().next()),
            _ => (None, None),
        };
        RunStatus {
            phase: self.run_phase(),
            generation: self.generation,
            step: self.progress.step,
            steps: self.options.settings.steps,
            loss: None,
            step_s: None,
            predicted_step_s,
            left_s: None,
            saved: None,
            saving,
            loading: None,
            wanted: self.roster.wanted() as u64,
            more_members: (self.roster.not_out().count() - members.len()) as u64,
            members,
            incidents: Vec::new(),
            more_incidents: 0,
        }
    }

    fn run_phase(&self) -> RunPhase {
        match &self.phase {
            Phase::Gathering { .. } => RunPhase::Waiting,
            Phase::Surveying(_) => RunPhase::Measuring,
            Phase::Planning => RunPhase::Planning,
            Phase::Running(r) if !r.machine.is_started() => RunPhase::Loading,
            Phase::Running(_) if self.stopping || self.progress.step >= self.options.settings.steps => RunPhase::Saving,
            Phase::Running(_) => RunPhase::Training,
            Phase::Over => RunPhase::Over,
        }
    }

    fn member_status(&self, member: &Member, now: f64) -> MemberStatus {
        let peer = self.peer(member.id);
        let share_bytes = match &self.phase {
            Phase::Running(r) => peer.and_then(|p| r.formation.share_bytes.get(p.0 as usize).copied()),
            _ => None,
        };
        let connected = matches!(member.standing, Standing::Present | Standing::Silent);
        let heard = self.watch.last_heard(member.id).filter(|_| connected);
        MemberStatus {
            name: member.name.clone(),
            standing: member.standing,
            backend: member.backend.clone(),
            device: member.device.clone(),
            peer: peer.map(|p| p.0),
            share_bytes,
            operators: None,
            compute_s: None,
            predicted_compute_s: None,
            flops: self.atlas.flops(member.id),
            bytes_per_s: self.atlas.highest_bandwidth(member.id),
            silent_s: heard.map(|heard| (now - heard).max(0.0)),
        }
    }

    /// Puts the member with this name out for good: its key cannot come back. Returns the member too.
    ///
    /// # Errors
    ///
    /// Nobody has that name, or the run is over.
    pub fn kick(&mut self, name: &str, now: f64) -> Result<(MemberId, Vec<Action>), String> {
        self.now = now;
        if matches!(self.phase, Phase::Over) {
            return Err("the run is over".into());
        }
        let Some(member) = self.roster.named(name) else {
            let mut names: Vec<&str> = self.roster.not_out().take(20).map(|m| m.name.as_str()).collect();
            names.sort_unstable();
            return Err(match names[..] {
                [] => "nobody has joined yet".to_owned(),
                _ => format!("no member is called {name:?}; there are {}", names.join(", ")),
            });
        };
        if let Some(identity) = self.roster.get(member).map(|m| m.identity) {
            self.roster.admission_mut().ban(identity);
        }
        let mut actions = self.put_out(member, "the run's owner put it out", IncidentKind::Kicked);
        if self.options.measured {
            // Spares know each other from their measurements. From now on, they do not let the kicked member in.
            actions.extend(self.introduce(&self.usable()));
        }
        Ok((member, actions))
    }

    /// Takes a member out of the run, and tells it why. It does not come back as the same member.
    pub(super) fn put_out(&mut self, member: MemberId, reason: &str, kind: IncidentKind) -> Vec<Action> {
        let mut actions = self.lose(member, reason, Standing::Out, kind);
        self.watch.forget(member);
        self.custody.lose(member);
        let reason = crate::notice::one_line(reason);
        actions.push(Action::Send(member, ToPeer::Stop(Farewell::PutOut { reason })));
        actions.push(Action::Dismiss(member));
        actions
    }
}
