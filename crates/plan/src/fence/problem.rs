//! What a planner needs to know of a model and of machines, as plain numbers.

use std::collections::BTreeSet;

use crate::Schedule;

/// A model as a line of atoms that may be cut between any two: seconds, bytes, and what crosses where. Figures are of one micro-batch; those "by cut" have
/// one entry per position between atoms, both ends included, and sums over atoms are given as prefix sums of that length.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    /// How many atoms.
    pub atoms: usize,
    /// Seconds by class of machine.
    pub seconds: Vec<Seconds>,
    /// Bytes that stay from step to step: parameters, their gradients, the optimiser's state, buffers. Prefix sums.
    pub state: Vec<f64>,
    /// Bytes of parameters alone. Prefix sums.
    pub parameters: Vec<f64>,
    /// Bytes that an atom keeps from forward to backward. Prefix sums.
    pub kept: Vec<f64>,
    /// Bytes from before a cut that atoms after it keep from forward to backward, by cut.
    pub kept_across: Vec<f64>,
    /// Bytes that an atom needs besides while it runs, by atom.
    pub working: Vec<f64>,
    /// Bytes of buffers that forward changes, and that replicas of a stage hand on from micro-batch to micro-batch. Prefix sums.
    pub handed_on: Vec<f64>,
    /// Values that other atoms need than the one that makes them.
    pub messages: Vec<Message>,
    /// Parameters that several atoms read.
    pub ties: Vec<Tie>,
    /// What comes from the broker.
    pub inputs: Vec<Input>,
}

/// Seconds on one class of machine, as prefix sums over atoms.
#[derive(Debug, Clone, Default)]
pub struct Seconds {
    /// Forward pass of one micro-batch.
    pub forward: Vec<f64>,
    /// Backward pass of one micro-batch.
    pub backward: Vec<f64>,
    /// The part of it that makes gradients of parameters, which nothing waits for.
    pub weight: Vec<f64>,
    /// Reducing, measuring and applying the gradients of a step.
    pub update: Vec<f64>,
}

/// A value that crosses cuts: an activation runs to later atoms, a gradient to earlier ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// The atom that makes it.
    pub maker: u32,
    /// The atoms that need it, ascending; all after the maker, or all before it.
    pub users: Vec<u32>,
    /// Its size.
    pub bytes: f64,
}

impl Message {
    /// The first and the last atom that make or use it.
    pub fn span(&self) -> (u32, u32) {
        let (first, last) = (self.users.first(), self.users.last());
        (*first.unwrap_or(&self.maker).min(&self.maker), *last.unwrap_or(&self.maker).max(&self.maker))
    }
}

/// A parameter that several atoms read. The machine of the first of them owns it: it is sent the others' parts of the gradient and sends them the new value.
#[derive(Debug, Clone, PartialEq)]
pub struct Tie {
    /// The atoms, ascending, with the number of gradient parts each makes.
    pub atoms: Vec<(u32, u32)>,
    /// Size of the parameter.
    pub bytes: f64,
}

/// A value that the broker sends with every micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// The atoms that read it, ascending.
    pub atoms: Vec<u32>,
    /// Its size.
    pub bytes: f64,
}

/// Devices that hold a stage together, each taking every so manieth micro-batch; mostly one.
#[derive(Debug, Clone, PartialEq)]
pub struct Unit {
    /// The devices.
    pub members: Vec<u32>,
    /// The slowest member's class, an index in [`Chain::seconds`].
    pub class: u32,
    /// The smallest member's bytes.
    pub memory: f64,
    /// The slowest link among the members.
    pub inside: Route,
}

/// The way between two units.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    /// Seconds until the first byte arrives.
    pub latency: f64,
    /// Seconds per byte; infinite where there is no way.
    pub per_byte: f64,
}

impl Route {
    /// No time at all.
    pub const NONE: Self = Self { latency: 0.0, per_byte: 0.0 };

    /// Seconds from sending to having received.
    pub fn seconds(&self, bytes: f64) -> f64 {
        // Nothing to send costs nothing, even where there is no way.
        if bytes > 0.0 { self.latency + bytes * self.per_byte } else { 0.0 }
    }

    fn busy(&self, bytes: f64) -> f64 {
        if bytes > 0.0 { bytes * self.per_byte } else { 0.0 }
    }
}

/// Units and the ways between them.
#[derive(Debug, Clone, Default)]
pub struct Machines {
    /// The units.
    pub units: Vec<Unit>,
    /// From unit `a` to unit `b` at `a * (units + 1) + b`; the last row and column are the broker's.
    pub routes: Vec<Route>,
    /// The shared uplinks that a way takes, each with its seconds per byte, in the order of `routes`; empty if no uplink is shared.
    pub shared: Vec<Vec<(u32, f64)>>,
    /// How many shared uplinks there are.
    pub uplinks: usize,
}

