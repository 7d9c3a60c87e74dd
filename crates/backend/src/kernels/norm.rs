//! Layer normalisation.
//!
//! With `x̂ = (x - mean) rstd` and `y = x̂ w + b`, the gradients are `dx = rstd (g w - avg(g w) - x̂ avg(g w x̂))`,
//! `dw = Σ g x̂` and `db = Σ g` (Ba et al., "Layer normalization", 2016).

use super::Float;
use super::parallel::{Shared, each, each2, grain, part, rows_per_chunk, rows_per_partial};
use super::reduce::{sum_columns, sum_of};
use super::simd::simd;

/// Normalises rows of `x [rows, width]` to `y`, by the biased variance. It also writes each row's mean and reciprocal
/// standard deviation (`[rows]` each).
pub(crate) fn layer_norm<T: Float>(
    (y, mean, rstd): (&mut [T], &mut [T], &mut [T]),
    x: &[T],
    weight: Option<&[T]>,
    bias: Option<&[T]>,
    width: usize,
    eps: f64,
) {
    simd! {
        fn rows<T: Float>(y: &mut [T], mean: &mut [T], rstd: &mut [T], x: &[T], w: Option<&[T]>, b: Option<&[T]>, width: usize, eps: f64) {
            let n = T::of(width as f64);
            let each = y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(mean.iter_mut().zip(rstd));
            for ((y, x), (mean, rstd)) in each {
                let m = sum_of(x, |v| v) / n;
                let var = sum_of(x, |v| (v - m) * (v - m)) / n;
                let r = T::ONE / (var + T::of(eps)).sqrt();
                (*mean, *rstd) = (m, r);
                match (w, b) {
                    (Some(w), Some(b)) => {
                        for i in 0..width {
                            y[i] = (x[i] - m) * r * w[i] + b[i];
                        }
                    }
                    _ => {
                        for i in 0..width {
                            let v = (x[i] - m) * r;
                            let v = if let Some(w) = w { v * w[i] } else { v };
                            y[i] = if let Some(b) = b { v + b[i] } else { v };
                        }
                    }
                }
            }
        }
    }
    assert!(y.len() == x.len() && mean.len() == rstd.len() && mean.len() * width == x.len());
    assert!(weight.is_none_or(|w| w.len() == width) && bias.is_none_or(|b| b.len() == width));
    if width == 0 {
        return;
    }
    let chunk = rows_per_chunk(width);
    let (n, rstd) = (rstd.len(), Shared::new(rstd));
    each2((y, chunk * width), (mean, chunk), grain(chunk * width), |i, y, mean| {
        // SAFETY: each task has rows of its own.
        let rstd = unsafe { rstd.slice(i * chunk, chunk.min(n - i * chunk)) };
        rows(y, mean, rstd, part(x, i, chunk * width), weight, bias, width, eps);
    });
}

/// Values of the forward pass for the gradients of [`layer_norm`].
#[derive(Clone, Copy)]
pub(crate) struct LayerNormSaved<'a, T> {
    /// The operand, `[rows, width]`.
    pub(crate) x: &'a [T],
    /// `[rows]`.
    pub(crate) mean: &'a [T],
    /// `[rows]`.
    pub(crate) rstd: &'a [T],
    /// Elements of a row.
    pub(crate) width: usize,
}

/// Gradient of [`layer_norm`] with respect to its operand.
pub(crate) fn layer_norm_input_grad<T: Float>(
    dx: &mut [T],
    grad: &[T],
    saved: LayerNormSaved<'_, T>,
    weight: Option<&[T]>,
) {
    simd! {
        fn rows<T: Float>(dx: &mut [T], grad: &[T], x: &[T], mean: &[T], rstd: &[T], w: Option<&[T]>, width: usize) {
            let n = T::of(width as f64);
            let each = dx.chunks_exact_mut(width).zip(grad.chunks_exact(width)).zip(x.chunks_exact(width));
            for (((dx, g), x), (&m, &r)) in each.zip(mean.iter().zip(rstd)) {
                match w {
                    Some(w) => {
                        for i in 0..width {
                            dx[i] = g[i] * w[i];
                        }
                    }
                    None => dx.copy_from_slice(g),
                }
                let avg = sum_of(dx, |v| v) / n;
                let avg_x = super::reduce::sum_of_two(dx, x, |g, x| g * ((x - m) * r)) / n;
                for i in 0..width {
                    dx[i] = r * (dx[i] - avg - (x[i] - m) * r * avg_x);
                }
            }
        }
    }
    let LayerNormSaved { x, mean, rstd, width } = saved;
    assert!(dx.len() == x.len() && grad.len() == x.len() && mean.len() == rstd.len() && mean.len() * width == x.len());
    assert!(weight.is_none_or(|w| w.len() == width));
    if width == 0 {
        return;
    }
    let chunk = rows_per_chunk(width);
    each(dx, chunk * width, grain(chunk * width), |i, dx| {
        let (g, x) = (part(grad, i, chunk * width), part(x, i, chunk * width));
        rows(dx, g, x, part(mean, i, chunk), part(rstd, i, chunk), weight, width);
    });
}

