//! Operators that work element by element, with broadcasting.

use serde::{Deserialize, Serialize};

use super::{Backward, Cost, Operator, args, float, of_type, same_dtype, want};
use crate::{Builder, DType, GraphError, TensorType, ValueId};

/// The shape to which `shapes` broadcast (aligned at the last dimension; a size of 1 stretches), or what does not fit.
pub fn broadcast_shapes(shapes: &[&[usize]]) -> Result<Vec<usize>, String> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut out = vec![1usize; rank];
    for s in shapes {
        for (o, &d) in out[rank - s.len()..].iter_mut().zip(*s) {
            if *o == 1 {
                *o = d;
            } else if d != 1 && d != *o {
                return Err(format!("shapes {shapes:?} do not broadcast"));
            }
        }
    }
    Ok(out)
}

/// One operand in, one result of the same shape and type out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Unary {
    Neg,
    Abs,
    Sign,
    Exp,
    Log,
    Log1p,
    Expm1,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Sin,
    Cos,
    Tanh,
    Sigmoid,
    Erf,
    Floor,
    Ceil,
    Round,
    Trunc,
    Relu,
    Silu,
    Softplus,
    LogicalNot,
}

impl Unary {
    /// Every kind, for suites and tables.
    pub const ALL: [Self; 23] = [
        Self::Neg,
        Self::Abs,
        Self::Sign,
        Self::Exp,
        Self::Log,
        Self::Log1p,
        Self::Expm1,
        Self::Sqrt,
        Self::Rsqrt,
        Self::Reciprocal,
        Self::Sin,
        Self::Cos,
        Self::Tanh,
        Self::Sigmoid,
        Self::Erf,
        Self::Floor,
        Self::Ceil,
        Self::Round,
        Self::Trunc,
        Self::Relu,
        Self::Silu,
        Self::Softplus,
        Self::LogicalNot,
    ];
}

impl Operator for Unary {
    fn name(&self) -> &'static str {
        match self {
            Self::Neg => "neg",
            Self::Abs => "abs",
            Self::Sign => "sign",
            Self::Exp => "exp",
            Self::Log => "log",
            Self::Log1p => "log1p",
            Self::Expm1 => "expm1",
            Self::Sqrt => "sqrt",
            Self::Rsqrt => "rsqrt",
            Self::Reciprocal => "reciprocal",
            Self::Sin => "sin",
            Self::Cos => "cos",
            Self::Tanh => "tanh",
            Self::Sigmoid => "sigmoid",
            Self::Erf => "erf",
            Self::Floor => "floor",
            Self::Ceil => "ceil",
            Self::Round => "round",
            Self::Trunc => "trunc",
            Self::Relu => "relu",
            Self::Silu => "silu",
            Self::Softplus => "softplus",
            Self::LogicalNot => "logical_not",
        }
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        match self {
            Self::LogicalNot => of_type(x, DType::Bool, "the operand")?,
            Self::Neg | Self::Abs | Self::Sign => want(x.dtype != DType::Bool, || format!("needs numbers, got {x}"))?,
            _ => float(x)?,
        }
        Ok(vec![x.clone()])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, y, g) = (cx.inputs[0], cx.outputs[0], cx.grad(0)?);
        let b = &mut *cx.b;
        let dx = match self {
            Self::Neg => b.unary(Self::Neg, g)?,
            // d|x| = sign(x), 0 at 0 as PyTorch has it.
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
            // 1 - y²
            Self::Tanh => {
                let y2 = b.mul(y, y)?;
                let d = b.scalar_sub(1.0, y2)?;
                b.mul(g, d)?
            }
            // y (1 - y)
            Self::Sigmoid => {
                let d = b.scalar_sub(1.0, y)?;
                let d = b.mul(y, d)?;
                b.mul(g, d)?
            }
            // 2/√π exp(-x²)
            Self::Erf => {
                let x2 = b.mul(x, x)?;
                let n = b.unary(Self::Neg, x2)?;
                let e = b.unary(Self::Exp, n)?;
                let d = b.mul_scalar(e, std::f64::consts::FRAC_2_SQRT_PI)?;
                b.mul(g, d)?
            }
            Self::Relu => b.op(ThresholdBackward { threshold: 0.0 }, &[g, y])?,
            // σ(x) (1 + x (1 - σ(x)))
            Self::Silu => {
                let s = b.unary(Self::Sigmoid, x)?;
                let n = b.scalar_sub(1.0, s)?;
                let xn = b.mul(x, n)?;
                let d = b.add_scalar(xn, 1.0)?;
                let d = b.mul(s, d)?;
                b.mul(g, d)?
            }
            Self::Softplus => {
                let s = b.unary(Self::Sigmoid, x)?;
                b.mul(g, s)?
            }
            Self::Sign | Self::Floor | Self::Ceil | Self::Round | Self::Trunc | Self::LogicalNot => {
                return Ok(vec![None]);
            }
        };
        Ok(vec![Some(dx)])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        // Transcendental functions take about ten operations where arithmetic takes one.
        let each = match self {
            Self::Neg | Self::Abs | Self::Sign | Self::Relu | Self::LogicalNot => 1.0,
            Self::Floor | Self::Ceil | Self::Round | Self::Trunc => 1.0,
            _ => 10.0,
        };
        Cost::memory(each * outputs.iter().map(|t| t.numel()).sum::<usize>() as f64, inputs, outputs)
    }
}

