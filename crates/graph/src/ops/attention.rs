//! Scaled dot-product attention (Vaswani et al., 2017).
//!
//! It is one operator, so that kernels need not store the matrix of scores.

use serde::{Deserialize, Serialize};

use super::check::{args, args_opt, broadcast_shapes, ensure, ensure_float, ensure_same_dtype};
use super::operator::{Cost, OpClass, Operator};
use crate::{DType, TensorType};

/// Operands `(q [B, H, L, E], k [B, G, S, E], v [B, G, S, F], mask?)`, results `(out [B, H, L, F], lse [B, H, L])`.
///
/// `out = softmax(scale q kᵀ + mask) v`, and `lse` is the logarithm of the softmax's denominator. `G` must divide `H`:
/// query head `h` reads key head `h / (H / G)`.
///
/// For 16-bit operands `lse` is f32: rounded to 16 bits, the weights that backward computes from it would no longer
/// add to 1.
///
/// The mask broadcasts to `[B, H, L, S]`. A boolean mask is true where a key takes part. A mask of the operands' type
/// is added to the scores. A query without any key gives 0, and minus infinity as `lse`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ScaledDotProductAttention {
    /// Query `i` reads only keys `0 ..= i`. Combines with a mask.
    pub is_causal: bool,
    /// The factor of the scores, usually `1 / √E`.
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
    ensure_float(q)?;
    ensure_same_dtype(q, k)?;
    ensure_same_dtype(q, v)?;
    let (&[b, h, l, e], &[bk, g, s, ek], &[bv, gv, sv, f]) = (&q.shape[..], &k.shape[..], &v.shape[..]) else {
        return Err(format!("needs four dimensions in q, k and v, got {q}, {k} and {v}"));
    };
    ensure(b == bk && b == bv && e == ek && s == sv && g == gv, || {
        format!("the shapes of {q}, {k} and {v} do not match")
    })?;
    ensure(g > 0 && h % g == 0, || {
        format!("the number of query heads, {h}, is not a multiple of the number of key heads, {g}")
    })?;
    Ok(Sizes { b, h, l, s, f })
}

fn check_mask(mask: Option<&TensorType>, q: &TensorType, n: &Sizes) -> Result<(), String> {
    let Some(mask) = mask else { return Ok(()) };
    let scores = [n.b, n.h, n.l, n.s];
    ensure(broadcast_shapes(&[&mask.shape, &scores])? == scores, || {
        format!("mask {mask} does not broadcast to {scores:?}")
    })?;
    ensure(mask.dtype == DType::Bool || mask.dtype == q.dtype, || {
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
        Ok(vec![
            TensorType::new(q.dtype, [n.b, n.h, n.l, n.f]),
            TensorType::new(q.dtype.accumulator(), [n.b, n.h, n.l]),
        ])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        attention_cost(inputs[0], inputs[1], inputs[2], 1.0, inputs, outputs)
    }
}

/// The work of `products` times the two matrix products of the forward operator.
fn attention_cost(
    q: &TensorType,
    k: &TensorType,
    v: &TensorType,
    products: f64,
    inputs: &[&TensorType],
    outputs: &[&TensorType],
) -> Cost {
    let flops = sizes(q, k, v).map_or(0.0, |n| {
        let pairs: f64 = [n.b, n.h, n.l, n.s].iter().map(|n| *n as f64).product();
        pairs * (2.0 * (q.shape[3] as f64 + n.f as f64) * products + 14.0)
    });
    Cost::new(OpClass::Matmul, flops, inputs, outputs)
}

/// Operands `(gradient, q, k, v, out, lse, mask?)`, results: the gradients of q, k and v.
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
        ensure(*g == forward[0] && *out == forward[0] && *lse == forward[1], || {
            format!("gradient {g}, result {out} and lse {lse} do not match {} and {}", forward[0], forward[1])
        })?;
        args::<3>(&[q, k, v]).map(|t| t.into_iter().cloned().collect())
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        // Five matrix products, for the scores, dV, dP, dQ and dK. The forward operator has two.
        attention_cost(inputs[1], inputs[2], inputs[3], 2.5, inputs, outputs)
    }
}
