//! Normalisation, softmax, dropout and embedding.

use fusionllm_graph::ops::{BatchNorm, Binary, Dropout, Embedding, LayerNorm, LogSoftmax, Softmax, Unary};
use fusionllm_graph::{DType, Op};

use super::entry::{entries, one};
use crate::call::{Call, Output, size, wrap};
use crate::context::{Context, Result, Value};

entries! {
    "layer_norm" ["default"] => layer_norm,
    "native_layer_norm" ["default"] => layer_norm,
    "rms_norm" ["default"] => rms_norm,
    "_fused_rms_norm" ["default"] => rms_norm,
    "group_norm" ["default"] => group_norm,
    "native_group_norm" ["default"] => group_norm,
    "instance_norm" ["default"] => instance_norm,
    "batch_norm" ["default"] => batch_norm,
    "native_batch_norm" ["default"] => batch_norm,
    "_native_batch_norm_legit" ["default", "no_stats"] => batch_norm,
    "_native_batch_norm_legit_functional" ["default"] => batch_norm,
    "_native_batch_norm_legit_no_training" ["default"] => batch_norm,
    "_batch_norm_with_update_functional" ["default"] => batch_norm,
    "softmax" ["int"] => |c, a| softmax(c, a, false),
    "_softmax" ["default"] => |c, a| softmax(c, a, false),
    "_safe_softmax" ["default"] => safe_softmax,
    "log_softmax" ["int"] => |c, a| softmax(c, a, true),
    "_log_softmax" ["default"] => |c, a| softmax(c, a, true),
    "dropout" ["default"] => dropout,
    "native_dropout" ["default"] => dropout,
    "feature_dropout" ["default"] => feature_dropout,
    "bernoulli" ["default", "p", "float"] => bernoulli,
    "embedding" ["default"] => embedding,
}

/// The number of dimensions in `normalized_shape`.
fn trailing(c: &Context<'_>, a: &Call<'_>, x: Value) -> Result<usize> {
    let shape = a.sizes("normalized_shape")?;
    if !c.ty(x).shape.ends_with(&shape) || shape.is_empty() {
        return Err(format!("{} does not end with {shape:?}", c.ty(x)).into());
    }
    Ok(shape.len())
}

fn layer_norm(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "input")?;
    let dims = trailing(c, a, x)?;
    let (mut weight, bias) = (a.optional(c, "weight")?, a.optional(c, "bias")?);
    if weight.is_none() && bias.is_some() {
        let shape = c.shape(x);
        weight = Some(c.full(c.dtype(x), &shape[shape.len() - dims..], 1.0)?);
    }
    let operands: Vec<Value> = [Some(x), weight, bias].into_iter().flatten().collect();
    let results = c.apply(LayerNorm { dims, eps: a.number_or("eps", 1e-5)? }, &operands)?;
    Ok(results.into_iter().map(Output::Value).collect())
}

/// `x / √(mean(x²) + eps) · weight`
fn rms_norm(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "input")?;
    let dims = trailing(c, a, x)?;
    let dtype = c.dtype(x);
    let smallest = match dtype {
        DType::F64 => f64::EPSILON,
        DType::F16 => 9.765_625e-4,
        DType::BF16 => 7.812_5e-3,
        _ => f32::EPSILON.into(),
    };
    let rank = c.rank(x);
    let dims: Vec<usize> = (rank - dims..rank).collect();
    let square = c.mul(x, x)?;
    let mean = c.mean(square, &dims, true)?;
    let mean = c.add_scalar(mean, a.number_or("eps", smallest)?)?;
    let rstd = c.unary(Unary::Rsqrt, mean)?;
    let mut y = c.mul(x, rstd)?;
    if let Some(weight) = a.optional(c, "weight")? {
        y = c.mul(y, weight)?;
    }
    Ok(vec![y.into(), rstd.into()])
}

/// Reshapes `[C]` so that it broadcasts along dimension 1 of a tensor with `rank` dimensions.
fn along_channels(c: &mut Context<'_>, v: Value, rank: usize) -> Result<Value> {
    let mut shape = vec![1; rank];
    shape[1] = c.ty(v).numel();
    c.reshape(v, &shape)
}

