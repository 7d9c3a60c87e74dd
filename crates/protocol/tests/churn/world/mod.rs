//! A broker and its members on a virtual clock. A seed decides what goes wrong, and when.
//!
//! The content of a tensor is the number of steps that were applied to it. So a step that is skipped or applied twice
//! shows at once, wherever the tensor goes.

mod broker;
mod connections;
mod delays;
mod faults;
mod machine;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fusionllm_program::{Program, TensorKey};
use fusionllm_protocol::{Formation, FromPeer, Heartbeat, MemberId, Order, Run, ToPeer, TrainingProgress};

use crate::scenario::{Fault, Scenario};
use broker::{options, roster};
use delays::{Delay, Delays};
use machine::{Assigned, Fetch, Machine};

/// The end of a run.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// Steps in the order in which they were completed, without those that were gone back over.
    pub(crate) steps: Vec<u64>,
    pub(crate) evaluated: BTreeSet<u64>,
    pub(crate) saved: Vec<u64>,
    /// The faults that befell something, in the order in which they came.
    pub(crate) faults: Vec<Fault>,
    pub(crate) incidents: usize,
    pub(crate) redone: usize,
    /// The machines of the last generation.
    pub(crate) used: Vec<usize>,
    pub(crate) finished: Option<TrainingProgress>,
    pub(crate) failed: Option<String>,
    /// The reason why the run stopped without being saved.
    pub(crate) suspended: Option<String>,
    /// Seconds until the end.
    pub(crate) lived: f64,
}

impl History {
    fn is_over(&self) -> bool {
        self.finished.is_some() || self.failed.is_some() || self.suspended.is_some()
    }
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

impl Event {
    /// The machine on which it happens, unless it happens at the broker.
    fn machine(&self) -> Option<usize> {
        match self {
            Self::Dial(m)
            | Self::Down(m, _)
            | Self::Heartbeat(m)
            | Self::Ended(m, _)
            | Self::Loaded(m, ..)
            | Self::Connected(m, ..)
            | Self::Fetch(m, ..)
            | Self::Orphaned(m, _)
            | Self::Work(m) => Some(*m),
            _ => None,
        }
    }
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
    delays: Delays,
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
    /// The step before which all cuts were released last, and the members that were lost since.
    released: (u64, BTreeSet<MemberId>),
    formation: Option<Formation>,
    order: Option<Order>,
    programs: Vec<(Program, Program)>,
    /// The tensors of the checkpoints in progress, by step.
    saving: BTreeMap<u64, BTreeMap<TensorKey, u64>>,
    /// The time at which the disk has written what it was given. It writes one checkpoint after the other.
    written_at: f64,
    disk: TrainingProgress,
    history: History,
    traced: bool,
}

/// Runs a scenario to its end.
pub(crate) fn live(scenario: &Scenario) -> History {
    let joiners = scenario.faults.iter().filter_map(|(_, fault)| match fault {
        Fault::Join(m) => Some(m + 1),
        _ => None,
    });
    let machines = joiners.fold(scenario.machines, usize::max);
    let mut world = World {
        delays: Delays::new(scenario.seed),
        now: 0.0,
        serial: 0,
        events: BTreeMap::new(),
        run: Run::new(options(scenario, TrainingProgress::default()), roster(scenario)),
        machines: std::iter::repeat_with(Machine::default).take(machines).collect(),
        parted: BTreeMap::new(),
        broker_paused_until: 0.0,
        life: 0,
        broker_dead: false,
        persisted: None,
        released: (0, BTreeSet::new()),
        formation: None,
        order: None,
        programs: Vec::new(),
        saving: BTreeMap::new(),
        written_at: 0.0,
        disk: TrainingProgress::default(),
        history: History::default(),
        traced: std::env::var_os("FUSIONLLM_TRACE").is_some(),
        scenario: scenario.clone(),
    };
    for m in 0..scenario.machines {
        world.start_machine(m);
    }
    for (at, fault) in &scenario.faults {
        world.at(*at, Event::Fault(*fault));
    }
    world.at(0.25, Event::Tick);
    world.live();
    world.history.lived = world.now;
    world.history
}

impl World {
    fn at(&mut self, time: f64, event: Event) {
        self.serial += 1;
        self.events.insert((self.micros(time), self.serial), event);
    }

    /// The time is rounded up, because a time that has come must not come again.
    fn micros(&self, time: f64) -> u64 {
        (time.max(self.now) * 1e6).ceil() as u64
    }

    fn trace(&self, what: &impl std::fmt::Debug) {
        if self.traced {
            eprintln!("{:.6} {what:?}", self.now);
        }
    }

    fn delay(&mut self, delay: Delay, m: usize) -> f64 {
        self.delays.next(delay, m)
    }

    fn start_machine(&mut self, m: usize) {
        self.machines[m].joined = true;
        let soon = self.now + self.delay(Delay::Dial, m);
        self.at(soon, Event::Dial(m));
        self.at(soon + 1.0, Event::Heartbeat(m));
    }

    fn live(&mut self) {
        while !self.history.is_over() {
            let ((micros, serial), event) = self.events.pop_first().unwrap();
            self.now = micros as f64 / 1e6;
            let stuck = self.now > 3000.0 || self.serial > 3_000_000;
            assert!(!stuck, "the run has not ended after {} s\n{:?}\n{:?}", self.now, self.history, self.run);
            self.trace(&event);
            match self.waits_until(&event) {
                // It keeps its number, so that messages of a lane keep their order however often they wait.
                Some(later) => drop(self.events.insert((self.micros(later), serial), event)),
                None => self.happen(event),
            }
        }
    }

    /// The time when a machine can next do something.
    fn awake(&self, machine: usize) -> f64 {
        self.machines[machine].asleep_until
    }

    /// The time until which an event must wait, because its machine sleeps or the broker stands still.
    fn waits_until(&self, event: &Event) -> Option<f64> {
        let until = match (event.machine(), event) {
            (Some(m), _) if self.machines[m].dead => return None,
            (Some(m), _) => self.machines[m].asleep_until,
            (None, Event::Fault(_) | Event::Reborn) => return None,
            (None, _) => self.broker_paused_until,
        };
        (until > self.now + 1e-6).then_some(until)
    }

    fn happen(&mut self, event: Event) {
        if event.machine().is_some_and(|m| self.machines[m].dead) {
            return;
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
                    if let Some(saving) = self.saving.get_mut(&step) {
                        saving.extend(tensors);
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
                let heartbeat = Heartbeat {
                    generation,
                    progress: machine.progress,
                    waits_for: machine.follower.waits_for(),
                    disk_free: None,
                };
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
                assert_eq!(content, start, "a tensor is not of the cut that the generation starts from\n{key}");
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
}
