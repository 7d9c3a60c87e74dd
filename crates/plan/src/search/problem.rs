//! A model and machines as plain numbers.

use std::collections::BTreeSet;
use std::ops::Range;

use super::round_trip::RoundTrip;
use crate::cost::congestion::STREAM_WINDOW;
use crate::schedule::Schedule;

/// Up to this many units, OP-Fence also changes the order of units.
pub(crate) const MAX_THOROUGH_UNITS: usize = 12;

/// A model as a chain of atoms, which may be cut between any two.
///
/// All figures are for one micro-batch. A figure "by cut" has one entry for each position between atoms, both ends
/// included. Prefix sums over atoms have the same length.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    /// The number of atoms.
    pub atoms: usize,
    /// The seconds of each class of machine.
    pub seconds: Vec<Seconds>,
    /// Bytes that stay from step to step: parameters, their gradients, optimizer state, buffers. Prefix sums.
    pub state: Vec<f64>,
    /// Bytes of parameters alone. Prefix sums.
    pub parameters: Vec<f64>,
    /// Bytes that an atom saves from forward to backward. Prefix sums.
    pub kept: Vec<f64>,
    /// By cut: bytes from before the cut that atoms after it save from forward to backward.
    pub kept_across: Vec<f64>,
    /// By atom: further bytes that it needs while it runs.
    pub working: Vec<f64>,
    /// Bytes of buffers that forward changes. Replicas of a stage hand them on from micro-batch to micro-batch.
    /// Prefix sums.
    pub handed_on: Vec<f64>,
    /// Values that one atom computes and others need.
    pub messages: Vec<Message>,
    /// Parameters that several atoms read.
    pub ties: Vec<Tie>,
    /// Values that the broker sends.
    pub inputs: Vec<Input>,
}

/// Seconds on one class of machine. Prefix sums over atoms.
#[derive(Debug, Clone, Default)]
pub struct Seconds {
    /// Forward pass of one micro-batch.
    pub forward: Vec<f64>,
    /// Backward pass of one micro-batch.
    pub backward: Vec<f64>,
    /// The part of the backward pass that computes weight gradients, which nothing waits for.
    pub weight: Vec<f64>,
    /// Reduction, norm and update, once per step.
    pub update: Vec<f64>,
}

/// A value that crosses cuts: an activation goes to later atoms, a gradient to earlier ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// The atom that computes it.
    pub maker: u32,
    /// The atoms that need it, ascending: all after the maker, or all before it.
    pub users: Vec<u32>,
    /// Its size.
    pub bytes: f64,
}

impl Message {
    /// The first and the last atom that compute or use it.
    pub fn span(&self) -> (u32, u32) {
        let (first, last) = (self.users.first(), self.users.last());
        (*first.unwrap_or(&self.maker).min(&self.maker), *last.unwrap_or(&self.maker).max(&self.maker))
    }
}

/// A parameter that several atoms read. The machine of the first of them owns it: it receives the other machines'
/// parts of the gradient and sends them the new value.
#[derive(Debug, Clone, PartialEq)]
pub struct Tie {
    /// The atoms that read it, ascending.
    pub users: Vec<TieUser>,
    /// Size of the parameter.
    pub bytes: f64,
}

/// An atom that reads a tied parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TieUser {
    /// The atom.
    pub atom: u32,
    /// How many parts of the gradient it makes.
    pub parts: u32,
}

impl Tie {
    /// The atom whose machine owns the parameter.
    pub(super) fn owner_atom(&self) -> u32 {
        self.users[0].atom
    }

    /// Seconds for a holder to send its parts of the gradient to the owner and to receive the new value.
    pub(super) fn exchange_seconds(&self, machines: &Machines, holder: usize, owner: usize, parts: u32) -> f64 {
        machines.link(holder, owner).seconds(self.bytes * f64::from(parts))
            + machines.link(owner, holder).seconds(self.bytes)
    }
}

/// A value that the broker sends with every micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    /// The atoms that read it, ascending.
    pub atoms: Vec<u32>,
    /// Its size.
    pub bytes: f64,
}

impl Input {
    /// Whether one of these atoms reads it.
    pub(super) fn is_read_by(&self, atoms: Range<u32>) -> bool {
        self.atoms.iter().any(|a| atoms.contains(a))
    }
}

