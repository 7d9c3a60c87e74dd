//! Operators that address elements by integers, and those that order elements.

use fusionllm_graph::ops::EmbeddingDenseBackward;
use fusionllm_graph::{Op, TensorType};

use super::tensor::{Array, with_bits};
use super::{Ran, all, generic, one, with_float};
use crate::kernels::{self, Float};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let out = &outputs[0];
    match op {
        Op::Embedding(_) => {
            let [table, ids] = all(inputs)?;
            with_bits!(out.dtype, T => {
                let (table, ids) = (table.contiguous(), ids.contiguous());
                let mut y = kernels::uninit::<T>(out.numel());
                kernels::embedding(&mut y, table.elements::<T>(), ids.elements(), table.shape[1])
                    .map_err(|e| e.to_string())?;
                one(Array::new(y, out))
            })
        }
        Op::EmbeddingDenseBackward(op) if out.dtype.is_float() && !inputs.iter().any(Array::is_empty) => {
            let [g, ids] = all(inputs)?;
            with_float!(out.dtype, T => one(embedding_backward::<T>(op, g, ids, out)?))
        }
        Op::IndexPut(op) if !op.accumulate && !inputs.iter().any(Array::is_empty) => {
            match op.indexed.iter().position(|indexed| *indexed) {
                Some(dim) if puts_slices(&inputs, dim) => put_slices(inputs, dim),
                _ => generic(&Op::IndexPut(op.clone()), inputs, outputs),
            }
        }
        _ => generic(op, inputs, outputs),
    }
}

/// Whether whole slices of `dim` are replaced, by values that are not broadcast.
fn puts_slices(inputs: &[Array], dim: usize) -> bool {
    let [x, values, at] = inputs else { return false };
    let mut shape = x.shape.clone();
    shape[dim] = at.numel();
    at.shape.len() == 1 && values.shape == shape
}

/// Writes slices in place, if nobody else holds the tensor. A cache of keys or values takes a new token this way.
fn put_slices(inputs: Vec<Array>, dim: usize) -> Ran {
    let [x, values, at] = all(inputs)?;
    let (values, at) = (values.contiguous(), at.contiguous());
    let (size, count) = (x.shape[dim], at.numel());
    let inner: usize = x.shape[dim + 1..].iter().product();
    let at = at.elements::<i64>();
    kernels::check_indices(at, size).map_err(|e| e.to_string())?;
    with_bits!(x.dtype, T => {
        let mut y = x.change::<T>();
        let slices = y.elements::<T>().chunks_mut(size * inner).zip(values.elements::<T>().chunks(count * inner));
        for (to, from) in slices {
            for (i, slice) in at.iter().zip(from.chunks(inner)) {
                to[*i as usize * inner..][..inner].copy_from_slice(slice);
            }
        }
        one(y.done())
    })
}

fn embedding_backward<T: Float>(
    op: &EmbeddingDenseBackward,
    grad: Array,
    ids: Array,
    out: &TensorType,
) -> Result<Array, String> {
    let (grad, ids) = (grad.contiguous(), ids.contiguous());
    let mut d = kernels::uninit::<T>(out.numel());
    kernels::embedding_backward(&mut d, grad.elements(), ids.elements(), out.shape[1], op.padding_idx)
        .map_err(|e| e.to_string())?;
    Ok(Array::new(d, out))
}
