//! A machine with a peer's process: it carries out what its follower asks for.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fusionllm_plan::{Disk, Link, Measured, OperatorCurves, Rates};
use fusionllm_program::{Instruction, PassKind, Program, TensorKey};
use fusionllm_protocol::{
    ComputeCommand, Follower, FollowerAction, FromPeer, MachineProfile, MemberId, PassReport, Role, Source, ToPeer,
};

use super::delays::Delay;
use super::{Down, Event, World};

/// The seconds of computing that a machine reports for a pass.
pub(super) const COMPUTE_S: f64 = 0.1;

/// A machine's part in a generation.
#[derive(Debug)]
pub(super) struct Assigned {
    pub(super) role: Role,
    pub(super) train: Program,
    pub(super) eval: Program,
}

#[derive(Debug, Clone)]
pub(super) struct Fetch {
    pub(super) from: MemberId,
    pub(super) step: u64,
    pub(super) keys: Vec<TensorKey>,
    /// Whether it is a copy for the vault, and not for the generation.
    pub(super) copy: bool,
}

/// A machine with a peer's process.
#[derive(Default)]
pub(super) struct Machine {
    /// Whether it has ever been there.
    pub(super) joined: bool,
    pub(super) dead: bool,
    pub(super) asleep_until: f64,
    pub(super) cut_off_until: f64,
    /// Counts its connections to the broker.
    pub(super) connection: u32,
    pub(super) connected: bool,
    pub(super) member: Option<MemberId>,
    pub(super) follower: Follower,
    /// The part that was assigned last, and the part in the generation that began last.
    pub(super) assigned: Option<Arc<Assigned>>,
    pub(super) part: Option<Arc<Assigned>>,
    pub(super) state: BTreeMap<TensorKey, u64>,
    pub(super) vault: BTreeMap<u64, BTreeMap<TensorKey, u64>>,
    pub(super) commands: VecDeque<ToPeer>,
    pub(super) verdicts: BTreeMap<u64, bool>,
    /// The pass whose verdict it waits for, and its step.
    pub(super) waiting: Option<(u64, u64)>,
    pub(super) progress: u64,
    /// The time when the last message of each lane arrives. Messages of a lane keep their order.
    pub(super) lanes: [f64; 3],
    pub(super) done: bool,
    /// Whether it asked to leave.
    pub(super) leaving: bool,
    /// How many times slower it is than at the start, if it is.
    pub(super) slower: Option<f64>,
    pub(super) busy_until: f64,
}

impl Machine {
    /// The generation that began last.
    pub(super) fn generation(&self) -> u32 {
        self.part.as_ref().map_or(0, |part| part.role.generation)
    }
}

impl World {
    pub(super) fn receive(&mut self, m: usize, down: Down) {
        let present = self.machines[m].connection;
        match down {
            Down::Assign(connection, assigned) if connection == present => {
                let role = assigned.role.clone();
                self.machines[m].assigned = Some(assigned);
                let actions = self.machines[m].follower.assign(role);
                self.follow(m, actions);
            }
            Down::Load(connection, generation, key, content) if connection == present => {
                self.happen(Event::Loaded(m, generation, key, content));
            }
            Down::Control(connection, message) if connection == present => self.command(m, message),
            _ => {}
        }
    }

    pub(super) fn command(&mut self, m: usize, message: ToPeer) {
        let machine = &mut self.machines[m];
        let actions = match message {
            ToPeer::Regroup { generation } => machine.follower.regroup(generation),
            ToPeer::Release { before } => machine.follower.release(before),
            ToPeer::Mirror { step, of, bytes_per_s } => machine.follower.mirror(step, of, bytes_per_s),
            ToPeer::Verdict { pass, verdict } => {
                if machine.follower.takes_commands() {
                    machine.verdicts.insert(pass, verdict.apply);
                    self.at(self.now, Event::Work(m));
                }
                Vec::new()
            }
            ToPeer::Measure { .. } => {
                let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
                let operators = Measured::default();
                let scratch = OperatorCurves::default();
                let machine = MachineProfile {
                    rates,
                    memory: 1 << 30,
                    slowdown: 1.0,
                    operators,
                    scratch,
                    disk: Disk::default(),
                    host_link: None,
                };
                self.tell(m, FromPeer::Machine(Box::new(machine)));
                Vec::new()
            }
            ToPeer::Probe { with, .. } => {
                let other = self.machine_of(with);
                let until = other.and_then(|o| self.parted.get(&(m.min(o), m.max(o)))).copied().unwrap_or(0.0);
                let reached = until <= self.now && other.is_none_or(|o| !self.machines[o].dead);
                let link = Link { latency: 0.01, bandwidth: 1e6 };
                self.tell(m, FromPeer::Links { with, links: reached.then_some((link, link)), relayed: false });
                Vec::new()
            }
            ToPeer::Contacts(_) => Vec::new(),
            ToPeer::Stop(_) | ToPeer::Refused { .. } => {
                machine.done = true;
                Vec::new()
            }
            command => {
                if machine.follower.takes_commands() {
                    machine.commands.push_back(command);
                    self.at(self.now, Event::Work(m));
                }
                Vec::new()
            }
        };
        self.follow(m, actions);
    }

