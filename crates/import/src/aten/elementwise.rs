//! Arithmetic, comparisons and functions of single elements.

use fusionllm_graph::DType;
use fusionllm_graph::ops::{Binary, Clamp, Compare, Logical, Unary};

use super::entry::{entries, one};
use crate::call::{Call, Output};
use crate::context::{Context, Result, Value};

entries! {
    "add" ["Tensor", "Scalar"] => |c, a| arithmetic(c, a, Binary::Add),
    "sub" ["Tensor", "Scalar"] => |c, a| arithmetic(c, a, Binary::Sub),
    "rsub" ["Tensor", "Scalar"] => reversed_sub,
    "mul" ["Tensor", "Scalar"] => |c, a| arithmetic(c, a, Binary::Mul),
    "multiply" ["Tensor", "Scalar"] => |c, a| arithmetic(c, a, Binary::Mul),
    "div" ["Tensor", "Scalar", "Tensor_mode", "Scalar_mode"] => divide,
    "true_divide" ["Tensor", "Scalar"] => divide,
    "floor_divide" ["default", "Scalar"] => |c, a| arithmetic(c, a, Binary::FloorDivide),
    "remainder" ["Tensor", "Scalar", "Scalar_Tensor"] => |c, a| arithmetic(c, a, Binary::Remainder),
    "fmod" ["Tensor", "Scalar"] => |c, a| arithmetic(c, a, Binary::Fmod),
    "maximum" ["default"] => |c, a| arithmetic(c, a, Binary::Maximum),
    "minimum" ["default"] => |c, a| arithmetic(c, a, Binary::Minimum),
    "pow" ["Tensor_Scalar", "Tensor_Tensor", "Scalar"] => power,
    "square" ["default"] => |c, a| { let x = operand(c, a)?; one(c.mul(x, x)?) },
    "addcmul" ["default"] => |c, a| add_product(c, a, Binary::Mul),
    "addcdiv" ["default"] => |c, a| add_product(c, a, Binary::Div),
    "lerp" ["Scalar", "Tensor"] => lerp,

    "eq" ["Tensor", "Scalar"] => |c, a| comparison(c, a, Compare::Eq),
    "ne" ["Tensor", "Scalar"] => |c, a| comparison(c, a, Compare::Ne),
    "lt" ["Tensor", "Scalar"] => |c, a| comparison(c, a, Compare::Lt),
    "le" ["Tensor", "Scalar"] => |c, a| comparison(c, a, Compare::Le),
    "gt" ["Tensor", "Scalar"] => |c, a| comparison(c, a, Compare::Gt),
    "ge" ["Tensor", "Scalar"] => |c, a| comparison(c, a, Compare::Ge),
    "logical_and" ["default"] => |c, a| logical(c, a, Logical::And),
    "logical_or" ["default"] => |c, a| logical(c, a, Logical::Or),
    "logical_xor" ["default"] => |c, a| logical(c, a, Logical::Xor),
    "logical_not" ["default"] => not,
    "bitwise_and" ["Tensor", "Scalar"] => |c, a| bitwise(c, a, Logical::And),
    "bitwise_or" ["Tensor", "Scalar"] => |c, a| bitwise(c, a, Logical::Or),
    "bitwise_xor" ["Tensor", "Scalar"] => |c, a| bitwise(c, a, Logical::Xor),
    "bitwise_not" ["default"] => bitwise_not,
    "__and__" ["Tensor", "Scalar"] => |c, a| bitwise(c, a, Logical::And),
    "__or__" ["Tensor", "Scalar"] => |c, a| bitwise(c, a, Logical::Or),
    "__xor__" ["Tensor", "Scalar"] => |c, a| bitwise(c, a, Logical::Xor),
    "isnan" ["default"] => |c, a| { let x = a.value(c, "self")?; one(c.compare(Compare::Ne, x, x)?) },
    "isinf" ["default"] => infinite,

    "neg" ["default"] => |c, a| unary(c, a, Unary::Neg),
    "abs" ["default"] => |c, a| unary(c, a, Unary::Abs),
    "sign" ["default"] => |c, a| unary(c, a, Unary::Sign),
    "sgn" ["default"] => |c, a| unary(c, a, Unary::Sign),
    "exp" ["default"] => |c, a| unary(c, a, Unary::Exp),
    "exp2" ["default"] => |c, a| { let x = operand(c, a)?; one(c.scalar(Binary::Pow, x, 2.0, true)?) },
    "expm1" ["default"] => |c, a| unary(c, a, Unary::Expm1),
    "log" ["default"] => |c, a| unary(c, a, Unary::Log),
    "log1p" ["default"] => |c, a| unary(c, a, Unary::Log1p),
    "log2" ["default"] => |c, a| logarithm(c, a, std::f64::consts::LN_2),
    "log10" ["default"] => |c, a| logarithm(c, a, std::f64::consts::LN_10),
    "sqrt" ["default"] => |c, a| unary(c, a, Unary::Sqrt),
    "rsqrt" ["default"] => |c, a| unary(c, a, Unary::Rsqrt),
    "reciprocal" ["default"] => |c, a| unary(c, a, Unary::Reciprocal),
    "sin" ["default"] => |c, a| unary(c, a, Unary::Sin),
    "cos" ["default"] => |c, a| unary(c, a, Unary::Cos),
    "tanh" ["default"] => |c, a| unary(c, a, Unary::Tanh),
    "sigmoid" ["default"] => |c, a| unary(c, a, Unary::Sigmoid),
    "erf" ["default"] => |c, a| unary(c, a, Unary::Erf),
    "floor" ["default"] => |c, a| unary(c, a, Unary::Floor),
    "ceil" ["default"] => |c, a| unary(c, a, Unary::Ceil),
    "round" ["default"] => |c, a| unary(c, a, Unary::Round),
    "trunc" ["default"] => |c, a| unary(c, a, Unary::Trunc),
    "clamp" ["default", "Tensor"] => clamp,
    "clip" ["default", "Tensor"] => clamp,
    "clamp_min" ["default", "Tensor"] => clamp,
    "clamp_max" ["default", "Tensor"] => clamp,
    "copysign" ["Tensor"] => copysign,
    "nan_to_num" ["default"] => nan_to_num,
}

