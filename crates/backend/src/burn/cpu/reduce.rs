//! Reductions.

use burn_flex::FlexTensor;
use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{Reduce, ReduceKind};

use super::tensor::{Scalar, contiguous, elements, owned};
use crate::host;

/// Adjacent dimensions are reduced together, the last ones first. The operand is not empty.
pub(super) fn reduce<T: Scalar>(op: &Reduce, x: FlexTensor, ty: &TensorType, out: &TensorType) -> FlexTensor {
    let x = contiguous(x);
    let mut shape = ty.shape.clone();
    let mut dims = op.dims.as_slice();
    let mut y: Option<Vec<T>> = None;
    while let Some(&last) = dims.last() {
        let run = dims.iter().rev().zip(0..).take_while(|(d, i)| **d + i == last).count();
        dims = &dims[..dims.len() - run];
        let first = last + 1 - run;
        let outer: usize = shape[..first].iter().product();
        let n: usize = shape[first..=last].iter().product();
        let inner: usize = shape[last + 1..].iter().product();
        let source = y.as_deref().unwrap_or_else(|| elements(&x));
        let mut next = host::uninit(outer * inner);
        match op.kind {
            ReduceKind::Amax => host::fold_dim(&mut next, source, n, inner, |a, b| extremum(a, b, a > b)),
            ReduceKind::Amin => host::fold_dim(&mut next, source, n, inner, |a, b| extremum(a, b, a < b)),
            ReduceKind::Prod => host::fold_dim(&mut next, source, n, inner, |a, b| a * b),
            _ => host::sum_dim(&mut next, source, n, inner),
        }
        y = Some(next);
        shape[first..=last].fill(1);
    }
    let mut y = y.unwrap_or_else(|| elements(&x).to_vec());
    if op.kind == ReduceKind::Mean {
        let n: usize = op.dims.iter().map(|&d| ty.shape[d]).product();
        let n = T::of(n as f64);
        y.iter_mut().for_each(|v| *v = *v / n);
    }
    owned(y, out)
}

/// `a` if it is better or NaN, else `b`.
fn extremum<T: Scalar>(a: T, b: T, better: bool) -> T {
    if better || a.nan() { a } else { b }
}
