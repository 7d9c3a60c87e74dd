use candle_core::Tensor as Array;
use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{Arange, ConstantPad, Slice, SliceBackward, Triangle};

use super::elementwise::{cast, select};
use super::{Result, from_vec, index, scalar};

pub(super) fn slice(op: &Slice, x: &Array) -> Result<Array> {
    let count = (op.end - op.start).div_ceil(op.step);
    strided(x, op.dim, op.start, count, op.step)
}

/// `count` elements of a dimension, from `start` on by `step`. `count` is at least 1.
pub(super) fn strided(x: &Array, dim: usize, start: usize, count: usize, step: usize) -> Result<Array> {
    if step == 1 || count == 1 {
        return Ok(x.narrow(dim, start, count)?);
    }
    // Windows of one element. Candle counts them in f32, which is exact for a range that ends with a window.
    let range = x.narrow(dim, start, (count - 1) * step + 1)?;
    if range.dims()[dim] < 1 << 24 {
        return Ok(range.unfold(dim, 1, step)?.squeeze(x.rank())?);
    }
    let at = (0..count).map(|i| (i * step) as i64).collect();
    index::select(dim, &range, &from_vec::<i64>(at, [count].as_slice())?)
}

pub(super) fn slice_backward(op: &SliceBackward, g: &Array, out: &TensorType) -> Result<Array> {
    let s = &op.slice;
    let count = g.dims()[s.dim];
    let mut y = g.clone();
    if s.step > 1 && count > 1 {
        // A new dimension of zeros behind each element spaces them out.
        let spaced = g.unsqueeze(s.dim + 1)?.pad_with_zeros(s.dim + 1, 0, s.step - 1)?;
        let mut shape = g.dims().to_vec();
        shape[s.dim] = count * s.step;
        y = spaced.reshape(shape)?.narrow(s.dim, 0, (count - 1) * s.step + 1)?;
    }
    let after = out.shape[s.dim] - s.start - y.dims()[s.dim];
    Ok(y.contiguous()?.pad_with_zeros(s.dim, s.start, after)?)
}

pub(super) fn cat(xs: &[Array], dim: usize) -> Result<Array> {
    let xs = xs.iter().filter(|x| x.elem_count() > 0).map(|x| x.contiguous());
    let xs = xs.collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(Array::cat(&xs, dim)?)
}

pub(super) fn split(x: &Array, dim: usize, sizes: &[usize]) -> Result<Vec<Array>> {
    let mut start = 0;
    sizes
        .iter()
        .map(|&size| {
            let part = x.narrow(dim, start, size)?;
            start += size;
            Ok(part)
        })
        .collect()
}

pub(super) fn constant_pad(op: &ConstantPad, x: &Array) -> Result<Array> {
    let value = scalar(op.value, x.dtype())?;
    let mut y = x.contiguous()?;
    for (dim, &pads) in op.pads.iter().enumerate() {
        y = pad(&y, dim, pads, &value)?;
    }
    Ok(y)
}

/// Pads one dimension of a contiguous array with copies of a scalar.
pub(super) fn pad(x: &Array, dim: usize, [before, after]: [usize; 2], value: &Array) -> Result<Array> {
    let border = |n: usize| {
        let mut shape = x.dims().to_vec();
        shape[dim] = n;
        value.broadcast_as(shape)
    };
    if before + after == 0 {
        return Ok(x.clone());
    }
    cat(&[border(before)?, x.clone(), border(after)?], dim)
}

pub(super) fn triangle(op: &Triangle, x: &Array, out: &TensorType) -> Result<Array> {
    let (rows, columns) = (out.shape[out.rank() - 2], out.shape[out.rank() - 1]);
    let keep = (0..rows).flat_map(|r| {
        (0..columns).map(move |c| {
            let above = c as i64 - r as i64;
            u8::from(if op.upper { above >= op.diagonal } else { above <= op.diagonal })
        })
    });
    let keep = from_vec::<u8>(keep.collect(), [rows, columns].as_slice())?;
    select(&keep, x, &scalar(0.0, x.dtype())?, &out.shape)
}

pub(super) fn arange(op: &Arange) -> Result<Array> {
    let values = (0..op.len).map(|i| op.start + op.step * i as f64).collect();
    cast(&from_vec::<f64>(values, [op.len].as_slice())?, op.dtype)
}
