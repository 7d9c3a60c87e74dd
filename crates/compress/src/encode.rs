//! Encoding.

use crate::codec::{Kept, masked_bytes, top_bytes};
use crate::float::{magnitude, to_any_bf16, to_bf16};
use crate::index::Indices;
use crate::mask::Mask;
use crate::noise::Noise;
use crate::select::{Selector, by_words, compact};
use crate::wire::{Form, HEADER_BYTES, ROTATED, begin, exact_bytes};
use crate::{Codec, Element, IntBlocks, TopK, ValueFormat, block, nvfp4, rotate, sparse};

/// The bits of 2^120. Tensors with larger magnitudes are sent exactly: scales and sums of 64 elements must stay finite.
const MAX_MAGNITUDE: u32 = (127 + 120) << 23;

/// Encodes tensors, and reuses its buffers for the next tensor.
#[derive(Debug, Default)]
pub struct Encoder {
    selector: Selector,
    kept: Vec<f32>,
}

/// Facts about an encoded tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// Whether the tensor has a NaN, an infinity or a magnitude above 2^120. It is then sent exactly, and marked so.
    pub out_of_range: bool,
}

/// A tensor that cannot be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The tensor's length does not fit the header.
    #[error("a tensor of {0} elements is too long to send: at most 2^32 - 1 elements fit a message")]
    TooLong(usize),
    /// The mask belongs to a tensor of another length.
    #[error("the mask has {mask} elements, but the tensor has {tensor}")]
    Mask {
        /// Elements of the mask.
        mask: usize,
        /// Elements of the tensor.
        tensor: usize,
    },
}

impl Encoder {
    /// An encoder with empty buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the content of `out` by the encoded `values` of a tensor of `element`s. Random signs and stochastic
    /// rounding are drawn from `seed`: the same seed gives the same bytes on every processor.
    ///
    /// # Errors
    ///
    /// [`EncodeError::TooLong`] for more than 2^32 - 1 elements.
    pub fn encode(
        &mut self,
        codec: &Codec,
        values: &[f32],
        element: Element,
        seed: u64,
        out: &mut Vec<u8>,
    ) -> Result<Encoded, EncodeError> {
        let n = u32::try_from(values.len()).map_err(|_| EncodeError::TooLong(values.len()))?;
        Ok(pulp::Arch::new().dispatch(
            #[inline(always)]
            || self.encode_here(codec, values, (n, element), seed, out),
        ))
    }

    /// `pulp` compiles this function for each width of vectors, with all that it inlines.
    #[inline(always)]
    fn encode_here(
        &mut self,
        codec: &Codec,
        values: &[f32],
        (n, element): (u32, Element),
        seed: u64,
        out: &mut Vec<u8>,
    ) -> Encoded {
        let length = values.len();
        let longer = codec.coded_bytes(length, element) >= exact_bytes(length, element);
        if let Codec::TopK(form) = codec
            && !longer
        {
            return self.write_top(form, values, (n, element), out);
        }
        let top = largest(values);
        let out_of_range = top > MAX_MAGNITUDE;
        if out_of_range || longer {
            return write_whole(values, (n, element), out_of_range, out);
        }
        match codec {
            // This is unreachable: no codec is never shorter than the exact form, and top-k is written above.
            Codec::None | Codec::TopK(_) => {}
            Codec::Bf16 => write_bf16(values, begin(out, Form::Bf16, 0, n, 2 * length)),
            Codec::Int(form) => {
                let detail = form.bits.count() as u8 | if form.rotate { ROTATED } else { 0 };
                let body = begin(out, Form::Int, detail, n, form.body_bytes(length));
                let noise = form.stochastic.then(|| Noise::new(seed));
                if form.rotate {
                    // The wire has 32 bits of the seed. Rounding uses all 64 of them.
                    write_rotated(form, values, noise, (seed >> 32) as u32 ^ seed as u32, body);
                } else {
                    let (scales, codes) = body.split_at_mut(block::scale_bytes(length));
                    block::encode(form.bits, values, noise, 0, scales, codes);
                }
            }
            Codec::Nvfp4 => {
                let body = begin(out, Form::Nvfp4, 0, n, nvfp4::body_bytes(length));
                nvfp4::encode(values, f32::from_bits(top), body);
            }
        }
        Encoded { out_of_range }
    }

