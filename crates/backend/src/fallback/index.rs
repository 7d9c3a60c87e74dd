//! Elements addressed by integer tensors: the positions are worked out and checked first, then read or written.

use fusionllm_graph::ops::{EmbeddingDenseBackward, Index, Triangle};
use fusionllm_graph::{HostTensor, TensorType};

use super::element::{Number, around, broadcast_offsets, elements, strided_offsets, tensor, with_element, with_number};

/// Fails on the first index outside of `0..size`.
pub(crate) fn check_indices(indices: &[i64], size: usize) -> Result<(), String> {
    match indices.iter().find(|&&i| i < 0 || i as u64 >= size as u64) {
        Some(i) => Err(format!("index {i} is out of range for size {size}")),
        None => Ok(()),
    }
}

fn checked(index: &HostTensor, size: usize) -> Result<Vec<usize>, String> {
    let indices = elements::<i64>(index);
    check_indices(&indices, size)?;
    Ok(indices.iter().map(|&i| i as usize).collect())
}

/// Positions in a tensor of shape `x` of the slices of `dim` that the index names.
pub(super) fn slice_offsets(x: &[usize], dim: usize, index: &HostTensor) -> Result<Vec<usize>, String> {
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

/// Positions in a tensor of shape `x` that `gather` reads.
pub(super) fn gather_offsets(x: &[usize], dim: usize, index: &HostTensor) -> Result<Vec<usize>, String> {
    let at = checked(index, x[dim])?;
    let mut strides = row_major(x);
    let along = std::mem::replace(&mut strides[dim], 0);
    let bases = strided_offsets(index.shape(), &strides);
    Ok(bases.into_iter().zip(at).map(|(b, i)| b + i * along).collect())
}

/// Positions in a tensor of type `x` that advanced indexing reads.
pub(super) fn advanced_offsets(op: &Index, x: &TensorType, index: &[HostTensor]) -> Result<Vec<usize>, String> {
    let types: Vec<&TensorType> = index.iter().map(HostTensor::ty).collect();
    let (_, at, position) = op.layout(x, &types)?;
    let strides = row_major(&x.shape);
    let (marked, free): (Vec<usize>, Vec<usize>) = (0..x.rank()).partition(|&d| op.indexed[d]);
    let mut bases = vec![0usize; at.iter().product()];
    for (&d, index) in marked.iter().zip(index) {
        let i = checked(index, x.shape[d])?;
        for (b, from) in bases.iter_mut().zip(broadcast_offsets(index.shape(), &at)) {
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

/// Positions in `[N, C, plane]` of positions in each plane.
pub(super) fn plane_offsets(plane: usize, index: &HostTensor) -> Result<Vec<usize>, String> {
    let at = checked(index, plane)?;
    let windows: usize = index.shape()[2..].iter().product();
    Ok(at.into_iter().enumerate().map(|(k, i)| k / windows * plane + i).collect())
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}

pub(super) fn read(x: &HostTensor, offsets: &[usize], out: &TensorType) -> Result<HostTensor, String> {
    with_element!(x.dtype(), T => {
        let v = elements::<T>(x);
        let y: Vec<T> = offsets.iter().map(|&o| v[o]).collect();
        tensor(out.clone(), &y)
    })
}

pub(super) fn select(x: &HostTensor, dim: usize, index: &HostTensor, out: &TensorType) -> Result<HostTensor, String> {
    read(x, &slice_offsets(x.shape(), dim, index)?, out)
}

/// `x` with the source's elements written, or added, to the positions one after the other.
pub(super) fn write(
    x: &HostTensor,
    offsets: &[usize],
    source: &HostTensor,
    accumulate: bool,
) -> Result<HostTensor, String> {
    if accumulate {
        return with_number!(x.dtype(), T => {
            let mut y = elements::<T>(x).into_owned();
            for (&o, &s) in offsets.iter().zip(elements::<T>(source).iter()) {
                y[o] = Number::add(y[o], s);
            }
            tensor(x.ty().clone(), &y)
        });
    }
    with_element!(x.dtype(), T => {
        let mut y = elements::<T>(x).into_owned();
        for (&o, &s) in offsets.iter().zip(elements::<T>(source).iter()) {
            y[o] = s;
        }
        tensor(x.ty().clone(), &y)
    })
}

pub(super) fn embedding_backward(
    op: &EmbeddingDenseBackward,
    g: &HostTensor,
    ids: &HostTensor,
    out: &TensorType,
) -> Result<HostTensor, String> {
    let at = checked(ids, op.num_weights)?;
    let width = out.shape[1];
    with_number!(g.dtype(), T => {
        let mut y = vec![T::ZERO; out.numel()];
        let g = elements::<T>(g);
        for (k, &row) in at.iter().enumerate().filter(|&(_, &row)| op.padding_idx != Some(row)) {
            for (d, &s) in y[row * width..][..width].iter_mut().zip(&g[k * width..]) {
                *d = Number::add(*d, s);
            }
        }
        tensor(out.clone(), &y)
    })
}

pub(super) fn triangle(op: &Triangle, x: &HostTensor) -> Result<HostTensor, String> {
    let &[.., rows, columns] = x.shape() else {
        return Err(format!("needs at least two dimensions, got {}", x.ty()));
    };
    with_element!(x.dtype(), T => {
        let mut y = elements::<T>(x).into_owned();
        for (i, v) in y.iter_mut().enumerate() {
            let distance = (i % columns) as i128 - (i / columns % rows) as i128;
            let diagonal = i128::from(op.diagonal);
            if if op.upper { distance < diagonal } else { distance > diagonal } {
                *v = T::default();
            }
        }
        tensor(x.ty().clone(), &y)
    })
}
