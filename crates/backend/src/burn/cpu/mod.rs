//! The host kernels as burn's on the CPU: what models spend their time in, for `f32` and `f64`. Everything else, and operands without
//! elements, is left to burn and to decompositions.

mod elementwise;
mod layers;
mod products;
mod reduce;
mod tensor;

use burn_flex::{Flex, FlexTensor};
use fusionllm_graph::ops::{Approximate, ReduceKind, ScaledDotProductAttentionBackward, Unary};
use fusionllm_graph::{DType, Op, TensorType};

use super::tensor::Data;
use crate::fallback::keep_mask;
use crate::host;
use tensor::{Scalar, contiguous, elements, inner, outer, overwrite, owned};

/// Runs an operator, taking the operands; `None`, leaving them, if it has no kernel here.
pub(super) fn run(
    op: &Op,
    inputs: &mut Vec<Data<Flex>>,
    types: &[TensorType],
    outputs: &[TensorType],
) -> Option<Result<Vec<Data<Flex>>, String>> {
    if types.iter().any(|t| t.numel() == 0) {
        return None;
    }
    let dtype = match op {
        Op::CompareScalar(_) | Op::Compare(_) | Op::ArgReduce(_) | Op::SquaredNorm(_) => types[0].dtype,
        Op::Where(_) | Op::Cast(_) => DType::F32,
        _ => outputs[0].dtype,
    };
    let mut operands = Operands { taken: std::mem::take(inputs).into_iter().map(inner).collect() };
    let ran = match dtype {
        DType::F32 => typed::<f32>(op, &mut operands, types, outputs),
        DType::F64 => typed::<f64>(op, &mut operands, types, outputs),
        DType::I64 | DType::I32 => integers(op, dtype, &mut operands, types, outputs),
        _ => None,
    };
    match ran {
        Some(results) => Some(results.map(|r| r.into_iter().map(outer).collect())),
        None => {
            *inputs = operands.taken.into_iter().map(outer).collect();
            None
        }
    }
}

/// The operands, until a kernel takes them.
struct Operands {
    taken: Vec<FlexTensor>,
}

impl Operands {
    /// All `N`; `None` if there are not as many.
    fn all<const N: usize>(&mut self) -> Option<[FlexTensor; N]> {
        match <[FlexTensor; N]>::try_from(std::mem::take(&mut self.taken)) {
            Ok(all) => Some(all),
            Err(others) => {
                self.taken = others;
                None
            }
        }
    }

    /// The operand behind the first `n`, if it is there.
    fn extra(&mut self, n: usize) -> Option<FlexTensor> {
        if self.taken.len() > n { self.taken.pop() } else { None }
    }
}

type Results = Option<Result<Vec<FlexTensor>, String>>;

fn one(t: FlexTensor) -> Results {
    Some(Ok(vec![t]))
}

