//! The order of samples: a permutation per epoch, in which each position can be computed alone.

use fusionllm_graph::CounterRng;

/// Shuffles `len` samples in each epoch.
///
/// A Feistel network permutes the smallest square power of two that holds `len`. A position outside follows its cycle
/// until it is inside (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
#[derive(Debug, Clone)]
pub(super) struct Order {
    rng: CounterRng,
    len: u64,
    half_bits: u32,
}

const ROUNDS: u64 = 8;

impl Order {
    /// `len` is at least 1.
    pub(super) fn new(seed: u64, len: usize) -> Self {
        let len = len as u64;
        let bits = u64::BITS - (len - 1).leading_zeros();
        Self { rng: CounterRng::for_name(seed, "data.order"), len, half_bits: bits.div_ceil(2).max(1) }
    }

    /// The epoch and the sample of the draw after `consumed` draws.
    pub(super) fn at(&self, consumed: u64) -> (u64, usize) {
        let epoch = consumed / self.len;
        let mut position = consumed % self.len;
        loop {
            position = self.permute(epoch, position);
            if position < self.len {
                return (epoch, position as usize);
            }
        }
    }

    fn permute(&self, epoch: u64, position: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (position >> self.half_bits, position & mask);
        for round in 0..ROUNDS {
            let key = self.rng.block(right, epoch * ROUNDS + round)[0];
            (left, right) = (right, left ^ (u64::from(key) & mask));
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(order: &Order, epoch: u64) -> Vec<usize> {
        let drawn = (0..order.len).map(|i| order.at(epoch * order.len + i));
        drawn
            .map(|(e, sample)| {
                assert_eq!(e, epoch);
                sample
            })
            .collect()
    }

    #[test]
    fn every_epoch_draws_every_sample_once() {
        for len in [1, 2, 3, 4, 5, 16, 17, 100, 1023, 1024, 1025] {
            let order = Order::new(7, len);
            for e in [0, 1, 1_000_000] {
                let mut drawn = epoch(&order, e);
                drawn.sort_unstable();
                assert_eq!(drawn, (0..len).collect::<Vec<_>>(), "{len} samples, epoch {e}");
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let order = Order::new(7, 100);
        assert_ne!(epoch(&order, 0), epoch(&order, 1));
        assert_ne!(epoch(&order, 0), epoch(&Order::new(8, 100), 0));
        assert_ne!(epoch(&order, 0), (0..100).collect::<Vec<_>>());
    }

    /// Over many epochs of 5 samples, each sample comes first about equally often: the 4,000 draws are
    /// binomial with a standard deviation of 25 about 800, so 5 of them are 125.
    #[test]
    fn small_orders_are_not_biased() {
        let order = Order::new(1, 5);
        let mut first = [0i64; 5];
        for e in 0..4000 {
            first[order.at(e * 5).1] += 1;
        }
        assert!(first.iter().all(|n| (n - 800).abs() < 125), "{first:?}");
    }

    /// Neighbours in the data are not neighbours in an epoch: the expected count is 2.
    #[test]
    fn neighbours_are_separated() {
        let drawn = epoch(&Order::new(3, 1000), 0);
        let together = drawn.windows(2).filter(|w| w[0].abs_diff(w[1]) == 1).count();
        assert!(together < 12, "{together}");
    }
}
