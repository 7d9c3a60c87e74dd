//! Gradients and decompositions of `ops/normalization.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{
    BatchNorm, BatchNormInputGrad, BatchNormWeightGrad, LayerNorm, LayerNormInputGrad, LayerNormWeightGrad, Unary,
};
use crate::{Builder, GraphError, TensorType, ValueId};

impl GraphRules for LayerNorm {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        if cx.grads[1].is_some() || cx.grads[2].is_some() {
            return Err(cx.not_differentiable("a gradient reaches its mean or rstd"));
        }
        let (x, mean, rstd, g) = (cx.inputs[0], cx.outputs[1], cx.outputs[2], cx.grad(0)?);
        let weight = cx.inputs.get(1).copied();
        let dx = cx.if_wanted(0, |cx| {
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

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let x = inputs[0];
        let dims = last_dims(b.ty(x), self.dims);
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

impl GraphRules for LayerNormInputGrad {
    // With x̂ = (x - mean) rstd and h = g w: dx = rstd (h - mean(h) - x̂ mean(h x̂)).
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let [g, x, mean, rstd] = [inputs[0], inputs[1], inputs[2], inputs[3]];
        let dims = last_dims(b.ty(x), self.dims);
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

impl GraphRules for LayerNormWeightGrad {
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

/// Reshapes a `[C]` tensor so that it broadcasts along dimension 1 of a tensor with `rank` dimensions.
fn along_channels(b: &mut Builder, t: ValueId, rank: usize) -> Result<ValueId, GraphError> {
    let mut shape = vec![1; rank];
    shape[1] = b.ty(t).numel();
    b.reshape(t, shape)
}

impl GraphRules for BatchNorm {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, w, mean, rstd) = (cx.inputs[0], cx.inputs[1], cx.outputs[1], cx.outputs[2]);
        if cx.grads[1..].iter().any(Option::is_some) {
            return Err(cx.not_differentiable("a gradient reaches its statistics"));
        }
        let g = cx.grad(0)?;
        let dx = cx.if_wanted(0, |cx| cx.b.op(BatchNormInputGrad, &[g, x, mean, rstd, w]))?;
        let mut grads = vec![dx, None, None, None, None];
        if cx.wanted[1] || cx.wanted[2] {
            let out = cx.b.apply(BatchNormWeightGrad, &[g, x, mean, rstd])?;
            grads[1] = cx.wanted[1].then_some(out[0]);
            grads[2] = cx.wanted[2].then_some(out[1]);
        }
        Ok(grads)
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

impl GraphRules for BatchNormInputGrad {
    // This is the rule of layer normalisation, with means over all dimensions but that of the channels.
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

impl GraphRules for BatchNormWeightGrad {
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

/// The last `dims` dimensions of `x`.
fn last_dims(x: &TensorType, dims: usize) -> Vec<usize> {
    (x.rank() - dims..x.rank()).collect()
}

fn all_but_channels(rank: usize) -> Vec<usize> {
    (0..rank).filter(|&d| d != 1).collect()
}
