//! NVFP4: blocks of 16 E2M1 numbers that share an E4M3 scale, and one f32 scale per tensor.

use crate::float::{from_e4m3, magnitude, to_e4m3};

const BLOCK: usize = 16;

/// The largest E2M1 number.
const MAX_E2M1: f32 = 6.0;
/// The largest E4M3 number.
const MAX_E4M3: f32 = 448.0;

/// The E2M1 numbers without sign, by code.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The E4M3 numbers without sign, by code.
static E4M3: [f32; 128] = {
    let mut table = [0.0; 128];
    let mut code = 0;
    while code < 128 {
        table[code] = from_e4m3(code as u8);
        code += 1;
    }
    table
};

pub(crate) fn body_bytes(n: usize) -> usize {
    4 + n.div_ceil(BLOCK) * (1 + BLOCK / 2)
}

/// Encodes finite values whose largest magnitude is `top` into a body of [`body_bytes`].
#[inline(always)]
pub(crate) fn encode(values: &[f32], top: f32, body: &mut [u8]) {
    let (head, rest) = body.split_at_mut(4);
    // The block with the largest magnitude gets the largest E4M3 scale.
    let tensor = top / (MAX_E2M1 * MAX_E4M3);
    let tensor = if tensor < 1e-30 { 0.0 } else { tensor };
    let inverse = if tensor > 0.0 { 1.0 / tensor } else { 0.0 };
    head.copy_from_slice(&tensor.to_le_bytes());
    let (scales, codes) = rest.split_at_mut(values.len().div_ceil(BLOCK));
    let (codes, _) = codes.as_chunks_mut::<{ BLOCK / 2 }>();
    let (whole, tail) = values.as_chunks::<BLOCK>();
    for ((values, scale), codes) in whole.iter().zip(scales.iter_mut()).zip(codes.iter_mut()) {
        (*scale, *codes) = block(values, inverse);
    }
    for (scale, codes) in scales.iter_mut().zip(codes).skip(whole.len()) {
        let mut padded = [0.0; BLOCK];
        padded[..tail.len()].copy_from_slice(tail);
        (*scale, *codes) = block(&padded, inverse);
    }
}

/// Decodes the output of [`encode`]. Returns `None` if a scale is negative or not finite.
#[inline(always)]
pub(crate) fn decode(body: &[u8], out: &mut [f32]) -> Option<()> {
    let (tensor, rest) = body.split_first_chunk::<4>()?;
    let tensor = f32::from_le_bytes(*tensor);
    let (scales, codes) = rest.split_at_checked(out.len().div_ceil(BLOCK))?;
    let valid = scales.iter().fold(0, |worst, s| *s.max(&worst)) < 0x7F;
    if !(valid && tensor.is_finite() && tensor.is_sign_positive()) {
        return None;
    }
    let (codes, _) = codes.as_chunks::<{ BLOCK / 2 }>();
    for ((out, scale), codes) in out.chunks_mut(BLOCK).zip(scales).zip(codes) {
        let scale = E4M3[usize::from(*scale)] * tensor;
        for (pair, byte) in out.chunks_mut(2).zip(codes) {
            for (o, code) in pair.iter_mut().zip([byte & 15, byte >> 4]) {
                let x = E2M1[usize::from(code & 7)] * scale;
                *o = if code & 8 == 0 { x } else { -x };
            }
        }
    }
    Some(())
}

/// The scale and the codes of a block. `inverse` is 1 over the scale of the tensor.
#[inline(always)]
fn block(values: &[f32; BLOCK], inverse: f32) -> (u8, [u8; BLOCK / 2]) {
    let top = values.iter().fold(0, |top: u32, x| top.max(magnitude(*x)));
    let scale = to_e4m3(f32::from_bits(top) * inverse / MAX_E2M1);
    let number = E4M3[usize::from(scale)];
    let factor = if number > 0.0 { inverse / number } else { 0.0 };
    let mut codes = [0; BLOCK];
    for (code, x) in codes.iter_mut().zip(values) {
        *code = to_e2m1(x * factor);
    }
    let mut packed = [0; BLOCK / 2];
    for (byte, pair) in packed.iter_mut().zip(codes.as_chunks::<2>().0) {
        *byte = pair[0] | pair[1] << 4;
    }
    (scale, packed)
}

/// The code of the nearest E2M1 number, ties to even codes. Numbers beyond 6, the largest, become 6.
#[inline(always)]
fn to_e2m1(x: f32) -> u8 {
    let a = f32::from_bits(magnitude(x));
    let code = u8::from(a > 0.25)
        + u8::from(a >= 0.75)
        + u8::from(a > 1.25)
        + u8::from(a >= 1.75)
        + u8::from(a > 2.5)
        + u8::from(a >= 3.5)
        + u8::from(a > 5.0);
    code | ((x.to_bits() >> 28) & 8) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_the_nearest_code() {
        for (code, pair) in (0u8..).zip(E2M1.windows(2)) {
            let middle = (pair[0] + pair[1]) / 2.0;
            assert_eq!(to_e2m1(pair[0]), code);
            assert_eq!(to_e2m1(-pair[1]), code + 1 + 8);
            assert_eq!(to_e2m1(middle), if code % 2 == 0 { code } else { code + 1 }, "{middle}");
            assert_eq!(to_e2m1(middle - 0.01), code);
            assert_eq!(to_e2m1(middle + 0.01), code + 1);
        }
        assert_eq!(to_e2m1(1e9), 7);
    }
}
