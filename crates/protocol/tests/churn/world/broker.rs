//! A broker that carries out what its run asks for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fusionllm_graph::ValueKind;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_program::{LearningRate, Optimizer, Program, TensorKey};
use fusionllm_protocol::{
    Action, EvalSchedule, ExpectedPeers, ExpectedReports, Formation, MemberId, Notice, Order, Past, Role, Roster, Run,
    RunOptions, RunSettings, Source, ToPeer, TrainingProgress, decode, encode, share_of,
};

use super::delays::{Delay, RETURN_S};
use super::machine::{Assigned, COMPUTE_S};
use super::{Down, Event, World};
use crate::common::programs_of;
use crate::scenario::Scenario;

const LAYERS: usize = 6;
const MICRO_BATCHES: u32 = 2;
const EVAL_PASSES: u64 = 2;
const OPTIMIZER: Optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });

pub(super) fn options(scenario: &Scenario, start: TrainingProgress) -> RunOptions {
    let settings = RunSettings {
        version: 1,
        start,
        steps: scenario.steps,
        micro_batches: MICRO_BATCHES,
        eval: Some(EvalSchedule { steps: 7, passes: EVAL_PASSES }),
        checkpoint: Some(scenario.checkpoint),
        checkpoints_under_way: 2,
        learning_rate: LearningRate { base: 1.0, warmup: 0, cosine_until: None, min: 0.0 },
        clip: None,
        window: 3,
        passes_before: 0,
    };
    RunOptions { settings, measured: scenario.measured, programs: Arc::default(), copies: true }
}

pub(super) fn roster(scenario: &Scenario) -> Roster {
    Roster::new(ExpectedPeers::Any(scenario.machines), [7; 16])
}

impl World {
    pub(super) fn reborn(&mut self) {
        self.broker_dead = false;
        self.saving.clear();
        self.released = (0, BTreeSet::new());
        let (options, roster) = (options(&self.scenario, self.disk), roster(&self.scenario));
        self.run = match &self.persisted {
            Some((state, atlas, at)) => {
                let (state, atlas) = (decode(state).unwrap(), decode(atlas).unwrap());
                let past = Past { away_s: self.now - at, steps: Vec::new() };
                Run::restore(options, roster, state, atlas, &past)
            }
            None => Run::new(options, roster),
        };
        // The broker calls the members whose addresses it knows, and reaches most of them.
        for m in 0..self.machines.len() {
            let connection = self.machines[m].connection;
            let delay = self.delays.once(Delay::Return, m, self.now);
            if self.machines[m].joined && delay <= RETURN_S {
                let at = self.now.max(self.machines[m].cut_off_until) + delay;
                self.at(at, Event::Orphaned(m, connection));
            }
        }
    }

