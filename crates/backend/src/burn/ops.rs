//! Runs each operator by burn's functions, by a generic kernel, or by its decomposition.

use fusionllm_graph::ops::{Binary, ReduceKind, ScatterAdd, Unary};
use fusionllm_graph::units::counted;
use fusionllm_graph::{HostTensor, Op, TensorType};

use super::tensor::{Data, Framework};
use super::{elementwise, index, reduce, spatial, view};
use crate::kernels::generic::{self, Operand};

/// Runs `op` and takes its operands, whose types are `types`. Returns `None` and leaves them if `op` is to be
/// decomposed.
///
/// At least one result is not empty.
pub(super) fn run<B: Framework>(
    device: &B::Device,
    op: &Op,
    inputs: &mut Vec<Data<B>>,
    types: &[TensorType],
    outputs: &[TensorType],
) -> Result<Option<Vec<Data<B>>>, String> {
    if needs_generic_kernel(op, types) {
        return run_generic(device, op, std::mem::take(inputs), types, outputs).map(Some);
    }
    match op {
        Op::CrossEntropy(op) => index::check_targets(&inputs[1], types[0].shape[1], op.ignore_index)?,
        Op::CrossEntropyBackward(op) => index::check_targets(&inputs[2], types[1].shape[1], op.ignore_index)?,
        _ => {}
    }
    match op {
        Op::Unary(_)
        | Op::Binary(_)
        | Op::BinaryScalar(_)
        | Op::Compare(_)
        | Op::CompareScalar(_)
        | Op::Logical(_)
        | Op::Where(_)
        | Op::Clamp(_)
        | Op::Cast(_)
        | Op::Dropout(_) => arithmetic(device, op, std::mem::take(inputs), types, outputs).map(Some),
        Op::Reshape(_)
        | Op::Permute(_)
        | Op::Detach(_)
        | Op::Expand(_)
        | Op::Slice(_)
        | Op::SliceBackward(_)
        | Op::Cat(_)
        | Op::Split(_)
        | Op::Flip(_)
        | Op::ConstantPad(_)
        | Op::Full(_) => movement(device, op, std::mem::take(inputs), outputs).map(Some),
        Op::Embedding(_)
        | Op::EmbeddingDenseBackward(_)
        | Op::IndexSelect(_)
        | Op::IndexAdd(_)
        | Op::Gather(_)
        | Op::ScatterAdd(_)
        | Op::MaxPool2dBackward(_) => indexing(device, op, std::mem::take(inputs), outputs).map(Some),
        Op::Reduce(_)
        | Op::Matmul(_)
        | Op::Conv2d(_)
        | Op::Conv2dInputGrad(_)
        | Op::Conv2dWeightGrad(_)
        | Op::MaxPool2d(_)
        | Op::AvgPool2d(_)
        | Op::AvgPool2dBackward(_)
        | Op::AdaptiveAvgPool2d(_)
        | Op::AdaptiveAvgPool2dBackward(_) => sums(device, op, std::mem::take(inputs), types, outputs).map(Some),
        Op::ArgReduce(_)
        | Op::CumSum(_)
        | Op::Triangle(_)
        | Op::Arange(_)
        | Op::Scatter(_)
        | Op::Index(_)
        | Op::IndexPut(_)
        | Op::TopK(_)
        | Op::Sort(_) => run_generic(device, op, std::mem::take(inputs), types, outputs).map(Some),
        Op::Gelu(_)
        | Op::GeluBackward(_)
        | Op::ThresholdBackward(_)
        | Op::Linear(_)
        | Op::LayerNorm(_)
        | Op::LayerNormInputGrad(_)
        | Op::LayerNormWeightGrad(_)
        | Op::BatchNorm(_)
        | Op::BatchNormInputGrad(_)
        | Op::BatchNormWeightGrad(_)
        | Op::Softmax(_)
        | Op::SoftmaxBackward(_)
        | Op::LogSoftmax(_)
        | Op::LogSoftmaxBackward(_)
        | Op::ScaledDotProductAttention(_)
        | Op::ScaledDotProductAttentionBackward(_)
        | Op::DropoutBackward(_)
        | Op::CrossEntropy(_)
        | Op::CrossEntropyBackward(_)
        | Op::AdamwStep(_)
        | Op::SgdStep(_)
        | Op::SquaredNorm(_) => Ok(None),
    }
}

const OTHER_FAMILY: &str = "belongs to another family of operators";

