//! Operators that work element by element.

use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{IntDType, Scalar};
use fusionllm_graph::ops::{Binary, BinaryScalar, Clamp, Compare, Dropout, Logical, Unary};
use fusionllm_graph::{DType, TensorType};

use super::tensor::{Data, Framework, float_type, int_type, scalar};
use crate::kernels::generic::keep_mask;

pub(super) fn float_unary<B: Framework>(op: Unary, x: FloatTensor<B>) -> Result<FloatTensor<B>, String> {
    Ok(match op {
        Unary::Neg => B::float_neg(x),
        Unary::Abs => B::float_abs(x),
        Unary::Sign => B::float_sign(x),
        Unary::Exp => B::float_exp(x),
        Unary::Log => B::float_log(x),
        Unary::Log1p => B::float_log1p(x),
        // 2 sinh(x/2) e^(x/2), which loses nothing near 0; below -80 the result is -1 and the factors may not be
        // finite.
        Unary::Expm1 => {
            let half = B::float_mul_scalar(B::float_clamp_min(x, Scalar::Float(-80.0)), Scalar::Float(0.5));
            let product = B::float_mul(B::float_sinh(half.clone()), B::float_exp(half));
            B::float_mul_scalar(product, Scalar::Float(2.0))
        }
        Unary::Sqrt => B::float_sqrt(x),
        Unary::Rsqrt => B::float_recip(B::float_sqrt(x)),
        Unary::Reciprocal => B::float_recip(x),
        Unary::Sin => B::float_sin(x),
        Unary::Cos => B::float_cos(x),
        Unary::Tanh => B::float_tanh(x),
        Unary::Sigmoid => B::sigmoid(x),
        Unary::Erf => B::float_erf(x),
        Unary::Floor => B::float_floor(x),
        Unary::Ceil => B::float_ceil(x),
        Unary::Round => B::float_round(x),
        Unary::Trunc => B::float_trunc(x),
        Unary::Relu => B::relu(x),
        Unary::Silu => B::float_mul(B::sigmoid(x.clone()), x),
        // max(x, 0) + ln(1 + e^-|x|)
        Unary::Softplus => {
            let tail = B::float_log1p(B::float_exp(B::float_neg(B::float_abs(x.clone()))));
            B::float_add(tail, B::relu(x))
        }
        Unary::LogicalNot => return Err("needs a boolean operand".into()),
    })
}

const NEEDS_GENERIC: &str = "needs a generic kernel";

/// The operands have the same shape.
pub(super) fn float_binary<B: Framework>(
    op: Binary,
    a: FloatTensor<B>,
    b: FloatTensor<B>,
) -> Result<FloatTensor<B>, String> {
    Ok(match op {
        Binary::Add => B::float_add(a, b),
        Binary::Sub => B::float_sub(a, b),
        Binary::Mul => B::float_mul(a, b),
        Binary::Div => B::float_div(a, b),
        Binary::Pow => B::float_powf(a, b),
        Binary::Maximum => {
            let keep = B::float_greater(a.clone(), b.clone(), B::BOOL);
            winner::<B>(keep, a, b)
        }
        Binary::Minimum => {
            let keep = B::float_lower(a.clone(), b.clone(), B::BOOL);
            winner::<B>(keep, a, b)
        }
        Binary::Fmod | Binary::Remainder | Binary::FloorDivide => return Err(NEEDS_GENERIC.into()),
    })
}

/// `a` where it wins or is NaN, else `b`. A NaN in `b` stays, since `a` never wins against it.
fn winner<B: Framework>(wins: BoolTensor<B>, a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let keep = B::bool_or(wins, B::float_is_nan(a.clone(), B::BOOL));
    B::float_mask_where(b, keep, a)
}

