//! Gradients and decompositions of `ops/elementwise.rs`.

use super::context::{Backward, GraphRules};
use crate::ops::{
    Approximate, Binary, BinaryScalar, Cast, Clamp, Compare, CompareScalar, Gelu, GeluBackward, Logical,
    ThresholdBackward, Unary, Where,
};
use crate::{Builder, GraphError, TensorType, ValueId};

impl GraphRules for Unary {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, y, g) = (cx.inputs[0], cx.outputs[0], cx.grad(0)?);
        let b = &mut *cx.b;
        let dx = match self {
            Self::Neg => b.unary(Self::Neg, g)?,
            // d|x| = sign(x), and 0 at 0 as in PyTorch.
            Self::Abs => {
                let s = b.unary(Self::Sign, x)?;
                b.mul(g, s)?
            }
            Self::Exp => b.mul(g, y)?,
            Self::Log => b.div(g, x)?,
            // 1 / (1 + x)
            Self::Log1p => {
                let d = b.add_scalar(x, 1.0)?;
                b.div(g, d)?
            }
            // exp(x) = y + 1
            Self::Expm1 => {
                let d = b.add_scalar(y, 1.0)?;
                b.mul(g, d)?
            }
            // 1 / (2 √x) = 0.5 / y
            Self::Sqrt => {
                let q = b.div(g, y)?;
                b.mul_scalar(q, 0.5)?
            }
            // -½ x^(-3/2) = -½ y³
            Self::Rsqrt => {
                let y2 = b.mul(y, y)?;
                let y3 = b.mul(y2, y)?;
                let p = b.mul(g, y3)?;
                b.mul_scalar(p, -0.5)?
            }
            // -1/x² = -y²
            Self::Reciprocal => {
                let y2 = b.mul(y, y)?;
                let p = b.mul(g, y2)?;
                b.unary(Self::Neg, p)?
            }
            Self::Sin => {
                let c = b.unary(Self::Cos, x)?;
                b.mul(g, c)?
            }
            Self::Cos => {
                let s = b.unary(Self::Sin, x)?;
                let p = b.mul(g, s)?;
                b.unary(Self::Neg, p)?
            }
            Self::Tanh | Self::Sigmoid | Self::Erf | Self::Relu | Self::Silu | Self::Softplus => {
                return Ok(vec![activation_gradient(*self, b, x, y, g)?]);
            }
            Self::Sign | Self::Floor | Self::Ceil | Self::Round | Self::Trunc | Self::LogicalNot => {
                return Ok(vec![None]);
            }
        };
        Ok(vec![Some(dx)])
    }
}

/// The gradient of an activation function with operand `x` and result `y`, for the gradient `g` of the result.
fn activation_gradient(
    op: Unary,
    b: &mut Builder,
    x: ValueId,
    y: ValueId,
    g: ValueId,
) -> Result<Option<ValueId>, GraphError> {
    let dx = match op {
        // 1 - y²
        Unary::Tanh => {
            let y2 = b.mul(y, y)?;
            let d = b.scalar_sub(1.0, y2)?;
            b.mul(g, d)?
        }
        // y (1 - y)
        Unary::Sigmoid => {
            let d = b.scalar_sub(1.0, y)?;
            let d = b.mul(y, d)?;
            b.mul(g, d)?
        }
        // 2/√π exp(-x²)
        Unary::Erf => {
            let x2 = b.mul(x, x)?;
            let n = b.unary(Unary::Neg, x2)?;
            let e = b.unary(Unary::Exp, n)?;
            let d = b.mul_scalar(e, std::f64::consts::FRAC_2_SQRT_PI)?;
            b.mul(g, d)?
        }
        Unary::Relu => b.op(ThresholdBackward { threshold: 0.0 }, &[g, y])?,
        // σ(x) (1 + x (1 - σ(x)))
        Unary::Silu => {
            let s = b.unary(Unary::Sigmoid, x)?;
            let n = b.scalar_sub(1.0, s)?;
            let xn = b.mul(x, n)?;
            let d = b.add_scalar(xn, 1.0)?;
            let d = b.mul(s, d)?;
            b.mul(g, d)?
        }
        Unary::Softplus => {
            let s = b.unary(Unary::Sigmoid, x)?;
            b.mul(g, s)?
        }
        _ => return Ok(None),
    };
    Ok(Some(dx))
}

