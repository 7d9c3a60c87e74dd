//! Operators that work element by element, with broadcasting.

use serde::{Deserialize, Serialize};

use super::check::{args, broadcast_shapes, ensure, ensure_dtype, ensure_float, ensure_number, ensure_same_dtype};
use super::operator::{Cost, Operator};
use crate::{DType, TensorType};

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
            Self::LogicalNot => ensure_dtype(x, DType::Bool, "the operand")?,
            Self::Neg | Self::Abs | Self::Sign => ensure_number(x)?,
            _ => ensure_float(x)?,
        }
        Ok(vec![x.clone()])
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
        ensure(!(divides && self.scalar == 0.0 && !x.dtype.is_float()), || "divides integers by zero".into())?;
        Ok(vec![x.clone()])
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
        ensure_same_dtype(a, b)?;
        Ok(vec![TensorType::new(DType::Bool, broadcast_shapes(&[&a.shape, &b.shape])?)])
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
        ensure_number(x)?;
        Ok(vec![TensorType::new(DType::Bool, x.shape.clone())])
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
        ensure_dtype(a, DType::Bool, "the left operand")?;
        ensure_dtype(b, DType::Bool, "the right operand")?;
        Ok(vec![TensorType::new(DType::Bool, broadcast_shapes(&[&a.shape, &b.shape])?)])
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
        ensure_dtype(c, DType::Bool, "the condition")?;
        ensure_same_dtype(a, b)?;
        Ok(vec![TensorType::new(a.dtype, broadcast_shapes(&[&c.shape, &a.shape, &b.shape])?)])
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
        ensure_number(x)?;
        ensure(self.min.is_some() || self.max.is_some(), || "needs a minimum or a maximum".into())?;
        Ok(vec![x.clone()])
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
        Cost::memory(20.0 * outputs.iter().map(|t| t.numel()).sum::<usize>() as f64, inputs, outputs)
    }
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
        ensure_float(x)?;
        ensure(g == x, || format!("gradient {g} and operand {x} differ"))?;
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(30.0 * outputs.iter().map(|t| t.numel()).sum::<usize>() as f64, inputs, outputs)
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
        ensure_float(x)?;
        ensure(g == x, || format!("gradient {g} and operand {x} differ"))?;
        Ok(vec![x.clone()])
    }
}
