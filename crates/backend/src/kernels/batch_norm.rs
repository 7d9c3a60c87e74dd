//! Batch normalisation of the channels of `[n, c, inner]` (Ioffe and Szegedy, 2015). The gradients are those of layer
//! normalisation with averages over images and pixels.

use super::Float;
use super::parallel::{Shared, each2, grain, tasks};
use super::reduce::{sum_of, sum_of_two};
use super::simd::simd;

/// Sizes of an operand `[n, c, inner]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Channels {
    /// Images.
    pub(crate) n: usize,
    /// Channels.
    pub(crate) c: usize,
    /// Elements of one channel of one image.
    pub(crate) inner: usize,
}

impl Channels {
    fn numel(&self) -> usize {
        self.n * self.c * self.inner
    }

    /// Elements of one channel in all images.
    fn count(&self) -> usize {
        self.n * self.inner
    }

    /// A channel's elements in each image.
    fn planes<'a, T>(&'a self, x: &'a [T], c: usize) -> impl Iterator<Item = &'a [T]> {
        (0..self.n).map(move |n| &x[(n * self.c + c) * self.inner..][..self.inner])
    }
}

simd! {
    fn total<T: Float>(x: &[T]) -> f64 {
        sum_of(x, |v| v).f64()
    }

    fn squares<T: Float>(x: &[T], mean: T) -> f64 {
        sum_of(x, |v| (v - mean) * (v - mean)).f64()
    }

    fn products<T: Float>(grad: &[T], x: &[T], mean: T) -> f64 {
        sum_of_two(grad, x, |g, x| g * (x - mean)).f64()
    }

    fn scale<T: Float>(y: &mut [T], x: &[T], mean: T, factor: T, offset: T) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = (x - mean) * factor + offset;
        }
    }

    fn input_grad<T: Float>(dx: &mut [T], grad: &[T], x: &[T], mean: T, factor: T, average: T, slope: T) {
        for ((dx, &g), &x) in dx.iter_mut().zip(grad).zip(x) {
            *dx = factor * (g - average - (x - mean) * slope);
        }
    }
}

/// Results of [`batch_norm`]: the normalised operand, and each channel's mean and reciprocal standard deviation.
pub(crate) struct BatchNormOut<'a, T> {
    /// `[n, c, inner]`
    pub(crate) y: &'a mut [T],
    /// `[c]`
    pub(crate) mean: &'a mut [T],
    /// `[c]`
    pub(crate) rstd: &'a mut [T],
}

/// Normalises each channel by its mean and biased variance, then applies `weight [c]` and `bias [c]`. The running
/// statistics move by `momentum` towards the mean and the unbiased variance.
pub(crate) fn batch_norm<T: Float>(
    out: BatchNormOut<'_, T>,
    (running_mean, running_var): (&mut [T], &mut [T]),
    x: &[T],
    (weight, bias): (&[T], &[T]),
    sizes: Channels,
    momentum: f64,
    eps: f64,
) {
    let BatchNormOut { y, mean, rstd } = out;
    assert!(x.len() == sizes.numel() && y.len() == x.len(), "batch_norm: operands do not fit {sizes:?}");
    let vectors = [&*mean, rstd, running_mean, running_var, weight, bias];
    assert!(vectors.iter().all(|v| v.len() == sizes.c), "batch_norm: channels do not fit {sizes:?}");
    let (y, running_mean, running_var) = (Shared::new(y), Shared::new(running_mean), Shared::new(running_var));
    let count = sizes.count() as f64;
    each2((mean, 1), (rstd, 1), grain(sizes.count()), |c, mean, rstd| {
        let m = sizes.planes(x, c).map(total).sum::<f64>() / count;
        let centre = T::of(m);
        let squares = sizes.planes(x, c).map(|x| squares(x, centre)).sum::<f64>();
        let r = 1.0 / (squares / count + eps).sqrt();
        (mean[0], rstd[0]) = (centre, T::of(r));
        for (running, new) in [(running_mean, m), (running_var, squares / (count - 1.0))] {
            // SAFETY: each channel is one task's.
            let old = &mut unsafe { running.slice(c, 1) }[0];
            *old = T::of((1.0 - momentum) * old.f64() + momentum * new);
        }
        let factor = rstd[0] * weight[c];
        for (n, x) in sizes.planes(x, c).enumerate() {
            // SAFETY: as above.
            let y = unsafe { y.slice((n * sizes.c + c) * sizes.inner, sizes.inner) };
            scale(y, x, centre, factor, bias[c]);
        }
    });
}

/// Values of the forward pass for the gradients of [`batch_norm`].
#[derive(Clone, Copy)]
pub(crate) struct BatchNormSaved<'a, T> {
    /// The operand.
    pub(crate) x: &'a [T],
    /// `[c]`
    pub(crate) mean: &'a [T],
    /// `[c]`
    pub(crate) rstd: &'a [T],
    /// Its sizes.
    pub(crate) sizes: Channels,
}

impl<T: Float> BatchNormSaved<'_, T> {
    fn check(&self, grad: &[T]) {
        let n = self.sizes;
        let fits =
            self.x.len() == n.numel() && grad.len() == n.numel() && self.mean.len() == n.c && self.rstd.len() == n.c;
        assert!(fits, "batch_norm: saved tensors do not fit {n:?}");
    }

    /// `Σ g` and `Σ g (x - mean)` of a channel.
    fn sums(&self, grad: &[T], c: usize) -> (f64, f64) {
        let sum = self.sizes.planes(grad, c).map(total).sum();
        let pairs = self.sizes.planes(grad, c).zip(self.sizes.planes(self.x, c));
        (sum, pairs.map(|(g, x)| products(g, x, self.mean[c])).sum())
    }
}

