//! Checks of operand types that the operators share. Each returns the requirement that failed.

use crate::units::counted;
use crate::{DType, TensorType};

/// The shape that `shapes` broadcast to, or an error if they do not broadcast.
///
/// Shapes are aligned at the last dimension, and a size of 1 stretches.
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

/// Exactly `N` operands.
pub(super) fn args<'a, const N: usize>(inputs: &[&'a TensorType]) -> Result<[&'a TensorType; N], String> {
    <[&TensorType; N]>::try_from(inputs).map_err(|_| format!("takes {}, got {}", counted(N, "operand"), inputs.len()))
}

/// `N` operands and an optional one after them.
pub(super) fn args_opt<'a, const N: usize>(
    inputs: &[&'a TensorType],
) -> Result<([&'a TensorType; N], Option<&'a TensorType>), String> {
    match inputs.len() {
        n if n == N => Ok((args::<N>(inputs)?, None)),
        n if n == N + 1 => Ok((args::<N>(&inputs[..N])?, Some(inputs[N]))),
        n => Err(format!("takes {N} or {} operands, got {n}", N + 1)),
    }
}

pub(super) fn ensure(condition: bool, requirement: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(requirement()) }
}

pub(super) fn ensure_float(t: &TensorType) -> Result<(), String> {
    ensure(t.dtype.is_float(), || format!("needs a float operand, got {t}"))
}

pub(super) fn ensure_number(t: &TensorType) -> Result<(), String> {
    ensure(t.dtype != DType::Bool, || format!("needs numbers, got {t}"))
}

pub(super) fn ensure_same_dtype(a: &TensorType, b: &TensorType) -> Result<(), String> {
    ensure(a.dtype == b.dtype, || format!("operands have different element types, {} and {}", a.dtype, b.dtype))
}

pub(super) fn ensure_dtype(t: &TensorType, dtype: DType, what: &str) -> Result<(), String> {
    ensure(t.dtype == dtype, || format!("{what} must be {dtype}, got {t}"))
}

pub(super) fn ensure_dim(dim: usize, t: &TensorType) -> Result<(), String> {
    ensure(dim < t.rank(), || format!("dimension {dim} is out of range for {t}"))
}

pub(super) fn ensure_shape(t: &TensorType, shape: &[usize], what: &str) -> Result<(), String> {
    ensure(t.shape == shape, || format!("{what} must have shape {shape:?}, got {t}"))
}

/// The number of elements of a shape, or an error if it overflows.
pub(super) fn checked_numel(shape: &[usize]) -> Result<usize, String> {
    shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(|| format!("{shape:?} has too many elements"))
}