fn typed<T: Scalar>(op: &Op, operands: &mut Operands, types: &[TensorType], outputs: &[TensorType]) -> Results {
    let out = outputs.first()?;
    match op {
        Op::Unary(Unary::LogicalNot) => None,
        Op::Unary(op) => {
            let [x] = operands.all()?;
            one(overwrite::<T>(x, |out, source| host::unary(*op, out, source)))
        }
        Op::Binary(op) => {
            let [a, b] = operands.all()?;
            one(elementwise::binary::<T>(*op, a, b, out))
        }
        Op::BinaryScalar(op) => {
            let [x] = operands.all()?;
            one(elementwise::binary_scalar::<T>(op, x, out))
        }
        Op::Compare(op) => {
            let [a, b] = operands.all()?;
            one(elementwise::compare::<T>(*op, &a, &b, out))
        }
        Op::CompareScalar(op) => {
            let [x] = operands.all()?;
            one(elementwise::compare_scalar(op.op, &x, T::of(op.scalar), out))
        }
        Op::Where(_) => {
            let [c, a, b] = operands.all()?;
            one(match out.dtype.size() {
                8 => elementwise::choose::<u64>(&c, &a, &b, out),
                4 => elementwise::choose::<u32>(&c, &a, &b, out),
                2 => elementwise::choose::<u16>(&c, &a, &b, out),
                _ => elementwise::choose::<u8>(&c, &a, &b, out),
            })
        }
        Op::Clamp(op) => {
            let [x] = operands.all()?;
            one(elementwise::clamp::<T>(op, x))
        }
        Op::Cast(_) => {
            let [x] = operands.all()?;
            one(elementwise::cast(x, types[0].dtype, out))
        }
        Op::Gelu(op) => {
            let [x] = operands.all()?;
            one(overwrite::<T>(x, |out, source| match op.approximate {
                Approximate::Tanh => host::gelu_tanh(out, source),
                Approximate::None => host::gelu_erf(out, source),
            }))
        }
        Op::GeluBackward(op) => {
            let [g, x] = operands.all()?;
            let x = contiguous(x);
            one(overwrite::<T>(g, |out, source| match op.approximate {
                Approximate::Tanh => host::gelu_tanh_backward(out, source, elements(&x)),
                Approximate::None => host::gelu_erf_backward(out, source, elements(&x)),
            }))
        }
        Op::ThresholdBackward(op) => {
            let [g, x] = operands.all()?;
            let x = contiguous(x);
            one(overwrite::<T>(g, |out, source| host::threshold_backward(out, source, elements(&x), op.threshold)))
        }

        Op::Reduce(op) if !matches!(op.kind, ReduceKind::Any | ReduceKind::All) => {
            let [x] = operands.all()?;
            one(reduce::reduce::<T>(op, x, &types[0], out))
        }
        Op::ArgReduce(op) => {
            let [x] = operands.all()?;
            one(arg_reduce::<T>(op, x, &types[0], out))
        }

        Op::Matmul(_) => {
            let [a, b] = operands.all()?;
            one(products::matmul::<T>(a, b, out))
        }
        Op::Linear(_) => {
            let bias = operands.extra(2);
            let [x, weight] = operands.all()?;
            one(products::linear::<T>(x, weight, bias, out))
        }
        Op::Conv2d(op) => {
            let bias = operands.extra(2);
            let [x, weight] = operands.all()?;
            one(products::conv2d::<T>(op, x, weight, bias, types, out))
        }
        Op::Conv2dInputGrad(op) => {
            let [g, weight] = operands.all()?;
            one(products::conv2d_input_grad::<T>(op, g, weight, types, out))
        }
        Op::Conv2dWeightGrad(op) => {
            let [g, x] = operands.all()?;
            one(products::conv2d_weight_grad::<T>(op, g, x, types, out))
        }
        Op::ScaledDotProductAttention(op) => {
            let mask = operands.extra(3);
            let qkv = operands.all()?;
            Some(Ok(products::attention::<T>(op, qkv, mask, types, outputs)))
        }
        Op::ScaledDotProductAttentionBackward(ScaledDotProductAttentionBackward { forward }) => {
            let mask = operands.extra(6);
            let [g, q, k, v, y, lse] = operands.all()?;
            Some(Ok(products::attention_backward::<T>(forward, g, [q, k, v], [y, lse], mask, types, outputs)))
        }

        Op::LayerNorm(op) => Some(Ok(layers::layer_norm::<T>(op, std::mem::take(&mut operands.taken), outputs))),
        Op::LayerNormInputGrad(op) => {
            one(layers::layer_norm_input_grad::<T>(op.dims, std::mem::take(&mut operands.taken), out))
        }
        Op::LayerNormWeightGrad(op) => {
            let inputs = std::mem::take(&mut operands.taken);
            Some(Ok(layers::layer_norm_weight_grad::<T>(op.dims, inputs, &types[1], outputs)))
        }
        Op::BatchNorm(op) => layers::batch_norm::<T>(op, std::mem::take(&mut operands.taken), outputs).map(Ok),
        Op::BatchNormInputGrad(_) => one(layers::batch_norm_input_grad::<T>(std::mem::take(&mut operands.taken), out)),
        Op::BatchNormWeightGrad(_) => {
            let inputs = std::mem::take(&mut operands.taken);
            Some(Ok(layers::batch_norm_weight_grad::<T>(inputs, &types[1], outputs)))
        }
        Op::Softmax(op) => {
            let [x] = operands.all()?;
            one(layers::along::<T>(x, op.dim, host::softmax))
        }
        Op::SoftmaxBackward(op) => {
            let [g, y] = operands.all()?;
            one(layers::along_backward::<T>(g, y, op.dim, host::softmax_backward))
        }
        Op::LogSoftmax(op) => {
            let [x] = operands.all()?;
            one(layers::along::<T>(x, op.dim, host::log_softmax))
        }
        Op::LogSoftmaxBackward(op) => {
            let [g, y] = operands.all()?;
            one(layers::along_backward::<T>(g, y, op.dim, host::log_softmax_backward))
        }
        Op::CrossEntropy(op) => {
            let [logits, target] = operands.all()?;
            Some(layers::cross_entropy::<T>(op.ignore_index, logits, target, outputs))
        }
        Op::CrossEntropyBackward(op) => {
            let inputs = operands.all()?;
            Some(layers::cross_entropy_backward::<T>(op.ignore_index, inputs).map(|d| vec![d]))
        }
        Op::Embedding(_) => {
            let [table, ids] = operands.all()?;
            Some(layers::embedding::<T>(table, ids, out).map(|y| vec![y]))
        }
        Op::EmbeddingDenseBackward(op) => {
            let [g, ids] = operands.all()?;
            Some(layers::embedding_backward::<T>(op, g, ids, out).map(|d| vec![d]))
        }

        Op::MaxPool2d(op) => {
            let [x] = operands.all()?;
            Some(Ok(layers::max_pool::<T>(op, x, &types[0], outputs)))
        }
        Op::MaxPool2dBackward(op) => {
            let [g, at] = operands.all()?;
            Some(layers::max_pool_backward::<T>(op, g, at, &types[0], out).map(|d| vec![d]))
        }
        Op::AvgPool2d(op) => {
            let [x] = operands.all()?;
            one(layers::avg_pool::<T>(op, x, &types[0], out))
        }
        Op::AvgPool2dBackward(op) => {
            let [g] = operands.all()?;
            one(layers::avg_pool_backward::<T>(&op.pool, g, &types[0], out))
        }
        Op::AdaptiveAvgPool2d(op) => {
            let [x] = operands.all()?;
            one(layers::adaptive_avg_pool::<T>(op, x, &types[0], out))
        }
        Op::AdaptiveAvgPool2dBackward(_) => {
            let [g] = operands.all()?;
            one(layers::adaptive_avg_pool_backward::<T>(g, &types[0], out))
        }

        Op::Dropout(op) => {
            let [x, key] = operands.all()?;
            let key = elements::<i64>(&contiguous(key))[0];
            let mask: Vec<u8> = bytemuck::cast_vec(keep_mask(key, op.stream, op.p, out.numel()));
            let y = elementwise::masked::<T>(x, &mask, 1.0 / (1.0 - op.p));
            Some(Ok(vec![y, owned(mask, &outputs[1])]))
        }
        Op::DropoutBackward(op) => {
            let [g, mask] = operands.all()?;
            one(elementwise::masked::<T>(g, elements(&contiguous(mask)), op.scale))
        }
        Op::AdamwStep(op) => Some(Ok(layers::adamw::<T>(op, operands.all()?))),
        Op::SgdStep(op) => Some(Ok(layers::sgd::<T>(op, operands.all()?))),
        Op::SquaredNorm(_) => {
            let [x] = operands.all()?;
            one(owned(vec![host::sum_of_squares(elements::<T>(&contiguous(x)))], out))
        }
        _ => None,
    }
}

