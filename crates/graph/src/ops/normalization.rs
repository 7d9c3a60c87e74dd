//! Layer and batch normalisation. Group and RMS normalisation are built of simpler operators.

use serde::{Deserialize, Serialize};

use super::{Backward, Cost, Operator, args, float, of_shape, same_dtype, want};
use crate::{Builder, GraphError, TensorType, ValueId};

use super::elementwise::Unary;

/// `(x, weight?, bias?)`: `(y, mean, rstd)` over the last `dims` dimensions: `y = (x - mean) rstd weight + bias`, with
/// `rstd = 1 / √(var + eps)` and the biased variance. `mean` and `rstd` have the leading dimensions' shape with the rest as 1. Weight and bias have the last
/// dimensions' shape; a bias only beside a weight.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    /// How many trailing dimensions are normalised over.
    pub dims: usize,
    /// Added to the variance.
    pub eps: f64,
}

fn statistics_shape(x: &TensorType, dims: usize) -> Result<Vec<usize>, String> {
    want(dims >= 1 && dims <= x.rank(), || format!("cannot normalise over {dims} dimensions of {x}"))?;
    let mut shape = x.shape.clone();
    let lead = x.rank() - dims;
    shape[lead..].fill(1);
    Ok(shape)
}

fn last(x: &TensorType, dims: usize) -> Vec<usize> {
    (x.rank() - dims..x.rank()).collect()
}

impl Operator for LayerNorm {
    fn name(&self) -> &'static str {
        "native_layer_norm"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let (&x, affine) = inputs.split_first().ok_or("takes an operand")?;
        want(affine.len() <= 2, || format!("takes at most a weight and a bias, got {} more operands", affine.len()))?;
        float(x)?;
        let shape = statistics_shape(x, self.dims)?;
        for (t, what) in affine.iter().zip(["the weight", "the bias"]) {
            same_dtype(x, t)?;
            of_shape(t, &x.shape[x.rank() - self.dims..], what)?;
        }
        let stat = TensorType::new(x.dtype, shape);
        Ok(vec![x.clone(), stat.clone(), stat])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        if cx.grads[1].is_some() || cx.grads[2].is_some() {
            return Err(cx.not_differentiable("a gradient reaches its mean or rstd"));
        }
        let (x, mean, rstd, g) = (cx.inputs[0], cx.outputs[1], cx.outputs[2], cx.grad(0)?);
        let weight = cx.inputs.get(1).copied();
        let dx = cx.want(0, |cx| {
            let operands: Vec<ValueId> = [g, x, mean, rstd].into_iter().chain(weight).collect();
            cx.b.op(LayerNormInputGrad { dims: self.dims }, &operands)
        })?;
        let mut grads = vec![dx, None, None];
        if cx.wanted[1..].contains(&true) {
            let out = cx.b.apply(LayerNormWeightGrad { dims: self.dims }, &[g, x, mean, rstd])?;
            for (i, v) in out.into_iter().enumerate() {
                grads[i + 1] = cx.wanted.get(i + 1).copied().unwrap_or(false).then_some(v);
            }
        }
        grads.truncate(cx.inputs.len());
        Ok(grads)
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(8.0 * inputs[0].numel() as f64, inputs, outputs)
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let x = inputs[0];
        let dims = last(b.ty(x), self.dims);
        let mean = b.mean(x, &dims, true)?;
        let centred = b.sub(x, mean)?;
        let square = b.mul(centred, centred)?;
        let var = b.mean(square, &dims, true)?;
        let var = b.add_scalar(var, self.eps)?;
        let rstd = b.unary(Unary::Rsqrt, var)?;
        let mut y = b.mul(centred, rstd)?;
        if let Some(&w) = inputs.get(1) {
            y = b.mul(y, w)?;
        }
        if let Some(&bias) = inputs.get(2) {
            y = b.add(y, bias)?;
        }
        Ok(Some(vec![y, mean, rstd]))
    }
}

/// `(gradient, x, mean, rstd, weight?)`: the gradient of a [`LayerNorm`]'s operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerNormInputGrad {
    /// As in the forward operator.
    pub dims: usize,
}

fn norm_grad_operands(dims: usize, inputs: &[&TensorType]) -> Result<(), String> {
    let [g, x, mean, rstd] = args(inputs)?;
    float(x)?;
    want(g == x, || format!("gradient {g} and operand {x} differ"))?;
    let stat = TensorType::new(x.dtype, statistics_shape(x, dims)?);
    want(*mean == stat && *rstd == stat, || format!("statistics must be {stat}, got {mean} and {rstd}"))
}

