//! Gradients and decompositions of `ops/attention.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{Compare, ScaledDotProductAttention, ScaledDotProductAttentionBackward, Unary};
use crate::{Builder, DType, GraphError, TensorType, ValueId};

impl GraphRules for ScaledDotProductAttention {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        if cx.grads[1].is_some() {
            return Err(cx.not_differentiable("a gradient reaches its lse"));
        }
        let g = cx.grad(0)?;
        let (q, k, v) = (cx.inputs[0], cx.inputs[1], cx.inputs[2]);
        let (out, lse) = (cx.outputs[0], cx.outputs[1]);
        let mask = cx.inputs.get(3).copied();
        let operands: Vec<ValueId> = [g, q, k, v, out, lse].into_iter().chain(mask).collect();
        let grads = cx.b.apply(ScaledDotProductAttentionBackward { forward: *self }, &operands)?;
        let mut grads: Vec<Option<ValueId>> = (0..3).map(|i| cx.wanted[i].then_some(grads[i])).collect();
        if let Some(mask) = mask {
            // The mask is a learned bias: its gradient is that of the scores, summed to its shape.
            grads.push(cx.if_wanted(3, |cx| {
                let d = self.score_gradients(cx.b, &operands)?.1;
                let dtype = cx.b.ty(mask).dtype;
                let d = cx.b.cast(d, dtype)?;
                cx.b.sum_to(d, mask)
            })?);
        }
        Ok(grads)
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let dtype = b.ty(inputs[0]).dtype;
        let inputs = widened(b, inputs)?;
        let (q, k, v) = (inputs[0], inputs[1], inputs[2]);
        let heads = b.ty(q).shape[1];
        if b.ty(k).shape[2] == 0 {
            // Without keys, no query has a maximum score.
            let rows = b.ty(q).shape[..3].to_vec();
            let width = b.ty(v).shape[3];
            let out = b.full(TensorType::new(dtype, [&rows[..], &[width]].concat()), 0.0)?;
            return Ok(Some(vec![out, b.full(TensorType::new(dtype.accumulator(), rows), f64::NEG_INFINITY)?]));
        }
        let scores = self.scores(b, q, k, inputs.get(3).copied())?;
        let max = b.amax(scores, &[3], true)?;
        // The maximum of a query without keys is -∞. Replaced by 0, its exponentials are 0 instead of NaN.
        let empty = b.compare_scalar(Compare::Eq, max, f64::NEG_INFINITY)?;
        let zero = b.zero_like_scalar(max)?;
        let max = b.where_(empty, zero, max)?;
        let shifted = b.sub(scores, max)?;
        let e = b.unary(Unary::Exp, shifted)?;
        let sum = b.sum(e, &[3], true)?;
        let log = b.unary(Unary::Log, sum)?;
        let lse = b.add(log, max)?;
        let one = b.add_scalar(zero, 1.0)?;
        let divisor = b.where_(empty, one, sum)?;
        let p = b.div(e, divisor)?;
        let v = repeat_heads(b, v, heads)?;
        let out = b.matmul(p, v)?;
        let out = b.cast(out, dtype)?;
        let shape = b.ty(lse).shape[..3].to_vec();
        Ok(Some(vec![out, b.reshape(lse, shape)?]))
    }
}

impl ScaledDotProductAttention {
    /// `scale q kᵀ + mask`, `[B, H, L, S]`, with -∞ for keys that take no part.
    fn scores(&self, b: &mut Builder, q: ValueId, k: ValueId, mask: Option<ValueId>) -> Result<ValueId, GraphError> {
        let heads = b.ty(q).shape[1];
        let k = repeat_heads(b, k, heads)?;
        let kt = b.transpose(k)?;
        let scaled = b.mul_scalar(q, self.scale)?;
        let mut scores = b.matmul(scaled, kt)?;
        let minus_infinity = b.full(TensorType::new(b.ty(q).dtype, []), f64::NEG_INFINITY)?;
        if self.is_causal {
            let (l, s) = (b.ty(scores).shape[2], b.ty(scores).shape[3]);
            let rows = b.arange(DType::I64, 0.0, 1.0, l)?;
            let rows = b.reshape(rows, [l, 1])?;
            let columns = b.arange(DType::I64, 0.0, 1.0, s)?;
            let seen = b.op(Compare::Le, &[columns, rows])?;
            scores = b.where_(seen, scores, minus_infinity)?;
        }
        match mask {
            Some(m) if b.ty(m).dtype == DType::Bool => b.where_(m, scores, minus_infinity),
            Some(m) => b.add(scores, m),
            None => Ok(scores),
        }
    }