impl Machines {
    /// The way from one unit to another.
    pub fn route(&self, from: usize, to: usize) -> Route {
        self.routes[from * (self.units.len() + 1) + to]
    }

    /// The broker's index in [`Self::route`].
    pub fn broker(&self) -> usize {
        self.units.len()
    }

    /// The uplinks on the way from one unit to another.
    pub fn uplinks(&self, from: usize, to: usize) -> &[(u32, f64)] {
        self.shared.get(from * (self.units.len() + 1) + to).map_or(&[], |s| s)
    }
}

/// A model, machines, and the number of micro-batches: what is to be planned.
#[derive(Debug, Clone)]
pub struct Problem {
    /// The model.
    pub chain: Chain,
    /// The machines.
    pub machines: Machines,
    /// Micro-batches a step.
    pub micro_batches: u32,
    /// By cut: the messages that cross it.
    pub(crate) crossing: Vec<Vec<u32>>,
    /// By cut: bytes of activations and of gradients that cross it.
    pub(crate) across: Vec<[f64; 2]>,
    /// Bytes of inputs by atom that reads them. Prefix sums.
    pub(crate) read: Vec<f64>,
    /// Sparse table of the largest [`Chain::working`]: entry `[l][i]` covers `2^l` atoms from `i`.
    working: Vec<Vec<f64>>,
}

impl Problem {
    /// A problem of these.
    pub fn new(chain: Chain, machines: Machines, micro_batches: u32) -> Self {
        let mut crossing = vec![Vec::new(); chain.atoms + 1];
        let mut across = vec![[0.0; 2]; chain.atoms + 1];
        for (m, message) in (0..).zip(&chain.messages) {
            let (first, last) = message.span();
            for cut in first as usize + 1..=last as usize {
                crossing[cut].push(m);
                across[cut][usize::from(message.maker != first)] += message.bytes;
            }
        }
        let mut by_atom = vec![0.0; chain.atoms];
        for input in &chain.inputs {
            input.atoms.iter().for_each(|a| by_atom[*a as usize] += input.bytes);
        }
        let mut working = vec![chain.working.clone()];
        let mut width = 1;
        while 2 * width <= chain.atoms {
            let last = &working[working.len() - 1];
            let next = (0..=chain.atoms - 2 * width).map(|i| last[i].max(last[i + width])).collect();
            working.push(next);
            width *= 2;
        }
        Self { crossing, across, read: prefix(&by_atom), working, chain, machines, micro_batches }
    }

    /// The same with cuts at these positions alone (ascending, both ends among them).
    pub fn restrict(&self, cuts: &[usize]) -> Self {
        let c = &self.chain;
        let atom = |a: u32| cuts.partition_point(|p| *p <= a as usize) as u32 - 1;
        let at = |sums: &[f64]| cuts.iter().map(|p| sums[*p]).collect::<Vec<_>>();
        let distinct = |atoms: &[u32]| Vec::from_iter(atoms.iter().map(|a| atom(*a)).collect::<BTreeSet<_>>());
        let messages = c.messages.iter().filter_map(|m| {
            let maker = atom(m.maker);
            let users: Vec<u32> = distinct(&m.users).into_iter().filter(|u| *u != maker).collect();
            (!users.is_empty()).then_some(Message { maker, users, bytes: m.bytes })
        });
        // What two uses inside one atom count twice is no tie any more.
        let mut state = at(&c.state);
        let mut ties = Vec::new();
        for tie in &c.ties {
            let mut atoms: Vec<(u32, u32)> = Vec::new();
            for &(a, parts) in &tie.atoms {
                match atoms.last_mut() {
                    Some((last, sum)) if *last == atom(a) => {
                        *sum += parts;
                        state[atom(a) as usize + 1..].iter_mut().for_each(|s| *s -= tie.bytes);
                    }
                    _ => atoms.push((atom(a), parts)),
                }
            }
            if atoms.len() > 1 {
                ties.push(Tie { atoms, bytes: tie.bytes });
            }
        }
        let chain = Chain {
            atoms: cuts.len() - 1,
            seconds: c
                .seconds
                .iter()
                .map(|s| Seconds {
                    forward: at(&s.forward),
                    backward: at(&s.backward),
                    weight: at(&s.weight),
                    update: at(&s.update),
                })
                .collect(),
            state,
            parameters: at(&c.parameters),
            kept: at(&c.kept),
            kept_across: at(&c.kept_across),
            working: cuts.windows(2).map(|w| self.most_working(w[0], w[1])).collect(),
            handed_on: at(&c.handed_on),
            messages: messages.collect(),
            ties,
            inputs: c.inputs.iter().map(|i| Input { atoms: distinct(&i.atoms), bytes: i.bytes }).collect(),
        };
        Self::new(chain, self.machines.clone(), self.micro_batches)
    }