/// Gradients of [`layer_norm`] with respect to its weight and bias, `[width]` each. At most 16 partial sums over
/// consecutive rows are added in order.
pub(crate) fn layer_norm_weight_grad<T: Float>(
    (dw, db): (&mut [T], &mut [T]),
    grad: &[T],
    saved: LayerNormSaved<'_, T>,
) {
    simd! {
        fn rows<T: Float>(dw: &mut [T], db: &mut [T], grad: &[T], x: &[T], mean: &[T], rstd: &[T]) {
            let width = dw.len();
            dw.fill(T::ZERO);
            db.fill(T::ZERO);
            let each = grad.chunks_exact(width).zip(x.chunks_exact(width)).zip(mean.iter().zip(rstd));
            for ((g, x), (&m, &r)) in each {
                for i in 0..width {
                    dw[i] += g[i] * ((x[i] - m) * r);
                    db[i] += g[i];
                }
            }
        }
    }
    let LayerNormSaved { x, mean, rstd, width } = saved;
    assert!(grad.len() == x.len() && mean.len() == rstd.len() && mean.len() * width == x.len());
    assert!(dw.len() == width && db.len() == width);
    if width == 0 {
        return;
    }
    let chunk = rows_per_partial(mean.len(), width);
    let parts = mean.len().div_ceil(chunk);
    let (mut dws, mut dbs) = (vec![T::ZERO; parts * width], vec![T::ZERO; parts * width]);
    each2((&mut dws, width), (&mut dbs, width), grain(chunk * width), |i, dw, db| {
        let (g, x) = (part(grad, i, chunk * width), part(x, i, chunk * width));
        rows(dw, db, g, x, part(mean, i, chunk), part(rstd, i, chunk));
    });
    sum_columns(dw, &dws);
    sum_columns(db, &dbs);
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPS: f64 = 1e-5;

    fn forward(x: &[f64], w: &[f64], b: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let rows = x.len() / w.len();
        let (mut y, mut mean, mut rstd) = (vec![0.0; x.len()], vec![0.0; rows], vec![0.0; rows]);
        layer_norm((&mut y, &mut mean, &mut rstd), x, Some(w), Some(b), w.len(), EPS);
        (y, mean, rstd)
    }

    /// L = Σ g y. Every gradient is compared with (L(+h) - L(-h)) / 2h.
    #[test]
    fn gradients_match_differences() {
        let (rows, width, h) = (5, 43, 1e-6);
        let x: Vec<f64> = (0..rows * width).map(|i| (i as f64 * 1.3).sin() * 2.0 + 0.5).collect();
        let g: Vec<f64> = (0..rows * width).map(|i| (i as f64 * 0.7).cos()).collect();
        let w: Vec<f64> = (0..width).map(|i| 1.0 + 0.1 * i as f64).collect();
        let b: Vec<f64> = (0..width).map(|i| -0.2 * i as f64).collect();
        let loss = |x: &[f64], w: &[f64], b: &[f64]| forward(x, w, b).0.iter().zip(&g).map(|(a, b)| a * b).sum::<f64>();
        let (_, mean, rstd) = forward(&x, &w, &b);
        let saved = LayerNormSaved { x: &x, mean: &mean, rstd: &rstd, width };
        let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; width], vec![0.0; width]);
        layer_norm_input_grad(&mut dx, &g, saved, Some(&w));
        layer_norm_weight_grad((&mut dw, &mut db), &g, saved);
        let difference = |v: &[f64], i: usize, f: &dyn Fn(&[f64]) -> f64| {
            let (mut hi, mut lo) = (v.to_vec(), v.to_vec());
            hi[i] += h;
            lo[i] -= h;
            (f(&hi) - f(&lo)) / (2.0 * h)
        };
        for (i, d) in dx.iter().enumerate() {
            assert!((d - difference(&x, i, &|x| loss(x, &w, &b))).abs() < 1e-6);
        }
        for i in 0..width {
            assert!((dw[i] - difference(&w, i, &|w| loss(&x, w, &b))).abs() < 1e-6);
            assert!((db[i] - difference(&b, i, &|b| loss(&x, &w, b))).abs() < 1e-6);
        }
    }

    #[test]
    fn rows_have_mean_zero_and_variance_one() {
        let (rows, width) = (300, 768);
        let x: Vec<f32> = (0..rows * width).map(|i| ((i * 7919) % 1013) as f32 + 1000.0).collect();
        let (mut y, mut mean, mut rstd) = (vec![0.0; x.len()], vec![0.0; rows], vec![0.0; rows]);
        layer_norm((&mut y, &mut mean, &mut rstd), &x, None, None, width, EPS);
        for row in y.chunks(width) {
            let m = row.iter().map(|&v| f64::from(v)).sum::<f64>() / width as f64;
            let v = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / width as f64;
            assert!(m.abs() < 1e-5 && (v - 1.0).abs() < 1e-4, "{m} {v}");
        }
    }
}
