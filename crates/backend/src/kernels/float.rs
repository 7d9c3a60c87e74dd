//! The element types of the kernels, and the functions that must vectorise.
//!
//! For `f32`, the transcendental functions are polynomials without branches or table look-ups, so that the compiler
//! vectorises loops over them. The coefficients minimise the largest error on the stated intervals. `f64` serves
//! checks more than training and calls the C library.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Rem, Sub, SubAssign};

use super::Element;

/// `f32` or `f64`.
pub(crate) trait Float:
    Element
    + Default
    + PartialOrd
    + std::fmt::Debug
    + std::fmt::Display
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Rem<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Minus infinity.
    const NEG_INFINITY: Self;

    /// Rounded to nearest.
    fn of(v: f64) -> Self;
    /// Widened.
    fn f64(self) -> f64;
    /// `e^self`, with an error below 2 units in the last place, also for subnormal results.
    fn exp(self) -> Self;
    /// Natural logarithm; not vectorised.
    fn ln(self) -> Self;
    /// Hyperbolic tangent, with an error below 4 units in the last place.
    fn tanh(self) -> Self;
    /// Error function, with an error below 4 units in the last place.
    fn erf(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Magnitude.
    fn abs(self) -> Self;
    /// `self` with the sign of `other`.
    fn copysign(self, other: Self) -> Self;
    /// Rounded down.
    fn floor(self) -> Self;
    /// Rounded up.
    fn ceil(self) -> Self;
    /// Rounded towards zero.
    fn trunc(self) -> Self;
    /// Rounded to nearest, halves to even.
    fn round(self) -> Self;
    /// `self^e`.
    fn pow(self, e: Self) -> Self;
    /// Sine; not vectorised.
    fn sin(self) -> Self;
    /// Cosine; not vectorised.
    fn cos(self) -> Self;
    /// `ln(1 + self)`; not vectorised.
    fn ln_1p(self) -> Self;
    /// `e^self - 1`; not vectorised.
    fn exp_m1(self) -> Self;

    /// `self` if it is larger, else `other`, also for NaN. It compiles to one instruction, unlike `f32::max`.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    /// Whether this is not a number.
    #[inline(always)]
    #[allow(clippy::eq_op)] // Only NaN differs from itself.
    fn nan(self) -> bool {
        self != self
    }

    /// `1 / (1 + e^-self)`.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }
}

/// Functions both types take from the standard library.
macro_rules! std_functions {
    ($t:ident) => {
        #[inline(always)]
        fn of(v: f64) -> Self {
            v as $t
        }

        #[inline(always)]
        fn f64(self) -> f64 {
            f64::from(self)
        }

        #[inline(always)]
        fn copysign(self, other: Self) -> Self {
            $t::copysign(self, other)
        }

        #[inline(always)]
        fn pow(self, e: Self) -> Self {
            $t::powf(self, e)
        }

        std_functions!($t: ln ln, sqrt sqrt, abs abs, floor floor, ceil ceil, trunc trunc, round round_ties_even, sin sin,
            cos cos, ln_1p ln_1p, exp_m1 exp_m1);
    };
    ($t:ident: $($name:ident $std:ident),*) => {$(
        #[inline(always)]
        fn $name(self) -> Self {
            $t::$std(self)
        }
    )*};
}

