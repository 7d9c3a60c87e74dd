//! What operators are translated into: a graph being written, in which whatever depends on constants alone is computed at once.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use fusionllm_graph::ops::{
    Arange, Binary, BinaryScalar, Cast, Cat, Compare, CompareScalar, Detach, Expand, Flip, Full, Gather, IndexSelect,
    Matmul, Permute, Reduce, ReduceKind, Reshape, Slice, SliceBackward, Unary, Where,
};
use fusionllm_graph::{Builder, DType, HostTensor, Op, TensorType, ValueId};

use crate::error::Refused;

pub(crate) type Result<T> = std::result::Result<T, Refused>;

/// Runs one operator on tensors in memory, as a backend does; the types are those its results will have.
pub type Evaluate<'a> = &'a dyn Fn(&Op, Vec<HostTensor>, &[TensorType]) -> std::result::Result<Vec<HostTensor>, String>;

/// Largest tensor that is computed at import, and how many bytes of them in all: what a stranger's file may make of nothing.
pub(crate) const LARGEST_CONSTANT: usize = 64 << 20;
const ALL_CONSTANTS: usize = 512 << 20;

/// A value: in the graph, or known by now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Val {
    Node(ValueId),
    Const(usize),
}

/// A tensor of the exported graph. PyTorch's are names for parts of memory: what is written through one is read through the others.
struct Tensor {
    root: usize,
    /// How it is seen: applied to the root in order.
    path: Vec<Op>,
    /// Its value when the root had that version.
    seen: (u32, Val),
}

struct Root {
    value: Val,
    version: u32,
}

/// The translation under way.
pub(crate) struct Context<'a> {
    pub(crate) builder: Builder,
    evaluate: Evaluate<'a>,
    constants: Vec<Constant>,
    interned: HashMap<u64, Vec<usize>>,
    folded: usize,
    tensors: Vec<Tensor>,
    roots: Vec<Root>,
    /// What single precision becomes.
    pub(crate) single: DType,
}

struct Constant {
    tensor: HostTensor,
    /// In the graph, once something reads it there.
    value: Option<ValueId>,
}

impl<'a> Context<'a> {
    pub(crate) fn new(name: &str, single: DType, evaluate: Evaluate<'a>) -> Self {
        Self {
            builder: Builder::new(name),
            evaluate,
            constants: Vec::new(),
            interned: HashMap::new(),
            folded: 0,
            tensors: Vec::new(),
            roots: Vec::new(),
            single,
        }
    }

    pub(crate) fn element_type(&self, code: i64) -> Result<DType> {
        match crate::archive::element_type(code)? {
            DType::F32 => Ok(self.single),
            dtype => Ok(dtype),
        }
    }

    // Names for memory.

    /// A tensor of its own.
    pub(crate) fn fresh(&mut self, value: Val) -> usize {
        self.roots.push(Root { value, version: 0 });
        self.tensors.push(Tensor { root: self.roots.len() - 1, path: Vec::new(), seen: (0, value) });
        self.tensors.len() - 1
    }

    /// Another name for (a part of) a tensor's memory.
    pub(crate) fn view(&mut self, tensor: usize, ops: Vec<Op>) -> Result<usize> {
        let mut value = self.read(tensor)?;
        for op in &ops {
            value = self.op(op.clone(), &[value])?;
        }
        let root = self.tensors[tensor].root;
        let path = [self.tensors[tensor].path.clone(), ops].concat();
        self.tensors.push(Tensor { root, path, seen: (self.roots[root].version, value) });
        Ok(self.tensors.len() - 1)
    }

    /// What a tensor holds now.
    pub(crate) fn read(&mut self, tensor: usize) -> Result<Val> {
        let Tensor { root, seen, .. } = self.tensors[tensor];
        let Root { value, version } = self.roots[root];
        if seen.0 == version {
            return Ok(seen.1);
        }
        let mut value = value;
        for op in self.tensors[tensor].path.clone() {
            value = self.op(op, &[value])?;
        }
        self.tensors[tensor].seen = (version, value);
        Ok(value)
    }

