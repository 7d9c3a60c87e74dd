//! The places of the entries that top-k keeps.

use crate::codec::ValueFormat;
use crate::index::Indices;
use crate::select::WORD;
use crate::sparse::Scales;
use crate::wire::{Form, HEADER_BYTES, VERSION};

/// The places of the entries that top-k sent of a tensor: one bit for each element.
///
/// Both ends of a message know it. So the gradient of these entries needs no places on its way back. These are the
/// entries that were sent, not those that arrived as other numbers than zero: few bits round small ones to zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask {
    elements: usize,
    kept: usize,
    /// Bits beyond the last element are zero.
    words: Vec<u64>,
}

impl Mask {
    /// The mask of a tensor of so many elements that [`Encoder::encode`](crate::Encoder::encode) has encoded. `None` if
    /// top-k did not encode it, or if the bytes are not of the wire form.
    pub fn of(encoded: &[u8], elements: usize) -> Option<Self> {
        let (header, body) = encoded.split_first_chunk::<HEADER_BYTES>()?;
        let [version, form, detail, _, a, b, c, d] = *header;
        if version != VERSION || Form::from_byte(form)? != Form::TopK {
            return None;
        }
        let (count, body) = body.split_first_chunk::<4>()?;
        let [found, kept] = [[a, b, c, d], *count].map(|x| u32::from_le_bytes(x) as usize);
        if found != elements || kept > elements {
            return None;
        }
        let set = Indices::new(elements, kept);
        let values = ValueFormat::from_byte(detail)?.bytes(elements, kept);
        let (places, _) = body.split_at_checked(body.len().checked_sub(values)?)?;
        Some(Self { elements, kept, words: set.words(places)? })
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// The number of the tensor's elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The number of entries that were sent.
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// Adds the entries of the mask of another tensor with as many elements.
    pub fn join(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, more)| *word |= more);
        self.kept = self.words.iter().map(|word| word.count_ones() as usize).sum();
    }

    /// Sets all other entries of a tensor to zero.
    pub fn clear_others(&self, values: &mut [f32]) {
        for (values, word) in values.chunks_mut(WORD).zip(&self.words) {
            for (i, x) in values.iter_mut().enumerate() {
                *x = if word >> i & 1 == 1 { *x } else { 0.0 };
            }
        }
    }
}

/// Undoes the selection, in place: moves the last `kept` numbers of `out` to the places whose bits are set, and
/// fills the others with zeros. As many bits are set as numbers are kept. They are multiplied by their scales.
#[inline(always)]
pub(crate) fn expand(words: impl Iterator<Item = u64>, kept: usize, out: &mut [f32], scales: Scales<'_>) {
    let mut next = out.len() - kept;
    let mut buffer = [0.0; WORD];
    let mut begin = 0;
    for word in words {
        let end = (begin + WORD).min(out.len());
        // No number is overwritten before it has moved: at most `next` places are filled so far.
        match out[next..].first_chunk::<WORD>() {
            Some(chunk) => buffer = *chunk,
            None => buffer[..out.len() - next].copy_from_slice(&out[next..]),
        }
        next = (next + word.count_ones() as usize).min(out.len());
        let scale = scales.at(begin);
        for x in &mut buffer {
            *x *= scale;
        }
        let mut at = 0;
        for (i, x) in out[begin..end].iter_mut().enumerate() {
            let bit = word >> i & 1;
            *x = f32::from_bits(buffer[at % WORD].to_bits() & 0u32.wrapping_sub(bit as u32));
            at += bit as usize;
        }
        begin = end;
    }
}
