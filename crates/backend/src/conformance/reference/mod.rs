//! Operators computed from their definitions by plain loops, in `f64` (integers in `i64`) and without regard to speed.
//!
//! No code here is shared with a backend's kernels, so both cannot have the same error.

mod convolution;
mod elementwise;
mod index;
mod normalization;
mod pooling;
mod products;
mod reduce;
mod training;
mod view;

use fusionllm_graph::{DType, HostTensor, Op, TensorType};

use crate::{Backend, BackendError, DeviceInfo, Tensor};

/// Elements of an [`Array`].
#[derive(Debug, Clone, PartialEq)]
pub enum Elements {
    /// Elements of any float type, widened.
    Float(Vec<f64>),
    /// Elements of any integer type, widened. Booleans are 0 and 1.
    Int(Vec<i64>),
}

/// A row-major tensor of the reference.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// Element type and shape.
    pub ty: TensorType,
    /// One element for each index, each representable in the element type.
    pub elements: Elements,
}

/// Computes an operator's results from its definition. Bad operands, such as an index out of range, are an error.
pub fn evaluate(op: &Op, inputs: &[Array]) -> Result<Vec<Array>, String> {
    let types: Vec<&TensorType> = inputs.iter().map(|a| &a.ty).collect();
    let types = op.infer(&types)?;
    let results = results(op, inputs, &types)?;
    Ok(types.into_iter().zip(results).map(|(ty, elements)| Array::new(ty, elements)).collect())
}

