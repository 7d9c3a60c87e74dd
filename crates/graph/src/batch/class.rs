//! The relation between a value of a micro-batch's graph and the same value of the whole batch.

use std::collections::BTreeMap;

use super::{Doubt, Sizes};
use crate::ops::{Binary, BinaryScalar, OpClass, ReduceKind, Unary};
use crate::{Graph, Node, NodeId, Op, ValueId, ValueKind};

/// The place of the samples in a tensor: along dimension `dim`, each sample has `inner` neighbouring places, and the
/// samples may repeat in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Axis {
    pub(super) dim: usize,
    pub(super) inner: usize,
}

/// A micro-batch's share of a value of the batch: `n^power` for `n` micro-batches, times the micro-batch's share of the
/// targets of a cross-entropy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) power: i32,
    pub(super) targets: Option<NodeId>,
}

impl Share {
    /// The whole value: the batch's is the sum over micro-batches.
    pub(super) const WHOLE: Self = Self { power: 0, targets: None };
    /// An equal share: the batch's value is the mean over micro-batches.
    pub(super) const EQUAL: Self = Self { power: -1, targets: None };

    pub(super) fn times(self, power: i32) -> Self {
        Self { power: self.power + power, ..self }
    }
}

/// How a value of the batch follows from those of its `n` micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// Each micro-batch has the same value. That of the batch is `n^power` times as large.
    Same { power: i32 },
    /// Each sample has its own part, and none depends on another sample. In the batch, it is `n^power` times as large.
    Rows { axis: Axis, power: i32 },
    /// The value of the batch is the sum of the micro-batches' values, each times its share.
    Sum(Share),
    /// A linear combination of values that differ in their shares.
    Mixed,
    /// The value of the batch does not follow.
    Lost(Doubt),
}

/// How the broker combines the micro-batches' values of a statistic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Combine {
    /// The sum, or the value that all have, times `n^power` for `n` micro-batches.
    Sum {
        power: i32,
    },
    Max,
    Min,
    Product,
}

/// The classes of all values of a graph.
pub(super) struct Classes<'a> {
    pub(super) graph: &'a Graph,
    pub(super) sizes: Sizes<'a>,
    class: Vec<Class>,
    /// For values that are the same in each micro-batch: the dimensions along which they do not vary.
    pub(super) uniform: Vec<Vec<bool>>,
    /// Whether a value follows from inputs and constants by cheap operators.
    data: Vec<bool>,
    /// Whether a value depends on data and not on the micro-batch, because the broker computes it for the whole batch.
    statistic: Vec<bool>,
    /// Whether a value depends on a parameter.
    trained: Vec<bool>,
    /// The statistics that join micro-batches, or that grow with their number.
    pub(super) combine: BTreeMap<ValueId, Combine>,
    /// The number of elements that were added up in a value.
    summed: Vec<usize>,
    /// Numbers that are taken for the number of rows, although they may be constants.
    pub(super) guesses: Vec<NodeId>,
}

impl<'a> Classes<'a> {
    pub(super) fn of(graph: &'a Graph, sizes: Sizes<'a>) -> Self {
        let count = graph.values.len();
        let mut classes = Self {
            graph,
            sizes,
            class: vec![Class::Same { power: 0 }; count],
            uniform: graph.values.iter().map(|v| v.ty.shape.iter().map(|n| *n == 1).collect()).collect(),
            data: vec![false; count],
            statistic: vec![false; count],
            trained: graph.values.iter().map(|v| matches!(v.kind, ValueKind::Parameter(_))).collect(),
            combine: BTreeMap::new(),
            summed: vec![0; count],
            guesses: Vec::new(),
        };
        for i in 0..count {
            classes.source(ValueId(i as u32));
        }
        for id in graph.node_ids() {
            classes.node(id);
        }
        classes
    }

    pub(super) fn class(&self, v: ValueId) -> Class {
        self.class[v.index()]
    }

    pub(super) fn is_data(&self, v: ValueId) -> bool {
        self.data[v.index()]
    }

    pub(super) fn is_statistic(&self, v: ValueId) -> bool {
        self.statistic[v.index()]
    }

