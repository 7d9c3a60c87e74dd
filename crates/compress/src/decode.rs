use crate::float::from_bf16;
use crate::index::Indices;
use crate::noise::Noise;
use crate::wire::{Form, HEADER, VERSION};
use crate::{Bits, IntBlocks, Values, block, nvfp4, rotate};

/// What a decoded tensor's bytes said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decoded {
    /// Whether the sender flagged it: it holds a NaN, an infinity or a magnitude that no codec takes.
    pub flagged: bool,
}

/// Why bytes are no tensor of the expected length. What was decoded into is unspecified then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Shorter than the header.
    #[error("a coded tensor has at least 8 bytes, this one has {0}")]
    Short(usize),
    /// Of another program.
    #[error("its wire form has version {0}, this program reads version {VERSION}")]
    Version(u8),
    /// Neither of the known forms.
    #[error("there is no form {form} with detail {detail}")]
    Form {
        /// The second byte.
        form: u8,
        /// The third.
        detail: u8,
    },
    /// Another number of elements than expected.
    #[error("it has {found} elements, {expected} were expected")]
    Elements {
        /// What it says.
        found: u32,
        /// What the receiver waits for.
        expected: usize,
    },
    /// Another length than the form has for these elements.
    #[error("its body has {found} bytes, {expected} were expected")]
    Length {
        /// What there is.
        found: usize,
        /// What the form takes.
        expected: usize,
    },
    /// More kept entries than elements, or none.
    #[error("it keeps {0} entries")]
    Kept(u32),
    /// Not as many ascending indices in range as it says.
    #[error("its indices are not ascending, in range, and as many as it says")]
    Indices,
    /// A scale that is negative or not finite.
    #[error("a scale is not a number from 0 up")]
    Scale,
}

/// Reads a tensor of `out.len()` elements. Nothing is allocated, and every length and index is checked before it is used.
///
/// # Errors
///
/// Whatever is not exactly as the wire form says: [`DecodeError`].
pub fn decode(bytes: &[u8], out: &mut [f32]) -> Result<Decoded, DecodeError> {
    pulp::Arch::new().dispatch(Decode { bytes, out })
}

/// What is compiled for every width of vectors.
struct Decode<'a> {
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl pulp::WithSimd for Decode<'_> {
    type Output = Result<Decoded, DecodeError>;

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, simd: S) -> Self::Output {
        decode_here(simd, self.bytes, self.out)
    }
}

#[inline(always)]
fn decode_here<S: pulp::Simd>(simd: S, bytes: &[u8], out: &mut [f32]) -> Result<Decoded, DecodeError> {
    let Some((header, body)) = bytes.split_first_chunk::<HEADER>() else {
        return Err(DecodeError::Short(bytes.len()));
    };
    let [version, form, detail, zero, a, b, c, d] = *header;
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    let n = u32::from_le_bytes([a, b, c, d]);
    if n as usize != out.len() {
        return Err(DecodeError::Elements { found: n, expected: out.len() });
    }
    let unknown = DecodeError::Form { form, detail };
    let form = Form::read(form).filter(|_| zero == 0).ok_or(unknown)?;
    match (form, detail) {
        (Form::Exact, 0 | 1) => {
            sized(body, 4 * out.len())?;
            read_f32(body, out);
        }
        (Form::Bf16, 0) => {
            sized(body, 2 * out.len())?;
            read_bf16(body, out);
        }
        (Form::Int8 | Form::Int4, 0 | 1) => {
            let bits = if form == Form::Int8 { Bits::Eight } else { Bits::Four };
            let form = IntBlocks { bits, rotate: detail == 1, stochastic: false };
            sized(body, form.body_bytes(out.len()))?;
            read_blocks(simd, form, body, out)?;
        }
        (Form::Nvfp4, 0) => {
            sized(body, nvfp4::body_bytes(out.len()))?;
            nvfp4::decode(body, out).ok_or(DecodeError::Scale)?;
        }
        (Form::TopK, _) => read_top(Values::read(detail).ok_or(unknown)?, body, out)?,
        _ => return Err(unknown),
    }
    Ok(Decoded { flagged: form == Form::Exact && detail == 1 })
}

#[inline(always)]
fn sized(body: &[u8], expected: usize) -> Result<(), DecodeError> {
    let found = body.len();
    if found == expected { Ok(()) } else { Err(DecodeError::Length { found, expected }) }
}

#[inline(always)]
fn read_f32(body: &[u8], out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(body.as_chunks::<4>().0) {
        *o = f32::from_le_bytes(*x);
    }
}

#[inline(always)]
fn read_bf16(body: &[u8], out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(body.as_chunks::<2>().0) {
        *o = from_bf16(u16::from_le_bytes(*x));
    }
}

#[inline(always)]
fn read_blocks<S: pulp::Simd>(simd: S, form: IntBlocks, body: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
    let (head, body) = body.split_at(if form.rotate { 4 } else { 0 });
    let length = if form.rotate { rotate::padded(out.len()) } else { out.len() };
    let (scales, codes) = body.split_at(block::scale_bytes(length));
    if !block::scales_are_sound(scales) {
        return Err(DecodeError::Scale);
    }
    let Some(seed) = head.first_chunk::<4>() else {
        block::decode(form.bits, scales, codes, out);
        return Ok(());
    };
    let signs = Noise::new(u64::from(u32::from_le_bytes(*seed)));
    let scales = scales.chunks(block::scale_bytes(rotate::PIECE));
    let codes = codes.chunks(rotate::PIECE * form.bits.count() / 8);
    let mut buffer = [0.0; rotate::PIECE];
    for (i, ((out, scales), codes)) in out.chunks_mut(rotate::PIECE).zip(scales).zip(codes).enumerate() {
        let piece = &mut buffer[..rotate::padded(out.len())];
        block::decode(form.bits, scales, codes, piece);
        rotate::unrotate(simd, piece, i * rotate::PIECE, signs);
        out.copy_from_slice(&piece[..out.len()]);
    }
    Ok(())
}

#[inline(always)]
fn read_top(values: Values, body: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
    let (count, body) = body.split_first_chunk::<4>().ok_or(DecodeError::Length { found: body.len(), expected: 4 })?;
    let count = u32::from_le_bytes(*count);
    let k = count as usize;
    if k == 0 || k > out.len() {
        return Err(DecodeError::Kept(count));
    }
    let set = Indices::new(out.len(), k);
    sized(body, set.bytes() + values.bytes(k))?;
    let (indices, kept) = body.split_at(set.bytes());
    out.fill(0.0);
    let read = match values {
        Values::F32 => {
            let (kept, _) = kept.as_chunks::<4>();
            set.read(
                indices,
                #[inline(always)]
                |rank, i| out[i] = f32::from_le_bytes(kept[rank]),
            )
        }
        Values::Bf16 => {
            let (kept, _) = kept.as_chunks::<2>();
            set.read(
                indices,
                #[inline(always)]
                |rank, i| out[i] = from_bf16(u16::from_le_bytes(kept[rank])),
            )
        }
        Values::Int8 => {
            let (scales, codes) = kept.split_at(block::scale_bytes(k));
            if !block::scales_are_sound(scales) {
                return Err(DecodeError::Scale);
            }
            let (scales, _) = scales.as_chunks::<2>();
            set.read(
                indices,
                #[inline(always)]
                |rank, i| out[i] = block::decode_one(scales, codes, rank),
            )
        }
    };
    read.ok_or(DecodeError::Indices)
}
