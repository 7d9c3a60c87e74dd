//! Normalisation, softmax, losses, embeddings, pools and updates.

use burn_flex::FlexTensor;
use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{
    AdamwStep, AdaptiveAvgPool2d, AvgPool2d, BatchNorm, EmbeddingDenseBackward, LayerNorm, MaxPool2d,
    MaxPool2dBackward, SgdStep,
};

use super::tensor::{Scalar, change, contiguous, elements, overwrite, owned};
use crate::host::{self, Adamw, BatchNormOut, BatchNormSaved, Channels, LayerNormSaved, Sgd, Windows};

/// Elements normalised together.
fn width(ty: &TensorType, dims: usize) -> usize {
    ty.shape[ty.rank() - dims..].iter().product()
}

pub(super) fn layer_norm<T: Scalar>(
    op: &LayerNorm,
    inputs: Vec<FlexTensor>,
    outputs: &[TensorType],
) -> Vec<FlexTensor> {
    let inputs: Vec<FlexTensor> = inputs.into_iter().map(contiguous).collect();
    let [mut y, mut mean, mut rstd] = [0, 1, 2].map(|i| host::uninit::<T>(outputs[i].numel()));
    let (w, b) = (inputs.get(1).map(elements), inputs.get(2).map(elements));
    let width = width(&outputs[0], op.dims);
    host::layer_norm((&mut y, &mut mean, &mut rstd), elements(&inputs[0]), w, b, width, op.eps);
    [y, mean, rstd].into_iter().zip(outputs).map(|(v, ty)| owned(v, ty)).collect()
}

/// Operands: gradient, x, mean, rstd and perhaps the weight.
pub(super) fn layer_norm_input_grad<T: Scalar>(dims: usize, inputs: Vec<FlexTensor>, out: &TensorType) -> FlexTensor {
    let inputs: Vec<FlexTensor> = inputs.into_iter().map(contiguous).collect();
    let mut dx = host::uninit::<T>(out.numel());
    let saved = layer_norm_saved(dims, &inputs, out);
    host::layer_norm_input_grad(&mut dx, elements(&inputs[0]), saved, inputs.get(4).map(elements));
    owned(dx, out)
}

fn layer_norm_saved<'a, T: Scalar>(dims: usize, inputs: &'a [FlexTensor], x: &TensorType) -> LayerNormSaved<'a, T> {
    LayerNormSaved {
        x: elements(&inputs[1]),
        mean: elements(&inputs[2]),
        rstd: elements(&inputs[3]),
        width: width(x, dims),
    }
}

pub(super) fn layer_norm_weight_grad<T: Scalar>(
    dims: usize,
    inputs: Vec<FlexTensor>,
    x: &TensorType,
    outputs: &[TensorType],
) -> Vec<FlexTensor> {
    let inputs: Vec<FlexTensor> = inputs.into_iter().map(contiguous).collect();
    let [mut dw, mut db] = [0, 1].map(|i| host::uninit::<T>(outputs[i].numel()));
    host::layer_norm_weight_grad((&mut dw, &mut db), elements(&inputs[0]), layer_norm_saved(dims, &inputs, x));
    vec![owned(dw, &outputs[0]), owned(db, &outputs[1])]
}

fn channels(x: &TensorType) -> Channels {
    Channels { n: x.shape[0], c: x.shape[1], inner: x.shape[2..].iter().product() }
}

pub(super) fn batch_norm<T: Scalar>(
    op: &BatchNorm,
    inputs: Vec<FlexTensor>,
    outputs: &[TensorType],
) -> Option<Vec<FlexTensor>> {
    let [x, w, b, running_mean, running_var] = <[FlexTensor; 5]>::try_from(inputs).ok()?;
    let (x, w, b) = (contiguous(x), contiguous(w), contiguous(b));
    let (mut running_mean, mut running_var) = (change::<T>(running_mean), change::<T>(running_var));
    let [mut y, mut mean, mut rstd] = [0, 1, 2].map(|i| host::uninit::<T>(outputs[i].numel()));
    host::batch_norm(
        BatchNormOut { y: &mut y, mean: &mut mean, rstd: &mut rstd },
        (running_mean.elements(), running_var.elements()),
        elements(&x),
        (elements(&w), elements(&b)),
        channels(&outputs[0]),
        op.momentum,
        op.eps,
    );
    let mut results: Vec<FlexTensor> = [y, mean, rstd].into_iter().zip(outputs).map(|(v, ty)| owned(v, ty)).collect();
    results.extend([running_mean.done(), running_var.done()]);
    Some(results)
}

fn batch_norm_saved<'a, T: Scalar>(inputs: &'a [FlexTensor], x: &TensorType) -> BatchNormSaved<'a, T> {
    BatchNormSaved {
        x: elements(&inputs[1]),
        mean: elements(&inputs[2]),
        rstd: elements(&inputs[3]),
        sizes: channels(x),
    }
}