/// The elements of each result, whose types are `types`.
fn results(op: &Op, x: &[Array], types: &[TensorType]) -> Result<Vec<Elements>, String> {
    Ok(match op {
        Op::Unary(op) => vec![elementwise::unary(*op, &x[0])?],
        Op::Binary(op) => vec![elementwise::binary(*op, &x[0], &x[1], &types[0])?],
        Op::BinaryScalar(op) => vec![elementwise::binary_scalar(op, &x[0])?],
        Op::Compare(op) => vec![elementwise::compare(*op, &x[0], &x[1], &types[0])?],
        Op::CompareScalar(op) => {
            let scalar = Array::filled(TensorType::new(x[0].ty.dtype, []), op.scalar);
            vec![elementwise::compare(op.op, &x[0], &scalar, &types[0])?]
        }
        Op::Logical(op) => vec![elementwise::logical(*op, &x[0], &x[1], &types[0])?],
        Op::Where(_) => vec![elementwise::select(&x[0], &x[1], &x[2], &types[0])?],
        Op::Clamp(op) => vec![elementwise::clamp(op, &x[0])?],
        Op::Cast(op) => vec![x[0].converted(op.dtype).elements],
        Op::Gelu(op) => vec![elementwise::gelu(op.approximate, &x[0])?],
        Op::GeluBackward(op) => vec![elementwise::gelu_backward(op.approximate, &x[0], &x[1])?],
        Op::ThresholdBackward(op) => vec![elementwise::threshold_backward(op.threshold, &x[0], &x[1])?],
        Op::Reduce(op) => vec![reduce::reduce(op, &x[0], &types[0])?],
        Op::ArgReduce(op) => vec![reduce::arg_reduce(op, &x[0])?],
        Op::CumSum(op) => vec![reduce::cumsum(op.dim, &x[0])],
        Op::Softmax(op) => vec![reduce::softmax(op.dim, &x[0], false)?],
        Op::LogSoftmax(op) => vec![reduce::softmax(op.dim, &x[0], true)?],
        Op::SoftmaxBackward(op) => vec![reduce::softmax_backward(op.dim, &x[0], &x[1], false)?],
        Op::LogSoftmaxBackward(op) => vec![reduce::softmax_backward(op.dim, &x[0], &x[1], true)?],
        Op::Reshape(_) | Op::Detach(_) => vec![x[0].elements.clone()],
        Op::Permute(op) => vec![view::permute(&op.dims, &x[0], &types[0])],
        Op::Expand(_) => vec![view::expand(&x[0], &types[0])],
        Op::Slice(op) => vec![view::slice(op, &x[0], &types[0])],
        Op::SliceBackward(op) => vec![view::slice_backward(op, &x[0], &types[0])],
        Op::Cat(op) => vec![view::cat(op.dim, x, &types[0])],
        Op::Split(op) => view::split(op.dim, &x[0], types),
        Op::Flip(op) => vec![view::flip(&op.dims, &x[0])],
        Op::ConstantPad(op) => vec![view::constant_pad(op, &x[0], &types[0])],
        Op::Triangle(op) => vec![view::triangle(op, &x[0])],
        Op::Full(op) => vec![Array::filled(types[0].clone(), op.value).elements],
        Op::Arange(op) => {
            let values = (0..op.len).map(|i| op.start + op.step * i as f64).collect();
            vec![Elements::Float(values).as_type(op.dtype)]
        }
        Op::Embedding(_) => vec![index::select(0, &x[0], &x[1], &types[0])?],
        Op::EmbeddingDenseBackward(op) => vec![index::embedding_backward(op, &x[0], &x[1], &types[0])?],
        Op::IndexSelect(op) => vec![index::select(op.dim, &x[0], &x[1], &types[0])?],
        Op::IndexAdd(op) => vec![index::add(op.dim, &x[0], &x[1], &x[2])?],
        Op::Gather(op) => vec![index::gather(op.dim, &x[0], &x[1])?],
        Op::ScatterAdd(op) => vec![index::scatter(op.dim, &x[0], &x[1], &x[2], true)?],
        Op::Scatter(op) => vec![index::scatter(op.dim, &x[0], &x[1], &x[2], false)?],
        Op::Index(op) => vec![index::index(&op.indexed, &x[0], &x[1..], &types[0])?],
        Op::IndexPut(op) => vec![index::put(op, &x[0], &x[1], &x[2..])?],
        Op::TopK(op) => index::sorted(op.dim, op.k, op.largest, &x[0]),
        Op::Sort(op) => index::sorted(op.dim, x[0].ty.shape[op.dim], op.descending, &x[0]),
        Op::Matmul(_) => vec![products::matmul(&x[0], &x[1], &types[0])?],
        Op::Linear(_) => vec![products::linear(&x[0], &x[1], x.get(2))?],
        Op::ScaledDotProductAttention(op) => products::attention(op, x)?,
        Op::ScaledDotProductAttentionBackward(op) => products::attention_backward(&op.forward, x)?,
        Op::Conv2d(op) => vec![convolution::forward(op, &x[0], &x[1], x.get(2), &types[0])?],
        Op::Conv2dInputGrad(op) => vec![convolution::input_grad(&op.conv, &x[0], &x[1], &types[0])?],
        Op::Conv2dWeightGrad(op) => vec![convolution::weight_grad(&op.conv, &x[0], &x[1], &types[0])?],
        Op::MaxPool2d(op) => pooling::max_pool(op, &x[0], &types[0])?,
        Op::MaxPool2dBackward(_) => vec![pooling::max_pool_backward(&x[0], &x[1], &types[0])?],
        Op::AvgPool2d(op) => vec![pooling::avg_pool(op, &x[0], &types[0])?],
        Op::AvgPool2dBackward(op) => vec![pooling::avg_pool_backward(&op.pool, &x[0], &types[0])?],
        Op::AdaptiveAvgPool2d(_) => vec![pooling::adaptive(&x[0], &types[0])?],
        Op::AdaptiveAvgPool2dBackward(_) => vec![pooling::adaptive_backward(&x[0], &types[0])?],
        Op::LayerNorm(op) => normalization::layer_norm(op, x)?,
        Op::LayerNormInputGrad(op) => vec![normalization::layer_norm_input_grad(op.dims, x)?],
        Op::LayerNormWeightGrad(op) => normalization::layer_norm_weight_grad(op.dims, x)?,
        Op::BatchNorm(op) => normalization::batch_norm(op, x)?,
        Op::BatchNormInputGrad(_) => vec![normalization::batch_norm_input_grad(x)?],
        Op::BatchNormWeightGrad(_) => normalization::batch_norm_weight_grad(x)?,
        Op::Dropout(op) => training::dropout(op, &x[0], &x[1])?,
        Op::DropoutBackward(op) => vec![training::dropout_backward(op.scale, &x[0], &x[1])?],
        Op::CrossEntropy(op) => training::cross_entropy(op.ignore_index, &x[0], &x[1])?,
        Op::CrossEntropyBackward(op) => vec![training::cross_entropy_backward(op.ignore_index, x)?],
        Op::AdamwStep(op) => training::adamw(op, x)?,
        Op::SgdStep(op) => training::sgd(op, x)?,
        Op::SquaredNorm(_) => vec![Elements::Float(vec![x[0].floats()?.iter().map(|v| v * v).sum()])],
    })
}