/// `self`, converted to the type of the result.
pub(super) fn operand(c: &mut Context<'_>, a: &Call<'_>) -> Result<Value> {
    let x = a.value(c, "self")?;
    let dtype = a.result_type(c, 0)?;
    c.cast(x, dtype)
}

pub(super) fn unary(c: &mut Context<'_>, a: &Call<'_>, op: Unary) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let rounds = matches!(op, Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc);
    if rounds && !c.dtype(x).is_float() {
        return one(x);
    }
    if op == Unary::Relu && !c.dtype(x).is_float() {
        return one(c.scalar(Binary::Maximum, x, 0.0, false)?);
    }
    if op == Unary::Round && a.int_or("decimals", 0)? != 0 {
        return Err("rounding to decimals is not supported".into());
    }
    one(c.unary(op, x)?)
}

fn logarithm(c: &mut Context<'_>, a: &Call<'_>, base: f64) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let y = c.unary(Unary::Log, x)?;
    one(c.mul_scalar(y, 1.0 / base)?)
}

/// The operands of a binary operator, converted to the type of the result. One may be a number.
enum Operands {
    Tensors(Value, Value),
    Number(Value, f64),
    Reversed(f64, Value),
}

fn operands(c: &mut Context<'_>, a: &Call<'_>, names: [&str; 2], dtype: DType) -> Result<Operands> {
    let numbers = (a.number(names[0])?, a.number(names[1])?);
    Ok(match numbers {
        (None, None) => {
            let (x, y) = (a.value(c, names[0])?, a.value(c, names[1])?);
            Operands::Tensors(c.cast(x, dtype)?, c.cast(y, dtype)?)
        }
        (None, Some(n)) => {
            let x = a.value(c, names[0])?;
            Operands::Number(c.cast(x, dtype)?, n)
        }
        (Some(n), None) => {
            let y = a.value(c, names[1])?;
            Operands::Reversed(n, c.cast(y, dtype)?)
        }
        (Some(_), Some(_)) => return Err("neither operand is a tensor".into()),
    })
}

