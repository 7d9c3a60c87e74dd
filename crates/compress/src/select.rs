//! The k entries of largest magnitude, in linear time.

use crate::float::magnitude;

/// Bits of a magnitude that a bin ignores: a bin is a sixteenth of an octave.
const SHIFT: u32 = 19;
const BINS: usize = 1 << (31 - SHIFT);

/// Elements that are looked at together.
const CHUNK: usize = 32;

/// A tensor is judged by one chunk in so many at first.
const STRIDE: usize = 16;

/// Keeps its buffers from call to call.
#[derive(Debug, Default)]
pub(crate) struct Selector {
    /// Counts by bin, in several copies, so that equal neighbours need not wait for each other's count.
    bins: Vec<[u32; COPIES]>,
    /// Entries that may be among the largest; their ends hold rubbish.
    indices: Vec<u32>,
    values: Vec<f32>,
    ties: Vec<u32>,
}

const COPIES: usize = 4;

impl Selector {
    /// The `k` entries of largest magnitude, of equal ones those that come first: their indices, ascending, and values. `values` are finite, at most
    /// u32::MAX of them, and `k` is at most their number.
    ///
    /// A sample tells about where the threshold lies; what is certainly below it is passed over by comparing whole vectors, and the rest is settled by a histogram and a selection within one of its bins.
    #[inline(always)]
    pub(crate) fn largest(&mut self, values: &[f32], k: usize) -> (&[u32], &[f32]) {
        let least = self.guess(values, k);
        let mut count = self.gather(values, least);
        if count < k {
            count = self.gather(values, 0);
        }
        if count > k {
            self.narrow(count, k);
        }
        (&self.indices[..k], &self.values[..k])
    }

    /// A magnitude that probably a few more than `k` entries reach.
    #[inline(always)]
    fn guess(&mut self, values: &[f32], k: usize) -> u32 {
        let (chunks, _) = values.as_chunks::<CHUNK>();
        let sampled = chunks.len().div_ceil(STRIDE) * CHUNK;
        let expected = k as f64 * sampled as f64 / values.len().max(1) as f64;
        // Neighbours resemble each other, so the margin is more than independent draws would need.
        let wanted = expected * 1.05 + 8.0 * expected.sqrt() + 8.0;
        if wanted >= sampled as f64 {
            return 0;
        }
        self.clear_bins();
        for chunk in chunks.iter().step_by(STRIDE) {
            self.count(chunk);
        }
        (self.find(wanted as usize).0 as u32) << SHIFT
    }

    #[inline(always)]
    fn clear_bins(&mut self) {
        self.bins.clear();
        self.bins.resize(BINS, [0; COPIES]);
    }

    #[inline(always)]
    fn count(&mut self, values: &[f32]) {
        let (groups, rest) = values.as_chunks::<COPIES>();
        for group in groups {
            for (copy, x) in group.iter().enumerate() {
                self.bins[bin(*x)][copy] += 1;
            }
        }
        for x in rest {
            self.bins[bin(*x)][0] += 1;
        }
    }

    /// The bin of the `k`-th largest of what was counted, and how many lie above that bin.
    #[inline(always)]
    fn find(&self, k: usize) -> (usize, usize) {
        let mut above = 0;
        for (b, counts) in self.bins.iter().enumerate().rev() {
            let count = counts.iter().sum::<u32>() as usize;
            if above + count >= k {
                return (b, above);
            }
            above += count;
        }
        (0, above)
    }

    /// Collects all entries of at least this magnitude; returns their number.
    #[inline(always)]
    fn gather(&mut self, values: &[f32], least: u32) -> usize {
        let mut total = 0;
        let (chunks, rest) = values.as_chunks::<CHUNK>();
        for (c, chunk) in chunks.iter().enumerate() {
            if chunk.iter().fold(0, |top: u32, x| top.max(magnitude(*x))) < least {
                continue;
            }
            self.make_room(total + CHUNK);
            let indices = &mut self.indices[total..total + CHUNK];
            let kept = &mut self.values[total..total + CHUNK];
            let mut count = 0;
            for (i, x) in chunk.iter().enumerate() {
                // Overwritten by the next unless it counts: no branch to mispredict.
                indices[count % CHUNK] = (c * CHUNK + i) as u32;
                kept[count % CHUNK] = *x;
                count += usize::from(magnitude(*x) >= least);
            }
            total += count;
        }
        self.make_room(total + CHUNK);
        let start = chunks.len() * CHUNK;
        for (i, x) in rest.iter().enumerate() {
            self.indices[total] = (start + i) as u32;
            self.values[total] = *x;
            total += usize::from(magnitude(*x) >= least);
        }
        total
    }

    #[inline(always)]
    fn make_room(&mut self, length: usize) {
        if self.indices.len() < length {
            self.indices.resize(2 * length, 0);
            self.values.resize(2 * length, 0.0);
        }
    }

    /// Moves the `k` largest of the first `count` candidates to the front, in their order.
    #[inline(always)]
    fn narrow(&mut self, count: usize, k: usize) {
        self.clear_bins();
        let candidates = std::mem::take(&mut self.values);
        self.count(&candidates[..count]);
        self.values = candidates;
        let (boundary, above) = self.find(k);
        self.ties.clear();
        self.ties.extend(self.values[..count].iter().filter(|x| bin(**x) == boundary).map(|x| magnitude(*x)));
        // The (k - above)-th largest of the bin, counted from the smallest.
        let rank = self.ties.len() - (k - above);
        let (_, threshold, larger) = self.ties.select_nth_unstable(rank);
        let threshold = *threshold;
        let larger = above + larger.iter().filter(|m| **m > threshold).count();
        let mut equal = k - larger;
        let mut kept = 0;
        for i in 0..count {
            let (index, x) = (self.indices[i], self.values[i]);
            let tie = magnitude(x) == threshold && equal > 0;
            equal -= usize::from(tie);
            self.indices[kept] = index;
            self.values[kept] = x;
            kept += usize::from(magnitude(x) > threshold || tie);
        }
    }
}

#[inline(always)]
fn bin(x: f32) -> usize {
    (magnitude(x) >> SHIFT) as usize
}