/// Two operands of one type, broadcast against each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    /// True division; floats only.
    Div,
    /// Floats only; the derivative with respect to the exponent takes 0 where the base is 0.
    Pow,
    Maximum,
    Minimum,
    /// Rounded towards zero (`div` with `rounding_mode="trunc"` on integers, C's `fmod` pairs with it).
    Fmod,
    /// Sign of the divisor, as Python's `%`.
    Remainder,
    /// Rounded towards minus infinity.
    FloorDivide,
}

impl Binary {
    /// Every kind, for suites and tables.
    pub const ALL: [Self; 10] = [
        Self::Add,
        Self::Sub,
        Self::Mul,
        Self::Div,
        Self::Pow,
        Self::Maximum,
        Self::Minimum,
        Self::Fmod,
        Self::Remainder,
        Self::FloorDivide,
    ];

    fn accepts(self, t: &TensorType) -> Result<(), String> {
        match self {
            Self::Div | Self::Pow => float(t),
            _ => want(t.dtype != DType::Bool, || format!("needs numbers, got {t}")),
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Sub => "sub",
            Self::Mul => "mul",
            Self::Div => "div",
            Self::Pow => "pow",
            Self::Maximum => "maximum",
            Self::Minimum => "minimum",
            Self::Fmod => "fmod",
            Self::Remainder => "remainder",
            Self::FloorDivide => "floor_divide",
        }
    }
}

impl Operator for Binary {
    fn name(&self) -> &'static str {
        self.label()
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [a, b] = args(inputs)?;
        same_dtype(a, b)?;
        self.accepts(a)?;
        Ok(vec![TensorType::new(a.dtype, broadcast_shapes(&[&a.shape, &b.shape])?)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (l, r, y, g) = (cx.inputs[0], cx.inputs[1], cx.outputs[0], cx.grad(0)?);
        let dl = cx.want(0, |cx| {
            let b = &mut *cx.b;
            let d = match self {
                Self::Add | Self::Sub | Self::Fmod | Self::Remainder => g,
                Self::Mul => b.mul(g, r)?,
                Self::Div => b.div(g, r)?,
                // b a^(b-1)
                Self::Pow => {
                    let e = b.sub_scalar(r, 1.0)?;
                    let p = b.op(Self::Pow, &[l, e])?;
                    let d = b.mul(r, p)?;
                    b.mul(g, d)?
                }
                Self::Maximum | Self::Minimum => b.extremum_grad(g, l, r, *self == Self::Maximum)?,
                Self::FloorDivide => b.mul_scalar(g, 0.0)?,
            };
            b.sum_to(d, l)
        })?;
        let dr = cx.want(1, |cx| {
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
                    let zero = b.compare_scalar(Compare::Eq, l, 0.0)?;
                    let ln = b.unary(Unary::Log, l)?;
                    let nil = b.mul_scalar(ln, 0.0)?;
                    let nil = b.nan_to_zero(nil)?;
                    let ln = b.where_(zero, nil, ln)?;
                    let d = b.mul(y, ln)?;
                    b.mul(g, d)?
                }
                Self::Maximum | Self::Minimum => b.extremum_grad(g, r, l, *self == Self::Maximum)?,
                // a - b trunc(a / b): -trunc(a / b)
                Self::Fmod | Self::Remainder => {
                    let q = b.div(l, r)?;
                    let rounded = if *self == Self::Fmod { Unary::Trunc } else { Unary::Floor };
                    let q = b.unary(rounded, q)?;
                    let d = b.mul(g, q)?;
                    b.unary(Unary::Neg, d)?
                }
                Self::FloorDivide => b.mul_scalar(g, 0.0)?,
            };
            b.sum_to(d, r)
        })?;
        Ok(vec![dl, dr])
    }
}

