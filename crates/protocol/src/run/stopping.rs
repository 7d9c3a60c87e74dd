//! A run that is to stop: its members save it, if they can.

use super::{Phase, Run};
use crate::{Action, MemberId, Standing};

/// Seconds of silence of all members after which a run that is to stop waits for them no longer. Supervisors are less
/// patient than a run that goes on.
const PATIENCE_S: f64 = 20.0;

impl Run {
    /// Stops the run, after the passes in flight and with a checkpoint if it trains. Ends it at once if nobody is left
    /// who could save more than the disk has.
    pub fn interrupt(&mut self, now: f64) -> Vec<Action> {
        self.now = now;
        self.stopping = true;
        let mut actions = Vec::new();
        match &mut self.phase {
            Phase::Running(running) if self.generation == 1 || running.machine.is_started() => {
                let stop = running.machine.interrupt();
                actions.extend(self.follow(stop));
            }
            // Once the next generation has loaded everything, it saves what its members keep, and stops.
            _ if self.begun => {}
            Phase::Over => {}
            _ => return self.end(Action::Fail("interrupted before all peers had joined".into())),
        }
        actions.extend(self.give_up_saving());
        actions
    }

    /// Ends a run that is to stop, if waiting would save nothing that is not on the disk. Members who have more keep it,
    /// and wait for a broker that goes on with the run.
    pub(super) fn give_up_saving(&mut self) -> Vec<Action> {
        // A disk may be slow, but it needs no machine any more.
        if !self.stopping || !self.begun || self.committing > 0 {
            return Vec::new();
        }
        let on_disk = self.custody.on_disk();
        let saved = on_disk.step;
        let with = |can_give: &dyn Fn(MemberId) -> bool| self.custody.restart(can_give).progress.step;
        let why = match &self.phase {
            Phase::Over => return Vec::new(),
            Phase::Running(r) if self.watch.silent_for(&r.formation.members, PATIENCE_S, self.now) => "all are silent",
            Phase::Running(_) => return Vec::new(),
            Phase::Gathering { short: true } => "those who are left are too few for the model",
            _ if self.roster.present().next().is_none() => "none is left",
            _ if with(&|m| self.roster.is_present(m)) <= saved => "those who are left do not have the whole state",
            _ => return Vec::new(),
        };
        let newest = with(&|m| self.roster.get(m).is_some_and(|m| m.standing != Standing::Out));
        let reached = std::mem::replace(&mut self.progress, on_disk).step;
        if newest > saved {
            self.phase = Phase::Over;
            return vec![Action::Suspend(format!(
                "the run was at step {reached}, and no machine could save it: {why}; those that have step {newest} wait \
                 for an hour, if they still run"
            ))];
        }
        if reached == saved {
            return self.end(Action::Finish(on_disk));
        }
        let lost = format!("the run was at step {reached}, and no machine could save it: {why}");
        [vec![Action::Rewind(on_disk)], self.end(Action::Suspend(lost))].concat()
    }
}
