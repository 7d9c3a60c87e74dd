use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{AvgPool2d, MaxPool2d};

use super::{Array, Elements, indices, position};

pub(super) fn max_pool(op: &MaxPool2d, x: &Array, out: &TensorType) -> Result<Vec<Elements>, String> {
    let v = x.floats()?;
    let (h, w) = (x.shape()[2], x.shape()[3]);
    let (mut values, mut positions) = (Vec::new(), Vec::new());
    for i in indices(&out.shape) {
        let mut best: Option<(f64, usize)> = None;
        for a in 0..op.kernel[0] {
            for b in 0..op.kernel[1] {
                let row = (i[2] * op.stride[0] + a * op.dilation[0]).checked_sub(op.padding[0]);
                let column = (i[3] * op.stride[1] + b * op.dilation[1]).checked_sub(op.padding[1]);
                let (Some(row), Some(column)) = (row, column) else { continue };
                if row >= h || column >= w {
                    continue;
                }
                let here = v[position(x.shape(), &[i[0], i[1], row, column])];
                // The first of equals wins, and NaN wins over all numbers and earlier NaN, as in PyTorch.
                if best.is_none_or(|(max, _)| here > max || here.is_nan()) {
                    best = Some((here, row * w + column));
                }
            }
        }
        let (value, at) = best.ok_or("a window holds no element")?;
        values.push(value);
        positions.push(at as i64);
    }
    Ok(vec![Elements::Float(values), Elements::Int(positions)])
}

pub(super) fn max_pool_backward(g: &Array, at: &Array, out: &TensorType) -> Result<Elements, String> {
    let plane = out.shape[2] * out.shape[3];
    let per_plane = g.shape()[2] * g.shape()[3];
    let mut dx = vec![0.0; out.numel()];
    for (n, (g, &at)) in g.floats()?.iter().zip(at.ints()?).enumerate() {
        let at = usize::try_from(at).ok().filter(|&at| at < plane);
        let at = at.ok_or_else(|| format!("a position lies outside {plane} elements"))?;
        dx[n / per_plane * plane + at] += g;
    }
    Ok(Elements::Float(dx))
}

/// The rows or columns of an average's window, and its divisor in that direction.
fn window(op: &AvgPool2d, d: usize, i: usize, size: usize) -> (std::ops::Range<usize>, usize) {
    let (start, padding) = (i * op.stride[d], op.padding[d]);
    let end = (start + op.kernel[d]).min(size + 2 * padding);
    let inside = start.saturating_sub(padding)..end.saturating_sub(padding).min(size);
    let count = if op.count_include_pad { end - start } else { inside.len() };
    (inside, count)
}

fn averages(
    x: &[usize],
    out: &[usize],
    regions: impl Fn(usize, usize) -> (std::ops::Range<usize>, usize),
    mut f: impl FnMut(usize, usize, f64),
) {
    for (to, i) in indices(out).enumerate() {
        let ((rows, height), (columns, width)) = (regions(0, i[2]), regions(1, i[3]));
        for row in rows {
            for column in columns.clone() {
                f(to, position(x, &[i[0], i[1], row, column]), (height * width) as f64);
            }
        }
    }
}

pub(super) fn avg_pool(op: &AvgPool2d, x: &Array, out: &TensorType) -> Result<Elements, String> {
    let v = x.floats()?;
    let mut y = vec![0.0; out.numel()];
    let size = [x.shape()[2], x.shape()[3]];
    averages(x.shape(), &out.shape, |d, i| window(op, d, i, size[d]), |to, from, n| y[to] += v[from] / n);
    Ok(Elements::Float(y))
}

pub(super) fn avg_pool_backward(op: &AvgPool2d, g: &Array, out: &TensorType) -> Result<Elements, String> {
    let v = g.floats()?;
    let mut dx = vec![0.0; out.numel()];
    let size = [out.shape[2], out.shape[3]];
    averages(&out.shape, g.shape(), |d, i| window(op, d, i, size[d]), |from, to, n| dx[to] += v[from] / n);
    Ok(Elements::Float(dx))
}

/// Region `i` of `n` over size `d` is `⌊i d / n⌋ .. ⌈(i + 1) d / n⌉`.
fn region(i: usize, n: usize, d: usize) -> (std::ops::Range<usize>, usize) {
    let r = i * d / n..((i + 1) * d).div_ceil(n);
    (r.clone(), r.len())
}

pub(super) fn adaptive(x: &Array, out: &TensorType) -> Result<Elements, String> {
    let v = x.floats()?;
    let mut y = vec![0.0; out.numel()];
    let (from, to) = (x.shape(), &out.shape);
    averages(from, to, |d, i| region(i, to[2 + d], from[2 + d]), |to, from, n| y[to] += v[from] / n);
    Ok(Elements::Float(y))
}

pub(super) fn adaptive_backward(g: &Array, out: &TensorType) -> Result<Elements, String> {
    let v = g.floats()?;
    let mut dx = vec![0.0; out.numel()];
    let (from, to) = (&out.shape, g.shape());
    averages(from, to, |d, i| region(i, to[2 + d], from[2 + d]), |from, to, n| dx[to] += v[from] / n);
    Ok(Elements::Float(dx))
}
