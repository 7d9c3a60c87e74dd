//! The choice of the tensors that leave a device's memory, and of those that are computed again.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fusionllm_graph::NodeId;
use fusionllm_program::{Instruction, Medium, Optimizer, Program};

use super::PeerOffload;
use super::recompute::{Activations, Recomputed};
use super::rewrite::{activations, rewrite};
use crate::cost::{Cluster, CopyDirection, Device};
use crate::error::PlanError;
use crate::simulate::{SimulateOptions, Simulation, node_seconds, simulate};

/// The least bytes of a tensor that is offloaded. Smaller ones stay in memory, because moving one takes a system call,
/// however small it is.
const MIN_BYTES: u64 = 4 << 10;

/// How often the choice is made again with less memory, if the simulated step needs more than was counted.
const MAX_ATTEMPTS: usize = 4;

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

/// The share of a device's memory that a plan may use where it offloads. Such a plan would use all of its memory
/// otherwise. But allocators round sizes up, mimalloc by up to an eighth, and predictions of memory are off by a few
/// percent.
const MEMORY_SHARE: f64 = 0.85;

/// Lets each peer that lacks memory offload and recompute as many tensors as it must. `simulation` is the simulated
/// step of the Programs, in which nothing is offloaded. Returns `None` if some peer lacks memory even so.
pub(crate) fn offload(
    programs: &[Program],
    simulation: &Simulation,
    cluster: &Cluster,
    optimizer: Optimizer,
) -> Result<Option<Offloaded>, PlanError> {
    let slots = optimizer.slots().len();
    let excess = |simulation: &Simulation| -> Vec<u64> {
        let devices = simulation.peers.iter().zip(cluster.devices());
        let room = |device: &Device| (MEMORY_SHARE * device.memory as f64) as u64;
        devices.map(|(load, device)| load.peak_bytes.saturating_sub(room(device))).collect()
    };
    let mut missing = excess(simulation);
    let mut rooms: Vec<u64> = programs.iter().map(|p| counted(p, slots)).collect();
    for _ in 0..MAX_ATTEMPTS {
        let (mut moved, mut choices) = (programs.to_vec(), Vec::new());
        for (((program, room), missing), device) in
            moved.iter_mut().zip(&mut rooms).zip(&missing).zip(cluster.devices())
        {
            *room = room.saturating_sub(*missing);
            if counted(program, slots) <= *room {
                continue;
            }
            let Some(choice) = choose(program, device, slots, *room)? else { return Ok(None) };
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

/// Chooses the tensors that a peer offloads or recomputes, so that its tensors take at most `room` bytes of memory.
/// Returns `None` if they need more even so.
///
/// The bytes that cost least time go first. Optimizer state is moved once in a step, and activations are moved or
/// computed again for every micro-batch. A gradient leaves and returns for every micro-batch, to free the bytes of one.
/// A parameter is read even more often.
fn choose(program: &Program, device: &Device, slots: usize, room: u64) -> Result<Option<PeerOffload>, PlanError> {
    let medium = if device.host_link.is_some() { Medium::Host } else { Medium::Disk };
    let (waiting, times) = (Activations::new(program), node_seconds(program, device)?);
    let again = waiting.candidates(&times, MIN_BYTES);
    let mut best: Option<(f64, PeerOffload)> = None;
    let mut sets: Vec<_> = SPREADS.map(|spread| waiting.spread(&again, spread)).into();
    sets.dedup_by_key(|again| again.len());
    for again in sets {
        let classes = Classes::new(program, device, medium, slots, (&waiting, &again));
        let rewritten = |counts: &[usize; 5]| {
            let choice = classes.first(counts, PeerOffload::nothing(program.peer, medium));
            let mut program = program.clone();
            rewrite(&mut program, &choice);
            (program, choice)
        };
        let Some(counts) = classes.least(|counts| counted(&rewritten(counts).0, slots) <= room) else { continue };
        let (program, choice) = rewritten(&counts);
        let takes = seconds(&program, device, &times);
        if best.as_ref().is_none_or(|(least, _)| takes < *least) {
            best = Some((takes, choice));
        }
    }
    Ok(best.map(|(_, choice)| choice))
}

/// Seconds of the computing thread for operators and moves.
fn seconds(program: &Program, device: &Device, times: &HashMap<NodeId, f64>) -> f64 {
    let moving = |direction, medium, tensor| device.move_seconds(direction, medium, program.bytes(tensor) as f64);
    let seconds = program.instructions.iter().map(|i| match *i {
        Instruction::Run { node, .. } => times.get(&node).copied().unwrap_or(0.0),
        Instruction::Offload { tensor, to } => moving(CopyDirection::Download, to, tensor),
        Instruction::Load { tensor, from } => moving(CopyDirection::Upload, from, tensor),
        _ => 0.0,
    });
    seconds.sum()
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

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Recomputed,
    /// Optimizer state in this slot.
    State(usize),
    Activation,
    Gradient,
    Parameter,
}

impl Classes {
    /// `again` has the activations that wait for backward, and those of them that may be computed again.
    fn new(
        program: &Program,
        device: &Device,
        medium: Medium,
        slots: usize,
        again: (&Activations<'_>, &[&Recomputed]),
    ) -> Self {
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
        for class in [2, 1, 3, 0] {
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
    (waiting, again): (&Activations<'_>, &[&Recomputed]),
) -> (Vec<Candidate>, Vec<Candidate>) {
    // Seconds for a byte of a tensor's way out and back.
    let moving = |bytes: u64| {
        let seconds = |direction| device.move_seconds(direction, medium, bytes as f64);
        (seconds(CopyDirection::Download) + seconds(CopyDirection::Upload)) / bytes as f64
    };
    let movable = activations(program).into_iter().filter(|(_, bytes)| *bytes >= MIN_BYTES);
    let moved = movable.map(|(name, bytes)| {
        let rate = moving(bytes) * waiting.times_per_byte();
        (name.clone(), Candidate { name, what: Kind::Activation, bytes, rate })
    });
    let mut candidates: BTreeMap<String, Candidate> = moved.collect();
    for again in again {
        let (name, bytes, rate) = (again.name.clone(), again.bytes, again.rate() * waiting.times_per_byte());
        if candidates.get(&name).is_none_or(|moved| rate < moved.rate) {
            candidates.insert(name.clone(), Candidate { name, what: Kind::Recomputed, bytes, rate });
        }
    }
    let cheap = |c: &Candidate| c.what == Kind::Recomputed && c.rate < moving(c.bytes);
    let (cheap, dear) = candidates.into_values().partition(cheap);
    (sorted(cheap), sorted(dear))
}
