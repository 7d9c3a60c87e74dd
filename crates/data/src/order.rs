//! The order of samples: a permutation per epoch, in which each position can be computed alone.

use fusionllm_graph::CounterRng;

/// Shuffles `len` samples in each epoch, or groups of them, or nothing.
///
/// A Feistel network permutes the smallest square power of two that holds `len`. A position outside follows its cycle
/// until it is inside (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
#[derive(Debug, Clone)]
pub(super) struct Order {
    rng: CounterRng,
    /// The number of groups.
    len: u64,
    half_bits: u32,
    /// Samples that follow each other in every epoch.
    group: u64,
    shuffle: bool,
}

const ROUNDS: u64 = 8;

impl Order {
    /// `len` is at least 1, and a multiple of `group`. Groups stay whole, and are shuffled if `shuffle` says so.
    pub(super) fn new(seed: u64, len: usize, group: usize, shuffle: bool) -> Self {
        let group = group.max(1) as u64;
        let len = (len as u64 / group).max(1);
        let bits = u64::BITS - (len - 1).leading_zeros();
        let rng = CounterRng::for_name(seed, "data.order");
        Self { rng, len, half_bits: bits.div_ceil(2).max(1), group, shuffle }
    }

    /// The epoch and the sample of the draw after `consumed` draws.
    pub(super) fn at(&self, consumed: u64) -> (u64, usize) {
        let (group, place) = (consumed / self.group, consumed % self.group);
        let (epoch, position) = (group / self.len, group % self.len);
        let drawn = if self.shuffle { self.shuffled(epoch, position) } else { position };
        (epoch, (drawn * self.group + place) as usize)
    }

    fn shuffled(&self, epoch: u64, mut position: u64) -> u64 {
        loop {
            position = self.permute(epoch, position);
            if position < self.len {
                return position;
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
            let order = Order::new(7, len, 1, true);
            for e in [0, 1, 1_000_000] {
                let mut drawn = epoch(&order, e);
                drawn.sort_unstable();
                assert_eq!(drawn, (0..len).collect::<Vec<_>>(), "{len} samples, epoch {e}");
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let order = Order::new(7, 100, 1, true);
        assert_ne!(epoch(&order, 0), epoch(&order, 1));
        assert_ne!(epoch(&order, 0), epoch(&Order::new(8, 100, 1, true), 0));
        assert_ne!(epoch(&order, 0), (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn groups_stay_whole_and_are_shuffled() {
        let order = Order::new(7, 12, 3, true);
        for e in [0, 1] {
            let drawn: Vec<(u64, usize)> = (0..12).map(|i| order.at(e * 12 + i)).collect();
            assert!(drawn.iter().all(|(epoch, _)| *epoch == e));
            let groups: Vec<usize> = drawn.chunks(3).map(|g| g[0].1).collect();
            assert!(drawn.chunks(3).all(|g| g[0].1 % 3 == 0 && g[1].1 == g[0].1 + 1 && g[2].1 == g[0].1 + 2));
            let mut sorted = groups.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 3, 6, 9]);
        }
        let first = |seed| -> Vec<usize> { (0..60).map(|i| Order::new(seed, 12, 3, true).at(i).1).collect() };
        assert_ne!(first(1), first(2));
    }

    #[test]
    fn without_shuffling_every_epoch_is_in_order() {
        let order = Order::new(7, 5, 1, false);
        let drawn: Vec<(u64, usize)> = (3..8).map(|i| order.at(i)).collect();
        assert_eq!(drawn, [(0, 3), (0, 4), (1, 0), (1, 1), (1, 2)]);
    }

    /// Over many epochs of 5 samples, each sample comes first about equally often: the 4,000 draws are
    /// binomial with a standard deviation of 25 about 800, so 5 of them are 125.
    #[test]
    fn small_orders_are_not_biased() {
        let order = Order::new(1, 5, 1, true);
        let mut first = [0i64; 5];
        for e in 0..4000 {
            first[order.at(e * 5).1] += 1;
        }
        assert!(first.iter().all(|n| (n - 800).abs() < 125), "{first:?}");
    }

    /// Neighbours in the data are not neighbours in an epoch: the expected count is 2.
    #[test]
    fn neighbours_are_separated() {
        let drawn = epoch(&Order::new(3, 1000, 1, true), 0);
        let together = drawn.windows(2).filter(|w| w[0].abs_diff(w[1]) == 1).count();
        assert!(together < 12, "{together}");
    }
}
