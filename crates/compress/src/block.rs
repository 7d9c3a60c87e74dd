//! Integers in blocks that share a scale.

use serde::{Deserialize, Serialize};

use crate::float::{bf16_above, from_bf16, magnitude, round_to_byte};
use crate::noise::Noise;

/// Bits of an integer code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bits {
    /// -7 to 7.
    Four,
    /// -127 to 127.
    Eight,
}

impl Bits {
    pub(crate) const fn count(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

/// Elements that share a scale.
pub(crate) const BLOCK: usize = 32;

/// Blocks with a smaller scale are encoded as zeros, because the inverse of their scale could overflow.
const MIN_SCALE: f32 = 1e-30;

/// The size of `n` elements in bytes: scales, then codes.
pub(crate) fn bytes(bits: Bits, n: usize) -> usize {
    let blocks = n.div_ceil(BLOCK);
    2 * blocks
        + match bits {
            Bits::Eight => n,
            Bits::Four => blocks * BLOCK / 2,
        }
}

/// The size of the scales of `n` elements in bytes.
pub(crate) fn scale_bytes(n: usize) -> usize {
    2 * n.div_ceil(BLOCK)
}

/// Writes the scales and codes of finite `values`. With noise, rounding is stochastic; its counter starts at `start`.
#[inline(always)]
pub(crate) fn encode(
    bits: Bits,
    values: &[f32],
    noise: Option<Noise>,
    start: u32,
    scales: &mut [u8],
    codes: &mut [u8],
) {
    let (scales, _) = scales.as_chunks_mut::<2>();
    let (whole, rest) = values.as_chunks::<BLOCK>();
    let (first, last) = scales.split_at_mut(whole.len());
    let mut padded = [0.0; BLOCK];
    padded[..rest.len()].copy_from_slice(rest);
    let at = |block: usize| start.wrapping_add((block * BLOCK) as u32);
    match bits {
        Bits::Eight => {
            let (blocks, tail) = codes.as_chunks_mut::<BLOCK>();
            for (i, ((values, scale), codes)) in whole.iter().zip(first).zip(blocks).enumerate() {
                *scale = quantise::<127>(values, noise, at(i), codes);
            }
            for scale in last {
                let mut codes = [0; BLOCK];
                *scale = quantise::<127>(&padded, noise, at(whole.len()), &mut codes);
                tail.copy_from_slice(&codes[..tail.len()]);
            }
        }
        Bits::Four => {
            let (blocks, _) = codes.as_chunks_mut::<{ BLOCK / 2 }>();
            let (blocks, tail) = blocks.split_at_mut(whole.len());
            let mut codes = [0; BLOCK];
            for (i, ((values, scale), packed)) in whole.iter().zip(first).zip(blocks).enumerate() {
                *scale = quantise::<7>(values, noise, at(i), &mut codes);
                *packed = pack(&codes);
            }
            for (scale, packed) in last.iter_mut().zip(tail) {
                *scale = quantise::<7>(&padded, noise, at(whole.len()), &mut codes);
                *packed = pack(&codes);
            }
        }
    }
}

/// Decodes the output of [`encode`].
#[inline(always)]
pub(crate) fn decode(bits: Bits, scales: &[u8], codes: &[u8], out: &mut [f32]) {
    let (scales, _) = scales.as_chunks::<2>();
    let (whole, rest) = out.as_chunks_mut::<BLOCK>();
    let (first, last) = scales.split_at(whole.len());
    match bits {
        Bits::Eight => {
            let (blocks, tail) = codes.as_chunks::<BLOCK>();
            for ((out, scale), codes) in whole.iter_mut().zip(first).zip(blocks) {
                let scale = read_scale(*scale);
                for (o, c) in out.iter_mut().zip(codes) {
                    *o = f32::from(*c as i8) * scale;
                }
            }
            for scale in last {
                let scale = read_scale(*scale);
                for (o, c) in rest.iter_mut().zip(tail) {
                    *o = f32::from(*c as i8) * scale;
                }
            }
        }
        Bits::Four => {
            let (blocks, _) = codes.as_chunks::<{ BLOCK / 2 }>();
            for ((out, scale), packed) in whole.iter_mut().zip(first).zip(blocks) {
                *out = unpack(packed, read_scale(*scale));
            }
            for (scale, packed) in last.iter().zip(&blocks[whole.len()..]) {
                rest.copy_from_slice(&unpack(packed, read_scale(*scale))[..rest.len()]);
            }
        }
    }
}

/// Decodes element `i` of the output of [`encode`] with 8 bits.
#[inline(always)]
pub(crate) fn decode_one(scales: &[[u8; 2]], codes: &[u8], i: usize) -> f32 {
    f32::from(codes[i] as i8) * read_scale(scales[i / BLOCK])
}

/// Whether all scales are finite and not negative.
#[inline(always)]
pub(crate) fn scales_are_valid(scales: &[u8]) -> bool {
    let (scales, _) = scales.as_chunks::<2>();
    scales.iter().fold(0, |worst, s| worst.max(u16::from_le_bytes(*s))) < 0x7F80
}

#[inline(always)]
fn read_scale(bytes: [u8; 2]) -> f32 {
    from_bf16(u16::from_le_bytes(bytes))
}

/// Writes the codes of one block, from -LARGEST to LARGEST, and returns its scale. The noise counter starts at `at`.
#[inline(always)]
fn quantise<const LARGEST: u8>(
    values: &[f32; BLOCK],
    noise: Option<Noise>,
    at: u32,
    codes: &mut [u8; BLOCK],
) -> [u8; 2] {
    let largest = f32::from(LARGEST);
    let top = values.iter().fold(0, |top: u32, x| top.max(magnitude(*x)));
    let scale = bf16_above(f32::from_bits(top) / largest);
    let inverse = 1.0 / from_bf16(scale);
    let (scale, inverse) = if from_bf16(scale) < MIN_SCALE { (0, 0.0) } else { (scale, inverse) };
    match noise {
        None => {
            for (code, x) in codes.iter_mut().zip(values) {
                *code = round_to_byte((x * inverse).clamp(-largest, largest));
            }
        }
        Some(noise) => {
            for (i, (code, x)) in codes.iter_mut().zip(values).enumerate() {
                let noisy = x * inverse + noise.centred(at.wrapping_add(i as u32));
                *code = round_to_byte(noisy.clamp(-largest, largest));
            }
        }
    }
    scale.to_le_bytes()
}

#[inline(always)]
fn pack(codes: &[u8; BLOCK]) -> [u8; BLOCK / 2] {
    let mut packed = [0; BLOCK / 2];
    for (j, byte) in packed.iter_mut().enumerate() {
        *byte = (codes[j].wrapping_add(8) & 15) | codes[j + BLOCK / 2].wrapping_add(8) << 4;
    }
    packed
}

#[inline(always)]
fn unpack(packed: &[u8; BLOCK / 2], scale: f32) -> [f32; BLOCK] {
    let mut codes = [0; BLOCK];
    for (j, byte) in packed.iter().enumerate() {
        (codes[j], codes[j + BLOCK / 2]) = (byte & 15, byte >> 4);
    }
    codes.map(|code| (i32::from(code) - 8) as f32 * scale)
}
