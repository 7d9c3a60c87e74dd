use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{Approximate, Binary, BinaryScalar, Clamp, Compare, Logical, Unary};

use super::{Array, Elements, indices};

/// `2/√π exp(-x²) Σ 2ⁿ x^(2n+1) / (1·3·…·(2n+1))`: all terms have one sign, so nothing cancels (Abramowitz and
/// Stegun, 7.1.6).
pub(super) fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-18 * sum.abs() {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

pub(super) fn unary(op: Unary, x: &Array) -> Result<Elements, String> {
    if let Elements::Int(v) = &x.elements {
        let f: fn(i64) -> i64 = match op {
            Unary::Neg => i64::wrapping_neg,
            Unary::Abs => i64::wrapping_abs,
            Unary::Sign => i64::signum,
            Unary::LogicalNot => |v| i64::from(v == 0),
            _ => return Err(format!("{op:?} of integers")),
        };
        return Ok(Elements::Int(v.iter().map(|&v| f(v)).collect()));
    }
    let f: fn(f64) -> f64 = match op {
        Unary::Neg => |v| -v,
        Unary::Abs => f64::abs,
        Unary::Sign => |v| {
            if v > 0.0 {
                1.0
            } else if v < 0.0 {
                -1.0
            } else {
                0.0
            }
        },
        Unary::Exp => f64::exp,
        Unary::Log => f64::ln,
        Unary::Log1p => f64::ln_1p,
        Unary::Expm1 => f64::exp_m1,
        Unary::Sqrt => f64::sqrt,
        Unary::Rsqrt => |v| 1.0 / v.sqrt(),
        Unary::Reciprocal => |v| 1.0 / v,
        Unary::Sin => f64::sin,
        Unary::Cos => f64::cos,
        Unary::Tanh => f64::tanh,
        Unary::Sigmoid => |v| 1.0 / (1.0 + (-v).exp()),
        Unary::Erf => erf,
        Unary::Floor => f64::floor,
        Unary::Ceil => f64::ceil,
        Unary::Round => f64::round_ties_even,
        Unary::Trunc => f64::trunc,
        Unary::Relu => |v| if v < 0.0 { 0.0 } else { v },
        Unary::Silu => |v| v / (1.0 + (-v).exp()),
        Unary::Softplus => |v| if v > 30.0 { v } else { v.exp().ln_1p() },
        Unary::LogicalNot => return Err("logical_not of floats".into()),
    };
    Ok(Elements::Float(x.floats()?.iter().map(|&v| f(v)).collect()))
}

fn float_pair(op: Binary, a: f64, b: f64) -> f64 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Pow => a.powf(b),
        // NaN in either operand is the result.
        Binary::Maximum | Binary::Minimum if a.is_nan() || b.is_nan() => f64::NAN,
        Binary::Maximum => a.max(b),
        Binary::Minimum => a.min(b),
        Binary::Fmod => a - b * (a / b).trunc(),
        Binary::Remainder => a - b * (a / b).floor(),
        Binary::FloorDivide => (a / b).floor(),
    }
}

fn int_pair(op: Binary, a: i64, b: i64) -> Result<i64, String> {
    let rounds_down = |q: i64| q - i64::from(a % b != 0 && (a < 0) != (b < 0));
    match op {
        Binary::Add => Ok(a.wrapping_add(b)),
        Binary::Sub => Ok(a.wrapping_sub(b)),
        Binary::Mul => Ok(a.wrapping_mul(b)),
        Binary::Maximum => Ok(a.max(b)),
        Binary::Minimum => Ok(a.min(b)),
        Binary::Div | Binary::Pow => Err(format!("{op:?} of integers")),
        _ if b == 0 => Err("an integer is divided by zero".into()),
        Binary::Fmod => Ok(a - b * (a / b)),
        Binary::Remainder => Ok(a - b * rounds_down(a / b)),
        Binary::FloorDivide => Ok(rounds_down(a / b)),
    }
}

/// `f` over two broadcast operands, as float or integer pairs.
fn pairs<F, I>(
    a: &Array,
    b: &Array,
    shape: &[usize],
    float: impl Fn(f64, f64) -> F,
    int: impl Fn(i64, i64) -> Result<I, String>,
) -> Result<(Vec<F>, Vec<I>), String> {
    let at = indices(shape).map(|i| (a.broadcast_at(&i), b.broadcast_at(&i)));
    match (&a.elements, &b.elements) {
        (Elements::Float(x), Elements::Float(y)) => Ok((at.map(|(i, j)| float(x[i], y[j])).collect(), Vec::new())),
        (Elements::Int(x), Elements::Int(y)) => {
            Ok((Vec::new(), at.map(|(i, j)| int(x[i], y[j])).collect::<Result<_, _>>()?))
        }
        _ => Err(format!("{} and {} are not of one type", a.ty, b.ty)),
    }
}