impl Float for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;

    std_functions!(f32);

    #[inline(always)]
    fn exp(self) -> Self {
        // e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer and
        // leaves it in the low bits. Comparisons are written so that NaN passes through.
        const MAGIC: f32 = 12_582_912.0;
        const LN2_HI: f32 = 0.693_359_4;
        const LN2_LO: f32 = -2.121_944_4e-4;
        let x = if self < -104.0 { -104.0 } else { self };
        let x = if x > 89.0 { 89.0 } else { x };
        let shifted = x * std::f32::consts::LOG2_E + MAGIC;
        let n = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
        let whole = shifted - MAGIC;
        let r = (x - whole * LN2_HI) - whole * LN2_LO;
        let p = 1.979_033_6e-4_f32;
        let p = p * r + 1.394_466_e-3;
        let p = p * r + 8.333_497e-3;
        let p = p * r + 4.166_629_5e-2;
        let p = p * r + 1.666_666_6e-1;
        let p = p * r + 0.5;
        let p = (p * (r * r) + r) + 1.0;
        // 2^n in two factors, since n may exceed the range of one exponent.
        let half = n >> 1;
        let a = f32::from_bits((half.wrapping_add(127) << 23) as u32);
        let b = f32::from_bits((n.wrapping_sub(half).wrapping_add(127) << 23) as u32);
        p * a * b
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        let t = Float::abs(self);
        // Near zero x + x³ P(x²), elsewhere 1 - 2 / (e^2|x| + 1).
        let z = self * self;
        let p = -5.717_037e-3_f32;
        let p = p * z + 2.065_058e-2;
        let p = p * z - 5.374_349_7e-2;
        let p = p * z + 1.333_149_1e-1;
        let p = p * z - 3.333_328_4e-1;
        let near = self + self * (z * p);
        let far = 1.0 - 2.0 / (Float::exp(t + t) + 1.0);
        let far = f32::from_bits(far.to_bits() | (self.to_bits() & 0x8000_0000));
        if t < 0.625 { near } else { far }
    }

    #[inline(always)]
    fn erf(self) -> Self {
        let t = Float::abs(self);
        // Below 1 x P(x²); above, 1 - e^Q(|x| - 2.5) with Q = ln erfc, up to where the result rounds to 1.
        let z = self * self;
        let p = 7.889_119e-5_f32;
        let p = p * z - 8.020_841e-4;
        let p = p * z + 5.189_535e-3;
        let p = p * z - 2.685_444_5e-2;
        let p = p * z + 1.128_36e-1;
        let p = p * z - 3.761_262_6e-1;
        let p = p * z + std::f32::consts::FRAC_2_SQRT_PI;
        let near = self * p;
        let u = if t > 4.1 { 1.6 } else { t - 2.5 };
        let q = 1.855_749_7e-4_f32;
        let q = q * u - 1.559_92e-4;
        let q = q * u + 2.457_801_5e-3;
        let q = q * u - 1.071_775_2e-2;
        let q = q * u - 9.438_854e-1;
        let q = q * u - 5.352_694;
        let q = q * u - 7.806_818;
        let far = 1.0 - Float::exp(q);
        let far = f32::from_bits(far.to_bits() | (self.to_bits() & 0x8000_0000));
        if t < 1.0 { near } else { far }
    }
}

impl Float for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;

    std_functions!(f64);

    #[inline(always)]
    fn exp(self) -> Self {
        f64::exp(self)
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        f64::tanh(self)
    }

    #[inline(always)]
    fn erf(self) -> Self {
        libm::erf(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error of `f` over `from..=to`, in units of the last place of the true result.
    fn worst(from: f32, to: f32, f: impl Fn(f32) -> f32, truth: impl Fn(f64) -> f64) -> (f64, f32) {
        let n = 200_000;
        (0..=n)
            .map(|i| from + (to - from) * (i as f32 / n as f32))
            .map(|x| {
                let want = truth(f64::from(x));
                let ulp = f64::from((want as f32).abs().max(f32::MIN_POSITIVE)) * f64::from(f32::EPSILON);
                ((f64::from(f(x)) - want).abs() / ulp, x)
            })
            .fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a })
    }

    #[test]
    fn f32_functions_match_f64() {
        let (e, x) = worst(-104.0, 88.7, Float::exp, f64::exp);
        assert!(e < 2.0, "exp({x}) is off by {e} ulp");
        for (from, to) in [(-12.0, 12.0), (-1.0, 1.0), (-1e-3, 1e-3)] {
            let (e, x) = worst(from, to, Float::tanh, f64::tanh);
            assert!(e < 4.0, "tanh({x}) is off by {e} ulp");
            let (e, x) = worst(from, to, Float::erf, libm::erf);
            assert!(e < 4.0, "erf({x}) is off by {e} ulp");
        }
    }

    #[test]
    fn extremes_are_exact() {
        let inf = f32::INFINITY;
        assert_eq!(Float::exp(inf), inf);
        assert_eq!(Float::exp(-inf), 0.0);
        assert_eq!(Float::exp(0.0f32), 1.0);
        assert_eq!((Float::tanh(inf), Float::tanh(-inf), Float::tanh(20.0f32)), (1.0, -1.0, 1.0));
        assert_eq!((Float::erf(inf), Float::erf(-inf), Float::erf(5.0f32)), (1.0, -1.0, 1.0));
        assert_eq!((Float::sigmoid(inf), Float::sigmoid(-inf)), (1.0, 0.0));
        for f in [Float::exp, Float::tanh, Float::erf, Float::sigmoid, Float::sqrt] {
            let f: fn(f32) -> f32 = f;
            assert!(f(f32::NAN).is_nan());
        }
    }
}