impl GraphRules for Binary {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (l, r, y, g) = (cx.inputs[0], cx.inputs[1], cx.outputs[0], cx.grad(0)?);
        let dl = cx.if_wanted(0, |cx| {
            let b = &mut *cx.b;
            let d = match self {
                Self::Add | Self::Sub | Self::Fmod | Self::Remainder => g,
                Self::Mul => b.mul(g, r)?,
                Self::Div => b.div(g, r)?,
                // b a^(b-1), and 0 where b is 0: there a^(b-1) may be infinite.
                Self::Pow => {
                    let e = b.sub_scalar(r, 1.0)?;
                    let p = b.op(Self::Pow, &[l, e])?;
                    let d = b.mul(r, p)?;
                    let d = b.mul(g, d)?;
                    zero_where(b, Compare::Eq, r, d)?
                }
                Self::Maximum | Self::Minimum => extremum_gradient(b, g, l, r, *self == Self::Maximum)?,
                Self::FloorDivide => zeros_like(b, g)?,
            };
            b.sum_to(d, l)
        })?;
        let dr = cx.if_wanted(1, |cx| {
            let b = &mut *cx.b;
            let d = match self {
                Self::Add => g,
                Self::Sub => b.unary(Unary::Neg, g)?,
                Self::Mul => b.mul(g, l)?,
                // -a/b² = -y/b
                Self::Div => {
                    let q = b.div(y, r)?;
                    let q = b.mul(g, q)?;
                    b.unary(Unary::Neg, q)?
                }
                // y ln a, and 0 where a is 0
                Self::Pow => {
                    let ln = b.unary(Unary::Log, l)?;
                    let ln = zero_where(b, Compare::Eq, l, ln)?;
                    let d = b.mul(y, ln)?;
                    b.mul(g, d)?
                }
                Self::Maximum | Self::Minimum => extremum_gradient(b, g, r, l, *self == Self::Maximum)?,
                // a - b trunc(a / b): -trunc(a / b)
                Self::Fmod | Self::Remainder => {
                    let q = b.div(l, r)?;
                    let rounded = if *self == Self::Fmod { Unary::Trunc } else { Unary::Floor };
                    let q = b.unary(rounded, q)?;
                    let d = b.mul(g, q)?;
                    b.unary(Unary::Neg, d)?
                }
                Self::FloorDivide => zeros_like(b, g)?,
            };
            b.sum_to(d, r)
        })?;
        Ok(vec![dl, dr])
    }
}

impl GraphRules for BinaryScalar {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, y, g, s) = (cx.inputs[0], cx.outputs[0], cx.grad(0)?, self.scalar);
        let b = &mut *cx.b;
        let dx = match (self.op, self.reverse) {
            (Binary::Add, _) | (Binary::Sub, false) | (Binary::Fmod | Binary::Remainder, false) => g,
            (Binary::Sub, true) => b.unary(Unary::Neg, g)?,
            (Binary::Mul, _) => b.mul_scalar(g, s)?,
            (Binary::Div, false) => b.div_scalar(g, s)?,
            // d(s/x) = -s/x² = -y/x
            (Binary::Div, true) => {
                let q = b.div(y, x)?;
                let q = b.mul(g, q)?;
                b.unary(Unary::Neg, q)?
            }
            // s x^(s-1)
            (Binary::Pow, false) if s == 0.0 => return Ok(vec![None]),
            (Binary::Pow, false) => {
                let p = if s == 2.0 { x } else { b.pow_scalar(x, s - 1.0)? };
                let p = b.mul_scalar(p, s)?;
                b.mul(g, p)?
            }
            // y ln s, and 0 for powers of 0 that are finite.
            (Binary::Pow, true) => {
                let d = b.mul_scalar(y, s.ln())?;
                let d = b.mul(g, d)?;
                if s == 0.0 { zero_where(b, Compare::Ge, x, d)? } else { d }
            }
            (Binary::Maximum | Binary::Minimum, _) => {
                let ty = b.ty(x).clone();
                let other = b.full(TensorType::new(ty.dtype, []), s)?;
                extremum_gradient(b, g, x, other, self.op == Binary::Maximum)?
            }
            (Binary::Fmod | Binary::Remainder, true) => {
                let q = b.op(Self { op: Binary::Div, scalar: s, reverse: true }, &[x])?;
                let rounded = if self.op == Binary::Fmod { Unary::Trunc } else { Unary::Floor };
                let q = b.unary(rounded, q)?;
                let d = b.mul(g, q)?;
                b.unary(Unary::Neg, d)?
            }
            (Binary::FloorDivide, _) => return Ok(vec![None]),
        };
        Ok(vec![Some(dx)])
    }
}

impl GraphRules for Compare {
    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![None, None])
    }
}

impl GraphRules for CompareScalar {
    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![None])
    }
}

impl GraphRules for Logical {
    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![None, None])
    }
}

impl GraphRules for Where {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (c, g) = (cx.inputs[0], cx.grad(0)?);
        let zero = cx.b.zero_like_scalar(g)?;
        let da = cx.if_wanted(1, |cx| {
            let d = cx.b.where_(c, g, zero)?;
            cx.b.sum_to(d, cx.inputs[1])
        })?;
        let db = cx.if_wanted(2, |cx| {
            let d = cx.b.where_(c, zero, g)?;
            cx.b.sum_to(d, cx.inputs[2])
        })?;
        Ok(vec![None, da, db])
    }
}

impl GraphRules for Clamp {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, mut g) = (cx.inputs[0], cx.grad(0)?);
        let b = &mut *cx.b;
        let zero = b.zero_like_scalar(g)?;
        let inside = if self.open { [Compare::Gt, Compare::Lt] } else { [Compare::Ge, Compare::Le] };
        for (op, bound) in inside.into_iter().zip([self.min, self.max]) {
            if let Some(bound) = bound {
                let inside = b.compare_scalar(op, x, bound)?;
                g = b.where_(inside, g, zero)?;
            }
        }
        Ok(vec![Some(g)])
    }
}

