//! Encoding.

use crate::codec::{Kept, top_bytes};
use crate::float::{magnitude, to_any_bf16, to_bf16};
use crate::index::Indices;
use crate::noise::Noise;
use crate::select::Selector;
use crate::wire::{Form, begin, exact_bytes};
use crate::{Bits, Codec, Element, IntBlocks, TopK, ValueFormat, block, decode, nvfp4, rotate};

/// The bits of 2^120. Tensors with larger magnitudes are sent exactly: scales and sums of 64 elements must stay finite.
const MAX_MAGNITUDE: u32 = (127 + 120) << 23;

/// Encodes tensors, and reuses its buffers for the next tensor.
#[derive(Debug, Default)]
pub struct Encoder {
    selector: Selector,
    sum: Vec<f32>,
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
    /// The residual belongs to a tensor of another length.
    #[error("the residual has {residual} elements, but the tensor has {tensor}")]
    Feedback {
        /// Elements of the residual.
        residual: usize,
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
        // Integers: the largest does not depend on the order of the comparisons.
        let top = values.iter().fold(0, |top: u32, x| top.max(magnitude(*x)));
        let out_of_range = top > MAX_MAGNITUDE;
        if out_of_range || codec.coded_bytes(length, element) >= exact_bytes(length, element) {
            let body = begin(out, Form::Exact, u8::from(out_of_range), n, element.bytes() * length);
            write_exact(values, element, body);
            return Encoded { out_of_range };
        }
        match codec {
            // This is unreachable, because the form is never shorter than the exact form, which is written above.
            Codec::None => {}
            Codec::Bf16 => write_bf16(values, begin(out, Form::Bf16, 0, n, 2 * length)),
            Codec::Int(form) => {
                let name = if form.bits == Bits::Eight { Form::Int8 } else { Form::Int4 };
                let body = begin(out, name, u8::from(form.rotate), n, form.body_bytes(length));
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
            Codec::TopK(form) => self.write_top(form, values, (n, element), out),
        }
        Encoded { out_of_range }
    }

    /// Encodes with error feedback (Seide et al., 2014).
    ///
    /// `residual` is the error of the last encoding, at first empty. It is added to `values`, and then replaced by the
    /// error of this encoding: the sum less what the receiver decodes. A sum that is out of range is not sent. Then
    /// `values` go without the residual, which is forgotten.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::encode`], and [`EncodeError::Feedback`] if the residual has another length.
    pub fn encode_with_feedback(
        &mut self,
        codec: &Codec,
        values: &[f32],
        element: Element,
        residual: &mut Vec<f32>,
        seed: u64,
        out: &mut Vec<u8>,
    ) -> Result<Encoded, EncodeError> {
        if !residual.is_empty() && residual.len() != values.len() {
            return Err(EncodeError::Feedback { residual: residual.len(), tensor: values.len() });
        }
        residual.resize(values.len(), 0.0);
        let mut sum = std::mem::take(&mut self.sum);
        sum.clear();
        sum.extend(values.iter().zip(residual.iter()).map(|(x, r)| x + r));
        let mut encoded = self.encode(codec, &sum, element, seed, out)?;
        if encoded.out_of_range {
            encoded = self.encode(codec, values, element, seed, out)?;
            residual.fill(0.0);
        } else if decode(out, element, residual).is_ok() {
            for (r, x) in residual.iter_mut().zip(&sum) {
                *r = x - *r;
            }
        }
        self.sum = sum;
        Ok(encoded)
    }

    #[inline(always)]
    fn write_top(&mut self, form: &TopK, values: &[f32], (n, element): (u32, Element), out: &mut Vec<u8>) {
        let Kept { values: format, count: k } = form.kept(values.len(), element);
        let (indices, kept) = self.selector.largest(values, k);
        let body = begin(out, Form::TopK, format as u8, n, top_bytes(values.len(), k, format));
        let (count, body) = body.split_at_mut(4);
        count.copy_from_slice(&(k as u32).to_le_bytes());
        let set = Indices::new(values.len(), k);
        let (index_bytes, body) = body.split_at_mut(set.bytes());
        set.write(indices, index_bytes);
        match format {
            ValueFormat::F32 => write_f32(kept, body),
            ValueFormat::Bf16 => write_bf16(kept, body),
            ValueFormat::Int8 => {
                let (scales, codes) = body.split_at_mut(block::scale_bytes(k));
                block::encode(Bits::Eight, kept, None, 0, scales, codes);
            }
        }
    }
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
