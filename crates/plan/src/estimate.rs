//! What a graph's operators ask of the devices that run them and of the links between these.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use fusionllm_compress::Codec;
use fusionllm_graph::ops::{Binary, OpClass, SquaredNorm};
use fusionllm_graph::{Cost, DType, Graph, NodeId, Op, Phase, TensorType, TrainGraph, ValueId, ValueKind};

use crate::compile::cheap;
use crate::{Device, Optimizer};

/// What a training step asks, per operator and per value, wherever they are placed. All of one micro-batch but for [`Self::parameters`].
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// Forward nodes of the graph.
    pub nodes: usize,
    /// Every operator that a step runs, in the training graph's order.
    pub operators: Vec<OperatorWork>,
    /// The values that one forward node's operators make and another's read.
    pub flows: Vec<Flow>,
    /// The values that forward makes, or gets from the broker, and backward reads.
    pub kept: Vec<Kept>,
    /// What the broker sends to the operators that read it.
    pub inputs: Vec<Kept>,
    /// The trained parameters, in graph order.
    pub parameters: Vec<ParameterWork>,
    /// Bytes of parameters that are not trained, of buffers and of constants, with their readers.
    pub state: Vec<Kept>,
}

/// One operator.
#[derive(Debug, Clone, PartialEq)]
pub struct OperatorWork {
    /// The forward node that it is placed with.
    pub home: NodeId,
    /// Which part of the step.
    pub phase: Phase,
    /// Its ATen name.
    pub name: &'static str,
    /// Its [`kind`].
    pub kind: String,
    /// Its work.
    pub cost: Cost,
}

/// A value that crosses wherever its ends are placed on different peers: once to each peer that reads it.
#[derive(Debug, Clone, PartialEq)]
pub struct Flow {
    /// The value, in the training graph.
    pub value: ValueId,
    /// Its size.
    pub bytes: u64,
    /// The forward node with which its maker is placed.
    pub from: NodeId,
    /// Those with which its readers are, ascending.
    pub to: Vec<NodeId>,
    /// Whether it is a gradient, which runs from later stages to earlier ones.
    pub backward: bool,
}

/// A tensor that every peer holds on which one of its readers is placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The value.
    pub value: ValueId,
    /// Its size.
    pub bytes: u64,
    /// The forward nodes with which its readers are placed, ascending.
    pub readers: Vec<NodeId>,
}

/// What training a parameter asks once a step, whatever the number of micro-batches.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterWork {
    /// The parameter.
    pub parameter: ValueId,
    /// Its size. Its gradient has it too, and each tensor of [`Optimizer::slots`].
    pub bytes: u64,
    /// The forward nodes that read it, ascending; every peer with one of them holds it, that of the earliest owns it.
    pub readers: Vec<NodeId>,
    /// With which forward node each part of its gradient is made. Each part is summed in an accumulator of its own, and sent to the owner from elsewhere.
    pub parts: Vec<NodeId>,
    /// The operators of its update at the owner: the norm of its gradient and the optimiser's step.
    pub update: [(&'static str, Cost); 2],
}

/// Seconds of one micro-batch that a forward node's operators take on a device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NodeSeconds {
    /// Forward.
    pub forward: f64,
    /// Backward, what carries the gradient on.
    pub input_grad: f64,
    /// Backward, what makes gradients of parameters, sums over micro-batches included.
    pub weight_grad: f64,
}

impl NodeSeconds {
    /// Both parts of backward.
    pub fn backward(&self) -> f64 {
        self.input_grad + self.weight_grad
    }
}

/// Bytes/s of a tensor that a codec reads or writes where nobody has measured it.
const CODEC_RATE: f64 = 1e9;

/// The two ways through a codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// From a tensor to bytes.
    Encode,
    /// And back.
    Decode,
}

impl Coding {
    /// The name under which a device's [`operators`](Device::operators) have it, by bytes of the tensor.
    pub fn of(self, codec: &Codec) -> String {
        let way = match self {
            Self::Encode => "encode",
            Self::Decode => "decode",
        };
        format!("{way}.{}", codec.name())
    }
}

/// The two ways between a device and what the network sends and gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copying {
    /// From the device.
    Download,
    /// To it.
    Upload,
}

impl Copying {
    /// The name under which a device's [`operators`](Device::operators) have it, by bytes of the tensor.
    pub fn name(self) -> &'static str {
        match self {
            Self::Download => "download",
            Self::Upload => "upload",
        }
    }
}