fn apply(c: &mut Context<'_>, op: Binary, operands: Operands) -> Result<Value> {
    match operands {
        Operands::Tensors(x, y) => c.binary(op, x, y),
        Operands::Number(x, n) => c.scalar(op, x, n, false),
        Operands::Reversed(n, y) => c.scalar(op, y, n, true),
    }
}

fn arithmetic(c: &mut Context<'_>, a: &Call<'_>, op: Binary) -> Result<Vec<Output>> {
    let dtype = a.result_type(c, 0)?;
    if dtype == DType::Bool {
        let kind = match op {
            Binary::Add | Binary::Maximum => Logical::Or,
            Binary::Mul | Binary::Minimum => Logical::And,
            _ => return Err("it is not defined for booleans".into()),
        };
        return bitwise(c, a, kind);
    }
    let mut operands = operands(c, a, ["self", "other"], dtype)?;
    let alpha = a.number_or("alpha", 1.0)?;
    if alpha != 1.0 && matches!(op, Binary::Add | Binary::Sub) {
        operands = match operands {
            Operands::Tensors(x, y) => Operands::Tensors(x, c.mul_scalar(y, alpha)?),
            Operands::Number(x, n) => Operands::Number(x, n * alpha),
            Operands::Reversed(n, y) => Operands::Reversed(n, c.mul_scalar(y, alpha)?),
        };
    }
    one(apply(c, op, operands)?)
}

/// `other - alpha · self`
fn reversed_sub(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let dtype = a.result_type(c, 0)?;
    let x = operand(c, a)?;
    let x = c.mul_scalar(x, a.number_or("alpha", 1.0)?)?;
    one(match a.number("other")? {
        Some(n) => c.scalar(Binary::Sub, x, n, true)?,
        None => {
            let y = a.value(c, "other")?;
            let y = c.cast(y, dtype)?;
            c.sub(y, x)?
        }
    })
}

fn divide(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let dtype = a.result_type(c, 0)?;
    let mode = a.string("rounding_mode");
    let operands = operands(c, a, ["self", "other"], dtype)?;
    one(match mode {
        None => apply(c, Binary::Div, operands)?,
        Some("floor") => apply(c, Binary::FloorDivide, operands)?,
        Some("trunc") if dtype.is_float() => {
            let q = apply(c, Binary::Div, operands)?;
            c.unary(Unary::Trunc, q)?
        }
        // Without the remainder the division is exact.
        Some("trunc") => {
            let (x, y) = match operands {
                Operands::Tensors(x, y) => (x, y),
                Operands::Number(x, n) => (x, c.full(dtype, &[], n)?),
                Operands::Reversed(n, y) => (c.full(dtype, &[], n)?, y),
            };
            let r = c.binary(Binary::Fmod, x, y)?;
            let even = c.sub(x, r)?;
            c.binary(Binary::FloorDivide, even, y)?
        }
        Some(other) => return Err(format!("the rounding mode {other:?} is not supported").into()),
    })
}

fn power(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let dtype = a.result_type(c, 0)?;
    if !dtype.is_float() {
        // Doubles represent integers up to 2⁵³ exactly.
        let operands = operands(c, a, ["self", "exponent"], DType::F64)?;
        let y = apply(c, Binary::Pow, operands)?;
        let y = c.unary(Unary::Round, y)?;
        return one(c.cast(y, dtype)?);
    }
    let operands = operands(c, a, ["self", "exponent"], dtype)?;
    one(match operands {
        Operands::Number(x, 1.0) => x,
        Operands::Number(x, 2.0) => c.mul(x, x)?,
        Operands::Number(x, 0.5) => c.unary(Unary::Sqrt, x)?,
        Operands::Number(x, -0.5) => c.unary(Unary::Rsqrt, x)?,
        Operands::Number(x, -1.0) => c.unary(Unary::Reciprocal, x)?,
        Operands::Number(x, 3.0) => {
            let square = c.mul(x, x)?;
            c.mul(square, x)?
        }
        operands => apply(c, Binary::Pow, operands)?,
    })
}