fn arithmetic<B: Framework>(
    device: &B::Device,
    op: &Op,
    inputs: Vec<Data<B>>,
    types: &[TensorType],
    outputs: &[TensorType],
) -> Result<Vec<Data<B>>, String> {
    let (out, dtype) = (&outputs[0], types[0].dtype);
    Ok(vec![match op {
        Op::Unary(Unary::LogicalNot) => Data::Bool(B::bool_not(one(inputs)?.bool()?)),
        Op::Unary(op) => Data::Float(elementwise::float_unary::<B>(*op, one(inputs)?.float()?)?),
        Op::Binary(op) => {
            let [a, b] = all(inputs)?.map(|x| x.expand(&out.shape));
            Data::Float(elementwise::float_binary::<B>(*op, a.float()?, b.float()?)?)
        }
        Op::BinaryScalar(op) => {
            let x = one(inputs)?.float()?;
            Data::Float(elementwise::float_binary_scalar::<B>(op, x, out, device)?)
        }
        Op::Compare(op) => {
            let [a, b] = all(inputs)?.map(|x| x.expand(&out.shape));
            Data::Bool(elementwise::compare(*op, a, b)?)
        }
        Op::CompareScalar(op) => Data::Bool(elementwise::compare_scalar(op.op, one(inputs)?, op.scalar, dtype)?),
        Op::Logical(op) => {
            let [a, b] = all(inputs)?.map(|x| x.expand(&out.shape));
            Data::Bool(elementwise::logical::<B>(*op, a.bool()?, b.bool()?))
        }
        Op::Where(_) => {
            let [condition, a, b] = all(inputs)?.map(|x| x.expand(&out.shape));
            elementwise::choose(condition, a, b)?
        }
        Op::Clamp(op) => elementwise::clamp(op, one(inputs)?, dtype)?,
        Op::Cast(op) => elementwise::cast(one(inputs)?, dtype, op.dtype),
        Op::Dropout(op) => {
            let [x, key] = all(inputs)?;
            return elementwise::dropout(op, x, key, &outputs[1], device);
        }
        _ => return Err(OTHER_FAMILY.into()),
    }])
}

fn movement<B: Framework>(
    device: &B::Device,
    op: &Op,
    inputs: Vec<Data<B>>,
    outputs: &[TensorType],
) -> Result<Vec<Data<B>>, String> {
    let out = &outputs[0];
    Ok(vec![match op {
        Op::Reshape(op) => one(inputs)?.reshape(&op.shape),
        Op::Permute(op) => one(inputs)?.permute(&op.dims),
        Op::Detach(_) => one(inputs)?,
        Op::Expand(op) => one(inputs)?.expand(&op.shape),
        Op::Slice(op) => view::slice(op, one(inputs)?),
        Op::SliceBackward(op) => view::slice_backward(op, one(inputs)?, out, device)?,
        Op::Cat(op) => view::cat(inputs, op.dim)?,
        Op::Split(op) => return Ok(view::split(op, one(inputs)?, outputs, device)),
        Op::Flip(op) => view::flip(&op.dims, one(inputs)?),
        Op::ConstantPad(op) => view::pad(op, one(inputs)?, out, device)?,
        Op::Full(op) => Data::full(&op.ty, op.value, device),
        _ => return Err(OTHER_FAMILY.into()),
    }])
}

fn indexing<B: Framework>(
    device: &B::Device,
    op: &Op,
    inputs: Vec<Data<B>>,
    outputs: &[TensorType],
) -> Result<Vec<Data<B>>, String> {
    let out = &outputs[0];
    Ok(vec![match op {
        Op::Embedding(_) => {
            let [weight, ids] = all(inputs)?;
            index::embedding(weight, ids, out)?
        }
        Op::EmbeddingDenseBackward(op) => {
            let [g, ids] = all(inputs)?;
            index::embedding_backward(op, g, ids, out, device)?
        }
        Op::IndexSelect(op) => {
            let [x, at] = all(inputs)?;
            index::select(x, op.dim, at)?
        }
        Op::IndexAdd(op) => {
            let [x, at, source] = all(inputs)?;
            index::index_add(x, op.dim, at, source)?
        }
        Op::Gather(op) => {
            let [x, at] = all(inputs)?;
            index::gather(x, op.dim, at)?
        }
        Op::ScatterAdd(op) => {
            let [x, at, source] = all(inputs)?;
            index::scatter_add(x, op.dim, at, source)?
        }
        Op::MaxPool2dBackward(op) => {
            let [g, at] = all(inputs)?;
            index::max_pool_backward(op, g, at, out, device)?
        }
        _ => return Err(OTHER_FAMILY.into()),
    }])
}

