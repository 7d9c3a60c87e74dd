//! A broker and its members on a virtual clock. A seed decides what goes wrong, and when.
//!
//! The content of a tensor is the number of steps that were applied to it. So a step that is skipped or applied twice
//! shows at once, wherever the tensor goes.

mod machine;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fusionllm_graph::ValueKind;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_plan::{LearningRate, Optimizer, Program, TensorKey};
use fusionllm_protocol::{
    Action, Arrival, EvalSchedule, ExpectedPeers, ExpectedReports, Formation, FromPeer, Heartbeat, Hello, MemberId,
    Notice, Order, Past, Role, Roster, Run, RunOptions, RunSettings, Source, ToPeer, TrainingProgress, VERSION, decode,
    encode, share_of,
};

use super::{ChoiceRng, programs_of};
use machine::{Assigned, COMPUTE_S, Fetch, Machine};

const LAYERS: usize = 6;
const MICRO_BATCHES: u32 = 2;
const OPTIMIZER: Optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });

/// Something that goes wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    /// A process ends without a word.
    Kill(usize),
    /// A process sleeps for this many seconds.
    Sleep(usize, f64),
    /// A machine and the broker cannot reach each other for this many seconds.
    CutOff(usize, f64),
    /// Two machines cannot reach each other for this many seconds.
    Part(usize, usize, f64),
    /// A machine asks to leave.
    Leave(usize),
    /// A new machine joins.
    Join,
    /// A machine computes this many times slower than at the start.
    Slow(usize, f64),
    /// The broker stands still for this many seconds.
    Pause(f64),
    /// The broker is killed, and started again after this many seconds.
    Restart(f64),
    /// The user stops the run.
    Interrupt,
}

/// The machines, the job and the faults of a world.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) machines: usize,
    pub(crate) steps: u64,
    pub(crate) checkpoint: u64,
    pub(crate) faults: Vec<(f64, Fault)>,
    /// Whether machines and links are measured before they are planned for.
    pub(crate) measured: bool,
    pub(crate) seed: u64,
}

/// The end of a run.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// Steps in the order in which they were completed, without those that were gone back over.
    pub(crate) steps: Vec<u64>,
    pub(crate) evaluated: BTreeSet<u64>,
    pub(crate) saved: Vec<u64>,
    pub(crate) incidents: usize,
    pub(crate) redone: usize,
    /// The machines of the last generation.
    pub(crate) used: Vec<usize>,
    pub(crate) finished: Option<TrainingProgress>,
    pub(crate) failed: Option<String>,
    pub(crate) seconds: f64,
}

#[derive(Debug, Clone)]
enum Event {
    Tick,
    Fault(Fault),
    Dial(usize),
    Down(usize, Down),
    Up(usize, u32, FromPeer),
    Saved(usize, u32, u64, BTreeMap<TensorKey, u64>),
    Heartbeat(usize),
    /// An event of this life of the broker.
    Planned(u32, Vec<MemberId>),
    Committed(u32, TrainingProgress, bool),
    Reborn,
    /// A machine notices that the broker it was connected to is no more.
    Orphaned(usize, u32),
    Ended(usize, u32),
    Loaded(usize, u32, TensorKey, u64),
    Connected(usize, u32, MemberId),
    Fetch(usize, u32, Fetch, f64),
    Work(usize),
    HangUp(usize, u32),
}

/// A message from the broker on a connection.
#[derive(Debug, Clone)]
enum Down {
    Control(u32, ToPeer),
    Assign(u32, Arc<Assigned>),
    Load(u32, u32, TensorKey, u64),
}

