use std::cmp::Ordering;

use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{Arange, Binary, BinaryScalar, Unary};

use super::Operand;
use super::element::{Number, broadcast_offsets, elements, with_number};
use crate::kernels::Buffer;

const NO_KERNEL: &str = "has no generic kernel";

pub(super) fn unary(op: Unary, x: &Operand<'_>) -> Result<Buffer, String> {
    with_number!(x.ty.dtype, T => {
        let f: fn(T) -> T = match op {
            Unary::Neg => Number::negate,
            Unary::Abs => Number::magnitude,
            Unary::Sign => Number::sign,
            _ => return Err(NO_KERNEL.into()),
        };
        Ok(Buffer::new::<T>(elements::<T>(x).iter().map(|&v| f(v)).collect()))
    })
}

fn function<T: Number>(op: Binary) -> Result<fn(T, T) -> T, String> {
    let f: fn(T, T) -> T = match op {
        Binary::Add => T::add,
        Binary::Sub => T::sub,
        Binary::Mul => T::mul,
        Binary::Maximum => |a, b| if a.yields(b, Ordering::Greater) { b } else { a },
        Binary::Minimum => |a, b| if a.yields(b, Ordering::Less) { b } else { a },
        Binary::Fmod => T::fmod,
        Binary::Remainder => T::remainder,
        Binary::FloorDivide => T::floor_divide,
        Binary::Div | Binary::Pow => return Err(NO_KERNEL.into()),
    };
    Ok(f)
}

fn divides_integers<T: Number>(op: Binary) -> bool {
    T::INTEGER && matches!(op, Binary::Fmod | Binary::Remainder | Binary::FloorDivide)
}

const DIVISION_BY_ZERO: &str = "divides integers by zero";

pub(super) fn binary(op: Binary, a: &Operand<'_>, b: &Operand<'_>, out: &TensorType) -> Result<Buffer, String> {
    with_number!(out.dtype, T => {
        let f = function::<T>(op)?;
        let (x, y) = (elements::<T>(a), elements::<T>(b));
        if divides_integers::<T>(op) && out.numel() > 0 && y.contains(&T::ZERO) {
            return Err(DIVISION_BY_ZERO.into());
        }
        let z: Vec<T> = if a.ty.shape == b.ty.shape {
            x.iter().zip(y.iter()).map(|(&a, &b)| f(a, b)).collect()
        } else {
            let (i, j) = (broadcast_offsets(&a.ty.shape, &out.shape), broadcast_offsets(&b.ty.shape, &out.shape));
            i.into_iter().zip(j).map(|(i, j)| f(x[i], y[j])).collect()
        };
        Ok(Buffer::new(z))
    })
}

pub(super) fn binary_scalar(op: &BinaryScalar, x: &Operand<'_>) -> Result<Buffer, String> {
    with_number!(x.ty.dtype, T => {
        let f = function::<T>(op.op)?;
        let (s, v) = (T::of(op.scalar), elements::<T>(x));
        if divides_integers::<T>(op.op) && if op.reverse { v.contains(&T::ZERO) } else { s == T::ZERO } {
            return Err(DIVISION_BY_ZERO.into());
        }
        let y: Vec<T> = match op.reverse {
            false => v.iter().map(|&v| f(v, s)).collect(),
            true => v.iter().map(|&v| f(s, v)).collect(),
        };
        Ok(Buffer::new(y))
    })
}

pub(super) fn arange(op: &Arange) -> Result<Buffer, String> {
    with_number!(op.dtype, T => {
        let whole = T::INTEGER && op.start.fract() == 0.0 && op.step.fract() == 0.0;
        let y: Vec<T> = if whole {
            let (start, step) = (T::of(op.start), T::of(op.step));
            std::iter::successors(Some(start), |v| Some(Number::add(*v, step))).take(op.len).collect()
        } else {
            (0..op.len).map(|i| T::of(op.start + op.step * i as f64)).collect()
        };
        Ok(Buffer::new(y))
    })
}
