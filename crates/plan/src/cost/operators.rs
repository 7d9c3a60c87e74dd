use std::fmt::Write as _;

use fusionllm_graph::ops::OpClass;
use fusionllm_graph::{Cost, Graph, NodeId, Op, TensorType};

/// The mark that stands before the results in a [`signature`], and in no operator's name.
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
        maker.op.view().map(|_| maker.op.name())
    };
    signature(&n.op, &graph.types(&n.inputs), &graph.types(&n.outputs), view)
}

/// The quantity by which an operator's time is measured: FLOPs for products and convolutions, bytes for all others.
pub fn work_units(cost: &Cost) -> f64 {
    match cost.class {
        OpClass::Matmul | OpClass::Convolution => cost.flops,
        OpClass::Memory | OpClass::View => cost.bytes,
    }
}
