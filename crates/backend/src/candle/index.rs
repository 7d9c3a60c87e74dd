//! Indexing by one tensor. Indices are checked first, since candle skips the largest integer without an error.

use candle_core::Tensor as Array;
use fusionllm_graph::TensorType;
use fusionllm_graph::ops::EmbeddingDenseBackward;

use super::elementwise::select as choose;
use super::{Result, candle_type, scalar, to_vec};
use crate::kernels::check_indices;

fn checked(ids: &Array, size: usize) -> Result<Array> {
    check_indices(&to_vec::<i64>(ids)?, size)?;
    Ok(ids.contiguous()?)
}

pub(super) fn embedding(weight: &Array, ids: &Array, shape: &[usize]) -> Result<Array> {
    let ids = checked(ids, weight.dims()[0])?.flatten_all()?;
    Ok(weight.contiguous()?.index_select(&ids, 0)?.reshape(shape)?)
}

pub(super) fn embedding_backward(
    op: &EmbeddingDenseBackward,
    g: &Array,
    ids: &Array,
    out: &TensorType,
) -> Result<Array> {
    let ids = checked(ids, op.num_weights)?.flatten_all()?;
    let mut rows = g.reshape((ids.elem_count(), out.shape[1]))?;
    if let Some(padding) = op.padding_idx {
        let padding = ids.broadcast_eq(&scalar(padding as f64, ids.dtype())?)?.unsqueeze(1)?;
        rows = choose(&padding, &scalar(0.0, g.dtype())?, &rows, rows.dims())?;
    }
    let zeros = Array::zeros(out.shape.as_slice(), candle_type(out.dtype)?, &super::CPU)?;
    Ok(zeros.index_add(&ids, &rows, 0)?)
}

pub(super) fn select(dim: usize, x: &Array, ids: &Array) -> Result<Array> {
    Ok(x.contiguous()?.index_select(&checked(ids, x.dims()[dim])?, dim)?)
}

pub(super) fn add(dim: usize, x: &Array, ids: &Array, source: &Array) -> Result<Array> {
    Ok(x.contiguous()?.index_add(&checked(ids, x.dims()[dim])?, &source.contiguous()?, dim)?)
}

/// The part of the operand that the index covers: candle assumes that both have the same size in other dimensions.
pub(super) fn gather(dim: usize, x: &Array, index: &Array) -> Result<Array> {
    let index = checked(index, x.dims()[dim])?;
    let mut part = x.clone();
    for (d, &n) in index.dims().iter().enumerate() {
        if d != dim {
            part = part.narrow(d, 0, n)?;
        }
    }
    Ok(part.contiguous()?.gather(&index, dim)?)
}

/// Adds `values [planes, n]` to zeros `[planes, size]` at `positions [planes, n]` of each plane.
pub(super) fn add_in_planes(values: &Array, positions: &Array, size: usize) -> Result<Array> {
    let positions = checked(positions, size)?;
    let zeros = Array::zeros((values.dims()[0], size), values.dtype(), &super::CPU)?;
    Ok(zeros.scatter_add(&positions, &values.contiguous()?, 1)?)
}
