//! Reductions and scans.

use fusionllm_graph::DType;
use fusionllm_graph::ops::{ArgReduce, Binary, Compare, CumSum, ReduceKind, Unary};

use super::entry::{entries, one};
use crate::call::{Call, Output, wrap, wrap_all};
use crate::context::{Context, Result, Value};

entries! {
    "sum" ["default", "dim_IntList"] => |c, a| reduce(c, a, ReduceKind::Sum),
    "mean" ["default", "dim"] => |c, a| reduce(c, a, ReduceKind::Mean),
    "amax" ["default"] => |c, a| reduce(c, a, ReduceKind::Amax),
    "amin" ["default"] => |c, a| reduce(c, a, ReduceKind::Amin),
    "prod" ["default", "dim_int"] => |c, a| reduce(c, a, ReduceKind::Prod),
    "any" ["default", "dim", "dims"] => |c, a| reduce_bool(c, a, ReduceKind::Any),
    "all" ["default", "dim", "dims"] => |c, a| reduce_bool(c, a, ReduceKind::All),
    "max" ["default", "dim", "other"] => |c, a| extremum(c, a, true),
    "min" ["default", "dim", "other"] => |c, a| extremum(c, a, false),
    "argmax" ["default"] => |c, a| position(c, a, true),
    "argmin" ["default"] => |c, a| position(c, a, false),
    "cumsum" ["default"] => cumsum,
    "var" ["default", "dim", "correction"] => |c, a| variance(c, a, false, false),
    "var_mean" ["default", "dim", "correction"] => |c, a| variance(c, a, false, true),
    "std" ["default", "dim", "correction"] => |c, a| variance(c, a, true, false),
    "std_mean" ["default", "dim", "correction"] => |c, a| variance(c, a, true, true),
    "norm" ["Scalar", "ScalarOpt_dim"] => norm,
    "linalg_vector_norm" ["default"] => norm,
    "logsumexp" ["default"] => logsumexp,
    "diff" ["default"] => diff,
}

/// The dimensions in `dim`; all if it is missing.
fn dims(a: &Call<'_>, rank: usize) -> Result<Vec<usize>> {
    wrap_all(&a.ints_or("dim", &[])?, rank)
}

fn reduce(c: &mut Context<'_>, a: &Call<'_>, kind: ReduceKind) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dtype = a.result_type(c, 0)?;
    let x = c.cast(x, dtype)?;
    let dims = dims(a, c.rank(x))?;
    one(c.reduce(kind, x, &dims, a.bool_or("keepdim", false)?)?)
}

fn reduce_bool(c: &mut Context<'_>, a: &Call<'_>, kind: ReduceKind) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let x = c.cast(x, DType::Bool)?;
    let dims = dims(a, c.rank(x))?;
    one(c.reduce(kind, x, &dims, a.bool_or("keepdim", false)?)?)
}

fn extremum(c: &mut Context<'_>, a: &Call<'_>, largest: bool) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    match a.overload {
        "other" => {
            let y = a.value(c, "other")?;
            let dtype = a.result_type(c, 0)?;
            let (x, y) = (c.cast(x, dtype)?, c.cast(y, dtype)?);
            one(c.binary(if largest { Binary::Maximum } else { Binary::Minimum }, x, y)?)
        }
        "dim" => {
            let rank = c.rank(x);
            let dim = wrap(a.int("dim")?, rank)?;
            if rank == 0 {
                let zero = c.full(DType::I64, &[], 0.0)?;
                return Ok(vec![x.into(), zero.into()]);
            }
            let at = c.op(ArgReduce { largest, dim, keepdim: true }, &[x])?;
            let y = c.gather(x, dim, at)?;
            if a.bool_or("keepdim", false)? {
                return Ok(vec![y.into(), at.into()]);
            }
            let mut shape = c.shape(x);
            shape.remove(dim);
            Ok(vec![c.reshape(y, &shape)?.into(), c.reshape(at, &shape)?.into()])
        }
        _ => {
            let all: Vec<usize> = (0..c.rank(x)).collect();
            one(c.reduce(if largest { ReduceKind::Amax } else { ReduceKind::Amin }, x, &all, false)?)
        }
    }
}

fn position(c: &mut Context<'_>, a: &Call<'_>, largest: bool) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let keepdim = a.bool_or("keepdim", false)?;
    if a.has("dim") && c.rank(x) > 0 {
        let dim = wrap(a.int("dim")?, c.rank(x))?;
        return one(c.op(ArgReduce { largest, dim, keepdim }, &[x])?);
    }
    let flat = c.reshape(x, &[c.ty(x).numel()])?;
    one(c.op(ArgReduce { largest, dim: 0, keepdim: false }, &[flat])?)
}

fn cumsum(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dtype = a.result_type(c, 0)?;
    let x = c.cast(x, dtype)?;
    if c.rank(x) == 0 {
        return one(x);
    }
    let dim = wrap(a.int("dim")?, c.rank(x))?;
    one(c.op(CumSum { dim }, &[x])?)
}

