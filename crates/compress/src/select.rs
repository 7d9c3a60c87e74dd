//! The k entries of largest magnitude, in linear time.

use crate::float::magnitude;

/// Low bits of a magnitude that do not affect its bin. A bin is a sixteenth of an octave.
const BIN_SHIFT: u32 = 19;
const BINS: usize = 1 << (31 - BIN_SHIFT);

/// Elements that are compared together.
const CHUNK: usize = 32;

/// The sample takes one chunk of this many.
const SAMPLE_STRIDE: usize = 16;

/// Selects the largest entries, and reuses its buffers for the next call.
#[derive(Debug, Default)]
pub(crate) struct Selector {
    /// Counts by bin. Several copies, so that equal neighbours do not wait for the same counter.
    bins: Vec<[u32; COPIES]>,
    /// Candidates for the largest entries. Only the first part is valid; see `gather`.
    indices: Vec<u32>,
    values: Vec<f32>,
    /// Magnitudes near the threshold. Only the first part is valid; see `collect_near`.
    near: Vec<u32>,
}

/// Copies of the histogram.
const COPIES: usize = 4;

impl Selector {
    /// The ascending indices and the values of the `k` entries of largest magnitude. The first of equal entries are
    /// taken.
    ///
    /// `values` must be finite and at most `u32::MAX` in number; `k` is at most their number.
    ///
    /// A sample gives bounds for the threshold. Chunks wholly below the lower bound are skipped with vector
    /// comparisons. The exact threshold is selected among the entries between the bounds.
    #[inline(always)]
    pub(crate) fn largest(&mut self, values: &[f32], k: usize) -> (&[u32], &[f32]) {
        let (low, high) = self.estimate_threshold(values, k);
        let mut count = self.gather(values, low);
        if count < k {
            count = self.gather(values, 0);
        }
        if count > k {
            self.narrow(count, k, high);
        }
        (&self.indices[..k], &self.values[..k])
    }

    /// Bounds of the k-th largest magnitude, from a sample: probably more than `k` entries reach the lower bound, and
    /// fewer reach the upper bound.
    #[inline(always)]
    fn estimate_threshold(&mut self, values: &[f32], k: usize) -> (u32, u32) {
        let (chunks, _) = values.as_chunks::<CHUNK>();
        let sampled = chunks.len().div_ceil(SAMPLE_STRIDE) * CHUNK;
        let expected = k as f64 * sampled as f64 / values.len().max(1) as f64;
        // Neighbours are correlated, so the margin is wider than independent samples would need.
        let margin = 0.05 * expected + 8.0 * expected.sqrt() + 8.0;
        if expected + margin >= sampled as f64 {
            return (0, u32::MAX);
        }
        self.bins.clear();
        self.bins.resize(BINS, [0; COPIES]);
        for chunk in chunks.iter().step_by(SAMPLE_STRIDE) {
            for group in chunk.as_chunks::<COPIES>().0 {
                for (copy, x) in group.iter().enumerate() {
                    self.bins[(magnitude(*x) >> BIN_SHIFT) as usize][copy] += 1;
                }
            }
        }
        let high = if margin < expected { self.sampled_bin((expected - margin) as usize) + 1 } else { BINS };
        ((self.sampled_bin((expected + margin) as usize) as u32) << BIN_SHIFT, (high as u32) << BIN_SHIFT)
    }

    /// The bin of the `k`-th largest sampled entry.
    #[inline(always)]
    fn sampled_bin(&self, k: usize) -> usize {
        let mut above = 0;
        for (b, counts) in self.bins.iter().enumerate().rev() {
            above += counts.iter().sum::<u32>() as usize;
            if above >= k {
                return b;
            }
        }
        0
    }

    /// Collects the entries with a magnitude of at least `least`, and returns their number.
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
                // The entry is always written, and the next one overwrites it unless it is counted. So there is no
                // branch to mispredict.
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

    /// Moves the `k` largest of the first `count` candidates to the front and keeps their order. The `k`-th largest is
    /// probably below `high`.
    #[inline(always)]
    fn narrow(&mut self, count: usize, k: usize, high: u32) {
        let mut near = self.collect_near(count, high);
        if count - near >= k {
            near = self.collect_near(count, u32::MAX);
        }
        // All but the smallest `count - k`.
        let threshold = *self.near[..near].select_nth_unstable(count - k).1;
        let kept = self.keep(count, |m| m >= threshold);
        if kept > k {
            // Several candidates equal the threshold: drop the last ones.
            let equal = self.values[..kept].iter().filter(|x| magnitude(**x) == threshold).count();
            let mut left = k + equal - kept;
            self.keep(kept, |m| {
                let keeps = m > threshold || left > 0;
                left -= usize::from(m == threshold && left > 0);
                keeps
            });
        }
    }

    /// Moves the candidates whose magnitude `keeps` accepts to the front, keeps their order, and returns their number.
    #[inline(always)]
    fn keep(&mut self, count: usize, mut keeps: impl FnMut(u32) -> bool) -> usize {
        let (indices, values) = (&mut self.indices[..count], &mut self.values[..count]);
        let mut kept = 0;
        for i in 0..count {
            let (index, x) = (indices[i], values[i]);
            indices[kept] = index;
            values[kept] = x;
            kept += usize::from(keeps(magnitude(x)));
        }
        kept
    }

    /// Copies the magnitudes below `high` of the first `count` candidates to `near`, and returns their number.
    #[inline(always)]
    fn collect_near(&mut self, count: usize, high: u32) -> usize {
        if self.near.len() < count {
            self.near.resize(2 * count, 0);
        }
        let near = &mut self.near[..count];
        let mut below = 0;
        for x in &self.values[..count] {
            near[below] = magnitude(*x);
            below += usize::from(magnitude(*x) < high);
        }
        below
    }
}