    fn source(&mut self, v: ValueId) {
        let value = self.graph.value(v);
        match &value.kind {
            ValueKind::Input => {
                self.data[v.index()] = true;
                if value.ty.shape.first() == Some(&self.sizes.samples) {
                    let axis = Axis { dim: 0, inner: self.sizes.group };
                    self.class[v.index()] = Class::Rows { axis, power: 0 };
                }
            }
            ValueKind::Constant => {
                self.data[v.index()] = true;
                let content = |graph: &Graph| {
                    let name = &graph.values.get(v.index())?.name;
                    graph.constants.get(name).filter(|t| t.ty().numel() == 1).map(|t| t.to_f64()[0])
                };
                if let (Some(here), Some(other)) = (content(self.graph), self.sizes.other.and_then(|(g, _)| content(g)))
                    && let Some(power) = self.sizes.power(here, other)
                {
                    self.class[v.index()] = Class::Same { power };
                }
                if let Some(tensor) = self.graph.constants.get(&value.name) {
                    self.record_constant(v, tensor);
                }
            }
            _ => {}
        }
    }

    fn node(&mut self, id: NodeId) {
        let node = self.graph.node(id);
        let data = node.inputs.iter().all(|v| self.data[v.index()]) && self.is_cheap(node);
        let mut classes = self.classes_of(id, node, data);
        classes.resize(node.outputs.len(), classes.last().copied().unwrap_or(Class::Lost(Doubt::Unknown(id))));
        let known = node.inputs.iter().any(|v| self.statistic[v.index()]);
        let trained = node.inputs.iter().any(|v| self.trained[v.index()]);
        let summed = node.inputs.iter().map(|v| self.summed[v.index()]).max().unwrap_or(0);
        for (&v, mut class) in node.outputs.iter().zip(classes) {
            if let (true, Class::Sum(share)) = (data, class) {
                // The broker knows the data of all micro-batches, so it can give each of them the batch's value.
                self.combine.entry(v).or_insert(Combine::Sum { power: share.power });
                self.statistic[v.index()] = true;
                class = Class::Same { power: 0 };
            } else if let (true, Class::Same { power }) = (data, class)
                && (known || power != 0)
            {
                self.statistic[v.index()] = true;
                self.combine.extend((power != 0).then_some((v, Combine::Sum { power })));
                class = Class::Same { power: 0 };
            }
            self.data[v.index()] = data;
            self.trained[v.index()] = trained;
            self.summed[v.index()] = summed.max(self.summed[v.index()]);
            self.class[v.index()] = class;
        }
    }

    /// Whether the broker may run a node. Products and networks stay with the peers.
    fn is_cheap(&self, node: &Node) -> bool {
        let (inputs, outputs) = (self.graph.types(&node.inputs), self.graph.types(&node.outputs));
        let cost = node.op.cost(&inputs, &outputs);
        let elements: f64 = inputs.iter().chain(&outputs).map(|t| t.numel() as f64).sum();
        match cost.class {
            OpClass::Memory | OpClass::View => !matches!(node.op, Op::Dropout(_) | Op::BatchNorm(_)),
            OpClass::Matmul | OpClass::Convolution => cost.flops <= 4.0 * elements,
        }
    }

    fn classes_of(&mut self, id: NodeId, node: &Node, data: bool) -> Vec<Class> {
        let operands: Vec<Class> = node.inputs.iter().map(|v| self.class(*v)).collect();
        if let Some(lost) = operands.iter().find(|c| matches!(c, Class::Lost(_))) {
            return vec![*lost];
        }
        let rows = operands.iter().any(|c| matches!(c, Class::Rows { .. }));
        let sums = operands.iter().any(|c| matches!(c, Class::Sum(_) | Class::Mixed));
        match (rows, sums) {
            (false, false) => {
                self.record_uniform(node);
                vec![self.same(id, node, &operands)]
            }
            (false, true) => vec![self.sum(id, node, &operands)],
            // Each sample depends on a sum over samples.
            (true, true) => vec![Class::Lost(Doubt::Couples(id))],
            (true, false) => match &node.op {
                Op::CrossEntropy(_) => self.cross_entropy(id, node, &operands),
                Op::Reduce(op) if self.reduces_rows(node, &op.dims) => vec![self.reduce(id, node, op.kind, data)],
                _ => self.rows(id, node, &operands),
            },
        }
    }

    fn reduces_rows(&self, node: &Node, dims: &[usize]) -> bool {
        matches!(self.class(node.inputs[0]), Class::Rows { axis, .. } if dims.contains(&axis.dim))
    }

