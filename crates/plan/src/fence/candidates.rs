//! From a graph to a chain: where it may be cut, and what lies between two cuts.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::{Graph, NodeId, Phase, TrainGraph, ValueKind};

use super::problem::{Chain, Input, Message, Problem, Seconds, Tie, prefix};
use crate::{Device, Optimizer, Work, message_bytes};

/// A graph as a chain of atoms.
#[derive(Debug, Clone)]
pub(crate) struct Candidates {
    /// By forward node: its atom.
    pub(crate) atom_of: Vec<u32>,
    /// The chain, with seconds by class of device.
    pub(crate) chain: Chain,
}

/// Devices that take the same time for everything, as one class: the class of each, and a device of each class.
pub(crate) fn classes(devices: &[Device]) -> (Vec<u32>, Vec<&Device>) {
    let mut kinds: Vec<&Device> = Vec::new();
    let class =
        |d: &'_ Device, k: &Device| (d.rates, d.slowdown) == (k.rates, k.slowdown) && d.operators == k.operators;
    let of = devices.iter().map(|d| {
        let at = kinds.iter().position(|k| class(d, k)).unwrap_or_else(|| {
            kinds.push(d);
            kinds.len() - 1
        });
        at as u32
    });
    (of.collect(), kinds)
}

impl Candidates {
    /// Every position between nodes, in the order in which they run, is a candidate for a cut, unless a buffer that forward changes is read or made on both sides.
    pub(crate) fn new(forward: &Graph, train: &TrainGraph, optimizer: &Optimizer, kinds: &[&Device]) -> Self {
        let work = Work::new(forward, train, optimizer);
        let atom_of = atoms(forward);
        let atoms = atom_of.iter().max().map_or(0, |a| *a as usize + 1);
        let at = |n: &NodeId| atom_of[n.index()] as usize;
        let distinct = |nodes: &[NodeId]| Vec::from_iter(nodes.iter().map(|n| at(n) as u32).collect::<BTreeSet<_>>());

        let seconds = kinds.iter().map(|device| {
            let mut by = [vec![0.0; atoms], vec![0.0; atoms], vec![0.0; atoms], vec![0.0; atoms]];
            for (n, s) in work.seconds(device).iter().enumerate() {
                let a = atom_of[n] as usize;
                by[0][a] += s.forward;
                by[1][a] += s.backward();
                by[2][a] += s.weight_grad;
            }
            for p in &work.parameters {
                if let Some(owner) = p.readers.first() {
                    by[3][at(owner)] += p.update.iter().map(|(name, cost)| device.seconds(name, cost)).sum::<f64>();
                }
            }
            let [forward, backward, weight, update] = by.map(|v| prefix(&v));
            Seconds { forward, backward, weight, update }
        });
        let seconds = seconds.collect();

        let mut working = vec![0.0_f64; atoms];
        for o in &work.operators {
            let a = at(&o.home);
            working[a] = working[a].max(o.cost.bytes);
        }
        let (mut state, mut parameters) = (vec![0.0; atoms], vec![0.0; atoms]);
        let mut ties = Vec::new();
        for p in &work.parameters {
            let bytes = p.bytes as f64;
            // Every holder has the value, and a sum for each part that it makes; the owner has the optimiser's state besides, and room for the others' parts.
            let mut atoms: BTreeMap<u32, u32> = p.readers.iter().map(|n| (at(n) as u32, 0)).collect();
            for part in &p.parts {
                *atoms.entry(at(part) as u32).or_default() += 1;
            }
            for (i, (&a, &parts)) in atoms.iter().enumerate() {
                let beside = if i == 0 { optimizer.slots().len() as u32 + p.parts.len() as u32 } else { parts };
                state[a as usize] += bytes * f64::from(1 + beside);
            }
            if let Some((&owner, _)) = atoms.first_key_value() {
                parameters[owner as usize] += bytes;
            }
            if atoms.len() > 1 {
                ties.push(Tie { atoms: atoms.into_iter().collect(), bytes });
            }
        }
        for s in &work.state {
            distinct(&s.readers).iter().for_each(|a| state[*a as usize] += s.bytes as f64);
        }
        let (mut kept, mut kept_across) = (vec![0.0; atoms], vec![0.0; atoms + 1]);
        for k in &work.kept {
            let readers = distinct(&k.readers);
            let Some(&first) = readers.first() else { continue };
            kept[first as usize] += k.bytes as f64;
            // A stage that begins behind one reader and holds the next keeps a copy of its own.
            for pair in readers.windows(2) {
                (pair[0] + 1..=pair[1]).for_each(|cut| kept_across[cut as usize] += k.bytes as f64);
            }
        }
        let mut handed_on = vec![0.0; atoms];
        for u in &forward.state_updates {
            if let Some(maker) = forward.producer(u.value) {
                handed_on[at(&maker)] += forward.ty(u.value).bytes() as f64;
            }
        }
        // Later users of an activation and earlier users of a gradient; what a graph has the other way round is waited for all the same.
        let messages = work.flows.iter().flat_map(|f| {
            let maker = at(&f.from) as u32;
            let (earlier, later): (Vec<u32>, Vec<u32>) =
                distinct(&f.to).into_iter().filter(|a| *a != maker).partition(|a| *a < maker);
            let bytes = message_bytes(f.bytes);
            [earlier, later].into_iter().filter(|u| !u.is_empty()).map(move |users| Message { maker, users, bytes })
        });
        let inputs = work.inputs.iter().map(|i| Input { atoms: distinct(&i.readers), bytes: message_bytes(i.bytes) });
        let chain = Chain {
            atoms,
            seconds,
            state: prefix(&state),
            parameters: prefix(&parameters),
            kept: prefix(&kept),
            kept_across,
            working,
            handed_on: prefix(&handed_on),
            messages: messages.collect(),
            ties,
            inputs: inputs.filter(|i| !i.atoms.is_empty()).collect(),
        };
        Self { atom_of, chain }
    }
}

