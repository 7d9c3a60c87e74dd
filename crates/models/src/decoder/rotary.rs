use std::f64::consts::PI;

/// A rotary position embedding (Su et al., 2021): it turns pairs of numbers, element `i` and element `i + dims / 2` of a
/// head, by an angle that grows with the position.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    /// The base of the frequencies.
    pub theta: f64,
    /// The number of elements of a head that are turned, the first ones.
    pub dims: usize,
    /// The change of the frequencies for sequences that are longer than those of the first training.
    pub scaling: Scaling,
}

/// The kinds of `rope_type` of Hugging Face.
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    /// None.
    Default,
    /// All frequencies are divided by the factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// The base grows with the sequence, once that is longer than `positions`.
    Dynamic {
        /// The factor.
        factor: f64,
        /// The longest sequence of the first training.
        positions: usize,
    },
    /// Low frequencies are divided by the factor, high ones stay (Llama 3.1).
    Llama3 {
        /// The factor.
        factor: f64,
        /// Frequencies that turn fewer times than this over `positions` are low.
        low_freq_factor: f64,
        /// Frequencies that turn more times than this over `positions` are high.
        high_freq_factor: f64,
        /// The longest sequence of the first training.
        positions: usize,
    },
    /// Low frequencies are divided by the factor, high ones stay, with a ramp over the elements between (Peng et al.,
    /// 2023).
    Yarn {
        /// The factor.
        factor: f64,
        /// The number that sines and cosines are multiplied by.
        attention_factor: f64,
        /// Turns over `positions` from which on frequencies stay.
        beta_fast: f64,
        /// Turns over `positions` up to which frequencies are divided.
        beta_slow: f64,
        /// Whether the ends of the ramp are whole elements.
        truncate: bool,
        /// The longest sequence of the first training.
        positions: usize,
    },
    /// Each frequency is divided by a number of its own, for sequences up to `positions` and for longer ones (Ding et
    /// al., 2024).
    LongRope {
        /// The divisors for sequences up to `positions`.
        short_factor: Vec<f64>,
        /// The divisors for longer ones.
        long_factor: Vec<f64>,
        /// The number that sines and cosines are multiplied by.
        attention_factor: f64,
        /// The longest sequence of the first training.
        positions: usize,
    },
}

impl Rotary {
    /// The angles by which a pair turns from one position to the next, in radians, for sequences of `sequence` tokens.
    /// They are computed in f32, as Hugging Face's `transformers` does.
    pub fn frequencies(&self, sequence: usize) -> Vec<f32> {
        let pairs = self.dims / 2;
        let share = |i: usize| (2 * i) as f32 / self.dims as f32;
        let of = |theta: f64| -> Vec<f32> { (0..pairs).map(|i| 1.0 / (theta as f32).powf(share(i))).collect() };
        match &self.scaling {
            Scaling::Default => of(self.theta),
            Scaling::Linear { factor } => of(self.theta).into_iter().map(|f| f / *factor as f32).collect(),
            Scaling::Dynamic { factor, positions } => {
                let longer = sequence.max(*positions) as f64 / *positions as f64;
                let dims = self.dims as f64;
                of(self.theta * (factor * longer - (factor - 1.0)).powf(dims / (dims - 2.0)))
            }
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, positions } => {
                let scaled = |f: f32| {
                    let turns = *positions as f64 * f64::from(f) / (2.0 * PI);
                    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    match turns {
                        _ if turns < *low_freq_factor => f / *factor as f32,
                        _ if turns > *high_freq_factor => f,
                        _ => ((1.0 - smooth) * f64::from(f) / factor + smooth * f64::from(f)) as f32,
                    }
                };
                of(self.theta).into_iter().map(scaled).collect()
            }
            Scaling::Yarn { factor, beta_fast, beta_slow, truncate, positions, .. } => {
                // The element whose frequency turns this many times over the positions.
                let element = |turns: f64| {
                    self.dims as f64 * (*positions as f64 / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (element(*beta_fast), element(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(self.dims as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let scaled = |(i, f): (usize, f32)| {
                    let kept = 1.0 - ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                    f / *factor as f32 * (1.0 - kept) + f * kept
                };
                of(self.theta).into_iter().enumerate().map(scaled).collect()
            }
            Scaling::LongRope { short_factor, long_factor, positions, .. } => {
                let factors = if sequence > *positions { long_factor } else { short_factor };
                let scaled = |(i, factor): (usize, &f64)| 1.0 / (*factor as f32 * (self.theta as f32).powf(share(i)));
                factors.iter().enumerate().map(scaled).collect()
            }
        }
    }

    /// Whether the frequencies depend on the length of the sequence.
    pub fn depends_on_length(&self) -> bool {
        matches!(self.scaling, Scaling::Dynamic { .. } | Scaling::LongRope { .. })
    }

    /// The number that sines and cosines are multiplied by.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            Scaling::Yarn { attention_factor, .. } | Scaling::LongRope { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}
