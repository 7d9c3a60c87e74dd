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
    /// Magnitudes among which the threshold is; their end holds rubbish.
    near: Vec<u32>,
}

const COPIES: usize = 4;

impl Selector {
    /// The `k` entries of largest magnitude, of equal ones those that come first: their indices, ascending, and values. `values` are finite, at most
    /// u32::MAX of them, and `k` is at most their number.
    ///
    /// A sample tells about where the threshold lies; what is certainly below it is passed over by comparing whole vectors, and of the rest what is not certainly above it is selected from.
    #[inline(always)]
    pub(crate) fn largest(&mut self, values: &[f32], k: usize) -> (&[u32], &[f32]) {
        let (least, most) = self.guess(values, k);
        let mut count = self.gather(values, least);
        if count < k {
            count = self.gather(values, 0);
        }
        if count > k {
            self.narrow(count, k, most);
        }
        (&self.indices[..k], &self.values[..k])
    }

    /// A magnitude that probably a few more than `k` entries reach, and one that a few less do.
    #[inline(always)]
    fn guess(&mut self, values: &[f32], k: usize) -> (u32, u32) {
        let (chunks, _) = values.as_chunks::<CHUNK>();
        let sampled = chunks.len().div_ceil(STRIDE) * CHUNK;
        let expected = k as f64 * sampled as f64 / values.len().max(1) as f64;
        // Neighbours resemble each other, so the margin is more than independent draws would need.
        let margin = 0.05 * expected + 8.0 * expected.sqrt() + 8.0;
        if expected + margin >= sampled as f64 {
            return (0, u32::MAX);
        }
        self.bins.clear();
        self.bins.resize(BINS, [0; COPIES]);
        for chunk in chunks.iter().step_by(STRIDE) {
            for group in chunk.as_chunks::<COPIES>().0 {
                for (copy, x) in group.iter().enumerate() {
                    self.bins[(magnitude(*x) >> SHIFT) as usize][copy] += 1;
                }
            }
        }
        let most = if margin < expected { self.find((expected - margin) as usize) + 1 } else { BINS };
        ((self.find((expected + margin) as usize) as u32) << SHIFT, (most as u32) << SHIFT)
    }

    /// The bin of the `k`-th largest of what was sampled.
    #[inline(always)]
    fn find(&self, k: usize) -> usize {
        let mut above = 0;
        for (b, counts) in self.bins.iter().enumerate().rev() {
            above += counts.iter().sum::<u32>() as usize;
            if above >= k {
                return b;
            }
        }
        0
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

    /// Moves the `k` largest of the first `count` candidates to the front, in their order; the last of them is probably below `most`.
    #[inline(always)]
    fn narrow(&mut self, count: usize, k: usize, most: u32) {
        let mut near = self.collect(count, most);
        if count - near >= k {
            near = self.collect(count, u32::MAX);
        }
        // All but the smallest `count - k`.
        let threshold = *self.near[..near].select_nth_unstable(count - k).1;
        let kept = self.keep(count, |m| m >= threshold);
        if kept > k {
            // Of those that are just the threshold the last are too many.
            let equal = self.values[..kept].iter().filter(|x| magnitude(**x) == threshold).count();
            let mut left = k + equal - kept;
            self.keep(kept, |m| {
                let keeps = m > threshold || left > 0;
                left -= usize::from(m == threshold && left > 0);
                keeps
            });
        }
    }

    /// Moves those of the first `count` candidates to the front, in their order, whose magnitude is to be kept; returns their number.
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

    /// Puts candidates' magnitudes below `most` where the threshold is selected from; returns their number.
    #[inline(always)]
    fn collect(&mut self, count: usize, most: u32) -> usize {
        if self.near.len() < count {
            self.near.resize(2 * count, 0);
        }
        let near = &mut self.near[..count];
        let mut below = 0;
        for x in &self.values[..count] {
            near[below] = magnitude(*x);
            below += usize::from(magnitude(*x) < most);
        }
        below
    }
}