/// Operands: gradient, x, mean, rstd, weight.
pub(super) fn batch_norm_input_grad<T: Scalar>(inputs: Vec<FlexTensor>, out: &TensorType) -> FlexTensor {
    let inputs: Vec<FlexTensor> = inputs.into_iter().map(contiguous).collect();
    let mut dx = host::uninit::<T>(out.numel());
    host::batch_norm_input_grad(&mut dx, elements(&inputs[0]), batch_norm_saved(&inputs, out), elements(&inputs[4]));
    owned(dx, out)
}

pub(super) fn batch_norm_weight_grad<T: Scalar>(
    inputs: Vec<FlexTensor>,
    x: &TensorType,
    outputs: &[TensorType],
) -> Vec<FlexTensor> {
    let inputs: Vec<FlexTensor> = inputs.into_iter().map(contiguous).collect();
    let [mut dw, mut db] = [0, 1].map(|i| host::uninit::<T>(outputs[i].numel()));
    host::batch_norm_weight_grad((&mut dw, &mut db), elements(&inputs[0]), batch_norm_saved(&inputs, x));
    vec![owned(dw, &outputs[0]), owned(db, &outputs[1])]
}

/// Runs a kernel of rows along dimension `dim`, which is put last and back.
pub(super) fn along<T: Scalar>(x: FlexTensor, dim: usize, f: impl FnOnce(&mut [T], Option<&[T]>, usize)) -> FlexTensor {
    let rank = x.layout().num_dims();
    let width = x.layout().shape()[dim];
    let y = overwrite::<T>(last(x, dim), |out, source| f(out, source, width));
    if dim + 1 == rank { y } else { y.transpose(dim, rank - 1) }
}

/// Exchanges a dimension with the last one.
pub(super) fn last(x: FlexTensor, dim: usize) -> FlexTensor {
    let rank = x.layout().num_dims();
    if dim + 1 == rank { x } else { x.transpose(dim, rank - 1) }
}

/// Operands: gradient and result of a softmax or its logarithm.
pub(super) fn along_backward<T: Scalar>(
    grad: FlexTensor,
    y: FlexTensor,
    dim: usize,
    f: impl FnOnce(&mut [T], Option<&[T]>, &[T], usize),
) -> FlexTensor {
    let y = contiguous(last(y, dim));
    along::<T>(grad, dim, |out, source, width| f(out, source, elements(&y), width))
}

pub(super) fn cross_entropy<T: Scalar>(
    ignore: i64,
    logits: FlexTensor,
    target: FlexTensor,
    outputs: &[TensorType],
) -> Result<Vec<FlexTensor>, String> {
    let (logits, target) = (contiguous(logits), contiguous(target));
    let classes = logits.layout().shape()[1];
    let mut lse = host::uninit::<T>(outputs[1].numel());
    let loss = host::cross_entropy(&mut lse, elements(&logits), elements(&target), classes, ignore);
    let loss = loss.map_err(|e| e.to_string())?;
    Ok(vec![owned(vec![loss], &outputs[0]), owned(lse, &outputs[1])])
}

pub(super) fn cross_entropy_backward<T: Scalar>(
    ignore: i64,
    [grad, logits, target, lse]: [FlexTensor; 4],
) -> Result<FlexTensor, String> {
    let (target, lse) = (contiguous(target), contiguous(lse));
    let classes = logits.layout().shape()[1];
    let grad = elements::<T>(&contiguous(grad))[0];
    let mut outcome = Ok(());
    let d = overwrite::<T>(logits, |out, source| {
        let (target, lse) = (elements(&target), elements(&lse));
        outcome = host::cross_entropy_backward(out, source, grad, target, lse, classes, ignore);
    });
    outcome.map(|()| d).map_err(|e| e.to_string())
}

pub(super) fn embedding<T: Scalar>(table: FlexTensor, ids: FlexTensor, out: &TensorType) -> Result<FlexTensor, String> {
    let (table, ids) = (contiguous(table), contiguous(ids));
    let mut y = host::uninit::<T>(out.numel());
    let width = table.layout().shape()[1];
    host::embedding(&mut y, elements(&table), elements(&ids), width).map_err(|e| e.to_string())?;
    Ok(owned(y, out))
}

pub(super) fn embedding_backward<T: Scalar>(
    op: &EmbeddingDenseBackward,
    grad: FlexTensor,
    ids: FlexTensor,
    out: &TensorType,
) -> Result<FlexTensor, String> {
    let (grad, ids) = (contiguous(grad), contiguous(ids));
    let mut d = host::uninit::<T>(out.numel());
    host::embedding_backward(&mut d, elements(&grad), elements(&ids), out.shape[1], op.padding_idx)
        .map_err(|e| e.to_string())?;
    Ok(owned(d, out))
}

