//! Matrix products, convolutions and pools.

use burn_backend::ops::ConvOptions;
use burn_backend::tensor::FloatTensor;
use fusionllm_graph::TensorType;
use fusionllm_graph::ops::{AvgPool2d, AvgPool2dBackward, Conv2d, Conv2dInputGrad, Conv2dWeightGrad, MaxPool2d};

use super::tensor::{Data, Framework};

/// Whether the result is a sum of nothing, which burn's kernels do not support.
fn sums_nothing(operands: &[&TensorType]) -> bool {
    operands.iter().any(|t| t.numel() == 0)
}

pub(super) fn matmul<B: Framework>(
    a: Data<B>,
    b: Data<B>,
    types: &[TensorType],
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    if sums_nothing(&[&types[0], &types[1]]) {
        return Ok(Data::full(out, 0.0, device));
    }
    // The order of burn's sums depends on strides. Some of its kernels want operands with the same number of
    // dimensions.
    let operand = |x: Data<B>, ty: &TensorType| {
        let missing = out.rank().saturating_sub(ty.rank());
        let dims: Vec<usize> = std::iter::repeat_n(1, missing).chain(ty.shape.iter().copied()).collect();
        B::contiguous(x.reshape(&dims)).float()
    };
    Ok(Data::Float(B::float_matmul(operand(a, &types[0])?, operand(b, &types[1])?)))
}

fn options(op: &Conv2d) -> ConvOptions<2> {
    ConvOptions::new(op.stride, op.padding, op.dilation, op.groups)
}

pub(super) fn conv2d<B: Framework>(
    op: &Conv2d,
    x: Data<B>,
    weight: Data<B>,
    bias: Option<Data<B>>,
    types: &[TensorType],
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    if sums_nothing(&[&types[0], &types[1]]) {
        return Ok(match bias {
            Some(bias) => bias.reshape(&[1, out.shape[1], 1, 1]).expand(&out.shape),
            None => Data::full(out, 0.0, device),
        });
    }
    // One of burn's kernels reads a bias as if it were contiguous.
    let bias = bias.map(|bias| B::contiguous(bias).float()).transpose()?;
    Ok(Data::Float(B::conv2d(x.float()?, weight.float()?, bias, options(op))))
}

/// A forward operand for burn's backward functions, which read only its shape.
fn placeholder<B: Framework>(ty: &TensorType, device: &B::Device) -> Result<FloatTensor<B>, String> {
    Data::<B>::full(&TensorType::new(ty.dtype, vec![1; ty.rank()]), 0.0, device).expand(&ty.shape).float()
}

pub(super) fn conv2d_input_grad<B: Framework>(
    op: &Conv2dInputGrad,
    g: Data<B>,
    weight: Data<B>,
    types: &[TensorType],
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    if sums_nothing(&[&types[0], &types[1]]) {
        return Ok(Data::full(out, 0.0, device));
    }
    let x = placeholder::<B>(out, device)?;
    Ok(Data::Float(B::conv2d_x_backward(x, weight.float()?, g.float()?, options(&op.conv))))
}

pub(super) fn conv2d_weight_grad<B: Framework>(
    op: &Conv2dWeightGrad,
    g: Data<B>,
    x: Data<B>,
    types: &[TensorType],
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    if sums_nothing(&[&types[0], &types[1]]) {
        return Ok(Data::full(out, 0.0, device));
    }
    let weight = placeholder::<B>(out, device)?;
    Ok(Data::Float(B::conv2d_weight_backward(x.float()?, weight, g.float()?, options(&op.conv))))
}

pub(super) fn max_pool<B: Framework>(op: &MaxPool2d, x: Data<B>) -> Result<Vec<Data<B>>, String> {
    if x.shape().contains(&0) {
        return Err("has no largest element in an empty plane".into());
    }
    let y = B::max_pool2d_with_indices(
        x.float()?,
        op.kernel,
        op.stride,
        op.padding,
        op.dilation,
        op.ceil_mode,
        burn_backend::IntDType::I64,
    );
    Ok(vec![Data::Float(y.output), Data::Int(y.indices)])
}

pub(super) fn avg_pool<B: Framework>(op: &AvgPool2d, x: Data<B>) -> Result<Data<B>, String> {
    let x = x.float()?;
    Ok(Data::Float(B::avg_pool2d(x, op.kernel, op.stride, op.padding, op.count_include_pad, op.ceil_mode)))
}

pub(super) fn avg_pool_backward<B: Framework>(
    op: &AvgPool2dBackward,
    g: Data<B>,
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    let (x, p) = (placeholder::<B>(out, device)?, op.pool);
    let g = g.float()?;
    Ok(Data::Float(B::avg_pool2d_backward(x, g, p.kernel, p.stride, p.padding, p.count_include_pad, p.ceil_mode)))
}

pub(super) fn adaptive_avg_pool_backward<B: Framework>(
    g: Data<B>,
    out: &TensorType,
    device: &B::Device,
) -> Result<Data<B>, String> {
    if g.shape().contains(&0) {
        return Ok(Data::full(out, 0.0, device));
    }
    Ok(Data::Float(B::adaptive_avg_pool2d_backward(placeholder::<B>(out, device)?, g.float()?)))
}
