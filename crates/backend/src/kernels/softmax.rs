//! Softmax and its logarithm along the last dimension, and their derivatives.
//!
//! Every kernel overwrites its first argument, which is first copied from a source if there is one.

use super::Float;
use super::parallel::{each, grain, rows_per_chunk};
use super::reduce::{largest, sum_of, sum_of_two};
use super::simd::simd;

/// Runs `f(rows, offset)` over chunks of whole rows of `out`. Each is first copied from `source` if there is one.
fn row_chunks<T: Float>(out: &mut [T], source: Option<&[T]>, width: usize, f: impl Fn(&mut [T], usize) + Sync) {
    assert!(source.is_none_or(|s| s.len() == out.len()), "operand and result differ in length");
    if width == 0 {
        return;
    }
    let chunk = rows_per_chunk(width) * width;
    each(out, chunk, grain(chunk), |i, rows| {
        if let Some(source) = source {
            rows.copy_from_slice(&source[i * chunk..i * chunk + rows.len()]);
        }
        f(rows, i * chunk);
    });
}

/// Replaces a row by `e^(x - max)`, and returns the largest element and the sum.
#[inline(always)]
pub(crate) fn exponentials<T: Float>(row: &mut [T]) -> (T, T) {
    let max = largest(row);
    // A row of minus infinities becomes zeros, like a fully masked row of attention.
    let shift = if max == T::NEG_INFINITY { T::ZERO } else { max };
    for v in row.iter_mut() {
        *v = (*v - shift).exp();
    }
    (max, sum_of(row, |v| v))
}

/// `max x` and `ln Σ e^(x - max)` of a row. Their sum is `ln Σ e^x`. It is not added here, because large operands would
/// lose digits.
#[inline(always)]
pub(crate) fn log_sum_exp<T: Float>(row: &[T]) -> (T, T) {
    let max = largest(row);
    let shift = if max == T::NEG_INFINITY { T::ZERO } else { max };
    (shift, sum_of(row, |v| (v - shift).exp()).ln())
}

/// `e^x / Σ e^x` along rows of `width` elements.
pub(crate) fn softmax<T: Float>(out: &mut [T], source: Option<&[T]>, width: usize) {
    simd! {
        fn rows<T: Float>(y: &mut [T], width: usize) {
            for row in y.chunks_exact_mut(width) {
                let (_, sum) = exponentials(row);
                let scale = T::ONE / sum;
                for v in row {
                    *v *= scale;
                }
            }
        }
    }
    row_chunks(out, source, width, |y, _| rows(y, width));
}

/// `x - ln Σ e^x` along rows of `width` elements.
pub(crate) fn log_softmax<T: Float>(out: &mut [T], source: Option<&[T]>, width: usize) {
    simd! {
        fn rows<T: Float>(y: &mut [T], width: usize) {
            for row in y.chunks_exact_mut(width) {
                let (max, log) = log_sum_exp(row);
                for v in row {
                    *v = (*v - max) - log;
                }
            }
        }
    }
    row_chunks(out, source, width, |y, _| rows(y, width));
}

/// Gradient of [`softmax`] from its result `y`: `y (g - Σ g y)`.
pub(crate) fn softmax_backward<T: Float>(grad: &mut [T], source: Option<&[T]>, y: &[T], width: usize) {
    simd! {
        fn rows<T: Float>(grad: &mut [T], y: &[T], width: usize) {
            for (g, y) in grad.chunks_exact_mut(width).zip(y.chunks_exact(width)) {
                let dot = sum_of_two(g, y, |g, y| g * y);
                for (g, &y) in g.iter_mut().zip(y) {
                    *g = (*g - dot) * y;
                }
            }
        }
    }
    assert_eq!(grad.len(), y.len(), "gradient and result differ in length");
    row_chunks(grad, source, width, |g, start| rows(g, &y[start..start + g.len()], width));
}

/// Gradient of [`log_softmax`] from its result `y`: `g - e^y Σ g`.
pub(crate) fn log_softmax_backward<T: Float>(grad: &mut [T], source: Option<&[T]>, y: &[T], width: usize) {
    simd! {
        fn rows<T: Float>(grad: &mut [T], y: &[T], width: usize) {
            for (g, y) in grad.chunks_exact_mut(width).zip(y.chunks_exact(width)) {
                let sum = sum_of(g, |g| g);
                for (g, &y) in g.iter_mut().zip(y) {
                    *g -= y.exp() * sum;
                }
            }
        }
    }
    assert_eq!(grad.len(), y.len(), "gradient and result differ in length");
    row_chunks(grad, source, width, |g, start| rows(g, &y[start..start + g.len()], width));
}

#[cfg(test)]
mod tests {
    use super::*;

    type Forward = fn(&mut [f64], Option<&[f64]>, usize);
    type Backward = fn(&mut [f64], Option<&[f64]>, &[f64], usize);

    #[test]
    fn derivatives_match_differences() {
        let (rows, width, h) = (3, 37, 1e-6);
        let x: Vec<f64> = (0..rows * width).map(|i| (i as f64 * 1.7).sin() * 3.0).collect();
        let g: Vec<f64> = (0..rows * width).map(|i| (i as f64 * 0.3).cos()).collect();
        let cases: [(Forward, Backward); 2] = [(softmax, softmax_backward), (log_softmax, log_softmax_backward)];
        for (f, b) in cases {
            let run = |x: &[f64]| {
                let mut y = vec![0.0; x.len()];
                f(&mut y, Some(x), width);
                y
            };
            let mut dx = vec![0.0; x.len()];
            b(&mut dx, Some(&g), &run(&x), width);
            for i in 0..x.len() {
                let (mut hi, mut lo) = (x.clone(), x.clone());
                hi[i] += h;
                lo[i] -= h;
                let want: f64 =
                    run(&hi).iter().zip(run(&lo)).zip(&g).map(|((a, b), g)| g * (a - b)).sum::<f64>() / (2.0 * h);
                assert!((dx[i] - want).abs() < 1e-8, "{i}: {} {want}", dx[i]);
            }
        }
    }

    #[test]
    fn rows_sum_to_one_and_large_logits_stay_finite() {
        let width = 1000;
        let mut x: Vec<f32> = (0..3 * width).map(|i| i as f32).collect();
        x[2 * width..].fill(f32::NEG_INFINITY);
        x[2 * width + 5] = 3.0;
        softmax(&mut x, None, width);
        for row in x.chunks(width) {
            assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
        assert_eq!(x[2 * width + 5], 1.0);
    }
}
