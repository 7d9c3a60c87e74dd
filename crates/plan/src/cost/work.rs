//! The operators and tensors of a training step, wherever they are placed.

use std::collections::BTreeSet;

use fusionllm_graph::{Cost, Graph, NodeId, Phase, TrainGraph, ValueId, ValueKind};
use fusionllm_program::Optimizer;

use super::device::Device;
use super::extra::{ExtraOperator, squared_norm, sum, update};
use super::operators::node_signature;
use crate::graph_facts::cheap;

/// The operators and values of a training step, wherever they are placed. All figures are for one micro-batch, except
/// those of [`Self::parameters`].
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// The number of forward nodes.
    pub nodes: usize,
    /// Every operator of a step, in the training graph's order.
    pub operators: Vec<OperatorWork>,
    /// Values that the operators of one forward node compute and those of another read.
    pub flows: Vec<Flow>,
    /// Values that backward reads, and that forward computes or the broker sends.
    pub kept: Vec<HeldTensor>,
    /// Values that the broker sends, with their readers.
    pub inputs: Vec<HeldTensor>,
    /// The trained parameters, in graph order.
    pub parameters: Vec<ParameterWork>,
    /// Parameters that are not trained, buffers and constants.
    pub state: Vec<HeldTensor>,
}

/// One operator.
#[derive(Debug, Clone, PartialEq)]
pub struct OperatorWork {
    /// The forward node with which it is placed.
    pub home: NodeId,
    /// The part of the step.
    pub phase: Phase,
    /// Its ATen name.
    pub name: &'static str,
    /// Its [`signature`](crate::signature).
    pub signature: String,
    /// Its work.
    pub cost: Cost,
}

/// A value that is sent if its maker and a reader are on different peers: once to each peer that reads it.
#[derive(Debug, Clone, PartialEq)]
pub struct Flow {
    /// The value, in the training graph.
    pub value: ValueId,
    /// Its size.
    pub bytes: u64,
    /// The forward node with which its maker is placed.
    pub from: NodeId,
    /// The forward nodes with which its readers are placed, ascending.
    pub to: Vec<NodeId>,
    /// Whether it is a gradient, which goes from later stages to earlier ones.
    pub backward: bool,
}

/// A tensor that each peer holds with one of its readers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldTensor {
    /// The value.
    pub value: ValueId,
    /// Its size.
    pub bytes: u64,
    /// The forward nodes with which its readers are placed, ascending.
    pub readers: Vec<NodeId>,
}

/// A parameter's work, once per step.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterWork {
    /// The parameter.
    pub parameter: ValueId,
    /// Its size. Its gradient and each tensor of [`Optimizer::slots`] have the same size.
    pub bytes: u64,
    /// The forward nodes that read it, ascending. Every peer with one of them holds the parameter. The earliest
    /// reader's peer owns it.
    pub readers: Vec<NodeId>,
    /// By part of its gradient: the forward node with which it is computed. Each part is summed in its own
    /// accumulator, and sent to the owner.
    pub parts: Vec<NodeId>,
    /// The operators of its update at the owner: the gradient's norm and the optimizer's step.
    pub update: [ExtraOperator; 2],
}

/// Seconds of one micro-batch for a forward node and its backward operators.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NodeSeconds {
    /// Seconds of the forward node.
    pub forward: f64,
    /// Backward operators that carry the gradient on.
    pub input_grad: f64,
    /// Backward operators that compute gradients of parameters, including sums over micro-batches.
    pub weight_grad: f64,
}

impl NodeSeconds {
    /// Seconds of both parts of backward.
    pub fn backward(&self) -> f64 {
        self.input_grad + self.weight_grad
    }
}