fn arg_reduce<T: host::Element + PartialOrd>(
    op: &fusionllm_graph::ops::ArgReduce,
    x: FlexTensor,
    ty: &TensorType,
    out: &TensorType,
) -> FlexTensor {
    let x = contiguous(x);
    let inner = ty.shape[op.dim + 1..].iter().product();
    let mut at = host::uninit::<i64>(out.numel());
    host::arg_extremum(&mut at, elements::<T>(&x), ty.shape[op.dim], inner, op.largest);
    owned(at, out)
}

fn integers(op: &Op, dtype: DType, operands: &mut Operands, types: &[TensorType], outputs: &[TensorType]) -> Results {
    let out = outputs.first()?;
    match op {
        Op::Compare(op) => {
            let [a, b] = operands.all()?;
            one(match dtype {
                DType::I64 => elementwise::compare::<i64>(*op, &a, &b, out),
                _ => elementwise::compare::<i32>(*op, &a, &b, out),
            })
        }
        Op::CompareScalar(op) => {
            let [x] = operands.all()?;
            one(match dtype {
                DType::I64 => elementwise::compare_scalar(op.op, &x, op.scalar as i64, out),
                _ => elementwise::compare_scalar(op.op, &x, op.scalar as i32, out),
            })
        }
        Op::ArgReduce(op) => {
            let [x] = operands.all()?;
            one(match dtype {
                DType::I64 => arg_reduce::<i64>(op, x, &types[0], out),
                _ => arg_reduce::<i32>(op, x, &types[0], out),
            })
        }
        _ => None,
    }
}