pub(super) fn float_binary_scalar<B: Framework>(
    op: &BinaryScalar,
    x: FloatTensor<B>,
    ty: &TensorType,
    device: &B::Device,
) -> Result<FloatTensor<B>, String> {
    let s = Scalar::Float(op.scalar);
    let spread = || Data::<B>::full(&TensorType::new(ty.dtype, []), op.scalar, device).expand(&ty.shape).float();
    Ok(match (op.op, op.reverse) {
        (Binary::Add, _) => B::float_add_scalar(x, s),
        (Binary::Mul, _) => B::float_mul_scalar(x, s),
        (Binary::Sub, false) => B::float_sub_scalar(x, s),
        (Binary::Sub, true) => B::float_add_scalar(B::float_neg(x), s),
        (Binary::Div, false) => B::float_div_scalar(x, s),
        (Binary::Div, true) => B::float_div(spread()?, x),
        (Binary::Pow, false) => B::float_powf_scalar(x, s),
        (Binary::Pow, true) => B::float_powf(spread()?, x),
        (Binary::Maximum, _) => B::float_clamp_min(x, s),
        (Binary::Minimum, _) => B::float_clamp_max(x, s),
        (Binary::Fmod | Binary::Remainder | Binary::FloorDivide, _) => return Err(NEEDS_GENERIC.into()),
    })
}

/// The operands have the same shape.
pub(super) fn compare<B: Framework>(op: Compare, a: Data<B>, b: Data<B>) -> Result<BoolTensor<B>, String> {
    Ok(match (a, b) {
        (Data::Float(a), Data::Float(b)) => match op {
            Compare::Eq => B::float_equal(a, b, B::BOOL),
            // For shaders, NaN may be neither equal to a number nor different from it.
            Compare::Ne => B::bool_not(B::float_equal(a, b, B::BOOL)),
            Compare::Lt => B::float_lower(a, b, B::BOOL),
            Compare::Le => B::float_lower_equal(a, b, B::BOOL),
            Compare::Gt => B::float_greater(a, b, B::BOOL),
            Compare::Ge => B::float_greater_equal(a, b, B::BOOL),
        },
        (Data::Int(a), Data::Int(b)) => match op {
            Compare::Eq => B::int_equal(a, b, B::BOOL),
            Compare::Ne => B::int_not_equal(a, b, B::BOOL),
            Compare::Lt => B::int_lower(a, b, B::BOOL),
            Compare::Le => B::int_lower_equal(a, b, B::BOOL),
            Compare::Gt => B::int_greater(a, b, B::BOOL),
            Compare::Ge => B::int_greater_equal(a, b, B::BOOL),
        },
        // false < true
        (Data::Bool(a), Data::Bool(b)) => match op {
            Compare::Eq => B::bool_equal(a, b),
            Compare::Ne => B::bool_not_equal(a, b),
            Compare::Lt => B::bool_and(B::bool_not(a), b),
            Compare::Le => B::bool_or(B::bool_not(a), b),
            Compare::Gt => B::bool_and(a, B::bool_not(b)),
            Compare::Ge => B::bool_or(a, B::bool_not(b)),
        },
        _ => return Err("operands have different element types".into()),
    })
}

pub(super) fn compare_scalar<B: Framework>(
    op: Compare,
    x: Data<B>,
    value: f64,
    dtype: DType,
) -> Result<BoolTensor<B>, String> {
    let s = scalar(value, dtype);
    Ok(match x {
        Data::Float(x) => match op {
            Compare::Eq => B::float_equal_elem(x, s, B::BOOL),
            Compare::Ne => B::bool_not(B::float_equal_elem(x, s, B::BOOL)),
            Compare::Lt => B::float_lower_elem(x, s, B::BOOL),
            Compare::Le => B::float_lower_equal_elem(x, s, B::BOOL),
            Compare::Gt => B::float_greater_elem(x, s, B::BOOL),
            Compare::Ge => B::float_greater_equal_elem(x, s, B::BOOL),
        },
        Data::Int(x) => match op {
            Compare::Eq => B::int_equal_elem(x, s, B::BOOL),
            Compare::Ne => B::int_not_equal_elem(x, s, B::BOOL),
            Compare::Lt => B::int_lower_elem(x, s, B::BOOL),
            Compare::Le => B::int_lower_equal_elem(x, s, B::BOOL),
            Compare::Gt => B::int_greater_elem(x, s, B::BOOL),
            Compare::Ge => B::int_greater_equal_elem(x, s, B::BOOL),
        },
        Data::Bool(_) => return Err("needs numbers".into()),
    })
}

