//! Conversions between f32 and narrower floats. They work on bits, so every processor gives the same result.

/// The bits of the magnitude. They order finite numbers; infinities and NaN compare greater than these.
#[inline(always)]
pub(crate) fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7FFF_FFFF
}

/// Rounds to the nearest bf16, ties to even. Finite numbers stay finite.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u16 {
    let m = magnitude(x);
    let rounded = ((m + 0x7FFF + ((m >> 16) & 1)) >> 16).min(0x7F7F);
    (rounded | (x.to_bits() >> 31 << 15)) as u16
}

/// Rounds to the nearest bf16. Unlike [`to_bf16`], it takes infinities and NaN, and keeps them.
#[inline(always)]
pub(crate) fn to_any_bf16(x: f32) -> u16 {
    match magnitude(x) {
        0..0x7F80_0000 => to_bf16(x),
        // An infinity has no mantissa. That of NaN must not become zero.
        0x7F80_0000 => (x.to_bits() >> 16) as u16,
        _ => (x.to_bits() >> 16) as u16 | 0x40,
    }
}

/// The magnitude of a finite `x`, rounded up to bf16 but not to infinity.
#[inline(always)]
pub(crate) fn bf16_above(x: f32) -> u16 {
    ((magnitude(x) + 0xFFFF) >> 16).min(0x7F7F) as u16
}

/// The exact value.
#[inline(always)]
pub(crate) fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// 1.5 · 2^23. Adding it rounds to the nearest integer, ties to even, and leaves that integer in the lowest bits.
pub(crate) const ROUNDING_OFFSET: f32 = 12_582_912.0;

/// The lowest byte of `x` rounded to the nearest integer. |x| must be below 2^22.
#[inline(always)]
pub(crate) fn round_to_byte(x: f32) -> u8 {
    (x + ROUNDING_OFFSET).to_bits() as u8
}

/// Rounds a number from 0 to the nearest E4M3 number, ties to even. Numbers above 448, the largest, become 448.
///
/// E4M3 has 4 bits of exponent (bias 7) and 3 bits of mantissa.
#[inline(always)]
pub(crate) fn to_e4m3(x: f32) -> u8 {
    if x < 1.0 / 64.0 {
        // Subnormal: a multiple of 2^-9. The smallest normal number is 8 · 2^-9, and its code is 8.
        return round_to_byte(x * 512.0);
    }
    let bits = x.to_bits();
    let rounded = (bits + 0x7_FFFF + ((bits >> 20) & 1)) >> 20;
    (rounded - ((127 - 7) << 3)).min(0x7E) as u8
}

/// The number of an E4M3 code without sign. The caller must refuse NaN (0x7F).
pub(crate) const fn from_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (code as u32 >> 3, code as u32 & 7);
    if exponent == 0 { mantissa as f32 / 512.0 } else { f32::from_bits((exponent + 127 - 7) << 23 | mantissa << 20) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the OCP 8-bit floating point specification: the smallest subnormal, the smallest normal and the largest.
    #[test]
    fn e4m3_has_the_specified_values() {
        assert_eq!(from_e4m3(0x01), 0.001953125);
        assert_eq!(from_e4m3(0x08), 0.015625);
        assert_eq!(from_e4m3(0x7E), 448.0);
        assert_eq!(from_e4m3(0x38), 1.0);
    }

    #[test]
    fn e4m3_rounds_to_the_nearest() {
        for code in 0..0x7E {
            let (a, b) = (from_e4m3(code), from_e4m3(code + 1));
            assert_eq!(to_e4m3(a), code);
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(to_e4m3((a + b) / 2.0), even, "between {a} and {b}");
            assert_eq!(to_e4m3(a + (b - a) * 0.49), code);
            assert_eq!(to_e4m3(a + (b - a) * 0.51), code + 1);
        }
        assert_eq!(to_e4m3(1e9), 0x7E);
    }

    #[test]
    fn bf16_rounds_to_the_nearest_and_stays_finite() {
        assert_eq!(to_bf16(1.0), 0x3F80);
        assert_eq!(to_bf16(f32::from_bits(0x3F80_8000)), 0x3F80, "ties to even");
        assert_eq!(to_bf16(f32::from_bits(0x3F81_8000)), 0x3F82, "ties to even");
        assert_eq!(to_bf16(f32::from_bits(0xBF80_8001)), 0xBF81);
        assert_eq!(from_bf16(to_bf16(f32::MIN)), -3.389_531_4e38);
        assert_eq!(bf16_above(1.0), 0x3F80);
        assert_eq!(bf16_above(f32::from_bits(0x3F80_0001)), 0x3F81);
    }
}