impl GraphRules for Cast {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let from = cx.b.ty(cx.inputs[0]).dtype;
        if !(from.is_float() && self.dtype.is_float()) {
            return Ok(vec![None]);
        }
        let g = cx.grad(0)?;
        Ok(vec![Some(cx.b.cast(g, from)?)])
    }
}

const TANH_CUBIC: f64 = 0.044_715;

/// √(2/π)
fn tanh_scale() -> f64 {
    (2.0 / std::f64::consts::PI).sqrt()
}

impl GraphRules for Gelu {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, g) = (cx.inputs[0], cx.grad(0)?);
        Ok(vec![Some(cx.b.op(GeluBackward { approximate: self.approximate }, &[g, x])?)])
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let x = inputs[0];
        let cdf = match self.approximate {
            Approximate::None => {
                let z = b.mul_scalar(x, std::f64::consts::FRAC_1_SQRT_2)?;
                b.unary(Unary::Erf, z)?
            }
            Approximate::Tanh => {
                let u = tanh_argument(b, x)?;
                b.unary(Unary::Tanh, u)?
            }
        };
        let c = b.add_scalar(cdf, 1.0)?;
        let h = b.mul_scalar(x, 0.5)?;
        Ok(Some(vec![b.mul(h, c)?]))
    }
}

/// √(2/π) (x + 0.044715 x³)
fn tanh_argument(b: &mut Builder, x: ValueId) -> Result<ValueId, GraphError> {
    let x2 = b.mul(x, x)?;
    let c = b.mul_scalar(x2, TANH_CUBIC)?;
    let c = b.add_scalar(c, 1.0)?;
    let c = b.mul(x, c)?;
    b.mul_scalar(c, tanh_scale())
}

impl GraphRules for GeluBackward {
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let (g, x) = (inputs[0], inputs[1]);
        let d = match self.approximate {
            // Φ(x) + x φ(x), φ(x) = exp(-x²/2) / √(2π)
            Approximate::None => {
                let z = b.mul_scalar(x, std::f64::consts::FRAC_1_SQRT_2)?;
                let e = b.unary(Unary::Erf, z)?;
                let e = b.add_scalar(e, 1.0)?;
                let cdf = b.mul_scalar(e, 0.5)?;
                let x2 = b.mul(x, x)?;
                let h = b.mul_scalar(x2, -0.5)?;
                let p = b.unary(Unary::Exp, h)?;
                let p = b.mul_scalar(p, 1.0 / std::f64::consts::TAU.sqrt())?;
                let xp = b.mul(x, p)?;
                b.add(cdf, xp)?
            }
            // With t = tanh(u): ½ (1 + t) + ½ x (1 - t²) u', u' = √(2/π) (1 + 3·0.044715 x²)
            Approximate::Tanh => {
                let u = tanh_argument(b, x)?;
                let t = b.unary(Unary::Tanh, u)?;
                let left = b.add_scalar(t, 1.0)?;
                let t2 = b.mul(t, t)?;
                let s = b.scalar_sub(1.0, t2)?;
                let x2 = b.mul(x, x)?;
                let du = b.mul_scalar(x2, 3.0 * TANH_CUBIC)?;
                let du = b.add_scalar(du, 1.0)?;
                let du = b.mul_scalar(du, tanh_scale())?;
                let r = b.mul(s, du)?;
                let r = b.mul(x, r)?;
                let d = b.add(left, r)?;
                b.mul_scalar(d, 0.5)?
            }
        };
        Ok(Some(vec![b.mul(g, d)?]))
    }
}

impl GraphRules for ThresholdBackward {
    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let keep = b.compare_scalar(Compare::Gt, inputs[1], self.threshold)?;
        let zero = b.zero_like_scalar(inputs[0])?;
        Ok(Some(vec![b.where_(keep, inputs[0], zero)?]))
    }
}

/// `value`, replaced by 0 where `x` compares with 0 as `op` says.
fn zero_where(b: &mut Builder, op: Compare, x: ValueId, value: ValueId) -> Result<ValueId, GraphError> {
    let hit = b.compare_scalar(op, x, 0.0)?;
    let zero = b.zero_like_scalar(value)?;
    b.where_(hit, zero, value)
}

fn zeros_like(b: &mut Builder, x: ValueId) -> Result<ValueId, GraphError> {
    let ty = b.ty(x).clone();
    b.full(ty, 0.0)
}

/// The gradient of `l` in the maximum (or minimum) of `l` and `r`: all of `g` where `l` wins, half where they are
/// equal.
fn extremum_gradient(b: &mut Builder, g: ValueId, l: ValueId, r: ValueId, max: bool) -> Result<ValueId, GraphError> {
    let wins = b.op(if max { Compare::Gt } else { Compare::Lt }, &[l, r])?;
    let ties = b.op(Compare::Eq, &[l, r])?;
    let half = b.mul_scalar(g, 0.5)?;
    let zero = b.zero_like_scalar(g)?;
    let rest = b.where_(ties, half, zero)?;
    b.where_(wins, g, rest)
}