    /// The same model on other machines.
    pub fn on(&self, machines: Machines) -> Self {
        Self { machines, ..self.clone() }
    }

    fn most_working(&self, lo: usize, hi: usize) -> f64 {
        let level = (hi - lo).ilog2() as usize;
        let table = &self.working[level];
        table[lo].max(table[hi - (1 << level)])
    }

    /// Seconds of a unit for the forward and the backward pass of atoms `lo..hi`.
    pub fn compute(&self, unit: usize, lo: usize, hi: usize) -> [f64; 2] {
        let s = &self.chain.seconds[self.machines.units[unit].class as usize];
        [s.forward[hi] - s.forward[lo], s.backward[hi] - s.backward[lo]]
    }

    /// The part of a unit's backward pass of atoms `lo..hi` that nothing waits for under `schedule`.
    pub(crate) fn delayed(&self, schedule: Schedule, unit: usize, lo: usize, hi: usize) -> f64 {
        if !schedule.delays_weights() {
            return 0.0;
        }
        let s = &self.chain.seconds[self.machines.units[unit].class as usize];
        s.weight[hi] - s.weight[lo]
    }

    /// Seconds of a unit for applying a step to atoms `lo..hi`, and for the verdict to come from the broker.
    pub(crate) fn finish(&self, unit: usize, lo: usize, hi: usize) -> f64 {
        let s = &self.chain.seconds[self.machines.units[unit].class as usize];
        let broker = self.machines.broker();
        let verdict = self.machines.route(unit, broker).latency + self.machines.route(broker, unit).latency;
        s.update[hi] - s.update[lo] + verdict
    }

    /// Peak bytes of a member of a unit that holds atoms `lo..hi`, all its members having `under_way` micro-batches between their forward and backward passes.
    pub fn memory(&self, unit: usize, lo: usize, hi: usize, under_way: usize) -> f64 {
        let (c, copies) = (&self.chain, self.machines.units[unit].copies());
        let mut state = c.state[hi] - c.state[lo];
        for tie in &c.ties {
            let inside = tie.atoms.iter().filter(|(a, _)| (lo..hi).contains(&(*a as usize))).count();
            state -= tie.bytes * inside.saturating_sub(1) as f64;
        }
        // The owner gathers every replica's sums.
        state += (copies - 1) as f64 * (c.parameters[hi] - c.parameters[lo]);
        let kept = c.kept[hi] - c.kept[lo] + c.kept_across[lo];
        state + kept * under_way.div_ceil(copies) as f64 + self.most_working(lo, hi)
    }

    /// Bytes of activations and of gradients that pass between the stages on both sides of a cut, however short they are.
    pub(crate) fn neighbours(&self, cut: usize) -> [f64; 2] {
        let (mut bytes, cut) = ([0.0; 2], cut as u32);
        for m in self.crossing[cut as usize].iter().map(|m| &self.chain.messages[*m as usize]) {
            if m.maker + 1 == cut && m.users.contains(&cut) {
                bytes[0] += m.bytes;
            }
            if m.maker == cut && m.users.contains(&(cut - 1)) {
                bytes[1] += m.bytes;
            }
        }
        bytes
    }

    /// Seconds that a line between two units is taken per micro-batch by `bytes` of each, averaged over the members' lines.
    pub(crate) fn busy(&self, from: usize, to: usize, bytes: f64) -> f64 {
        let units = &self.machines.units;
        self.machines.route(from, to).busy(bytes) / least_common_multiple(copies(units, from), copies(units, to))
    }
}

impl Unit {
    /// How many members take turns.
    pub fn copies(&self) -> usize {
        self.members.len().max(1)
    }
}

fn copies(units: &[Unit], unit: usize) -> usize {
    units.get(unit).map_or(1, Unit::copies)
}

fn least_common_multiple(a: usize, b: usize) -> f64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x * b) as f64
}

/// Sums of all before each position.
pub(crate) fn prefix(values: &[f64]) -> Vec<f64> {
    let mut sum = 0.0;
    let mut sums = Vec::with_capacity(values.len() + 1);
    sums.push(0.0);
    for v in values {
        sum += v;
        sums.push(sum);
    }
    sums
}
