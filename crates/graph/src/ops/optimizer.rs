//! Updates of parameters, and the norm that clips them. Operators like any other, so that backends fuse them and plans cost them.
//!
//! What changes from step to step comes in as a tensor `hyper` of f64; what does not is an attribute.

use serde::{Deserialize, Serialize};

use super::check::{args, ensure, ensure_dtype, ensure_float};
use super::operator::{Cost, Operator};
use crate::{DType, TensorType};

fn alike(inputs: &[&TensorType], hyper: usize) -> Result<(), String> {
    let Some((h, tensors)) = inputs.split_last() else {
        return Err("takes operands".into());
    };
    ensure_dtype(h, DType::F64, "hyper")?;
    ensure(h.shape == [hyper], || format!("hyper must have shape [{hyper}], got {h}"))?;
    ensure_float(tensors[0])?;
    ensure(tensors.iter().all(|t| t == &tensors[0]), || "parameter, gradient and state must be of one type".into())
}

/// `(parameter, gradient, exp_avg, exp_avg_sq, hyper [4])`: the new `(parameter, exp_avg, exp_avg_sq)` of AdamW (Loshchilov and Hutter, 2019) as PyTorch computes it, with
/// hyper = (lr, 1 - beta1^t, 1 - beta2^t, factor of the gradient):
/// `p ← p (1 - lr weight_decay); m ← beta1 m + (1 - beta1) g; v ← beta2 v + (1 - beta2) g²; p ← p - lr / c1 · m / (√v / √c2 + eps)`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AdamwStep {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
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
        alike(inputs, 4)?;
        Ok(vec![p.clone(); 3])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(15.0 * inputs[0].numel() as f64, inputs, outputs)
    }
}

/// `(parameter, gradient, momentum_buffer, hyper [2])`: the new `(parameter, momentum_buffer)` of stochastic gradient descent with momentum, as PyTorch computes it
/// (dampening 0, buffer starting at 0), with hyper = (lr, factor of the gradient):
/// `g ← g + weight_decay p; m ← momentum m + g; p ← p - lr m`, or `p - lr (g + momentum m)` with Nesterov's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SgdStep {
    /// Decay of the buffer.
    pub momentum: f64,
    /// Weight decay, part of the gradient.
    pub weight_decay: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
}

impl Operator for SgdStep {
    fn name(&self) -> &'static str {
        "_fused_sgd"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [p, ..] = args::<4>(inputs)?;
        alike(inputs, 2)?;
        Ok(vec![p.clone(); 2])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(6.0 * inputs[0].numel() as f64, inputs, outputs)
    }
}

/// `(x)`: the sum of squares as an f64 scalar, accumulated in f64 in chunks whose size does not depend on the number of threads.
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
