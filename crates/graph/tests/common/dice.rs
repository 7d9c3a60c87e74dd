//! A small stream of numbers for the choices of tests.
#![allow(dead_code)]

use fusionllm_graph::CounterRng;

/// The same choices for the same seed.
pub(crate) struct Dice(CounterRng, u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(CounterRng::new(seed), 0)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        self.0.block(self.1, 0)[0] as usize % n
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}
