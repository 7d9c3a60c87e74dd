//! Losses.

use fusionllm_graph::DType;
use fusionllm_graph::ops::{Binary, Clamp, Compare, CrossEntropy, LogSoftmax, Unary};

use super::entry::{entries, one};
use crate::call::{Call, Output};
use crate::context::{Context, Result, Value};

entries! {
    "cross_entropy_loss" ["default"] => cross_entropy,
    "nll_loss" ["default"] => nll,
    "nll_loss_nd" ["default"] => nll,
    "nll_loss_forward" ["default"] => nll,
    "nll_loss2d" ["default"] => nll,
    "nll_loss2d_forward" ["default"] => nll,
    "mse_loss" ["default"] => |c, a| { let (x, y) = pair(c, a)?; let d = c.sub(x, y)?; let d = c.mul(d, d)?; reduce(c, a, d) },
    "l1_loss" ["default"] => |c, a| { let (x, y) = pair(c, a)?; let d = c.sub(x, y)?; let d = c.unary(Unary::Abs, d)?; reduce(c, a, d) },
    "smooth_l1_loss" ["default"] => |c, a| { let beta = a.number_or("beta", 1.0)?; smooth(c, a, beta, 1.0 / beta) },
    "huber_loss" ["default"] => |c, a| { let delta = a.number_or("delta", 1.0)?; smooth(c, a, delta, 1.0) },
    "binary_cross_entropy" ["default"] => binary_cross_entropy,
    "binary_cross_entropy_with_logits" ["default"] => with_logits,
    "kl_div" ["default"] => kl_div,
    "soft_margin_loss" ["default"] => soft_margin,
}

fn pair(c: &mut Context<'_>, a: &Call<'_>) -> Result<(Value, Value)> {
    let (x, y) = (a.value(c, "self")?, a.value(c, "target")?);
    let y = c.cast(y, c.dtype(x))?;
    Ok((x, y))
}

/// Applies the reduction: 0 is none, 1 the mean, 2 the sum.
fn reduce(c: &mut Context<'_>, a: &Call<'_>, x: Value) -> Result<Vec<Output>> {
    let all: Vec<usize> = (0..c.rank(x)).collect();
    one(match a.int_or("reduction", 1)? {
        0 => x,
        1 => c.mean(x, &all, false)?,
        _ => c.sum(x, &all, false)?,
    })
}

/// Reshapes logits or log-probabilities `[N, C, ..]` or `[C]` to `[rows, C]`.
fn class_last(c: &mut Context<'_>, x: Value) -> Result<Value> {
    let rank = c.rank(x);
    match rank {
        0 => Err("it needs classes".into()),
        1 => {
            let n = c.ty(x).numel();
            c.reshape(x, &[1, n])
        }
        _ => {
            let classes = c.shape(x)[1];
            let order: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
            let moved = c.permute(x, &order)?;
            let rows = c.shape(moved)[..rank - 1].iter().product();
            c.reshape(moved, &[rows, classes])
        }
    }
}

fn cross_entropy(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, target) = (a.value(c, "self")?, a.value(c, "target")?);
    let logits = class_last(c, x)?;
    let smoothing = a.number_or("label_smoothing", 0.0)?;
    let ignore_index = a.int_or("ignore_index", -100)?;
    let reduction = a.int_or("reduction", 1)?;
    if c.dtype(target).is_float() {
        // Targets are class probabilities.
        let target = class_last(c, target)?;
        let classes = c.shape(target)[1].max(1) as f64;
        let target = c.mul_scalar(target, 1.0 - smoothing)?;
        let mut target = c.add_scalar(target, smoothing / classes)?;
        if let Some(weight) = a.optional(c, "weight")? {
            target = c.mul(target, weight)?;
        }
        let log = c.op(LogSoftmax { dim: 1 }, &[logits])?;
        let each = c.mul(log, target)?;
        let each = c.sum(each, &[1], false)?;
        let each = c.unary(Unary::Neg, each)?;
        if reduction == 0 {
            let mut shape = c.shape(x);
            shape.remove(usize::from(shape.len() > 1));
            return one(c.reshape(each, &shape)?);
        }
        return reduce(c, a, each);
    }
    let rows = c.shape(logits)[0];
    let flat = c.reshape(target, &[rows])?;
    let flat = c.cast(flat, DType::I64)?;
    if smoothing == 0.0 && reduction == 1 && !a.has("weight") {
        return one(c.op(CrossEntropy { ignore_index }, &[logits, flat])?);
    }
    let log = c.op(LogSoftmax { dim: 1 }, &[logits])?;
    let likelihood = Likelihood { log, target: flat, ignore_index, weight: a.optional(c, "weight")? };
    let (hit, weights) = likelihood.losses_and_weights(c)?;
    let each = if smoothing == 0.0 {
        hit
    } else {
        // Label smoothing spreads the rest of the probability evenly over all classes.
        let classes = c.shape(log)[1].max(1) as f64;
        let spread = match likelihood.weight {
            Some(w) => c.mul(log, w)?,
            None => log,
        };
        let spread = c.sum(spread, &[1], false)?;
        let spread = c.unary(Unary::Neg, spread)?;
        let spread = likelihood.where_counted(c, spread)?;
        let spread = c.mul_scalar(spread, smoothing / classes)?;
        let hit = c.mul_scalar(hit, 1.0 - smoothing)?;
        c.add(hit, spread)?
    };
    let shape = c.shape(target);
    one(reduce_weighted(c, each, weights, reduction, &shape)?)
}

