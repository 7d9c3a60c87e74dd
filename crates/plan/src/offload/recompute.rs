//! Activations that backward computes again, instead of having them kept.

use std::collections::{BTreeMap, BTreeSet};

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use fusionllm_graph::{NodeId, Phase, ValueId, ValueKind};
use fusionllm_program::{Bytes, Instruction, Program, storage};

/// Frees the activations of these names after forward, and computes them again where backward needs them. If such an
/// activation is computed from values that are gone, these are computed again as well. `activations` are the program's.
/// Returns the values that are made twice, and those that share their bytes.
pub(super) fn recompute(
    program: &mut Program,
    activations: &Activations<'_>,
    names: &BTreeSet<String>,
) -> HashSet<ValueId> {
    let roots = program.values.keys().filter(|v| names.contains(&program.name(**v)));
    let seeds = roots.flat_map(|root| activations.seeds(*root)).collect();
    let again = activations.closure(seeds);
    if again.is_empty() {
        return HashSet::new();
    }
    let mut writer = Writer { activations, again: &again, present: HashSet::new() };
    let mut instructions = Vec::with_capacity(program.instructions.len());
    for (at, i) in program.instructions.iter().enumerate() {
        if matches!(i, Instruction::Free { .. }) {
            continue;
        }
        if let Some(micro_batch) = i.micro_batch().filter(|m| activations.backward.has(*m, at)) {
            let runs = writer.missing(program, i, micro_batch).into_iter();
            instructions.extend(runs.map(|node| Instruction::Run { node, micro_batch }));
        }
        instructions.push(*i);
    }
    let outputs = |node: &NodeId| program.nodes.get(node).map_or(&[][..], |node| &node.outputs).iter().copied();
    let root = |v: &ValueId| activations.storage.get(v).map(|of| of.root);
    let twice: HashSet<ValueId> = again.iter().flat_map(outputs).filter_map(|v| root(&v)).collect();
    let twice = program.values.keys().copied().filter(|v| root(v).is_some_and(|root| twice.contains(&root))).collect();
    program.instructions = instructions;
    program.insert_frees();
    twice
}

/// By micro-batch: the instruction with which its backward pass begins.
pub(super) struct Backward(BTreeMap<u32, usize>);

impl Backward {
    pub(super) fn new(program: &Program) -> Self {
        let (mut begins, mut seen) = (BTreeMap::new(), HashSet::new());
        for (at, i) in program.instructions.iter().enumerate() {
            // A node that runs again does so for backward.
            if let Instruction::Run { node, micro_batch } = *i
                && (!seen.insert(i) || program.nodes.get(&node).is_some_and(|node| node.phase != Phase::Forward))
            {
                begins.entry(micro_batch).or_insert(at);
            }
        }
        Self(begins)
    }

    /// Whether the instruction at `at` belongs to the backward pass of a micro-batch.
    pub(super) fn has(&self, micro_batch: u32, at: usize) -> bool {
        self.0.get(&micro_batch).is_some_and(|start| at >= *start)
    }
}

/// The activations that forward leaves to backward.
pub(super) struct Activations<'a> {
    program: &'a Program,
    pub(super) backward: Backward,
    /// The values that forward makes and backward reads.
    saved: BTreeSet<ValueId>,
    /// The nodes that can be run again, by result.
    producers: HashMap<ValueId, NodeId>,
    /// Those among them that this peer runs in each micro-batch's forward pass. Replicas run different nodes for
    /// different micro-batches.
    ran: HashSet<(NodeId, u32)>,
    storage: HashMap<ValueId, Bytes>,
    /// By value: the saved values that share its bytes, itself among them. Only values of which all can be computed
    /// again.
    groups: BTreeMap<ValueId, Vec<ValueId>>,
}

