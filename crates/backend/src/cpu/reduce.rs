//! Reductions.

use fusionllm_graph::ops::{ArgReduce, Reduce, ReduceKind};
use fusionllm_graph::{Op, TensorType};

use super::tensor::Array;
use super::{Ran, all, generic, one, view, with_float};
use crate::kernels::generic::with_number;
use crate::kernels::{self, Element, Float};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let out = &outputs[0];
    match op {
        Op::Reduce(reduce) => {
            let nothing = inputs.iter().any(Array::is_empty);
            match reduce.kind {
                ReduceKind::Any | ReduceKind::All => generic(op, inputs, outputs),
                ReduceKind::Mean if nothing => one(view::full(out, f64::NAN)?),
                _ if nothing || !out.dtype.is_float() => generic(op, inputs, outputs),
                _ => {
                    let [x] = all(inputs)?;
                    with_float!(out.dtype, T => one(floats::<T>(reduce, x, out)))
                }
            }
        }
        Op::ArgReduce(op) => {
            let [x] = all(inputs)?;
            with_number!(x.dtype, T => one(arg_reduce::<T>(op, x, out)))
        }
        Op::SquaredNorm(_) => {
            let [x] = all(inputs)?;
            let x = x.contiguous();
            let sum = with_float!(x.dtype, T => Ok(kernels::sum_of_squares(x.elements::<T>())))?;
            one(Array::new(vec![sum], out))
        }
        _ => generic(op, inputs, outputs),
    }
}

/// Reduces adjacent dimensions together, the last ones first. The operand is not empty.
fn floats<T: Float>(op: &Reduce, x: Array, out: &TensorType) -> Array {
    let x = x.contiguous();
    let mut shape = x.shape.clone();
    let mut dims = op.dims.as_slice();
    let mut y: Option<Vec<T>> = None;
    while let Some(&last) = dims.last() {
        let run = dims.iter().rev().zip(0..).take_while(|(d, i)| **d + i == last).count();
        dims = &dims[..dims.len() - run];
        let first = last + 1 - run;
        let outer: usize = shape[..first].iter().product();
        let n: usize = shape[first..=last].iter().product();
        let inner: usize = shape[last + 1..].iter().product();
        let source = y.as_deref().unwrap_or_else(|| x.elements());
        let mut next = kernels::uninit(outer * inner);
        match op.kind {
            ReduceKind::Amax => kernels::fold_dim(&mut next, source, n, inner, |a, b| extremum(a, b, a > b)),
            ReduceKind::Amin => kernels::fold_dim(&mut next, source, n, inner, |a, b| extremum(a, b, a < b)),
            ReduceKind::Prod => kernels::fold_dim(&mut next, source, n, inner, |a, b| a * b),
            _ => kernels::sum_dim(&mut next, source, n, inner),
        }
        y = Some(next);
        shape[first..=last].fill(1);
    }
    let mut y = y.unwrap_or_else(|| x.elements().to_vec());
    if op.kind == ReduceKind::Mean {
        let n: usize = op.dims.iter().map(|&d| x.shape[d]).product();
        let n = T::of(n as f64);
        y.iter_mut().for_each(|v| *v = *v / n);
    }
    Array::new(y, out)
}

/// `a` if it is better or NaN, else `b`.
fn extremum<T: Float>(a: T, b: T, better: bool) -> T {
    if better || a.nan() { a } else { b }
}

fn arg_reduce<T: Element + PartialOrd>(op: &ArgReduce, x: Array, out: &TensorType) -> Array {
    let x = x.contiguous();
    let inner = x.shape[op.dim + 1..].iter().product();
    let mut at = kernels::uninit::<i64>(out.numel());
    kernels::arg_extremum(&mut at, x.elements::<T>(), x.shape[op.dim], inner, op.largest);
    Array::new(at, out)
}