/// Gradient of [`batch_norm`] with respect to its operand.
pub(crate) fn batch_norm_input_grad<T: Float>(dx: &mut [T], grad: &[T], saved: BatchNormSaved<'_, T>, weight: &[T]) {
    saved.check(grad);
    let sizes = saved.sizes;
    assert!(dx.len() == grad.len() && weight.len() == sizes.c, "batch_norm: operands do not fit {sizes:?}");
    let dx = Shared::new(dx);
    let count = sizes.count() as f64;
    tasks(sizes.c, grain(sizes.count()), &|c| {
        let (sum, product) = saved.sums(grad, c);
        let r = saved.rstd[c].f64();
        let (average, slope) = (T::of(sum / count), T::of(product / count * r * r));
        for (n, (g, x)) in sizes.planes(grad, c).zip(sizes.planes(saved.x, c)).enumerate() {
            // SAFETY: each channel is one task's.
            let dx = unsafe { dx.slice((n * sizes.c + c) * sizes.inner, sizes.inner) };
            input_grad(dx, g, x, saved.mean[c], saved.rstd[c] * weight[c], average, slope);
        }
    });
}

/// Gradients of [`batch_norm`] with respect to its weight and bias, `[c]` each.
pub(crate) fn batch_norm_weight_grad<T: Float>(
    (dw, db): (&mut [T], &mut [T]),
    grad: &[T],
    saved: BatchNormSaved<'_, T>,
) {
    saved.check(grad);
    assert!(dw.len() == saved.sizes.c && db.len() == saved.sizes.c, "batch_norm: results do not fit {:?}", saved.sizes);
    each2((dw, 1), (db, 1), grain(saved.sizes.count()), |c, dw, db| {
        let (sum, product) = saved.sums(grad, c);
        (dw[0], db[0]) = (T::of(product * saved.rstd[c].f64()), T::of(sum));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Channels = Channels { n: 3, c: 4, inner: 37 };
    const EPS: f64 = 1e-5;

    type Forward = (Vec<f64>, Vec<f64>, Vec<f64>, Vec<f64>, Vec<f64>);

    fn forward(x: &[f64], w: &[f64], b: &[f64]) -> Forward {
        let (mut y, mut mean, mut rstd) = (vec![0.0; x.len()], vec![0.0; 4], vec![0.0; 4]);
        let (mut rm, mut rv) = (vec![1.0; 4], vec![2.0; 4]);
        let out = BatchNormOut { y: &mut y, mean: &mut mean, rstd: &mut rstd };
        batch_norm(out, (&mut rm, &mut rv), x, (w, b), SIZES, 0.1, EPS);
        (y, mean, rstd, rm, rv)
    }

    fn sample(n: usize, phase: f64) -> Vec<f64> {
        (0..n).map(|i| (i as f64 * 1.3 + phase).sin() * 2.0 + 0.5).collect()
    }

    #[test]
    fn statistics_follow_the_definition() {
        let x = sample(SIZES.numel(), 0.0);
        let (y, mean, rstd, rm, rv) = forward(&x, &[1.0; 4], &[0.0; 4]);
        for c in 0..4 {
            let channel: Vec<f64> = SIZES.planes(&x, c).flatten().copied().collect();
            let m = channel.iter().sum::<f64>() / 111.0;
            let ss = channel.iter().map(|v| (v - m).powi(2)).sum::<f64>();
            assert!((mean[c] - m).abs() < 1e-12 && (rstd[c] - (ss / 111.0 + EPS).sqrt().recip()).abs() < 1e-12);
            assert!((rm[c] - (0.9 + 0.1 * m)).abs() < 1e-12 && (rv[c] - (1.8 + 0.1 * ss / 110.0)).abs() < 1e-12);
            let normal = SIZES.planes(&y, c).flatten().map(|v| v * v).sum::<f64>() / 111.0;
            assert!((normal - 1.0).abs() < 1e-4, "{normal}");
        }
    }

    /// L = Σ g y. Every gradient is compared with (L(+h) - L(-h)) / 2h.
    #[test]
    fn gradients_match_differences() {
        let (x, g) = (sample(SIZES.numel(), 0.0), sample(SIZES.numel(), 5.0));
        let (w, b) = (vec![0.5, 1.0, -1.5, 2.0], vec![0.1, 0.2, 0.3, 0.4]);
        let (_, mean, rstd, ..) = forward(&x, &w, &b);
        let saved = BatchNormSaved { x: &x, mean: &mean, rstd: &rstd, sizes: SIZES };
        let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; 4], vec![0.0; 4]);
        batch_norm_input_grad(&mut dx, &g, saved, &w);
        batch_norm_weight_grad((&mut dw, &mut db), &g, saved);
        let loss = |x: &[f64], w: &[f64], b: &[f64]| forward(x, w, b).0.iter().zip(&g).map(|(y, g)| y * g).sum::<f64>();
        let difference = |v: &[f64], i: usize, f: &dyn Fn(&[f64]) -> f64| {
            let (mut hi, mut lo) = (v.to_vec(), v.to_vec());
            hi[i] += 1e-6;
            lo[i] -= 1e-6;
            (f(&hi) - f(&lo)) / 2e-6
        };
        for (i, d) in dx.iter().enumerate() {
            assert!((d - difference(&x, i, &|x| loss(x, &w, &b))).abs() < 1e-6);
        }
        for c in 0..4 {
            assert!((dw[c] - difference(&w, c, &|w| loss(&x, w, &b))).abs() < 1e-6);
            assert!((db[c] - difference(&b, c, &|b| loss(&x, &w, b))).abs() < 1e-6);
        }
    }
}