/// A device, or several that share a stage and take turns at its micro-batches.
#[derive(Debug, Clone, PartialEq)]
pub struct Unit {
    /// The devices.
    pub members: Vec<u32>,
    /// The slowest member's class, an index in [`Chain::seconds`].
    pub class: u32,
    /// The smallest member's memory, in bytes.
    pub memory: f64,
    /// The slowest link among the members.
    pub inside: LinkCost,
    /// The cost to sum the gradients of parameters over the members and to return the new values, by bytes of
    /// parameters. The busiest line of all that the members use limits.
    pub exchange: LinkCost,
    /// What the unit takes of processors that others use, too.
    pub processors: Vec<ProcessorShare>,
    /// The price of bytes beyond the members' memory, if they offload those. [`Self::memory`] is then infinite.
    pub offload: Option<OffloadCost>,
}

/// The part of a unit's work that a shared processor does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProcessorShare {
    /// The processor's number.
    pub processor: u32,
    /// Seconds of the whole processor for each second that a member computes for a micro-batch, averaged over members.
    pub of_micro_batch: f64,
    /// The same for each second that every member computes once in a step.
    pub of_step: f64,
}

/// The cost of a unit that needs more than its memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OffloadCost {
    /// The smallest member's memory, in bytes.
    pub memory: f64,
    /// Seconds of a step for each byte beyond that memory.
    pub per_byte: f64,
}

/// The cost of messages from one unit to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkCost {
    /// Seconds until the first byte arrives.
    pub latency: f64,
    /// Seconds per byte; infinite where there is no link.
    pub per_byte: f64,
    /// Seconds per byte of messages that fill a connection's window, which is sent once per round trip.
    pub window_per_byte: f64,
}

impl LinkCost {
    /// No time at all.
    pub const NONE: Self = Self::new(0.0, 0.0);

    /// The cost of a link on which no window limits.
    pub const fn new(latency: f64, per_byte: f64) -> Self {
        Self { latency, per_byte, window_per_byte: 0.0 }
    }

    /// The larger of two costs in every respect.
    pub fn worse(self, other: Self) -> Self {
        Self {
            latency: self.latency.max(other.latency),
            per_byte: self.per_byte.max(other.per_byte),
            window_per_byte: self.window_per_byte.max(other.window_per_byte),
        }
    }

    /// Seconds from the start of sending to the arrival of the last byte.
    pub fn seconds(&self, bytes: f64) -> f64 {
        // Nothing to send costs nothing, even where there is no link.
        if bytes > 0.0 { self.latency + self.busy(bytes) } else { 0.0 }
    }

    /// Seconds for which a message keeps the link busy.
    pub(crate) fn busy(&self, bytes: f64) -> f64 {
        let fills_window = bytes >= STREAM_WINDOW as f64;
        let per_byte = if fills_window { self.per_byte.max(self.window_per_byte) } else { self.per_byte };
        if bytes > 0.0 { bytes * per_byte } else { 0.0 }
    }
}

/// The time that a shared line takes for a byte between two units.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LineShare {
    /// The line's number.
    pub line: u32,
    /// Seconds of the line per byte.
    pub per_byte: f64,
}

/// Units and the links between them.
#[derive(Debug, Clone, Default)]
pub struct Machines {
    /// The units.
    pub units: Vec<Unit>,
    /// From unit `a` to unit `b` at `a * (units + 1) + b`. The last row and column are the broker's.
    pub links: Vec<LinkCost>,
    /// The shared lines that messages take, in the order of `links`. Empty if no line is shared. A line is shared if
    /// messages between two different pairs of units take it.
    pub lines: Vec<Vec<LineShare>>,
    /// The number of shared lines.
    pub line_count: usize,
    /// The number of shared processors.
    pub processor_count: usize,
}

impl Machines {
    /// The cost of messages from one unit to another.
    pub fn link(&self, from: usize, to: usize) -> LinkCost {
        self.links[from * (self.units.len() + 1) + to]
    }

    /// The broker's index in [`Self::link`].
    pub fn broker(&self) -> usize {
        self.units.len()
    }