/// A [`Binary`] operator with one operand a number: `x op scalar`, or `scalar op x` if `reverse`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BinaryScalar {
    /// The operator.
    pub op: Binary,
    /// The number, converted to the tensor's type.
    #[serde(with = "crate::number")]
    pub scalar: f64,
    /// Whether the number is the left operand.
    pub reverse: bool,
}

impl Operator for BinaryScalar {
    fn name(&self) -> &'static str {
        match (self.op, self.reverse) {
            (Binary::Sub, true) => "rsub.Scalar",
            (Binary::Add, _) => "add.Scalar",
            (Binary::Sub, false) => "sub.Scalar",
            (Binary::Mul, _) => "mul.Scalar",
            (Binary::Div, _) => "div.Scalar",
            (Binary::Pow, false) => "pow.Tensor_Scalar",
            (Binary::Pow, true) => "pow.Scalar",
            (Binary::Maximum, _) => "maximum.Scalar",
            (Binary::Minimum, _) => "minimum.Scalar",
            (Binary::Fmod, _) => "fmod.Scalar",
            (Binary::Remainder, _) => "remainder.Scalar",
            (Binary::FloorDivide, _) => "floor_divide.Scalar",
        }
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        self.op.accepts(x)?;
        let divides = matches!(self.op, Binary::Fmod | Binary::Remainder | Binary::FloorDivide) && !self.reverse;
        want(!(divides && self.scalar == 0.0 && !x.dtype.is_float()), || "divides integers by zero".into())?;
        Ok(vec![x.clone()])
    }

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
            // y ln s
            (Binary::Pow, true) => {
                let d = b.mul_scalar(y, s.ln())?;
                b.mul(g, d)?
            }
            (Binary::Maximum | Binary::Minimum, _) => {
                let ty = b.ty(x).clone();
                let other = b.full(TensorType::new(ty.dtype, []), s)?;
                b.extremum_grad(g, x, other, self.op == Binary::Maximum)?
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

/// A comparison of two broadcast operands of one type; the result is boolean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

impl Compare {
    /// Every kind, for suites and tables.
    pub const ALL: [Self; 6] = [Self::Eq, Self::Ne, Self::Lt, Self::Le, Self::Gt, Self::Ge];
}

impl Operator for Compare {
    fn name(&self) -> &'static str {
        match self {
            Self::Eq => "eq",
            Self::Ne => "ne",
            Self::Lt => "lt",
            Self::Le => "le",
            Self::Gt => "gt",
            Self::Ge => "ge",
        }
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [a, b] = args(inputs)?;
        same_dtype(a, b)?;
        Ok(vec![TensorType::new(DType::Bool, broadcast_shapes(&[&a.shape, &b.shape])?)])
    }

    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![None, None])
    }
}

/// A [`Compare`] of a tensor with a number.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CompareScalar {
    /// The comparison.
    pub op: Compare,
    /// The right operand, converted to the tensor's type.
    #[serde(with = "crate::number")]
    pub scalar: f64,
}

impl Operator for CompareScalar {
    fn name(&self) -> &'static str {
        match self.op {
            Compare::Eq => "eq.Scalar",
            Compare::Ne => "ne.Scalar",
            Compare::Lt => "lt.Scalar",
            Compare::Le => "le.Scalar",
            Compare::Gt => "gt.Scalar",
            Compare::Ge => "ge.Scalar",
        }
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        want(x.dtype != DType::Bool, || format!("needs numbers, got {x}"))?;
        Ok(vec![TensorType::new(DType::Bool, x.shape.clone())])
    }

    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![None])
    }
}

/// Logic on two broadcast boolean operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Logical {
    And,
    Or,
    Xor,
}

impl Logical {
    /// Every kind, for suites and tables.
    pub const ALL: [Self; 3] = [Self::And, Self::Or, Self::Xor];
}

impl Operator for Logical {
    fn name(&self) -> &'static str {
        match self {
            Self::And => "logical_and",
            Self::Or => "logical_or",
            Self::Xor => "logical_xor",
        }
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [a, b] = args(inputs)?;
        of_type(a, DType::Bool, "the left operand")?;
        of_type(b, DType::Bool, "the right operand")?;
        Ok(vec![TensorType::new(DType::Bool, broadcast_shapes(&[&a.shape, &b.shape])?)])
    }

    fn backward(&self, _cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Ok(vec![None, None])
    }
}

