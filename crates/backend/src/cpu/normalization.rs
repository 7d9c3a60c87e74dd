//! Normalisation and softmax.

use fusionllm_graph::ops::{BatchNorm, LayerNorm};
use fusionllm_graph::{Op, TensorType};

use super::tensor::Array;
use super::{Ran, all, generic, one, with_float};
use crate::kernels::{self, BatchNormOut, BatchNormSaved, Channels, Float, LayerNormSaved};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let out = &outputs[0];
    let contiguous = |inputs: Vec<Array>| -> Vec<Array> { inputs.into_iter().map(Array::contiguous).collect() };
    match op {
        Op::LayerNorm(op) => {
            let inputs = contiguous(inputs);
            with_float!(out.dtype, T => Ok(layer_norm::<T>(op, &inputs, outputs)))
        }
        Op::LayerNormInputGrad(op) => {
            let inputs = contiguous(inputs);
            with_float!(out.dtype, T => one(layer_norm_input_grad::<T>(op.dims, &inputs, out)))
        }
        Op::LayerNormWeightGrad(op) => {
            let inputs = contiguous(inputs);
            with_float!(out.dtype, T => Ok(layer_norm_weight_grad::<T>(op.dims, &inputs, outputs)))
        }
        Op::BatchNorm(op) => {
            let inputs = all(inputs)?;
            with_float!(out.dtype, T => Ok(batch_norm::<T>(op, inputs, outputs)))
        }
        Op::BatchNormInputGrad(_) => {
            let inputs = contiguous(inputs);
            with_float!(out.dtype, T => one(batch_norm_input_grad::<T>(&inputs, out)))
        }
        Op::BatchNormWeightGrad(_) => {
            let inputs = contiguous(inputs);
            with_float!(out.dtype, T => Ok(batch_norm_weight_grad::<T>(&inputs, outputs)))
        }
        Op::Softmax(op) => {
            let [x] = all(inputs)?;
            with_float!(out.dtype, T => one(along::<T>(x, op.dim, kernels::softmax)))
        }
        Op::SoftmaxBackward(op) => {
            let inputs = all(inputs)?;
            with_float!(out.dtype, T => one(along_backward::<T>(inputs, op.dim, kernels::softmax_backward)))
        }
        Op::LogSoftmax(op) => {
            let [x] = all(inputs)?;
            with_float!(out.dtype, T => one(along::<T>(x, op.dim, kernels::log_softmax)))
        }
        Op::LogSoftmaxBackward(op) => {
            let inputs = all(inputs)?;
            with_float!(out.dtype, T => one(along_backward::<T>(inputs, op.dim, kernels::log_softmax_backward)))
        }
        _ => generic(op, inputs, outputs),
    }
}

/// The product of the last `dims` sizes: elements that are normalised together.
fn width(shape: &[usize], dims: usize) -> usize {
    shape[shape.len() - dims..].iter().product()
}

fn layer_norm<T: Float>(op: &LayerNorm, inputs: &[Array], outputs: &[TensorType]) -> Vec<Array> {
    let [mut y, mut mean, mut rstd] = [0, 1, 2].map(|i| kernels::uninit::<T>(outputs[i].numel()));
    let (w, b) = (inputs.get(1).map(Array::elements), inputs.get(2).map(Array::elements));
    let width = width(&outputs[0].shape, op.dims);
    kernels::layer_norm((&mut y, &mut mean, &mut rstd), inputs[0].elements(), w, b, width, op.eps);
    [y, mean, rstd].into_iter().zip(outputs).map(|(v, ty)| Array::new(v, ty)).collect()
}

/// Operands of both gradients: the result's gradient, x, mean, rstd and perhaps the weight.
fn layer_norm_saved<T: Float>(dims: usize, inputs: &[Array]) -> LayerNormSaved<'_, T> {
    LayerNormSaved {
        x: inputs[1].elements(),
        mean: inputs[2].elements(),
        rstd: inputs[3].elements(),
        width: width(&inputs[1].shape, dims),
    }
}

