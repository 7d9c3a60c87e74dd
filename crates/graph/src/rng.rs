//! A counter-based generator: the n-th number of a stream is a function of (key, n) alone.
//!
//! Any peer can make any element of a parameter's initial value or of a dropout mask, in any order, and gets the same
//! bits. The mixing function is Philox-4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
//! SC 2011).

/// A stream of random numbers indexed by a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CounterRng {
    key: [u32; 2],
}

const M0: u32 = 0xD251_1F53;
const M1: u32 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;

impl CounterRng {
    /// The stream of a 64-bit key.
    pub fn new(key: u64) -> Self {
        Self { key: [key as u32, (key >> 32) as u32] }
    }

    /// The stream of `seed` and a name, such as a parameter's.
    pub fn named(seed: u64, name: &str) -> Self {
        let mut h = blake3::Hasher::new();
        h.update(&seed.to_le_bytes());
        h.update(name.as_bytes());
        let mut b = [0u8; 8];
        b.copy_from_slice(&h.finalize().as_bytes()[..8]);
        Self::new(u64::from_le_bytes(b))
    }

    /// Four 32-bit numbers at `counter`; `stream` tells apart independent uses of one key.
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

    /// Uniform in [0, 1) with 24 bits, element `index` of `stream`.
    pub fn uniform(&self, index: u64, stream: u64) -> f32 {
        (self.block(index / 4, stream)[(index % 4) as usize] >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// Standard normal, element `index` of `stream` (Box-Muller over two uniforms of the same block).
    pub fn normal(&self, index: u64, stream: u64) -> f64 {
        let block = self.block(index / 2, stream);
        let pair = if index.is_multiple_of(2) { [block[0], block[1]] } else { [block[2], block[3]] };
        // In (0, 1], so that the logarithm is finite.
        let u = (f64::from(pair[0]) + 1.0) / 4_294_967_296.0;
        let v = f64::from(pair[1]) / 4_294_967_296.0;
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }
}

/// Choices one after the other, the same for the same seed: what tests and examples draw their random cases from.
#[derive(Debug)]
pub struct Dice(CounterRng, u64);

impl Dice {
    /// The choices of a seed.
    pub fn new(seed: u64) -> Self {
        Self(CounterRng::new(seed), 0)
    }

    fn next(&mut self) -> u32 {
        self.1 += 1;
        self.0.block(self.1, 0)[0]
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Yes once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of them; there is at least one.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// From `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        (low + (self.unit() * (high - low + 1) as f64) as usize).min(high)
    }

    /// From `low` to `high`, evenly on a logarithmic scale.
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

    /// Known answer from the Random123 distribution (kat_vectors): philox4x32-10, all zeros and all ones.
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
        let rng = CounterRng::named(1, "w");
        let n = 20_000;
        let xs: Vec<f64> = (0..n).map(|i| rng.normal(i, 0)).collect();
        let mean = xs.iter().sum::<f64>() / n as f64;
        let var = xs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((var - 1.0).abs() < 0.03, "{var}");
    }
}