pub(super) fn logical<B: Framework>(op: Logical, a: BoolTensor<B>, b: BoolTensor<B>) -> BoolTensor<B> {
    match op {
        Logical::And => B::bool_and(a, b),
        Logical::Or => B::bool_or(a, b),
        Logical::Xor => B::bool_not_equal(a, b),
    }
}

/// The operands have the same shape.
pub(super) fn choose<B: Framework>(condition: Data<B>, a: Data<B>, b: Data<B>) -> Result<Data<B>, String> {
    let condition = condition.bool()?;
    Ok(match (a, b) {
        (Data::Float(a), Data::Float(b)) => Data::Float(B::float_mask_where(b, condition, a)),
        (Data::Int(a), Data::Int(b)) => Data::Int(B::int_mask_where(b, condition, a)),
        (Data::Bool(a), Data::Bool(b)) => Data::Bool(B::bool_mask_where(b, condition, a)),
        _ => return Err("operands have different element types".into()),
    })
}

// The lower end first: where the ends cross, the upper one holds, as in PyTorch.
pub(super) fn clamp<B: Framework>(op: &Clamp, mut x: Data<B>, dtype: DType) -> Result<Data<B>, String> {
    if let Some(min) = op.min {
        let s = scalar(min, dtype);
        x = match x {
            Data::Float(x) => Data::Float(B::float_clamp_min(x, s)),
            Data::Int(x) => Data::Int(B::int_clamp_min(x, s)),
            Data::Bool(_) => return Err("needs numbers".into()),
        };
    }
    if let Some(max) = op.max {
        let s = scalar(max, dtype);
        x = match x {
            Data::Float(x) => Data::Float(B::float_clamp_max(x, s)),
            Data::Int(x) => Data::Int(B::int_clamp_max(x, s)),
            Data::Bool(_) => return Err("needs numbers".into()),
        };
    }
    Ok(x)
}

pub(super) fn cast<B: Framework>(x: Data<B>, from: DType, to: DType) -> Data<B> {
    if from == to {
        return x;
    }
    match (x, to) {
        (Data::Float(x), DType::Bool) => Data::Bool(B::bool_not(B::float_equal_elem(x, Scalar::Float(0.0), B::BOOL))),
        (Data::Float(x), DType::I64 | DType::I32) => Data::Int(B::float_into_int(x, int_type(to))),
        (Data::Float(x), _) => Data::Float(B::float_cast(x, float_type(to))),
        (Data::Int(x), DType::Bool) => Data::Bool(B::int_not_equal_elem(x, Scalar::Int(0), B::BOOL)),
        (Data::Int(x), DType::I64 | DType::I32) => Data::Int(B::int_cast(x, int_type(to))),
        (Data::Int(x), _) => Data::Float(B::int_into_float(x, float_type(to))),
        (Data::Bool(x), DType::I32) => Data::Int(B::bool_into_int(x, IntDType::I32)),
        (Data::Bool(x), DType::I64 | DType::Bool) => Data::Int(B::bool_into_int(x, IntDType::I64)),
        (Data::Bool(x), _) => Data::Float(B::bool_into_float(x, float_type(to))),
    }
}

/// The result and the mask. The mask has type `ty`.
pub(super) fn dropout<B: Framework>(
    op: &Dropout,
    x: Data<B>,
    key: Data<B>,
    ty: &TensorType,
    device: &B::Device,
) -> Result<Vec<Data<B>>, String> {
    let &[key] = &key.into_i64()?[..] else {
        return Err("needs one key".into());
    };
    let mask = Data::<B>::from_bools(keep_mask(key, op.stream, op.p, ty.numel()), &ty.shape, device);
    let scaled = B::float_mul_scalar(x.float()?, Scalar::Float(1.0 / (1.0 - op.p)));
    let y = B::float_mask_fill(scaled, B::bool_not(mask.clone()), Scalar::Float(0.0));
    Ok(vec![Data::Float(y), Data::Bool(mask)])
}
