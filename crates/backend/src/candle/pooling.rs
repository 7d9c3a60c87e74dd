//! Pools. A maximum is taken over windows that a view lays out. An average is taken over rows, then over columns.

use candle_core::Tensor as Array;
use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{AvgPool2d, MaxPool2d};

use super::convolution::windows_of;
use super::reduce::has_nan;
use super::{Result, from_vec, index, scalar, view};

pub(super) fn max_pool(op: &MaxPool2d, x: &Array, out: &TensorType) -> Result<Vec<Array>> {
    let outside = scalar(f64::NEG_INFINITY, x.dtype())?;
    let mut padded = x.contiguous()?;
    for d in 0..2 {
        // Behind the end also what a last window in ceil mode reaches over it.
        let reach = (op.kernel[d] - 1) * op.dilation[d] + 1;
        let needed = (out.shape[2 + d] - 1) * op.stride[d] + reach;
        let after = needed.saturating_sub(x.dims()[2 + d] + op.padding[d]);
        padded = view::pad(&padded, 2 + d, [op.padding[d], after], &outside)?;
    }
    let [rows, columns] = [out.shape[2], out.shape[3]];
    let windows = windows_of(&padded, op.kernel, op.stride, op.dilation, [rows, columns])?;
    let windows = windows.reshape([&out.shape[..], &[op.kernel[0] * op.kernel[1]]].concat())?;
    let mut value = windows.max(4)?;
    let mut tap = windows.argmax(4)?;
    if has_nan(x)? {
        // Candle's comparison passes over NaN; here the last one wins.
        let nan = windows.ne(&windows)?;
        let any = nan.max(4)?;
        value = any.where_cond(&scalar(f64::NAN, x.dtype())?.broadcast_as(value.shape())?, &value)?;
        let number = from_vec((0..nan.dims()[4] as u32).collect(), nan.dims()[4])?.broadcast_as(nan.shape())?;
        let last = nan.where_cond(&number, &number.zeros_like()?)?.max(4)?;
        tap = any.where_cond(&last, &tap)?;
    }
    let positions = to_positions(op, &tap.flatten_all()?.to_vec1::<u32>()?, rows, columns, x.dims()[3]);
    Ok(vec![value, from_vec(positions, out.shape.as_slice())?])
}

/// Converts positions in windows to positions in planes of `width` columns.
fn to_positions(op: &MaxPool2d, taps: &[u32], rows: usize, columns: usize, width: usize) -> Vec<i64> {
    let place = |d: usize, i: usize, tap: usize| {
        let start = i * op.stride[d];
        // Where all elements are -∞ the tap may be one of the padding before; the first one inside stands for it.
        let inside = op.padding[d].saturating_sub(start).div_ceil(op.dilation[d]);
        start + tap.max(inside) * op.dilation[d] - op.padding[d]
    };
    let position = |(at, &tap): (usize, &u32)| {
        let tap = tap as usize;
        let row = place(0, at / columns % rows, tap / op.kernel[1]);
        (row * width + place(1, at % columns, tap % op.kernel[1])) as i64
    };
    taps.iter().enumerate().map(position).collect()
}

pub(super) fn max_pool_backward(g: &Array, positions: &Array, out: &TensorType) -> Result<Array> {
    let planes = out.shape[0] * out.shape[1];
    let n = g.elem_count() / planes;
    let (g, positions) = (g.reshape((planes, n))?, positions.reshape((planes, n))?);
    let dx = index::add_in_planes(&g, &positions, out.shape[2] * out.shape[3])?;
    Ok(dx.reshape(out.shape.as_slice())?)
}

/// The elements that one result of an average reads in one direction.
struct Region {
    start: usize,
    len: usize,
    /// The divisor in this direction.
    count: usize,
}

/// The regions of an average pool in direction `d`, over `size` elements.
fn windows(op: &AvgPool2d, d: usize, size: usize, out: usize) -> Vec<Region> {
    let region = |i: usize| {
        let (start, padding) = (i * op.stride[d], op.padding[d]);
        let end = (start + op.kernel[d]).min(size + 2 * padding);
        let (first, last) = (start.saturating_sub(padding), end.saturating_sub(padding).min(size));
        let count = if op.count_include_pad { end - start } else { last - first };
        Region { start: first, len: last - first, count }
    };
    (0..out).map(region).collect()
}

/// Region `i` of `n` over size `d` is `⌊i d / n⌋ .. ⌈(i + 1) d / n⌉`.
fn parts(size: usize, out: usize) -> Vec<Region> {
    let region = |i: usize| {
        let (start, end) = (i * size / out, ((i + 1) * size).div_ceil(out));
        Region { start, len: end - start, count: end - start }
    };
    (0..out).map(region).collect()
}

/// The average over each region of a dimension.
fn average(x: &Array, dim: usize, regions: &[Region]) -> Result<Array> {
    let each = regions.iter().map(|r| {
        let sum = x.narrow(dim, r.start, r.len)?.contiguous()?.sum_keepdim(dim)?;
        Ok(sum.affine(1.0 / r.count as f64, 0.0)?)
    });
    view::cat(&each.collect::<Result<Vec<_>>>()?, dim)
}

/// The gradient of [`average`] over `size` elements. Shares of overlapping regions are added in the regions' order.
fn spread(g: &Array, dim: usize, size: usize, regions: &[Region]) -> Result<Array> {
    let mut shape = g.dims().to_vec();
    shape[dim] = size;
    let mut dx = Array::zeros(shape, g.dtype(), &super::CPU)?;
    let zero = scalar(0.0, g.dtype())?;
    for (i, r) in regions.iter().enumerate() {
        let mut shape = g.dims().to_vec();
        shape[dim] = r.len;
        let share = g.narrow(dim, i, 1)?.affine(1.0 / r.count as f64, 0.0)?.broadcast_as(shape)?.contiguous()?;
        dx = (dx + view::pad(&share, dim, [r.start, size - r.start - r.len], &zero)?)?;
    }
    Ok(dx)
}

pub(super) fn avg_pool(op: &AvgPool2d, x: &Array, out: &TensorType) -> Result<Array> {
    let rows = average(x, 2, &windows(op, 0, x.dims()[2], out.shape[2]))?;
    average(&rows, 3, &windows(op, 1, x.dims()[3], out.shape[3]))
}

pub(super) fn avg_pool_backward(op: &AvgPool2d, g: &Array, out: &TensorType) -> Result<Array> {
    let (h, w) = (out.shape[2], out.shape[3]);
    let columns = spread(g, 3, w, &windows(op, 1, w, g.dims()[3]))?;
    spread(&columns, 2, h, &windows(op, 0, h, g.dims()[2]))
}

pub(super) fn adaptive(x: &Array, out: &TensorType) -> Result<Array> {
    let rows = average(x, 2, &parts(x.dims()[2], out.shape[2]))?;
    average(&rows, 3, &parts(x.dims()[3], out.shape[3]))
}

pub(super) fn adaptive_backward(g: &Array, out: &TensorType) -> Result<Array> {
    if g.elem_count() == 0 {
        return super::filled(0.0, out);
    }
    let (h, w) = (out.shape[2], out.shape[3]);
    let columns = spread(g, 3, w, &parts(w, g.dims()[3]))?;
    spread(&columns, 2, h, &parts(h, g.dims()[2]))
}
