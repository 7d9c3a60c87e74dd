//! Two-dimensional pooling of planes `[planes, h, w]`.

use std::ops::Range;

use super::parallel::{each, each2, grain, part};
use super::{Float, IndexError};

/// Windows over a plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Windows {
    /// Height and width of the operand.
    pub(crate) input: [usize; 2],
    /// Height and width of the result.
    pub(crate) output: [usize; 2],
    /// Window size.
    pub(crate) kernel: [usize; 2],
    /// Distance between windows.
    pub(crate) stride: [usize; 2],
    /// Padding on both sides.
    pub(crate) padding: [usize; 2],
    /// Distance between a window's elements.
    pub(crate) dilation: [usize; 2],
}

impl Windows {
    fn areas(&self) -> (usize, usize) {
        (self.input[0] * self.input[1], self.output[0] * self.output[1])
    }

    /// First position of window `i` inside the operand, and the number of its elements there.
    fn inside(&self, d: usize, i: usize) -> (usize, usize) {
        let skipped = self.padding[d].saturating_sub(i * self.stride[d]).div_ceil(self.dilation[d]);
        let first = (i * self.stride[d] + skipped * self.dilation[d]).saturating_sub(self.padding[d]);
        let room = self.input[d].saturating_sub(first).div_ceil(self.dilation[d]);
        (first, self.kernel[d].saturating_sub(skipped).min(room))
    }
}

/// Runs `f(result plane, operand plane)` over all planes.
fn planes<T: Send, U: Sync>(out: &mut [T], out_area: usize, x: &[U], area: usize, f: impl Fn(&mut [T], &[U]) + Sync) {
    assert_eq!(out.len() * area, x.len() * out_area, "pool: operand and result do not fit");
    if out.is_empty() {
        return;
    }
    if area == 0 {
        return out.chunks_mut(out_area).for_each(|out| f(out, &[]));
    }
    each(out, out_area, grain(area), |i, out| f(out, part(x, i, area)));
}

/// The largest element of every window, and its position in the operand's plane. NaN is the largest; the first of
/// equals counts.
pub(crate) fn max_pool2d<T: Float>(y: &mut [T], positions: &mut [i64], x: &[T], g: &Windows) {
    let (area, out_area) = g.areas();
    assert!(
        y.len() == positions.len() && y.len() * area == x.len() * out_area,
        "max_pool2d: operands do not fit {g:?}"
    );
    if y.is_empty() || area == 0 {
        return;
    }
    let wide: Vec<(usize, usize)> = (0..g.output[1]).map(|i| g.inside(1, i)).collect();
    each2((y, out_area), (positions, out_area), grain(area), |plane, y, positions| {
        let x = part(x, plane, area);
        let rows = y.chunks_exact_mut(g.output[1]).zip(positions.chunks_exact_mut(g.output[1]));
        for (i, (y, positions)) in rows.enumerate() {
            let (top, tall) = g.inside(0, i);
            for ((y, position), &(left, width)) in y.iter_mut().zip(positions).zip(&wide) {
                let (mut best, mut at) = (T::NEG_INFINITY, top * g.input[1] + left);
                for row in 0..tall {
                    let start = (top + row * g.dilation[0]) * g.input[1] + left;
                    for column in 0..width {
                        let v = x[start + column * g.dilation[1]];
                        if v > best || v.nan() {
                            (best, at) = (v, start + column * g.dilation[1]);
                        }
                    }
                }
                (*y, *position) = (best, at as i64);
            }
        }
    });
}

