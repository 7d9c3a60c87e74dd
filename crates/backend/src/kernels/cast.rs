//! Conversions between element types.

use half::{bf16, f16};

use super::Element;
use super::strided::chunks;

/// An element type that converts to and from the others. `u8` stands for booleans.
pub(crate) trait Convert: Element {
    /// Whether conversions go through integers.
    const INTEGER: bool;
    /// The value as a float.
    fn float(self) -> f64;
    /// The value as an integer. Floats are truncated and limited to the range.
    fn integer(self) -> i64;
    /// Converts a float: floats round to nearest, integers truncate, booleans are `!= 0`.
    fn of_float(v: f64) -> Self;
    /// Converts an integer: floats round to nearest, integers keep the lower bits, booleans are `!= 0`.
    fn of_integer(v: i64) -> Self;
}

macro_rules! convert {
    ($($t:ident $integer:literal |$x:ident| $float:expr, |$f:ident| $of_float:expr, |$i:ident| $of_integer:expr;)*) => {$(
        impl Convert for $t {
            const INTEGER: bool = $integer;

            #[inline(always)]
            fn float(self) -> f64 {
                let $x = self;
                $float
            }

            #[inline(always)]
            fn integer(self) -> i64 {
                let $x = self;
                ($float) as i64
            }

            #[inline(always)]
            fn of_float($f: f64) -> Self {
                $of_float
            }

            #[inline(always)]
            fn of_integer($i: i64) -> Self {
                $of_integer
            }
        }
    )*};
}

convert! {
    f64 false |x| x, |f| f, |i| i as f64;
    f32 false |x| f64::from(x), |f| f as f32, |i| i as f32;
    f16 false |x| x.to_f64(), |f| f16::from_f32(f as f32), |i| f16::from_f32(i as f32);
    bf16 false |x| x.to_f64(), |f| bf16::from_f32(f as f32), |i| bf16::from_f32(i as f32);
    i32 true |x| f64::from(x), |f| f as i32, |i| i as i32;
    u8 true |x| f64::from(x), |f| u8::from(f != 0.0), |i| u8::from(i != 0);
}

impl Convert for i64 {
    const INTEGER: bool = true;

    #[inline(always)]
    fn float(self) -> f64 {
        self as f64
    }

    #[inline(always)]
    fn integer(self) -> i64 {
        self
    }

    #[inline(always)]
    fn of_float(v: f64) -> Self {
        v as i64
    }

    #[inline(always)]
    fn of_integer(v: i64) -> Self {
        v
    }
}

/// Converts elements to another type.
pub(crate) fn cast<A: Convert, B: Convert>(out: &mut [B], x: &[A]) {
    assert_eq!(out.len(), x.len(), "operand and result differ in length");
    chunks(out, |chunk, start| {
        for (o, &v) in chunk.iter_mut().zip(&x[start..]) {
            *o = if A::INTEGER { B::of_integer(v.integer()) } else { B::of_float(v.float()) };
        }
    });
}

/// Rounds to bf16, ties to even, in a loop that the compiler vectorises: a model in bf16 converts at every product.
pub(crate) fn narrow(out: &mut [bf16], x: &[f32]) {
    assert_eq!(out.len(), x.len(), "operand and result differ in length");
    chunks(out, |chunk, start| {
        for (o, v) in chunk.iter_mut().zip(&x[start..]) {
            let bits = v.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            // Rounding could make infinity of a NaN, so a NaN keeps its upper half and becomes quiet.
            let nan = bits >> 16 | 0x40;
            *o = bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded } as u16);
        }
    });
}

/// Converts numbers to f32, which has all of them.
pub(crate) fn widen(out: &mut [f32], x: &[bf16]) {
    assert_eq!(out.len(), x.len(), "operand and result differ in length");
    chunks(out, |chunk, start| {
        for (o, v) in chunk.iter_mut().zip(&x[start..]) {
            *o = f32::from_bits(u32::from(v.to_bits()) << 16);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bf16, and the f32 around and between each two of them.
    #[test]
    fn bf16_rounds_to_nearest_and_ties_to_even() {
        let lower = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        let all: Vec<f32> =
            (0..=u16::MAX).flat_map(|h| lower.map(|l| f32::from_bits(u32::from(h) << 16 | l))).collect();
        let mut fast = vec![bf16::ZERO; all.len()];
        narrow(&mut fast, &all);
        for (x, h) in all.iter().zip(&fast) {
            let exact = bf16::from_f32(*x);
            assert!(exact == *h || exact.is_nan() && h.is_nan(), "{x}: {h}, not {exact}");
        }
        let mut back = vec![0.0; all.len()];
        widen(&mut back, &fast);
        assert!(back.iter().zip(&fast).all(|(x, h)| x.to_bits() == h.to_f32().to_bits()));
    }

    #[test]
    fn casts_truncate_and_round() {
        let mut i = [0i64; 4];
        cast(&mut i, &[2.7f32, -2.7, f32::NAN, 1e30]);
        assert_eq!(i, [2, -2, 0, i64::MAX]);
        let mut h = [bf16::ZERO; 2];
        cast(&mut h, &[1.0f32 + 1.0 / 256.0, -300.0]);
        assert_eq!(h, [bf16::from_f32(1.0), bf16::from_f32(-300.0)]);
        // Just above the middle of two neighbours. `half` cuts a double to its upper 32 bits before it rounds it.
        let above = f64::from(1.0 + 2f32.powi(-8) + f32::EPSILON);
        cast(&mut h, &[above, -above]);
        assert_eq!(h.map(bf16::to_f32), [1.0 + 2f32.powi(-7), -1.0 - 2f32.powi(-7)]);
        let mut b = [0u8; 3];
        cast(&mut b, &[0.0f64, -0.0, f64::NAN]);
        assert_eq!(b, [0, 0, 1]);
        let mut f = [0.0f32; 1];
        cast(&mut f, &[(1i64 << 60) + 1]);
        assert_eq!(f, [(1i64 << 60) as f32]);
    }
}