impl Operator for LayerNormInputGrad {
    fn name(&self) -> &'static str {
        "native_layer_norm_backward.input"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        want(matches!(inputs.len(), 4 | 5), || format!("takes 4 or 5 operands, got {}", inputs.len()))?;
        norm_grad_operands(self.dims, &inputs[..4])?;
        let x = inputs[1];
        if let Some(w) = inputs.get(4) {
            same_dtype(x, w)?;
            of_shape(w, &x.shape[x.rank() - self.dims..], "the weight")?;
        }
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(12.0 * inputs[1].numel() as f64, inputs, outputs)
    }

    // With x̂ = (x - mean) rstd and h = g w: dx = rstd (h - mean(h) - x̂ mean(h x̂)).
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let [g, x, mean, rstd] = [inputs[0], inputs[1], inputs[2], inputs[3]];
        let dims = last(b.ty(x), self.dims);
        let h = match inputs.get(4) {
            Some(&w) => b.mul(g, w)?,
            None => g,
        };
        let centred = b.sub(x, mean)?;
        let xhat = b.mul(centred, rstd)?;
        let m1 = b.mean(h, &dims, true)?;
        let hx = b.mul(h, xhat)?;
        let m2 = b.mean(hx, &dims, true)?;
        let t = b.mul(xhat, m2)?;
        let d = b.sub(h, m1)?;
        let d = b.sub(d, t)?;
        Ok(Some(vec![b.mul(d, rstd)?]))
    }
}

/// `(gradient, x, mean, rstd)`: the gradients of a [`LayerNorm`]'s weight and bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerNormWeightGrad {
    /// As in the forward operator.
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

    // dw = Σ g x̂, db = Σ g, over the leading dimensions.
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let [g, x, mean, rstd] = [inputs[0], inputs[1], inputs[2], inputs[3]];
        let lead: Vec<usize> = (0..b.ty(x).rank() - self.dims).collect();
        let centred = b.sub(x, mean)?;
        let xhat = b.mul(centred, rstd)?;
        let gx = b.mul(g, xhat)?;
        Ok(Some(vec![b.sum(gx, &lead, false)?, b.sum(g, &lead, false)?]))
    }
}

/// `(x [N, C, ..], weight [C], bias [C], running_mean [C], running_var [C])` in training: `(y, mean [C], rstd [C], new running_mean, new running_var)`.
/// Normalises each channel over all other dimensions by the biased variance; `new = (1 - momentum) running + momentum batch`, for the variance with the unbiased
/// one. The running statistics are state that forward changes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BatchNorm {
    /// Weight of the batch in the running statistics.
    pub momentum: f64,
    /// Added to the variance.
    pub eps: f64,
}

fn channels(x: &TensorType) -> Result<usize, String> {
    float(x)?;
    want(x.rank() >= 2, || format!("needs at least two dimensions, got {x}"))?;
    Ok(x.shape[1])
}

/// A `[C]` tensor viewed so that it broadcasts along dimension 1 of a tensor of rank `rank`.
fn along_channels(b: &mut Builder, t: ValueId, rank: usize) -> Result<ValueId, GraphError> {
    let mut shape = vec![1; rank];
    shape[1] = b.ty(t).numel();
    b.reshape(t, shape)
}

fn all_but_channels(rank: usize) -> Vec<usize> {
    (0..rank).filter(|&d| d != 1).collect()
}