/// The name under which a device's [`operators`](Device::operators) have the processor's time to send bytes or to get them, by bytes on the wire, over the threads that compute.
pub const TRAFFIC: &str = "traffic";

impl Device {
    /// Seconds that sending or getting bytes takes from computing on the same processor, all of whose cores are taken to compute: as measured, else none.
    pub(crate) fn traffic_seconds(&self, bytes: f64) -> f64 {
        self.slowdown * self.operators.get(TRAFFIC).map_or(0.0, |curve| curve.at(bytes))
    }

    /// Seconds that the thread beside the computing one takes to encode or decode so many elements, whatever the slowdown: as measured for that codec, else
    /// at [`CODEC_RATE`].
    pub(crate) fn codec_seconds(&self, coding: Coding, codec: &Codec, elements: usize) -> f64 {
        let bytes = 4.0 * elements as f64;
        self.operators.get(&coding.of(codec)).map_or(bytes / CODEC_RATE, |curve| curve.at(bytes))
    }

    /// Seconds that the computing thread takes to bring a tensor from the device to where the network takes it, or back: as measured, else as long as reading and
    /// writing it.
    pub(crate) fn copy_seconds(&self, copying: Copying, bytes: f64) -> f64 {
        let read_and_write = 2.0 * bytes / self.rates.memory;
        self.slowdown * self.operators.get(copying.name()).map_or(read_and_write, |curve| curve.at(bytes))
    }

    /// Bytes that an operator holds beside its operands and results: as measured for its [`kind`], else for its name.
    pub(crate) fn scratch_bytes(&self, kind: &str, name: &str, cost: &Cost) -> u64 {
        let of = if self.operators.contains_key(kind) { kind } else { name };
        self.scratch.get(of).map_or(0, |curve| curve.at(cost.bytes) as u64)
    }

    /// Whether operators of some [`kind`] were measured.
    pub(crate) fn knows_kinds(&self) -> bool {
        self.operators.keys().any(|k| k.contains(RESULTS))
    }

    /// Seconds that an operator takes: as measured for its [`kind`], else as [`Self::seconds`].
    pub fn seconds_of(&self, kind: &str, name: &str, cost: &Cost) -> f64 {
        match self.operators.contains_key(kind) {
            true => self.seconds(kind, cost),
            false => self.seconds(name, cost),
        }
    }

    /// Seconds that an operator takes: as measured where it was, else its overhead and the longer of computing and of moving its operands (the
    /// roofline of Williams, Waterman and Patterson, 2009), times the slowdown.
    pub fn seconds(&self, name: &str, cost: &Cost) -> f64 {
        self.slowdown
            * match self.operators.get(name) {
                Some(curve) => curve.at(work(cost)),
                None => {
                    let flops = match cost.class {
                        OpClass::Convolution => self.rates.convolution,
                        _ => self.rates.matmul,
                    };
                    self.rates.overhead + (cost.flops / flops).max(cost.bytes / self.rates.memory)
                }
            }
    }
}

/// What stands before the results in a [`kind`], and in no operator's name.
const RESULTS: &str = " -> ";

/// An operator with the types of its operands and results, by which a model's own operators are measured. An operand that is a view of a tensor is read in another
/// order than one that is a tensor, as a transposed matrix is; `view` has the name of the operator that made it one.
pub fn kind<'v>(
    op: &Op,
    inputs: &[&TensorType],
    outputs: &[&TensorType],
    view: impl Fn(usize) -> Option<&'v str>,
) -> String {
    let mut kind = op.name().to_owned();
    for (i, ty) in inputs.iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = write!(kind, " {ty}");
        if let Some(name) = view(i) {
            kind.extend(["<", name]);
        }
    }
    for (i, ty) in outputs.iter().enumerate() {
        let _ = write!(kind, "{}{ty}", if i == 0 { RESULTS } else { " " });
    }
    kind
}

/// The [`kind`] of a node.
pub fn kind_of(graph: &Graph, node: NodeId) -> String {
    let n = graph.node(node);
    let view = |i: usize| {
        let made = graph.node(graph.producer(n.inputs[i])?);
        is_view(&made.op, &graph.types(&made.inputs), &graph.types(&made.outputs)).then(|| made.op.name())
    };
    kind(&n.op, &graph.types(&n.inputs), &graph.types(&n.outputs), view)
}

/// Whether an operator's results are its operands, addressed otherwise.
pub fn is_view(op: &Op, inputs: &[&TensorType], outputs: &[&TensorType]) -> bool {
    op.cost(inputs, outputs).class == OpClass::View
}

