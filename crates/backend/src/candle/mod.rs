//! The backend on [candle](https://github.com/huggingface/candle), on the processor.
//!
//! Candle runs every operator that GPT-2 and ResNet use. Compound operators run by their decomposition. The few in
//! [`HOST_OPERATORS`] run by kernels of this crate.
//!
//! *Determinism*: candle sums strided operands in another order than contiguous ones. So `products` and `reduce`
//! give it operands whose layout depends on shapes alone. Candle never overwrites an operand.

mod convolution;
mod elementwise;
mod host;
mod index;
mod pooling;
mod products;
mod reduce;
mod view;

use candle_core::{Device as CandleDevice, Shape, Tensor as Array, WithDType};
use fusionllm_graph::ops::Dropout;
use fusionllm_graph::{DType, HostTensor, Op, TensorType};

use crate::kernels::IndexError;
use crate::{Backend, BackendError, DeviceInfo, Tensor, run_decomposed};

pub use host::HOST_OPERATORS;

const CPU: CandleDevice = CandleDevice::Cpu;

/// Candle on the CPU. Holds f32, f64, i64, i32 and bool.
#[derive(Debug, Clone, Copy, Default)]
pub struct Candle;

impl Candle {
    /// The name by which users choose it.
    pub const NAME: &str = "candle-cpu";

    fn unusable(reason: impl Into<String>) -> BackendError {
        BackendError::Tensor { backend: Self::NAME.into(), reason: reason.into() }
    }
}

