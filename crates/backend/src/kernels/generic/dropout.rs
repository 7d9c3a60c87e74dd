//! Dropout masks.

use fusionllm_graph::CounterRng;
use rayon::prelude::*;

/// The elements that a [`Dropout`](fusionllm_graph::ops::Dropout) of probability `p` keeps.
pub(crate) fn keep_mask(key: i64, stream: u64, p: f64, len: usize) -> Vec<bool> {
    let rng = CounterRng::new(key as u64);
    // A uniform number is k / 2^24 with an integer k. It is at least p if k is at least p 2^24, rounded up.
    let least = (p * 16_777_216.0).ceil() as u32;
    let mut mask = vec![false; len];
    mask.par_chunks_mut(CHUNK).enumerate().for_each(|(c, mask)| {
        let first = (c * CHUNK / 4) as u64;
        for (block, four) in (first..).zip(mask.chunks_mut(4)) {
            for (keep, bits) in four.iter_mut().zip(rng.block(block, stream)) {
                *keep = bits >> 8 >= least;
            }
        }
    });
    mask
}

/// Elements of one task: a multiple of the four that one block of the generator gives.
const CHUNK: usize = 1 << 14;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_those_of_the_definition() {
        for p in [0.0, 0.1, 0.5, 1.0 / 3.0, 0.999] {
            let n = 2 * CHUNK + 7;
            let rng = CounterRng::new(-5i64 as u64);
            let want: Vec<bool> = (0..n as u64).map(|i| f64::from(rng.uniform(i, 3)) >= p).collect();
            assert_eq!(keep_mask(-5, 3, p, n), want, "{p}");
        }
    }
}
