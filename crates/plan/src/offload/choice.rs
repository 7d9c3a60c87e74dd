//! The choice of what leaves a device's memory.

use std::collections::BTreeSet;

use super::PeerOffload;
use super::rewrite::{activations, rewrite};
use crate::cost::{Cluster, Device};
use crate::error::PlanError;
use crate::optimizer::Optimizer;
use crate::program::{Medium, Program};
use crate::simulate::{SimulateOptions, Simulation, simulate};

/// Smaller tensors stay in memory. Moving one takes a call of the system, however small it is.
const MIN_BYTES: u64 = 4 << 10;

/// How often the choice is made again with less memory, if the simulated step needs more than was counted.
const MAX_ATTEMPTS: usize = 4;

/// Programs of which some offload tensors.
pub(crate) struct Offloaded {
    /// What peers offload, by peer.
    pub(crate) choices: Vec<PeerOffload>,
    /// The Programs.
    pub(crate) programs: Vec<Program>,
    /// Their simulated step.
    pub(crate) simulation: Simulation,
}

/// The share of a device's memory that a plan may use where it offloads. It would use all of it otherwise. But allocators
/// round sizes up, mimalloc by up to an eighth, and predictions of memory are off by a few percent.
const MEMORY_SHARE: f64 = 0.85;

/// Has the peers that lack memory offload as much as they must. `simulation` is the simulated step of the Programs, in
/// which nothing is offloaded. Returns `None` if some peer lacks memory even so.
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
            let Some(choice) = choose(program, device, slots, *room) else { return Ok(None) };
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

/// What a peer offloads so that its tensors take at most `room` bytes of memory; `None` if they need more even so.
///
/// The bytes that save most for the time they take go first. Optimizer state is moved once in a step, and activations once
/// for every micro-batch. A gradient leaves and returns for every micro-batch, to free the bytes of one. A parameter is
/// read even more often.
fn choose(program: &Program, device: &Device, slots: usize, room: u64) -> Option<PeerOffload> {
    let medium = if device.host_link.is_some() { Medium::Host } else { Medium::Disk };
    let classes = Classes::new(program, slots);
    let fits = |counts: &[usize; 4]| {
        let mut moved = program.clone();
        rewrite(&mut moved, &classes.first(counts, PeerOffload::nothing(program.peer, medium)));
        counted(&moved, slots) <= room
    };
    let all = classes.0.each_ref().map(Vec::len);
    // As many as are needed, class by class.
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
    // Not all of the earlier classes need be away. Activations come first, since they are moved most often.
    for class in [1, 0, 2] {
        counts[class] = least(counts[class], |count| {
            let mut fewer = counts;
            fewer[class] = count;
            fits(&fewer)
        });
    }
    Some(classes.first(&counts, PeerOffload::nothing(program.peer, medium)))
}

/// The least number, at most `most`, that satisfies `enough`, which larger ones do as well; `most` if none does.
fn least(most: usize, enough: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = (low + high) / 2;
        if enough(middle) { high = middle } else { low = middle + 1 }
    }
    low
}

/// The tensors that may be offloaded: optimizer state, activations, gradients, parameters. The largest come first in each
/// class.
struct Classes([Vec<Candidate>; 4]);

struct Candidate {
    name: String,
    /// Of optimizer state.
    slot: usize,
    bytes: u64,
}

impl Classes {
    fn new(program: &Program, slots: usize) -> Self {
        let of = |v| (program.name(v), program.values.get(&v).map_or(0, |v| v.ty.bytes() as u64));
        let owned: Vec<_> = program.owned().map(|(_, r)| of(r.parameter)).collect();
        let state = (0..slots).flat_map(|slot| owned.iter().map(move |(name, bytes)| (slot, name.clone(), *bytes)));
        let summed = program.reductions.iter().map(|r| of(r.parameter));
        let trained: BTreeSet<_> = program.reductions.iter().map(|r| r.parameter).collect();
        let parameters = program.holdings.iter().filter(|h| trained.contains(&h.value)).map(|h| of(h.value));
        let plain = |(name, bytes)| (0, name, bytes);
        let candidates = |tensors: Vec<(usize, String, u64)>| {
            let large = tensors.into_iter().filter(|(.., bytes)| *bytes >= MIN_BYTES);
            let mut large: Vec<Candidate> = large.map(|(slot, name, bytes)| Candidate { name, slot, bytes }).collect();
            // The order of names makes plans deterministic.
            large.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| (&a.name, a.slot).cmp(&(&b.name, b.slot))));
            large
        };
        Self([
            candidates(state.collect()),
            candidates(activations(program).into_iter().map(plain).collect()),
            candidates(summed.map(plain).collect()),
            candidates(parameters.map(plain).collect()),
        ])
    }

    /// The first tensors of each class.
    fn first(&self, counts: &[usize; 4], nothing: PeerOffload) -> PeerOffload {
        let [state, activations, gradients, parameters] = &self.0;
        let names = |class: &[Candidate], count: usize| class[..count].iter().map(|c| c.name.clone()).collect();
        let mut offload = PeerOffload {
            activations: names(activations, counts[1]),
            gradients: names(gradients, counts[2]),
            parameters: names(parameters, counts[3]),
            ..nothing
        };
        for Candidate { name, slot, .. } in &state[..counts[0]] {
            if offload.optimizer.len() <= *slot {
                offload.optimizer.resize(slot + 1, BTreeSet::new());
            }
            offload.optimizer[*slot].insert(name.clone());
        }
        offload
    }
}