    /// The shared lines that messages from one unit to another take.
    pub fn lines(&self, from: usize, to: usize) -> &[LineShare] {
        self.lines.get(from * (self.units.len() + 1) + to).map_or(&[], |s| s)
    }
}

/// A planning problem: a model, machines, and the number of micro-batches.
#[derive(Debug, Clone)]
pub struct Problem {
    /// The model.
    pub chain: Chain,
    /// The machines.
    pub machines: Machines,
    /// Micro-batches per step.
    pub micro_batches: u32,
    /// By cut: the messages that cross it.
    pub(crate) crossing: Vec<Vec<u32>>,
    /// By cut: bytes of activations, and of gradients, that cross it.
    pub(crate) across: Vec<[f64; 2]>,
    /// By atom: bytes of inputs that it reads. Prefix sums.
    pub(crate) read: Vec<f64>,
    /// Sparse table of the largest [`Chain::working`]. Entry `[l][i]` covers `2^l` atoms from `i`.
    working: Vec<Vec<f64>>,
}

impl Problem {
    /// A problem of these parts.
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
        Self { crossing, across, read: prefix_sums(&by_atom), working, chain, machines, micro_batches }
    }

    /// The same problem with cuts only at these positions. They ascend and include both ends.
    pub fn with_cuts(&self, cuts: &[usize]) -> Self {
        let c = &self.chain;
        let atom = |a: u32| cuts.partition_point(|p| *p <= a as usize) as u32 - 1;
        let at = |sums: &[f64]| cuts.iter().map(|p| sums[*p]).collect::<Vec<_>>();
        let distinct = |atoms: &[u32]| Vec::from_iter(atoms.iter().map(|a| atom(*a)).collect::<BTreeSet<_>>());
        let messages = c.messages.iter().filter_map(|m| {
            let maker = atom(m.maker);
            let users: Vec<u32> = distinct(&m.users).into_iter().filter(|u| *u != maker).collect();
            (!users.is_empty()).then_some(Message { maker, users, bytes: m.bytes })
        });
        // A tie whose users fall into one atom is no tie any more, and its memory counts once.
        let mut state = at(&c.state);
        let mut ties = Vec::new();
        for tie in &c.ties {
            let mut users: Vec<TieUser> = Vec::new();
            for user in &tie.users {
                let (atom, parts) = (atom(user.atom), user.parts);
                match users.last_mut() {
                    Some(last) if last.atom == atom => {
                        last.parts += parts;
                        state[atom as usize + 1..].iter_mut().for_each(|s| *s -= tie.bytes);
                    }
                    _ => users.push(TieUser { atom, parts }),
                }
            }
            if users.len() > 1 {
                ties.push(Tie { users, bytes: tie.bytes });
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

    /// At most `most` positions for cuts, and both ends. They are spread evenly over time and memory, each where the
    /// fewest bytes cross.
    pub(crate) fn cuts(&self, most: usize) -> Vec<usize> {
        let atoms = self.chain.atoms;
        if atoms <= most + 1 {
            return (0..=atoms).collect();
        }
        let total = |sums: &[f64]| sums.last().copied().unwrap_or(0.0).max(1e-300);
        let shares: Vec<f64> = (0..=atoms)
            .map(|a| {
                let seconds = self
                    .chain
                    .seconds
                    .iter()
                    .map(|s| (s.forward[a] + s.backward[a]) / (total(&s.forward) + total(&s.backward)));
                let time = seconds.sum::<f64>() / self.chain.seconds.len().max(1) as f64;
                let memory = self.chain.state[a] / total(&self.chain.state);
                (2.0 * time + memory) / 3.0
            })
            .collect();
        let mut cuts = vec![0];
        let mut at = 1;
        for bucket in 1..=most {
            let end = bucket as f64 / most as f64;
            let first = at;
            while at < atoms && shares[at] <= end {
                at += 1;
            }
            let crossing = |cut: &usize| self.across[*cut].iter().sum::<f64>();
            // The last of equal positions is taken, because it leaves the next one a choice.
            cuts.extend((first..at).rev().min_by(|a, b| crossing(a).total_cmp(&crossing(b))));
        }
        cuts.push(atoms);
        cuts
    }

    /// The same model on other machines.
    pub fn with_machines(&self, machines: Machines) -> Self {
        Self { machines, ..self.clone() }
    }

    fn most_working(&self, lo: usize, hi: usize) -> f64 {
        let level = (hi - lo).ilog2() as usize;
        let table = &self.working[level];
        table[lo].max(table[hi - (1 << level)])
    }

    /// Seconds that the unit takes for atoms `lo..hi`: one forward pass, then one backward pass.
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

    /// Seconds of a unit to apply a step to atoms `lo..hi`, including the wait for the verdict and the time to offload
    /// what exceeds its memory.
    pub(crate) fn step_end(&self, unit: usize, lo: usize, hi: usize) -> f64 {
        let s = &self.chain.seconds[self.machines.units[unit].class as usize];
        let broker = self.machines.broker();
        let verdict = self.machines.link(unit, broker).latency + self.machines.link(broker, unit).latency;
        // Activations count as those of one micro-batch.
        let beyond = |cost: OffloadCost| cost.per_byte * (self.memory(unit, lo, hi, 1) - cost.memory).max(0.0);
        s.update[hi] - s.update[lo] + verdict + self.machines.units[unit].offload.map_or(0.0, beyond)
    }

    /// Peak bytes of each member of a unit with atoms `lo..hi`. `in_flight` is the unit's number of micro-batches
    /// between forward and backward.
    pub fn memory(&self, unit: usize, lo: usize, hi: usize, in_flight: usize) -> f64 {
        let (c, copies) = (&self.chain, self.machines.units[unit].copies());
        let mut state = c.state[hi] - c.state[lo];
        for tie in &c.ties {
            let inside = tie.users.iter().filter(|u| (lo..hi).contains(&(u.atom as usize))).count();
            state -= tie.bytes * inside.saturating_sub(1) as f64;
        }
        // The owner collects every replica's sums.
        state += (copies - 1) as f64 * (c.parameters[hi] - c.parameters[lo]);
        let kept = c.kept[hi] - c.kept[lo] + c.kept_across[lo];
        state + kept * in_flight.div_ceil(copies) as f64 + self.most_working(lo, hi)
    }

    /// Bytes that stay from step to step, on all machines together. A tied parameter counts once.
    pub(crate) fn state_bytes(&self) -> f64 {
        let chain = &self.chain;
        chain.state[chain.atoms] - chain.ties.iter().map(|t| t.bytes * (t.users.len() - 1) as f64).sum::<f64>()
    }

    /// Bytes of activations, and of gradients, that pass between the two stages beside a cut, even if each is one
    /// atom long.
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

    /// The limit that round trips put on the pipeline under `schedule`.
    pub(super) fn round_trip(&self, schedule: Schedule) -> RoundTrip {
        RoundTrip::new(schedule, self.micro_batches)
    }

    /// Micro-batches in flight at a stage. `machines` is the number of machines from this stage to the last.
    pub(crate) fn in_flight(&self, schedule: Schedule, machines: usize) -> usize {
        self.round_trip(schedule).in_flight(machines)
    }

    /// The share of the micro-batches after the first that one of `copies` replicas runs after its own first.
    pub(super) fn turns(&self, copies: usize) -> f64 {
        let rounds = (self.micro_batches as usize).div_ceil(copies);
        (rounds - 1) as f64 / (f64::from(self.micro_batches) - 1.0).max(1.0)
    }

    /// Seconds per micro-batch for which `bytes` keep the link between two units busy, averaged over the members'
    /// links.
    pub(crate) fn busy(&self, from: usize, to: usize, bytes: f64) -> f64 {
        self.machines.link(from, to).busy(bytes) / self.links_between(from, to)
    }

    /// The number of links of members over which the messages between two units are spread.
    pub(crate) fn links_between(&self, from: usize, to: usize) -> f64 {
        let units = &self.machines.units;
        least_common_multiple(copies(units, from), copies(units, to))
    }
}

impl Unit {
    /// The number of members.
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

/// By position: the sum of all values before it.
pub(crate) fn prefix_sums(values: &[f64]) -> Vec<f64> {
    let mut sum = 0.0;
    let mut sums = Vec::with_capacity(values.len() + 1);
    sums.push(0.0);
    for v in values {
        sum += v;
        sums.push(sum);
    }
    sums
}
