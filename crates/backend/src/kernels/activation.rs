//! Activations and their derivatives, element by element.
//!
//! Every kernel overwrites its first argument. If there is a source, each block is copied from there first, while it
//! is in the cache.

use super::Float;
use super::parallel::{each, grain};
use super::simd::simd;

/// Elements that fit the first-level cache together with a second operand.
const BLOCK: usize = 2048;

/// Runs `f(block, offset)` over all blocks of `out`. Each is first copied from `source` if there is one.
pub(crate) fn blocks<T: Float>(out: &mut [T], source: Option<&[T]>, f: impl Fn(&mut [T], usize) + Sync) {
    assert!(source.is_none_or(|s| s.len() == out.len()), "operand and result differ in length");
    each(out, BLOCK, grain(BLOCK), |i, block| {
        let start = i * BLOCK;
        if let Some(source) = source {
            block.copy_from_slice(&source[start..start + block.len()]);
        }
        f(block, start);
    });
}

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident |$x:ident| $f:expr;)*) => {$(
        $(#[$doc])*
        pub(crate) fn $name<T: Float>(out: &mut [T], source: Option<&[T]>) {
            simd! {
                fn block<T: Float>(y: &mut [T]) {
                    for v in y {
                        let $x = *v;
                        *v = $f;
                    }
                }
            }
            blocks(out, source, |y, _| block(y));
        }
    )*};
}

unary! {
    /// `e^x`.
    exp |x| x.exp();
    /// Hyperbolic tangent.
    tanh |x| x.tanh();
    /// `1 / (1 + e^-x)`.
    sigmoid |x| x.sigmoid();
    /// Error function.
    erf |x| x.erf();
    /// `max(x, 0)`; NaN stays NaN.
    relu |x| if x < T::ZERO { T::ZERO } else { x };
    /// `x σ(x)`.
    silu |x| x * x.sigmoid();
    /// GELU in the tanh form, `x σ(2u)` with `u = √(2/π) (x + 0.044715 x³)`, which equals `½ x (1 + tanh u)`.
    gelu_tanh |x| x * gelu_argument(x).sigmoid();
    /// GELU in the exact form, `½ x (1 + erf(x / √2))`.
    gelu_erf |x| x * normal_cdf(x);
}

/// `2u` of the tanh form.
#[inline(always)]
fn gelu_argument<T: Float>(x: T) -> T {
    let c = T::of(2.0 * (2.0 / std::f64::consts::PI).sqrt());
    x * (c + (c * T::of(0.044715)) * (x * x))
}

#[inline(always)]
fn normal_cdf<T: Float>(x: T) -> T {
    T::of(0.5) + T::of(0.5) * (x * T::of(std::f64::consts::FRAC_1_SQRT_2)).erf()
}

macro_rules! backward {
    ($($(#[$doc:meta])* $name:ident |$g:ident, $x:ident| $f:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// The result overwrites `grad`, which is first copied from `source` if there is one.
        pub(crate) fn $name<T: Float>(grad: &mut [T], source: Option<&[T]>, x: &[T]) {
            simd! {
                fn block<T: Float>(grad: &mut [T], x: &[T]) {
                    for (d, &$x) in grad.iter_mut().zip(x) {
                        let $g = *d;
                        *d = $f;
                    }
                }
            }
            assert_eq!(grad.len(), x.len(), "gradient and operand differ in length");
            blocks(grad, source, |d, start| block(d, &x[start..start + d.len()]));
        }
    )*};
}

backward! {
    /// Gradient of [`gelu_tanh`]: with `s = σ(2u)`, `g (s + x s (1 - s) d(2u)/dx)`.
    gelu_tanh_backward |g, x| {
        let c = T::of(2.0 * (2.0 / std::f64::consts::PI).sqrt());
        let s = gelu_argument(x).sigmoid();
        let du = c + (c * T::of(3.0 * 0.044715)) * (x * x);
        g * (s + x * (s * (T::ONE - s)) * du)
    };
    /// Gradient of [`gelu_erf`]: `g (Φ(x) + x φ(x))`, Φ and φ the standard normal's distribution and density.
    gelu_erf_backward |g, x| {
        let c = T::of(0.398_942_280_401_432_7);
        g * (normal_cdf(x) + x * (c * (T::of(-0.5) * (x * x)).exp()))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(n: usize) -> Vec<f64> {
        (0..n).map(|i| (i as f64 * 0.731 + 0.3).sin() * 6.0).collect()
    }

    /// Compares a derivative with central differences.
    fn check(name: &str, f: fn(&mut [f64], Option<&[f64]>), b: fn(&mut [f64], Option<&[f64]>, &[f64])) {
        let x = sample(500);
        let h = 1e-5;
        let at = |d: f64| {
            let mut y: Vec<f64> = x.iter().map(|v| v + d).collect();
            f(&mut y, None);
            y
        };
        let (above, below) = (at(h), at(-h));
        let mut dx = vec![2.0; x.len()];
        b(&mut dx, None, &x);
        for i in 0..x.len() {
            let want = 2.0 * (above[i] - below[i]) / (2.0 * h);
            assert!((dx[i] - want).abs() < 1e-8, "{name} at {}: {} against {want}", x[i], dx[i]);
        }
    }

    #[test]
    fn derivatives_match_differences() {
        check("gelu_tanh", gelu_tanh, gelu_tanh_backward);
        check("gelu_erf", gelu_erf, gelu_erf_backward);
    }

    /// Values from the definitions, computed with 40 digits. The two forms differ in the fourth decimal.
    #[test]
    fn gelu_values() {
        let x = [-1.0f64, 0.0, 0.5, 2.0];
        let mut y = [0.0; 4];
        gelu_tanh(&mut y, Some(&x));
        for (a, b) in y.iter().zip([-0.158_808_009_391_723_3, 0.0, 0.345_714_009_825_143_9, 1.954_597_694_087_775]) {
            assert!((a - b).abs() < 1e-14, "{a} {b}");
        }
        gelu_erf(&mut y, Some(&x));
        for (a, b) in y.iter().zip([-0.158_655_253_931_457_05, 0.0, 0.345_731_230_637_006_55, 1.954_499_736_103_641_6])
        {
            assert!((a - b).abs() < 1e-14, "{a} {b}");
        }
    }

    #[test]
    fn f32_matches_f64() {
        let x = sample(10_000);
        let x32: Vec<f32> = x.iter().map(|&v| v as f32).collect();
        let x: Vec<f64> = x32.iter().map(|&v| f64::from(v)).collect();
        type Pair = (fn(&mut [f32], Option<&[f32]>), fn(&mut [f64], Option<&[f64]>));
        let pairs: [Pair; 6] =
            [(silu, silu), (gelu_tanh, gelu_tanh), (gelu_erf, gelu_erf), (sigmoid, sigmoid), (relu, relu), (exp, exp)];
        for (i, (f, g)) in pairs.into_iter().enumerate() {
            let (mut a, mut b) = (vec![0.0f32; x.len()], vec![0.0f64; x.len()]);
            f(&mut a, Some(&x32));
            g(&mut b, Some(&x));
            for j in 0..x.len() {
                assert!(
                    (f64::from(a[j]) - b[j]).abs() <= 3e-7 * b[j].abs().max(1.0),
                    "{i}: {} {} {}",
                    x[j],
                    a[j],
                    b[j]
                );
            }
        }
    }
}