pub(super) fn binary(op: Binary, a: &Array, b: &Array, out: &TensorType) -> Result<Elements, String> {
    let (floats, ints) = pairs(a, b, &out.shape, |x, y| float_pair(op, x, y), |x, y| int_pair(op, x, y))?;
    Ok(if out.dtype.is_float() { Elements::Float(floats) } else { Elements::Int(ints) })
}

pub(super) fn binary_scalar(op: &BinaryScalar, x: &Array) -> Result<Elements, String> {
    let scalar = Array::filled(TensorType::new(x.ty.dtype, []), op.scalar);
    let (a, b) = if op.reverse { (&scalar, x) } else { (x, &scalar) };
    binary(op.op, a, b, &x.ty)
}

pub(super) fn compare(op: Compare, a: &Array, b: &Array, out: &TensorType) -> Result<Elements, String> {
    fn holds<T: PartialOrd>(op: Compare, a: T, b: T) -> i64 {
        i64::from(match op {
            Compare::Eq => a == b,
            Compare::Ne => a != b,
            Compare::Lt => a < b,
            Compare::Le => a <= b,
            Compare::Gt => a > b,
            Compare::Ge => a >= b,
        })
    }
    let (f, i) = pairs(a, b, &out.shape, |x, y| holds(op, x, y), |x, y| Ok(holds(op, x, y)))?;
    Ok(Elements::Int(if a.ty.dtype.is_float() { f } else { i }))
}

pub(super) fn logical(op: Logical, a: &Array, b: &Array, out: &TensorType) -> Result<Elements, String> {
    let f = |x: i64, y: i64| match op {
        Logical::And => x & y,
        Logical::Or => x | y,
        Logical::Xor => x ^ y,
    };
    Ok(Elements::Int(pairs(a, b, &out.shape, |_, _| (), |x, y| Ok(f(x, y)))?.1))
}

pub(super) fn select(c: &Array, a: &Array, b: &Array, out: &TensorType) -> Result<Elements, String> {
    let condition = c.ints()?;
    let mut result = Array::filled(out.clone(), 0.0).elements;
    for (to, i) in indices(&out.shape).enumerate() {
        let from = if condition[c.broadcast_at(&i)] != 0 { a } else { b };
        result.put(to, &from.elements, from.broadcast_at(&i), false);
    }
    Ok(result)
}

pub(super) fn clamp(op: &Clamp, x: &Array) -> Result<Elements, String> {
    let mut result = x.elements.clone();
    for (bound, kind) in [(op.min, Binary::Maximum), (op.max, Binary::Minimum)] {
        if let Some(scalar) = bound {
            let limited = Array { ty: x.ty.clone(), elements: result };
            result = binary_scalar(&BinaryScalar { op: kind, scalar, reverse: false }, &limited)?;
        }
    }
    Ok(result)
}

const CUBIC: f64 = 0.044_715;

fn tanh_argument(x: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (x + CUBIC * x.powi(3))
}

fn normal_cdf(x: f64) -> f64 {
    0.5 * (1.0 + erf(x / 2f64.sqrt()))
}

pub(super) fn gelu(form: Approximate, x: &Array) -> Result<Elements, String> {
    let f = |x: f64| match form {
        Approximate::None => x * normal_cdf(x),
        Approximate::Tanh => 0.5 * x * (1.0 + tanh_argument(x).tanh()),
    };
    Ok(Elements::Float(x.floats()?.iter().map(|&v| f(v)).collect()))
}

pub(super) fn gelu_backward(form: Approximate, g: &Array, x: &Array) -> Result<Elements, String> {
    let f = |x: f64| match form {
        // d (x Φ(x)) = Φ(x) + x φ(x)
        Approximate::None => normal_cdf(x) + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt(),
        // With u the argument of t = tanh: ½ (1 + t) + ½ x (1 - t²) u'
        Approximate::Tanh => {
            let t = tanh_argument(x).tanh();
            let du = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * CUBIC * x * x);
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du
        }
    };
    Ok(Elements::Float(g.floats()?.iter().zip(x.floats()?).map(|(g, &x)| g * f(x)).collect()))
}

pub(super) fn threshold_backward(threshold: f64, g: &Array, x: &Array) -> Result<Elements, String> {
    let pairs = g.floats()?.iter().zip(x.floats()?);
    Ok(Elements::Float(pairs.map(|(&g, &x)| if x > threshold { g } else { 0.0 }).collect()))
}
