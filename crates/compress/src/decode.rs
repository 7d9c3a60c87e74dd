//! Decoding, with all checks of received bytes.

use crate::float::{from_bf16, to_any_bf16};
use crate::index::Indices;
use crate::mask::{Mask, expand};
use crate::noise::Noise;
use crate::sparse::Scales;
use crate::wire::{Form, HEADER_BYTES, ROTATED, VERSION};
use crate::{Bits, Element, IntBlocks, ValueFormat, block, nvfp4, rotate, sparse};

/// Facts about a decoded tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decoded {
    /// Whether the sender marked the tensor: it has a NaN, an infinity or a magnitude above 2^120.
    pub out_of_range: bool,
}

/// Bytes that are not a tensor of the expected length. The output slice then has unspecified content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Shorter than the header.
    #[error("an encoded tensor has at least {HEADER_BYTES} bytes, but this one has {0}")]
    Short(usize),
    /// Another version of the wire form.
    #[error("the encoded tensor has wire version {0}, but this program reads version {VERSION}")]
    Version(u8),
    /// An unknown form.
    #[error("the encoded tensor has the unknown form {form} with detail {detail}")]
    Form {
        /// The second byte.
        form: u8,
        /// The third byte.
        detail: u8,
    },
    /// Another number of elements than expected.
    #[error("the encoded tensor has {found} elements, but {expected} were expected")]
    Elements {
        /// The number in the header.
        found: u32,
        /// The length of the output slice.
        expected: usize,
    },
    /// A body of the wrong length.
    #[error("the body of the encoded tensor has {found} bytes, but {expected} were expected")]
    Length {
        /// Bytes received.
        found: usize,
        /// Bytes of this form with this number of elements.
        expected: usize,
    },
    /// More kept entries than elements, or none.
    #[error("the number of kept entries, {0}, must be from 1 to the number of elements")]
    Kept(u32),
    /// Indices that are out of order, out of range, too few or too many.
    #[error("the indices of the kept entries are out of order, out of range, too few or too many")]
    Indices,
    /// The values of a mask's entries, but the receiver has no mask, or one with another number of entries.
    #[error(
        "the encoded tensor has {0} entries in the places of another tensor, of which this end sent no such entries"
    )]
    Mask(u32),
    /// A scale that is negative or not finite.
    #[error("a scale is negative or not finite")]
    Scale,
}

/// Decodes a tensor of `out.len()` elements. Allocates nothing, and checks every length and index before its use. The
/// numbers are such as `element` has. If it is the gradient of a tensor of which this end sent a part of the entries,
/// `mask` are their places.
///
/// # Errors
///
/// [`DecodeError`] if the bytes differ from the wire form in any way.
pub fn decode(bytes: &[u8], element: Element, mask: Option<&Mask>, out: &mut [f32]) -> Result<Decoded, DecodeError> {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || decode_here(bytes, element, mask, out),
    )
}

/// `pulp` compiles this function for each width of vectors, with all that it inlines.
#[inline(always)]
fn decode_here(bytes: &[u8], element: Element, mask: Option<&Mask>, out: &mut [f32]) -> Result<Decoded, DecodeError> {
    let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
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
    let form = Form::from_byte(form).filter(|_| zero == 0).ok_or(unknown)?;
    match (form, detail) {
        (Form::Exact, 0 | 1) => {
            check_length(body, element.bytes() * out.len())?;
            match element {
                Element::F32 => read_f32(body, out),
                Element::Bf16 => read_bf16(body, out),
            }
        }
        (Form::Bf16, 0) => {
            check_length(body, 2 * out.len())?;
            read_bf16(body, out);
        }
        (Form::Int, _) => {
            let count = usize::from(detail & !ROTATED);
            let bits = Bits::ALL.into_iter().find(|bits| bits.count() == count).ok_or(unknown)?;
            let form = IntBlocks { bits, rotate: detail & ROTATED != 0, stochastic: false };
            check_length(body, form.body_bytes(out.len()))?;
            read_blocks(form, body, out)?;
        }
        (Form::Nvfp4, 0) => {
            check_length(body, nvfp4::body_bytes(out.len()))?;
            nvfp4::decode(body, out).ok_or(DecodeError::Scale)?;
        }
        (Form::TopK, _) => read_top(ValueFormat::from_byte(detail).ok_or(unknown)?, body, out)?,
        (Form::Masked, _) => read_masked(ValueFormat::from_byte(detail).ok_or(unknown)?, body, mask, out)?,
        _ => return Err(unknown),
    }
    if element == Element::Bf16 && !matches!(form, Form::Exact | Form::Bf16) {
        out.iter_mut().for_each(|x| *x = from_bf16(to_any_bf16(*x)));
    }
    Ok(Decoded { out_of_range: form == Form::Exact && detail == 1 })
}