/// Clears each plane of `area` elements, then adds the gradient's elements to their positions in order. `out_area` is
/// the size of the gradient's plane.
pub(crate) fn max_pool2d_backward<T: Float>(
    dx: &mut [T],
    grad: &[T],
    positions: &[i64],
    area: usize,
    out_area: usize,
) -> Result<(), IndexError> {
    assert!(
        grad.len() == positions.len() && dx.len() * out_area == grad.len() * area,
        "max_pool2d: gradients do not fit"
    );
    super::check_indices(positions, area)?;
    dx.fill(T::ZERO);
    if grad.is_empty() || area == 0 {
        return Ok(());
    }
    each(dx, area, grain(area), |i, dx| {
        for (&g, &p) in part(grad, i, out_area).iter().zip(part(positions, i, out_area)) {
            dx[p as usize] += g;
        }
    });
    Ok(())
}

/// A window of a mean: its rows, its columns and its divisor. A window that lies in padding is empty.
type Region = (Range<usize>, Range<usize>, f64);

fn means<T: Float>(y: &mut [T], x: &[T], [h, w]: [usize; 2], regions: &[Region]) {
    planes(y, regions.len(), x, h * w, |y, x| {
        for (y, (rows, columns, divisor)) in y.iter_mut().zip(regions) {
            let mut sum = T::ZERO;
            for row in rows.clone() {
                for v in &x[row * w..][columns.clone()] {
                    sum += *v;
                }
            }
            *y = sum / T::of(*divisor);
        }
    });
}

fn means_backward<T: Float>(dx: &mut [T], grad: &[T], [h, w]: [usize; 2], regions: &[Region]) {
    dx.fill(T::ZERO);
    if regions.is_empty() {
        return;
    }
    planes(dx, h * w, grad, regions.len(), |dx, grad| {
        for (&g, (rows, columns, divisor)) in grad.iter().zip(regions) {
            let g = g / T::of(*divisor);
            for row in rows.clone() {
                for d in &mut dx[row * w..][columns.clone()] {
                    *d += g;
                }
            }
        }
    });
}

/// The regions of an average pool. Elements beyond the padded end never count; padding counts if `count_padding`.
fn windows(g: &Windows, count_padding: bool) -> Vec<Region> {
    let along = |d: usize, i: usize| {
        let start = i * g.stride[d];
        let padded = (start + g.kernel[d]).min(g.input[d] + 2 * g.padding[d]) - start;
        let end = (start + g.kernel[d]).saturating_sub(g.padding[d]).min(g.input[d]);
        let start = start.saturating_sub(g.padding[d]).min(end);
        (start..end, padded)
    };
    let mut out = Vec::with_capacity(g.output[0] * g.output[1]);
    for i in 0..g.output[0] {
        for j in 0..g.output[1] {
            let ((rows, tall), (columns, wide)) = (along(0, i), along(1, j));
            let inside = rows.len() * columns.len();
            // An empty window's mean is 0.
            let divisor = if count_padding { tall * wide } else { inside.max(1) };
            out.push((rows, columns, divisor as f64));
        }
    }
    out
}

/// The mean of every window.
pub(crate) fn avg_pool2d<T: Float>(y: &mut [T], x: &[T], g: &Windows, count_padding: bool) {
    means(y, x, g.input, &windows(g, count_padding));
}

/// The gradient of [`avg_pool2d`]'s operand.
pub(crate) fn avg_pool2d_backward<T: Float>(dx: &mut [T], grad: &[T], g: &Windows, count_padding: bool) {
    means_backward(dx, grad, g.input, &windows(g, count_padding));
}

/// Region `i` of `n` over size `d` is `⌊i d / n⌋ .. ⌈(i + 1) d / n⌉`.
fn adaptive(input: [usize; 2], output: [usize; 2]) -> Vec<Region> {
    let along = |d: usize, i: usize| i * input[d] / output[d]..((i + 1) * input[d]).div_ceil(output[d]);
    let mut out = Vec::with_capacity(output[0] * output[1]);
    for i in 0..output[0] {
        for j in 0..output[1] {
            let (rows, columns) = (along(0, i), along(1, j));
            let count = rows.len() * columns.len();
            out.push((rows, columns, count as f64));
        }
    }
    out
}

