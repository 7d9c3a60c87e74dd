//! The target of the translation: a graph under construction, with constant folding and with PyTorch's shared memory.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use fusionllm_graph::ops::{
    Arange, Binary, BinaryScalar, Cast, Cat, Compare, CompareScalar, Detach, Expand, Flip, Full, Gather, IndexSelect,
    Matmul, Permute, Reduce, ReduceKind, Reshape, Slice, SliceBackward, Unary, Where,
};
use fusionllm_graph::{Builder, DType, HostTensor, Op, TensorType, ValueId};

use crate::error::TranslationError;

pub(crate) type Result<T> = std::result::Result<T, TranslationError>;

/// Runs one operator on tensors in memory, like a backend. The third argument has the types of the results.
pub type Evaluate<'a> = &'a dyn Fn(&Op, Vec<HostTensor>, &[TensorType]) -> std::result::Result<Vec<HostTensor>, String>;

/// The largest tensor computed at import. A small file from a stranger can describe huge constants.
pub(crate) const MAX_CONSTANT_BYTES: usize = 64 << 20;
/// The total size of all tensors computed at import.
const MAX_TOTAL_CONSTANT_BYTES: usize = 512 << 20;

/// A value: computed by the graph, or a constant of known content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value {
    /// A value of the graph.
    Node(ValueId),
    /// The index of a constant.
    Constant(usize),
}

/// The index of a tensor in the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorId(usize);

/// A tensor of the exported graph: a view of a storage. As in PyTorch, a write through one view changes all others.
struct Tensor {
    storage: usize,
    /// The operators that compute the view from the storage, in order.
    view: Vec<Op>,
    /// The value of the view.
    value: Value,
    /// The version of the storage that `value` was computed from.
    version: u32,
}

/// Memory that several tensors may share.
struct Storage {
    value: Value,
    /// Counts the writes.
    version: u32,
}

/// The state of a translation.
pub(crate) struct Context<'a> {
    pub(crate) builder: Builder,
    evaluate: Evaluate<'a>,
    constants: Vec<Constant>,
    /// Constants by the hash of their content, so that equal ones are stored once.
    constants_by_hash: HashMap<u64, Vec<usize>>,
    constant_bytes: usize,
    tensors: Vec<Tensor>,
    storages: Vec<Storage>,
    /// The element type that replaces single precision.
    pub(crate) single: DType,
}

struct Constant {
    tensor: HostTensor,
    /// The value in the graph, once a node reads it.
    value: Option<ValueId>,
}

impl<'a> Context<'a> {
    pub(crate) fn new(name: &str, single: DType, evaluate: Evaluate<'a>) -> Self {
        Self {
            builder: Builder::new(name),
            evaluate,
            constants: Vec::new(),
            constants_by_hash: HashMap::new(),
            constant_bytes: 0,
            tensors: Vec::new(),
            storages: Vec::new(),
            single,
        }
    }

    pub(crate) fn element_type(&self, code: i64) -> Result<DType> {
        match crate::archive::element_type(code)? {
            DType::F32 => Ok(self.single),
            dtype => Ok(dtype),
        }
    }

    /// Adds a tensor with memory of its own.
    pub(crate) fn new_tensor(&mut self, value: Value) -> TensorId {
        self.storages.push(Storage { value, version: 0 });
        self.tensors.push(Tensor { storage: self.storages.len() - 1, view: Vec::new(), value, version: 0 });
        TensorId(self.tensors.len() - 1)
    }

    /// Adds a tensor that shares the memory of another.
    pub(crate) fn view(&mut self, tensor: TensorId, ops: Vec<Op>) -> Result<TensorId> {
        let mut value = self.read(tensor)?;
        for op in &ops {
            value = self.op(op.clone(), &[value])?;
        }
        let storage = self.tensors[tensor.0].storage;
        let view = [self.tensors[tensor.0].view.clone(), ops].concat();
        self.tensors.push(Tensor { storage, view, value, version: self.storages[storage].version });
        Ok(TensorId(self.tensors.len() - 1))
    }