pub(crate) struct World {
    scenario: Scenario,
    rng: ChoiceRng,
    now: f64,
    serial: u64,
    events: BTreeMap<(u64, u64), Event>,
    run: Run,
    machines: Vec<Machine>,
    /// Pairs that cannot reach each other, each with the time until which they cannot.
    parted: BTreeMap<(usize, usize), f64>,
    broker_paused_until: f64,
    /// Counts the lives of the broker.
    life: u32,
    broker_dead: bool,
    /// The broker's records about its run, and the time when it wrote them.
    persisted: Option<(Vec<u8>, Vec<u8>, f64)>,
    formation: Option<Formation>,
    order: Option<Order>,
    programs: Vec<(Program, Program)>,
    saving: BTreeMap<TensorKey, u64>,
    saving_step: u64,
    disk: TrainingProgress,
    history: History,
    traced: bool,
}

/// Runs a scenario to its end.
pub(crate) fn live(scenario: &Scenario) -> History {
    let mut world = World {
        rng: ChoiceRng::new(scenario.seed),
        now: 0.0,
        serial: 0,
        events: BTreeMap::new(),
        run: Run::new(options(scenario, TrainingProgress::default()), roster(scenario)),
        machines: Vec::new(),
        parted: BTreeMap::new(),
        broker_paused_until: 0.0,
        life: 0,
        broker_dead: false,
        persisted: None,
        formation: None,
        order: None,
        programs: Vec::new(),
        saving: BTreeMap::new(),
        saving_step: 0,
        disk: TrainingProgress::default(),
        history: History::default(),
        traced: std::env::var_os("FUSIONLLM_TRACE").is_some(),
        scenario: scenario.clone(),
    };
    for _ in 0..scenario.machines {
        world.add_machine();
    }
    for (at, fault) in &scenario.faults {
        world.at(*at, Event::Fault(*fault));
    }
    world.at(0.25, Event::Tick);
    world.live();
    world.history.seconds = world.now;
    world.history
}

fn options(scenario: &Scenario, start: TrainingProgress) -> RunOptions {
    let settings = RunSettings {
        version: 1,
        start,
        steps: scenario.steps,
        micro_batches: MICRO_BATCHES,
        eval: Some(EvalSchedule { steps: 7, passes: 2 }),
        checkpoint: Some(scenario.checkpoint),
        learning_rate: LearningRate { base: 1.0, warmup: 0, cosine_until: None, min: 0.0 },
        clip: None,
        window: 3,
        passes_before: 0,
    };
    RunOptions { settings, measured: scenario.measured, programs: Arc::default(), copies: true }
}

fn roster(scenario: &Scenario) -> Roster {
    Roster::new(ExpectedPeers::Any(scenario.machines), [7; 16])
}

impl World {
    fn at(&mut self, time: f64, event: Event) {
        self.serial += 1;
        // The time is rounded up, because a time that has come must not come again.
        self.events.insert(((time.max(self.now) * 1e6).ceil() as u64, self.serial), event);
    }

    fn trace(&self, what: &impl std::fmt::Debug) {
        if self.traced {
            eprintln!("{:.6} {what:?}", self.now);
        }
    }

    /// A delay of up to `most` seconds.
    fn delay(&mut self, most: f64) -> f64 {
        most * (1.0 + self.rng.below(1000) as f64) / 1000.0
    }

    fn add_machine(&mut self) {
        let machine = self.machines.len();
        self.machines.push(Machine::default());
        let soon = self.now + self.delay(1.0);
        self.at(soon, Event::Dial(machine));
        self.at(soon + 1.0, Event::Heartbeat(machine));
    }

    fn live(&mut self) {
        while self.history.finished.is_none() && self.history.failed.is_none() {
            let ((micros, _), event) = self.events.pop_first().unwrap();
            self.now = micros as f64 / 1e6;
            let stuck = self.now > 3000.0 || self.serial > 3_000_000;
            assert!(
                !stuck,
                "after {} s the run has not ended: {:?} {:?} {:?}",
                self.now, self.scenario, self.history, self.run
            );
            self.trace(&event);
            self.happen(event);
        }
    }

    /// The time when a machine can next do something.
    fn awake(&self, machine: usize) -> f64 {
        self.machines[machine].asleep_until
    }