/// What a measured operator's time is a function of: FLOPs of products and convolutions, bytes of all others.
pub fn work(cost: &Cost) -> f64 {
    match cost.class {
        OpClass::Matmul | OpClass::Convolution => cost.flops,
        OpClass::Memory | OpClass::View => cost.bytes,
    }
}

impl Work {
    /// That of one training step of `train`, which was made from `forward`.
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
            let (name, kind) = (node.op.name(), kind_of(graph, id));
            operators.push(OperatorWork { home, phase: node.phase, name, kind, cost });
            for part in node.outputs.iter().filter(|v| accumulated.contains(v)) {
                let (name, cost) = sum(graph.ty(*part));
                operators.push(OperatorWork { home, phase: Phase::WeightGrad, name, kind: name.to_owned(), cost });
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
                        kept.push(Kept { value: v, bytes, readers: back.iter().copied().collect() });
                    }
                }
                (ValueKind::Input, _) => {
                    inputs.push(Kept { value: v, bytes, readers: both() });
                    if !back.is_empty() {
                        kept.push(Kept { value: v, bytes, readers: back.iter().copied().collect() });
                    }
                }
                (ValueKind::Parameter(_) | ValueKind::Buffer(_) | ValueKind::Constant, _) if !trained.contains(&v) => {
                    state.push(Kept { value: v, bytes, readers: both() });
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

    /// Seconds that each forward node and its backward operators take on `device`, by node.
    pub fn seconds(&self, device: &Device) -> Vec<NodeSeconds> {
        let mut nodes = vec![NodeSeconds::default(); self.nodes];
        for o in &self.operators {
            let seconds = device.seconds_of(&o.kind, o.name, &o.cost);
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

/// The operator that adds a tensor to a sum.
pub(crate) fn sum(ty: &TensorType) -> (&'static str, Cost) {
    let add = Op::from(Binary::Add);
    (add.name(), add.cost(&[ty, ty], &[ty]))
}

/// The operator that makes a gradient's squared norm.
pub(crate) fn squared_norm(ty: &TensorType) -> (&'static str, Cost) {
    let op = Op::from(SquaredNorm);
    (op.name(), op.cost(&[ty], &[&TensorType::new(DType::F64, [])]))
}

/// The operator that applies a gradient.
pub(crate) fn update(optimizer: &Optimizer, ty: &TensorType) -> (&'static str, Cost) {
    let op = optimizer.op();
    let outputs = vec![ty; 1 + optimizer.slots().len()];
    // The hyper-parameters are a handful of scalars.
    let hyper = TensorType::new(DType::F64, [4]);
    let inputs: Vec<&TensorType> = [ty, ty].into_iter().chain(outputs[1..].iter().copied()).chain([&hyper]).collect();
    (op.name(), op.cost(&inputs, &outputs))
}

/// By node of the training graph: the forward node it is placed with, were each a stage of its own. As [`crate::Placement`] has it, an addition of
/// gradients sits with the earliest of its operands.
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

/// By value: the forward nodes with which those who need it are placed.
struct Readers {
    forward: Vec<BTreeSet<NodeId>>,
    backward: Vec<BTreeSet<NodeId>>,
}

impl Readers {
    /// Whoever reads what a cheap node makes reads what that is made of, since it runs the node itself.
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

/// What an operator was measured to take, seconds or bytes, by its [`work`].
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "Vec<(f64, f64)>", into = "Vec<(f64, f64)>")]
pub struct Curve(Vec<(f64, f64)>);

impl Curve {
    /// Through these points of work and what it takes. `None` unless there is one, and all figures are finite and above zero with work ascending.
    pub fn new(points: Vec<(f64, f64)>) -> Option<Self> {
        let valid = |x: f64| x > 0.0 && x.is_finite();
        let ascending = points.windows(2).all(|w| w[0].0 < w[1].0);
        (!points.is_empty() && ascending && points.iter().all(|&(w, s)| valid(w) && valid(s))).then_some(Self(points))
    }

    /// The points of work and what it takes.
    pub fn points(&self) -> &[(f64, f64)] {
        &self.0
    }

    /// That of a device which is so many times as fast.
    pub fn faster(&self, times: f64) -> Self {
        Self(self.0.iter().map(|(work, seconds)| (*work, seconds / times)).collect())
    }

    /// A power law between neighbouring points; the least point's below them, in proportion to work above them.
    pub fn at(&self, work: f64) -> f64 {
        let at = self.0.partition_point(|p| p.0 < work);
        match (at.checked_sub(1).map(|i| self.0[i]), self.0.get(at)) {
            (Some((w0, s0)), Some(&(w1, s1))) => s0 * ((work / w0).ln() / (w1 / w0).ln() * (s1 / s0).ln()).exp(),
            (Some((w, s)), None) => s * work / w,
            (None, Some(&(_, s))) => s,
            (None, None) => 0.0,
        }
    }
}

impl TryFrom<Vec<(f64, f64)>> for Curve {
    type Error = String;

    fn try_from(points: Vec<(f64, f64)>) -> Result<Self, String> {
        Self::new(points).ok_or_else(|| "measured points need ascending work, and figures above zero".into())
    }
}

impl From<Curve> for Vec<(f64, f64)> {
    fn from(c: Curve) -> Self {
        c.0
    }
}

/// Measured operators of a device, by ATen name, and by [`kind`] those of a model that it was measured for.
pub type Curves = BTreeMap<String, Curve>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rates;

    #[test]
    fn a_curve_goes_through_its_points() {
        let c = Curve::new(vec![(1e3, 1e-6), (1e5, 1e-5)]).unwrap();
        assert_eq!(c.at(0.0), 1e-6, "never below the least");
        assert!((c.at(1e3) - 1e-6).abs() < 1e-18);
        assert!((c.at(1e4) - 10f64.powf(-5.5)).abs() < 1e-12, "the middle on logarithmic axes");
        assert!((c.at(1e6) - 1e-4).abs() < 1e-15, "in proportion beyond");
        assert_eq!(Curve::new(vec![(2.0, 1.0), (1.0, 1.0)]), None);
        assert_eq!(Curve::new(vec![]), None);
    }

    #[test]
    fn an_operator_takes_the_longer_of_computing_and_moving() {
        let rates = Rates { matmul: 100.0, convolution: 50.0, memory: 10.0, overhead: 1.0 };
        let mut device = Device { slowdown: 2.0, ..Device::new("a", rates, 1) };
        let cost = |class, flops, bytes| Cost { class, flops, bytes };
        assert_eq!(device.seconds("mm", &cost(OpClass::Matmul, 400.0, 10.0)), 2.0 * (1.0 + 4.0));
        assert_eq!(device.seconds("mm", &cost(OpClass::Matmul, 400.0, 80.0)), 2.0 * (1.0 + 8.0));
        assert_eq!(device.seconds("conv", &cost(OpClass::Convolution, 400.0, 10.0)), 2.0 * (1.0 + 8.0));
        device.operators.insert("mm".into(), Curve::new(vec![(400.0, 7.0)]).unwrap());
        assert_eq!(device.seconds("mm", &cost(OpClass::Matmul, 400.0, 80.0)), 14.0);
    }

    #[test]
    fn an_operator_is_known_by_its_types_and_by_what_is_a_view() {
        use fusionllm_graph::ops::{Matmul, Permute};

        let of = |shape: &[usize]| TensorType::new(DType::F32, shape.to_vec());
        let (a, b, c) = (of(&[8, 4]), of(&[4, 2]), of(&[8, 2]));
        let op = Op::from(Matmul);
        let view = |i: usize| (i == 1).then_some("permute");
        let plain = kind(&op, &[&a, &b], &[&c], |_| None);
        let turned = kind(&op, &[&a, &b], &[&c], view);
        assert_eq!(turned, "matmul f32[8, 4] f32[4, 2]<permute -> f32[8, 2]");
        let swap = Op::from(Permute { dims: vec![1, 0] });
        assert!(is_view(&swap, &[&of(&[2, 4])], &[&b]) && !is_view(&op, &[&a, &b], &[&c]));

        let rates = Rates { matmul: 100.0, convolution: 50.0, memory: 10.0, overhead: 1.0 };
        let mut device = Device { slowdown: 2.0, ..Device::new("a", rates, 1) };
        let cost = op.cost(&[&a, &b], &[&c]);
        for (name, seconds) in [("matmul", 7.0), (&turned, 3.0)] {
            device.operators.insert(name.into(), Curve::new(vec![(cost.flops, seconds)]).unwrap());
            device.scratch.insert("matmul".into(), Curve::new(vec![(cost.bytes, 64.0)]).unwrap());
        }
        assert_eq!([&turned, &plain].map(|k| device.seconds_of(k, "matmul", &cost)), [6.0, 14.0]);
        let scratch = [&turned, &plain].map(|k| device.scratch_bytes(k, "matmul", &cost));
        assert_eq!(scratch, [0, 64], "one that was measured has the scratch that was measured");
        assert!(device.knows_kinds());
    }
}