fn plane(ty: &TensorType) -> [usize; 2] {
    [ty.shape[2], ty.shape[3]]
}

pub(super) fn max_pool<T: Scalar>(
    op: &MaxPool2d,
    x: FlexTensor,
    ty: &TensorType,
    outputs: &[TensorType],
) -> Vec<FlexTensor> {
    let x = contiguous(x);
    let windows = Windows {
        input: plane(ty),
        output: plane(&outputs[0]),
        kernel: op.kernel,
        stride: op.stride,
        padding: op.padding,
        dilation: op.dilation,
    };
    let (mut y, mut at) = (host::uninit::<T>(outputs[0].numel()), host::uninit::<i64>(outputs[1].numel()));
    host::max_pool2d(&mut y, &mut at, elements(&x), &windows);
    vec![owned(y, &outputs[0]), owned(at, &outputs[1])]
}

pub(super) fn max_pool_backward<T: Scalar>(
    op: &MaxPool2dBackward,
    grad: FlexTensor,
    at: FlexTensor,
    ty: &TensorType,
    out: &TensorType,
) -> Result<FlexTensor, String> {
    let (grad, at) = (contiguous(grad), contiguous(at));
    let mut dx = host::uninit::<T>(out.numel());
    let (area, out_area) = (op.input[0] * op.input[1], ty.shape[2] * ty.shape[3]);
    host::max_pool2d_backward(&mut dx, elements(&grad), elements(&at), area, out_area).map_err(|e| e.to_string())?;
    Ok(owned(dx, out))
}

fn avg_windows(op: &AvgPool2d, x: &TensorType, y: &TensorType) -> Windows {
    Windows {
        input: plane(x),
        output: plane(y),
        kernel: op.kernel,
        stride: op.stride,
        padding: op.padding,
        dilation: [1, 1],
    }
}

pub(super) fn avg_pool<T: Scalar>(op: &AvgPool2d, x: FlexTensor, ty: &TensorType, out: &TensorType) -> FlexTensor {
    let x = contiguous(x);
    let mut y = host::uninit::<T>(out.numel());
    host::avg_pool2d(&mut y, elements(&x), &avg_windows(op, ty, out), op.count_include_pad);
    owned(y, out)
}

pub(super) fn avg_pool_backward<T: Scalar>(
    op: &AvgPool2d,
    grad: FlexTensor,
    ty: &TensorType,
    out: &TensorType,
) -> FlexTensor {
    let grad = contiguous(grad);
    let mut dx = host::uninit::<T>(out.numel());
    host::avg_pool2d_backward(&mut dx, elements(&grad), &avg_windows(op, out, ty), op.count_include_pad);
    owned(dx, out)
}

pub(super) fn adaptive_avg_pool<T: Scalar>(
    op: &AdaptiveAvgPool2d,
    x: FlexTensor,
    ty: &TensorType,
    out: &TensorType,
) -> FlexTensor {
    let x = contiguous(x);
    let mut y = host::uninit::<T>(out.numel());
    host::adaptive_avg_pool2d(&mut y, elements(&x), plane(ty), op.output);
    owned(y, out)
}

pub(super) fn adaptive_avg_pool_backward<T: Scalar>(grad: FlexTensor, ty: &TensorType, out: &TensorType) -> FlexTensor {
    let grad = contiguous(grad);
    let mut dx = host::uninit::<T>(out.numel());
    host::adaptive_avg_pool2d_backward(&mut dx, elements(&grad), plane(out), plane(ty));
    owned(dx, out)
}

pub(super) fn adamw<T: Scalar>(op: &AdamwStep, [p, g, m, v, hyper]: [FlexTensor; 5]) -> Vec<FlexTensor> {
    let (g, hyper) = (contiguous(g), contiguous(hyper));
    let [mut p, mut m, mut v] = [p, m, v].map(change::<T>);
    let h = elements::<f64>(&hyper);
    let step = Adamw {
        lr: h[0],
        beta1: op.beta1,
        beta2: op.beta2,
        eps: op.eps,
        weight_decay: op.weight_decay,
        correction1: h[1],
        correction2: h[2],
        factor: h[3],
    };
    host::adamw::<T>(p.elements(), elements(&g), m.elements(), v.elements(), &step);
    vec![p.done(), m.done(), v.done()]
}

pub(super) fn sgd<T: Scalar>(op: &SgdStep, [p, g, m, hyper]: [FlexTensor; 4]) -> Vec<FlexTensor> {
    let (g, hyper) = (contiguous(g), contiguous(hyper));
    let [mut p, mut m] = [p, m].map(change::<T>);
    let h = elements::<f64>(&hyper);
    let step =
        Sgd { lr: h[0], momentum: op.momentum, weight_decay: op.weight_decay, nesterov: op.nesterov, factor: h[1] };
    host::sgd::<T>(p.elements(), elements(&g), m.elements(), &step);
    vec![p.done(), m.done()]
}