    fn happen(&mut self, event: Event) {
        let of_machine = match &event {
            Event::Dial(m)
            | Event::Down(m, _)
            | Event::Heartbeat(m)
            | Event::Ended(m, _)
            | Event::Loaded(m, ..)
            | Event::Connected(m, ..)
            | Event::Fetch(m, ..)
            | Event::Orphaned(m, _)
            | Event::Work(m) => Some(*m),
            _ => None,
        };
        if let Some(m) = of_machine {
            if self.machines[m].dead {
                return;
            }
            if self.awake(m) > self.now + 1e-6 {
                let later = self.awake(m);
                return self.at(later, event);
            }
        } else if !matches!(event, Event::Fault(_) | Event::Reborn) && self.broker_paused_until > self.now + 1e-6 {
            let later = self.broker_paused_until;
            return self.at(later, event);
        }
        match event {
            Event::Tick if self.broker_dead => self.at(self.now + 0.25, Event::Tick),
            Event::Tick => {
                let actions = self.run.tick(self.now);
                self.at(self.now + 0.25, Event::Tick);
                self.carry_out(actions);
            }
            Event::Fault(fault) => self.fault(fault),
            Event::Dial(m) => self.dial(m),
            Event::Down(m, down) => self.receive(m, down),
            Event::Up(m, connection, message) => {
                if self.machines[m].connection == connection {
                    let member = self.machines[m].member.unwrap();
                    let actions = self.run.message(member, message, self.now);
                    self.carry_out(actions);
                }
            }
            Event::Saved(m, connection, step, tensors) => {
                if self.machines[m].connection == connection {
                    // The keeper skips tensors of a checkpoint that was abandoned.
                    if self.saving_step == step {
                        self.saving.extend(tensors);
                    }
                    let member = self.machines[m].member.unwrap();
                    let actions = self.run.snapshot_arrived(member, step, self.now);
                    self.carry_out(actions);
                }
            }
            Event::Heartbeat(m) => {
                let machine = &self.machines[m];
                if machine.done {
                    return;
                }
                let generation = machine.generation();
                let heartbeat =
                    Heartbeat { generation, progress: machine.progress, waits_for: machine.follower.waits_for() };
                self.tell(m, FromPeer::Heartbeat(heartbeat));
                self.at(self.now + 1.0, Event::Heartbeat(m));
            }
            Event::Planned(life, members) if life == self.life => self.planned(members),
            Event::Committed(life, progress, complete) if life == self.life => {
                self.disk = progress;
                self.history.saved.push(progress.step);
                let actions = self.run.checkpoint_committed(progress, complete, self.now);
                self.carry_out(actions);
            }
            Event::Ended(m, generation) => {
                let actions = self.machines[m].follower.ended(generation, None);
                self.follow(m, actions);
            }
            Event::Loaded(m, generation, key, content) => {
                let machine = &mut self.machines[m];
                let Some(part) = machine.part.clone().filter(|p| p.role.generation == generation) else {
                    // The machine is still ending the generation before: tensors of the next one wait.
                    if machine.assigned.as_ref().is_some_and(|a| a.role.generation == generation) {
                        self.at(self.now + 0.01, Event::Loaded(m, generation, key, content));
                    }
                    return;
                };
                let start = part.role.start;
                assert_eq!(content, start, "{key} is not of the cut that the generation starts from");
                machine.state.insert(key.clone(), content);
                machine.vault.entry(start).or_default().insert(key.clone(), content);
                machine.progress += 1;
                let actions = machine.follower.loaded(generation, &key);
                self.follow(m, actions);
            }
            Event::Connected(m, generation, with) => {
                let actions = self.machines[m].follower.connected(generation, with);
                self.follow(m, actions);
            }
            Event::Fetch(m, generation, fetch, since) => self.fetch(m, generation, fetch, since),
            Event::Work(m) => self.work(m),
            Event::HangUp(m, connection) => self.hang_up(m, connection),
            Event::Planned(..) | Event::Committed(..) => {}
            Event::Reborn => self.reborn(),
            Event::Orphaned(m, connection) => self.orphaned(m, connection),
        }
    }

