//! Layer and batch normalisation. Group and RMS normalisation are built from simpler operators.

use serde::{Deserialize, Serialize};

use super::check::{args, ensure, ensure_float, ensure_same_dtype, ensure_shape};
use super::operator::{Cost, Operator};
use crate::TensorType;

/// Operands `(x, weight?, bias?)`, results `(y, mean, rstd)`: `y = (x - mean) rstd weight + bias`.
///
/// Mean and variance are over the last `dims` dimensions; `rstd = 1 / √(var + eps)` with the biased variance. `mean`
/// and `rstd` have size 1 in these dimensions. Weight and bias have their shape. A bias needs a weight.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    /// The number of trailing dimensions to normalise over.
    pub dims: usize,
    /// The number that is added to the variance.
    pub eps: f64,
}

fn statistics_shape(x: &TensorType, dims: usize) -> Result<Vec<usize>, String> {
    ensure(dims >= 1 && dims <= x.rank(), || format!("cannot normalise over {dims} dimensions of {x}"))?;
    let mut shape = x.shape.clone();
    let lead = x.rank() - dims;
    shape[lead..].fill(1);
    Ok(shape)
}

impl Operator for LayerNorm {
    fn name(&self) -> &'static str {
        "native_layer_norm"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let (&x, affine) = inputs.split_first().ok_or("takes an operand")?;
        ensure(affine.len() <= 2, || format!("takes at most a weight and a bias, got {} more operands", affine.len()))?;
        ensure_float(x)?;
        let shape = statistics_shape(x, self.dims)?;
        for (t, what) in affine.iter().zip(["the weight", "the bias"]) {
            ensure_same_dtype(x, t)?;
            ensure_shape(t, &x.shape[x.rank() - self.dims..], what)?;
        }
        let stat = TensorType::new(x.dtype, shape);
        Ok(vec![x.clone(), stat.clone(), stat])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(8.0 * inputs[0].numel() as f64, inputs, outputs)
    }
}

/// Operands `(gradient, x, mean, rstd, weight?)`, result: the gradient of the operand of a [`LayerNorm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerNormInputGrad {
    /// The `dims` of the forward operator.
    pub dims: usize,
}

fn norm_grad_operands(dims: usize, inputs: &[&TensorType]) -> Result<(), String> {
    let [g, x, mean, rstd] = args(inputs)?;
    ensure_float(x)?;
    ensure(g == x, || format!("the types of gradient {g} and operand {x} differ"))?;
    let stat = TensorType::new(x.dtype, statistics_shape(x, dims)?);
    ensure(*mean == stat && *rstd == stat, || format!("statistics must be {stat}, got {mean} and {rstd}"))
}

impl Operator for LayerNormInputGrad {
    fn name(&self) -> &'static str {
        "native_layer_norm_backward.input"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        ensure(matches!(inputs.len(), 4 | 5), || format!("takes 4 or 5 operands, got {}", inputs.len()))?;
        norm_grad_operands(self.dims, &inputs[..4])?;
        let x = inputs[1];
        if let Some(w) = inputs.get(4) {
            ensure_same_dtype(x, w)?;
            ensure_shape(w, &x.shape[x.rank() - self.dims..], "the weight")?;
        }
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(12.0 * inputs[1].numel() as f64, inputs, outputs)
    }
}

/// Operands `(gradient, x, mean, rstd)`, results: the gradients of the weight and the bias of a [`LayerNorm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerNormWeightGrad {
    /// The `dims` of the forward operator.
    pub dims: usize,
}

impl Operator for LayerNormWeightGrad {
    fn name(&self) -> &'static str {
        "native_layer_norm_backward.weight"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        norm_grad_operands(self.dims, inputs)?;
        let x = inputs[1];
        let w = TensorType::new(x.dtype, &x.shape[x.rank() - self.dims..]);
        Ok(vec![w.clone(), w])
    }
}

/// Batch normalisation in training. Operands `(x [N, C, ..], weight [C], bias [C], running_mean [C], running_var [C])`,
/// results `(y, mean [C], rstd [C], new running_mean [C], new running_var [C])`.
///
/// Each channel is normalised over all other dimensions, with the biased variance. The new running statistics are
/// `(1 - momentum) running + momentum batch`, with the unbiased variance. They are stored in buffers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BatchNorm {
    /// The weight of the batch in the running statistics.
    pub momentum: f64,
    /// The number that is added to the variance.
    pub eps: f64,
}

fn channels(x: &TensorType) -> Result<usize, String> {
    ensure_float(x)?;
    ensure(x.rank() >= 2, || format!("needs at least two dimensions, got {x}"))?;
    Ok(x.shape[1])
}

impl Operator for BatchNorm {
    fn name(&self) -> &'static str {
        "_native_batch_norm_legit_functional"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x, rest @ ..] = args::<5>(inputs)?;
        let c = channels(x)?;
        for (t, what) in rest.iter().zip(["the weight", "the bias", "the running mean", "the running variance"]) {
            ensure_same_dtype(x, t)?;
            ensure_shape(t, &[c], what)?;
        }
        ensure(c == 0 || x.numel() / c > 1, || format!("needs more than one value per channel in training, got {x}"))?;
        let stat = TensorType::new(x.dtype, [c]);
        Ok(vec![x.clone(), stat.clone(), stat.clone(), stat.clone(), stat])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(8.0 * inputs[0].numel() as f64, inputs, outputs)
    }
}

/// Operands `(gradient, x, mean, rstd, weight)`, result: the gradient of the operand of a [`BatchNorm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchNormInputGrad;

impl Operator for BatchNormInputGrad {
    fn name(&self) -> &'static str {
        "native_batch_norm_backward.input"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, x, mean, rstd, w] = args(inputs)?;
        let c = channels(x)?;
        ensure(g == x, || format!("the types of gradient {g} and operand {x} differ"))?;
        for t in [mean, rstd, w] {
            ensure_same_dtype(x, t)?;
            ensure_shape(t, &[c], "statistics and weight")?;
        }
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(12.0 * inputs[1].numel() as f64, inputs, outputs)
    }
}

/// Operands `(gradient, x, mean, rstd)`, results: the gradients of the weight and the bias of a [`BatchNorm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchNormWeightGrad;

impl Operator for BatchNormWeightGrad {
    fn name(&self) -> &'static str {
        "native_batch_norm_backward.weight"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, x, mean, rstd] = args(inputs)?;
        let c = channels(x)?;
        ensure(g == x, || format!("the types of gradient {g} and operand {x} differ"))?;
        for t in [mean, rstd] {
            ensure_same_dtype(x, t)?;
            ensure_shape(t, &[c], "statistics")?;
        }
        Ok(vec![mean.clone(), mean.clone()])
    }
}
