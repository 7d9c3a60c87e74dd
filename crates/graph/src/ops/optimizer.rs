//! Updates of parameters, and the norm for gradient clipping.
//!
//! They are operators like any other, so that backends can fuse them and plans can count their cost. Numbers that
//! change from step to step are a tensor operand `hyper` of f64. All others are attributes.

use serde::{Deserialize, Serialize};

use super::check::{args, ensure, ensure_dtype, ensure_float};
use super::operator::{Cost, Operator};
use crate::{DType, TensorType};

fn check_operands(inputs: &[&TensorType], hyper: usize) -> Result<(), String> {
    let Some((h, tensors)) = inputs.split_last() else {
        return Err("takes a parameter, a gradient, state and hyper".into());
    };
    ensure_dtype(h, DType::F64, "hyper")?;
    ensure(h.shape == [hyper], || format!("hyper must have shape [{hyper}], got {h}"))?;
    ensure_float(tensors[0])?;
    ensure(tensors.iter().all(|t| t == &tensors[0]), || "parameter, gradient and state must have the same type".into())
}

/// AdamW (Loshchilov and Hutter, 2019), as PyTorch computes it. Operands `(parameter, gradient, exp_avg, exp_avg_sq,
/// hyper [4])`, results: the new `(parameter, exp_avg, exp_avg_sq)`.
///
/// `hyper` is the learning rate, `c1 = 1 - beta1^t`, `c2 = 1 - beta2^t`, and a factor of the gradient.
///
/// `p ← p (1 - lr weight_decay); m ← beta1 m + (1 - beta1) g; v ← beta2 v + (1 - beta2) g²;`
/// `p ← p - lr / c1 · m / (√v / √c2 + eps)`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdamwStep {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// The number that is added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Operator for AdamwStep {
    fn name(&self) -> &'static str {
        "_fused_adamw"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [p, ..] = args::<5>(inputs)?;
        check_operands(inputs, 4)?;
        Ok(vec![p.clone(); 3])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(15.0 * inputs[0].numel() as f64, inputs, outputs)
    }
}

/// Stochastic gradient descent with momentum, as PyTorch computes it with dampening 0. Operands `(parameter, gradient,
/// momentum_buffer, hyper [2])`, results: the new `(parameter, momentum_buffer)`. The buffer starts at 0.
///
/// `hyper` is the learning rate and a factor of the gradient.
///
/// `g ← g + weight_decay p; m ← momentum m + g; p ← p - lr m`, or `p ← p - lr (g + momentum m)` with Nesterov momentum.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SgdStep {
    /// Decay of the momentum buffer.
    pub momentum: f64,
    /// Weight decay, added to the gradient.
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
}

impl Operator for SgdStep {
    fn name(&self) -> &'static str {
        "_fused_sgd"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [p, ..] = args::<4>(inputs)?;
        check_operands(inputs, 2)?;
        Ok(vec![p.clone(); 2])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(6.0 * inputs[0].numel() as f64, inputs, outputs)
    }
}

/// The sum of squares as an f64 scalar. It is accumulated in f64, in chunks of a size independent of the threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SquaredNorm;

impl Operator for SquaredNorm {
    fn name(&self) -> &'static str {
        "_foreach_norm"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure_float(x)?;
        Ok(vec![TensorType::new(DType::F64, [])])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(2.0 * inputs[0].numel() as f64, inputs, outputs)
    }
}