    fn fault(&mut self, fault: Fault) {
        let count = self.machines.len();
        match fault {
            Fault::Kill(m) if m < count => {
                self.machines[m].dead = true;
                self.silent(m, f64::INFINITY);
            }
            Fault::Sleep(m, seconds) if m < count => {
                let machine = &mut self.machines[m];
                machine.asleep_until = machine.asleep_until.max(self.now + seconds);
                self.silent(m, seconds);
            }
            Fault::CutOff(m, seconds) if m < count => {
                let machine = &mut self.machines[m];
                machine.cut_off_until = machine.cut_off_until.max(self.now + seconds);
                self.silent(m, seconds);
            }
            Fault::Part(a, b, seconds) if a < count && b < count && a != b => {
                self.parted.insert((a.min(b), a.max(b)), self.now + seconds);
            }
            Fault::Leave(m) if m < count => {
                self.machines[m].leaving = true;
                self.tell(m, FromPeer::Leaving);
            }
            Fault::Slow(m, times) if m < count => self.machines[m].slower = Some(times),
            Fault::Join => self.add_machine(),
            Fault::Pause(seconds) => self.broker_paused_until = self.now + seconds,
            Fault::Restart(seconds) if !self.broker_dead => self.broker_dies(seconds),
            Fault::Interrupt if !self.broker_dead => {
                let actions = self.run.interrupt(self.now);
                self.carry_out(actions);
            }
            _ => {}
        }
    }

    /// Nothing is heard of a machine for a while, for a reason that nobody learns. After 30 s, its connection times
    /// out.
    fn silent(&mut self, m: usize, seconds: f64) {
        if seconds > 30.0 {
            let connection = self.machines[m].connection;
            self.at(self.now + 30.0, Event::HangUp(m, connection));
        }
    }

    /// Kills the broker. Messages on the way to it are lost, and so is everything that it has not written.
    fn broker_dies(&mut self, seconds: f64) {
        self.broker_dead = true;
        self.life += 1;
        self.broker_paused_until = 0.0;
        for m in 0..self.machines.len() {
            let machine = &mut self.machines[m];
            machine.member = None;
            if std::mem::take(&mut machine.connected) {
                machine.connection += 1;
                let connection = machine.connection;
                self.at(self.now + 30.0, Event::Orphaned(m, connection));
            }
        }
        self.at(self.now + seconds, Event::Reborn);
    }