    /// A reduction over the samples.
    fn reduce(&mut self, id: NodeId, node: &Node, kind: ReduceKind, data: bool) -> Class {
        let (x, out) = (node.inputs[0], node.outputs[0]);
        let Class::Rows { power, .. } = self.class(x) else { return Class::Lost(Doubt::Unknown(id)) };
        self.summed[out.index()] = self.graph.ty(x).numel() / self.graph.ty(out).numel().max(1);
        let combine = match kind {
            ReduceKind::Sum => return Class::Sum(Share::WHOLE.times(power)),
            ReduceKind::Mean => return Class::Sum(Share::EQUAL.times(power)),
            ReduceKind::Amax | ReduceKind::Any => Combine::Max,
            ReduceKind::Amin | ReduceKind::All => Combine::Min,
            ReduceKind::Prod => Combine::Product,
        };
        if !data || power != 0 {
            return Class::Lost(Doubt::Couples(id));
        }
        self.combine.insert(out, combine);
        Class::Sum(Share::WHOLE)
    }

    /// A cross-entropy is a mean over its targets.
    fn cross_entropy(&self, id: NodeId, node: &Node, operands: &[Class]) -> Vec<Class> {
        let (Class::Rows { axis, power: 0 }, Class::Rows { axis: of_target, power: 0 }) = (operands[0], operands[1])
        else {
            return vec![Class::Lost(Doubt::Unknown(id))];
        };
        match axis == of_target && axis.dim == 0 {
            true if self.is_data(node.inputs[1]) => {
                vec![Class::Sum(Share { power: 0, targets: Some(id) }), Class::Rows { axis, power: 0 }]
            }
            true => vec![Class::Lost(Doubt::Unknown(id))],
            false => vec![Class::Lost(Doubt::Couples(id))],
        }
    }

    /// The result of operands that all micro-batches share.
    fn same(&mut self, id: NodeId, node: &Node, operands: &[Class]) -> Class {
        let power = |i: usize| match operands.get(i) {
            Some(Class::Same { power }) => *power,
            _ => 0,
        };
        let lost = Class::Lost(Doubt::Unknown(id));
        let power = match &node.op {
            Op::Binary(Binary::Mul) => power(0) + power(1),
            Op::Binary(Binary::Div) => power(0) - power(1),
            Op::Unary(Unary::Reciprocal) => -power(0),
            Op::BinaryScalar(op) => match (op.op, self.literal(id, op, node.inputs[0])) {
                (_, None) => return lost,
                (Binary::Mul, Some(p)) => power(0) + p,
                (Binary::Div, Some(p)) if op.reverse => p - power(0),
                (Binary::Div, Some(p)) => power(0) - p,
                (_, Some(p)) if p == power(0) => p,
                _ => return lost,
            },
            Op::Reduce(op) if op.kind == ReduceKind::Sum => {
                power(0) + self.sizes.power_of_dims(node.inputs[0], &op.dims, self.graph)
            }
            Op::Full(_) => match self.sizes.power_of_number(self.graph, id) {
                Some(p) => p,
                None => return lost,
            },
            op if passes_powers(op) && operands.windows(2).all(|w| w[0] == w[1]) => power(0),
            _ if operands.iter().all(|c| *c == Class::Same { power: 0 }) => 0,
            _ => return lost,
        };
        Class::Same { power }
    }

    /// The result of operands without samples, of which at least one is a sum over samples.
    fn sum(&mut self, id: NodeId, node: &Node, operands: &[Class]) -> Class {
        use Class::{Lost, Mixed, Same, Sum};
        // Without parameters, the data alone decide. But what they decide is not computed here.
        let couples = match node.inputs.iter().all(|v| self.trained[v.index()] || !matches!(self.class(*v), Sum(_))) {
            true => Lost(Doubt::Couples(id)),
            false => Lost(Doubt::Unknown(id)),
        };
        // As an addend, a value that all micro-batches share has a share, too.
        let addend = |c: Class| match c {
            Same { power } => Sum(Share::EQUAL.times(power)),
            c => c,
        };
        match (&node.op, operands) {
            (op, [x]) if is_linear(op) => *x,
            (Op::BinaryScalar(op), [x]) => match (op.op, self.literal(id, op, node.inputs[0]), *x) {
                (_, None, _) => Lost(Doubt::Unknown(id)),
                (Binary::Mul, Some(p), Sum(share)) => Sum(share.times(p)),
                (Binary::Div, Some(p), Sum(share)) if !op.reverse => Sum(share.times(-p)),
                (Binary::Mul, Some(0), Mixed) => Mixed,
                (Binary::Div, Some(0), Mixed) if !op.reverse => Mixed,
                (Binary::Add | Binary::Sub, Some(p), x) if x == Sum(Share::EQUAL.times(p)) => x,
                (Binary::Add | Binary::Sub, Some(_), _) => Mixed,
                _ => couples,
            },
            (Op::Binary(Binary::Mul) | Op::Matmul(_), [Sum(share), Same { power }] | [Same { power }, Sum(share)]) => {
                Sum(share.times(*power))
            }
            (Op::Binary(Binary::Div), [Sum(share), Same { power }]) => Sum(share.times(-power)),
            (Op::Binary(Binary::Mul), [Mixed, Same { power: 0 }] | [Same { power: 0 }, Mixed]) => Mixed,
            (Op::Binary(Binary::Div), [Mixed, Same { power: 0 }]) => Mixed,
            (Op::Binary(Binary::Add | Binary::Sub) | Op::Cat(_), _) => {
                let mut shares = operands.iter().map(|c| addend(*c));
                let first = shares.next().unwrap_or(couples);
                if shares.all(|c| c == first) { first } else { Mixed }
            }
            (Op::Where(_), [Same { power: 0 }, a, b]) => match (*a, *b) {
                (a, b) if a == b => a,
                (Sum(share), Same { .. }) if self.is_zero(node.inputs[2]) => Sum(share),
                (Same { .. }, Sum(share)) if self.is_zero(node.inputs[1]) => Sum(share),
                _ => couples,
            },
            _ => couples,
        }
    }

