//! Scaled dot-product attention (Vaswani et al., 2017) as one operator, so that backends can keep its score matrix out of memory.

use serde::{Deserialize, Serialize};

use super::elementwise::{Unary, broadcast_shapes};
use super::{Backward, Cost, OpClass, Operator, args, args_opt, float, same_dtype, want};
use crate::{Builder, DType, GraphError, TensorType, ValueId};

/// `(q [B, H, L, E], k [B, G, S, E], v [B, G, S, F], mask?)`: `(out [B, H, L, F], lse [B, H, L])`, with
/// `out = softmax(scale q kᵀ + mask) v` and `lse` the logarithm of the softmax's denominator. `G` divides `H`: query head `h` reads key head
/// `h / (H / G)`. The mask broadcasts to `[B, H, L, S]`: boolean (true takes part) or of the operands' type (added). A row with nothing to attend to
/// gives 0, with `lse` minus infinity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ScaledDotProductAttention {
    /// Query `i` sees keys `0 ..= i` alone; also beside a mask.
    pub is_causal: bool,
    /// Factor of the scores, usually `1 / √E`.
    pub scale: f64,
}

struct Sizes {
    b: usize,
    h: usize,
    l: usize,
    s: usize,
    f: usize,
}

fn sizes(q: &TensorType, k: &TensorType, v: &TensorType) -> Result<Sizes, String> {
    float(q)?;
    same_dtype(q, k)?;
    same_dtype(q, v)?;
    let (&[b, h, l, e], &[bk, g, s, ek], &[bv, gv, sv, f]) = (&q.shape[..], &k.shape[..], &v.shape[..]) else {
        return Err(format!("needs four dimensions in q, k and v, got {q}, {k} and {v}"));
    };
    want(b == bk && b == bv && e == ek && s == sv && g == gv, || format!("{q}, {k} and {v} do not fit each other"))?;
    want(g > 0 && h % g == 0, || format!("{h} query heads do not divide among {g} key heads"))?;
    Ok(Sizes { b, h, l, s, f })
}

fn check_mask(mask: Option<&TensorType>, q: &TensorType, n: &Sizes) -> Result<(), String> {
    let Some(mask) = mask else { return Ok(()) };
    let scores = [n.b, n.h, n.l, n.s];
    want(broadcast_shapes(&[&mask.shape, &scores])? == scores, || {
        format!("mask {mask} does not broadcast to {scores:?}")
    })?;
    want(mask.dtype == DType::Bool || mask.dtype == q.dtype, || {
        format!("the mask must be bool or {}, got {mask}", q.dtype)
    })
}

impl Operator for ScaledDotProductAttention {
    fn name(&self) -> &'static str {
        "scaled_dot_product_attention"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let ([q, k, v], mask) = args_opt(inputs)?;
        let n = sizes(q, k, v)?;
        check_mask(mask, q, &n)?;
        Ok(vec![TensorType::new(q.dtype, [n.b, n.h, n.l, n.f]), TensorType::new(q.dtype, [n.b, n.h, n.l])])
    }

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
            // A learned bias: its gradient is that of the scores, summed to its shape.
            grads.push(cx.want(3, |cx| {
                let d = self.score_gradients(cx.b, &operands)?.1;
                cx.b.sum_to(d, mask)
            })?);
        }
        Ok(grads)
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        attention_cost(inputs[0], inputs[1], inputs[2], 1.0, inputs, outputs)
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let (q, k, v) = (inputs[0], inputs[1], inputs[2]);
        let heads = b.ty(q).shape[1];
        if b.ty(k).shape[2] == 0 {
            // No keys: every row is empty, and no row has a maximum.
            let (dtype, rows) = (b.ty(q).dtype, b.ty(q).shape[..3].to_vec());
            let width = b.ty(v).shape[3];
            let out = b.full(TensorType::new(dtype, [&rows[..], &[width]].concat()), 0.0)?;
            return Ok(Some(vec![out, b.full(TensorType::new(dtype, rows), f64::NEG_INFINITY)?]));
        }
        let scores = self.scores(b, q, k, inputs.get(3).copied())?;
        let max = b.amax(scores, &[3], true)?;
        // A row with nothing to attend to has a maximum of -∞; 0 in its place keeps its exponentials 0 instead of NaN.
        let empty = b.compare_scalar(super::Compare::Eq, max, f64::NEG_INFINITY)?;
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
        let shape = b.ty(lse).shape[..3].to_vec();
        Ok(Some(vec![out, b.reshape(lse, shape)?]))
    }
}