fn layer_norm_input_grad<T: Float>(dims: usize, inputs: &[Array], out: &TensorType) -> Array {
    let mut dx = kernels::uninit::<T>(out.numel());
    let (saved, weight) = (layer_norm_saved(dims, inputs), inputs.get(4).map(Array::elements));
    kernels::layer_norm_input_grad(&mut dx, inputs[0].elements(), saved, weight);
    Array::new(dx, out)
}

fn layer_norm_weight_grad<T: Float>(dims: usize, inputs: &[Array], outputs: &[TensorType]) -> Vec<Array> {
    let [mut dw, mut db] = [0, 1].map(|i| kernels::uninit::<T>(outputs[i].numel()));
    kernels::layer_norm_weight_grad((&mut dw, &mut db), inputs[0].elements(), layer_norm_saved(dims, inputs));
    vec![Array::new(dw, &outputs[0]), Array::new(db, &outputs[1])]
}

fn channels(shape: &[usize]) -> Channels {
    Channels { n: shape[0], c: shape[1], inner: shape[2..].iter().product() }
}

fn batch_norm<T: Float>(
    op: &BatchNorm,
    [x, w, b, running_mean, running_var]: [Array; 5],
    outputs: &[TensorType],
) -> Vec<Array> {
    let (x, w, b) = (x.contiguous(), w.contiguous(), b.contiguous());
    let (mut running_mean, mut running_var) = (running_mean.change::<T>(), running_var.change::<T>());
    let [mut y, mut mean, mut rstd] = [0, 1, 2].map(|i| kernels::uninit::<T>(outputs[i].numel()));
    kernels::batch_norm(
        BatchNormOut { y: &mut y, mean: &mut mean, rstd: &mut rstd },
        (running_mean.elements(), running_var.elements()),
        x.elements(),
        (w.elements(), b.elements()),
        channels(&x.shape),
        op.momentum,
        op.eps,
    );
    let mut results: Vec<Array> = [y, mean, rstd].into_iter().zip(outputs).map(|(v, ty)| Array::new(v, ty)).collect();
    results.extend([running_mean.done(), running_var.done()]);
    results
}

/// Operands of both gradients: the result's gradient, x, mean, rstd, and the weight for the input's.
fn batch_norm_saved<T: Float>(inputs: &[Array]) -> BatchNormSaved<'_, T> {
    BatchNormSaved {
        x: inputs[1].elements(),
        mean: inputs[2].elements(),
        rstd: inputs[3].elements(),
        sizes: channels(&inputs[1].shape),
    }
}

fn batch_norm_input_grad<T: Float>(inputs: &[Array], out: &TensorType) -> Array {
    let mut dx = kernels::uninit::<T>(out.numel());
    kernels::batch_norm_input_grad(&mut dx, inputs[0].elements(), batch_norm_saved(inputs), inputs[4].elements());
    Array::new(dx, out)
}

fn batch_norm_weight_grad<T: Float>(inputs: &[Array], outputs: &[TensorType]) -> Vec<Array> {
    let [mut dw, mut db] = [0, 1].map(|i| kernels::uninit::<T>(outputs[i].numel()));
    kernels::batch_norm_weight_grad((&mut dw, &mut db), inputs[0].elements(), batch_norm_saved(inputs));
    vec![Array::new(dw, &outputs[0]), Array::new(db, &outputs[1])]
}

/// Exchanges a dimension with the last one.
fn swapped(mut x: Array, dim: usize) -> Array {
    let last = x.shape.len() - 1;
    x.shape.swap(dim, last);
    x.strides.swap(dim, last);
    x
}

/// Runs a kernel over rows along dimension `dim`.
fn along<T: Float>(x: Array, dim: usize, f: impl FnOnce(&mut [T], Option<&[T]>, usize)) -> Array {
    let width = x.shape[dim];
    swapped(swapped(x, dim).overwrite::<T>(|out, source| f(out, source, width)), dim)
}

/// Runs a kernel like [`along`], for the gradient of a result `y`.
fn along_backward<T: Float>(
    [grad, y]: [Array; 2],
    dim: usize,
    f: impl FnOnce(&mut [T], Option<&[T]>, &[T], usize),
) -> Array {
    let y = swapped(y, dim).contiguous();
    along::<T>(grad, dim, |out, source, width| f(out, source, y.elements(), width))
}