/// The sum of squared distances from the mean, over `n - correction`.
fn variance(c: &mut Context<'_>, a: &Call<'_>, root: bool, with_mean: bool) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dims = dims(a, c.rank(x))?;
    let keepdim = a.bool_or("keepdim", false)?;
    let unbiased = a.bool_or("unbiased", true)?;
    let correction = a.number_or("correction", if unbiased { 1.0 } else { 0.0 })?;
    let shape = c.shape(x);
    let n: usize = dims.iter().map(|&d| shape[d]).product();
    let mean = c.mean(x, &dims, true)?;
    let d = c.sub(x, mean)?;
    let d = c.mul(d, d)?;
    let d = c.sum(d, &dims, keepdim)?;
    let mut y = c.mul_scalar(d, 1.0 / (n as f64 - correction).max(0.0))?;
    if root {
        y = power(c, y, 0.5)?;
    }
    let mut results = vec![y.into()];
    if with_mean {
        let shape = c.shape(y);
        results.push(c.reshape(mean, &shape)?.into());
    }
    Ok(results)
}

fn norm(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dtype = a.result_type(c, 0)?;
    let x = c.cast(x, dtype)?;
    let dims = dims(a, c.rank(x))?;
    let keepdim = a.bool_or("keepdim", false)?;
    let p = a.number_or(if a.has("ord") { "ord" } else { "p" }, 2.0)?;
    let y = if p == 2.0 {
        let square = c.mul(x, x)?;
        let sum = c.sum(square, &dims, keepdim)?;
        power(c, sum, 0.5)?
    } else {
        let magnitude = c.unary(Unary::Abs, x)?;
        match p {
            1.0 => c.sum(magnitude, &dims, keepdim)?,
            f64::INFINITY => c.reduce(ReduceKind::Amax, magnitude, &dims, keepdim)?,
            f64::NEG_INFINITY => c.reduce(ReduceKind::Amin, magnitude, &dims, keepdim)?,
            // The number of elements that are not 0.
            0.0 => {
                let counts = c.compare_scalar(Compare::Ne, x, 0.0)?;
                let counts = c.cast(counts, dtype)?;
                c.sum(counts, &dims, keepdim)?
            }
            p => {
                let powers = power(c, magnitude, p)?;
                let sum = c.sum(powers, &dims, keepdim)?;
                power(c, sum, 1.0 / p)?
            }
        }
    };
    one(y)
}

/// A power of numbers that are not negative, with gradient 0 at 0, as in PyTorch's norms and deviations.
fn power(c: &mut Context<'_>, x: Value, exponent: f64) -> Result<Value> {
    let dtype = c.dtype(x);
    let zero = c.compare_scalar(Compare::Eq, x, 0.0)?;
    let unit = c.full(dtype, &[], 1.0)?;
    let safe = c.where_(zero, unit, x)?;
    let power = match exponent {
        0.5 => c.unary(Unary::Sqrt, safe)?,
        exponent => c.scalar(Binary::Pow, safe, exponent, false)?,
    };
    let at_zero = c.full(dtype, &[], if exponent > 0.0 { 0.0 } else { f64::INFINITY })?;
    c.where_(zero, at_zero, power)
}

fn logsumexp(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dims = dims(a, c.rank(x))?;
    let keepdim = a.bool_or("keepdim", false)?;
    // The maximum is subtracted and added again, so it needs no gradient. An infinite one would give NaN.
    let max = c.reduce(ReduceKind::Amax, x, &dims, true)?;
    let max = c.detach(max)?;
    let size = c.unary(Unary::Abs, max)?;
    let infinite = c.compare_scalar(Compare::Eq, size, f64::INFINITY)?;
    let zero = c.full(c.dtype(max), &[], 0.0)?;
    let max = c.where_(infinite, zero, max)?;
    let shifted = c.sub(x, max)?;
    let e = c.unary(Unary::Exp, shifted)?;
    let sum = c.sum(e, &dims, keepdim)?;
    let log = c.unary(Unary::Log, sum)?;
    let shape = c.shape(log);
    let max = c.reshape(max, &shape)?;
    one(c.add(log, max)?)
}

/// The differences of neighbours along a dimension, `n` times.
fn diff(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let mut x = a.value(c, "self")?;
    let dim = wrap(a.int_or("dim", -1)?, c.rank(x))?;
    let parts = [a.optional(c, "prepend")?, Some(x), a.optional(c, "append")?];
    let parts: Vec<Value> = parts.into_iter().flatten().collect();
    x = c.cat(&parts, dim)?;
    for _ in 0..a.int_or("n", 1)?.clamp(0, 64) {
        let size = c.shape(x).get(dim).copied().unwrap_or(0);
        if size == 0 {
            break;
        }
        let later = c.slice(x, dim, 1, size, 1)?;
        let earlier = c.slice(x, dim, 0, size - 1, 1)?;
        x = match c.dtype(x) {
            DType::Bool => c.compare(Compare::Ne, later, earlier)?,
            _ => c.sub(later, earlier)?,
        };
    }
    one(x)
}
