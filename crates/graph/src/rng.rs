//! A counter-based random generator: the n-th number of a stream depends on nothing but the key and n.
//!
//! Any peer can draw any element of an initial value or of a dropout mask, in any order, and gets the same bits. The
//! mixing function is Philox-4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
//! SC 2011).

/// Random numbers that are indexed by a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CounterRng {
    key: [u32; 2],
}

const M0: u32 = 0xD251_1F53;
const M1: u32 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;

impl CounterRng {
    /// The numbers of a 64-bit key.
    pub fn new(key: u64) -> Self {
        Self { key: [key as u32, (key >> 32) as u32] }
    }

    /// The numbers of `seed` and a name, such as the name of a parameter.
    pub fn for_name(seed: u64, name: &str) -> Self {
        let mut h = blake3::Hasher::new();
        h.update(&seed.to_le_bytes());
        h.update(name.as_bytes());
        let mut b = [0u8; 8];
        b.copy_from_slice(&h.finalize().as_bytes()[..8]);
        Self::new(u64::from_le_bytes(b))
    }

    /// Four 32-bit numbers at `counter`. Independent uses of one key take different `stream`s.
    pub fn block(&self, counter: u64, stream: u64) -> [u32; 4] {
        let mut c = [counter as u32, (counter >> 32) as u32, stream as u32, (stream >> 32) as u32];
        let mut k = self.key;
        for _ in 0..10 {
            let p0 = u64::from(M0) * u64::from(c[0]);
            let p1 = u64::from(M1) * u64::from(c[2]);
            c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
            k = [k[0].wrapping_add(W0), k[1].wrapping_add(W1)];
        }
        c
    }

    /// Element `index` of `stream`, uniform in [0, 1) with 24 random bits.
    pub fn uniform(&self, index: u64, stream: u64) -> f32 {
        (self.block(index / 4, stream)[(index % 4) as usize] >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// Element `index` of `stream`, standard normal (Box-Muller, from two uniform numbers of one block).
    pub fn normal(&self, index: u64, stream: u64) -> f64 {
        let block = self.block(index / 2, stream);
        let pair = if index.is_multiple_of(2) { [block[0], block[1]] } else { [block[2], block[3]] };
        // In (0, 1], so that the logarithm is finite.
        let u = (f64::from(pair[0]) + 1.0) / 4_294_967_296.0;
        let v = f64::from(pair[1]) / 4_294_967_296.0;
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }
}

/// A sequence of random choices for tests and examples. The same seed gives the same choices.
#[derive(Debug)]
pub struct ChoiceRng {
    rng: CounterRng,
    counter: u64,
}

impl ChoiceRng {
    /// The choices of a seed.
    pub fn new(seed: u64) -> Self {
        Self { rng: CounterRng::new(seed), counter: 0 }
    }

    fn next(&mut self) -> u32 {
        self.counter += 1;
        self.rng.block(self.counter, 0)[0]
    }

    /// A number below `n`. `n` must not be 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// True with a probability of 1 in `n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of `items`, which must not be empty.
    pub fn choose<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// An integer from `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        (low + (self.unit() * (high - low + 1) as f64) as usize).min(high)
    }

    /// A number from `low` to `high`, uniform on a logarithmic scale.
    pub fn log_uniform(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.unit())
    }

    fn unit(&mut self) -> f64 {
        f64::from(self.next()) / f64::from(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test vectors of philox4x32-10 from the Random123 distribution (`kat_vectors`): all zeros and all ones.
    #[test]
    fn philox_known_answers() {
        assert_eq!(CounterRng::new(0).block(0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            CounterRng::new(u64::MAX).block(u64::MAX, u64::MAX),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn normal_has_unit_variance() {
        let rng = CounterRng::for_name(1, "w");
        let n = 20_000;
        let xs: Vec<f64> = (0..n).map(|i| rng.normal(i, 0)).collect();
        let mean = xs.iter().sum::<f64>() / n as f64;
        let var = xs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((var - 1.0).abs() < 0.03, "{var}");
    }
}