/// Reductions, products, convolutions and pools.
fn sums<B: Framework>(
    device: &B::Device,
    op: &Op,
    mut inputs: Vec<Data<B>>,
    types: &[TensorType],
    outputs: &[TensorType],
) -> Result<Vec<Data<B>>, String> {
    let out = &outputs[0];
    Ok(vec![match op {
        Op::Reduce(op) => reduce::reduce(op, one(inputs)?, &types[0], out, device)?,
        Op::Matmul(_) => {
            let [a, b] = all(inputs)?;
            spatial::matmul(a, b, types, out, device)?
        }
        Op::Conv2d(op) => {
            let bias = if inputs.len() == 3 { inputs.pop() } else { None };
            let [x, weight] = all(inputs)?;
            spatial::conv2d(op, x, weight, bias, types, out, device)?
        }
        Op::Conv2dInputGrad(op) => {
            let [g, weight] = all(inputs)?;
            spatial::conv2d_input_grad(op, g, weight, types, out, device)?
        }
        Op::Conv2dWeightGrad(op) => {
            let [g, x] = all(inputs)?;
            spatial::conv2d_weight_grad(op, g, x, types, out, device)?
        }
        Op::MaxPool2d(op) => return spatial::max_pool(op, one(inputs)?),
        Op::AvgPool2d(op) => spatial::avg_pool(op, one(inputs)?)?,
        Op::AvgPool2dBackward(op) => spatial::avg_pool_backward(op, one(inputs)?, out, device)?,
        Op::AdaptiveAvgPool2d(op) => Data::Float(B::adaptive_avg_pool2d(one(inputs)?.float()?, op.output)),
        Op::AdaptiveAvgPool2dBackward(_) => spatial::adaptive_avg_pool_backward(one(inputs)?, out, device)?,
        _ => return Err(OTHER_FAMILY.into()),
    }])
}

/// Whether these operands need a generic kernel: integer arithmetic must wrap around, and burn lacks division that
/// rounds towards minus infinity.
fn needs_generic_kernel(op: &Op, types: &[TensorType]) -> bool {
    let floats = types.first().is_some_and(|t| t.dtype.is_float());
    let modulo = |op: Binary| matches!(op, Binary::Fmod | Binary::Remainder | Binary::FloorDivide);
    match op {
        Op::Unary(op) => !floats && *op != Unary::LogicalNot,
        Op::Binary(op) => !floats || modulo(*op),
        Op::BinaryScalar(op) => !floats || modulo(op.op),
        Op::Reduce(op) => !floats || matches!(op.kind, ReduceKind::Any | ReduceKind::All),
        Op::IndexAdd(_) | Op::EmbeddingDenseBackward(_) => !floats,
        // burn needs an index of the operand's size in all other dimensions.
        Op::ScatterAdd(ScatterAdd { dim }) => {
            !floats || (0..types[0].rank()).any(|d| d != *dim && types[0].shape[d] != types[1].shape[d])
        }
        _ => false,
    }
}

fn run_generic<B: Framework>(
    device: &B::Device,
    op: &Op,
    inputs: Vec<Data<B>>,
    types: &[TensorType],
    outputs: &[TensorType],
) -> Result<Vec<Data<B>>, String> {
    let inputs =
        inputs.into_iter().zip(types).map(|(x, ty)| x.into_host(ty)).collect::<Result<Vec<HostTensor>, _>>()?;
    let operands: Vec<Operand<'_>> = inputs.iter().map(Operand::from).collect();
    let results = generic::run(op, &operands, outputs)?.ok_or("has no generic kernel")?;
    let mut tensors = Vec::with_capacity(results.len());
    for (ty, buffer) in outputs.iter().zip(results) {
        let host = HostTensor::from_bytes(ty.clone(), buffer.elements().to_vec()).map_err(|e| e.to_string())?;
        tensors.push(Data::from_host(&host, device));
    }
    Ok(tensors)
}

/// All `N` operands.
fn all<B: Framework, const N: usize>(inputs: Vec<Data<B>>) -> Result<[Data<B>; N], String> {
    inputs.try_into().map_err(|v: Vec<Data<B>>| format!("takes {}, got {}", counted(N, "operand"), v.len()))
}

/// The one operand.
fn one<B: Framework>(inputs: Vec<Data<B>>) -> Result<Data<B>, String> {
    all::<B, 1>(inputs).map(|[x]| x)
}
