//! The forms of scaled dot-product attention in PyTorch.

use fusionllm_graph::DType;
use fusionllm_graph::ops::{Compare, ScaledDotProductAttention, Softmax};

use super::entry::entries;
use super::nn::drop_elements;
use crate::call::{Call, Output};
use crate::context::{Context, Result, Value};

entries! {
    "scaled_dot_product_attention" ["default"] => attention,
    "_scaled_dot_product_flash_attention_for_cpu" ["default"] => attention,
    "_scaled_dot_product_flash_attention" ["default"] => attention,
    "_scaled_dot_product_efficient_attention" ["default"] => attention,
}

/// Reshapes to four dimensions: merges leading dimensions, or adds dimensions of size 1.
fn four_dimensions(c: &mut Context<'_>, x: Value) -> Result<Value> {
    let shape = c.shape(x);
    match &shape[..] {
        [_, _, _, _] => Ok(x),
        [l, e] => c.reshape(x, &[1, 1, *l, *e]),
        [h, l, e] => c.reshape(x, &[1, *h, *l, *e]),
        [lead @ .., h, l, e] => c.reshape(x, &[lead.iter().product(), *h, *l, *e]),
        _ => Err("it needs at least two dimensions".into()),
    }
}

fn attention(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let q = a.value(c, "query")?;
    let (k, v) = (a.value(c, "key")?, a.value(c, "value")?);
    let out_shape = {
        let mut shape = c.shape(q);
        if let (Some(last), Some(width)) = (shape.last_mut(), c.ty(v).shape.last()) {
            *last = *width;
        }
        shape
    };
    let (q, k, v) = (four_dimensions(c, q)?, four_dimensions(c, k)?, four_dimensions(c, v)?);
    // Batch sizes of 1 broadcast.
    let batch = [q, k, v].iter().map(|t| c.shape(*t)[0]).max().unwrap_or(1);
    let spread = |c: &mut Context<'_>, t: Value| {
        let mut shape = c.shape(t);
        shape[0] = batch;
        c.expand(t, &shape)
    };
    let (q, k, v) = (spread(c, q)?, spread(c, k)?, spread(c, v)?);
    let width = c.shape(q)[3].max(1) as f64;
    let scale = a.number_or("scale", 1.0 / width.sqrt())?;
    let mut is_causal = a.bool_or("is_causal", false)?;
    let mut mask = match a.optional(c, if a.has("attn_bias") { "attn_bias" } else { "attn_mask" })? {
        Some(mask) => Some(normalised_mask(c, mask, q)?),
        None => None,
    };
    if let Some(known) = mask
        && let Some(kind) = mask_kind(c, known)
    {
        match kind {
            MaskKind::All => mask = None,
            MaskKind::Causal if !is_causal => {
                is_causal = true;
                mask = None;
            }
            MaskKind::Causal => {}
        }
    }
    let p = a.number_or("dropout_p", 0.0)?;
    let op = ScaledDotProductAttention { is_causal, scale };
    if p == 0.0 {
        let operands: Vec<Value> = [q, k, v].into_iter().chain(mask).collect();
        let results = c.apply(op, &operands)?;
        return Ok(vec![c.reshape(results[0], &out_shape)?.into(), results[1].into()]);
    }
    // Dropout acts on the weights between softmax and values, so the fused operator cannot be used.
    let heads = c.shape(q)[1];
    let (k, v) = (repeat_heads(c, k, heads)?, repeat_heads(c, v, heads)?);
    let kt = c.transpose(k)?;
    let scaled = c.mul_scalar(q, scale)?;
    let mut scores = c.matmul(scaled, kt)?;
    let minus_infinity = c.full(c.dtype(q), &[], f64::NEG_INFINITY)?;
    if is_causal {
        let shape = c.shape(scores);
        let rows = c.arange(DType::I64, 0.0, 1.0, shape[2])?;
        let rows = c.reshape(rows, &[shape[2], 1])?;
        let columns = c.arange(DType::I64, 0.0, 1.0, shape[3])?;
        let seen = c.compare(Compare::Le, columns, rows)?;
        scores = c.where_(seen, scores, minus_infinity)?;
    }
    if let Some(mask) = mask {
        scores = match c.dtype(mask) {
            DType::Bool => c.where_(mask, scores, minus_infinity)?,
            _ => c.add(scores, mask)?,
        };
    }
    let weights = c.op(Softmax { dim: 3 }, &[scores])?;
    let weights = drop_elements(c, weights, p)?[0];
    let y = c.matmul(weights, v)?;
    Ok(vec![c.reshape(y, &out_shape)?.into(), Output::Unavailable])
}

/// Repeats key heads, so that each query head has its own.
fn repeat_heads(c: &mut Context<'_>, x: Value, heads: usize) -> Result<Value> {
    let shape = c.shape(x);
    let [n, g, s, e] = shape[..] else { return Err("it needs four dimensions".into()) };
    if g == heads {
        return Ok(x);
    }
    if g == 0 || !heads.is_multiple_of(g) {
        return Err(
            format!("the number of query heads, {heads}, is not a multiple of the number of key heads, {g}").into()
        );
    }
    let x = c.reshape(x, &[n, g, 1, s, e])?;
    let x = c.expand(x, &[n, g, heads / g, s, e])?;
    c.reshape(x, &[n, heads, s, e])
}

/// Converts a mask to four dimensions, and to the type of the operands unless it is boolean.
fn normalised_mask(c: &mut Context<'_>, mask: Value, q: Value) -> Result<Value> {
    let dtype = c.dtype(q);
    let mask = if c.dtype(mask) == DType::Bool { mask } else { c.cast(mask, dtype)? };
    let mut shape = c.shape(mask);
    while shape.len() < 4 {
        shape.insert(0, 1);
    }
    if shape.len() > 4 {
        let lead = shape.drain(..shape.len() - 3).product();
        shape.insert(0, lead);
    }
    c.reshape(mask, &shape)
}

/// The keys that a common mask allows for every query.
enum MaskKind {
    All,
    /// The keys up to the position of the query.
    Causal,
}

/// Recognises a constant mask that allows all keys, or is causal.
fn mask_kind(c: &Context<'_>, mask: Value) -> Option<MaskKind> {
    let tensor = c.constant_tensor(mask)?;
    let [.., rows, columns] = tensor.shape() else { return None };
    let block = rows * columns;
    if block == 0 {
        return None;
    }
    let seen: Vec<bool> = match tensor.dtype() {
        DType::Bool => tensor.bytes().iter().map(|b| *b != 0).collect(),
        _ => {
            let numbers = tensor.to_f64();
            if !numbers.iter().all(|n| *n == 0.0 || *n == f64::NEG_INFINITY) {
                return None;
            }
            numbers.iter().map(|n| *n == 0.0).collect()
        }
    };
    if seen.iter().all(|s| *s) {
        return Some(MaskKind::All);
    }
    let earlier = |i: usize| i % columns <= i / columns;
    let triangular = *rows > 1 && seen.chunks(block).all(|b| b.iter().enumerate().all(|(i, s)| *s == earlier(i)));
    triangular.then_some(MaskKind::Causal)
}
