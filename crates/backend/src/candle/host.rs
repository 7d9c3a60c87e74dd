//! Operators that run by kernels of this crate instead of candle's.

use candle_core::{DType as CandleType, Tensor as Array};
use fusionllm_graph::ops::{Binary, BinaryScalar, ReduceKind, Unary};
use fusionllm_graph::{DType, HostTensor, Op, TensorType};

use crate::kernels::generic::{self, Operand};

use super::{Result, from_host, from_vec, is_float, other, to_host, to_vec};

/// Operators that candle does not run: it lacks a kernel, or its kernel panics or computes something else. No model
/// family needs them.
#[derive(Debug, Clone, Copy)]
pub struct HostOperator {
    /// A description of the operators.
    pub what: &'static str,
    /// Whether an operator belongs to them. `integers` says whether its first operand holds integers.
    pub applies: fn(op: &Op, integers: bool) -> bool,
}

/// All operators that run by kernels of this crate.
pub const HOST_OPERATORS: &[HostOperator] = &[
    HostOperator {
        what: "log1p, expm1, softplus, and rounding half to even",
        applies: |op, _| matches!(op, Op::Unary(Unary::Log1p | Unary::Expm1 | Unary::Softplus | Unary::Round)),
    },
    HostOperator {
        what: "powers with a tensor as exponent",
        applies: |op, _| {
            matches!(
                op,
                Op::Binary(Binary::Pow) | Op::BinaryScalar(BinaryScalar { op: Binary::Pow, reverse: true, .. })
            )
        },
    },
    HostOperator {
        what: "remainders and rounded quotients",
        applies: |op, _| {
            let rounds = |op: Binary| matches!(op, Binary::Fmod | Binary::Remainder | Binary::FloorDivide);
            matches!(op, Op::Binary(op) | Op::BinaryScalar(BinaryScalar { op, .. }) if rounds(*op))
        },
    },
    HostOperator {
        what: "arithmetic and reductions of integers, which wrap around",
        applies: |op, integers| {
            integers
                && matches!(op, Op::Unary(_) | Op::Binary(_) | Op::BinaryScalar(_) | Op::Reduce(_) | Op::IndexAdd(_))
        },
    },
    HostOperator {
        what: "products, running sums, sorting",
        applies: |op, _| match op {
            Op::Reduce(op) => op.kind == ReduceKind::Prod,
            op => matches!(op, Op::CumSum(_) | Op::Sort(_) | Op::TopK(_)),
        },
    },
    HostOperator {
        what: "scattering, and indexing by several tensors",
        applies: |op, _| matches!(op, Op::Scatter(_) | Op::ScatterAdd(_) | Op::Index(_) | Op::IndexPut(_)),
    },
];

pub(super) fn kernel(op: &Op, x: &[Array], outputs: &[TensorType]) -> Result<Option<Vec<Array>>> {
    let integers = x.first().is_some_and(|x| matches!(x.dtype(), CandleType::I64 | CandleType::I32));
    if !HOST_OPERATORS.iter().any(|h| (h.applies)(op, integers)) {
        return Ok(None);
    }
    match op {
        Op::Unary(op) if !integers => return Ok(Some(vec![unary(*op, &x[0])?])),
        Op::Binary(Binary::Pow) => return Ok(Some(vec![pow(&x[0], &x[1], &outputs[0])?])),
        Op::BinaryScalar(BinaryScalar { op: Binary::Pow, scalar, .. }) => {
            return Ok(Some(vec![pow(&super::scalar(*scalar, x[0].dtype())?, &x[0], &outputs[0])?]));
        }
        _ => {}
    }
    let hosts = x.iter().map(download).collect::<Result<Vec<_>>>()?;
    let operands: Vec<Operand<'_>> = hosts.iter().map(Operand::from).collect();
    let results = match generic::run(op, &operands, outputs) {
        Ok(Some(results)) => results,
        Ok(None) => return other("has no generic kernel"),
        Err(reason) => return other(reason),
    };
    let mut arrays = Vec::with_capacity(results.len());
    for (ty, buffer) in outputs.iter().zip(results) {
        let host = HostTensor::from_bytes(ty.clone(), buffer.elements().to_vec()).or_else(|e| other(e.to_string()))?;
        arrays.push(from_host(&host)?);
    }
    Ok(Some(arrays))
}

fn download(x: &Array) -> Result<HostTensor> {
    let dtype = match x.dtype() {
        CandleType::F64 => DType::F64,
        CandleType::F32 => DType::F32,
        CandleType::I64 => DType::I64,
        CandleType::I32 => DType::I32,
        _ => DType::Bool,
    };
    to_host(x, &TensorType::new(dtype, x.dims()))
}

fn unary(op: Unary, x: &Array) -> Result<Array> {
    debug_assert!(is_float(x));
    if x.dtype() == CandleType::F64 {
        let mut y = to_vec::<f64>(x)?;
        crate::kernels::unary(op, &mut y, None);
        return from_vec(y, x.dims());
    }
    let mut y = to_vec::<f32>(x)?;
    crate::kernels::unary(op, &mut y, None);
    from_vec(y, x.dims())
}

fn pow(base: &Array, exponent: &Array, out: &TensorType) -> Result<Array> {
    let (a, b) = (base.broadcast_as(out.shape.as_slice())?, exponent.broadcast_as(out.shape.as_slice())?);
    if base.dtype() == CandleType::F64 {
        let y = to_vec::<f64>(&a)?.into_iter().zip(to_vec::<f64>(&b)?).map(|(a, b)| a.powf(b));
        return from_vec(y.collect(), out.shape.as_slice());
    }
    let y = to_vec::<f32>(&a)?.into_iter().zip(to_vec::<f32>(&b)?).map(|(a, b)| a.powf(b));
    from_vec(y.collect(), out.shape.as_slice())
}
