//! Operators on single elements, with broadcasting.

use serde::{Deserialize, Serialize};

use super::check::{args, broadcast_shapes, ensure, ensure_dtype, ensure_float, ensure_number, ensure_same_dtype};
use super::operator::{Cost, Operator, elements};
use crate::{DType, TensorType};

/// A function of each element. The result has the type of the operand.
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
    /// All variants, for tests and tables.
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
            Self::LogicalNot => ensure_dtype(x, DType::Bool, "the operand")?,
            Self::Neg | Self::Abs | Self::Sign => ensure_number(x)?,
            _ => ensure_float(x)?,
        }
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        // A transcendental function counts as ten operations.
        let flops = match self {
            Self::Neg | Self::Abs | Self::Sign | Self::Relu | Self::LogicalNot => 1.0,
            Self::Floor | Self::Ceil | Self::Round | Self::Trunc => 1.0,
            _ => 10.0,
        };
        Cost::memory(flops * elements(outputs), inputs, outputs)
    }
}

/// An operator on two operands of the same element type, which broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    /// True division. Floats only.
    Div,
    /// Floats only. The derivative with respect to the exponent is 0 where the base is 0, and that with respect to the
    /// base is 0 where the exponent is 0.
    Pow,
    Maximum,
    Minimum,
    /// The remainder with the sign of the dividend, like C's `fmod`.
    Fmod,
    /// The remainder with the sign of the divisor, like Python's `%`.
    Remainder,
    /// Division rounded towards minus infinity.
    FloorDivide,
}

impl Binary {
    /// All variants, for tests and tables.
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
            Self::Div | Self::Pow => ensure_float(t),
            _ => ensure_number(t),
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
        ensure_same_dtype(a, b)?;
        self.accepts(a)?;
        Ok(vec![TensorType::new(a.dtype, broadcast_shapes(&[&a.shape, &b.shape])?)])
    }
}

/// A [`Binary`] operator of a tensor and a number: `x op scalar`, or `scalar op x` if `reverse`.
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
        ensure(!(divides && self.scalar == 0.0 && !x.dtype.is_float()), || "cannot divide integers by zero".into())?;
        Ok(vec![x.clone()])
    }
}

/// A comparison of two operands of the same element type, which broadcast. The result is boolean.
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
    /// All variants, for tests and tables.
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
        ensure_same_dtype(a, b)?;
        Ok(vec![TensorType::new(DType::Bool, broadcast_shapes(&[&a.shape, &b.shape])?)])
    }
}

/// A comparison of a tensor with a number.
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
        ensure_number(x)?;
        Ok(vec![TensorType::new(DType::Bool, x.shape.clone())])
    }
}

/// Logic on two boolean operands, which broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Logical {
    And,
    Or,
    Xor,
}

impl Logical {
    /// All variants, for tests and tables.
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
        ensure_dtype(a, DType::Bool, "the left operand")?;
        ensure_dtype(b, DType::Bool, "the right operand")?;
        Ok(vec![TensorType::new(DType::Bool, broadcast_shapes(&[&a.shape, &b.shape])?)])
    }
}

/// Operands `(condition, a, b)`, which broadcast: `a` where the boolean condition is true, else `b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Where;

impl Operator for Where {
    fn name(&self) -> &'static str {
        "where.self"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [c, a, b] = args(inputs)?;
        ensure_dtype(c, DType::Bool, "the condition")?;
        ensure_same_dtype(a, b)?;
        Ok(vec![TensorType::new(a.dtype, broadcast_shapes(&[&c.shape, &a.shape, &b.shape])?)])
    }
}

/// Limits elements to a range. The gradient passes where the element lies in the range.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Clamp {
    /// The lower bound.
    #[serde(default, with = "crate::number::optional")]
    pub min: Option<f64>,
    /// The upper bound.
    #[serde(default, with = "crate::number::optional")]
    pub max: Option<f64>,
    /// Whether the gradient is 0 at the bounds, as for `hardtanh` and `relu6`. Otherwise it passes there.
    #[serde(default)]
    pub open: bool,
}

impl Operator for Clamp {
    fn name(&self) -> &'static str {
        "clamp"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure_number(x)?;
        ensure(self.min.is_some() || self.max.is_some(), || "needs a minimum or a maximum".into())?;
        Ok(vec![x.clone()])
    }
}

/// Converts elements to another type. Floats become integers by truncation, numbers become booleans by `!= 0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cast {
    /// The element type of the result.
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
}

/// The form of GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Approximate {
    /// `x Φ(x)`, with the error function.
    None,
    /// `½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))`, as in GPT-2.
    Tanh,
}

/// Gaussian error linear unit (Hendrycks and Gimpel, 2016).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gelu {
    /// The form.
    pub approximate: Approximate,
}

impl Operator for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure_float(x)?;
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(20.0 * elements(outputs), inputs, outputs)
    }
}

/// Operands `(gradient, x)`, result: the gradient of the operand of [`Gelu`].
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
        ensure_float(x)?;
        ensure(g == x, || format!("the types of gradient {g} and operand {x} differ"))?;
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(30.0 * elements(outputs), inputs, outputs)
    }
}

/// Operands `(gradient, x)`, result: the gradient where `x > threshold`, else 0. For ReLU, `x` may be its operand or
/// its result.
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
        ensure_float(x)?;
        ensure(g == x, || format!("the types of gradient {g} and operand {x} differ"))?;
        Ok(vec![x.clone()])
    }
}
