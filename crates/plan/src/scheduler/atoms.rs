//! A graph as a chain of atoms: where it may be cut, and what lies between two cuts.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::{Graph, NodeId, Phase, TrainGraph, ValueId, ValueKind};
use fusionllm_program::Optimizer;

use crate::codecs::{Compression, coded_values};
use crate::cost::{Device, Work, message_bytes};
use crate::search::{Chain, Input, Message, Seconds, Tie, TieUser, prefix_sums};

/// A graph as a chain of atoms.
#[derive(Debug, Clone)]
pub(super) struct ModelChain {
    /// By forward node: its atom.
    pub(super) atom_of: Vec<u32>,
    /// The chain. Its seconds are by class of device.
    pub(super) chain: Chain,
}

/// The state that stays on a device from step to step.
struct State {
    /// By atom: bytes of parameters, gradients, optimizer state, buffers and constants.
    bytes: Vec<f64>,
    /// By atom: bytes of the parameters that it owns.
    parameters: Vec<f64>,
    ties: Vec<Tie>,
}

/// The tensors that are saved from forward to backward.
struct Saved {
    /// By atom: bytes that it saves.
    by_atom: Vec<f64>,
    /// By cut: bytes from before the cut that atoms after it save.
    across: Vec<f64>,
}

impl ModelChain {
    /// A cut may fall between any two nodes, in the order in which they run. The exception is a buffer that forward
    /// changes: all nodes that read or compute it stay together. Messages are as small as `rule` makes them.
    pub(super) fn new(
        forward: &Graph,
        train: &TrainGraph,
        optimizer: &Optimizer,
        classes: &[&Device],
        rule: Option<Compression>,
    ) -> Self {
        let atom_of = atoms(forward);
        let atoms = atom_of.iter().max().map_or(0, |a| *a as usize + 1);
        let builder = Builder { work: Work::new(forward, train, optimizer), atom_of: &atom_of, atoms };
        let state = builder.state(optimizer);
        let saved = builder.saved();
        let chain = Chain {
            atoms,
            seconds: classes.iter().map(|device| builder.seconds(device)).collect(),
            state: prefix_sums(&state.bytes),
            parameters: prefix_sums(&state.parameters),
            kept: prefix_sums(&saved.by_atom),
            kept_across: saved.across,
            working: builder.working(),
            handed_on: prefix_sums(&builder.handed_on(forward)),
            messages: builder.messages(train, rule),
            ties: state.ties,
            inputs: builder.inputs(),
        };
        Self { atom_of, chain }
    }
}

struct Builder<'a> {
    work: Work,
    atom_of: &'a [u32],
    atoms: usize,
}