impl Work {
    /// The work of one training step of `train`, which was derived from `forward`.
    pub fn new(forward: &Graph, train: &TrainGraph, optimizer: &Optimizer) -> Self {
        let graph = &train.graph;
        let contributions = || train.gradients.iter().flat_map(|g| g.contributions.iter().copied());
        let live =
            graph.ancestors(contributions().chain(graph.state_updates.iter().map(|u| u.value)).chain([train.loss]));
        let homes = homes(graph, forward.nodes.len());
        let cheap = cheap(graph);
        let readers = Readers::new(graph, &live, &homes, &cheap);

        let mut operators: Vec<OperatorWork> = Vec::new();
        let accumulated: BTreeSet<ValueId> = contributions().collect();
        for id in graph.node_ids().filter(|n| live[n.index()]) {
            let node = graph.node(id);
            let home = homes[id.index()];
            let cost = node.op.cost(&graph.types(&node.inputs), &graph.types(&node.outputs));
            let (name, signature) = (node.op.name(), node_signature(graph, id));
            operators.push(OperatorWork { home, phase: node.phase, name, signature, cost });
            for part in node.outputs.iter().filter(|v| accumulated.contains(v)) {
                let ExtraOperator { name, cost } = sum(graph.ty(*part));
                operators.push(OperatorWork { home, phase: Phase::WeightGrad, name, signature: name.to_owned(), cost });
            }
        }

        let trained: BTreeSet<ValueId> = train.gradients.iter().map(|g| g.parameter).collect();
        let mut flows = Vec::new();
        let (mut kept, mut inputs, mut state) = (Vec::new(), Vec::new(), Vec::new());
        for v in (0..graph.values.len() as u32).map(ValueId) {
            let bytes = graph.ty(v).bytes() as u64;
            let [ahead, back] = [&readers.forward[v.index()], &readers.backward[v.index()]];
            let both = || ahead.union(back).copied().collect::<Vec<_>>();
            let maker = graph.producer(v);
            match (&graph.value(v).kind, maker) {
                (ValueKind::Result { .. }, Some(maker)) => {
                    let from = homes[maker.index()];
                    let backward = graph.node(maker).phase != Phase::Forward;
                    let to: Vec<NodeId> = both().into_iter().filter(|n| *n != from).collect();
                    if !to.is_empty() && live[maker.index()] && !cheap[maker.index()] {
                        flows.push(Flow { value: v, bytes, from, to, backward });
                    }
                    if !backward && !back.is_empty() {
                        kept.push(HeldTensor { value: v, bytes, readers: back.iter().copied().collect() });
                    }
                }
                (ValueKind::Input, _) => {
                    inputs.push(HeldTensor { value: v, bytes, readers: both() });
                    if !back.is_empty() {
                        kept.push(HeldTensor { value: v, bytes, readers: back.iter().copied().collect() });
                    }
                }
                (kind, _) if (kind.init().is_some() || *kind == ValueKind::Constant) && !trained.contains(&v) => {
                    state.push(HeldTensor { value: v, bytes, readers: both() });
                }
                _ => {}
            }
        }
        let parameters = train.gradients.iter().map(|g| ParameterWork {
            parameter: g.parameter,
            bytes: graph.ty(g.parameter).bytes() as u64,
            readers: readers.of(g.parameter),
            parts: g.contributions.iter().filter_map(|v| Some(homes[graph.producer(*v)?.index()])).collect(),
            update: [squared_norm(graph.ty(g.parameter)), update(optimizer, graph.ty(g.parameter))],
        });
        let parameters = parameters.collect();
        Self { nodes: forward.nodes.len(), operators, flows, kept, inputs, parameters, state }
    }

    /// By forward node: seconds on `device`.
    pub fn seconds(&self, device: &Device) -> Vec<NodeSeconds> {
        let mut nodes = vec![NodeSeconds::default(); self.nodes];
        for o in &self.operators {
            let seconds = device.seconds_of(&o.signature, o.name, &o.cost);
            let node = &mut nodes[o.home.index()];
            match o.phase {
                Phase::Forward => node.forward += seconds,
                Phase::InputGrad => node.input_grad += seconds,
                Phase::WeightGrad => node.weight_grad += seconds,
            }
        }
        nodes
    }
}

/// By node of the training graph: the forward node with which it is placed, if each were a stage of its own. As in
/// [`crate::NodeStages`], a sum of gradients goes with the earliest of its operands.
fn homes(graph: &Graph, forward: usize) -> Vec<NodeId> {
    let mut homes: Vec<NodeId> = Vec::with_capacity(graph.nodes.len());
    for id in graph.node_ids() {
        let node = graph.node(id);
        if id.index() < forward {
            homes.push(id);
            continue;
        }
        let made = node.inputs.iter().filter_map(|v| graph.producer(*v));
        let earliest = made.filter(|p| p.index() >= forward).map(|p| homes[p.index()]).min();
        let origin = node.origin.unwrap_or(NodeId(0));
        homes.push(earliest.map_or(origin, |e| e.min(origin)));
    }
    homes
}

/// By value: the forward nodes with which its readers are placed.
struct Readers {
    forward: Vec<BTreeSet<NodeId>>,
    backward: Vec<BTreeSet<NodeId>>,
}

impl Readers {
    /// A reader of a cheap node's result runs the node itself. So it also reads the node's operands.
    fn new(graph: &Graph, live: &[bool], homes: &[NodeId], cheap: &[bool]) -> Self {
        let mut readers = Self {
            forward: vec![BTreeSet::new(); graph.values.len()],
            backward: vec![BTreeSet::new(); graph.values.len()],
        };
        for id in graph.node_ids().rev().filter(|n| live[n.index()]) {
            let node = graph.node(id);
            let home = homes[id.index()];
            for v in &node.inputs {
                let side = if node.phase == Phase::Forward { &mut readers.forward } else { &mut readers.backward };
                side[v.index()].insert(home);
                if cheap[id.index()] {
                    for side in [&mut readers.forward, &mut readers.backward] {
                        let through: Vec<NodeId> =
                            node.outputs.iter().flat_map(|o| side[o.index()].iter().copied()).collect();
                        side[v.index()].extend(through);
                    }
                }
            }
        }
        readers
    }

    fn of(&self, v: ValueId) -> Vec<NodeId> {
        self.forward[v.index()].union(&self.backward[v.index()]).copied().collect()
    }
}