impl Elements {
    /// Converts each element to `dtype`: floats round to nearest, integers truncate, booleans are `!= 0`.
    pub fn as_type(self, dtype: DType) -> Self {
        match (self, dtype) {
            (e @ Self::Float(_), DType::F64) | (e @ Self::Int(_), DType::I64) => e,
            (Self::Float(v), DType::F32) => Self::Float(v.into_iter().map(|x| f64::from(x as f32)).collect()),
            (Self::Float(v), DType::F16) => {
                Self::Float(v.into_iter().map(|x| half::f16::from_f32(x as f32).to_f64()).collect())
            }
            (Self::Float(v), DType::BF16) => {
                Self::Float(v.into_iter().map(|x| half::bf16::from_f32(x as f32).to_f64()).collect())
            }
            (Self::Float(v), DType::Bool) => Self::Int(v.into_iter().map(|x| i64::from(x != 0.0)).collect()),
            (Self::Float(v), DType::I64 | DType::I32) => {
                Self::Int(v.into_iter().map(|x| x as i64).collect()).as_type(dtype)
            }
            (Self::Int(v), DType::I32) => Self::Int(v.into_iter().map(|x| i64::from(x as i32)).collect()),
            (Self::Int(v), DType::Bool) => Self::Int(v.into_iter().map(|x| i64::from(x != 0)).collect()),
            (Self::Int(v), _) => Self::Float(v.into_iter().map(|x| x as f64).collect()).as_type(dtype),
        }
    }

    /// The elements at these positions, in order, and zero for `None`.
    fn pick(&self, positions: impl Iterator<Item = Option<usize>>) -> Self {
        match self {
            Self::Float(v) => Self::Float(positions.map(|p| p.map_or(0.0, |p| v[p])).collect()),
            Self::Int(v) => Self::Int(positions.map(|p| p.map_or(0, |p| v[p])).collect()),
        }
    }

    /// Adds (or, unless `accumulate`, writes) element `from` of `source` to element `to`.
    fn put(&mut self, to: usize, source: &Self, from: usize, accumulate: bool) {
        match (self, source) {
            (Self::Float(a), Self::Float(b)) => a[to] = if accumulate { a[to] + b[from] } else { b[from] },
            (Self::Int(a), Self::Int(b)) => a[to] = if accumulate { a[to].wrapping_add(b[from]) } else { b[from] },
            // Operands of one type are of one kind: the shape rule sees to it.
            _ => {}
        }
    }
}

impl Array {
    /// An array of these elements, converted to the type.
    pub fn new(ty: TensorType, elements: Elements) -> Self {
        let elements = elements.as_type(ty.dtype);
        Self { ty, elements }
    }

    /// Floats of type f64.
    pub fn from_f64(shape: &[usize], values: Vec<f64>) -> Self {
        Self::new(TensorType::new(DType::F64, shape), Elements::Float(values))
    }

    /// An array of one value.
    pub fn filled(ty: TensorType, value: f64) -> Self {
        let n = ty.numel();
        Self::new(ty, Elements::Float(vec![value; n]))
    }