/// `self + value · tensor1 op tensor2`
fn add_product(c: &mut Context<'_>, a: &Call<'_>, op: Binary) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let dtype = c.dtype(x);
    let (l, r) = (a.value(c, "tensor1")?, a.value(c, "tensor2")?);
    let (l, r) = (c.cast(l, dtype)?, c.cast(r, dtype)?);
    let p = c.binary(op, l, r)?;
    let p = c.mul_scalar(p, a.number_or("value", 1.0)?)?;
    one(c.add(x, p)?)
}

/// `self + weight (end - self)`
fn lerp(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, end) = (a.value(c, "self")?, a.value(c, "end")?);
    let d = c.sub(end, x)?;
    let d = match a.number("weight")? {
        Some(w) => c.mul_scalar(d, w)?,
        None => {
            let w = a.value(c, "weight")?;
            c.mul(d, w)?
        }
    };
    one(c.add(x, d)?)
}

/// The common type of two operands by PyTorch's promotion. A scalar counts only if its kind (boolean, integer, float)
/// is higher.
fn promoted(c: &Context<'_>, x: Value, y: Value) -> DType {
    let kind = |d: DType| match d {
        DType::Bool => 0,
        DType::I32 | DType::I64 => 1,
        _ => 2,
    };
    let (a, b) = (c.dtype(x), c.dtype(y));
    let (ranked_a, ranked_b) = (c.rank(x) > 0, c.rank(y) > 0);
    if kind(a) != kind(b) {
        return if kind(a) > kind(b) { a } else { b };
    }
    match (a, b) {
        _ if a == b => a,
        _ if ranked_a && !ranked_b => a,
        _ if ranked_b && !ranked_a => b,
        (DType::F64, _) | (_, DType::F64) => DType::F64,
        (DType::I64, _) | (_, DType::I64) => DType::I64,
        _ => DType::F32,
    }
}

fn comparison(c: &mut Context<'_>, a: &Call<'_>, op: Compare) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    if let Some(n) = a.number("other")? {
        let dtype = match c.dtype(x) {
            DType::Bool => DType::I64,
            // An integer tensor and a fraction.
            d if !d.is_float() && n.fract() != 0.0 => DType::F64,
            d => d,
        };
        let x = c.cast(x, dtype)?;
        return one(c.compare_scalar(op, x, n)?);
    }
    let y = a.value(c, "other")?;
    let dtype = match promoted(c, x, y) {
        DType::Bool => DType::I64,
        d => d,
    };
    let (x, y) = (c.cast(x, dtype)?, c.cast(y, dtype)?);
    one(c.compare(op, x, y)?)
}

fn to_bool(c: &mut Context<'_>, x: Value) -> Result<Value> {
    c.cast(x, DType::Bool)
}

fn logical(c: &mut Context<'_>, a: &Call<'_>, op: Logical) -> Result<Vec<Output>> {
    let (x, y) = (a.value(c, "self")?, a.value(c, "other")?);
    let (x, y) = (to_bool(c, x)?, to_bool(c, y)?);
    one(c.op(op, &[x, y])?)
}

/// Logic on booleans. On the bits of integers it is not supported.
fn bitwise(c: &mut Context<'_>, a: &Call<'_>, op: Logical) -> Result<Vec<Output>> {
    let dtype = a.result_type(c, 0)?;
    let x = a.value(c, "self")?;
    let y = match a.number("other")? {
        Some(n) => c.full(dtype, &[], n)?,
        None => a.value(c, "other")?,
    };
    if dtype != DType::Bool {
        return Err("bitwise logic on integers is not supported".into());
    }
    one(c.op(op, &[x, y])?)
}

fn not(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let x = to_bool(c, x)?;
    one(c.unary(Unary::LogicalNot, x)?)
}

