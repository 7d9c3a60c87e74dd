//! Pools.

use fusionllm_graph::ops::{AdaptiveAvgPool2d, AvgPool2d, MaxPool2d, MaxPool2dBackward};
use fusionllm_graph::{Op, TensorType};

use super::tensor::Array;
use super::{Ran, all, generic, one, view, with_float};
use crate::kernels::{self, Float, Windows};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let out = &outputs[0];
    if inputs.iter().any(Array::is_empty) {
        return match op {
            Op::MaxPool2d(_) => Err("has no largest element in an empty plane".into()),
            _ => one(view::full(out, 0.0)?),
        };
    }
    let dtype = out.dtype;
    match op {
        Op::MaxPool2d(op) => {
            let [x] = all(inputs)?;
            with_float!(dtype, T => Ok(max_pool::<T>(op, x, outputs)))
        }
        Op::MaxPool2dBackward(op) => {
            let inputs = all(inputs)?;
            with_float!(dtype, T => one(max_pool_backward::<T>(op, inputs, out)?))
        }
        Op::AvgPool2d(op) => {
            let [x] = all(inputs)?;
            with_float!(dtype, T => one(avg_pool::<T>(op, x, out)))
        }
        Op::AvgPool2dBackward(op) => {
            let [g] = all(inputs)?;
            with_float!(dtype, T => one(avg_pool_backward::<T>(&op.pool, g, out)))
        }
        Op::AdaptiveAvgPool2d(op) => {
            let [x] = all(inputs)?;
            with_float!(dtype, T => one(adaptive_avg_pool::<T>(op, x, out)))
        }
        Op::AdaptiveAvgPool2dBackward(_) => {
            let [g] = all(inputs)?;
            with_float!(dtype, T => one(adaptive_avg_pool_backward::<T>(g, out)))
        }
        _ => generic(op, inputs, outputs),
    }
}

fn plane(shape: &[usize]) -> [usize; 2] {
    [shape[2], shape[3]]
}

fn max_pool<T: Float>(op: &MaxPool2d, x: Array, outputs: &[TensorType]) -> Vec<Array> {
    let x = x.contiguous();
    let windows = Windows {
        input: plane(&x.shape),
        output: plane(&outputs[0].shape),
        kernel: op.kernel,
        stride: op.stride,
        padding: op.padding,
        dilation: op.dilation,
    };
    let (mut y, mut at) = (kernels::uninit::<T>(outputs[0].numel()), kernels::uninit::<i64>(outputs[1].numel()));
    kernels::max_pool2d(&mut y, &mut at, x.elements(), &windows);
    vec![Array::new(y, &outputs[0]), Array::new(at, &outputs[1])]
}

fn max_pool_backward<T: Float>(
    op: &MaxPool2dBackward,
    [grad, at]: [Array; 2],
    out: &TensorType,
) -> Result<Array, String> {
    let (grad, at) = (grad.contiguous(), at.contiguous());
    let mut dx = kernels::uninit::<T>(out.numel());
    let (area, out_area) = (op.input[0] * op.input[1], grad.shape[2] * grad.shape[3]);
    kernels::max_pool2d_backward(&mut dx, grad.elements(), at.elements(), area, out_area).map_err(|e| e.to_string())?;
    Ok(Array::new(dx, out))
}

fn avg_windows(op: &AvgPool2d, x: &[usize], y: &[usize]) -> Windows {
    Windows {
        input: plane(x),
        output: plane(y),
        kernel: op.kernel,
        stride: op.stride,
        padding: op.padding,
        dilation: [1, 1],
    }
}

fn avg_pool<T: Float>(op: &AvgPool2d, x: Array, out: &TensorType) -> Array {
    let x = x.contiguous();
    let mut y = kernels::uninit::<T>(out.numel());
    kernels::avg_pool2d(&mut y, x.elements(), &avg_windows(op, &x.shape, &out.shape), op.count_include_pad);
    Array::new(y, out)
}

fn avg_pool_backward<T: Float>(op: &AvgPool2d, grad: Array, out: &TensorType) -> Array {
    let grad = grad.contiguous();
    let mut dx = kernels::uninit::<T>(out.numel());
    let windows = avg_windows(op, &out.shape, &grad.shape);
    kernels::avg_pool2d_backward(&mut dx, grad.elements(), &windows, op.count_include_pad);
    Array::new(dx, out)
}

fn adaptive_avg_pool<T: Float>(op: &AdaptiveAvgPool2d, x: Array, out: &TensorType) -> Array {
    let x = x.contiguous();
    let mut y = kernels::uninit::<T>(out.numel());
    kernels::adaptive_avg_pool2d(&mut y, x.elements(), plane(&x.shape), op.output);
    Array::new(y, out)
}

fn adaptive_avg_pool_backward<T: Float>(grad: Array, out: &TensorType) -> Array {
    let grad = grad.contiguous();
    let mut dx = kernels::uninit::<T>(out.numel());
    kernels::adaptive_avg_pool2d_backward(&mut dx, grad.elements(), plane(&out.shape), plane(&grad.shape));
    Array::new(dx, out)
}