    /// Overwrites a tensor, and so all that see the same memory. The value takes the tensor's type and shape.
    pub(crate) fn write(&mut self, tensor: usize, value: Val) -> Result<()> {
        let ty = {
            let old = self.read(tensor)?;
            self.ty(old).clone()
        };
        let value = self.cast(value, ty.dtype)?;
        let value = self.expand(value, &ty.shape)?;
        let root = self.tensors[tensor].root;
        let path = self.tensors[tensor].path.clone();
        let whole = self.roots[root].value;
        let whole = self.written(whole, &path, value)?;
        self.roots[root].value = whole;
        self.roots[root].version += 1;
        Ok(())
    }

    /// `whole` with `value` in place of what `path` shows of it.
    fn written(&mut self, whole: Val, path: &[Op], value: Val) -> Result<Val> {
        let Some((step, rest)) = path.split_first() else { return Ok(value) };
        let part = self.op(step.clone(), &[whole])?;
        let part = self.written(part, rest, value)?;
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
            _ => Err("writes through a view that shows elements more than once".into()),
        }
    }

    /// `whole` with `part` in place of a slice.
    pub(crate) fn slice_scatter(&mut self, whole: Val, part: Val, slice: &Slice) -> Result<Val> {
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

    // Constants.

    /// A known tensor.
    pub(crate) fn constant(&mut self, tensor: HostTensor) -> Val {
        let mut hash = DefaultHasher::new();
        (tensor.ty(), tensor.bytes()).hash(&mut hash);
        let same = self.interned.entry(hash.finish()).or_default();
        if let Some(&i) = same.iter().find(|&&i| self.constants[i].tensor == tensor) {
            return Val::Const(i);
        }
        self.folded = self.folded.saturating_add(tensor.bytes().len());
        same.push(self.constants.len());
        self.constants.push(Constant { tensor, value: None });
        Val::Const(self.constants.len() - 1)
    }

    /// The tensor, if it is known.
    pub(crate) fn known(&self, value: Val) -> Option<&HostTensor> {
        match value {
            Val::Const(i) => Some(&self.constants[i].tensor),
            Val::Node(_) => None,
        }
    }

    /// The number that all of a known tensor's elements are.
    pub(crate) fn uniform(&self, value: Val) -> Option<f64> {
        let tensor = self.known(value)?;
        let size = tensor.dtype().size();
        let first = tensor.bytes().get(..size)?;
        if !tensor.bytes().chunks_exact(size).all(|e| e == first) {
            return None;
        }
        let one = HostTensor::from_bytes(TensorType::new(tensor.dtype(), []), first.to_vec()).ok()?;
        one.to_f64().first().copied()
    }

    /// A value in the graph.
    pub(crate) fn lower(&mut self, value: Val) -> Result<ValueId> {
        let i = match value {
            Val::Node(id) => return Ok(id),
            Val::Const(i) => i,
        };
        if let Some(id) = self.constants[i].value {
            return Ok(id);
        }
        let tensor = self.constants[i].tensor.clone();
        let full = tensor.shape().to_vec();
        let small = shrunk(&tensor)?;
        let b = &mut self.builder;
        // Doubles cannot tell all large integers apart.
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

    /// Applies an operator: now if all operands are known and the results not too large, else in the graph.
    pub(crate) fn apply(&mut self, op: impl Into<Op>, inputs: &[Val]) -> Result<Vec<Val>> {
        let op = op.into();
        if inputs.iter().all(|v| matches!(v, Val::Const(_))) {
            let types: Vec<&TensorType> = inputs.iter().map(|v| self.ty(*v)).collect();
            let outputs = op.infer(&types).map_err(|reason| {
                let types: Vec<String> = types.iter().map(|t| t.to_string()).collect();
                Refused(format!("{reason}; operands: {}", types.join(", ")))
            })?;
            let bytes = outputs.iter().map(|t| t.bytes()).fold(0, usize::saturating_add);
            if bytes <= LARGEST_CONSTANT && self.folded.saturating_add(bytes) <= ALL_CONSTANTS {
                let operands = inputs.iter().filter_map(|v| self.known(*v).cloned()).collect();
                let results = (self.evaluate)(&op, operands, &outputs)?;
                return Ok(results.into_iter().map(|t| self.constant(t)).collect());
            }
        }
        let operands = inputs.iter().map(|v| self.lower(*v)).collect::<Result<Vec<_>>>()?;
        Ok(self.builder.apply(op, &operands)?.into_iter().map(Val::Node).collect())
    }

    /// [`Self::apply`], for the first result.
    pub(crate) fn op(&mut self, op: impl Into<Op>, inputs: &[Val]) -> Result<Val> {
        self.apply(op, inputs)?.first().copied().ok_or_else(|| "an operator gave no result".into())
    }

    pub(crate) fn ty(&self, value: Val) -> &TensorType {
        match value {
            Val::Node(id) => self.builder.ty(id),
            Val::Const(i) => self.constants[i].tensor.ty(),
        }
    }

    pub(crate) fn shape(&self, value: Val) -> Vec<usize> {
        self.ty(value).shape.clone()
    }

    pub(crate) fn rank(&self, value: Val) -> usize {
        self.ty(value).rank()
    }

    pub(crate) fn dtype(&self, value: Val) -> DType {
        self.ty(value).dtype
    }

    /// An integer tensor's elements, if they are known.
    pub(crate) fn integers(&mut self, value: Val) -> Result<Option<Vec<i64>>> {
        if self.known(value).is_none() {
            return Ok(None);
        }
        let value = self.cast(value, DType::I64)?;
        Ok(self.known(value).and_then(HostTensor::to_i64))
    }
}

/// Operators by name, as in the graph crate's builder.
impl Context<'_> {
    pub(crate) fn unary(&mut self, op: Unary, x: Val) -> Result<Val> {
        self.op(op, &[x])
    }

    /// With an operand that is one known number as a number.
    pub(crate) fn binary(&mut self, op: Binary, a: Val, b: Val) -> Result<Val> {
        let single = |c: &Self, v: Val, other: Val| {
            let one = c.ty(v).numel() == 1 && c.rank(v) <= c.rank(other) && matches!(other, Val::Node(_));
            // Integers beyond what a float holds stay tensors.
            one.then(|| c.uniform(v)).flatten().filter(|n| c.dtype(v).is_float() || n.abs() < 9e15)
        };
        if let Some(scalar) = single(self, b, a) {
            return self.scalar(op, a, scalar, false);
        }
        if let Some(scalar) = single(self, a, b) {
            return self.scalar(op, b, scalar, true);
        }
        self.op(op, &[a, b])
    }

    pub(crate) fn scalar(&mut self, op: Binary, x: Val, scalar: f64, reverse: bool) -> Result<Val> {
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

    pub(crate) fn add(&mut self, a: Val, b: Val) -> Result<Val> {
        self.binary(Binary::Add, a, b)
    }

    pub(crate) fn sub(&mut self, a: Val, b: Val) -> Result<Val> {
        self.binary(Binary::Sub, a, b)
    }

    pub(crate) fn mul(&mut self, a: Val, b: Val) -> Result<Val> {
        self.binary(Binary::Mul, a, b)
    }

    pub(crate) fn div(&mut self, a: Val, b: Val) -> Result<Val> {
        self.binary(Binary::Div, a, b)
    }

    pub(crate) fn add_scalar(&mut self, x: Val, s: f64) -> Result<Val> {
        self.scalar(Binary::Add, x, s, false)
    }

    pub(crate) fn mul_scalar(&mut self, x: Val, s: f64) -> Result<Val> {
        self.scalar(Binary::Mul, x, s, false)
    }

    pub(crate) fn compare(&mut self, op: Compare, a: Val, b: Val) -> Result<Val> {
        self.op(op, &[a, b])
    }

    pub(crate) fn compare_scalar(&mut self, op: Compare, x: Val, scalar: f64) -> Result<Val> {
        self.op(CompareScalar { op, scalar }, &[x])
    }

    pub(crate) fn choose(&mut self, condition: Val, a: Val, b: Val) -> Result<Val> {
        self.op(Where, &[condition, a, b])
    }

    pub(crate) fn cast(&mut self, x: Val, dtype: DType) -> Result<Val> {
        if self.dtype(x) == dtype { Ok(x) } else { self.op(Cast { dtype }, &[x]) }
    }

    pub(crate) fn reduce(&mut self, kind: ReduceKind, x: Val, dims: &[usize], keepdim: bool) -> Result<Val> {
        if dims.is_empty() {
            return Ok(x);
        }
        self.op(Reduce { kind, dims: dims.to_vec(), keepdim }, &[x])
    }

    pub(crate) fn sum(&mut self, x: Val, dims: &[usize], keepdim: bool) -> Result<Val> {
        self.reduce(ReduceKind::Sum, x, dims, keepdim)
    }

    pub(crate) fn mean(&mut self, x: Val, dims: &[usize], keepdim: bool) -> Result<Val> {
        self.reduce(ReduceKind::Mean, x, dims, keepdim)
    }

    pub(crate) fn reshape(&mut self, x: Val, shape: &[usize]) -> Result<Val> {
        if self.ty(x).shape == shape { Ok(x) } else { self.op(Reshape { shape: shape.to_vec() }, &[x]) }
    }

    pub(crate) fn permute(&mut self, x: Val, dims: &[usize]) -> Result<Val> {
        if dims.iter().copied().eq(0..self.rank(x)) {
            return Ok(x);
        }
        self.op(Permute { dims: dims.to_vec() }, &[x])
    }

    /// The last two dimensions swapped.
    pub(crate) fn transpose(&mut self, x: Val) -> Result<Val> {
        let rank = self.rank(x);
        let mut dims: Vec<usize> = (0..rank).collect();
        if rank >= 2 {
            dims.swap(rank - 1, rank - 2);
        }
        self.permute(x, &dims)
    }

    pub(crate) fn expand(&mut self, x: Val, shape: &[usize]) -> Result<Val> {
        if self.ty(x).shape == shape { Ok(x) } else { self.op(Expand { shape: shape.to_vec() }, &[x]) }
    }

    pub(crate) fn slice(&mut self, x: Val, dim: usize, start: usize, end: usize, step: usize) -> Result<Val> {
        if start == 0 && step == 1 && self.ty(x).shape.get(dim) == Some(&end) {
            return Ok(x);
        }
        self.op(Slice { dim, start, end, step }, &[x])
    }

    /// Leaves out what is empty.
    pub(crate) fn cat(&mut self, parts: &[Val], dim: usize) -> Result<Val> {
        let full: Vec<Val> = parts.iter().copied().filter(|v| self.ty(*v).shape.get(dim) != Some(&0)).collect();
        match (&full[..], parts) {
            ([one], _) => Ok(*one),
            ([], [first, ..]) => Ok(*first),
            _ => self.op(Cat { dim }, &full),
        }
    }

    pub(crate) fn flip(&mut self, x: Val, dims: &[usize]) -> Result<Val> {
        self.op(Flip { dims: dims.to_vec() }, &[x])
    }

    pub(crate) fn gather(&mut self, x: Val, dim: usize, index: Val) -> Result<Val> {
        self.op(Gather { dim }, &[x, index])
    }

    /// Slices of a dimension by known positions.
    pub(crate) fn pick(&mut self, x: Val, dim: usize, positions: &[i64]) -> Result<Val> {
        let index = self.constant(HostTensor::from_i64([positions.len()], positions)?);
        self.op(IndexSelect { dim }, &[x, index])
    }

    pub(crate) fn matmul(&mut self, a: Val, b: Val) -> Result<Val> {
        self.op(Matmul, &[a, b])
    }

    pub(crate) fn full(&mut self, dtype: DType, shape: &[usize], value: f64) -> Result<Val> {
        self.op(Full { ty: TensorType::new(dtype, shape), value }, &[])
    }

    pub(crate) fn arange(&mut self, dtype: DType, start: f64, step: f64, len: usize) -> Result<Val> {
        self.op(Arange { dtype, start, step, len }, &[])
    }

    /// The value without its gradient.
    pub(crate) fn detach(&mut self, x: Val) -> Result<Val> {
        if matches!(x, Val::Const(_)) || !self.dtype(x).is_float() { Ok(x) } else { self.op(Detach, &[x]) }
    }
}

/// A tensor cut to one slice in every dimension along which its slices are all alike.
fn shrunk(tensor: &HostTensor) -> Result<HostTensor> {
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