/// Why an operator failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}")]
    Candle(#[from] candle_core::Error),
    #[error(transparent)]
    Index(#[from] IndexError),
    #[error("{0}")]
    Other(String),
}

type Result<T> = std::result::Result<T, Failure>;

fn other<T>(reason: impl Into<String>) -> Result<T> {
    Err(Failure::Other(reason.into()))
}

/// Candle's name for an element type. Booleans are bytes of 0 and 1.
fn candle_type(dtype: DType) -> Result<candle_core::DType> {
    match dtype {
        DType::F64 => Ok(candle_core::DType::F64),
        DType::F32 => Ok(candle_core::DType::F32),
        DType::I64 => Ok(candle_core::DType::I64),
        DType::I32 => Ok(candle_core::DType::I32),
        DType::Bool => Ok(candle_core::DType::U8),
        DType::F16 | DType::BF16 => unsupported(dtype),
    }
}

fn unsupported<T>(dtype: DType) -> Result<T> {
    other(format!("candle does not hold {dtype} here"))
}

fn is_float(x: &Array) -> bool {
    matches!(x.dtype(), candle_core::DType::F32 | candle_core::DType::F64)
}

/// A scalar of `dtype`, converted as [`DType`] says.
fn scalar(value: f64, dtype: candle_core::DType) -> Result<Array> {
    let value = Array::new(value, &CPU)?;
    Ok(if dtype == candle_core::DType::U8 { value.ne(0.0)? } else { value.to_dtype(dtype)? })
}

/// A tensor of one value, with one element in memory.
fn filled(value: f64, ty: &TensorType) -> Result<Array> {
    Ok(scalar(value, candle_type(ty.dtype)?)?.broadcast_as(ty.shape.as_slice())?)
}

fn from_vec<T: WithDType>(values: Vec<T>, shape: impl Into<Shape>) -> Result<Array> {
    Ok(Array::from_vec(values, shape.into(), &CPU)?)
}

/// Elements in row-major order.
fn to_vec<T: WithDType>(x: &Array) -> Result<Vec<T>> {
    Ok(x.flatten_all()?.to_vec1::<T>()?)
}

fn from_host(t: &HostTensor) -> Result<Array> {
    fn array<T: WithDType + bytemuck::Pod>(t: &HostTensor) -> Result<Array> {
        from_vec::<T>(bytemuck::pod_collect_to_vec(t.bytes()), t.shape())
    }
    match t.dtype() {
        DType::F64 => array::<f64>(t),
        DType::F32 => array::<f32>(t),
        DType::I64 => array::<i64>(t),
        DType::I32 => array::<i32>(t),
        DType::Bool => array::<u8>(t),
        dtype => unsupported(dtype),
    }
}

fn to_host(x: &Array, ty: &TensorType) -> Result<HostTensor> {
    fn bytes<T: WithDType + bytemuck::Pod>(x: &Array) -> Result<Vec<u8>> {
        Ok(bytemuck::cast_slice(&to_vec::<T>(x)?).to_vec())
    }
    let bytes = match ty.dtype {
        DType::F64 => bytes::<f64>(x),
        DType::F32 => bytes::<f32>(x),
        DType::I64 => bytes::<i64>(x),
        DType::I32 => bytes::<i32>(x),
        DType::Bool => bytes::<u8>(x),
        dtype => unsupported(dtype),
    };
    HostTensor::from_bytes(ty.clone(), bytes?).or_else(|e| other(e.to_string()))
}

impl Backend for Candle {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn device(&self) -> DeviceInfo {
        crate::machine::processor()
    }

    fn upload(&self, tensor: &HostTensor) -> std::result::Result<Tensor, BackendError> {
        let array = from_host(tensor).map_err(|e| Self::unusable(e.to_string()))?;
        Ok(Tensor::new(tensor.ty().clone(), array))
    }

    fn download(&self, tensor: &Tensor) -> std::result::Result<HostTensor, BackendError> {
        let x = tensor.get::<Array>().ok_or_else(|| Self::unusable("it belongs to another backend"))?;
        to_host(x, tensor.ty()).map_err(|e| Self::unusable(e.to_string()))
    }

    fn run(
        &self,
        op: &Op,
        inputs: Vec<Tensor>,
        outputs: &[TensorType],
    ) -> std::result::Result<Vec<Tensor>, BackendError> {
        let fail = |reason: String, inputs: &[Tensor]| BackendError::Operator {
            backend: Self::NAME.into(),
            op: op.name().into(),
            reason,
            operands: inputs.iter().map(|t| t.ty().clone()).collect(),
        };
        let operands: Option<Vec<Array>> = inputs.iter().map(|t| t.get::<Array>().cloned()).collect();
        let Some(operands) = operands else {
            return Err(fail("an operand belongs to another backend".into(), &inputs));
        };
        match kernel(op, &operands, outputs) {
            Ok(Some(results)) => Ok(outputs.iter().cloned().zip(results).map(|(ty, x)| Tensor::new(ty, x)).collect()),
            Ok(None) => {
                // The decomposition gives up what it no longer needs.
                drop(operands);
                let types: Vec<TensorType> = inputs.iter().map(|t| t.ty().clone()).collect();
                run_decomposed(self, op, inputs)?.ok_or_else(|| BackendError::Operator {
                    backend: Self::NAME.into(),
                    op: op.name().into(),
                    reason: "has neither a kernel nor a decomposition".into(),
                    operands: types,
                })
            }
            Err(e) => Err(fail(e.to_string(), &inputs)),
        }
    }
}

/// Runs one operator. Returns `None` if its decomposition is to run.
fn kernel(op: &Op, x: &[Array], outputs: &[TensorType]) -> Result<Option<Vec<Array>>> {
    for ty in outputs {
        candle_type(ty.dtype)?;
    }
    if let Some(results) = host::kernel(op, x, outputs)? {
        return Ok(Some(results));
    }
    check_targets(op, x)?;
    // Candle refuses some empty operands, so it is not called for empty results.
    if outputs.iter().all(|ty| ty.numel() == 0) {
        return outputs.iter().map(|ty| filled(0.0, ty)).collect::<Result<_>>().map(Some);
    }
    dispatch(op, x, &outputs[0])
}

/// Calls the function for an operator, whose first result has type `out`.
fn dispatch(op: &Op, x: &[Array], out: &TensorType) -> Result<Option<Vec<Array>>> {
    let y = match op {
        Op::Unary(op) => elementwise::unary(*op, &x[0])?,
        Op::Binary(op) => elementwise::binary(*op, &x[0], &x[1])?,
        Op::BinaryScalar(op) => elementwise::binary_scalar(op, &x[0])?,
        Op::Compare(op) => elementwise::compare(*op, &x[0], &x[1])?,
        Op::CompareScalar(op) => elementwise::compare(op.op, &x[0], &scalar(op.scalar, x[0].dtype())?)?,
        Op::Logical(op) => elementwise::logical(*op, &x[0], &x[1])?,
        Op::Where(_) => elementwise::select(&x[0], &x[1], &x[2], &out.shape)?,
        Op::Clamp(op) => elementwise::clamp(op, &x[0])?,
        Op::Cast(op) => elementwise::cast(&x[0], op.dtype)?,
        Op::Gelu(op) => elementwise::gelu(op.approximate, &x[0])?,
        Op::ThresholdBackward(op) => elementwise::threshold_backward(op.threshold, &x[0], &x[1])?,
        Op::Reduce(op) => reduce::reduce(op, &x[0], out)?,
        Op::ArgReduce(op) => reduce::arg_reduce(op, &x[0], out)?,
        Op::Reshape(op) => x[0].reshape(op.shape.as_slice())?,
        Op::Permute(op) => x[0].permute(op.dims.as_slice())?,
        Op::Detach(_) => x[0].clone(),
        Op::Expand(op) => x[0].broadcast_as(op.shape.as_slice())?,
        Op::Slice(op) => view::slice(op, &x[0])?,
        Op::SliceBackward(op) => view::slice_backward(op, &x[0], out)?,
        Op::Cat(op) => view::cat(x, op.dim)?,
        Op::Flip(op) => x[0].contiguous()?.flip(&op.dims)?,
        Op::ConstantPad(op) => view::constant_pad(op, &x[0])?,
        Op::Triangle(op) => view::triangle(op, &x[0], out)?,
        Op::Full(op) => filled(op.value, out)?,
        Op::Arange(op) => view::arange(op)?,
        Op::Embedding(_) => index::embedding(&x[0], &x[1], &out.shape)?,
        Op::EmbeddingDenseBackward(op) => index::embedding_backward(op, &x[0], &x[1], out)?,
        Op::IndexSelect(op) => index::select(op.dim, &x[0], &x[1])?,
        Op::IndexAdd(op) => index::add(op.dim, &x[0], &x[1], &x[2])?,
        Op::Gather(op) => index::gather(op.dim, &x[0], &x[1])?,
        Op::Matmul(_) => products::matmul(&x[0], &x[1], &out.shape)?,
        Op::Linear(_) => products::linear(&x[0], &x[1], x.get(2), &out.shape)?,
        Op::Conv2d(op) => convolution::forward(op, &x[0], &x[1], x.get(2), out)?,
        Op::Conv2dInputGrad(op) => convolution::input_grad(&op.conv, &x[0], &x[1], out)?,
        Op::Conv2dWeightGrad(op) => convolution::weight_grad(&op.conv, &x[0], &x[1], out)?,
        Op::MaxPool2dBackward(_) => pooling::max_pool_backward(&x[0], &x[1], out)?,
        Op::AvgPool2d(op) => pooling::avg_pool(op, &x[0], out)?,
        Op::AvgPool2dBackward(op) => pooling::avg_pool_backward(&op.pool, &x[0], out)?,
        Op::AdaptiveAvgPool2d(_) => pooling::adaptive(&x[0], out)?,
        Op::AdaptiveAvgPool2dBackward(_) => pooling::adaptive_backward(&x[0], out)?,
        Op::Split(op) => return view::split(&x[0], op.dim, &op.sizes).map(Some),
        Op::MaxPool2d(op) => return pooling::max_pool(op, &x[0], out).map(Some),
        Op::Dropout(op) => return dropout(op, &x[0], &x[1], out).map(Some),
        Op::GeluBackward(_)
        | Op::Softmax(_)
        | Op::SoftmaxBackward(_)
        | Op::LogSoftmax(_)
        | Op::LogSoftmaxBackward(_)
        | Op::LayerNorm(_)
        | Op::LayerNormInputGrad(_)
        | Op::LayerNormWeightGrad(_)
        | Op::BatchNorm(_)
        | Op::BatchNormInputGrad(_)
        | Op::BatchNormWeightGrad(_)
        | Op::ScaledDotProductAttention(_)
        | Op::ScaledDotProductAttentionBackward(_)
        | Op::DropoutBackward(_)
        | Op::CrossEntropy(_)
        | Op::CrossEntropyBackward(_)
        | Op::AdamwStep(_)
        | Op::SgdStep(_)
        | Op::SquaredNorm(_) => return Ok(None),
        Op::CumSum(_)
        | Op::TopK(_)
        | Op::Sort(_)
        | Op::ScatterAdd(_)
        | Op::Scatter(_)
        | Op::Index(_)
        | Op::IndexPut(_) => return other("has no generic kernel"),
    };
    Ok(Some(vec![y]))
}

/// Checks targets, since the decompositions of the losses do not.
fn check_targets(op: &Op, x: &[Array]) -> Result<()> {
    let (ignore, logits, target) = match op {
        Op::CrossEntropy(op) => (op.ignore_index, &x[0], &x[1]),
        Op::CrossEntropyBackward(op) => (op.ignore_index, &x[1], &x[2]),
        _ => return Ok(()),
    };
    let targets: Vec<i64> = to_vec::<i64>(target)?.into_iter().filter(|&t| t != ignore).collect();
    Ok(crate::kernels::check_indices(&targets, logits.dims()[1])?)
}

fn dropout(op: &Dropout, x: &Array, key: &Array, out: &TensorType) -> Result<Vec<Array>> {
    let keep = crate::kernels::generic::keep_mask(key.to_scalar::<i64>()?, op.stream, op.p, out.numel());
    let mask = from_vec::<u8>(keep.into_iter().map(u8::from).collect(), out.shape.as_slice())?;
    let scaled = x.affine(1.0 / (1.0 - op.p), 0.0)?;
    let y = elementwise::select(&mask, &scaled, &scalar(0.0, x.dtype())?, &out.shape)?;
    Ok(vec![y, mask])
}