impl Operator for BatchNorm {
    fn name(&self) -> &'static str {
        "_native_batch_norm_legit_functional"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x, rest @ ..] = args::<5>(inputs)?;
        let c = channels(x)?;
        for (t, what) in rest.iter().zip(["the weight", "the bias", "the running mean", "the running variance"]) {
            same_dtype(x, t)?;
            of_shape(t, &[c], what)?;
        }
        want(c == 0 || x.numel() / c > 1, || format!("needs more than one value a channel in training, got {x}"))?;
        let stat = TensorType::new(x.dtype, [c]);
        Ok(vec![x.clone(), stat.clone(), stat.clone(), stat.clone(), stat])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, w, mean, rstd) = (cx.inputs[0], cx.inputs[1], cx.outputs[1], cx.outputs[2]);
        if cx.grads[1..].iter().any(Option::is_some) {
            return Err(cx.not_differentiable("a gradient reaches its statistics"));
        }
        let g = cx.grad(0)?;
        let dx = cx.want(0, |cx| cx.b.op(BatchNormInputGrad, &[g, x, mean, rstd, w]))?;
        let mut grads = vec![dx, None, None, None, None];
        if cx.wanted[1] || cx.wanted[2] {
            let out = cx.b.apply(BatchNormWeightGrad, &[g, x, mean, rstd])?;
            grads[1] = cx.wanted[1].then_some(out[0]);
            grads[2] = cx.wanted[2].then_some(out[1]);
        }
        Ok(grads)
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(8.0 * inputs[0].numel() as f64, inputs, outputs)
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let x = inputs[0];
        let (rank, numel) = (b.ty(x).rank(), b.ty(x).numel());
        let dims = all_but_channels(rank);
        let c = b.ty(x).shape[1];
        let mean = b.mean(x, &dims, false)?;
        let m = along_channels(b, mean, rank)?;
        let centred = b.sub(x, m)?;
        let square = b.mul(centred, centred)?;
        let var = b.mean(square, &dims, false)?;
        let v = b.add_scalar(var, self.eps)?;
        let rstd = b.unary(Unary::Rsqrt, v)?;
        let r = along_channels(b, rstd, rank)?;
        let xhat = b.mul(centred, r)?;
        let w = along_channels(b, inputs[1], rank)?;
        let y = b.mul(xhat, w)?;
        let bias = along_channels(b, inputs[2], rank)?;
        let y = b.add(y, bias)?;
        let n = numel.checked_div(c).unwrap_or(2) as f64;
        let unbiased = b.mul_scalar(var, n / (n - 1.0))?;
        let mut updated = Vec::new();
        for (old, new) in [(inputs[3], mean), (inputs[4], unbiased)] {
            let o = b.mul_scalar(old, 1.0 - self.momentum)?;
            let n = b.mul_scalar(new, self.momentum)?;
            updated.push(b.add(o, n)?);
        }
        Ok(Some(vec![y, mean, rstd, updated[0], updated[1]]))
    }
}

/// `(gradient, x, mean, rstd, weight)`: the gradient of a [`BatchNorm`]'s operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchNormInputGrad;

impl Operator for BatchNormInputGrad {
    fn name(&self) -> &'static str {
        "native_batch_norm_backward.input"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, x, mean, rstd, w] = args(inputs)?;
        let c = channels(x)?;
        want(g == x, || format!("gradient {g} and operand {x} differ"))?;
        for t in [mean, rstd, w] {
            same_dtype(x, t)?;
            of_shape(t, &[c], "statistics and weight")?;
        }
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(12.0 * inputs[1].numel() as f64, inputs, outputs)
    }

    // As for layer normalisation, with means over all dimensions but the channels'.
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let [g, x, mean, rstd, w] = [inputs[0], inputs[1], inputs[2], inputs[3], inputs[4]];
        let rank = b.ty(x).rank();
        let dims = all_but_channels(rank);
        let m = along_channels(b, mean, rank)?;
        let r = along_channels(b, rstd, rank)?;
        let wc = along_channels(b, w, rank)?;
        let centred = b.sub(x, m)?;
        let xhat = b.mul(centred, r)?;
        let m1 = b.mean(g, &dims, true)?;
        let gx = b.mul(g, xhat)?;
        let m2 = b.mean(gx, &dims, true)?;
        let t = b.mul(xhat, m2)?;
        let d = b.sub(g, m1)?;
        let d = b.sub(d, t)?;
        let s = b.mul(r, wc)?;
        Ok(Some(vec![b.mul(d, s)?]))
    }
}

/// `(gradient, x, mean, rstd)`: the gradients of a [`BatchNorm`]'s weight and bias, `[C]` each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchNormWeightGrad;

impl Operator for BatchNormWeightGrad {
    fn name(&self) -> &'static str {
        "native_batch_norm_backward.weight"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, x, mean, rstd] = args(inputs)?;
        let c = channels(x)?;
        want(g == x, || format!("gradient {g} and operand {x} differ"))?;
        for t in [mean, rstd] {
            same_dtype(x, t)?;
            of_shape(t, &[c], "statistics")?;
        }
        Ok(vec![mean.clone(), mean.clone()])
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let [g, x, mean, rstd] = [inputs[0], inputs[1], inputs[2], inputs[3]];
        let rank = b.ty(x).rank();
        let dims = all_but_channels(rank);
        let m = along_channels(b, mean, rank)?;
        let r = along_channels(b, rstd, rank)?;
        let centred = b.sub(x, m)?;
        let xhat = b.mul(centred, r)?;
        let gx = b.mul(g, xhat)?;
        Ok(Some(vec![b.sum(gx, &dims, false)?, b.sum(g, &dims, false)?]))
    }
}
