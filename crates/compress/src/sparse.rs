//! The values that top-k keeps, as integers.
//!
//! Values share a scale only if they stand near each other in the tensor, within [`span`] elements. In a transformer
//! these are of one token as long as the width is a multiple of that. If the scale were shared with the next token, a
//! model with a causal mask could learn from it what comes next. A GPT-2 did learn that: its training loss fell below
//! that without a codec, while its validation loss rose.

use crate::Bits;
use crate::block::{self, GROUP};
use crate::float::magnitude;
use crate::select::WORD;

/// The fewest kept values that share a scale, on average, so that scales remain small beside the codes.
const FEWEST: usize = 16;

/// The number of elements in a row whose kept values share a scale, when `k` of `n` are kept: a power of two.
pub(crate) fn span(n: usize, k: usize) -> usize {
    let mut span = WORD;
    while span * k < FEWEST * n && span < n {
        span *= 2;
    }
    span
}

/// The size of the scales in bytes.
pub(crate) fn scale_bytes(n: usize, k: usize) -> usize {
    2 * n.div_ceil(span(n, k))
}

/// Writes the scales and codes of the values whose bits are set in `words`, of `n` elements. The values are divided by
/// their scales.
#[inline(always)]
pub(crate) fn encode(bits: Bits, n: usize, words: &[u64], kept: &mut [f32], body: &mut [u8]) {
    let (scales, codes) = body.split_at_mut(scale_bytes(n, kept.len()));
    let (scales, _) = scales.as_chunks_mut::<2>();
    let words_of_span = span(n, kept.len()) / WORD;
    let largest = ((1 << (bits.count() - 1)) - 1) as f32;
    let mut rest = &mut *kept;
    for (words, scales) in words.chunks(GROUP * words_of_span).zip(scales.chunks_mut(GROUP)) {
        let (mut counts, mut tops) = ([0; GROUP], [0; GROUP]);
        let mut begin = 0;
        for ((count, top), words) in counts.iter_mut().zip(&mut tops).zip(words.chunks(words_of_span)) {
            for word in words {
                *count += word.count_ones() as usize;
            }
            for x in &rest[begin..begin + *count] {
                *top = magnitude(*x).max(*top);
            }
            begin += *count;
        }
        let inverses = block::write_scales(tops, largest, scales);
        let (group, after) = rest.split_at_mut(begin);
        let mut begin = 0;
        for (count, inverse) in counts.iter().zip(inverses) {
            for x in &mut group[begin..begin + count] {
                *x *= inverse;
            }
            begin += count;
        }
        rest = after;
    }
    block::encode_codes(bits, kept, codes);
}

/// The factors of the kept values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales<'a> {
    /// None for values that have no scales.
    pub(crate) scales: &'a [[u8; 2]],
    pub(crate) span: usize,
}

impl Scales<'_> {
    /// The scale of an element.
    #[inline(always)]
    pub(crate) fn at(&self, element: usize) -> f32 {
        self.scales.get(element / self.span).map_or(1.0, |scale| block::read_scale(*scale))
    }
}
