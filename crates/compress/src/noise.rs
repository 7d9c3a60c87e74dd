//! Random words for signs and stochastic rounding.

/// Random words indexed by a counter. The same seed gives the same words, in any order and on any processor.
///
/// Two rounds of multiplying and shifting (Wellons' `lowbias32`), with the second half of the key between them. This is
/// cheap enough for every element of a tensor; Philox is not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Noise {
    key: [u32; 2],
}

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        // SplitMix64's finaliser (Steele et al., 2014), so that the words of neighbouring seeds are unrelated.
        let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        Self { key: [z as u32, (z >> 32) as u32] }
    }

    #[inline(always)]
    pub(crate) fn word(self, counter: u32) -> u32 {
        let mut x = counter ^ self.key[0];
        x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
        x = (x ^ (x >> 15)).wrapping_add(self.key[1]).wrapping_mul(0x846C_A68B);
        x ^ (x >> 16)
    }

    /// Uniform in [-1/2, 1/2), with 24 random bits.
    #[inline(always)]
    pub(crate) fn centred(self, counter: u32) -> f32 {
        (self.word(counter) >> 8) as i32 as f32 * (1.0 / 16_777_216.0) - 0.5
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_uniform_and_seeds_are_independent() {
        let n = 1 << 16;
        for seed in [0, 1, u64::MAX] {
            let noise = Noise::new(seed);
            let mean = (0..n).map(|i| f64::from(noise.centred(i))).sum::<f64>() / f64::from(n);
            let square = (0..n).map(|i| f64::from(noise.centred(i)).powi(2)).sum::<f64>() / f64::from(n);
            // Four standard errors: sqrt(1/12/n) and sqrt(1/180/n).
            assert!(mean.abs() < 4.0 * 0.00113, "{mean}");
            assert!((square - 1.0 / 12.0).abs() < 4.0 * 0.00029, "{square}");
            let other = Noise::new(seed.wrapping_add(1));
            let covariance =
                (0..n).map(|i| f64::from(noise.centred(i)) * f64::from(other.centred(i))).sum::<f64>() / f64::from(n);
            assert!(covariance.abs() < 4.0 / 12.0 / f64::from(n).sqrt(), "{covariance}");
        }
    }
}