    /// The elements of a host tensor.
    pub fn from_host(t: &HostTensor) -> Result<Self, String> {
        let elements = match t.dtype() {
            d if d.is_float() => Elements::Float(t.to_f64()),
            DType::I64 => Elements::Int(t.to_i64().ok_or("not i64")?),
            _ => Elements::Int(t.to_f64().into_iter().map(|v| v as i64).collect()),
        };
        Ok(Self { ty: t.ty().clone(), elements })
    }

    /// The same as a host tensor.
    pub fn to_host(&self) -> Result<HostTensor, String> {
        let shape = self.ty.shape.clone();
        match &self.elements {
            Elements::Float(v) => HostTensor::from_f64(shape, v).and_then(|t| t.cast(self.ty.dtype)),
            Elements::Int(v) => HostTensor::from_i64(shape, v).and_then(|t| t.cast(self.ty.dtype)),
        }
        .map_err(|e| e.to_string())
    }

    /// Converted to another element type.
    pub fn converted(&self, dtype: DType) -> Self {
        Self::new(TensorType::new(dtype, self.ty.shape.clone()), self.elements.clone())
    }

    /// The elements, which must be floats.
    pub fn floats(&self) -> Result<&[f64], String> {
        match &self.elements {
            Elements::Float(v) => Ok(v),
            Elements::Int(_) => Err(format!("{} holds no floats", self.ty)),
        }
    }

    /// The elements, which must be integers or booleans.
    pub fn ints(&self) -> Result<&[i64], String> {
        match &self.elements {
            Elements::Int(v) => Ok(v),
            Elements::Float(_) => Err(format!("{} holds no integers", self.ty)),
        }
    }

    fn shape(&self) -> &[usize] {
        &self.ty.shape
    }

    /// The position that `index` reads. It indexes a shape that this array broadcasts to.
    fn broadcast_at(&self, index: &[usize]) -> usize {
        let lead = index.len() - self.ty.rank();
        self.shape().iter().zip(&index[lead..]).fold(0, |at, (&n, &i)| at * n + if n == 1 { 0 } else { i })
    }
}

/// The row-major position of an index.
fn position(shape: &[usize], index: &[usize]) -> usize {
    shape.iter().zip(index).fold(0, |at, (&n, &i)| at * n + i)
}

/// Every index of a shape, in row-major order.
fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    let count: usize = shape.iter().product();
    (0..count).map(move |mut at| {
        let mut index = vec![0; shape.len()];
        for (i, &n) in index.iter_mut().zip(shape).rev() {
            *i = at % n;
            at /= n;
        }
        index
    })
}

/// A backend that runs every operator by [`evaluate`], to test graphs and gradients without any kernel. It is too
/// slow to train.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reference;

impl Reference {
    /// Its name in errors. Users cannot choose it.
    pub const NAME: &str = "reference";
}

impl Backend for Reference {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn device(&self) -> DeviceInfo {
        DeviceInfo { name: "reference evaluator".into(), threads: Some(1), memory_bytes: None }
    }

    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError> {
        let array =
            Array::from_host(tensor).map_err(|reason| BackendError::Tensor { backend: Self::NAME.into(), reason })?;
        Ok(Tensor::new(tensor.ty().clone(), array))
    }

    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError> {
        let fail = |reason| BackendError::Tensor { backend: Self::NAME.into(), reason };
        let array = tensor.get::<Array>().ok_or_else(|| fail("it belongs to another backend".into()))?;
        array.to_host().map_err(fail)
    }

    fn run(&self, op: &Op, inputs: Vec<Tensor>, _outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError> {
        let operands: Vec<TensorType> = inputs.iter().map(|t| t.ty().clone()).collect();
        let arrays: Option<Vec<Array>> = inputs.iter().map(|t| t.get::<Array>().cloned()).collect();
        let results =
            arrays.ok_or_else(|| "an operand belongs to another backend".to_string()).and_then(|a| evaluate(op, &a));
        match results {
            Ok(results) => Ok(results.into_iter().map(|a| Tensor::new(a.ty.clone(), a)).collect()),
            Err(reason) => {
                Err(BackendError::Operator { backend: Self::NAME.into(), op: op.name().into(), reason, operands })
            }
        }
    }
}