    /// Encodes a gradient. Its receiver has sent the activation, and of it only the entries of `mask`.
    ///
    /// With top-k, the gradient of these entries goes without their places, which the receiver knows. If a smaller number
    /// of entries with their places takes fewer bytes, the largest of them go like that instead, and all others of
    /// `values` become zero. Other codecs encode all entries. The size is [`Codec::bytes_under`].
    ///
    /// # Errors
    ///
    /// The errors of [`Self::encode`], and [`EncodeError::Mask`] if the mask has another length.
    pub fn encode_under(
        &mut self,
        mask: &Mask,
        codec: &Codec,
        values: &mut [f32],
        element: Element,
        seed: u64,
        out: &mut Vec<u8>,
    ) -> Result<Encoded, EncodeError> {
        if mask.elements() != values.len() {
            return Err(EncodeError::Mask { mask: mask.elements(), tensor: values.len() });
        }
        let n = u32::try_from(values.len()).map_err(|_| EncodeError::TooLong(values.len()))?;
        let Codec::TopK(top) = codec else { return self.encode(codec, values, element, seed, out) };
        let format = top.kept(values.len(), element).values;
        let under = masked_bytes(values.len(), mask.kept(), format);
        if under > codec.bytes(values.len(), element) || under >= exact_bytes(values.len(), element) {
            mask.clear_others(values);
            return self.encode(codec, values, element, seed, out);
        }
        let values = &*values;
        Ok(pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                let (mut total, mut bits) = (0, mask.words().iter());
                by_words(
                    values,
                    #[inline(always)]
                    |word, _| {
                        total += compact(word, bits.next().copied().unwrap_or(0), total, &mut self.kept);
                    },
                );
                let kept = &mut self.kept[..mask.kept()];
                if largest(kept) > MAX_MAGNITUDE {
                    return write_whole(values, (n, element), true, out);
                }
                let body = begin(out, Form::Masked, format.byte(), n, under - HEADER_BYTES);
                let (count, body) = body.split_at_mut(4);
                count.copy_from_slice(&(mask.kept() as u32).to_le_bytes());
                write_values(values.len(), mask.words(), kept, format, body);
                Encoded { out_of_range: false }
            },
        ))
    }

    #[inline(always)]
    fn write_top(&mut self, form: &TopK, values: &[f32], (n, element): (u32, Element), out: &mut Vec<u8>) -> Encoded {
        let Kept { values: format, count: k } = form.kept(values.len(), element);
        let words = self.selector.largest(values, k, &mut self.kept);
        let kept = &mut self.kept[..k];
        // The largest of all is among them.
        if largest(kept) > MAX_MAGNITUDE {
            return write_whole(values, (n, element), true, out);
        }
        let set = Indices::new(values.len(), k);
        let body = begin(out, Form::TopK, format.byte(), n, top_bytes(values.len(), k, format));
        let (count, body) = body.split_at_mut(4);
        count.copy_from_slice(&(k as u32).to_le_bytes());
        let (places, body) = body.split_at_mut(set.bytes());
        set.write(words, places);
        write_values(values.len(), words, kept, format, body);
        Encoded { out_of_range: false }
    }
}

/// Writes the values that top-k keeps of `n` elements.
#[inline(always)]
fn write_values(n: usize, words: &[u64], kept: &mut [f32], format: ValueFormat, body: &mut [u8]) {
    match format {
        ValueFormat::F32 => write_f32(kept, body),
        ValueFormat::Bf16 => write_bf16(kept, body),
        ValueFormat::Int(bits) => sparse::encode(bits, n, words, kept, body),
    }
}

/// The bits of the largest magnitude. Integers: the largest does not depend on the order of the comparisons.
#[inline(always)]
fn largest(values: &[f32]) -> u32 {
    values.iter().fold(0, |top: u32, x| top.max(magnitude(*x)))
}

/// Writes a tensor in the exact form.
#[inline(always)]
fn write_whole(values: &[f32], (n, element): (u32, Element), out_of_range: bool, out: &mut Vec<u8>) -> Encoded {
    let body = begin(out, Form::Exact, u8::from(out_of_range), n, element.bytes() * values.len());
    write_exact(values, element, body);
    Encoded { out_of_range }
}

#[inline(always)]
fn write_exact(values: &[f32], element: Element, out: &mut [u8]) {
    match element {
        Element::F32 => write_f32(values, out),
        Element::Bf16 => {
            for (o, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *o = to_any_bf16(*x).to_le_bytes();
            }
        }
    }
}

#[inline(always)]
fn write_f32(values: &[f32], out: &mut [u8]) {
    for (o, x) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
        *o = x.to_le_bytes();
    }
}

#[inline(always)]
fn write_bf16(values: &[f32], out: &mut [u8]) {
    for (o, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *o = to_bf16(*x).to_le_bytes();
    }
}

#[inline(always)]
fn write_rotated(form: &IntBlocks, values: &[f32], noise: Option<Noise>, seed: u32, body: &mut [u8]) {
    let (head, body) = body.split_at_mut(4);
    head.copy_from_slice(&seed.to_le_bytes());
    let (scales, codes) = body.split_at_mut(block::scale_bytes(rotate::padded(values.len())));
    let scales = scales.chunks_mut(block::scale_bytes(rotate::PIECE));
    let codes = codes.chunks_mut(rotate::PIECE * form.bits.count() / 8);
    let signs = Noise::new(u64::from(seed));
    let mut buffer = [0.0; rotate::PIECE];
    for (i, ((values, scales), codes)) in values.chunks(rotate::PIECE).zip(scales).zip(codes).enumerate() {
        let piece = &mut buffer[..rotate::padded(values.len())];
        piece[..values.len()].copy_from_slice(values);
        piece[values.len()..].fill(0.0);
        rotate::rotate(piece, i * rotate::PIECE, signs);
        block::encode(form.bits, piece, noise, (i * rotate::PIECE) as u32, scales, codes);
    }
}
