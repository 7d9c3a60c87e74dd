//! Indexing by integer tensors. Positions are computed and checked before any element is read or written.

use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{EmbeddingDenseBackward, Index, MaxPool2dBackward, Triangle};

use super::Operand;
use super::element::{Number, around, broadcast_offsets, elements, strided_offsets, with_element, with_number};
use crate::kernels::{Buffer, check_indices};

/// The indices, or an error for the first one outside `0..size`.
fn checked(index: &Operand<'_>, size: usize) -> Result<Vec<usize>, String> {
    let indices = elements::<i64>(index);
    check_indices(&indices, size).map_err(|e| e.to_string())?;
    Ok(indices.iter().map(|&i| i as usize).collect())
}

/// The positions, in a tensor of shape `x`, of the slices of `dim` that the index names.
pub(super) fn slice_offsets(x: &[usize], dim: usize, index: &Operand<'_>) -> Result<Vec<usize>, String> {
    let (outer, n, inner) = around(x, dim);
    let at = checked(index, n)?;
    let mut offsets = Vec::with_capacity(outer * at.len() * inner);
    for o in 0..outer {
        for i in &at {
            let start = (o * n + i) * inner;
            offsets.extend(start..start + inner);
        }
    }
    Ok(offsets)
}

/// The positions that `gather` reads in a tensor of shape `x`.
pub(super) fn gather_offsets(x: &[usize], dim: usize, index: &Operand<'_>) -> Result<Vec<usize>, String> {
    let at = checked(index, x[dim])?;
    let mut strides = row_major(x);
    let along = std::mem::replace(&mut strides[dim], 0);
    let bases = strided_offsets(&index.ty.shape, &strides);
    Ok(bases.into_iter().zip(at).map(|(b, i)| b + i * along).collect())
}

/// The positions that advanced indexing reads in a tensor of type `x`.
pub(super) fn advanced_offsets(op: &Index, x: &TensorType, index: &[Operand<'_>]) -> Result<Vec<usize>, String> {
    let types: Vec<&TensorType> = index.iter().map(|i| i.ty).collect();
    let (_, at, position) = op.layout(x, &types)?;
    let strides = row_major(&x.shape);
    let (marked, free): (Vec<usize>, Vec<usize>) = (0..x.rank()).partition(|&d| op.indexed[d]);
    let mut bases = vec![0usize; at.iter().product()];
    for (&d, index) in marked.iter().zip(index) {
        let i = checked(index, x.shape[d])?;
        for (b, from) in bases.iter_mut().zip(broadcast_offsets(&index.ty.shape, &at)) {
            *b += i[from] * strides[d];
        }
    }
    let part = |dims: &[usize]| {
        let (shape, strides): (Vec<usize>, Vec<usize>) = dims.iter().map(|&d| (x.shape[d], strides[d])).unzip();
        strided_offsets(&shape, &strides)
    };
    let (before, behind) = (part(&free[..position]), part(&free[position..]));
    let mut offsets = Vec::with_capacity(before.len() * bases.len() * behind.len());
    for a in &before {
        for b in &bases {
            offsets.extend(behind.iter().map(|c| a + b + c));
        }
    }
    Ok(offsets)
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}

pub(super) fn read(x: &Operand<'_>, offsets: &[usize]) -> Result<Buffer, String> {
    with_element!(x.ty.dtype, T => {
        let v = elements::<T>(x);
        Ok(Buffer::new::<T>(offsets.iter().map(|&o| v[o]).collect()))
    })
}

pub(super) fn select(x: &Operand<'_>, dim: usize, index: &Operand<'_>) -> Result<Buffer, String> {
    let (outer, n, inner) = around(&x.ty.shape, dim);
    let at = checked(index, n)?;
    with_element!(x.ty.dtype, T => {
        let v = elements::<T>(x);
        let mut y: Vec<T> = Vec::with_capacity(outer * at.len() * inner);
        for o in 0..outer {
            for i in &at {
                y.extend_from_slice(&v[(o * n + i) * inner..][..inner]);
            }
        }
        Ok(Buffer::new(y))
    })
}

/// A copy of `x` in which the source's elements are written to the positions, or added to them, in order.
pub(super) fn write(
    x: &Operand<'_>,
    offsets: &[usize],
    source: &Operand<'_>,
    accumulate: bool,
) -> Result<Buffer, String> {
    if accumulate {
        return with_number!(x.ty.dtype, T => {
            let mut y = elements::<T>(x).into_owned();
            for (&o, &s) in offsets.iter().zip(elements::<T>(source).iter()) {
                y[o] = Number::add(y[o], s);
            }
            Ok(Buffer::new(y))
        });
    }
    with_element!(x.ty.dtype, T => {
        let mut y = elements::<T>(x).into_owned();
        for (&o, &s) in offsets.iter().zip(elements::<T>(source).iter()) {
            y[o] = s;
        }
        Ok(Buffer::new(y))
    })
}

pub(super) fn embedding_backward(
    op: &EmbeddingDenseBackward,
    g: &Operand<'_>,
    ids: &Operand<'_>,
    out: &TensorType,
) -> Result<Buffer, String> {
    let at = checked(ids, op.num_weights)?;
    let width = out.shape[1];
    with_number!(g.ty.dtype, T => {
        let mut y = vec![T::ZERO; out.numel()];
        let g = elements::<T>(g);
        for (k, &row) in at.iter().enumerate().filter(|&(_, &row)| op.padding_idx != Some(row)) {
            for (d, &s) in y[row * width..][..width].iter_mut().zip(&g[k * width..]) {
                *d = Number::add(*d, s);
            }
        }
        Ok(Buffer::new(y))
    })
}

pub(super) fn max_pool_backward(
    op: &MaxPool2dBackward,
    g: &Operand<'_>,
    at: &Operand<'_>,
    out: &TensorType,
) -> Result<Buffer, String> {
    let plane = op.input[0] * op.input[1];
    let windows: usize = at.ty.shape[2..].iter().product();
    let at = checked(at, plane)?;
    with_number!(g.ty.dtype, T => {
        let mut y = vec![T::ZERO; out.numel()];
        for (k, (&i, &s)) in at.iter().zip(elements::<T>(g).iter()).enumerate() {
            let to = k / windows * plane + i;
            y[to] = Number::add(y[to], s);
        }
        Ok(Buffer::new(y))
    })
}

pub(super) fn triangle(op: &Triangle, x: &Operand<'_>) -> Result<Buffer, String> {
    let &[.., rows, columns] = &x.ty.shape[..] else {
        return Err(format!("needs at least two dimensions, got {}", x.ty));
    };
    with_element!(x.ty.dtype, T => {
        let mut y = elements::<T>(x).into_owned();
        for (i, v) in y.iter_mut().enumerate() {
            let distance = (i % columns) as i128 - (i / columns % rows) as i128;
            let diagonal = i128::from(op.diagonal);
            if if op.upper { distance < diagonal } else { distance > diagonal } {
                *v = T::default();
            }
        }
        Ok(Buffer::new(y))
    })
}