    /// The present value of a tensor.
    pub(crate) fn read(&mut self, tensor: TensorId) -> Result<Value> {
        let Tensor { storage, value, version, .. } = self.tensors[tensor.0];
        let Storage { value: whole, version: newest } = self.storages[storage];
        if version == newest {
            return Ok(value);
        }
        let mut value = whole;
        for op in self.tensors[tensor.0].view.clone() {
            value = self.op(op, &[value])?;
        }
        self.tensors[tensor.0].value = value;
        self.tensors[tensor.0].version = newest;
        Ok(value)
    }

    /// Overwrites a tensor and all tensors that share its memory. Converts the value to the tensor's type and shape.
    pub(crate) fn write(&mut self, tensor: TensorId, value: Value) -> Result<()> {
        let ty = {
            let old = self.read(tensor)?;
            self.ty(old).clone()
        };
        let value = self.cast(value, ty.dtype)?;
        let value = self.expand(value, &ty.shape)?;
        let storage = self.tensors[tensor.0].storage;
        let view = self.tensors[tensor.0].view.clone();
        let whole = self.storages[storage].value;
        let whole = self.with_view_replaced(whole, &view, value)?;
        self.storages[storage].value = whole;
        self.storages[storage].version += 1;
        Ok(())
    }

    /// `whole` with the part that `view` selects replaced by `value`.
    fn with_view_replaced(&mut self, whole: Value, view: &[Op], value: Value) -> Result<Value> {
        let Some((step, rest)) = view.split_first() else { return Ok(value) };
        let part = self.op(step.clone(), &[whole])?;
        let part = self.with_view_replaced(part, rest, value)?;
        let shape = self.shape(whole);
        match step {
            Op::Reshape(_) => self.reshape(part, &shape),
            Op::Permute(Permute { dims }) => {
                let mut inverse = vec![0; dims.len()];
                for (i, &d) in dims.iter().enumerate() {
                    inverse[d] = i;
                }
                self.permute(part, &inverse)
            }
            Op::Slice(slice) => self.slice_scatter(whole, part, slice),
            _ => Err("it writes through a view that repeats elements, which is not supported".into()),
        }
    }

    /// `whole` with a slice replaced by `part`.
    pub(crate) fn slice_scatter(&mut self, whole: Value, part: Value, slice: &Slice) -> Result<Value> {
        let size = self.shape(whole)[slice.dim];
        if slice.step == 1 {
            let before = self.slice(whole, slice.dim, 0, slice.start, 1)?;
            let after = self.slice(whole, slice.dim, slice.end, size, 1)?;
            return self.cat(&[before, part, after], slice.dim);
        }
        let spread = self.op(SliceBackward { slice: slice.clone(), size }, &[part])?;
        let inside: Vec<bool> = (0..size)
            .map(|i| i >= slice.start && i < slice.end && (i - slice.start).is_multiple_of(slice.step))
            .collect();
        let mut along = vec![1; self.shape(whole).len()];
        along[slice.dim] = size;
        let inside = self.constant(HostTensor::from_bool(along, &inside)?);
        self.op(Where, &[inside, spread, whole])
    }

    /// A constant with this content.
    pub(crate) fn constant(&mut self, tensor: HostTensor) -> Value {
        let mut hash = DefaultHasher::new();
        (tensor.ty(), tensor.bytes()).hash(&mut hash);
        let same = self.constants_by_hash.entry(hash.finish()).or_default();
        if let Some(&i) = same.iter().find(|&&i| self.constants[i].tensor == tensor) {
            return Value::Constant(i);
        }
        self.constant_bytes = self.constant_bytes.saturating_add(tensor.bytes().len());
        same.push(self.constants.len());
        self.constants.push(Constant { tensor, value: None });
        Value::Constant(self.constants.len() - 1)
    }

    /// The content of a constant; `None` for values of the graph.
    pub(crate) fn constant_tensor(&self, value: Value) -> Option<&HostTensor> {
        match value {
            Value::Constant(i) => Some(&self.constants[i].tensor),
            Value::Node(_) => None,
        }
    }

