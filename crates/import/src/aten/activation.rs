//! Activation functions.

use fusionllm_graph::ops::{Approximate, Clamp, Compare, Gelu, Unary};

use super::elementwise::{operand, unary};
use super::entry::{entries, one};
use crate::call::{Call, Output, wrap};
use crate::context::{Context, Result, Value};

entries! {
    "relu" ["default"] => |c, a| unary(c, a, Unary::Relu),
    "silu" ["default"] => |c, a| unary(c, a, Unary::Silu),
    "softplus" ["default"] => softplus,
    "gelu" ["default"] => gelu,
    "log_sigmoid" ["default"] => log_sigmoid,
    "log_sigmoid_forward" ["default"] => log_sigmoid,
    "mish" ["default"] => mish,
    "elu" ["default"] => elu,
    "celu" ["default"] => celu,
    "selu" ["default"] => selu,
    "leaky_relu" ["default"] => leaky_relu,
    "prelu" ["default"] => prelu,
    "_prelu_kernel" ["default"] => prelu,
    "threshold" ["default"] => threshold,
    "hardtanh" ["default"] => |c, a| {
        let bounds = (a.number_or("min_val", -1.0)?, a.number_or("max_val", 1.0)?);
        hard_clamp(c, a, bounds)
    },
    "relu6" ["default"] => |c, a| hard_clamp(c, a, (0.0, 6.0)),
    "hardsigmoid" ["default"] => hardsigmoid,
    "hardswish" ["default"] => hardswish,
    "glu" ["default"] => glu,
}

/// `ln(1 + exp(beta x)) / beta`, and `x` itself where `beta x` is above the threshold.
fn softplus(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let beta = a.number_or("beta", 1.0)?;
    let scaled = c.mul_scalar(x, beta)?;
    let y = c.unary(Unary::Softplus, scaled)?;
    let y = c.mul_scalar(y, 1.0 / beta)?;
    let linear = c.compare_scalar(Compare::Gt, scaled, a.number_or("threshold", 20.0)?)?;
    one(c.where_(linear, x, y)?)
}

fn gelu(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let approximate = if a.string("approximate") == Some("tanh") { Approximate::Tanh } else { Approximate::None };
    one(c.op(Gelu { approximate }, &[x])?)
}

/// `-softplus(-x)`
fn log_sigmoid(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let x = c.unary(Unary::Neg, x)?;
    let y = c.unary(Unary::Softplus, x)?;
    let y = c.unary(Unary::Neg, y)?;
    Ok(vec![y.into(), Output::Unavailable])
}

fn mish(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let s = c.unary(Unary::Softplus, x)?;
    let t = c.unary(Unary::Tanh, s)?;
    one(c.mul(x, t)?)
}

/// `scale · x` where x is positive, else `scale · alpha (exp(input_scale x) - 1)`
fn exponential_unit(c: &mut Context<'_>, x: Value, alpha: f64, scale: f64, input_scale: f64) -> Result<Value> {
    // The operand is clamped first, because an overflow in the branch not taken would make the gradient NaN.
    let low = c.op(Clamp { min: None, max: Some(0.0), open: false }, &[x])?;
    let low = c.mul_scalar(low, input_scale)?;
    let low = c.unary(Unary::Expm1, low)?;
    let low = c.mul_scalar(low, alpha * scale)?;
    let high = c.mul_scalar(x, scale)?;
    let positive = c.compare_scalar(Compare::Gt, x, 0.0)?;
    c.where_(positive, high, low)
}

fn elu(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let (alpha, scale) = (a.number_or("alpha", 1.0)?, a.number_or("scale", 1.0)?);
    one(exponential_unit(c, x, alpha, scale, a.number_or("input_scale", 1.0)?)?)
}

fn celu(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let alpha = a.number_or("alpha", 1.0)?;
    one(exponential_unit(c, x, alpha, 1.0, 1.0 / alpha)?)
}

/// The constants of Klambauer et al., 2017.
fn selu(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    one(exponential_unit(c, x, 1.673_263_242_354_377_2, 1.050_700_987_355_480_5, 1.0)?)
}

fn leaky_relu(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let low = c.mul_scalar(x, a.number_or("negative_slope", 0.01)?)?;
    let positive = c.compare_scalar(Compare::Gt, x, 0.0)?;
    one(c.where_(positive, x, low)?)
}

fn prelu(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, mut w) = (a.value(c, "self")?, a.value(c, "weight")?);
    if c.rank(w) == 1 && c.rank(x) > 2 && c.ty(w).numel() > 1 {
        let mut along = vec![1; c.rank(x)];
        along[1] = c.ty(w).numel();
        w = c.reshape(w, &along)?;
    }
    let low = c.mul(x, w)?;
    let positive = c.compare_scalar(Compare::Gt, x, 0.0)?;
    one(c.where_(positive, x, low)?)
}

fn threshold(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let above = c.compare_scalar(Compare::Gt, x, a.number_or("threshold", 0.0)?)?;
    let value = c.full(c.dtype(x), &[], a.number_or("value", 0.0)?)?;
    one(c.where_(above, x, value)?)
}

/// Clamps to bounds. As in PyTorch, the gradient is 0 at the bounds.
fn hard_clamp(c: &mut Context<'_>, a: &Call<'_>, (min, max): (f64, f64)) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    one(c.op(Clamp { min: Some(min), max: Some(max), open: true }, &[x])?)
}

fn hardsigmoid(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let x = c.add_scalar(x, 3.0)?;
    let x = c.op(Clamp { min: Some(0.0), max: Some(6.0), open: true }, &[x])?;
    one(c.mul_scalar(x, 1.0 / 6.0)?)
}

/// `x clamp(x + 3, 0, 6) / 6`. From PyTorch 2.7 on, its gradient at -3 and 3 is the gradient of the straight parts, 0
/// and 1.
fn hardswish(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let h = c.add_scalar(x, 3.0)?;
    let h = c.op(Clamp { min: Some(0.0), max: Some(6.0), open: c.torch >= (2, 7) }, &[h])?;
    let h = c.mul_scalar(h, 1.0 / 6.0)?;
    one(c.mul(x, h)?)
}

/// The first half of a dimension times the sigmoid of the second.
fn glu(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dim = wrap(a.int_or("dim", -1)?, c.rank(x))?;
    let size = c.shape(x).get(dim).copied().unwrap_or(1);
    let l = c.slice(x, dim, 0, size / 2, 1)?;
    let r = c.slice(x, dim, size / 2, size, 1)?;
    let s = c.unary(Unary::Sigmoid, r)?;
    one(c.mul(l, s)?)
}
