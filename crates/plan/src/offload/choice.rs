//! The choice of the tensors that leave a device's memory, and of those that are computed again.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use foldhash::{HashMap, HashMapExt};
use fusionllm_graph::NodeId;
use fusionllm_program::{Address, Instruction, Medium, Memory, Optimizer, Program};

use super::PeerOffload;
use super::recompute::{Activations, Recomputed};
use super::rewrite::{activations, all_gaps, rewrite, rewritten};
use crate::cost::{Cluster, CopyDirection, Device};
use crate::error::PlanError;
use crate::simulate::{SimulateOptions, Simulation, node_seconds, simulate};

/// The least bytes of a tensor that is offloaded. Smaller ones stay in memory, because moving one takes a system call,
/// however small it is.
const MIN_BYTES: u64 = 4 << 10;

/// How often the choice is made again with less memory, if the simulated step needs more than was counted.
const MAX_ATTEMPTS: usize = 4;

/// How often a choice is made again because its Program needs more or much less memory than was estimated.
const MAX_CORRECTIONS: usize = 5;

/// The share of the memory that such a choice may leave unused.
const TOLERANCE: f64 = 0.03;

/// The order in which fewer tensors of a class are tried.
const DEAREST_FIRST: [usize; 4] = [2, 1, 3, 0];

/// The limits on how much recomputed activations may depend on each other, from the strictest on: see
/// [`Activations::spread`].
const SPREADS: [f64; 4] = [1.0, 2.0, 4.0, 8.0];

/// Programs of which some offload tensors, or compute some again.
pub(crate) struct Offloaded {
    /// The tensors that peers offload or recompute, by peer.
    pub(crate) choices: Vec<PeerOffload>,
    /// The Programs.
    pub(crate) programs: Vec<Program>,
    /// Their simulated step.
    pub(crate) simulation: Simulation,
}

/// The shares of a device's memory that a plan may use where it offloads, in the order in which they are tried. Such a
/// plan would use all of its memory otherwise. But allocators round sizes up, mimalloc by up to an eighth, and
/// predictions of memory are off by a few percent. So more of the memory is used only where less is not enough.
pub(crate) const MEMORY_SHARES: [f64; 2] = [0.85, 0.95];

/// The Programs of a shorter step, on which choices are made: each holds at most as much as that of the whole step.
pub(crate) struct Drafts {
    pub(crate) programs: Vec<Program>,
    /// How many micro-batches of the whole step there are for each one of these.
    pub(crate) repeats: f64,
}

/// The most micro-batches that wait for backward at once on a peer.
pub(crate) fn most_waiting(program: &Program) -> u32 {
    Activations::new(program).most_waiting() as u32
}

/// Lets each peer that lacks memory offload and recompute as many tensors as it must to need no more than this share of
/// its memory. `simulation` is the simulated step of the Programs, in which nothing is offloaded. Returns `None` if some
/// peer lacks memory even so.
pub(crate) fn offload(
    programs: &[Program],
    drafts: &Drafts,
    simulation: &Simulation,
    cluster: &Cluster,
    optimizer: Optimizer,
    share: f64,
) -> Result<Option<Offloaded>, PlanError> {
    let slots = optimizer.slots().len();
    let excess = |simulation: &Simulation| -> Vec<u64> {
        let devices = simulation.peers.iter().zip(cluster.devices());
        let room = |device: &Device| (share * device.memory as f64) as u64;
        devices.map(|(load, device)| load.peak_bytes.saturating_sub(room(device))).collect()
    };
    let mut missing = excess(simulation);
    let mut rooms: Vec<u64> = drafts.programs.iter().map(|p| counted(p, slots)).collect();
    let mut choosers: BTreeMap<usize, Chooser<'_>> = BTreeMap::new();
    for _ in 0..MAX_ATTEMPTS {
        let (mut moved, mut choices) = (programs.to_vec(), Vec::new());
        for (peer, program) in moved.iter_mut().enumerate() {
            let (draft, room) = (&drafts.programs[peer], &mut rooms[peer]);
            *room = room.saturating_sub(missing[peer]);
            if counted(draft, slots) <= *room {
                continue;
            }
            let chooser = match choosers.entry(peer) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => {
                    entry.insert(Chooser::new(draft, &cluster.devices()[peer], slots, drafts.repeats)?)
                }
            };
            let Some(choice) = chooser.choose(*room) else { return Ok(None) };
            rewrite(program, &choice);
            choices.push(choice);
        }
        let simulation = simulate(&moved, cluster, &SimulateOptions::new(optimizer))?;
        missing = excess(&simulation);
        if missing.iter().all(|m| *m == 0) {
            return Ok(Some(Offloaded { choices, programs: moved, simulation }));
        }
    }
    Ok(None)
}