impl<'a> Activations<'a> {
    pub(super) fn new(program: &'a Program) -> Self {
        let backward = Backward::new(program);
        let (mut saved, mut producers) = (BTreeSet::new(), HashMap::new());
        let (mut made, mut ran) = (HashSet::new(), HashSet::new());
        for (at, i) in program.instructions.iter().enumerate() {
            let Some(m) = i.micro_batch().filter(|m| backward.0.contains_key(m)) else { continue };
            if !backward.has(m, at) {
                program.values_of(i, |v, _, _| {
                    made.insert((v, m));
                });
                if let Instruction::Run { node: id, .. } = *i
                    && let Some(node) = program.nodes.get(&id).filter(|node| is_pure(program, &node.inputs))
                {
                    producers.extend(node.outputs.iter().map(|v| (*v, id)));
                    ran.insert((id, m));
                }
            } else {
                program.values_of(i, |v, _, _| {
                    if made.contains(&(v, m)) {
                        saved.insert(v);
                    }
                });
            }
        }
        let storage = storage(program);
        let mut groups: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
        for v in &saved {
            if let Some(of) = storage.get(v).filter(|of| !of.stays) {
                groups.entry(of.root).or_default().push(*v);
            }
        }
        groups.retain(|root, saved| producers.contains_key(root) && saved.iter().all(|v| producers.contains_key(v)));
        Self { program, backward, saved, producers, ran, storage, groups }
    }

    /// How often an activation is made in a step for each time that its bytes are kept at once: the number of
    /// micro-batches, over the most of them that wait for backward at once.
    pub(super) fn times_per_byte(&self) -> f64 {
        self.backward.0.len() as f64 / self.most_waiting() as f64
    }

    /// The most micro-batches that wait for backward at once; at least 1.
    pub(super) fn most_waiting(&self) -> usize {
        let mut waiting = BTreeSet::new();
        let mut most = 1;
        for (at, i) in self.program.instructions.iter().enumerate() {
            match i.micro_batch() {
                Some(m) if self.backward.has(m, at) => {
                    waiting.remove(&m);
                }
                Some(m) => {
                    waiting.insert(m);
                }
                None => {}
            }
            most = most.max(waiting.len());
        }
        most
    }

    /// The nodes that make the saved values with these bytes.
    fn seeds(&self, root: ValueId) -> Vec<NodeId> {
        self.groups.get(&root).into_iter().flatten().map(|v| self.producers[v]).collect()
    }

    /// The nodes that must run again so that these can. All that they make is made again, and nothing that shares its
    /// bytes is kept.
    fn closure(&self, seeds: Vec<NodeId>) -> BTreeSet<NodeId> {
        let (mut again, mut left) = (BTreeSet::new(), seeds);
        while let Some(id) = left.pop() {
            let Some(node) = self.program.nodes.get(&id).filter(|_| again.insert(id)) else { continue };
            let gone = node.inputs.iter().filter(|v| !self.saved.contains(v));
            left.extend(gone.filter_map(|v| self.producers.get(v)));
            let roots = node.outputs.iter().filter_map(|v| self.storage.get(v)).map(|of| of.root);
            left.extend(roots.filter(|root| node.outputs.contains(root)).flat_map(|root| self.seeds(root)));
        }
        again
    }

    /// By node that can run again: the others that read what it makes, or make what it reads.
    fn neighbours(&self) -> HashMap<NodeId, Vec<NodeId>> {
        let mut neighbours: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
        let nodes: BTreeSet<NodeId> = self.producers.values().copied().collect();
        for id in nodes {
            for v in self.program.nodes.get(&id).map_or(&[][..], |node| &node.inputs) {
                if let Some(producer) = self.producers.get(v) {
                    neighbours.entry(id).or_default().push(*producer);
                    neighbours.entry(*producer).or_default().push(id);
                }
            }
        }
        neighbours
    }

    /// Bytes that a node makes. A view has none of its own.
    fn made_bytes(&self, node: NodeId) -> u64 {
        let outputs = self.program.nodes.get(&node).map_or(&[][..], |node| &node.outputs);
        let own = outputs.iter().filter_map(|v| Some((v, self.storage.get(v)?))).filter(|(v, of)| of.root == **v);
        own.map(|(_, of)| of.own).sum()
    }

    /// The activations that can be computed again, each with its bytes and with the seconds of its nodes. The one with
    /// the fewest seconds for a byte comes first. `seconds` has the seconds of each node.
    pub(super) fn candidates(&self, seconds: &HashMap<NodeId, f64>, min_bytes: u64) -> Vec<Recomputed> {
        let mut found: Vec<Recomputed> = Vec::new();
        for root in self.groups.keys() {
            let bytes = self.storage.get(root).map_or(0, |of| of.own);
            if bytes >= min_bytes {
                let nodes = self.closure(self.seeds(*root));
                let seconds = nodes.iter().filter_map(|node| seconds.get(node)).sum();
                found.push(Recomputed { name: self.program.name(*root), bytes, seconds, nodes });
            }
        }
        found.sort_by(|a, b| a.rate().total_cmp(&b.rate()).then_with(|| a.name.cmp(&b.name)));
        found
    }

