//! The part of a step whose operators are measured: a few of each kind, as a Program that needs no peers.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fusionllm_graph::{Graph, Node, NodeId, Phase, TrainGraph, Value, ValueId, ValueKind};
use fusionllm_plan::{Holding, Instruction, PeerId, Program, is_view, node_signature, signature};

use crate::model::Model;

/// The most operators of one signature that are measured in a model. Its layers are alike.
const SAMPLES_PER_SIGNATURE: usize = 4;
/// Bytes that wait for backward while a model is measured: more than caches hold.
const WAITING: usize = 64 << 20;
/// The most models, of a job's, of which joiners measure operators.
const MAX_SAMPLES: usize = 3;
/// The most operators that a sample for joiners has. The broker takes the times of a few thousand from each.
const MAX_OPERATORS: usize = 1000;

/// What joiners measure of a job's models. Nothing, if the planner has many to choose from, or if their operators are
/// too many.
pub(crate) fn samples(models: &[Model], batch: usize) -> Vec<Program> {
    if models.len() > MAX_SAMPLES {
        return Vec::new();
    }
    let all = models.iter().map(|model| sample(&model.train, batch / model.micro_batch));
    all.filter(|sample| sample.nodes.len() <= MAX_OPERATORS).collect()
}

/// The Program of a few operators of each signature. As many micro-batches wait for backward as make [`WAITING`]
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
            let made = graph.node(maker);
            chosen[maker.index()] |= is_view(&made.op, &graph.types(&made.inputs), &graph.types(&made.outputs));
        }
    }
    // What one micro-batch keeps for backward.
    let read: BTreeSet<ValueId> = backward.iter().flat_map(|n| graph.node(*n).inputs.iter().copied()).collect();
    let made = forward.iter().filter(|n| chosen[n.index()]).flat_map(|n| &graph.node(*n).outputs);
    let kept: usize = made.filter(|v| read.contains(v)).map(|v| graph.ty(*v).bytes()).sum();
    program(graph, &chosen, WAITING.div_ceil(kept.max(1)).clamp(1, micro_batches.max(1)))
}

/// The Program of a peer with the `chosen` nodes, if all their other inputs were constants: forward for all
/// micro-batches, then backward.
pub(super) fn program(graph: &Graph, chosen: &[bool], micro_batches: usize) -> Program {
    let nodes: Vec<NodeId> = graph.node_ids().filter(|n| chosen[n.index()]).collect();
    let mut uses = vec![0usize; graph.values.len()];
    let (mut values, mut holdings) = (BTreeMap::new(), Vec::new());
    for n in &nodes {
        let node = graph.node(*n);
        for v in &node.inputs {
            uses[v.index()] += 1;
        }
        values.extend(node.inputs.iter().chain(&node.outputs).map(|v| (*v, graph.value(*v).clone())));
    }
    for (v, value) in &mut values {
        let made = graph.producer(*v).is_some_and(|n| chosen[n.index()]);
        if !made && value.kind != ValueKind::RngKey {
            value.kind = ValueKind::Constant;
            holdings.push(Holding { value: *v, owner: false });
        }
    }
    let mut instructions = Vec::new();
    let mut left = vec![uses; micro_batches];
    let (forward, backward) = nodes.split_at(nodes.partition_point(|n| graph.node(*n).phase == Phase::Forward));
    for half in [forward, backward] {
        for (micro_batch, left) in (0..).zip(&mut left) {
            for n in half {
                instructions.push(Instruction::Run { node: *n, micro_batch });
                let node = graph.node(*n);
                for v in &node.inputs {
                    left[v.index()] -= 1;
                }
                let touched: BTreeSet<ValueId> = node.inputs.iter().chain(&node.outputs).copied().collect();
                let done = touched.into_iter().filter(|v| left[v.index()] == 0);
                let done = done.filter(|v| matches!(values[v].kind, ValueKind::Result { .. }));
                instructions.extend(done.map(|value| Instruction::Free { value, micro_batch }));
            }
        }
    }
    Program {
        peer: PeerId(0),
        version: 0,
        micro_batches: micro_batches as u32,
        nodes: nodes.iter().map(|n| (*n, graph.node(*n).clone())).collect(),
        values,
        holdings,
        reductions: Vec::new(),
        reports: Vec::new(),
        instructions,
        coded: BTreeSet::new(),
        masks: BTreeMap::new(),
        codecs: BTreeMap::new(),
    }
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
            is_view(&maker.op, &types(&maker.inputs), &types(&maker.outputs)).then(|| maker.op.name())
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
