use candle_core::Tensor as Array;
use fusionllm_graph::DType;
use fusionllm_graph::ops::{Approximate, Binary, BinaryScalar, Clamp, Compare, Logical, Unary};

use super::{Result, candle_type, other, scalar};

pub(super) fn unary(op: Unary, x: &Array) -> Result<Array> {
    let y = match op {
        Unary::Neg => x.neg(),
        Unary::Abs => x.abs(),
        Unary::Sign => x.sign(),
        Unary::Exp => x.exp(),
        Unary::Log => x.log(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => x.sqrt().and_then(|y| y.recip()),
        Unary::Reciprocal => x.recip(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => x.neg().and_then(|y| y.exp()).and_then(|y| y.affine(1.0, 1.0)).and_then(|y| y.recip()),
        Unary::Erf => x.erf(),
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Trunc => x.lt(0.0).and_then(|below| below.where_cond(&x.ceil()?, &x.floor()?)),
        // Unlike candle's relu, this lets NaN through.
        Unary::Relu => x.maximum(0.0),
        Unary::Silu => x.silu(),
        Unary::LogicalNot => x.eq(0.0),
        Unary::Log1p | Unary::Expm1 | Unary::Round | Unary::Softplus => {
            return other(format!("{op:?} runs on the host"));
        }
    };
    Ok(y?)
}

pub(super) fn binary(op: Binary, a: &Array, b: &Array) -> Result<Array> {
    let y = match op {
        Binary::Add => a.broadcast_add(b),
        Binary::Sub => a.broadcast_sub(b),
        Binary::Mul => a.broadcast_mul(b),
        Binary::Div => a.broadcast_div(b),
        Binary::Maximum => return extremum(a.broadcast_maximum(b)?, b),
        Binary::Minimum => return extremum(a.broadcast_minimum(b)?, b),
        Binary::Pow | Binary::Fmod | Binary::Remainder | Binary::FloorDivide => {
            return other(format!("{op:?} runs on the host"));
        }
    };
    Ok(y?)
}

/// Restores NaN of the right operand `b`: candle's maximum and minimum keep only the left operand's.
fn extremum(y: Array, b: &Array) -> Result<Array> {
    let b = b.broadcast_as(y.shape())?;
    Ok(b.ne(&b)?.where_cond(&b, &y)?)
}

pub(super) fn binary_scalar(op: &BinaryScalar, x: &Array) -> Result<Array> {
    let s = op.scalar;
    let y = match (op.op, op.reverse) {
        (Binary::Add, _) => x.affine(1.0, s),
        (Binary::Sub, false) => x.affine(1.0, -s),
        (Binary::Sub, true) => x.affine(-1.0, s),
        (Binary::Mul, _) => x.affine(s, 0.0),
        (Binary::Pow, false) if s == 2.0 => x.sqr(),
        (Binary::Pow, false) => x.powf(s),
        (op, true) => return binary(op, &scalar(s, x.dtype())?, x),
        (op, false) => return binary(op, x, &scalar(s, x.dtype())?),
    };
    Ok(y?)
}

pub(super) fn compare(op: Compare, a: &Array, b: &Array) -> Result<Array> {
    let y = match op {
        Compare::Eq => a.broadcast_eq(b),
        Compare::Ne => a.broadcast_ne(b),
        Compare::Lt => a.broadcast_lt(b),
        Compare::Le => a.broadcast_le(b),
        Compare::Gt => a.broadcast_gt(b),
        Compare::Ge => a.broadcast_ge(b),
    };
    Ok(y?)
}

pub(super) fn logical(op: Logical, a: &Array, b: &Array) -> Result<Array> {
    let y = match op {
        Logical::And => a.broadcast_minimum(b),
        Logical::Or => a.broadcast_maximum(b),
        Logical::Xor => a.broadcast_ne(b),
    };
    Ok(y?)
}

/// `a` where the condition holds, else `b`, all broadcast to `shape`.
pub(super) fn select(condition: &Array, a: &Array, b: &Array, shape: &[usize]) -> Result<Array> {
    Ok(condition.broadcast_as(shape)?.where_cond(&a.broadcast_as(shape)?, &b.broadcast_as(shape)?)?)
}

pub(super) fn clamp(op: &Clamp, x: &Array) -> Result<Array> {
    let mut y = x.clone();
    if let Some(min) = op.min {
        y = y.broadcast_maximum(&scalar(min, x.dtype())?)?;
    }
    if let Some(max) = op.max {
        y = y.broadcast_minimum(&scalar(max, x.dtype())?)?;
    }
    Ok(y)
}

pub(super) fn cast(x: &Array, dtype: DType) -> Result<Array> {
    if dtype == DType::Bool {
        return Ok(x.broadcast_ne(&scalar(0.0, x.dtype())?)?);
    }
    Ok(x.to_dtype(candle_type(dtype)?)?)
}

pub(super) fn gelu(form: Approximate, x: &Array) -> Result<Array> {
    Ok(match form {
        Approximate::None => x.gelu_erf()?,
        Approximate::Tanh => x.gelu()?,
    })
}

pub(super) fn threshold_backward(threshold: f64, g: &Array, x: &Array) -> Result<Array> {
    let keep = x.broadcast_gt(&scalar(threshold, x.dtype())?)?;
    select(&keep, g, &scalar(0.0, g.dtype())?, g.dims())
}