fn bitwise_not(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    if c.dtype(x) == DType::Bool {
        return one(c.unary(Unary::LogicalNot, x)?);
    }
    // In two's complement -x - 1.
    one(c.scalar(Binary::Sub, x, -1.0, true)?)
}

fn infinite(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let x = c.unary(Unary::Abs, x)?;
    one(c.compare_scalar(Compare::Eq, x, f64::INFINITY)?)
}

/// The release of PyTorch that changed the gradients of `clamp`. From it on, an element at a bound gets the gradient 0,
/// and one that equals a tensor of bounds shares the gradient with it. In earlier releases the element gets all of it.
const CLAMP_OPENED: (u32, u32) = (2, 14);

fn clamp(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = operand(c, a)?;
    let (min, max) = (a.number("min")?, a.number("max")?);
    if min.is_some() || max.is_some() {
        return one(c.op(Clamp { min, max, open: c.torch >= CLAMP_OPENED }, &[x])?);
    }
    let dtype = c.dtype(x);
    let bound = |c: &mut Context<'_>, name: &str| -> Result<Option<Value>> {
        a.optional(c, name)?.map(|v| c.cast(v, dtype)).transpose()
    };
    let (min, max) = (bound(c, "min")?, bound(c, "max")?);
    if c.torch < CLAMP_OPENED {
        return one(clamp_to_tensors(c, x, min, max)?);
    }
    let mut y = x;
    for (bound, op) in [(min, Binary::Maximum), (max, Binary::Minimum)] {
        if let Some(bound) = bound {
            y = c.binary(op, y, bound)?;
        }
    }
    if let (Some(low), Some(high)) = (min, max) {
        // Between equal bounds, an element that equals them gets the whole gradient.
        let equal = c.compare(Compare::Eq, low, high)?;
        let strict = clamp_to_tensors(c, x, min, max)?;
        y = c.where_(equal, strict, y)?;
    }
    one(y)
}

/// Limits elements by choices. The gradient goes to the element or to one of its bounds, and to the element if they are
/// equal.
fn clamp_to_tensors(c: &mut Context<'_>, x: Value, min: Option<Value>, max: Option<Value>) -> Result<Value> {
    let mut y = x;
    for (bound, beyond) in [(min, Compare::Lt), (max, Compare::Gt)] {
        if let Some(bound) = bound {
            let outside = c.compare(beyond, y, bound)?;
            y = c.where_(outside, bound, y)?;
        }
    }
    Ok(y)
}

fn copysign(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let (x, y) = (a.value(c, "self")?, a.value(c, "other")?);
    let x = c.unary(Unary::Abs, x)?;
    let n = c.unary(Unary::Neg, x)?;
    // Only the reciprocal shows the sign of a negative zero, and only `y` itself shows the sign of an infinity.
    let negative = c.compare_scalar(Compare::Lt, y, 0.0)?;
    let inverse = c.unary(Unary::Reciprocal, y)?;
    let inverse = c.compare_scalar(Compare::Lt, inverse, 0.0)?;
    let negative = c.op(Logical::Or, &[negative, inverse])?;
    one(c.where_(negative, n, x)?)
}

fn nan_to_num(c: &mut Context<'_>, a: &Call<'_>) -> Result<Vec<Output>> {
    let x = a.value(c, "self")?;
    let dtype = c.dtype(x);
    let largest = match dtype {
        DType::F64 => f64::MAX,
        DType::F16 => 65504.0,
        _ => f32::MAX.into(),
    };
    let number = c.compare(Compare::Eq, x, x)?;
    let nan = c.full(dtype, &[], a.number_or("nan", 0.0)?)?;
    let mut y = c.where_(number, x, nan)?;
    for (infinity, name, default) in [(f64::INFINITY, "posinf", largest), (f64::NEG_INFINITY, "neginf", -largest)] {
        let hit = c.compare_scalar(Compare::Eq, y, infinity)?;
        let limit = c.full(dtype, &[], a.number_or(name, default)?)?;
        y = c.where_(hit, limit, y)?;
    }
    one(y)
}
