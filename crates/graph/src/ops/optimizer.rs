//! Updates of parameters, and the norm that clips them. Operators like any other, so that backends fuse them and plans cost them.
//!
//! What changes from step to step comes in as a tensor `hyper` of f64; what does not is an attribute.

use serde::{Deserialize, Serialize};

use super::{Cost, Operator, args, float, of_type, want};
use crate::{Builder, DType, GraphError, TensorType, ValueId};

use super::elementwise::Unary;

fn alike(inputs: &[&TensorType], hyper: usize) -> Result<(), String> {
    let Some((h, tensors)) = inputs.split_last() else {
        return Err("takes operands".into());
    };
    of_type(h, DType::F64, "hyper")?;
    want(h.shape == [hyper], || format!("hyper must have shape [{hyper}], got {h}"))?;
    float(tensors[0])?;
    want(tensors.iter().all(|t| t == &tensors[0]), || "parameter, gradient and state must be of one type".into())
}

/// Element `i` of `hyper` as a scalar of type `dtype`.
fn hyper(b: &mut Builder, h: ValueId, i: usize, dtype: DType) -> Result<ValueId, GraphError> {
    let s = b.slice(h, 0, i, i + 1, 1)?;
    let s = b.reshape(s, [])?;
    b.cast(s, dtype)
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

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let [p, g, m, v, h] = [inputs[0], inputs[1], inputs[2], inputs[3], inputs[4]];
        let dtype = b.ty(p).dtype;
        let [lr, c1, c2, factor] =
            [hyper(b, h, 0, dtype)?, hyper(b, h, 1, dtype)?, hyper(b, h, 2, dtype)?, hyper(b, h, 3, dtype)?];
        let g = b.mul(g, factor)?;
        let decay = b.mul_scalar(lr, self.weight_decay)?;
        let keep = b.scalar_sub(1.0, decay)?;
        let p = b.mul(p, keep)?;
        let m = b.mul_scalar(m, self.beta1)?;
        let gm = b.mul_scalar(g, 1.0 - self.beta1)?;
        let m = b.add(m, gm)?;
        let v = b.mul_scalar(v, self.beta2)?;
        let g2 = b.mul(g, g)?;
        let g2 = b.mul_scalar(g2, 1.0 - self.beta2)?;
        let v = b.add(v, g2)?;
        let root = b.unary(Unary::Sqrt, v)?;
        let c2 = b.unary(Unary::Sqrt, c2)?;
        let root = b.div(root, c2)?;
        let root = b.add_scalar(root, self.eps)?;
        let size = b.div(lr, c1)?;
        let step = b.div(m, root)?;
        let step = b.mul(step, size)?;
        let p = b.sub(p, step)?;
        Ok(Some(vec![p, m, v]))
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

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let [p, g, m, h] = [inputs[0], inputs[1], inputs[2], inputs[3]];
        let dtype = b.ty(p).dtype;
        let (lr, factor) = (hyper(b, h, 0, dtype)?, hyper(b, h, 1, dtype)?);
        let g = b.mul(g, factor)?;
        let d = b.mul_scalar(p, self.weight_decay)?;
        let g = b.add(g, d)?;
        let m = b.mul_scalar(m, self.momentum)?;
        let m = b.add(m, g)?;
        let mut step = m;
        if self.nesterov {
            let s = b.mul_scalar(m, self.momentum)?;
            step = b.add(g, s)?;
        }
        let step = b.mul(step, lr)?;
        Ok(Some(vec![b.sub(p, step)?, m]))
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
        float(x)?;
        Ok(vec![TensorType::new(DType::F64, [])])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(2.0 * inputs[0].numel() as f64, inputs, outputs)
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let x = b.cast(inputs[0], DType::F64)?;
        let x2 = b.mul(x, x)?;
        let dims: Vec<usize> = (0..b.ty(x2).rank()).collect();
        Ok(Some(vec![b.sum(x2, &dims, false)?]))
    }
}