/// Log-probabilities `[rows, C]` and target classes `[rows]`.
struct Likelihood {
    log: Value,
    target: Value,
    ignore_index: i64,
    weight: Option<Value>,
}

impl Likelihood {
    /// 1 where a target counts, else 0.
    fn counts(&self, c: &mut Context<'_>) -> Result<Value> {
        let counts = c.compare_scalar(Compare::Ne, self.target, self.ignore_index as f64)?;
        c.cast(counts, c.dtype(self.log))
    }

    /// `each` with 0 where a target does not count, also instead of an infinity.
    fn where_counted(&self, c: &mut Context<'_>, each: Value) -> Result<Value> {
        let counted = c.compare_scalar(Compare::Ne, self.target, self.ignore_index as f64)?;
        let zero = c.full(c.dtype(each), &[], 0.0)?;
        c.where_(counted, each, zero)
    }

    /// The weighted negative log-probability of each target, and the weights. Both are 0 for ignored targets.
    fn losses_and_weights(&self, c: &mut Context<'_>) -> Result<(Value, Value)> {
        let rows = c.shape(self.log)[0];
        let counted = c.compare_scalar(Compare::Ne, self.target, self.ignore_index as f64)?;
        let zero = c.full(DType::I64, &[], 0.0)?;
        let safe = c.where_(counted, self.target, zero)?;
        let index = c.reshape(safe, &[rows, 1])?;
        let picked = c.gather(self.log, 1, index)?;
        let picked = c.reshape(picked, &[rows])?;
        let mut weights = self.counts(c)?;
        if let Some(weight) = self.weight {
            let own = c.gather(weight, 0, safe)?;
            weights = c.mul(weights, own)?;
        }
        let each = c.mul(picked, weights)?;
        let each = c.unary(Unary::Neg, each)?;
        Ok((self.where_counted(c, each)?, weights))
    }
}

/// Reduces the losses of the rows. The mean is weighted.
fn reduce_weighted(c: &mut Context<'_>, each: Value, weights: Value, reduction: i64, shape: &[usize]) -> Result<Value> {
    match reduction {
        0 => c.reshape(each, shape),
        1 => {
            let sum = c.sum(each, &[0], false)?;
            let total = c.sum(weights, &[0], false)?;
            c.div(sum, total)
        }
        _ => c.sum(each, &[0], false),
    }
}

fn nll(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, target) = (a.value(c, "self")?, a.value(c, "target")?);
    let log = class_last(c, x)?;
    let rows = c.shape(log)[0];
    let flat = c.reshape(target, &[rows])?;
    let likelihood = Likelihood {
        log,
        target: c.cast(flat, DType::I64)?,
        ignore_index: a.int_or("ignore_index", -100)?,
        weight: a.optional(c, "weight")?,
    };
    let (each, weights) = likelihood.losses_and_weights(c)?;
    let shape = c.shape(target);
    let loss = reduce_weighted(c, each, weights, a.int_or("reduction", 1)?, &shape)?;
    let total = c.sum(weights, &[0], false)?;
    Ok(vec![loss.into(), total.into()])
}