/// Means over `output[0] x output[1]` regions.
pub(crate) fn adaptive_avg_pool2d<T: Float>(y: &mut [T], x: &[T], input: [usize; 2], output: [usize; 2]) {
    means(y, x, input, &adaptive(input, output));
}

/// The gradient of [`adaptive_avg_pool2d`]'s operand.
pub(crate) fn adaptive_avg_pool2d_backward<T: Float>(dx: &mut [T], grad: &[T], input: [usize; 2], output: [usize; 2]) {
    means_backward(dx, grad, input, &adaptive(input, output));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows over a plane of 4 rows and 5 columns, with padding. Windows in the last column reach beyond the plane.
    const WINDOWS: Windows =
        Windows { input: [4, 5], output: [2, 3], kernel: [3, 3], stride: [2, 2], padding: [1, 1], dilation: [1, 1] };

    #[test]
    fn largest_elements_and_where_they_are() {
        let mut x: Vec<f32> = (0..20).map(|i| ((i * 7) % 20) as f32).collect();
        x[19] = f32::NAN;
        let (mut y, mut at) = ([0.0; 6], [0; 6]);
        max_pool2d(&mut y, &mut at, &x, &WINDOWS);
        // Rows: 0 7 14 1 8 / 15 2 9 16 3 / 10 17 4 11 18 / 5 12 19 6 NaN
        assert_eq!(at, [5, 8, 8, 11, 17, 19]);
        assert_eq!(y[..5], [15.0, 16.0, 16.0, 17.0, 19.0]);
        assert!(y[5].is_nan());
        let mut dx = [9.0; 20];
        max_pool2d_backward(&mut dx, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &at, 20, 6).unwrap();
        assert_eq!((dx[8], dx[5], dx[19], dx[0]), (5.0, 1.0, 6.0, 0.0));
        let bad = max_pool2d_backward(&mut dx, &[1.0; 6], &[0, 0, 0, 0, 0, 20], 20, 6);
        assert_eq!(bad, Err(IndexError { index: 20, size: 20 }));
    }

    #[test]
    fn means_of_windows() {
        let x = [1.0f64; 20];
        let mut y = [0.0; 6];
        avg_pool2d(&mut y, &x, &WINDOWS, false);
        assert_eq!(y, [1.0; 6]);
        avg_pool2d(&mut y, &x, &WINDOWS, true);
        // Corners lack 5 of 9 elements.
        assert_eq!(y, [4.0 / 9.0, 6.0 / 9.0, 4.0 / 9.0, 6.0 / 9.0, 1.0, 6.0 / 9.0]);
    }

    #[test]
    fn adaptive_regions_overlap() {
        let x: Vec<f64> = (0..5).map(f64::from).collect();
        let mut y = [0.0; 3];
        adaptive_avg_pool2d(&mut y, &x, [1, 5], [1, 3]);
        assert_eq!(y, [0.5, 2.0, 3.5]);
    }

    /// <A x, g> = <x, Aᵀ g>: the backward kernels are the transposes of the linear forward ones.
    #[test]
    fn backward_is_the_transpose() {
        let x: Vec<f64> = (0..40).map(|i| f64::from(i).sin()).collect();
        let g: Vec<f64> = (0..12).map(|i| f64::from(i).cos()).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (mut y, mut dx) = ([0.0; 12], [0.0; 40]);
        for count in [false, true] {
            avg_pool2d(&mut y, &x, &WINDOWS, count);
            avg_pool2d_backward(&mut dx, &g, &WINDOWS, count);
            assert!((dot(&y, &g) - dot(&x, &dx)).abs() < 1e-12);
        }
        adaptive_avg_pool2d(&mut y, &x, [4, 5], [3, 2]);
        adaptive_avg_pool2d_backward(&mut dx, &g, [4, 5], [3, 2]);
        assert!((dot(&y, &g) - dot(&x, &dx)).abs() < 1e-12);
    }
}