    /// Returns a part of the candidates, all of which may be computed again.
    ///
    /// Backward computes all activations that depend on each other at once, and then holds all of them. If those were
    /// all activations, nothing would be saved. So activations that depend on each other take at most `spread/√n` of
    /// the bytes of all `n` activations (Chen et al., 2016).
    pub(super) fn spread<'c>(&self, candidates: &'c [Recomputed], spread: f64) -> Vec<&'c Recomputed> {
        let total: u64 = candidates.iter().map(|c| c.bytes).sum();
        let limit = (spread * total as f64 / (candidates.len().max(1) as f64).sqrt()) as u64;
        let neighbours = self.neighbours();
        // Nodes that depend on each other, and the group of each node.
        let mut groups: Vec<BTreeSet<NodeId>> = Vec::new();
        let mut group_of: HashMap<NodeId, usize> = HashMap::new();
        let admit = |candidate: &&Recomputed| {
            let around = candidate.nodes.iter().filter_map(|node| neighbours.get(node)).flatten();
            let near: BTreeSet<usize> =
                candidate.nodes.iter().chain(around).filter_map(|node| group_of.get(node).copied()).collect();
            let nodes = near.iter().flat_map(|group| &groups[*group]).chain(&candidate.nodes);
            let all: BTreeSet<NodeId> = nodes.copied().collect();
            let fits = all.iter().map(|node| self.made_bytes(*node)).sum::<u64>() <= limit;
            if fits {
                group_of.extend(all.iter().map(|node| (*node, groups.len())));
                groups.push(all);
            }
            fits
        };
        candidates.iter().filter(admit).collect()
    }
}

/// An activation that can be computed again.
pub(super) struct Recomputed {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// The seconds of its nodes for one micro-batch.
    seconds: f64,
    nodes: BTreeSet<NodeId>,
}

impl Recomputed {
    /// Seconds for a byte of a micro-batch.
    pub(super) fn rate(&self) -> f64 {
        self.seconds / self.bytes as f64
    }
}

/// Whether a node computes the same result whenever it runs in a pass. One that reads a buffer may not, because buffers
/// change.
fn is_pure(program: &Program, inputs: &[ValueId]) -> bool {
    let buffer = |v: &ValueId| program.values.get(v).is_some_and(|v| matches!(v.kind, ValueKind::Buffer(_)));
    !inputs.iter().any(buffer)
}

/// Writes the backward passes.
struct Writer<'a> {
    activations: &'a Activations<'a>,
    /// The nodes of the graph that are to run again, just before an instruction of backward needs their results.
    again: &'a BTreeSet<NodeId>,
    /// The values that the backward passes have made so far, by micro-batch.
    present: HashSet<(ValueId, u32)>,
}

impl Writer<'_> {
    /// The nodes to run again before an instruction, in order.
    fn missing(&mut self, program: &Program, i: &Instruction, micro_batch: u32) -> BTreeSet<NodeId> {
        // The results of the instruction itself need not be made before it.
        if let Instruction::Run { node, .. } = i
            && let Some(node) = program.nodes.get(node)
        {
            self.present.extend(node.outputs.iter().map(|v| (*v, micro_batch)));
        }
        let mut runs = BTreeSet::new();
        let mut left = Vec::new();
        program.values_of(i, |v, _, _| left.push(v));
        while let Some(v) = left.pop() {
            let Some(id) = self.activations.producers.get(&v).filter(|id| self.again.contains(id)) else { continue };
            if self.activations.ran.contains(&(*id, micro_batch))
                && let Some(node) = program.nodes.get(id)
                && self.present.insert((v, micro_batch))
                && runs.insert(*id)
            {
                self.present.extend(node.outputs.iter().map(|v| (*v, micro_batch)));
                left.extend(&node.inputs);
            }
        }
        runs
    }
}
