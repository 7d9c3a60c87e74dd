//! Reductions and running sums.

use std::cmp::Ordering;

use fusionllm_graph::ops::{Reduce, ReduceKind};

use super::Operand;
use super::element::{Number, around, elements, strided_offsets, with_number};
use crate::kernels::{Buffer, Element};

pub(super) fn reduce(op: &Reduce, x: &Operand<'_>) -> Result<Buffer, String> {
    match op.kind {
        ReduceKind::Any => fold(op, x, 0u8, |a, b| a | b),
        ReduceKind::All => fold(op, x, 1u8, |a, b| a & b),
        kind => with_number!(x.ty.dtype, T => match kind {
            ReduceKind::Sum => fold::<T>(op, x, T::ZERO, Number::add),
            ReduceKind::Prod => fold::<T>(op, x, T::ONE, Number::mul),
            ReduceKind::Amax => extremum::<T>(op, x, Ordering::Greater),
            ReduceKind::Amin => extremum::<T>(op, x, Ordering::Less),
            ReduceKind::Mean | ReduceKind::Any | ReduceKind::All => Err("has no generic kernel".into()),
        }),
    }
}

/// The place of each result's first operand, and the distances of all its operands from there. Both are in row-major
/// order.
fn groups(op: &Reduce, shape: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    let pick = |reduced: bool| -> (Vec<usize>, Vec<usize>) {
        (0..shape.len()).filter(|d| op.dims.contains(d) == reduced).map(|d| (shape[d], strides[d])).unzip()
    };
    let (kept, reduced) = (pick(false), pick(true));
    let bases = strided_offsets(&kept.0, &kept.1);
    // If there are no results, nothing bounds the dimensions that are reduced.
    let steps = if bases.is_empty() { Vec::new() } else { strided_offsets(&reduced.0, &reduced.1) };
    (bases, steps)
}

fn fold<T: Element>(op: &Reduce, x: &Operand<'_>, start: T, f: fn(T, T) -> T) -> Result<Buffer, String> {
    let v = elements::<T>(x);
    let (bases, steps) = groups(op, &x.ty.shape);
    let y: Vec<T> = bases.iter().map(|b| steps.iter().fold(start, |a, s| f(a, v[b + s]))).collect();
    Ok(Buffer::new(y))
}

/// The largest or smallest element, or NaN if there is one.
fn extremum<T: Number>(op: &Reduce, x: &Operand<'_>, better: Ordering) -> Result<Buffer, String> {
    let v = elements::<T>(x);
    let (bases, steps) = groups(op, &x.ty.shape);
    let mut y = Vec::with_capacity(bases.len());
    for b in bases {
        let mut each = steps.iter().map(|s| v[b + s]);
        let first = each.next().ok_or("has no extremum over nothing")?;
        y.push(each.fold(first, |a, e| if a.yields(e, better) { e } else { a }));
    }
    Ok(Buffer::new(y))
}

pub(super) fn cumsum(dim: usize, x: &Operand<'_>) -> Result<Buffer, String> {
    with_number!(x.ty.dtype, T => {
        let (outer, n, inner) = around(&x.ty.shape, dim);
        let mut y = elements::<T>(x).into_owned();
        for o in 0..outer {
            for i in inner..n * inner {
                let at = o * n * inner + i;
                y[at] = Number::add(y[at - inner], y[at]);
            }
        }
        Ok(Buffer::new(y))
    })
}
