//! The update of parameters: its rule, its learning rate, and the verdict on a step's gradients.

use fusionllm_graph::Op;
use fusionllm_graph::ops::{AdamwStep, SgdStep};
use serde::{Deserialize, Serialize};

/// The most slots that any optimizer has: see [`Optimizer::slots`].
pub(crate) const MAX_SLOTS: usize = 2;

/// The rule by which owners update their parameters, with PyTorch's semantics.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Optimizer {
    /// See [`AdamwStep`].
    Adamw(AdamwStep),
    /// See [`SgdStep`].
    Sgd(SgdStep),
}

impl Optimizer {
    /// Names of the tensors kept beside each parameter, as in PyTorch. Each starts at zero.
    pub fn slots(&self) -> &'static [&'static str] {
        match self {
            Self::Adamw(_) => &["exp_avg", "exp_avg_sq"],
            Self::Sgd(_) => &["momentum_buffer"],
        }
    }

    /// The operator, from (parameter, gradient, slots…, hyper) to (parameter, slots…).
    pub fn op(&self) -> Op {
        match *self {
            Self::Adamw(op) => op.into(),
            Self::Sgd(op) => op.into(),
        }
    }

    /// The weight decay.
    pub fn weight_decay(&self) -> f64 {
        match self {
            Self::Adamw(op) => op.weight_decay,
            Self::Sgd(op) => op.weight_decay,
        }
    }

    /// The rule with another weight decay.
    pub fn with_weight_decay(self, weight_decay: f64) -> Self {
        match self {
            Self::Adamw(op) => Self::Adamw(AdamwStep { weight_decay, ..op }),
            Self::Sgd(op) => Self::Sgd(SgdStep { weight_decay, ..op }),
        }
    }

    /// The number of elements of [`Self::hyper`].
    pub fn hyper_len(&self) -> usize {
        match self {
            Self::Adamw(_) => 4,
            Self::Sgd(_) => 2,
        }
    }

    /// The operator's `hyper` operand for a verdict, at a multiple of its learning rate.
    pub fn hyper(&self, v: &Verdict, rate: f64) -> Vec<f64> {
        let lr = v.lr * rate;
        match self {
            Self::Adamw(op) => {
                let t = v.update as f64;
                vec![lr, 1.0 - op.beta1.powf(t), 1.0 - op.beta2.powf(t), v.factor]
            }
            Self::Sgd(_) => vec![lr, v.factor],
        }
    }
}

/// The settings of some parameters, where they are not the optimizer's, like those of a parameter group of PyTorch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ParameterGroup {
    /// The learning rate, as a multiple of the optimizer's.
    pub rate: f64,
    /// The weight decay.
    pub weight_decay: f64,
}

impl ParameterGroup {
    /// Whether an update can be computed with it.
    pub fn is_valid(&self) -> bool {
        [self.rate, self.weight_decay].into_iter().all(|x| x.is_finite() && x >= 0.0)
    }
}

/// The learning rate over a run: linear warm-up from `base / warmup`, then constant or a half cosine down to `min`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LearningRate {
    /// The highest rate.
    pub base: f64,
    /// Updates until the highest rate is reached.
    pub warmup: u64,
    /// The update at which a half cosine reaches `min`. `None` for a constant rate.
    pub cosine_until: Option<u64>,
    /// The final rate of the cosine.
    pub min: f64,
}

impl LearningRate {
    /// The rate of an update, counted from 1.
    pub fn at(&self, update: u64) -> f64 {
        if update <= self.warmup {
            return self.base * update as f64 / self.warmup as f64;
        }
        match self.cosine_until {
            None => self.base,
            Some(end) => {
                let span = end.saturating_sub(self.warmup).max(1) as f64;
                // The first update past the warm-up has the full rate.
                let t = ((update - self.warmup - 1) as f64 / span).min(1.0);
                self.min + (self.base - self.min) * 0.5 * (1.0 + (std::f64::consts::PI * t).cos())
            }
        }
    }

    /// The last update before the rate stays at its minimum; `None` if it does not fall.
    pub fn falls_until(&self) -> Option<u64> {
        self.cosine_until.filter(|_| self.min < self.base).map(|end| end.max(self.warmup.saturating_add(1)))
    }
}

/// The broker's answer to the squared norms of a step's gradients.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Whether the step is applied. False if the loss or a gradient is not finite.
    pub apply: bool,
    /// The number of the update, from 1.
    pub update: u64,
    /// Its learning rate.
    pub lr: f64,
    /// The factor of every gradient.
    pub factor: f64,
}

/// The global norm of gradients, and the factor that clips it, as in PyTorch's `clip_grad_norm_`. The squared norms
/// are in graph order.
pub fn clip_factor(squared_norms: &[f64], clip: Option<f64>) -> (f64, f64) {
    let norm = squared_norms.iter().sum::<f64>().sqrt();
    let factor = match clip {
        Some(max) => (max / (norm + 1e-6)).min(1.0),
        None => 1.0,
    };
    (norm, factor)
}

/// The part of a batch's loss that one micro-batch adds: its mean, weighted by its share of the targets. A micro-batch
/// without targets has the mean 0 / 0 and adds nothing.
pub fn share_of_loss(weight: f64, mean: f64) -> f64 {
    if weight == 0.0 { 0.0 } else { weight * mean }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learning_rate_warms_up_then_falls_along_a_cosine() {
        let lr = LearningRate { base: 1.0, warmup: 4, cosine_until: Some(14), min: 0.1 };
        assert_eq!(lr.at(1), 0.25);
        assert_eq!(lr.at(4), 1.0);
        assert_eq!(lr.at(5), 1.0);
        assert!((lr.at(10) - 0.55).abs() < 1e-12, "half way down at half time");
        assert!((lr.at(15) - 0.1).abs() < 1e-12);
        assert_eq!(LearningRate { base: 2.0, warmup: 0, cosine_until: None, min: 0.0 }.at(9), 2.0);
    }

    #[test]
    fn no_optimizer_has_more_slots_than_a_stranger_may_name() {
        let adamw = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 });
        let sgd = Optimizer::Sgd(SgdStep { momentum: 0.9, weight_decay: 0.0, nesterov: false });
        assert_eq!([adamw, sgd].map(|optimizer| optimizer.slots().len()).into_iter().max(), Some(MAX_SLOTS));
    }

    #[test]
    fn a_micro_batch_without_targets_adds_nothing() {
        assert_eq!(share_of_loss(0.0, f64::NAN), 0.0);
        assert_eq!(share_of_loss(0.25, 8.0), 2.0);
        assert!(share_of_loss(0.25, f64::NAN).is_nan(), "a loss that is not finite is not hidden");
    }

    #[test]
    fn clipping_limits_the_norm() {
        assert_eq!(clip_factor(&[9.0, 16.0], None), (5.0, 1.0));
        let (norm, factor) = clip_factor(&[9.0, 16.0], Some(1.0));
        assert!((norm * factor - 1.0).abs() < 1e-6);
        assert_eq!(clip_factor(&[0.0], Some(1.0)).1, 1.0);
    }
}
