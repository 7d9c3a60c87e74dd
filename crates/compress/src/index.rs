//! The wire form of the indices that top-k keeps.

/// The form of `k` ascending indices below `n`. It follows from the two numbers alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Indices {
    n: usize,
    k: usize,
    /// Elias-Fano coding with this many lower bits, or `None` for a bitmap.
    low: Option<u32>,
}

impl Indices {
    /// Chooses the smallest form. `k` must be at most `n`.
    pub(crate) fn new(n: usize, k: usize) -> Self {
        let split = |low: u32| Self { n, k, low: Some(low) };
        let bitmap = Self { n, k, low: None };
        // The size is least where as many bits are set above as below, for 2^l = n ln 2 / k.
        let middle = (n / k.max(1)).max(1).ilog2();
        let forms = std::iter::once(bitmap).chain((middle.saturating_sub(1)..=middle + 1).map(split));
        forms.min_by_key(Self::bytes).unwrap_or(bitmap)
    }

    pub(crate) fn bytes(&self) -> usize {
        let (lower, upper) = self.lengths();
        lower + upper
    }

    /// Bytes of the lower bits, and of the upper bits or the bitmap.
    fn lengths(&self) -> (usize, usize) {
        match self.low {
            None => (0, self.n.div_ceil(8)),
            Some(low) => {
                ((self.k * low as usize).div_ceil(8), (self.k + (self.n.saturating_sub(1) >> low)).div_ceil(8))
            }
        }
    }

    /// Writes the indices: the bits that are set in `words`. `out` must have [`Self::bytes`] zero bytes.
    #[inline(always)]
    pub(crate) fn write(&self, words: &[u64], out: &mut [u8]) {
        let (lower, upper) = out.split_at_mut(self.lengths().0);
        let Some(low) = self.low else {
            for (bytes, word) in upper.chunks_mut(8).zip(words) {
                bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
            }
            return;
        };
        let mask = (1u64 << low) - 1;
        let (mut bits, mut held, mut at, mut rank) = (0u64, 0, 0, 0);
        for (w, word) in words.iter().enumerate() {
            let mut word = *word;
            while word != 0 {
                let i = 64 * w + word.trailing_zeros() as usize;
                word &= word - 1;
                let bit = (i >> low) + rank;
                upper[bit / 8] |= 1 << (bit % 8);
                bits |= (i as u64 & mask) << held;
                held += low;
                rank += 1;
                if held >= 32 {
                    lower[at..at + 4].copy_from_slice(&(bits as u32).to_le_bytes());
                    (bits, held, at) = (bits >> 32, held - 32, at + 4);
                }
            }
        }
        let rest = lower.len() - at;
        lower[at..].copy_from_slice(&bits.to_le_bytes()[..rest]);
    }

    /// The bits of the indices, 64 in a word: the inverse of [`Self::write`]. `None` for bytes that it does not produce.
    #[inline(always)]
    pub(crate) fn words(&self, bytes: &[u8]) -> Option<Vec<u64>> {
        // No memory for bytes that are too few to say so much.
        if bytes.len() != self.bytes() {
            return None;
        }
        let mut words = vec![0; self.n.div_ceil(64)];
        self.read(bytes, |_, i| words[i / 64] |= 1 << (i % 64))?;
        Some(words)
    }