/// Normalises each of `groups` groups of channels of each sample, then applies weight and bias.
fn normalise_groups(c: &mut Context<'_>, a: &Call<'_>, x: Value, groups: usize, eps: f64) -> Result<Value> {
    let shape = c.shape(x);
    let [n, channels, rest @ ..] = &shape[..] else { return Err("it needs channels".into()) };
    if groups == 0 || channels % groups != 0 {
        return Err(format!("the number of channels, {channels}, is not a multiple of {groups} groups").into());
    }
    let flat = c.reshape(x, &[*n, groups, channels / groups * rest.iter().product::<usize>()])?;
    let y = c.op(LayerNorm { dims: 1, eps }, &[flat])?;
    let mut y = c.reshape(y, &shape)?;
    for (name, op) in [("weight", Binary::Mul), ("bias", Binary::Add)] {
        if let Some(v) = a.optional(c, name)? {
            let v = along_channels(c, v, shape.len())?;
            y = c.binary(op, y, v)?;
        }
    }
    Ok(y)
}

fn group_norm(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "input")?;
    let groups = size(a.int(if a.has("num_groups") { "num_groups" } else { "group" })?)?;
    let y = normalise_groups(c, a, x, groups, a.number_or("eps", 1e-5)?)?;
    Ok(vec![y.into(), Output::Unavailable, Output::Unavailable])
}

fn instance_norm(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    if a.has("running_mean") {
        return Err("instance normalisation with running statistics is not supported".into());
    }
    let x = a.value(c, "input")?;
    let groups = c.shape(x).get(1).copied().unwrap_or(0);
    one(normalise_groups(c, a, x, groups, a.number_or("eps", 1e-5)?)?)
}

/// In training, normalises by the statistics of the batch and updates the running ones. Otherwise by the running ones.
fn batch_norm(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "input")?;
    let channels = *c.ty(x).shape.get(1).ok_or("it needs channels")?;
    let dtype = c.dtype(x);
    let default = |c: &mut Context<'_>, value: f64| c.full(dtype, &[channels], value);
    let or = |c: &mut Context<'_>, name: &str, value: f64| match a.optional(c, name)? {
        Some(v) => Ok(v),
        None => default(c, value),
    };
    let (weight, bias) = (or(c, "weight", 1.0)?, or(c, "bias", 0.0)?);
    let tracked = a.has("running_mean") && a.has("running_var");
    let (mean, var) = (or(c, "running_mean", 0.0)?, or(c, "running_var", 1.0)?);
    let eps = a.number_or("eps", 1e-5)?;
    let training = match a.name {
        "_native_batch_norm_legit_no_training" => false,
        "_batch_norm_with_update_functional" => true,
        _ => a.bool_or("training", false)? || !tracked,
    };
    if !training {
        let rank = c.rank(x);
        let v = c.add_scalar(var, eps)?;
        let rstd = c.unary(Unary::Rsqrt, v)?;
        let factor = c.mul(rstd, weight)?;
        let shift = c.mul(mean, factor)?;
        let offset = c.sub(bias, shift)?;
        let factor = along_channels(c, factor, rank)?;
        let offset = along_channels(c, offset, rank)?;
        let y = c.mul(x, factor)?;
        let y = c.add(y, offset)?;
        // Only PyTorch's own backward reads the second and the third result.
        return Ok(vec![y.into(), Output::Unavailable, Output::Unavailable, mean.into(), var.into()]);
    }
    let op = BatchNorm { momentum: a.number_or("momentum", 0.1)?, eps };
    let mut results = c.apply(op, &[x, weight, bias, mean, var])?;
    // No gradient flows through statistics.
    for statistic in &mut results[1..] {
        *statistic = c.detach(*statistic)?;
    }
    let functional = a.name.ends_with("_functional");
    if tracked && !functional {
        // These operators overwrite the running statistics, although their names do not end with `_`.
        c.write(a.tensor("running_mean")?, results[3])?;
        c.write(a.tensor("running_var")?, results[4])?;
    }
    let mut outs: Vec<Output> = results[..3].iter().map(|v| Output::Value(*v)).collect();
    if a.name == "_batch_norm_with_update_functional" {
        // A buffer that only PyTorch's own backward reads.
        outs.push(Output::Unavailable);
    }
    if functional {
        outs.extend(results[3..].iter().map(|v| Output::Value(*v)));
    }
    Ok(outs)
}

