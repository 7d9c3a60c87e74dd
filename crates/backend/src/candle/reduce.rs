//! Reductions. Operands are made contiguous, so that the order of sums depends on the shape alone.

use candle_core::Tensor as Array;
use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{ArgReduce, Reduce, ReduceKind};

use super::{Result, filled, is_float, other, scalar};

pub(super) fn reduce(op: &Reduce, x: &Array, out: &TensorType) -> Result<Array> {
    let x = x.contiguous()?;
    let dims = op.dims.as_slice();
    if dims.is_empty() {
        return Ok(x);
    }
    if x.elem_count() == 0 {
        // Candle divides by the number of results.
        match op.kind {
            ReduceKind::Sum | ReduceKind::Any => return filled(0.0, out),
            ReduceKind::All => return filled(1.0, out),
            ReduceKind::Mean => return filled(f64::NAN, out),
            _ if out.numel() == 0 => return filled(0.0, out),
            _ => {}
        }
    }
    let y = match op.kind {
        ReduceKind::Sum => x.sum(dims)?,
        ReduceKind::Mean => {
            let n: usize = dims.iter().map(|&d| x.dims()[d]).product();
            x.sum(dims)?.broadcast_div(&scalar(n as f64, x.dtype())?)?
        }
        ReduceKind::Amax | ReduceKind::Any => extremum(&x, dims, true)?,
        ReduceKind::Amin | ReduceKind::All => extremum(&x, dims, false)?,
        ReduceKind::Prod => return other("prod runs on the host"),
    };
    Ok(y.reshape(out.shape.as_slice())?)
}

fn extremum(x: &Array, dims: &[usize], largest: bool) -> Result<Array> {
    let along = |x: &Array| -> Result<Array> {
        let mut y = x.clone();
        for &d in dims {
            y = if largest { y.max_keepdim(d)? } else { y.min_keepdim(d)? };
        }
        Ok(y)
    };
    let y = along(x)?;
    if !has_nan(x)? {
        return Ok(y);
    }
    // Candle's comparison passes over NaN; here it wins.
    let mut nan = x.ne(x)?;
    for &d in dims {
        nan = nan.max_keepdim(d)?;
    }
    Ok(nan.where_cond(&filled_like(f64::NAN, &y)?, &y)?)
}

fn filled_like(value: f64, x: &Array) -> Result<Array> {
    Ok(scalar(value, x.dtype())?.broadcast_as(x.shape())?)
}

/// Whether any element of a contiguous array is NaN.
pub(super) fn has_nan(x: &Array) -> Result<bool> {
    if !is_float(x) || x.elem_count() == 0 {
        return Ok(false);
    }
    Ok(x.ne(x)?.max_all()?.to_scalar::<u8>()? != 0)
}

pub(super) fn arg_reduce(op: &ArgReduce, x: &Array, out: &TensorType) -> Result<Array> {
    let x = x.contiguous()?;
    let mut at = if op.largest { x.argmax_keepdim(op.dim)? } else { x.argmin_keepdim(op.dim)? };
    if has_nan(&x)? {
        let nan = x.ne(&x)?;
        at = nan.max_keepdim(op.dim)?.where_cond(&nan.argmax_keepdim(op.dim)?, &at)?;
    }
    Ok(at.to_dtype(candle_core::DType::I64)?.reshape(out.shape.as_slice())?)
}