    /// The bitmap in `bytes`, if that is the form and as many bits are set as entries are kept.
    #[inline(always)]
    pub(crate) fn bitmap<'a>(&self, bytes: &'a [u8]) -> Option<impl Iterator<Item = u64> + Clone + use<'a>> {
        if self.low.is_some() || bytes.len() != self.bytes() {
            return None;
        }
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        };
        let words = bytes.chunks(8).map(word);
        let beyond = !self.n.is_multiple_of(8) && bytes.last().is_some_and(|last| last >> (self.n % 8) != 0);
        let set: u64 = words.clone().map(|word| u64::from(word.count_ones())).sum();
        (!beyond && set == self.k as u64).then_some(words)
    }

    /// Calls `each` with every rank and index, in ascending order.
    ///
    /// Returns `None` for bytes that [`Self::write`] does not produce. `each` may have been called before that, always
    /// with an index below `n` and a rank below `k`.
    #[inline(always)]
    pub(crate) fn read(&self, bytes: &[u8], mut each: impl FnMut(usize, usize)) -> Option<()> {
        if bytes.len() != self.bytes() {
            return None;
        }
        let (lower, upper) = bytes.split_at(self.lengths().0);
        let mut rank = 0;
        let mut least = 0;
        let mut low_parts = LowParts { bytes: lower, bits: 0, held: 0 };
        let low = self.low.unwrap_or(0);
        let (words, rest) = upper.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        for (w, word) in words.iter().chain([&last]).enumerate() {
            let mut word = u64::from_le_bytes(*word);
            while word != 0 {
                let bit = w * 64 + word.trailing_zeros() as usize;
                word &= word - 1;
                let index = match self.low {
                    None => bit,
                    Some(_) => bit.checked_sub(rank)? << low | low_parts.next(low),
                };
                if rank == self.k || index < least || index >= self.n {
                    return None;
                }
                each(rank, index);
                (rank, least) = (rank + 1, index + 1);
            }
        }
        (rank == self.k && low_parts.at_end()).then_some(())
    }
}

/// Reads the lower bits of the indices.
struct LowParts<'a> {
    bytes: &'a [u8],
    bits: u64,
    held: u32,
}

impl LowParts<'_> {
    /// The next `width` bits. Zero bits follow the last byte.
    #[inline(always)]
    fn next(&mut self, width: u32) -> usize {
        if self.held < width {
            if let Some((four, rest)) = self.bytes.split_first_chunk::<4>() {
                self.bits |= u64::from(u32::from_le_bytes(*four)) << self.held;
                (self.bytes, self.held) = (rest, self.held + 32);
            } else {
                for byte in std::mem::take(&mut self.bytes) {
                    self.bits |= u64::from(*byte) << self.held;
                    self.held += 8;
                }
            }
        }
        let part = self.bits & ((1 << width) - 1);
        self.bits >>= width;
        self.held = self.held.saturating_sub(width);
        part as usize
    }

    fn at_end(&self) -> bool {
        self.bytes.is_empty() && self.bits == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 5 of 1000: 8 lower bits each, then the upper parts 0, 0, 1, 1, 3 as the bits at 0 + 0, 0 + 1, 1 + 2, 1 + 3 and
    /// 3 + 4.
    #[test]
    fn elias_fano_bytes_match_the_documentation() {
        let form = Indices::new(1000, 5);
        assert_eq!(form.low, Some(8));
        let mut bytes = vec![0; form.bytes()];
        form.write(&words(1000, &[1, 127, 384, 385, 999]), &mut bytes);
        assert_eq!(bytes, [1, 127, 128, 129, 231, 0b1001_1011]);
    }

    #[test]
    fn dense_sets_are_bitmaps() {
        let form = Indices::new(20, 10);
        assert_eq!((form.low, form.bytes()), (None, 3));
    }

    fn words(n: usize, indices: &[usize]) -> Vec<u64> {
        let mut words = vec![0; n.div_ceil(64)];
        indices.iter().for_each(|i| words[i / 64] |= 1 << (i % 64));
        words
    }

    #[test]
    fn wide_lower_parts() {
        let n = 1 << 26;
        let form = Indices::new(n, 3);
        let set = words(n, &[5, 1 << 25, n - 1]);
        let mut bytes = vec![0; form.bytes()];
        form.write(&set, &mut bytes);
        assert_eq!(form.words(&bytes).unwrap(), set);
        assert!(bytes.len() <= 10, "{}", bytes.len());
    }
}