/// Bytes of the tensors in memory, at most.
fn counted(program: &Program, slots: usize) -> u64 {
    program.kept_bytes(slots).saturating_add(program.peak_bytes())
}

/// Chooses the tensors that a peer offloads or recomputes.
///
/// The bytes that cost least time go first. Optimizer state is moved once in a step, and activations are moved or
/// computed again for every micro-batch. A gradient leaves and returns for every micro-batch, to free the bytes of one.
/// A parameter is read even more often.
///
/// To write a choice into a Program and to count its bytes takes much longer than to estimate them. So the number of
/// tensors is found by the estimate, and the estimate is then corrected by what is counted.
struct Chooser<'a> {
    program: &'a Program,
    device: &'a Device,
    medium: Medium,
    slots: usize,
    repeats: f64,
    waiting: Activations<'a>,
    times: HashMap<NodeId, f64>,
    /// The choices for each limit on how much recomputed activations may depend on each other.
    sets: Vec<Set>,
    /// The bytes by which the last Program needed more than was estimated.
    margin: i64,
}

/// The tensors among which one choice is made.
struct Set {
    classes: Classes,
    profile: Profile,
}

impl<'a> Chooser<'a> {
    fn new(program: &'a Program, device: &'a Device, slots: usize, repeats: f64) -> Result<Self, PlanError> {
        let medium = if device.host_link.is_some() { Medium::Host } else { Medium::Disk };
        let (waiting, times) = (Activations::new(program), node_seconds(program, device)?);
        let again = waiting.candidates(&times, MIN_BYTES);
        let mut sets: Vec<_> = SPREADS.map(|spread| waiting.spread(&again, spread)).into();
        sets.dedup_by_key(|again| again.len());
        let times_per_byte = repeats * waiting.times_per_byte();
        let ranges = Ranges::new(program, &waiting, slots);
        let set = |again: Vec<&Recomputed>| {
            let classes = Classes::new(program, device, medium, slots, (times_per_byte, &again));
            let profile = ranges.profile(&classes);
            Set { classes, profile }
        };
        let sets = sets.into_iter().map(set).collect();
        Ok(Self { program, device, medium, slots, repeats, waiting, times, sets, margin: 0 })
    }

    /// The choice with which the peer's tensors take at most `room` bytes of memory, and that takes the least time.
    /// `None` if they need more even so.
    fn choose(&mut self, room: u64) -> Option<PeerOffload> {
        let mut best: Option<(f64, usize, [usize; 5])> = None;
        for at in 0..self.sets.len() {
            if let Some((takes, counts)) = self.first_guess(at, room)
                && best.as_ref().is_none_or(|(least, ..)| takes < *least)
            {
                best = Some((takes, at, counts));
            }
        }
        let (_, at, mut counts) = best?;
        // Fewer tensors of some classes may be enough. The dearest class is reduced first.
        for class in DEAREST_FIRST {
            counts[class] = least(counts[class], |count| {
                let mut fewer = counts;
                fewer[class] = count;
                self.needs(at, &fewer) <= room
            });
        }
        Some(self.rewritten(at, &counts).1)
    }