    fn reborn(&mut self) {
        self.broker_dead = false;
        self.saving.clear();
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
            if !self.rng.one_in(4) {
                let at = self.now.max(self.machines[m].cut_off_until) + self.delay(0.5);
                self.at(at, Event::Orphaned(m, connection));
            }
        }
    }

    fn orphaned(&mut self, m: usize, connection: u32) {
        let machine = &mut self.machines[m];
        if machine.connection != connection || machine.done {
            return;
        }
        machine.connection += 1;
        if machine.leaving {
            machine.dead = true;
            return;
        }
        let actions = machine.follower.disconnected();
        self.follow(m, actions);
        self.at(self.now + 1.0, Event::Dial(m));
    }

    fn dial(&mut self, m: usize) {
        if self.machines[m].cut_off_until > self.now || self.broker_paused_until > self.now || self.broker_dead {
            let again = self.now + self.delay(10.0);
            return self.at(again, Event::Dial(m));
        }
        if self.machines[m].connected {
            return;
        }
        let hello = Hello {
            version: VERSION,
            secret: [7; 16],
            process: 0,
            name: format!("m{m}"),
            backend: "b".into(),
            device: "d".into(),
            slow_bf16: false,
            addr: vec![m as u8],
        };
        let machine = &mut self.machines[m];
        machine.connection += 1;
        machine.connected = true;
        machine.lanes = [self.now; 3];
        // Every third machine is behind the same router.
        let from = m.is_multiple_of(3).then_some([192, 0, 2, 1].into());
        let arrival = Arrival { identity: [m as u8; 32], from, unix_s: self.now as u64 };
        match self.run.join(arrival, hello, self.now) {
            Ok((member, actions)) => {
                self.machines[m].member = Some(member);
                self.carry_out(actions);
            }
            Err(_) => self.machines[m].done = true,
        }
    }

    /// Both ends find that a connection has timed out.
    fn hang_up(&mut self, m: usize, connection: u32) {
        let machine = &mut self.machines[m];
        if machine.connection != connection || !machine.connected {
            return;
        }
        machine.connected = false;
        machine.connection += 1;
        let (member, alive) = (machine.member.unwrap(), !machine.dead && !machine.done);
        if alive {
            let actions = self.machines[m].follower.disconnected();
            self.follow(m, actions);
            let later = self.awake(m).max(self.now) + 1.0;
            self.at(later, Event::Dial(m));
        }
        let actions = self.run.gone(member, "it stopped answering", self.now);
        self.carry_out(actions);
    }

    /// The time of arrival of a message that is sent now, in the order of its lane.
    fn arrival(&mut self, m: usize, lane: usize, most: f64) -> f64 {
        let delay = self.delay(most);
        let machine = &mut self.machines[m];
        let at = (self.now + delay).max(machine.lanes[lane]).max(machine.cut_off_until);
        machine.lanes[lane] = at;
        at
    }

    fn tell(&mut self, m: usize, message: FromPeer) {
        if self.machines[m].connected {
            let (at, connection) = (self.arrival(m, 0, 0.02), self.machines[m].connection);
            self.at(at, Event::Up(m, connection, message));
        }
    }

    fn machine_of(&self, member: MemberId) -> Option<usize> {
        self.machines.iter().position(|m| m.member == Some(member))
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            assert!(self.history.finished.is_none() && self.history.failed.is_none(), "{action:?} after the end");
            match action {
                Action::Send(to, message) => {
                    let m = self.machine_of(to).unwrap();
                    if self.machines[m].connected {
                        let (at, connection) = (self.arrival(m, 1, 0.02), self.machines[m].connection);
                        self.at(at, Event::Down(m, Down::Control(connection, message)));
                    }
                }
                Action::Dismiss(_) => {}
                Action::Feed(pass, _) => {
                    let share = 1.0 / f64::from(MICRO_BATCHES);
                    self.run.set_weights(pass, vec![share; MICRO_BATCHES as usize], 10);
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
                Action::BeginCheckpoint(step) => {
                    self.saving.clear();
                    self.saving_step = step;
                }
                Action::AbandonCheckpoint(_) => self.saving.clear(),
                Action::Commit(progress) => {
                    let all = self.programs.iter().flat_map(|(train, _)| share_of(train, OPTIMIZER).into_keys());
                    let expected: BTreeMap<TensorKey, u64> = all.map(|key| (key, progress.step)).collect();
                    assert_eq!(self.saving, expected, "a checkpoint has all tensors of its step");
                    let at = self.now + self.delay(1.0);
                    self.at(at, Event::Committed(self.life, progress, true));
                }
                Action::Plan { members, .. } => {
                    let at = self.now + self.delay(0.3);
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
            }
        }
    }

    fn planned(&mut self, mut members: Vec<MemberId>) {
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
            let at = self.arrival(m, 2, 0.1);
            self.history.used.push(m);
            self.at(at, Event::Down(m, Down::Assign(connection, Arc::new(Assigned { role, train, eval }))));
            for (key, _) in sources.into_iter().filter(|(_, s)| *s == Source::Broker) {
                let at = self.arrival(m, 2, 0.1);
                self.at(at, Event::Down(m, Down::Load(connection, order.generation, key, start)));
            }
        }
        self.order = Some(order);
    }
}
