//! Kernels that serve any backend: rarely used operators, and operators that frameworks define differently or lack.
//!
//! They run on one thread in simple loops. Operators that decide a model's speed have tuned kernels in the parent
//! module.

mod arithmetic;
mod dropout;
mod element;
mod index;
mod order;
mod reduce;

use fusionllm_graph::{HostTensor, Op, TensorType, ops};

use super::Buffer;

pub(crate) use dropout::keep_mask;
pub(crate) use element::{Number, with_element, with_number};

/// A row-major operand in host memory.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub(crate) ty: &'a TensorType,
    pub(crate) bytes: &'a [u8],
}

impl<'a> From<&'a HostTensor> for Operand<'a> {
    fn from(t: &'a HostTensor) -> Self {
        Self { ty: t.ty(), bytes: t.bytes() }
    }
}

/// Runs `op`, whose results have the types `outputs`. Returns `None` if there is no generic kernel for it.
///
/// There are kernels for wrapping integer arithmetic and integer reductions; `fmod`, `remainder` and `floor_divide`;
/// `any` and `all`; running sums, sorting, `topk`, `argmax`, `argmin`; indexing by integers; `tril`, `triu`,
/// `arange`.
pub(crate) fn run(op: &Op, inputs: &[Operand<'_>], outputs: &[TensorType]) -> Result<Option<Vec<Buffer>>, String> {
    let one = |result: Result<Buffer, String>| result.map(|r| Some(vec![r]));
    match (op, inputs) {
        (Op::Unary(op), [x]) => one(arithmetic::unary(*op, x)),
        (Op::Binary(op), [a, b]) => one(arithmetic::binary(*op, a, b, &outputs[0])),
        (Op::BinaryScalar(op), [x]) => one(arithmetic::binary_scalar(op, x)),
        (Op::Reduce(op), [x]) => one(reduce::reduce(op, x)),
        (Op::ArgReduce(op), [x]) => one(order::arg_reduce(op, x)),
        (Op::CumSum(op), [x]) => one(reduce::cumsum(op.dim, x)),
        (Op::TopK(op), [x]) => order::sorted(x, op.dim, op.largest, op.k).map(Some),
        (Op::Sort(op), [x]) => {
            let k = x.ty.shape.get(op.dim).copied().unwrap_or(0);
            order::sorted(x, op.dim, op.descending, k).map(Some)
        }
        (Op::Triangle(op), [x]) => one(index::triangle(op, x)),
        (Op::Arange(op), []) => one(arithmetic::arange(op)),
        (Op::Embedding(_), [w, ids]) => one(index::select(w, 0, ids)),
        (Op::EmbeddingDenseBackward(op), [g, ids]) => one(index::embedding_backward(op, g, ids, &outputs[0])),
        (Op::MaxPool2dBackward(op), [g, at]) => one(index::max_pool_backward(op, g, at, &outputs[0])),
        (
            Op::IndexSelect(_)
            | Op::IndexAdd(_)
            | Op::Gather(_)
            | Op::ScatterAdd(_)
            | Op::Scatter(_)
            | Op::Index(_)
            | Op::IndexPut(_),
            _,
        ) => indexed(op, inputs),
        _ => Ok(None),
    }
}

/// Operators that read or write the elements which integer tensors name.
fn indexed(op: &Op, inputs: &[Operand<'_>]) -> Result<Option<Vec<Buffer>>, String> {
    let one = |result: Result<Buffer, String>| result.map(|r| Some(vec![r]));
    match (op, inputs) {
        (Op::IndexSelect(op), [x, at]) => one(index::select(x, op.dim, at)),
        (Op::IndexAdd(op), [x, at, source]) => {
            let offsets = index::slice_offsets(&x.ty.shape, op.dim, at)?;
            one(index::write(x, &offsets, source, true))
        }
        (Op::Gather(op), [x, at]) => {
            let offsets = index::gather_offsets(&x.ty.shape, op.dim, at)?;
            one(index::read(x, &offsets))
        }
        (Op::ScatterAdd(ops::ScatterAdd { dim }), [x, at, source]) => {
            let offsets = index::gather_offsets(&x.ty.shape, *dim, at)?;
            one(index::write(x, &offsets, source, true))
        }
        (Op::Scatter(op), [x, at, source]) => {
            let offsets = index::gather_offsets(&x.ty.shape, op.dim, at)?;
            one(index::write(x, &offsets, source, false))
        }
        (Op::Index(op), [x, at @ ..]) => {
            let offsets = index::advanced_offsets(op, x.ty, at)?;
            one(index::read(x, &offsets))
        }
        (Op::IndexPut(op), [x, values, at @ ..]) => {
            let read = ops::Index { indexed: op.indexed.clone() };
            let offsets = index::advanced_offsets(&read, x.ty, at)?;
            one(index::write(x, &offsets, values, op.accumulate))
        }
        _ => Ok(None),
    }
}