    /// From (gradient, q, k, v, out, lse, mask?): the attention weights P and the gradient of the scores.
    ///
    /// The gradient of the scores is P (G Vᵀ - Σ G out). Both results have the type of `lse`.
    fn score_gradients(&self, b: &mut Builder, operands: &[ValueId]) -> Result<(ValueId, ValueId), GraphError> {
        let operands = widened(b, operands)?;
        let [g, q, k, v, out, lse] = [operands[0], operands[1], operands[2], operands[3], operands[4], operands[5]];
        let heads = b.ty(q).shape[1];
        let scores = self.scores(b, q, k, operands.get(6).copied())?;
        let mut shape = b.ty(lse).shape.clone();
        shape.push(1);
        let lse = b.reshape(lse, shape)?;
        // A query without keys has lse -∞. Its weights are 0, not exp(-∞ + ∞).
        let empty = b.compare_scalar(Compare::Eq, lse, f64::NEG_INFINITY)?;
        let zero = b.zero_like_scalar(lse)?;
        let lse = b.where_(empty, zero, lse)?;
        let shifted = b.sub(scores, lse)?;
        let p = b.unary(Unary::Exp, shifted)?;
        let v = repeat_heads(b, v, heads)?;
        let vt = b.transpose(v)?;
        let dp = b.matmul(g, vt)?;
        let go = b.mul(g, out)?;
        let delta = b.sum(go, &[3], true)?;
        let centred = b.sub(dp, delta)?;
        let ds = b.mul(p, centred)?;
        Ok((p, ds))
    }
}

/// The operands in the type in which they are summed. A boolean mask stays.
fn widened(b: &mut Builder, operands: &[ValueId]) -> Result<Vec<ValueId>, GraphError> {
    let mut widen = |x: &ValueId| b.cast(*x, b.ty(*x).dtype.accumulator());
    operands.iter().map(&mut widen).collect()
}

/// Repeats key heads, so that each query head has its own.
fn repeat_heads(b: &mut Builder, x: ValueId, heads: usize) -> Result<ValueId, GraphError> {
    let [n, g, s, e] = <[usize; 4]>::try_from(&b.ty(x).shape[..]).unwrap_or([0; 4]);
    if g == heads {
        return Ok(x);
    }
    let x = b.reshape(x, [n, g, 1, s, e])?;
    let x = b.expand(x, [n, g, heads / g, s, e])?;
    b.reshape(x, [n, heads, s, e])
}

/// The gradient of [`repeat_heads`]: sums over the query heads that read the same key head.
fn sum_heads(b: &mut Builder, x: ValueId, groups: usize) -> Result<ValueId, GraphError> {
    let [n, h, s, e] = <[usize; 4]>::try_from(&b.ty(x).shape[..]).unwrap_or([0; 4]);
    if h == groups {
        return Ok(x);
    }
    let x = b.reshape(x, [n, groups, h / groups, s, e])?;
    b.sum(x, &[2], false)
}

impl GraphRules for ScaledDotProductAttentionBackward {
    // dV = Pᵀ G, dQ = scale dS K, dK = scale dSᵀ Q.
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let dtype = b.ty(inputs[1]).dtype;
        let inputs = &widened(b, inputs)?[..];
        let (g, q, k) = (inputs[0], inputs[1], inputs[2]);
        let (heads, groups) = (b.ty(q).shape[1], b.ty(k).shape[1]);
        let (p, ds) = self.forward.score_gradients(b, inputs)?;
        let pt = b.transpose(p)?;
        let dv = b.matmul(pt, g)?;
        let dv = sum_heads(b, dv, groups)?;
        let ds = b.mul_scalar(ds, self.forward.scale)?;
        let kr = repeat_heads(b, k, heads)?;
        let dq = b.matmul(ds, kr)?;
        let dst = b.transpose(ds)?;
        let dk = b.matmul(dst, q)?;
        let dk = sum_heads(b, dk, groups)?;
        Ok(Some([dq, dk, dv].into_iter().map(|d| b.cast(d, dtype)).collect::<Result<_, _>>()?))
    }
}