/// By forward node, its atom: nodes in the order in which they run, but what depends on parameters and constants alone right before its first reader.
fn atoms(graph: &Graph) -> Vec<u32> {
    let mut early = vec![true; graph.nodes.len()];
    for (n, node) in graph.nodes.iter().enumerate() {
        early[n] = node.inputs.iter().all(|v| match graph.value(*v).kind {
            ValueKind::Input | ValueKind::RngKey => false,
            ValueKind::Result { node, .. } => early[node.index()],
            _ => true,
        });
    }
    let mut position = vec![u32::MAX; graph.nodes.len()];
    let mut count = 0;
    // Early nodes come when they are asked for, or at the end.
    for wanted in [false, true] {
        for id in graph.node_ids().filter(|n| early[n.index()] == wanted) {
            let mut stack = vec![id];
            while let Some(&n) = stack.last() {
                let operands = graph.node(n).inputs.iter().filter_map(|v| graph.producer(*v));
                match operands.into_iter().find(|p| position[p.index()] == u32::MAX) {
                    Some(missing) => stack.push(missing),
                    None => {
                        if position[n.index()] == u32::MAX {
                            position[n.index()] = count;
                            count += 1;
                        }
                        stack.pop();
                    }
                }
            }
        }
    }
    // What reads or makes a changing buffer's content is one atom, with all between.
    let readers = graph.consumers();
    let mut joined = vec![false; count as usize + 1];
    for u in &graph.state_updates {
        let touching = || {
            let nodes = readers[u.buffer.index()].iter().copied().chain(graph.producer(u.value));
            nodes.filter(|n| graph.node(*n).phase == Phase::Forward).map(|n| position[n.index()] as usize)
        };
        if let (Some(first), Some(last)) = (touching().min(), touching().max()) {
            joined[first + 1..=last].fill(true);
        }
    }
    let mut atom = vec![0; count as usize];
    for p in 1..count as usize {
        atom[p] = atom[p - 1] + u32::from(!joined[p]);
    }
    position.iter().map(|p| atom[*p as usize]).collect()
}

impl Problem {
    /// At most `most` positions for cuts besides the ends, evenly spread over time and memory, each where the least crosses.
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
            // Of several alike the last, which leaves the next a choice.
            cuts.extend((first..at).rev().min_by(|a, b| crossing(a).total_cmp(&crossing(b))));
        }
        cuts.push(atoms);
        cuts
    }
}