impl Builder<'_> {
    fn atom(&self, node: NodeId) -> u32 {
        self.atom_of[node.index()]
    }

    /// The atoms of some nodes, ascending, each once.
    fn distinct(&self, nodes: &[NodeId]) -> Vec<u32> {
        Vec::from_iter(nodes.iter().map(|n| self.atom(*n)).collect::<BTreeSet<_>>())
    }

    fn seconds(&self, device: &Device) -> Seconds {
        let zeros = || vec![0.0; self.atoms];
        let (mut forward, mut backward, mut weight, mut update) = (zeros(), zeros(), zeros(), zeros());
        for (n, s) in self.work.seconds(device).iter().enumerate() {
            let a = self.atom_of[n] as usize;
            forward[a] += s.forward;
            backward[a] += s.backward();
            weight[a] += s.weight_grad;
        }
        for p in &self.work.parameters {
            if let Some(owner) = p.readers.first() {
                let seconds = p.update.iter().map(|o| o.seconds(device)).sum::<f64>();
                update[self.atom(*owner) as usize] += seconds;
            }
        }
        Seconds {
            forward: prefix_sums(&forward),
            backward: prefix_sums(&backward),
            weight: prefix_sums(&weight),
            update: prefix_sums(&update),
        }
    }

    fn state(&self, optimizer: &Optimizer) -> State {
        let (mut bytes, mut parameters) = (vec![0.0; self.atoms], vec![0.0; self.atoms]);
        let mut ties = Vec::new();
        for p in &self.work.parameters {
            let size = p.bytes as f64;
            // Every holder has the value, and a sum for each part that it makes. The owner also has the optimizer
            // state and space for the others' parts.
            let mut parts: BTreeMap<u32, u32> = p.readers.iter().map(|n| (self.atom(*n), 0)).collect();
            for part in &p.parts {
                *parts.entry(self.atom(*part)).or_default() += 1;
            }
            for (i, (&a, &made)) in parts.iter().enumerate() {
                let beside = if i == 0 { optimizer.slots().len() as u32 + p.parts.len() as u32 } else { made };
                bytes[a as usize] += size * f64::from(1 + beside);
            }
            if let Some((&owner, _)) = parts.first_key_value() {
                parameters[owner as usize] += size;
            }
            if parts.len() > 1 {
                let users = parts.into_iter().map(|(atom, parts)| TieUser { atom, parts });
                ties.push(Tie { users: users.collect(), bytes: size });
            }
        }
        for s in &self.work.state {
            self.distinct(&s.readers).iter().for_each(|a| bytes[*a as usize] += s.bytes as f64);
        }
        State { bytes, parameters, ties }
    }

    fn saved(&self) -> Saved {
        let mut saved = Saved { by_atom: vec![0.0; self.atoms], across: vec![0.0; self.atoms + 1] };
        for k in &self.work.kept {
            let readers = self.distinct(&k.readers);
            let Some(&first) = readers.first() else { continue };
            saved.by_atom[first as usize] += k.bytes as f64;
            // A stage that begins between two readers keeps a copy of its own.
            for pair in readers.windows(2) {
                (pair[0] + 1..=pair[1]).for_each(|cut| saved.across[cut as usize] += k.bytes as f64);
            }
        }
        saved
    }

    fn working(&self) -> Vec<f64> {
        let mut working = vec![0.0_f64; self.atoms];
        for o in &self.work.operators {
            let a = self.atom(o.home) as usize;
            working[a] = working[a].max(o.cost.bytes);
        }
        working
    }

    fn handed_on(&self, forward: &Graph) -> Vec<f64> {
        let mut handed_on = vec![0.0; self.atoms];
        for u in &forward.state_updates {
            if let Some(maker) = forward.producer(u.value) {
                handed_on[self.atom(maker) as usize] += forward.ty(u.value).bytes() as f64;
            }
        }
        handed_on
    }

    /// Activations to later atoms and gradients to earlier ones. A value with users on both sides is two messages.
    fn messages(&self, train: &TrainGraph, rule: Option<Compression>) -> Vec<Message> {
        let coded = coded_values(train);
        let ratio = |v: ValueId| {
            let rule = rule.filter(|_| coded.contains(&v));
            rule.map_or(1.0, |rule| rule.message_ratio(train.graph.ty(v)))
        };
        let messages = self.work.flows.iter().flat_map(|f| {
            let maker = self.atom(f.from);
            let (earlier, later): (Vec<u32>, Vec<u32>) =
                self.distinct(&f.to).into_iter().filter(|a| *a != maker).partition(|a| *a < maker);
            let bytes = message_bytes(f.bytes) / ratio(f.value);
            [earlier, later].into_iter().filter(|u| !u.is_empty()).map(move |users| Message { maker, users, bytes })
        });
        messages.collect()
    }

    fn inputs(&self) -> Vec<Input> {
        let inputs = self.work.inputs.iter();
        let inputs = inputs.map(|i| Input { atoms: self.distinct(&i.readers), bytes: message_bytes(i.bytes) });
        inputs.filter(|i| !i.atoms.is_empty()).collect()
    }
}

/// By forward node: its atom. Nodes come in the order in which they run. A node that depends only on parameters and
/// constants comes right before its first reader.
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
    // Early nodes come when they are needed, or at the end.
    for wanted in [false, true] {
        for id in graph.node_ids().filter(|n| early[n.index()] == wanted) {
            // Nodes that wait for an operand, each with the index of the operand to look at next.
            let mut stack = vec![(id, 0)];
            while let Some((n, next)) = stack.last_mut() {
                let n = *n;
                if let Some(v) = graph.node(n).inputs.get(*next) {
                    *next += 1;
                    let missing = graph.producer(*v).filter(|p| position[p.index()] == u32::MAX);
                    stack.extend(missing.map(|p| (p, 0)));
                    continue;
                }
                if position[n.index()] == u32::MAX {
                    position[n.index()] = count;
                    count += 1;
                }
                stack.pop();
            }
        }
    }
    // All nodes that read or compute a changing buffer's content form one atom, with all nodes between them.
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