    /// The number that every element of a constant has; `None` if elements differ, and for values of the graph.
    pub(crate) fn constant_number(&self, value: Value) -> Option<f64> {
        let tensor = self.constant_tensor(value)?;
        let size = tensor.dtype().size();
        let first = tensor.bytes().get(..size)?;
        if !tensor.bytes().chunks_exact(size).all(|e| e == first) {
            return None;
        }
        let one = HostTensor::from_bytes(TensorType::new(tensor.dtype(), []), first.to_vec()).ok()?;
        one.to_f64().first().copied()
    }

    /// The value in the graph. Adds a constant to the graph when a node first reads it.
    pub(crate) fn materialize(&mut self, value: Value) -> Result<ValueId> {
        let i = match value {
            Value::Node(id) => return Ok(id),
            Value::Constant(i) => i,
        };
        if let Some(id) = self.constants[i].value {
            return Ok(id);
        }
        let tensor = self.constants[i].tensor.clone();
        let full = tensor.shape().to_vec();
        let small = without_repetition(&tensor)?;
        let b = &mut self.builder;
        // A double cannot represent all 64-bit integers.
        let id = if small.ty().numel() == 1 && small.dtype() != DType::I64 {
            let number = small.to_f64().first().copied().unwrap_or(0.0);
            b.full(TensorType::new(small.dtype(), small.shape()), number)?
        } else {
            b.constant(&format!("constant_{i}"), small)?
        };
        let id = b.expand(id, full)?;
        self.constants[i].value = Some(id);
        Ok(id)
    }

    /// Applies an operator: at once if all operands are constants and the results are not too large, else in the graph.
    pub(crate) fn apply(&mut self, op: impl Into<Op>, inputs: &[Value]) -> Result<Vec<Value>> {
        let op = op.into();
        if inputs.iter().all(|v| matches!(v, Value::Constant(_))) {
            let types: Vec<&TensorType> = inputs.iter().map(|v| self.ty(*v)).collect();
            let outputs = op.infer(&types).map_err(|reason| {
                let types: Vec<String> = types.iter().map(|t| t.to_string()).collect();
                TranslationError(format!("{reason}; operands: {}", types.join(", ")))
            })?;
            let bytes = outputs.iter().map(|t| t.bytes()).fold(0, usize::saturating_add);
            if bytes <= MAX_CONSTANT_BYTES && self.constant_bytes.saturating_add(bytes) <= MAX_TOTAL_CONSTANT_BYTES {
                let operands = inputs.iter().filter_map(|v| self.constant_tensor(*v).cloned()).collect();
                let results = (self.evaluate)(&op, operands, &outputs)?;
                return Ok(results.into_iter().map(|t| self.constant(t)).collect());
            }
        }
        let operands = inputs.iter().map(|v| self.materialize(*v)).collect::<Result<Vec<_>>>()?;
        Ok(self.builder.apply(op, &operands)?.into_iter().map(Value::Node).collect())
    }

    /// [`Self::apply`], for the first result.
    pub(crate) fn op(&mut self, op: impl Into<Op>, inputs: &[Value]) -> Result<Value> {
        self.apply(op, inputs)?.first().copied().ok_or_else(|| "the operator has no result".into())
    }

    pub(crate) fn ty(&self, value: Value) -> &TensorType {
        match value {
            Value::Node(id) => self.builder.ty(id),
            Value::Constant(i) => self.constants[i].tensor.ty(),
        }
    }

    pub(crate) fn shape(&self, value: Value) -> Vec<usize> {
        self.ty(value).shape.clone()
    }

    pub(crate) fn rank(&self, value: Value) -> usize {
        self.ty(value).rank()
    }

    pub(crate) fn dtype(&self, value: Value) -> DType {
        self.ty(value).dtype
    }

    /// The elements of a constant as integers; `None` for values of the graph.
    pub(crate) fn constant_integers(&mut self, value: Value) -> Result<Option<Vec<i64>>> {
        if self.constant_tensor(value).is_none() {
            return Ok(None);
        }
        let value = self.cast(value, DType::I64)?;
        Ok(self.constant_tensor(value).and_then(HostTensor::to_i64))
    }
}