    /// How many tensors of each class of a set are enough, and the seconds that they take. There may be too many of them.
    fn first_guess(&mut self, at: usize, room: u64) -> Option<(f64, [usize; 5])> {
        // The largest margin with which the Program needs too much, and the least with which it fits.
        let (mut too_small, mut enough) = (None, None);
        let mut best: Option<(f64, [usize; 5])> = None;
        for _ in 0..MAX_CORRECTIONS {
            let limit = room as i64 - self.margin;
            let Set { classes, profile } = &self.sets[at];
            let Some(counts) = classes.least(|counts| profile.estimate(counts) <= limit) else { break };
            let program = self.rewritten(at, &counts).0;
            let unused = room as i64 - counted(&program, self.slots) as i64;
            let of_other = if unused < 0 {
                too_small = Some(self.margin);
                enough
            } else {
                enough = Some(self.margin);
                let takes = self.seconds(&program);
                if best.is_none_or(|(least, _)| takes < least) {
                    best = Some((takes, counts));
                }
                too_small
            };
            if (0..=(TOLERANCE * room as f64) as i64).contains(&unused) {
                break;
            }
            self.margin = of_other.map_or(self.margin - unused, |other| (self.margin + other) / 2);
        }
        best.or_else(|| {
            let all = self.sets[at].classes.0.each_ref().map(Vec::len);
            let program = self.rewritten(at, &all).0;
            (counted(&program, self.slots) <= room).then(|| (self.seconds(&program), all))
        })
    }

    /// Bytes that the Program needs with the first tensors of each class offloaded or recomputed.
    fn needs(&self, at: usize, counts: &[usize; 5]) -> u64 {
        counted(&self.rewritten(at, counts).0, self.slots)
    }

    /// The Program with the first tensors of each class offloaded or recomputed.
    fn rewritten(&self, at: usize, counts: &[usize; 5]) -> (Program, PeerOffload) {
        let choice = self.sets[at].classes.first(counts, PeerOffload::nothing(self.program.peer, self.medium));
        (rewritten(self.program, Some(&self.waiting), &choice), choice)
    }

    /// Seconds of the computing thread for the operators and moves of the whole step.
    fn seconds(&self, program: &Program) -> f64 {
        let moving =
            |direction, medium, tensor| self.device.move_seconds(direction, medium, program.bytes(tensor) as f64);
        let seconds = program.instructions.iter().map(|i| {
            let seconds = match *i {
                Instruction::Run { node, .. } => self.times.get(&node).copied().unwrap_or(0.0),
                Instruction::Offload { tensor, to } => moving(CopyDirection::Download, to, tensor),
                Instruction::Load { tensor, from } => moving(CopyDirection::Upload, from, tensor),
                _ => 0.0,
            };
            if i.micro_batch().is_some() { self.repeats * seconds } else { seconds }
        });
        seconds.sum()
    }
}

/// The instructions during which tensors are away, and their bytes.
type Away = Vec<(Range<usize>, i64)>;

/// The times in which each tensor could be away.
struct Ranges {
    /// Bytes while each instruction runs, with those that stay from step to step, and nothing away.
    most: Vec<i64>,
    away: HashMap<(Kind, String), Away>,
}

/// An estimate of the bytes that a Program holds.
struct Profile {
    most: Vec<i64>,
    /// By class and candidate.
    away: [Vec<Away>; 5],
}

