//! Operators that run on the host for any backend: the rarely used ones, and those that frameworks compute differently
//! or not at all. A backend downloads the operands and uploads the results.
//!
//! One thread, simple loops: what a model's speed depends on has a kernel elsewhere.

mod arithmetic;
mod dropout;
mod element;
mod index;
mod order;
mod reduce;

use fusionllm_graph::{HostTensor, Op, TensorType, ops};

pub(crate) use dropout::keep_mask;
pub(crate) use index::check_indices;

/// Runs `op`, whose results have the types `outputs`, or returns `None` if it is not among those that run here.
///
/// These are: integer arithmetic (wrapping around, as PyTorch's) and reductions; `fmod`, `remainder` and `floor_divide`; `any` and `all`; scans, sorting, `topk`,
/// `argmax`, `argmin`; everything that addresses elements by integers; `tril`, `triu`, `arange`.
pub(crate) fn run(op: &Op, inputs: &[HostTensor], outputs: &[TensorType]) -> Result<Option<Vec<HostTensor>>, String> {
    let one = |t: Result<HostTensor, String>| t.map(|t| Some(vec![t]));
    match (op, inputs) {
        (Op::Unary(op), [x]) => one(arithmetic::unary(*op, x)),
        (Op::Binary(op), [a, b]) => one(arithmetic::binary(*op, a, b, &outputs[0])),
        (Op::BinaryScalar(op), [x]) => one(arithmetic::binary_scalar(op, x)),
        (Op::Reduce(op), [x]) => one(reduce::reduce(op, x, &outputs[0])),
        (Op::ArgReduce(op), [x]) => one(order::arg_reduce(op, x, &outputs[0])),
        (Op::CumSum(op), [x]) => one(reduce::cumsum(op.dim, x)),
        (Op::TopK(op), [x]) => order::sorted(x, op.dim, op.largest, op.k).map(Some),
        (Op::Sort(op), [x]) => {
            let k = x.shape().get(op.dim).copied().unwrap_or(0);
            order::sorted(x, op.dim, op.descending, k).map(Some)
        }
        (Op::Triangle(op), [x]) => one(index::triangle(op, x)),
        (Op::Arange(op), []) => one(arithmetic::arange(op)),
        (Op::Embedding(_), [w, ids]) => one(index::select(w, 0, ids, &outputs[0])),
        (Op::EmbeddingDenseBackward(op), [g, ids]) => one(index::embedding_backward(op, g, ids, &outputs[0])),
        (Op::IndexSelect(op), [x, at]) => one(index::select(x, op.dim, at, &outputs[0])),
        (Op::IndexAdd(op), [x, at, source]) => {
            let offsets = index::slice_offsets(x.shape(), op.dim, at)?;
            one(index::write(x, &offsets, source, true))
        }
        (Op::Gather(op), [x, at]) => {
            let offsets = index::gather_offsets(x.shape(), op.dim, at)?;
            one(index::read(x, &offsets, &outputs[0]))
        }
        (Op::ScatterAdd(ops::ScatterAdd { dim }), [x, at, source]) => {
            let offsets = index::gather_offsets(x.shape(), *dim, at)?;
            one(index::write(x, &offsets, source, true))
        }
        (Op::Scatter(op), [x, at, source]) => {
            let offsets = index::gather_offsets(x.shape(), op.dim, at)?;
            one(index::write(x, &offsets, source, false))
        }
        (Op::Index(op), [x, at @ ..]) => {
            let offsets = index::advanced_offsets(op, x.ty(), at)?;
            one(index::read(x, &offsets, &outputs[0]))
        }
        (Op::IndexPut(op), [x, values, at @ ..]) => {
            let read = ops::Index { indexed: op.indexed.clone() };
            let offsets = index::advanced_offsets(&read, x.ty(), at)?;
            one(index::write(x, &offsets, values, op.accumulate))
        }
        (Op::MaxPool2dBackward(op), [g, at]) => {
            let plane = op.input[0] * op.input[1];
            let offsets = index::plane_offsets(plane, at)?;
            one(index::write(&HostTensor::zeros(outputs[0].clone()), &offsets, g, true))
        }
        _ => Ok(None),
    }
}
