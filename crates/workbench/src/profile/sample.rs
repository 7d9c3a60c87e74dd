//! The part of a step whose operators are measured: a few of each kind, as a Program that needs no peers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::iter::successors;

use fusionllm_graph::{Graph, Node, NodeId, Phase, TrainGraph, Value, ValueId, ValueKind};
use fusionllm_plan::{node_signature, signature};
use fusionllm_program::{Holding, Instruction, PeerId, Program};

use crate::model::Model;

/// The most operators of one signature that are measured in a model, because its layers are alike.
const SAMPLES_PER_SIGNATURE: usize = 4;
/// Bytes that wait for backward while a model is measured: more than caches hold.
const WAITING: usize = 64 << 20;
/// The most models of a job. If there are more, joiners measure none of their operators.
const MAX_SAMPLES: usize = 3;
/// The most operators that a sample for joiners has, because the broker takes only a few thousand times from each
/// joiner.
const MAX_OPERATORS: usize = 1000;

/// The Programs by which joiners measure operators of a job's models. There are none if the planner has many models to
/// choose from. A model with too many operators has none either.
pub fn samples(models: &[Model], batch: usize) -> Vec<Program> {
    if models.len() > MAX_SAMPLES {
        return Vec::new();
    }
    let all = models.iter().map(|model| sample(&model.train, batch / model.micro_batch));
    all.filter(|sample| sample.nodes.len() <= MAX_OPERATORS).collect()
}

/// The Program of a few operators of each signature. So many micro-batches wait for backward that they take [`WAITING`]
/// bytes, but no more than a step has.
pub(super) fn sample(train: &TrainGraph, micro_batches: usize) -> Program {
    let graph = &train.graph;
    let mut chosen = live(train);
    let mut seen: HashMap<String, usize> = HashMap::new();
    // The backward operators of the first layers run last, so their forward operators must be chosen.
    let (forward, backward): (Vec<NodeId>, Vec<NodeId>) =
        graph.node_ids().filter(|n| chosen[n.index()]).partition(|n| graph.node(*n).phase == Phase::Forward);
    for n in forward.iter().chain(backward.iter().rev()) {
        let seen = seen.entry(node_signature(graph, *n)).or_default();
        *seen += 1;
        chosen[n.index()] = *seen <= SAMPLES_PER_SIGNATURE;
    }
    // A view cannot be replaced by an invented tensor.
    for id in graph.node_ids().rev() {
        let read = if chosen[id.index()] { &graph.node(id).inputs[..] } else { &[] };
        for maker in read.iter().filter_map(|v| graph.producer(*v)) {
            chosen[maker.index()] |= graph.node(maker).op.view().is_some();
        }
    }
    // The bytes that one micro-batch keeps for backward.
    let read: BTreeSet<ValueId> = backward.iter().flat_map(|n| graph.node(*n).inputs.iter().copied()).collect();
    let made = forward.iter().filter(|n| chosen[n.index()]).flat_map(|n| &graph.node(*n).outputs);
    let kept: usize = made.filter(|v| read.contains(v)).map(|v| graph.ty(*v).bytes()).sum();
    program(graph, &chosen, WAITING.div_ceil(kept.max(1)).clamp(1, micro_batches.max(1)))
}

/// The Program of a peer with the `chosen` nodes, if all their other inputs were constants: forward for all
/// micro-batches, then backward.
pub(super) fn program(graph: &Graph, chosen: &[bool], micro_batches: usize) -> Program {
    let nodes = graph.node_ids().filter(|n| chosen[n.index()]).map(|n| (n, graph.node(n).clone()));
    assemble(nodes.collect(), |v| graph.value(v).clone(), micro_batches)
}

