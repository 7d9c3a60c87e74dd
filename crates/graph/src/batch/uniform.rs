//! The dimensions along which a value that all micro-batches share does not vary. Only along such a dimension may it meet
//! samples.

use super::class::{Classes, works_by_element};
use crate::{HostTensor, Node, Op, TensorType, ValueId};

impl Classes<'_> {
    /// Records along which dimensions a constant does not vary.
    pub(super) fn record_constant(&mut self, v: ValueId, tensor: &HostTensor) {
        self.uniform[v.index()] = uniform_dims(tensor);
    }

    /// Records along which dimensions the first result does not vary, for a node that reads no samples.
    pub(super) fn record_uniform(&mut self, node: &Node) {
        let out = self.graph.ty(node.outputs[0]);
        let uniform = |v: ValueId| &self.uniform[v.index()][..];
        // Whether all operands that broadcast to the result are uniform along its dimension.
        let broadcast = |dim: usize, inputs: &[ValueId]| {
            inputs.iter().all(|v| {
                let own = (dim + uniform(*v).len()).checked_sub(out.rank());
                own.is_none_or(|d| uniform(*v)[d])
            })
        };
        let leading = |kept: usize| (0..out.rank()).map(|d| d < kept && uniform(node.inputs[0])[d]).collect();
        let found: Vec<bool> = match &node.op {
            Op::Full(_) => vec![true; out.rank()],
            op if works_by_element(op) || matches!(op, Op::Expand(_) | Op::Slice(_)) => {
                (0..out.rank()).map(|d| broadcast(d, &node.inputs)).collect()
            }
            Op::Cat(op) => (0..out.rank()).map(|d| d != op.dim && broadcast(d, &node.inputs)).collect(),
            Op::Permute(op) => op.dims.iter().map(|d| uniform(node.inputs[0])[*d]).collect(),
            Op::Embedding(_) => {
                let ids = uniform(node.inputs[1]);
                (0..out.rank()).map(|d| ids.get(d) == Some(&true)).collect()
            }
            Op::Linear(_) | Op::Softmax(_) | Op::LogSoftmax(_) => leading(out.rank().saturating_sub(1)),
            Op::LayerNorm(op) => leading(out.rank().saturating_sub(op.dims)),
            Op::Matmul(_) => (0..out.rank()).map(|d| d + 2 < out.rank() && broadcast(d, &node.inputs)).collect(),
            Op::Reduce(op) => {
                let x = uniform(node.inputs[0]);
                let kept = (0..x.len()).filter(|d| op.keepdim || !op.dims.contains(d));
                kept.map(|d| op.dims.contains(&d) || x[d]).collect()
            }
            Op::Reshape(_) => {
                let (from, x) = (self.graph.ty(node.inputs[0]), uniform(node.inputs[0]));
                let all = x.iter().all(|u| *u);
                let before = |ty: &TensorType, d: usize| ty.shape[..d].iter().product::<usize>();
                // A dimension that keeps its size and its place is uniform as before.
                let kept = |d: usize| {
                    let mut same = (0..from.rank())
                        .filter(|o| from.shape[*o] == out.shape[d] && before(from, *o) == before(out, d));
                    same.any(|o| x[o])
                };
                (0..out.rank()).map(|d| all || out.shape[d] == 1 || kept(d)).collect()
            }
            _ => out.shape.iter().map(|n| *n == 1).collect(),
        };
        self.uniform[node.outputs[0].index()] = found;
    }
}

/// The dimensions along which a tensor does not vary. Tensors that are large count as varying.
fn uniform_dims(tensor: &HostTensor) -> Vec<bool> {
    const LARGEST: usize = 1 << 22;
    let (shape, bytes) = (tensor.shape(), tensor.bytes());
    if bytes.len() > LARGEST {
        return shape.iter().map(|n| *n == 1).collect();
    }
    let mut inner = tensor.dtype().size();
    let mut uniform = vec![true; shape.len()];
    for (d, n) in shape.iter().enumerate().rev() {
        let block = inner * n;
        uniform[d] = *n <= 1
            || block == 0
            || bytes.chunks_exact(block).all(|block| {
                let (first, rest) = block.split_at(inner);
                rest.chunks_exact(inner).all(|other| other == first)
            });
        inner = block;
    }
    uniform
}