    pub(super) fn follow(&mut self, m: usize, actions: Vec<FollowerAction>) {
        for action in actions {
            let generation = self.machines[m].generation();
            match action {
                FollowerAction::Stop => {
                    let machine = &mut self.machines[m];
                    machine.commands.clear();
                    machine.verdicts.clear();
                    machine.waiting = None;
                    let ends = machine.generation();
                    let at = self.now + self.delay(Delay::End, m);
                    self.at(at, Event::Ended(m, ends));
                }
                FollowerAction::Forget { step } => drop(self.machines[m].vault.remove(&step)),
                FollowerAction::Begin { generation } => {
                    let machine = &mut self.machines[m];
                    let part = machine.assigned.clone().unwrap();
                    assert_eq!(part.role.generation, generation);
                    machine.part = Some(part.clone());
                    machine.state.clear();
                    // Optimizer state starts as zeros, and nobody loads it.
                    for (key, _) in part.role.sources.iter().filter(|(k, s)| k.slot.is_some() && **s == Source::Seed) {
                        machine.state.insert(key.clone(), 0);
                    }
                }
                FollowerAction::Draw { keys } => {
                    for key in keys {
                        self.at(self.now, Event::Loaded(m, generation, key, 0));
                    }
                }
                FollowerAction::Take { step, keys } => {
                    for key in keys {
                        let content = self.machines[m].vault[&step][&key];
                        self.at(self.now, Event::Loaded(m, generation, key, content));
                    }
                }
                FollowerAction::Fetch { from, step, keys } => {
                    let at = self.now + self.delay(Delay::Fetch, m);
                    self.at(at, Event::Fetch(m, generation, Fetch { from, step, keys, copy: false }, self.now));
                }
                FollowerAction::Copy { of, step, keys, .. } => {
                    let at = self.now + self.delay(Delay::Copy, m);
                    self.at(at, Event::Fetch(m, generation, Fetch { from: of, step, keys, copy: true }, self.now));
                }
                FollowerAction::Connect { with } => {
                    for member in with {
                        let at = self.now + self.delay(Delay::Connect, m);
                        self.at(at, Event::Connected(m, generation, member));
                    }
                }
                FollowerAction::Start { generation } => self.tell(m, FromPeer::Ready { generation }),
                FollowerAction::Tell(message) => self.tell(m, message),
                FollowerAction::Serve(_) | FollowerAction::Refuse(_) => {}
            }
        }
    }