/// The Program of a peer with these nodes, if all their other inputs were constants.
fn assemble(nodes: BTreeMap<NodeId, Node>, value: impl Fn(ValueId) -> Value, micro_batches: usize) -> Program {
    let mut uses: HashMap<ValueId, usize> = HashMap::new();
    let (mut values, mut holdings) = (BTreeMap::new(), Vec::new());
    for node in nodes.values() {
        for v in &node.inputs {
            *uses.entry(*v).or_default() += 1;
        }
        values.extend(node.inputs.iter().chain(&node.outputs).map(|v| (*v, value(*v))));
    }
    let made: BTreeSet<ValueId> = nodes.values().flat_map(|node| node.outputs.iter().copied()).collect();
    for (v, value) in &mut values {
        if !made.contains(v) && value.kind != ValueKind::RngKey {
            value.kind = ValueKind::Constant;
            holdings.push(Holding { value: *v, owner: false });
        }
    }
    let mut instructions = Vec::new();
    let mut left = vec![uses; micro_batches];
    for forward in [true, false] {
        for (micro_batch, left) in (0..).zip(&mut left) {
            for (n, node) in nodes.iter().filter(|(_, node)| (node.phase == Phase::Forward) == forward) {
                instructions.push(Instruction::Run { node: *n, micro_batch });
                for v in &node.inputs {
                    left.entry(*v).and_modify(|uses| *uses -= 1);
                }
                let touched: BTreeSet<ValueId> = node.inputs.iter().chain(&node.outputs).copied().collect();
                let done = touched.into_iter().filter(|v| left.get(v).is_none_or(|uses| *uses == 0));
                let done = done.filter(|v| matches!(values[v].kind, ValueKind::Result { .. }));
                instructions.extend(done.map(|value| Instruction::Free { value, micro_batch }));
            }
        }
    }
    Program {
        peer: PeerId(0),
        version: 0,
        micro_batches: micro_batches as u32,
        nodes,
        values,
        holdings,
        reductions: BTreeMap::new(),
        reports: Vec::new(),
        instructions,
        coded: BTreeSet::new(),
        masks: BTreeMap::new(),
        codecs: BTreeMap::new(),
    }
}

/// The same Program with its first micro-batches alone.
pub(super) fn with_fewer(program: &Program, micro_batches: u32) -> Program {
    let stays = |instruction: &&Instruction| instruction.micro_batch().is_none_or(|m| m < micro_batches);
    let instructions = program.instructions.iter().filter(stays).copied().collect();
    Program { micro_batches, instructions, ..program.clone() }
}

/// The same Program with as many of its micro-batches as `fits` takes, of all, half of them, a quarter and so on.
pub(super) fn fitting(program: &Program, fits: impl Fn(&Program) -> bool) -> Option<Program> {
    let halves = successors(Some(program.micro_batches), |count| Some(count / 2));
    halves.take_while(|count| *count > 0).map(|count| with_fewer(program, count)).find(fits)
}

/// A Program for each kind of operator in a [valid](Program::validate) one, by its signature. It runs an operator of
/// that kind alone, after the views that it reads.
pub(super) fn one_by_one(program: &Program) -> BTreeMap<String, Program> {
    let makers: HashMap<ValueId, NodeId> =
        program.nodes.iter().flat_map(|(id, node)| node.outputs.iter().map(|v| (*v, *id))).collect();
    let alone = |id: NodeId| {
        let (mut nodes, mut open) = (BTreeMap::new(), vec![id]);
        while let Some(id) = open.pop() {
            let node = &program.nodes[&id];
            // A view cannot be replaced by an invented tensor.
            let makers = node.inputs.iter().filter_map(|v| makers.get(v));
            open.extend(makers.filter(|maker| program.nodes[*maker].op.view().is_some()));
            nodes.insert(id, node.clone());
        }
        assemble(nodes, |v| program.values[&v].clone(), 1)
    };
    let mut kinds: BTreeMap<String, NodeId> = BTreeMap::new();
    for (id, signature) in signatures(program) {
        kinds.entry(signature).or_insert(id);
    }
    kinds.into_iter().map(|(signature, id)| (signature, alone(id))).collect()
}

/// For each node, whether a step runs it.
pub(super) fn live(train: &TrainGraph) -> Vec<bool> {
    let parts = train.gradients.iter().flat_map(|g| g.contributions.iter().copied());
    train.graph.ancestors(parts.chain([train.loss]))
}

/// The signature of each node of a Program that is [valid](Program::validate). See [`node_signature`].
pub(super) fn signatures(program: &Program) -> BTreeMap<NodeId, String> {
    let types = |values: &[ValueId]| values.iter().map(|v| &program.values[v].ty).collect::<Vec<_>>();
    let makers: HashMap<ValueId, &Node> =
        program.nodes.values().flat_map(|node| node.outputs.iter().map(move |v| (*v, node))).collect();
    let of = |node: &Node| {
        let view = |i: usize| {
            let maker = makers.get(&node.inputs[i])?;
            maker.op.view().map(|_| maker.op.name())
        };
        signature(&node.op, &types(&node.inputs), &types(&node.outputs), view)
    };
    program.nodes.iter().map(|(id, node)| (*id, of(node))).collect()
}

/// The bytes that running a Program takes, with the tensors that it holds from pass to pass.
pub(super) fn needed_bytes(program: &Program) -> u64 {
    let held = program.holdings.iter().filter_map(|h| program.values.get(&h.value)).map(|v: &Value| v.ty.bytes());
    held.fold(program.peak_bytes(), |sum, bytes| sum.saturating_add(bytes as u64))
}
