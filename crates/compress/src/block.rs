//! Integers in blocks that share a scale.

use serde::{Deserialize, Serialize};

use crate::float::{bf16_above, from_bf16, magnitude, round_to_byte};
use crate::noise::Noise;

/// Bits of an integer code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bits {
    /// -3 to 3.
    Three,
    /// -7 to 7.
    Four,
    /// -15 to 15.
    Five,
    /// -31 to 31.
    Six,
    /// -127 to 127.
    Eight,
}

impl Bits {
    /// Every number of bits, the fewest first.
    pub const ALL: [Self; 5] = [Self::Three, Self::Four, Self::Five, Self::Six, Self::Eight];

    /// The number of bits.
    pub const fn count(self) -> usize {
        match self {
            Self::Three => 3,
            Self::Four => 4,
            Self::Five => 5,
            Self::Six => 6,
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
    scale_bytes(n) + code_bytes(bits, n)
}

/// The size of `n` codes in bytes. Those of 8 bits end with the last element, others with its block.
pub(crate) fn code_bytes(bits: Bits, n: usize) -> usize {
    let codes = if bits == Bits::Eight { n } else { n.next_multiple_of(BLOCK) };
    codes * bits.count() / 8
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
    match bits {
        Bits::Three => encode_packed::<3, 12>(values, noise, start, scales, codes),
        Bits::Four => encode_packed::<7, 16>(values, noise, start, scales, codes),
        Bits::Five => encode_packed::<15, 20>(values, noise, start, scales, codes),
        Bits::Six => encode_packed::<31, 24>(values, noise, start, scales, codes),
        Bits::Eight => encode_packed::<127, 32>(values, noise, start, scales, codes),
    }
}

/// A block's values. Zeros fill up the last block.
#[inline(always)]
fn padded(values: &[f32]) -> [f32; BLOCK] {
    match values.first_chunk::<BLOCK>() {
        Some(whole) => *whole,
        None => {
            let mut padded = [0.0; BLOCK];
            padded[..values.len()].copy_from_slice(values);
            padded
        }
    }
}

/// [`encode`] with codes from -LARGEST to LARGEST, and BYTES bytes for the codes of a block. Codes as long as bytes end
/// with the last value.
#[inline(always)]
fn encode_packed<const LARGEST: u8, const BYTES: usize>(
    values: &[f32],
    noise: Option<Noise>,
    start: u32,
    scales: &mut [u8],
    codes: &mut [u8],
) {
    let (scales, _) = scales.as_chunks_mut::<2>();
    let groups = values.chunks(GROUP * BLOCK).zip(scales.chunks_mut(GROUP)).zip(codes.chunks_mut(GROUP * BYTES));
    let mut at = start;
    for ((values, scales), codes) in groups {
        let inverses = scale(values, f32::from(LARGEST), scales);
        for ((values, codes), inverse) in values.chunks(BLOCK).zip(codes.chunks_mut(BYTES)).zip(inverses) {
            write_block::<LARGEST, BYTES>(values, inverse, noise, at, codes);
            at = at.wrapping_add(BLOCK as u32);
        }
    }
}

/// Writes the codes of a block.
#[inline(always)]
fn write_block<const LARGEST: u8, const BYTES: usize>(
    values: &[f32],
    inverse: f32,
    noise: Option<Noise>,
    at: u32,
    codes: &mut [u8],
) {
    let mut block = [0; BLOCK];
    quantise::<LARGEST>(&padded(values), inverse, noise, at, &mut block);
    match codes.first_chunk_mut::<BYTES>() {
        Some(whole) => *whole = pack(&block),
        None => codes.copy_from_slice(&block[..codes.len()]),
    }
}

/// Writes codes of numbers that are divided by their scales already.
#[inline(always)]
pub(crate) fn encode_codes(bits: Bits, values: &[f32], codes: &mut [u8]) {
    match bits {
        Bits::Three => write_codes::<3, 12>(values, codes),
        Bits::Four => write_codes::<7, 16>(values, codes),
        Bits::Five => write_codes::<15, 20>(values, codes),
        Bits::Six => write_codes::<31, 24>(values, codes),
        Bits::Eight => write_codes::<127, 32>(values, codes),
    }
}

#[inline(always)]
fn write_codes<const LARGEST: u8, const BYTES: usize>(values: &[f32], codes: &mut [u8]) {
    for (values, codes) in values.chunks(BLOCK).zip(codes.chunks_mut(BYTES)) {
        write_block::<LARGEST, BYTES>(values, 1.0, None, 0, codes);
    }
}

/// Reads what [`encode_codes`] wrote, as whole numbers.
#[inline(always)]
pub(crate) fn decode_codes(bits: Bits, codes: &[u8], out: &mut [f32]) {
    match bits {
        Bits::Three => read_codes::<12>(codes, out),
        Bits::Four => read_codes::<16>(codes, out),
        Bits::Five => read_codes::<20>(codes, out),
        Bits::Six => read_codes::<24>(codes, out),
        Bits::Eight => {
            for (o, c) in out.iter_mut().zip(codes) {
                *o = f32::from(*c as i8);
            }
        }
    }
}

#[inline(always)]
fn read_codes<const BYTES: usize>(codes: &[u8], out: &mut [f32]) {
    for (out, packed) in out.chunks_mut(BLOCK).zip(codes.as_chunks::<BYTES>().0) {
        let block = unpack(packed, 1.0);
        match out.first_chunk_mut::<BLOCK>() {
            Some(whole) => *whole = block,
            None => out.copy_from_slice(&block[..out.len()]),
        }
    }
}

/// Decodes the output of [`encode`].
#[inline(always)]
pub(crate) fn decode(bits: Bits, scales: &[u8], codes: &[u8], out: &mut [f32]) {
    match bits {
        Bits::Three => decode_packed::<12>(scales, codes, out),
        Bits::Four => decode_packed::<16>(scales, codes, out),
        Bits::Five => decode_packed::<20>(scales, codes, out),
        Bits::Six => decode_packed::<24>(scales, codes, out),
        Bits::Eight => {
            let (scales, _) = scales.as_chunks::<2>();
            let (whole, rest) = out.as_chunks_mut::<BLOCK>();
            let (first, last) = scales.split_at(whole.len());
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
    }
}

/// Decodes the output of [`encode_packed`].
#[inline(always)]
fn decode_packed<const BYTES: usize>(scales: &[u8], codes: &[u8], out: &mut [f32]) {
    let (scales, _) = scales.as_chunks::<2>();
    let (blocks, _) = codes.as_chunks::<BYTES>();
    let (whole, rest) = out.as_chunks_mut::<BLOCK>();
    let (first, last) = scales.split_at(whole.len());
    for ((out, scale), packed) in whole.iter_mut().zip(first).zip(blocks) {
        *out = unpack(packed, read_scale(*scale));
    }
    for (scale, packed) in last.iter().zip(&blocks[whole.len()..]) {
        rest.copy_from_slice(&unpack(packed, read_scale(*scale))[..rest.len()]);
    }
}

/// Whether all scales are finite and not negative.
#[inline(always)]
pub(crate) fn scales_are_valid(scales: &[u8]) -> bool {
    let (scales, _) = scales.as_chunks::<2>();
    scales.iter().fold(0, |worst, s| worst.max(u16::from_le_bytes(*s))) < 0x7F80
}

#[inline(always)]
pub(crate) fn read_scale(bytes: [u8; 2]) -> f32 {
    from_bf16(u16::from_le_bytes(bytes))
}

/// Blocks whose scales are computed together: divisions take long, and vectors do many at once.
pub(crate) const GROUP: usize = 16;

/// Writes the scales of up to [`GROUP`] blocks whose codes go up to `largest`, and returns the inverses of these scales.
#[inline(always)]
fn scale(values: &[f32], largest: f32, scales: &mut [[u8; 2]]) -> [f32; GROUP] {
    let mut tops = [0u32; GROUP];
    for (top, block) in tops.iter_mut().zip(values.chunks(BLOCK)) {
        for x in block {
            *top = (*top).max(magnitude(*x));
        }
    }
    write_scales(tops, largest, scales)
}

/// [`scale`] for blocks with these largest magnitudes.
#[inline(always)]
pub(crate) fn write_scales(tops: [u32; GROUP], largest: f32, scales: &mut [[u8; 2]]) -> [f32; GROUP] {
    let (mut inverses, mut rounded) = ([0.0; GROUP], [0; GROUP]);
    for ((inverse, rounded), top) in inverses.iter_mut().zip(&mut rounded).zip(tops) {
        let scale = bf16_above(f32::from_bits(top) / largest);
        let usable = from_bf16(scale) >= MIN_SCALE;
        *rounded = if usable { scale } else { 0 };
        *inverse = if usable { 1.0 / from_bf16(scale) } else { 0.0 };
    }
    for (scale, rounded) in scales.iter_mut().zip(rounded) {
        *scale = rounded.to_le_bytes();
    }
    inverses
}

/// The codes of one block, from -LARGEST to LARGEST. The noise counter starts at `at`.
#[inline(always)]
fn quantise<const LARGEST: u8>(
    values: &[f32; BLOCK],
    inverse: f32,
    noise: Option<Noise>,
    at: u32,
    codes: &mut [u8; BLOCK],
) {
    let largest = f32::from(LARGEST);
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
}

/// The lowest bit of each byte.
const EACH_BYTE: u64 = 0x0101_0101_0101_0101;

/// Bits of a code that [`pack`] puts into halves of bytes. Each of the others has a plane of its own.
const fn halves(bytes: usize) -> usize {
    if bytes < BLOCK / 2 { 0 } else { 4 }
}

/// Packs a block of codes into a quarter of BYTES bits each. The four lowest bits of a code fill half a byte. Each other
/// bit has a plane of four bytes, with one bit for each code. Codes of three bits have three planes, and codes of eight stay
/// as they are. Halves and planes, unlike bits in a
/// row, take the same operations for each code, so vectors do them.
#[inline(always)]
fn pack<const BYTES: usize>(codes: &[u8; BLOCK]) -> [u8; BYTES] {
    let mut packed = [0; BYTES];
    if BYTES == BLOCK {
        packed.copy_from_slice(codes);
        return packed;
    }
    let mut codes = *codes;
    for code in &mut codes {
        *code = code.wrapping_add(1 << (BYTES / 4 - 1));
    }
    if halves(BYTES) > 0 {
        for (j, byte) in packed[..BLOCK / 2].iter_mut().enumerate() {
            *byte = (codes[j] & 15) | codes[j + BLOCK / 2] << 4;
        }
    }
    for plane in halves(BYTES)..BYTES / 4 {
        // Each byte of a word is a code, and the bits of four words fill half of it.
        let mut word = 0;
        for (i, eight) in codes.as_chunks::<8>().0.iter().enumerate() {
            word |= (u64::from_le_bytes(*eight) >> plane & EACH_BYTE) << i;
        }
        let word = word as u32 | ((word >> 32) as u32) << 4;
        packed[4 * plane..4 * plane + 4].copy_from_slice(&word.to_le_bytes());
    }
    packed
}

#[inline(always)]
fn unpack<const BYTES: usize>(packed: &[u8; BYTES], scale: f32) -> [f32; BLOCK] {
    let mut codes = [0u8; BLOCK];
    if halves(BYTES) > 0 {
        for (j, byte) in packed[..BLOCK / 2].iter().enumerate() {
            (codes[j], codes[j + BLOCK / 2]) = (byte & 15, byte >> 4);
        }
    }
    for plane in halves(BYTES)..BYTES / 4 {
        let mut word = [0; 4];
        word.copy_from_slice(&packed[4 * plane..4 * plane + 4]);
        let word = u64::from(u32::from_le_bytes(word));
        let word = (word & 0x0F0F_0F0F) | (word & 0xF0F0_F0F0) << 28;
        for (i, eight) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *eight = (u64::from_le_bytes(*eight) | (word >> i & EACH_BYTE) << plane).to_le_bytes();
        }
    }
    let mut values = [0.0; BLOCK];
    for (x, code) in values.iter_mut().zip(codes) {
        *x = (i32::from(code) - (1 << (BYTES / 4 - 1))) as f32 * scale;
    }
    values
}
