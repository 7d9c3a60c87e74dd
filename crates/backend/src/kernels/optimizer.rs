//! Fused parameter updates in place, as PyTorch defines them.

use super::Float;
use super::parallel::{Shared, each2, grain, part};
use super::simd::simd;

/// Elements of one task.
const BLOCK: usize = 4096;

/// Hyperparameters of an AdamW step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Adamw {
    /// Learning rate.
    pub(crate) lr: f64,
    /// Decay of the first moment.
    pub(crate) beta1: f64,
    /// Decay of the second moment.
    pub(crate) beta2: f64,
    /// The number that is added to the denominator.
    pub(crate) eps: f64,
    /// Decoupled weight decay.
    pub(crate) weight_decay: f64,
    /// `1 - beta1^t`
    pub(crate) correction1: f64,
    /// `1 - beta2^t`
    pub(crate) correction2: f64,
    /// Factor of the gradient, for clipping.
    pub(crate) factor: f64,
}

/// `p ← p (1 - lr wd)`, `m ← m + (1 - β₁) (g - m)`, `v ← β₂ v + (1 - β₂) g²`, `p ← p - lr / c₁ · m / (√v / √c₂ + eps)`.
///
/// `m` and `v` are the moments (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).
pub(crate) fn adamw<T: Float>(p: &mut [T], g: &[T], m: &mut [T], v: &mut [T], step: &Adamw) {
    simd! {
        fn block<T: Float>(p: &mut [T], g: &[T], m: &mut [T], v: &mut [T], step: &Adamw) {
            let keep = T::of(1.0 - step.lr * step.weight_decay);
            let (b1, b2) = (T::of(step.beta1), T::of(step.beta2));
            let (n1, n2) = (T::of(1.0 - step.beta1), T::of(1.0 - step.beta2));
            let size = T::of(step.lr / step.correction1);
            let root = T::of(step.correction2.sqrt());
            let (eps, factor) = (T::of(step.eps), T::of(step.factor));
            for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                let g = g * factor;
                let nm = b1 * *m + n1 * g;
                let nv = b2 * *v + n2 * (g * g);
                (*m, *v) = (nm, nv);
                *p = *p * keep - size * (nm / (nv.sqrt() / root + eps));
            }
        }
    }
    assert!(p.len() == g.len() && p.len() == m.len() && p.len() == v.len(), "adamw: operands differ in length");
    let (n, v) = (v.len(), Shared::new(v));
    each2((p, BLOCK), (m, BLOCK), grain(BLOCK), |i, p, m| {
        // SAFETY: each task has a block of its own.
        let v = unsafe { v.slice(i * BLOCK, BLOCK.min(n - i * BLOCK)) };
        block(p, part(g, i, BLOCK), m, v, step);
    });
}

/// Hyperparameters of a step of stochastic gradient descent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sgd {
    /// Learning rate.
    pub(crate) lr: f64,
    /// Decay of the momentum buffer.
    pub(crate) momentum: f64,
    /// Weight decay, part of the gradient.
    pub(crate) weight_decay: f64,
    /// Nesterov's momentum.
    pub(crate) nesterov: bool,
    /// Factor of the gradient, for clipping.
    pub(crate) factor: f64,
}

/// `g ← g + wd p`, `m ← momentum m + g`, `p ← p - lr m`, or `p ← p - lr (g + momentum m)` with Nesterov's momentum.
///
/// With a buffer of zeros, the first step's momentum is the gradient.
pub(crate) fn sgd<T: Float>(p: &mut [T], g: &[T], m: &mut [T], step: &Sgd) {
    simd! {
        fn block<T: Float>(p: &mut [T], g: &[T], m: &mut [T], step: &Sgd) {
            let (lr, momentum, decay) = (T::of(step.lr), T::of(step.momentum), T::of(step.weight_decay));
            let factor = T::of(step.factor);
            for ((p, &g), m) in p.iter_mut().zip(g).zip(m) {
                let g = g * factor + decay * *p;
                let nm = momentum * *m + g;
                *m = nm;
                let d = if step.nesterov { g + momentum * nm } else { nm };
                *p -= lr * d;
            }
        }
    }
    assert!(p.len() == g.len() && p.len() == m.len(), "sgd: operands differ in length");
    each2((p, BLOCK), (m, BLOCK), grain(BLOCK), |i, p, m| block(p, part(g, i, BLOCK), m, step));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first two steps by hand, for p = 1, g = 0.5 then -1, lr 0.1, decay 0.01.
    #[test]
    fn adamw_by_hand() {
        let (mut p, mut m, mut v) = ([1.0f64], [0.0], [0.0]);
        for (t, g) in [(1, 0.5), (2, -1.0)] {
            let step = Adamw {
                lr: 0.1,
                beta1: 0.9,
                beta2: 0.99,
                eps: 1e-8,
                weight_decay: 0.01,
                correction1: 1.0 - 0.9f64.powi(t),
                correction2: 1.0 - 0.99f64.powi(t),
                factor: 2.0,
            };
            adamw(&mut p, &[g / 2.0], &mut m, &mut v, &step);
        }
        // m = 0.9·0.05 - 0.1 = -0.055, v = 0.99·0.0025 + 0.01 = 0.012475
        assert!((m[0] + 0.055).abs() < 1e-15 && (v[0] - 0.012_475).abs() < 1e-15);
        // After step 1: 0.999 - 0.1·0.5/0.5 (to eps); after step 2: ·0.999 + 0.1·(0.055/0.19)/√(0.012475/0.0199)
        let first = 0.999 - 0.1 * (0.5 / (0.5 + 1e-8));
        let want = first * 0.999 + 0.1 * (0.055 / 0.19) / ((0.012_475f64 / 0.0199).sqrt() + 1e-8);
        assert!((p[0] - want).abs() < 1e-12, "{} {want}", p[0]);
    }

    #[test]
    fn sgd_by_hand() {
        for (nesterov, want) in
            [(false, 1.0 - 0.1 * (0.9 * 0.51 + 0.51)), (true, 1.0 - 0.1 * (0.51 + 0.9 * (0.9 * 0.51 + 0.51)))]
        {
            let step = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, nesterov, factor: 1.0 };
            let (mut p, mut m) = ([1.0f64], [0.51]);
            sgd(&mut p, &[0.5], &mut m, &step);
            assert!((p[0] - want).abs() < 1e-15, "{} {want}", p[0]);
        }
    }
}