#[inline(always)]
fn check_length(body: &[u8], expected: usize) -> Result<(), DecodeError> {
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
fn read_blocks(form: IntBlocks, body: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
    let (head, body) = body.split_at(if form.rotate { 4 } else { 0 });
    let length = if form.rotate { rotate::padded(out.len()) } else { out.len() };
    let (scales, codes) = body.split_at(block::scale_bytes(length));
    if !block::scales_are_valid(scales) {
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
        rotate::unrotate(piece, i * rotate::PIECE, signs);
        out.copy_from_slice(&piece[..out.len()]);
    }
    Ok(())
}

#[inline(always)]
fn read_top(values: ValueFormat, body: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
    let (count, body) = read_count(body)?;
    let k = count as usize;
    if k == 0 || k > out.len() {
        return Err(DecodeError::Kept(count));
    }
    let set = Indices::new(out.len(), k);
    check_length(body, set.bytes() + values.bytes(out.len(), k))?;
    let (indices, kept) = body.split_at(set.bytes());
    let begin = out.len() - k;
    let scales = read_values(values, kept, out, k)?;
    if let Some(words) = set.bitmap(indices) {
        expand(words, k, out, scales);
        return Ok(());
    }
    // The values move to their places in ascending order. None is overwritten before, as none moves up.
    let mut next = 0;
    let read = set.read(
        indices,
        #[inline(always)]
        |rank, i| {
            let x = out[begin + rank] * scales.at(i);
            out[next..i].fill(0.0);
            out[i] = x;
            next = i + 1;
        },
    );
    out[next..].fill(0.0);
    read.ok_or(DecodeError::Indices)
}

#[inline(always)]
fn read_masked(values: ValueFormat, body: &[u8], mask: Option<&Mask>, out: &mut [f32]) -> Result<(), DecodeError> {
    let (count, body) = read_count(body)?;
    let k = count as usize;
    let mask = mask.filter(|mask| mask.elements() == out.len() && mask.kept() == k).ok_or(DecodeError::Mask(count))?;
    check_length(body, values.bytes(out.len(), k))?;
    let scales = read_values(values, body, out, k)?;
    expand(mask.words().iter().copied(), k, out, scales);
    Ok(())
}

#[inline(always)]
fn read_count(body: &[u8]) -> Result<(u32, &[u8]), DecodeError> {
    let (count, body) = body.split_first_chunk::<4>().ok_or(DecodeError::Length { found: body.len(), expected: 4 })?;
    Ok((u32::from_le_bytes(*count), body))
}

/// Decodes the `k` values that top-k kept into the last numbers of `out`. They are still to be multiplied by the scales.
#[inline(always)]
fn read_values<'a>(values: ValueFormat, bytes: &'a [u8], out: &mut [f32], k: usize) -> Result<Scales<'a>, DecodeError> {
    let n = out.len();
    let last = &mut out[n - k..];
    let mut scales: &[u8] = &[];
    match values {
        ValueFormat::F32 => read_f32(bytes, last),
        ValueFormat::Bf16 => read_bf16(bytes, last),
        ValueFormat::Int(bits) => {
            let codes;
            (scales, codes) = bytes.split_at(sparse::scale_bytes(n, k));
            if !block::scales_are_valid(scales) {
                return Err(DecodeError::Scale);
            }
            block::decode_codes(bits, codes, last);
        }
    }
    Ok(Scales { scales: scales.as_chunks().0, span: sparse::span(n, k) })
}