/// Operators by name, as in the graph crate's builder.
impl Context<'_> {
    pub(crate) fn unary(&mut self, op: Unary, x: Value) -> Result<Value> {
        self.op(op, &[x])
    }

    /// A binary operator. An operand that is a single constant number becomes an attribute.
    pub(crate) fn binary(&mut self, op: Binary, a: Value, b: Value) -> Result<Value> {
        let single = |c: &Self, v: Value, other: Value| {
            let one = c.ty(v).numel() == 1 && c.rank(v) <= c.rank(other) && matches!(other, Value::Node(_));
            // Integers that a double cannot represent stay tensors.
            one.then(|| c.constant_number(v)).flatten().filter(|n| c.dtype(v).is_float() || n.abs() < 9e15)
        };
        if let Some(scalar) = single(self, b, a) {
            return self.scalar(op, a, scalar, false);
        }
        if let Some(scalar) = single(self, a, b) {
            return self.scalar(op, b, scalar, true);
        }
        self.op(op, &[a, b])
    }

    pub(crate) fn scalar(&mut self, op: Binary, x: Value, scalar: f64, reverse: bool) -> Result<Value> {
        let identity = match op {
            Binary::Add | Binary::Sub => scalar == 0.0 && (!reverse || op == Binary::Add),
            Binary::Mul => scalar == 1.0,
            Binary::Div => scalar == 1.0 && !reverse,
            _ => false,
        };
        if identity {
            return Ok(x);
        }
        self.op(BinaryScalar { op, scalar, reverse }, &[x])
    }

    pub(crate) fn add(&mut self, a: Value, b: Value) -> Result<Value> {
        self.binary(Binary::Add, a, b)
    }

    pub(crate) fn sub(&mut self, a: Value, b: Value) -> Result<Value> {
        self.binary(Binary::Sub, a, b)
    }

    pub(crate) fn mul(&mut self, a: Value, b: Value) -> Result<Value> {
        self.binary(Binary::Mul, a, b)
    }

    pub(crate) fn div(&mut self, a: Value, b: Value) -> Result<Value> {
        self.binary(Binary::Div, a, b)
    }

    pub(crate) fn add_scalar(&mut self, x: Value, s: f64) -> Result<Value> {
        self.scalar(Binary::Add, x, s, false)
    }

    pub(crate) fn mul_scalar(&mut self, x: Value, s: f64) -> Result<Value> {
        self.scalar(Binary::Mul, x, s, false)
    }

    pub(crate) fn compare(&mut self, op: Compare, a: Value, b: Value) -> Result<Value> {
        self.op(op, &[a, b])
    }

    pub(crate) fn compare_scalar(&mut self, op: Compare, x: Value, scalar: f64) -> Result<Value> {
        self.op(CompareScalar { op, scalar }, &[x])
    }

    pub(crate) fn where_(&mut self, condition: Value, a: Value, b: Value) -> Result<Value> {
        self.op(Where, &[condition, a, b])
    }

    pub(crate) fn cast(&mut self, x: Value, dtype: DType) -> Result<Value> {
        if self.dtype(x) == dtype { Ok(x) } else { self.op(Cast { dtype }, &[x]) }
    }

    pub(crate) fn reduce(&mut self, kind: ReduceKind, x: Value, dims: &[usize], keepdim: bool) -> Result<Value> {
        if dims.is_empty() {
            return Ok(x);
        }
        self.op(Reduce { kind, dims: dims.to_vec(), keepdim }, &[x])
    }

    pub(crate) fn sum(&mut self, x: Value, dims: &[usize], keepdim: bool) -> Result<Value> {
        self.reduce(ReduceKind::Sum, x, dims, keepdim)
    }

    pub(crate) fn mean(&mut self, x: Value, dims: &[usize], keepdim: bool) -> Result<Value> {
        self.reduce(ReduceKind::Mean, x, dims, keepdim)
    }

    pub(crate) fn reshape(&mut self, x: Value, shape: &[usize]) -> Result<Value> {
        if self.ty(x).shape == shape { Ok(x) } else { self.op(Reshape { shape: shape.to_vec() }, &[x]) }
    }

    pub(crate) fn permute(&mut self, x: Value, dims: &[usize]) -> Result<Value> {
        if dims.iter().copied().eq(0..self.rank(x)) {
            return Ok(x);
        }
        self.op(Permute { dims: dims.to_vec() }, &[x])
    }

    /// Swaps the last two dimensions.
    pub(crate) fn transpose(&mut self, x: Value) -> Result<Value> {
        let rank = self.rank(x);
        let mut dims: Vec<usize> = (0..rank).collect();
        if rank >= 2 {
            dims.swap(rank - 1, rank - 2);
        }
        self.permute(x, &dims)
    }

    pub(crate) fn expand(&mut self, x: Value, shape: &[usize]) -> Result<Value> {
        if self.ty(x).shape == shape { Ok(x) } else { self.op(Expand { shape: shape.to_vec() }, &[x]) }
    }

    pub(crate) fn slice(&mut self, x: Value, dim: usize, start: usize, end: usize, step: usize) -> Result<Value> {
        if start == 0 && step == 1 && self.ty(x).shape.get(dim) == Some(&end) {
            return Ok(x);
        }
        self.op(Slice { dim, start, end, step }, &[x])
    }

    /// Concatenates the parts that are not empty.
    pub(crate) fn cat(&mut self, parts: &[Value], dim: usize) -> Result<Value> {
        let full: Vec<Value> = parts.iter().copied().filter(|v| self.ty(*v).shape.get(dim) != Some(&0)).collect();
        match (&full[..], parts) {
            ([one], _) => Ok(*one),
            ([], [first, ..]) => Ok(*first),
            _ => self.op(Cat { dim }, &full),
        }
    }

    pub(crate) fn flip(&mut self, x: Value, dims: &[usize]) -> Result<Value> {
        self.op(Flip { dims: dims.to_vec() }, &[x])
    }

    pub(crate) fn gather(&mut self, x: Value, dim: usize, index: Value) -> Result<Value> {
        self.op(Gather { dim }, &[x, index])
    }

    /// The slices of a dimension at constant positions.
    pub(crate) fn index_select(&mut self, x: Value, dim: usize, positions: &[i64]) -> Result<Value> {
        let index = self.constant(HostTensor::from_i64([positions.len()], positions)?);
        self.op(IndexSelect { dim }, &[x, index])
    }

    pub(crate) fn matmul(&mut self, a: Value, b: Value) -> Result<Value> {
        self.op(Matmul, &[a, b])
    }

    pub(crate) fn full(&mut self, dtype: DType, shape: &[usize], value: f64) -> Result<Value> {
        self.op(Full { ty: TensorType::new(dtype, shape), value }, &[])
    }

    pub(crate) fn arange(&mut self, dtype: DType, start: f64, step: f64, len: usize) -> Result<Value> {
        self.op(Arange { dtype, start, step, len }, &[])
    }

    /// The value, without a gradient.
    pub(crate) fn detach(&mut self, x: Value) -> Result<Value> {
        if matches!(x, Value::Constant(_)) || !self.dtype(x).is_float() { Ok(x) } else { self.op(Detach, &[x]) }
    }
}

/// Cuts every dimension along which all slices are equal to one slice.
fn without_repetition(tensor: &HostTensor) -> Result<HostTensor> {
    let mut bytes = tensor.bytes().to_vec();
    let mut shape = tensor.shape().to_vec();
    for d in 0..shape.len() {
        let inner = shape[d + 1..].iter().product::<usize>() * tensor.dtype().size();
        if shape[d] <= 1 || inner == 0 {
            continue;
        }
        let alike = bytes.chunks_exact(shape[d] * inner).all(|block| {
            let (first, rest) = block.split_at(inner);
            rest.chunks_exact(inner).all(|slice| slice == first)
        });
        if alike {
            bytes = bytes.chunks_exact(shape[d] * inner).flat_map(|block| block[..inner].to_vec()).collect();
            shape[d] = 1;
        }
    }
    Ok(HostTensor::from_bytes(TensorType::new(tensor.dtype(), shape), bytes)?)
}