    /// The power of the number of micro-batches by which a node's number grows from a micro-batch to the batch. `None`
    /// if the number depends on the rows in another way.
    pub(super) fn literal(&mut self, id: NodeId, op: &BinaryScalar, operand: ValueId) -> Option<i32> {
        if self.sizes.other.is_some() {
            return self.sizes.power_of_number(self.graph, id);
        }
        // An archive of one size does not tell its number of rows from a constant that happens to be the same. Only
        // where samples are added up, such a number is rather their count. A body has factors of 0.5 everywhere.
        let divisor = match op.op {
            Binary::Div if !op.reverse => op.scalar,
            Binary::Mul => 1.0 / op.scalar,
            _ => return Some(0),
        };
        let is = |count: usize| count > 0 && (divisor - count as f64).abs() <= 1e-6 * divisor.abs();
        let counts = match self.class(operand) {
            Class::Sum(Share { power: 0, targets: None }) => is(self.sizes.samples) || is(self.summed[operand.index()]),
            Class::Rows { power: 0, .. } => {
                let elements = self.graph.ty(operand).numel();
                op.op == Binary::Div && elements > self.sizes.samples && is(elements)
            }
            _ => false,
        };
        if !counts {
            return Some(0);
        }
        self.guesses.push(id);
        Some(if op.op == Binary::Mul { -1 } else { 1 })
    }

    /// Whether every element of a value is 0.
    pub(super) fn is_zero(&self, v: ValueId) -> bool {
        let value = self.graph.value(v);
        if let Some(constant) = self.graph.constants.get(&value.name) {
            return constant.bytes().iter().all(|b| *b == 0);
        }
        match self.graph.producer(v).map(|n| self.graph.node(n)) {
            Some(Node { op: Op::Full(full), .. }) => full.value == 0.0,
            Some(Node { op: Op::Cast(_) | Op::Expand(_) | Op::Reshape(_) | Op::Detach(_), inputs, .. }) => {
                self.is_zero(inputs[0])
            }
            _ => false,
        }
    }
}

/// Whether an operator of one operand may be applied before a sum over micro-batches, or after it.
pub(super) fn is_linear(op: &Op) -> bool {
    match op {
        Op::Unary(Unary::Neg) | Op::Detach(_) | Op::Reshape(_) | Op::Permute(_) | Op::Expand(_) | Op::Slice(_) => true,
        Op::Cast(cast) => cast.dtype.is_float(),
        Op::Reduce(op) => matches!(op.kind, ReduceKind::Sum | ReduceKind::Mean),
        Op::Split(_) | Op::Flip(_) => true,
        _ => false,
    }
}

/// Whether a factor of all operands is a factor of the result.
pub(super) fn passes_powers(op: &Op) -> bool {
    is_linear(op)
        || matches!(op, Op::Binary(Binary::Add | Binary::Sub | Binary::Maximum | Binary::Minimum) | Op::Cat(_))
}

/// Whether each element of the result depends on the elements at its place alone. Operands broadcast.
pub(super) fn works_by_element(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::BinaryScalar(_)
            | Op::Compare(_)
            | Op::CompareScalar(_)
            | Op::Logical(_)
            | Op::Where(_)
            | Op::Clamp(_)
            | Op::Cast(_)
            | Op::Gelu(_)
            | Op::GeluBackward(_)
            | Op::ThresholdBackward(_)
            | Op::DropoutBackward(_)
            | Op::Detach(_)
    )
}