fn softmax(c: &mut Context<'_>, a: &Call<'_>, logarithm: bool) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dtype = a.result_type(c, 0)?;
    let x = c.cast(x, dtype)?;
    let shape = c.shape(x);
    let x = if shape.is_empty() { c.reshape(x, &[1])? } else { x };
    let dim = wrap(a.int("dim")?, c.rank(x))?;
    let y = c.op(if logarithm { Op::from(LogSoftmax { dim }) } else { Softmax { dim }.into() }, &[x])?;
    one(c.reshape(y, &shape)?)
}

/// A softmax that returns zeros where every element is minus infinity.
fn safe_softmax(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dim = wrap(a.int("dim")?, c.rank(x))?;
    let masked = c.compare_scalar(fusionllm_graph::ops::Compare::Eq, x, f64::NEG_INFINITY)?;
    let empty = c.reduce(fusionllm_graph::ops::ReduceKind::All, masked, &[dim], true)?;
    let zero = c.full(c.dtype(x), &[], 0.0)?;
    let safe = c.where_(empty, zero, x)?;
    let y = c.op(Softmax { dim }, &[safe])?;
    one(c.where_(empty, zero, y)?)
}

/// Drops elements with probability `p` and scales the rest by `1 / (1 - p)`.
pub(super) fn drop_elements(c: &mut Context<'_>, x: Value, p: f64) -> Result<Vec<Value>> {
    if !(0.0..=1.0).contains(&p) {
        return Err(format!("the probability must be from 0 to 1, got {p}").into());
    }
    if p == 1.0 {
        return Ok(vec![c.mul_scalar(x, 0.0)?]);
    }
    let stream = c.builder.next_stream();
    let key = Value::Node(c.builder.rng_key()?);
    c.apply(Dropout { p, stream }, &[x, key])
}

fn dropout(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, if a.has("input") { "input" } else { "self" })?;
    let p = a.number_or("p", 0.5)?;
    if p == 0.0 || !a.bool_or("train", true)? {
        if a.name != "native_dropout" {
            return Ok(vec![Output::Alias(a.first_tensor()?)]);
        }
        let shape = c.shape(x);
        return Ok(vec![x.into(), c.full(DType::Bool, &shape, 1.0)?.into()]);
    }
    Ok(drop_elements(c, x, p)?.into_iter().map(Output::Value).collect())
}

/// Drops whole channels.
fn feature_dropout(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "input")?;
    let p = a.number_or("p", 0.5)?;
    if p == 0.0 || !a.bool_or("train", true)? {
        return Ok(vec![Output::Alias(a.first_tensor()?)]);
    }
    let mut shape = c.shape(x);
    shape.iter_mut().skip(2).for_each(|n| *n = 1);
    let ones = c.full(c.dtype(x), &shape, 1.0)?;
    let mask = drop_elements(c, ones, p)?[0];
    one(c.mul(x, mask)?)
}

/// 1 with probability `p`, else 0: a dropout of ones without scaling. In evaluation it is `p` everywhere.
fn bernoulli(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let p = match a.overload {
        "default" => c.constant_number(x).ok_or("elements with different probabilities are not supported")?,
        _ => a.number_or("p", 0.5)?,
    };
    let ty = c.ty(x).clone();
    let ones = c.full(ty.dtype, &ty.shape, 1.0)?;
    if p == 1.0 {
        return one(ones);
    }
    let y = drop_elements(c, ones, 1.0 - p)?[0];
    one(c.mul_scalar(y, p)?)
}

fn embedding(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    if a.bool_or("scale_grad_by_freq", false)? {
        return Err(
            "scale_grad_by_freq=True is not supported: it counts an id in the whole batch, of which a micro-batch \
             sees a part; leave it out"
                .into(),
        );
    }
    let (weight, ids) = (a.value(c, "weight")?, a.value(c, "indices")?);
    let ids = c.cast(ids, DType::I64)?;
    let padding_idx = usize::try_from(a.int_or("padding_idx", -1)?).ok();
    one(c.op(Embedding { padding_idx }, &[weight, ids])?)
}