    pub(super) fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            assert!(self.history.finished.is_none() && self.history.failed.is_none(), "{action:?} after the end");
            self.watch(&action);
            match action {
                Action::Send(to, message) => {
                    let m = self.machine_of(to).unwrap();
                    if self.machines[m].connected {
                        let (at, connection) = (self.arrival(m, 1, Delay::Down), self.machines[m].connection);
                        self.at(at, Event::Down(m, Down::Control(connection, message)));
                    }
                }
                Action::Dismiss(_) => {}
                Action::Feed(pass, _) => {
                    let share = 1.0 / f64::from(MICRO_BATCHES);
                    let shares = vec![share; MICRO_BATCHES as usize];
                    self.run.set_weights(pass, shares.clone(), shares);
                }
                Action::Step(record) => {
                    assert_eq!(
                        record.step,
                        self.history.steps.last().map_or(1, |s| s + 1),
                        "no step twice, none skipped"
                    );
                    assert_eq!(record.loss, (record.step - 1) as f64, "the loss of that step");
                    self.history.steps.push(record.step);
                }
                Action::Evaluated(record) => drop(self.history.evaluated.insert(record.step)),
                Action::BeginCheckpoint(step) => drop(self.saving.insert(step, BTreeMap::new())),
                Action::AbandonCheckpoint(step) => drop(self.saving.remove(&step)),
                Action::Commit(progress) => {
                    let all = self.programs.iter().flat_map(|(train, _)| share_of(train, OPTIMIZER).into_keys());
                    let expected: BTreeMap<TensorKey, u64> = all.map(|key| (key, progress.step)).collect();
                    let saved = self.saving.remove(&progress.step);
                    assert_eq!(saved, Some(expected), "a checkpoint has all tensors of its step");
                    let at = self.now.max(self.written_at) + self.delay(Delay::Commit, 0);
                    self.written_at = at;
                    self.at(at, Event::Committed(self.life, progress, true));
                }
                Action::Plan { members, .. } => {
                    let at = self.now + self.delay(Delay::Plan, 0);
                    self.at(at, Event::Planned(self.life, members));
                }
                Action::Rewind(progress) => {
                    let before = self.history.steps.len();
                    self.history.steps.retain(|s| *s <= progress.step);
                    self.history.redone += before - self.history.steps.len();
                }
                Action::Persist => {
                    let (state, atlas) = (encode(&self.run.state()).unwrap(), encode(self.run.atlas()).unwrap());
                    self.persisted = Some((state, atlas, self.now));
                }
                Action::Assign(order) => self.assign(order),
                Action::Notice(Notice::Started { incidents, .. }) => {
                    self.history.incidents += incidents.len();
                }
                Action::Notice(notice) => self.trace(&notice),
                Action::Finish(progress) => self.history.finished = Some(progress),
                Action::Fail(reason) => self.history.failed = Some(reason),
                Action::Suspend(reason) => self.history.suspended = Some(reason),
            }
        }
    }

    /// Checks that older cuts are released only when no loss of a single member can take the run back to them.
    fn watch(&mut self, action: &Action) {
        let (released, lost) = &mut self.released;
        match action {
            Action::Send(_, ToPeer::Release { before }) if before > released => {
                (*released, *lost) = (*before, BTreeSet::new());
            }
            Action::Notice(Notice::Lost { member, .. }) => drop(lost.insert(*member)),
            Action::Rewind(progress) => {
                let back = progress.step;
                assert!(back >= *released || lost.len() > 1, "one loss undid a cut\n{back} {released} {lost:?}");
            }
            _ => {}
        }
    }

    pub(super) fn planned(&mut self, mut members: Vec<MemberId>) {
        // A slow machine would hold up the others.
        let fast: Vec<MemberId> = members.iter().copied().filter(|m| self.run.atlas().slower(*m) < 2.0).collect();
        if self.scenario.measured && !fast.is_empty() {
            members = fast;
        }
        members.truncate(LAYERS);
        let programs = programs_of(LAYERS, members.len(), MICRO_BATCHES);
        let expected = programs.iter().map(|(train, eval)| ExpectedReports::new(train, eval)).collect();
        let keys = |(train, _): &(Program, Program)| Arc::new(share_of(train, OPTIMIZER).into_keys().collect());
        let formation = Formation {
            expected,
            shares: programs.iter().map(keys).collect(),
            share_bytes: vec![1; members.len()],
            version: 1,
            micro_batches: MICRO_BATCHES,
            eval_passes: EVAL_PASSES,
            // More machines are faster.
            predicted_step_s: self.scenario.measured.then(|| 0.6 / members.len() as f64),
            predicted_compute_s: vec![COMPUTE_S; if self.scenario.measured { members.len() } else { 0 }],
            cluster: None,
            move_s: 1.0,
            members,
        };
        self.formation = Some(formation.clone());
        self.programs = programs;
        let actions = self.run.planned(formation, self.now);
        self.carry_out(actions);
    }

    fn assign(&mut self, order: Order) {
        self.history.used.clear();
        for (i, (train, eval)) in self.programs.clone().into_iter().enumerate() {
            let me = order.members[i];
            let m = self.machine_of(me).unwrap();
            let share: BTreeSet<TensorKey> = share_of(&train, OPTIMIZER).into_keys().collect();
            let mut keys = share.clone();
            for h in &train.holdings {
                let value = &train.values[&h.value];
                assert!(matches!(value.kind, ValueKind::Parameter(_)));
                keys.insert(TensorKey::value(value.name.as_str()));
            }
            let start = order.restart.progress.step;
            let source = |key: &TensorKey| match order.restart.holders.get(key) {
                Some(holders) if holders.contains(&me) => Source::Member(me),
                Some(holders) => Source::Member(holders[0]),
                None if start > 0 => Source::Broker,
                None => Source::Seed,
            };
            let sources: BTreeMap<TensorKey, Source> = keys.iter().map(|k| (k.clone(), source(k))).collect();
            let mirrored = order.mirrors.iter().filter(|x| x.buddy == me);
            let mirrors = mirrored.map(|x| {
                let owner = order.members.iter().position(|y| *y == x.owner).unwrap();
                (x.owner, share_of(&self.programs[owner].0, OPTIMIZER).into_keys().collect())
            });
            let role = Role {
                generation: order.generation,
                me,
                start,
                neighbours: order.members.iter().copied().filter(|x| *x != me).collect(),
                shelved: BTreeSet::new(),
                mirrors: mirrors.collect(),
                share,
                sources: sources.clone(),
            };
            if order.restart.holders.is_empty() {
                assert_eq!(self.disk.step, start, "the broker has that state");
            }
            if !self.machines[m].connected {
                continue;
            }
            let connection = self.machines[m].connection;
            let at = self.arrival(m, 2, Delay::Load);
            self.history.used.push(m);
            self.at(at, Event::Down(m, Down::Assign(connection, Arc::new(Assigned { role, train, eval }))));
            for (key, _) in sources.into_iter().filter(|(_, s)| *s == Source::Broker) {
                let at = self.arrival(m, 2, Delay::Load);
                self.at(at, Event::Down(m, Down::Load(connection, order.generation, key, start)));
            }
        }
        self.order = Some(order);
    }
}
