//! Operators that move elements, or only change how they are addressed.

use fusionllm_graph::ops::{self, ConstantPad, SliceBackward};
use fusionllm_graph::{DType, Op, TensorType};

use super::tensor::{Array, row_major, with_bits};
use super::{Ran, all, generic, one};
use crate::kernels::generic::{Number, with_number};
use crate::kernels::{self, Region};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let out = &outputs[0];
    match op {
        Op::Detach(_) => Ok(inputs),
        Op::Reshape(op) => one(reshape(all(inputs)?, &op.shape)),
        Op::Permute(op) => one(permute(all(inputs)?, &op.dims)),
        Op::Expand(op) => one(expand(all(inputs)?, &op.shape)),
        Op::Slice(op) => one(slice(all(inputs)?, op)),
        Op::Split(op) => split(all(inputs)?, op),
        Op::Flip(op) => one(flip(all(inputs)?, &op.dims)),
        Op::SliceBackward(op) => one(slice_backward(all(inputs)?, op, out)?),
        Op::Cat(op) => one(cat(inputs, op.dim, out)),
        Op::ConstantPad(op) => one(pad(all(inputs)?, op, out)?),
        Op::Full(op) => one(full(out, op.value)?),
        _ => generic(op, inputs, outputs),
    }
}

fn reshape([x]: [Array; 1], shape: &[usize]) -> Array {
    let x = x.contiguous();
    let start = x.start;
    x.view(shape.to_vec(), row_major(shape), start)
}

fn permute([x]: [Array; 1], dims: &[usize]) -> Array {
    let (shape, strides) = dims.iter().map(|&d| (x.shape[d], x.strides[d])).unzip();
    let start = x.start;
    x.view(shape, strides, start)
}

fn expand([x]: [Array; 1], shape: &[usize]) -> Array {
    let (strides, start) = (x.broadcast(shape), x.start);
    x.view(shape.to_vec(), strides, start)
}

fn slice([x]: [Array; 1], op: &ops::Slice) -> Array {
    let (mut shape, mut strides, mut start) = (x.shape.clone(), x.strides.clone(), x.start);
    shape[op.dim] = (op.end - op.start).div_ceil(op.step);
    // An empty slice may begin behind the last element.
    if shape[op.dim] > 0 {
        start = (start as isize + strides[op.dim] * op.start as isize) as usize;
    }
    // A step behind the end is any step, but its product with a stride may not fit.
    strides[op.dim] *= op.step.min((op.end - op.start).max(1)) as isize;
    x.view(shape, strides, start)
}

fn split([x]: [Array; 1], op: &ops::Split) -> Ran {
    let mut start = 0;
    let parts = op.sizes.iter().map(|&size| {
        start += size;
        slice([x.clone()], &ops::Slice { dim: op.dim, start: start - size, end: start, step: 1 })
    });
    Ok(parts.collect())
}

/// Copies, since kernels of products and attention take no negative strides.
fn flip([x]: [Array; 1], dims: &[usize]) -> Array {
    let (mut strides, mut start) = (x.strides.clone(), x.start as isize);
    for &d in dims.iter().filter(|&&d| x.shape[d] > 1) {
        start += (x.shape[d] as isize - 1) * strides[d];
        strides[d] = -strides[d];
    }
    let shape = x.shape.clone();
    x.view(shape, strides, start as usize).contiguous()
}

/// Every element `value`, converted as casts convert.
pub(super) fn full(ty: &TensorType, value: f64) -> Result<Array, String> {
    if ty.dtype == DType::Bool {
        return Ok(Array::new(vec![u8::from(value != 0.0); ty.numel()], ty));
    }
    with_number!(ty.dtype, T => Ok(Array::new(vec![<T as Number>::of(value); ty.numel()], ty)))
}

/// Copies elements to places of `whole` that begin at `starts`, with the given distances.
fn put(whole: Array, starts: &[usize], steps: &[usize], x: &Array) -> Array {
    let region = Region { shape: whole.shape.clone(), starts, steps };
    with_bits!(whole.dtype, T => {
        let mut whole = whole.change::<T>();
        kernels::put(whole.elements::<T>(), &region, &x.shape, x.strided(&x.strides));
        whole.done()
    })
}

fn slice_backward([g]: [Array; 1], op: &SliceBackward, out: &TensorType) -> Result<Array, String> {
    let (mut starts, mut steps) = (vec![0; out.rank()], vec![1; out.rank()]);
    (starts[op.slice.dim], steps[op.slice.dim]) = (op.slice.start, op.slice.step);
    Ok(put(full(out, 0.0)?, &starts, &steps, &g))
}

fn pad([x]: [Array; 1], op: &ConstantPad, out: &TensorType) -> Result<Array, String> {
    if x.shape == out.shape {
        return Ok(x);
    }
    let starts: Vec<usize> = op.pads.iter().map(|&[before, _]| before).collect();
    Ok(put(full(out, op.value)?, &starts, &vec![1; out.rank()], &x))
}

fn cat(mut inputs: Vec<Array>, dim: usize, out: &TensorType) -> Array {
    inputs.retain(|x| !x.is_empty());
    if inputs.len() == 1 {
        return inputs.remove(0);
    }
    let (mut starts, steps) = (vec![0; out.rank()], vec![1; out.rank()]);
    let mut whole = with_bits!(out.dtype, T => Array::new(kernels::uninit::<T>(out.numel()), out));
    for x in &inputs {
        whole = put(whole, &starts, &steps, x);
        starts[dim] += x.shape[dim];
    }
    whole
}
