//! Reductions and scans.

use std::cmp::Ordering;

use fusionllm_graph::ops::{Reduce, ReduceKind};
use fusionllm_graph::{HostTensor, TensorType};

use super::element::{Number, around, elements, strided_offsets, tensor, with_number};

pub(super) fn reduce(op: &Reduce, x: &HostTensor, out: &TensorType) -> Result<HostTensor, String> {
    match op.kind {
        ReduceKind::Any => fold(op, x, out, 0u8, |a, b| a | b),
        ReduceKind::All => fold(op, x, out, 1u8, |a, b| a & b),
        kind => with_number!(x.dtype(), T => match kind {
            ReduceKind::Sum => fold::<T>(op, x, out, T::ZERO, Number::add),
            ReduceKind::Prod => fold::<T>(op, x, out, T::ONE, Number::mul),
            ReduceKind::Amax => extremum::<T>(op, x, out, Ordering::Greater),
            ReduceKind::Amin => extremum::<T>(op, x, out, Ordering::Less),
            ReduceKind::Mean | ReduceKind::Any | ReduceKind::All => {
                Err("is not among the operators that run on the host".into())
            }
        }),
    }
}

/// For every element of the result, in order, the positions of the operand's elements that it is made of, in order.
fn groups(op: &Reduce, shape: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    let pick = |reduced: bool| -> (Vec<usize>, Vec<usize>) {
        (0..shape.len()).filter(|d| op.dims.contains(d) == reduced).map(|d| (shape[d], strides[d])).unzip()
    };
    let (kept, reduced) = (pick(false), pick(true));
    (strided_offsets(&kept.0, &kept.1), strided_offsets(&reduced.0, &reduced.1))
}

fn fold<T: bytemuck::Pod>(
    op: &Reduce,
    x: &HostTensor,
    out: &TensorType,
    start: T,
    f: fn(T, T) -> T,
) -> Result<HostTensor, String> {
    let v = elements::<T>(x);
    let (bases, steps) = groups(op, x.shape());
    let y: Vec<T> = bases.iter().map(|b| steps.iter().fold(start, |a, s| f(a, v[b + s]))).collect();
    tensor(out.clone(), &y)
}

/// The largest or smallest; NaN if there is one.
fn extremum<T: Number>(op: &Reduce, x: &HostTensor, out: &TensorType, better: Ordering) -> Result<HostTensor, String> {
    let v = elements::<T>(x);
    let (bases, steps) = groups(op, x.shape());
    let mut y = Vec::with_capacity(bases.len());
    for b in bases {
        let mut each = steps.iter().map(|s| v[b + s]);
        let first = each.next().ok_or("has no extremum over nothing")?;
        y.push(each.fold(first, |a, e| if a.yields(e, better) { e } else { a }));
    }
    tensor(out.clone(), &y)
}

pub(super) fn cumsum(dim: usize, x: &HostTensor) -> Result<HostTensor, String> {
    with_number!(x.dtype(), T => {
        let (outer, n, inner) = around(x.shape(), dim);
        let mut y = elements::<T>(x).into_owned();
        for o in 0..outer {
            for i in inner..n * inner {
                let at = o * n * inner + i;
                y[at] = Number::add(y[at - inner], y[at]);
            }
        }
        tensor(x.ty().clone(), &y)
    })
}