/// `factor ½ d²` for `|d| < bound`, else `factor bound (|d| - ½ bound)`.
fn smooth(c: &mut Context<'_>, a: &Call<'_>, bound: f64, factor: f64) -> Result<Vec<Output>> {
    let (x, y) = pair(c, a)?;
    let d = c.sub(x, y)?;
    let far = c.unary(Unary::Abs, d)?;
    if bound == 0.0 {
        return reduce(c, a, far);
    }
    let square = c.mul(d, d)?;
    let near = c.mul_scalar(square, 0.5 * factor)?;
    let close = c.compare_scalar(Compare::Lt, far, bound)?;
    let far = c.add_scalar(far, -0.5 * bound)?;
    let far = c.mul_scalar(far, factor * bound)?;
    let each = c.where_(close, near, far)?;
    reduce(c, a, each)
}

/// `-(y ln x + (1 - y) ln(1 - x))`, with logarithms of at least -100.
///
/// As in PyTorch, the gradient of `x` is `(x - y) / max(x (1 - x), 1e-12)`, which is finite at 0 and 1. It is not the
/// derivative of the value. So the value takes `x` detached, and a term that is 0 brings the gradient.
fn binary_cross_entropy(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, y) = pair(c, a)?;
    let fixed = c.detach(x)?;
    let log = |c: &mut Context<'_>, v: Value| {
        let l = c.unary(Unary::Log, v)?;
        c.scalar(Binary::Maximum, l, -100.0, false)
    };
    let l = log(c, fixed)?;
    let rest = c.scalar(Binary::Sub, fixed, 1.0, true)?;
    let r = log(c, rest)?;
    let d = c.sub(r, l)?;
    let d = c.mul(y, d)?;
    let value = c.sub(d, r)?;
    let target = c.detach(y)?;
    let distance = c.sub(fixed, target)?;
    let variance = c.mul(fixed, rest)?;
    let variance = c.op(Clamp { min: Some(1e-12), max: None, open: false }, &[variance])?;
    let slope = c.div(distance, variance)?;
    // The difference comes first: a fused product and sum would not cancel exactly.
    let zero = c.sub(x, fixed)?;
    let term = c.mul(slope, zero)?;
    let mut each = c.add(value, term)?;
    if let Some(weight) = a.optional(c, "weight")? {
        each = c.mul(each, weight)?;
    }
    reduce(c, a, each)
}

/// `(1 - y) x + (1 + (pos_weight - 1) y) softplus(-x)`
fn with_logits(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, y) = pair(c, a)?;
    let n = c.unary(Unary::Neg, x)?;
    let mut s = c.unary(Unary::Softplus, n)?;
    if let Some(weight) = a.optional(c, "pos_weight")? {
        let w = c.add_scalar(weight, -1.0)?;
        let w = c.mul(w, y)?;
        let w = c.add_scalar(w, 1.0)?;
        s = c.mul(s, w)?;
    }
    let rest = c.scalar(Binary::Sub, y, 1.0, true)?;
    let l = c.mul(rest, x)?;
    let mut each = c.add(l, s)?;
    if let Some(weight) = a.optional(c, "weight")? {
        each = c.mul(each, weight)?;
    }
    reduce(c, a, each)
}

/// `y (ln y - x)`, or `exp(y) (y - x)` if the target is a logarithm.
fn kl_div(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, y) = pair(c, a)?;
    let each = if a.bool_or("log_target", false)? {
        let e = c.unary(Unary::Exp, y)?;
        let d = c.sub(y, x)?;
        c.mul(e, d)?
    } else {
        // 0 ln 0 is 0.
        let positive = c.compare_scalar(Compare::Gt, y, 0.0)?;
        let unit = c.full(c.dtype(y), &[], 1.0)?;
        let safe = c.where_(positive, y, unit)?;
        let l = c.unary(Unary::Log, safe)?;
        let d = c.sub(l, x)?;
        c.mul(y, d)?
    };
    reduce(c, a, each)
}

/// `ln(1 + exp(-y x))`
fn soft_margin(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, y) = pair(c, a)?;
    let p = c.mul(x, y)?;
    let n = c.unary(Unary::Neg, p)?;
    let each = c.unary(Unary::Softplus, n)?;
    reduce(c, a, each)
}