impl Ranges {
    fn new(program: &Program, activations: &Activations<'_>, slots: usize) -> Self {
        let kept = program.kept_bytes(slots) as i64;
        let mut memory = Memory::new(program);
        let most: Vec<i64> = (0..program.instructions.len()).map(|at| kept + memory.step(at) as i64).collect();
        let mut away: HashMap<(Kind, String), Vec<_>> = HashMap::new();
        for (tensor, gaps) in all_gaps(program, &activations.backward, slots) {
            let kind = match tensor {
                Address::Value { .. } => Kind::Activation,
                Address::Part { .. } | Address::Gradient { .. } => Kind::Gradient,
                Address::Held { .. } => Kind::Parameter,
                Address::OptimizerState { slot, .. } => Kind::State(slot as usize),
                Address::BufferAfter { .. } => continue,
            };
            let bytes = program.bytes(tensor) as i64;
            let ranges = gaps.into_iter().map(|range| (range, bytes));
            away.entry((kind, program.name(tensor.value()))).or_default().extend(ranges);
        }
        Self { most, away }
    }

    fn profile(&self, classes: &Classes) -> Profile {
        let of = |candidate: &Candidate| {
            // What is computed again is away for as long as what is moved.
            let kind = if candidate.what == Kind::Recomputed { Kind::Activation } else { candidate.what };
            self.away.get(&(kind, candidate.name.clone())).cloned().unwrap_or_default()
        };
        let away = classes.0.each_ref().map(|class| class.iter().map(of).collect());
        Profile { most: self.most.clone(), away }
    }
}

impl Profile {
    /// The most bytes held at once if the first candidates of each class are away whenever they can be. What backward
    /// computes again takes some memory, too, which is not counted.
    fn estimate(&self, counts: &[usize; 5]) -> i64 {
        let mut change = vec![0; self.most.len() + 1];
        let chosen = self.away.iter().zip(counts).flat_map(|(class, count)| class[..*count].iter().flatten());
        for (range, bytes) in chosen {
            change[range.start] -= bytes;
            change[range.end] += bytes;
        }
        let mut sum = 0;
        let held = self.most.iter().zip(change).map(|(most, change)| {
            sum += change;
            most + sum
        });
        held.max().unwrap_or(0)
    }
}

/// The least number that satisfies `enough`, or `most` if no smaller one does. If a number satisfies it, so do all
/// larger ones.
fn least(most: usize, enough: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = (low + high) / 2;
        if enough(middle) { high = middle } else { low = middle + 1 }
    }
    low
}

/// The tensors that a peer may offload or recompute, in five classes: activations that are recomputed in less time than
/// state takes to move; optimizer state that is moved; other activations, moved or recomputed; gradients; parameters.
/// The cheapest come first in each class, and the largest among those that cost the same.
struct Classes([Vec<Candidate>; 5]);

struct Candidate {
    name: String,
    what: Kind,
    bytes: u64,
    /// Seconds of a step for a byte that is saved, to compare activations.
    rate: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Kind {
    Recomputed,
    /// Optimizer state in this slot.
    State(usize),
    Activation,
    Gradient,
    Parameter,
}

impl Classes {
    /// `again` has the activations that may be computed again. It begins with how often an activation is made in a step
    /// for each time that its bytes are kept at once.
    fn new(program: &Program, device: &Device, medium: Medium, slots: usize, again: (f64, &[&Recomputed])) -> Self {
        let of = |v| (program.name(v), program.values.get(&v).map_or(0, |v| v.ty.bytes() as u64));
        let owned: Vec<_> = program.owned().map(|(parameter, _)| of(parameter)).collect();
        let state = (0..slots).flat_map(|slot| owned.iter().cloned().map(move |of| (Kind::State(slot), of)));
        let summed = program.reductions.keys().map(|v| (Kind::Gradient, of(*v)));
        let held = program.holdings.iter().filter(|h| program.reductions.contains_key(&h.value));
        let parameters = held.map(|h| (Kind::Parameter, of(h.value)));
        let candidates = |tensors: &mut dyn Iterator<Item = (Kind, (String, u64))>| {
            let all = tensors.map(|(what, (name, bytes))| Candidate { name, what, bytes, rate: 0.0 });
            sorted(all.filter(|c| c.bytes >= MIN_BYTES).collect())
        };
        let (cheap, dear) = activation_candidates(program, device, medium, again);
        let state = candidates(&mut { state });
        Self([cheap, state, dear, candidates(&mut { summed }), candidates(&mut { parameters })])
    }

