//! The state that a broker keeps on its disk, so that a run goes on after the broker was killed.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Phase, Run, RunOptions};
use crate::notice::Open;
use crate::{Admission, Atlas, Custody, IncidentKind, Member, MemberId, Roster, Standing, TrainingProgress};

/// Seconds that members which went together have to come back, counted from the return of the first one. Members try
/// again at least every ten seconds.
const RETURN_S: f64 = 20.0;

/// The facts that another broker needs to go on with a run, besides the run's [`Atlas`]: names and numbers, but no
/// tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    generation: u32,
    last_pass: u64,
    begun: bool,
    progress: TrainingProgress,
    /// Batches trained on before the last complete evaluation. Earlier versions did not write it.
    #[serde(default)]
    evaluated: u64,
    admission: Admission,
    members: Vec<Member>,
    next_name: usize,
    custody: Custody,
    /// The members that the run should not go on without at once.
    awaited: BTreeSet<MemberId>,
}

impl RunState {
    /// The tickets and keys that decide who may come in. The roster for [`Run::restore`] needs them.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Batches trained on before the newest cut that the run can have reached.
    pub fn newest_step(&self) -> u64 {
        self.custody.newest()
    }
}

/// The past of a broker that was killed, as its disk tells it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Past {
    /// Seconds since the last sign of life of the broker.
    pub away_s: f64,
    /// The steps of the broker, in order, each with the seconds that it took.
    pub steps: Vec<(u64, f64)>,
}

/// Members that went at the same time, for example because the broker was cut off. Without them the run would go back a
/// long way, so it gives them time to come back.
#[derive(Debug)]
pub(super) struct Awaited {
    members: BTreeSet<MemberId>,
    /// The time until which they are awaited; `None` as long as nobody is there.
    until: Option<f64>,
}

impl Run {
    /// The state that must be on the disk before the actions that follow [`Action::Persist`](crate::Action::Persist).
    pub fn state(&self) -> RunState {
        let (last_pass, awaited) = match &self.phase {
            Phase::Running(r) => (r.machine.last_pass(), r.formation.members.iter().copied().collect()),
            _ => (self.last_pass, self.awaited.iter().flat_map(|a| a.members.iter().copied()).collect()),
        };
        RunState {
            generation: self.generation,
            last_pass,
            begun: self.begun,
            progress: self.progress,
            evaluated: self.evaluated,
            admission: self.roster.admission().clone(),
            members: self.roster.members().to_vec(),
            next_name: self.roster.next_name(),
            custody: self.custody.clone(),
            awaited,
        }
    }

    /// The known machines and links. They must be on the disk when a generation begins.
    pub fn atlas(&self) -> &Atlas {
        &self.atlas
    }

    /// Seconds by which copies have slowed down the steps beside them, since this broker started.
    pub fn copies_s(&self) -> f64 {
        self.copies.spent_s.max(0.0)
    }

    /// Goes on with a run whose broker was killed. Its members are away, and come back by themselves.
    ///
    /// `roster` has no members. The newest checkpoint may be another one than `state` knows. It is that of
    /// [`RunSettings::start`](crate::RunSettings::start).
    pub fn restore(options: RunOptions, roster: Roster, state: RunState, atlas: Atlas, past: &Past) -> Self {
        let start = options.settings.start;
        let mut run = Self::new(options, roster.with_members(state.members, state.next_name));
        run.custody = state.custody.on_another_disk(start);
        run.atlas = atlas;
        run.generation = state.generation.saturating_add(1);
        run.last_pass = state.last_pass;
        run.begun = state.begun;
        run.evaluated = state.evaluated;
        if run.begun {
            run.awaited = Some(Awaited { members: state.awaited, until: None });
            run.rewound = false;
            // The killed broker may have done more steps since it last wrote its state.
            let step = past.steps.last().map_or(state.progress.step, |(step, _)| *step);
            run.copies.note_earlier_steps(&past.steps, -past.away_s);
            run.incidents.push(Open::begin(IncidentKind::Broker, MemberId::BROKER, step, -past.away_s, 0.0));
        }
        run
    }

    /// The number of members that the run had better not go on without.
    pub fn awaited(&self) -> usize {
        self.awaited.as_ref().map_or(0, |a| a.members.len())
    }

    /// Awaits the members of the last generation if everybody is gone, because then it is rather the broker that was
    /// cut off.
    pub(super) fn await_return(&mut self) {
        if !self.begun || self.awaited.is_some() || self.roster.present().next().is_some() {
            return;
        }
        let members = match &self.phase {
            Phase::Running(r) => &r.formation.members,
            _ => &self.last_members,
        };
        let may_return = |m: &&MemberId| self.roster.get(**m).is_some_and(|m| m.standing != Standing::Out);
        let members = members.iter().filter(may_return).copied().collect();
        self.awaited = Some(Awaited { members, until: None });
    }

    /// Whether members that may come back have work that nobody else has, more than waiting for them can cost.
    fn misses_much(&self) -> bool {
        let without = self.custody.restart(|m| self.roster.is_present(m)).progress.step;
        let may_return = |m: MemberId| self.roster.get(m).is_some_and(|m| m.standing != Standing::Out);
        let with = self.custody.restart(may_return).progress.step;
        without < with && self.copies.work_s(without, with) > RETURN_S
    }

    /// Whether the run had better wait for members to come back than plan for those who are there.
    pub(super) fn waits_for_return(&mut self) -> bool {
        if self.roster.present().next().is_none() {
            return self.begun;
        }
        if self.now < self.lost_at + RETURN_S && self.misses_much() {
            return true;
        }
        let Some(awaited) = &mut self.awaited else { return false };
        let until = *awaited.until.get_or_insert(self.now + RETURN_S);
        let gone = |m: &MemberId| self.roster.get(*m).is_none_or(|m| m.standing == Standing::Out);
        let there = |m: &MemberId| self.roster.is_present(*m) || gone(m);
        self.now < until && !awaited.members.iter().all(there)
    }
}
