//! The k entries of largest magnitude, in linear time.

use crate::float::magnitude;

/// Low bits of a magnitude that do not affect its bin. A bin is a 32nd of an octave.
const BIN_SHIFT: u32 = 18;
const BINS: usize = 1 << (31 - BIN_SHIFT);

/// Elements with one word of the mask.
pub(crate) const WORD: usize = 64;

/// The sample takes one word of this many.
const SAMPLE_STRIDE: usize = 32;

/// Selects the largest entries, and reuses its buffers for the next call.
#[derive(Debug, Default)]
pub(crate) struct Selector {
    /// The sample's counts by bin.
    bins: Vec<u32>,
    /// The entries near the threshold, as numbers in the order of selection: magnitude, then the first of equal entries.
    near: Vec<u64>,
    /// A bit for each entry: whether it is among the largest.
    words: Vec<u64>,
}

impl Selector {
    /// Selects the `k` entries of largest magnitude, and copies them to the begin of `kept`, in their order. Returns a
    /// bit for each entry. The first of equal entries are taken. Infinities count as larger than numbers, and NaN as
    /// larger still.
    ///
    /// `k` is at most the number of entries. A sample gives bounds for the threshold. The exact threshold is selected
    /// among the entries between the bounds.
    #[inline(always)]
    pub(crate) fn largest(&mut self, values: &[f32], k: usize, kept: &mut Vec<f32>) -> &[u64] {
        let (low, high) = self.estimate(values, k);
        if !self.select(values, k, low, high) {
            self.select(values, k, 0, u32::MAX);
        }
        let (mut total, mut words) = (0, self.words.iter());
        by_words(
            values,
            #[inline(always)]
            |word, _| total += compact(word, words.next().copied().unwrap_or(0), total, kept),
        );
        &self.words
    }

    /// Bounds of the k-th largest magnitude, from a sample: probably at least `k` entries reach the lower bound, and
    /// fewer reach the upper bound.
    #[inline(always)]
    fn estimate(&mut self, values: &[f32], k: usize) -> (u32, u32) {
        let (whole, _) = values.as_chunks::<WORD>();
        let sampled = whole.len().div_ceil(SAMPLE_STRIDE) * WORD;
        let expected = k as f64 * sampled as f64 / values.len().max(1) as f64;
        // Neighbours are correlated, so the margin is wider than independent samples would need.
        let margin = 0.01 * expected + 4.0 * expected.sqrt() + 8.0;
        if expected + margin >= sampled as f64 {
            return (0, u32::MAX);
        }
        self.bins.clear();
        self.bins.resize(BINS, 0);
        for word in whole.iter().step_by(SAMPLE_STRIDE) {
            for x in word {
                self.bins[(magnitude(*x) >> BIN_SHIFT) as usize] += 1;
            }
        }
        let (many, few) = ((expected + margin) as u32, (expected - margin).max(0.0) as u32);
        let (mut low, mut high, mut above) = (0, None, 0);
        for (bin, count) in self.bins.iter().enumerate().rev() {
            above += count;
            if above >= few && high.is_none() {
                high = Some(bin + 1);
            }
            if above >= many {
                low = bin;
                break;
            }
        }
        let high = if few == 0 { BINS } else { high.unwrap_or(BINS) };
        ((low as u32) << BIN_SHIFT, (high as u32) << BIN_SHIFT)
    }

    /// Sets the bits of the `k` largest entries, if the smallest of them lies between the bounds.
    #[inline(always)]
    fn select(&mut self, values: &[f32], k: usize, low: u32, high: u32) -> bool {
        self.near.clear();
        self.words.clear();
        let (mut above, mut begin) = (0, 0);
        by_words(
            values,
            #[inline(always)]
            |word, places| {
                let reach = at_least(word, low) & places;
                let mut between = reach & !at_least(word, high);
                above += (reach & !between).count_ones() as usize;
                self.words.push(reach);
                while between != 0 {
                    let i = between.trailing_zeros();
                    let magnitude = magnitude(word[i as usize % WORD]);
                    self.near.push(u64::from(magnitude) << 32 | u64::from(u32::MAX - (begin + i)));
                    between &= between - 1;
                }
                begin = begin.wrapping_add(WORD as u32);
            },
        );
        let Some(smaller) = k.checked_sub(above).and_then(|wanted| self.near.len().checked_sub(wanted)) else {
            return false;
        };
        if 0 < smaller && smaller < self.near.len() {
            self.near.select_nth_unstable(smaller);
        }
        for entry in &self.near[..smaller] {
            let i = u32::MAX - *entry as u32;
            self.words[i as usize / WORD] &= !(1 << (i as usize % WORD));
        }
        true
    }
}

/// Copies the values whose bits are set to `kept`, from `total` on, and returns their number. `kept` becomes long enough.
#[inline(always)]
pub(crate) fn compact(values: &[f32; WORD], bits: u64, total: usize, kept: &mut Vec<f32>) -> usize {
    if kept.len() < total + WORD {
        kept.resize(2 * total + WORD, 0.0);
    }
    let Some(kept) = kept[total..].first_chunk_mut::<WORD>() else { return 0 };
    let (mut at, mut left) = (0, bits);
    for x in values {
        // The value is always written, and the next one overwrites it unless it is counted. So there is no branch to
        // mispredict.
        kept[at % WORD] = *x;
        at += (left & 1) as usize;
        left >>= 1;
    }
    at
}

/// Calls `each` with all values, a word's number of them at a time. Zeros fill up the last word; the bits say which
/// places have a value.
#[inline(always)]
pub(crate) fn by_words(values: &[f32], mut each: impl FnMut(&[f32; WORD], u64)) {
    let (whole, rest) = values.as_chunks::<WORD>();
    for word in whole {
        each(word, u64::MAX);
    }
    if !rest.is_empty() {
        let mut word = [0.0; WORD];
        word[..rest.len()].copy_from_slice(rest);
        each(&word, (1 << rest.len()) - 1);
    }
}

/// A bit for each value: whether its magnitude reaches `least`.
#[inline(always)]
fn at_least(values: &[f32; WORD], least: u32) -> u64 {
    let mut words = [0; 2];
    for (word, half) in words.iter_mut().zip(values.as_chunks::<{ WORD / 2 }>().0) {
        // As many lanes as a wide vector has. Each has two bits of the word.
        let mut lanes = [0u32; WORD / 4];
        for (i, lane) in lanes.iter_mut().enumerate() {
            let [low, high] = [i, i + WORD / 4];
            *lane = u32::from(magnitude(half[low]) >= least) << low | u32::from(magnitude(half[high]) >= least) << high;
        }
        for lane in lanes {
            *word |= lane;
        }
    }
    u64::from(words[0]) | u64::from(words[1]) << (WORD / 2)
}