    /// How many tensors of each class are enough; `None` if all of them are not.
    fn least(&self, fits: impl Fn(&[usize; 5]) -> bool) -> Option<[usize; 5]> {
        let all = self.0.each_ref().map(Vec::len);
        // Takes so many tensors in all, class by class.
        let prefix = |mut left: usize| {
            all.map(|len| {
                let count = len.min(left);
                left -= count;
                count
            })
        };
        let needed = least(all.iter().sum(), |count| fits(&prefix(count)));
        let mut counts = prefix(needed);
        if !fits(&counts) {
            return None;
        }
        // Then fewer tensors of the other classes may be enough. The dearest class is reduced first.
        for class in DEAREST_FIRST {
            counts[class] = least(counts[class], |count| {
                let mut fewer = counts;
                fewer[class] = count;
                fits(&fewer)
            });
        }
        Some(counts)
    }

    /// The first candidates of each class.
    fn first(&self, counts: &[usize; 5], mut offload: PeerOffload) -> PeerOffload {
        for Candidate { name, what, .. } in self.0.iter().zip(counts).flat_map(|(class, count)| &class[..*count]) {
            let names = match *what {
                Kind::Recomputed => &mut offload.recomputed,
                Kind::State(slot) => {
                    let slots = offload.optimizer.len().max(slot + 1);
                    offload.optimizer.resize(slots, BTreeSet::new());
                    &mut offload.optimizer[slot]
                }
                Kind::Activation => &mut offload.activations,
                Kind::Gradient => &mut offload.gradients,
                Kind::Parameter => &mut offload.parameters,
            };
            names.insert(name.clone());
        }
        offload
    }
}

/// The order of names makes plans deterministic.
fn sorted(mut candidates: Vec<Candidate>) -> Vec<Candidate> {
    candidates.sort_by(|a, b| {
        let dearer = a.rate.total_cmp(&b.rate);
        dearer.then(b.bytes.cmp(&a.bytes)).then_with(|| (&a.name, a.what).cmp(&(&b.name, b.what)))
    });
    candidates
}

/// The activations that a peer may offload or recompute: those that cost less than to move as many bytes of state, and
/// the others. Each activation is moved or recomputed, whichever takes less time.
fn activation_candidates(
    program: &Program,
    device: &Device,
    medium: Medium,
    (times_per_byte, again): (f64, &[&Recomputed]),
) -> (Vec<Candidate>, Vec<Candidate>) {
    // Seconds for a byte of a tensor's way out and back.
    let moving = |bytes: u64| {
        let seconds = |direction| device.move_seconds(direction, medium, bytes as f64);
        (seconds(CopyDirection::Download) + seconds(CopyDirection::Upload)) / bytes as f64
    };
    let movable = activations(program).into_iter().filter(|(_, bytes)| *bytes >= MIN_BYTES);
    let moved = movable.map(|(name, bytes)| {
        let rate = moving(bytes) * times_per_byte;
        (name.clone(), Candidate { name, what: Kind::Activation, bytes, rate })
    });
    let mut candidates: BTreeMap<String, Candidate> = moved.collect();
    for again in again {
        let (name, bytes, rate) = (again.name.clone(), again.bytes, again.rate() * times_per_byte);
        if candidates.get(&name).is_none_or(|moved| rate < moved.rate) {
            candidates.insert(name.clone(), Candidate { name, what: Kind::Recomputed, bytes, rate });
        }
    }
    let cheap = |c: &Candidate| c.what == Kind::Recomputed && c.rate < moving(c.bytes);
    let (cheap, dear) = candidates.into_values().partition(cheap);
    (sorted(cheap), sorted(dear))
}
