use std::fmt::Write as _;

use fusionllm_graph::ops::{Binary, OpClass, SquaredNorm};
use fusionllm_graph::{Cost, DType, Graph, NodeId, Op, TensorType};

use crate::optimizer::Optimizer;

/// Stands before the results in a [`signature`], and in no operator's name.
pub(super) const RESULTS: &str = " -> ";

/// An operator with the types of its operands and results. A model's own operators are measured by signature.
///
/// An operand that is a view, such as a transposed matrix, is read in another order than a tensor. `view` returns the
/// name of the operator that made operand `i` a view.
pub fn signature<'v>(
    op: &Op,
    inputs: &[&TensorType],
    outputs: &[&TensorType],
    view: impl Fn(usize) -> Option<&'v str>,
) -> String {
    let mut signature = op.name().to_owned();
    for (i, ty) in inputs.iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = write!(signature, " {ty}");
        if let Some(name) = view(i) {
            signature.extend(["<", name]);
        }
    }
    for (i, ty) in outputs.iter().enumerate() {
        let _ = write!(signature, "{}{ty}", if i == 0 { RESULTS } else { " " });
    }
    signature
}

/// The [`signature`] of a node.
pub fn node_signature(graph: &Graph, node: NodeId) -> String {
    let n = graph.node(node);
    let view = |i: usize| {
        let maker = graph.node(graph.producer(n.inputs[i])?);
        is_view(&maker.op, &graph.types(&maker.inputs), &graph.types(&maker.outputs)).then(|| maker.op.name())
    };
    signature(&n.op, &graph.types(&n.inputs), &graph.types(&n.outputs), view)
}

/// Whether an operator's results are views of its operands.
pub fn is_view(op: &Op, inputs: &[&TensorType], outputs: &[&TensorType]) -> bool {
    op.cost(inputs, outputs).class == OpClass::View
}

/// The quantity by which an operator's time is measured: FLOPs for products and convolutions, bytes for all others.
pub fn work_units(cost: &Cost) -> f64 {
    match cost.class {
        OpClass::Matmul | OpClass::Convolution => cost.flops,
        OpClass::Memory | OpClass::View => cost.bytes,
    }
}

/// The operator that adds a tensor to a sum: its name and cost.
pub(crate) fn sum(ty: &TensorType) -> (&'static str, Cost) {
    let add = Op::from(Binary::Add);
    (add.name(), add.cost(&[ty, ty], &[ty]))
}

/// The operator that computes a gradient's squared norm: its name and cost.
pub(crate) fn squared_norm(ty: &TensorType) -> (&'static str, Cost) {
    let op = Op::from(SquaredNorm);
    (op.name(), op.cost(&[ty], &[&TensorType::new(DType::F64, [])]))
}

/// The operator that applies a gradient: its name and cost.
pub(crate) fn update(optimizer: &Optimizer, ty: &TensorType) -> (&'static str, Cost) {
    let op = optimizer.op();
    let outputs = vec![ty; 1 + optimizer.slots().len()];
    // The hyper-parameters are a few scalars.
    let hyper = TensorType::new(DType::F64, [4]);
    let inputs: Vec<&TensorType> = [ty, ty].into_iter().chain(outputs[1..].iter().copied()).chain([&hyper]).collect();
    (op.name(), op.cost(&inputs, &outputs))
}