    pub(super) fn fetch(&mut self, m: usize, generation: u32, fetch: Fetch, since: f64) {
        if self.machines[m].generation() != generation {
            return;
        }
        let Fetch { from, step, keys, copy } = fetch.clone();
        // Nobody has a number before the broker is back.
        let holder = self.machine_of(from).unwrap_or(m);
        let until = self.parted.get(&(m.min(holder), m.max(holder))).copied().unwrap_or(0.0);
        let there = holder != m && !self.machines[holder].dead && self.awake(holder) <= self.now && until <= self.now;
        let has = |world: &Self| {
            let cut = world.machines[holder].vault.get(&step);
            keys.iter().all(|key| cut.is_some_and(|cut| cut.contains_key(key)))
        };
        if !there || !has(self) {
            if self.now - since > 20.0 {
                if !copy {
                    let actions = self.machines[m].follower.lost(generation, from, "no answer".into());
                    self.follow(m, actions);
                }
                return;
            }
            return self.at(self.now + 0.5, Event::Fetch(m, generation, fetch, since));
        }
        let contents: Vec<(TensorKey, u64)> =
            keys.iter().map(|key| (key.clone(), self.machines[holder].vault[&step][key])).collect();
        for (key, content) in contents {
            assert_eq!(content, step, "a tensor is not of the cut that was asked for\n{key}");
            if copy {
                if self.machines[m].follower.wants_copy(generation, step, from) {
                    self.machines[m].vault.entry(step).or_default().insert(key, content);
                }
            } else {
                self.at(self.now, Event::Loaded(m, generation, key, content));
            }
        }
        if copy {
            let actions = self.machines[m].follower.copied(generation, step, from);
            self.follow(m, actions);
        }
    }

    /// Carries out the next command, or goes on after a verdict.
    pub(super) fn work(&mut self, m: usize) {
        if self.machines[m].busy_until > self.now + 1e-6 {
            let later = self.machines[m].busy_until;
            return self.at(later, Event::Work(m));
        }
        if let Some((pass, step)) = self.machines[m].waiting {
            let machine = &mut self.machines[m];
            let Some(apply) = machine.verdicts.remove(&pass) else { return };
            assert!(apply);
            machine.waiting = None;
            for content in machine.state.values_mut() {
                assert_eq!(*content, step);
                *content += 1;
            }
            self.pass_done(m, pass);
            return;
        }
        let Some(command) = self.machines[m].commands.pop_front() else { return };
        self.machines[m].progress += 1;
        match command {
            ToPeer::Compute(ComputeCommand::Run { pass, kind, step, .. }) => self.run_pass(m, pass, kind, step),
            ToPeer::Compute(ComputeCommand::Snapshot { step, save }) => self.snapshot(m, step, save),
            _ => {}
        }
        if self.machines[m].waiting.is_none() {
            self.at(self.now + 0.01, Event::Work(m));
        }
    }

    pub(super) fn run_pass(&mut self, m: usize, pass: u64, kind: PassKind, step: u64) {
        let part = self.machines[m].part.clone().unwrap();
        let program = if kind == PassKind::Train { &part.train } else { &part.eval };
        assert!(self.machines[m].state.values().all(|s| *s == step), "m{m}: a pass runs on the state of its step");
        for i in &program.instructions {
            if let Instruction::Report { report, micro_batch, .. } = *i {
                self.tell(m, FromPeer::Report { pass, report, micro_batch, value: step as f64 });
            }
        }
        match kind {
            PassKind::Eval => self.pass_done(m, pass),
            PassKind::Train => {
                let squared_norms = part.train.owned().map(|(parameter, _)| (parameter, 1.0)).collect();
                self.tell(m, FromPeer::Norms { pass, squared_norms });
                self.machines[m].waiting = Some((pass, step));
            }
        }
    }

    pub(super) fn pass_done(&mut self, m: usize, pass: u64) {
        let slower = self.machines[m].slower.unwrap_or(1.0);
        let report = PassReport { compute_s: COMPUTE_S * slower, ..PassReport::default() };
        self.tell(m, FromPeer::PassDone { pass, report });
        let at = self.now + self.delay(Delay::Work, m);
        // A machine that is as fast as at the start does its work between messages.
        self.machines[m].busy_until = self.now + COMPUTE_S * (slower - 1.0);
        self.at(at, Event::Work(m));
    }

    pub(super) fn snapshot(&mut self, m: usize, step: u64, save: bool) {
        let machine = &mut self.machines[m];
        let role = &machine.part.clone().unwrap().role;
        let tensors: BTreeMap<TensorKey, u64> =
            role.share.iter().map(|key| (key.clone(), machine.state[key])).collect();
        assert!(tensors.values().all(|s| *s == step));
        machine.vault.entry(step).or_default().extend(tensors.clone());
        let actions = machine.follower.cut_taken(role.generation, step);
        self.follow(m, actions);
        if save && self.machines[m].connected {
            let (at, connection) = (self.arrival(m, 0, Delay::Save), self.machines[m].connection);
            self.at(at, Event::Saved(m, connection, step, tensors));
        }
    }
}