/// `(condition, a, b)`, all broadcast: `a` where the boolean condition holds, else `b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Where;

impl Operator for Where {
    fn name(&self) -> &'static str {
        "where.self"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [c, a, b] = args(inputs)?;
        of_type(c, DType::Bool, "the condition")?;
        same_dtype(a, b)?;
        Ok(vec![TensorType::new(a.dtype, broadcast_shapes(&[&c.shape, &a.shape, &b.shape])?)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (c, g) = (cx.inputs[0], cx.grad(0)?);
        let zero = cx.b.zero_like_scalar(g)?;
        let da = cx.want(1, |cx| {
            let d = cx.b.where_(c, g, zero)?;
            cx.b.sum_to(d, cx.inputs[1])
        })?;
        let db = cx.want(2, |cx| {
            let d = cx.b.where_(c, zero, g)?;
            cx.b.sum_to(d, cx.inputs[2])
        })?;
        Ok(vec![None, da, db])
    }
}

/// Limits elements to a range; the gradient passes where the element lies in it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Clamp {
    /// Lower end.
    #[serde(default, with = "crate::number::optional")]
    pub min: Option<f64>,
    /// Upper end.
    #[serde(default, with = "crate::number::optional")]
    pub max: Option<f64>,
    /// No gradient passes at the ends, as `hardtanh` and `relu6` have it; otherwise it does.
    #[serde(default)]
    pub open: bool,
}

impl Operator for Clamp {
    fn name(&self) -> &'static str {
        "clamp"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        want(x.dtype != DType::Bool, || format!("needs numbers, got {x}"))?;
        want(self.min.is_some() || self.max.is_some(), || "needs a minimum or a maximum".into())?;
        Ok(vec![x.clone()])
    }

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

/// Converts elements to another type; floats become integers by truncation, numbers booleans by `!= 0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cast {
    /// The result's element type.
    pub dtype: DType,
}

impl Operator for Cast {
    fn name(&self) -> &'static str {
        "_to_copy"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        Ok(vec![TensorType::new(self.dtype, x.shape.clone())])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let from = cx.b.ty(cx.inputs[0]).dtype;
        if !(from.is_float() && self.dtype.is_float()) {
            return Ok(vec![None]);
        }
        let g = cx.grad(0)?;
        Ok(vec![Some(cx.b.cast(g, from)?)])
    }
}

/// Which form of GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Approximate {
    /// `x Φ(x)` by the error function.
    None,
    /// `½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))`, GPT-2's.
    Tanh,
}

/// Gaussian error linear unit (Hendrycks and Gimpel, 2016).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gelu {
    /// The form.
    pub approximate: Approximate,
}

const TANH_CUBIC: f64 = 0.044_715;

/// √(2/π)
fn tanh_scale() -> f64 {
    (2.0 / std::f64::consts::PI).sqrt()
}

impl Operator for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        float(x)?;
        Ok(vec![x.clone()])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, g) = (cx.inputs[0], cx.grad(0)?);
        Ok(vec![Some(cx.b.op(GeluBackward { approximate: self.approximate }, &[g, x])?)])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(20.0 * outputs.iter().map(|t| t.numel()).sum::<usize>() as f64, inputs, outputs)
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

/// `(gradient, x)`: the gradient of [`Gelu`] of the same form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeluBackward {
    /// The form.
    pub approximate: Approximate,
}

impl Operator for GeluBackward {
    fn name(&self) -> &'static str {
        "gelu_backward"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, x] = args(inputs)?;
        float(x)?;
        want(g == x, || format!("gradient {g} and operand {x} differ"))?;
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(30.0 * outputs.iter().map(|t| t.numel()).sum::<usize>() as f64, inputs, outputs)
    }

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

/// `(gradient, x)`: the gradient where `x > threshold`, else 0. ReLU's backward, of its operand or its result alike.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ThresholdBackward {
    /// The threshold.
    #[serde(with = "crate::number")]
    pub threshold: f64,
}

impl Operator for ThresholdBackward {
    fn name(&self) -> &'static str {
        "threshold_backward"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, x] = args(inputs)?;
        float(x)?;
        want(g == x, || format!("gradient {g} and operand {x} differ"))?;
        Ok(vec![x.clone()])
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let keep = b.compare_scalar(Compare::Gt, inputs[1], self.threshold)?;
        let zero = b.zero_like_scalar(inputs[0])?;
        Ok(Some(vec![b.where_(keep, inputs[0], zero)?]))
    }
}