impl ScaledDotProductAttention {
    /// `scale q kᵀ + mask`, `[B, H, L, S]`, with -∞ where a key takes no part.
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
            let seen = b.op(super::Compare::Le, &[columns, rows])?;
            scores = b.where_(seen, scores, minus_infinity)?;
        }
        match mask {
            Some(m) if b.ty(m).dtype == DType::Bool => b.where_(m, scores, minus_infinity),
            Some(m) => b.add(scores, m),
            None => Ok(scores),
        }
    }

    /// From (gradient, q, k, v, out, lse, mask?): the attention weights P and the gradient of the scores, P (G Vᵀ - Σ G out).
    fn score_gradients(&self, b: &mut Builder, operands: &[ValueId]) -> Result<(ValueId, ValueId), GraphError> {
        let [g, q, k, v, out, lse] = [operands[0], operands[1], operands[2], operands[3], operands[4], operands[5]];
        let heads = b.ty(q).shape[1];
        let scores = self.scores(b, q, k, operands.get(6).copied())?;
        let mut shape = b.ty(lse).shape.clone();
        shape.push(1);
        let lse = b.reshape(lse, shape)?;
        // An empty row has lse -∞; its weights are 0, not exp(-∞ + ∞).
        let empty = b.compare_scalar(super::Compare::Eq, lse, f64::NEG_INFINITY)?;
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

/// Key heads repeated so that there is one for each query head.
fn repeat_heads(b: &mut Builder, x: ValueId, heads: usize) -> Result<ValueId, GraphError> {
    let [n, g, s, e] = <[usize; 4]>::try_from(&b.ty(x).shape[..]).unwrap_or([0; 4]);
    if g == heads {
        return Ok(x);
    }
    let x = b.reshape(x, [n, g, 1, s, e])?;
    let x = b.expand(x, [n, g, heads / g, s, e])?;
    b.reshape(x, [n, heads, s, e])
}

/// The reverse of [`repeat_heads`] for gradients: sums over the query heads that read one key head.
fn sum_heads(b: &mut Builder, x: ValueId, groups: usize) -> Result<ValueId, GraphError> {
    let [n, h, s, e] = <[usize; 4]>::try_from(&b.ty(x).shape[..]).unwrap_or([0; 4]);
    if h == groups {
        return Ok(x);
    }
    let x = b.reshape(x, [n, groups, h / groups, s, e])?;
    b.sum(x, &[2], false)
}

/// `products` times the work of the forward operator's two products.
fn attention_cost(
    q: &TensorType,
    k: &TensorType,
    v: &TensorType,
    products: f64,
    inputs: &[&TensorType],
    outputs: &[&TensorType],
) -> Cost {
    let flops = sizes(q, k, v).map_or(0.0, |n| {
        let pairs = (n.b * n.h * n.l * n.s) as f64;
        pairs * (2.0 * (q.shape[3] + n.f) as f64 * products + 14.0)
    });
    Cost::new(OpClass::Matmul, flops, inputs, outputs)
}

/// `(gradient, q, k, v, out, lse, mask?)`: the gradients of q, k and v.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ScaledDotProductAttentionBackward {
    /// The forward operator.
    pub forward: ScaledDotProductAttention,
}

impl Operator for ScaledDotProductAttentionBackward {
    fn name(&self) -> &'static str {
        "_scaled_dot_product_attention_backward"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let ([g, q, k, v, out, lse], mask) = args_opt(inputs)?;
        let operands: Vec<&TensorType> = [q, k, v].into_iter().chain(mask).collect();
        let forward = self.forward.infer(&operands)?;
        want(*g == forward[0] && *out == forward[0] && *lse == forward[1], || {
            format!("gradient {g}, result {out} and lse {lse} do not fit {} and {}", forward[0], forward[1])
        })?;
        args::<3>(&[q, k, v]).map(|t| t.into_iter().cloned().collect())
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        // Scores again, dV, dP, dQ and dK: five products where forward has two.
        attention_cost(inputs[1], inputs[2], inputs[3], 2.5, inputs, outputs)
    }

    // dV = Pᵀ G, dQ = scale dS K, dK = scale dSᵀ Q.
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
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
        Ok(Some(vec![dq, dk, dv]))
    }
}
