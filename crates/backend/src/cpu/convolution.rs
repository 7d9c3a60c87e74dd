//! Convolutions.

use fusionllm_graph::ops::Conv2d;
use fusionllm_graph::{Op, TensorType};

use super::tensor::Array;
use super::{Ran, all, all_and_optional, generic, one, view, with_float};
use crate::kernels::{self, Convolution, Float};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let out = &outputs[0];
    // A sum of no products is the bias alone.
    if inputs.iter().any(Array::is_empty) {
        return one(match (op, inputs.into_iter().nth(2)) {
            (Op::Conv2d(_), Some(bias)) => {
                let (channel, start) = (bias.strides[0], bias.start);
                bias.view(out.shape.clone(), vec![0, channel, 0, 0], start)
            }
            _ => view::full(out, 0.0)?,
        });
    }
    match op {
        Op::Conv2d(op) => {
            let ([x, weight], bias) = all_and_optional(inputs)?;
            with_float!(out.dtype, T => one(forward::<T>(op, x, weight, bias, out)))
        }
        Op::Conv2dInputGrad(op) => {
            let [g, weight] = all(inputs)?;
            with_float!(out.dtype, T => one(input_grad::<T>(&op.conv, g, weight, out)))
        }
        Op::Conv2dWeightGrad(op) => {
            let [g, x] = all(inputs)?;
            with_float!(out.dtype, T => one(weight_grad::<T>(&op.conv, g, x, out)))
        }
        _ => generic(op, inputs, outputs),
    }
}

/// Sizes from the shapes of operand, weight and result.
fn sizes(op: &Conv2d, x: &[usize], weight: &[usize], y: &[usize]) -> Convolution {
    Convolution {
        n: x[0],
        c: x[1],
        input: [x[2], x[3]],
        o: y[1],
        kernel: [weight[2], weight[3]],
        output: [y[2], y[3]],
        stride: op.stride,
        padding: op.padding,
        dilation: op.dilation,
        groups: op.groups,
    }
}

fn forward<T: Float>(op: &Conv2d, x: Array, weight: Array, bias: Option<Array>, out: &TensorType) -> Array {
    let (x, weight, bias) = (x.contiguous(), weight.contiguous(), bias.map(Array::contiguous));
    let mut y = kernels::uninit::<T>(out.numel());
    let sizes = sizes(op, &x.shape, &weight.shape, &out.shape);
    kernels::conv2d(&mut y, &sizes, x.elements(), weight.elements(), bias.as_ref().map(Array::elements));
    Array::new(y, out)
}

fn input_grad<T: Float>(op: &Conv2d, grad: Array, weight: Array, out: &TensorType) -> Array {
    let (grad, weight) = (grad.contiguous(), weight.contiguous());
    let mut dx = kernels::uninit::<T>(out.numel());
    let sizes = sizes(op, &out.shape, &weight.shape, &grad.shape);
    kernels::conv2d_input_grad(&mut dx, &sizes, grad.elements(), weight.elements());
    Array::new(dx, out)
}

fn weight_grad<T: Float>(op: &Conv2d, grad: Array, x: Array, out: &TensorType) -> Array {
    let (grad, x) = (grad.contiguous(), x.contiguous());
    let mut dw = kernels::uninit::<T>(out.numel());
    let sizes = sizes(op, &x.shape, &out.shape, &grad.shape);
    kernels::conv2d_weight_grad(&mut dw, &sizes, grad.elements(), x.elements());
    Array::new(dw, out)
}
