//! Operators by name, as in the graph crate's builder.

use fusionllm_graph::ops::{
    Arange, Binary, BinaryScalar, Cast, Cat, Compare, CompareScalar, Detach, Expand, Flip, Full, Gather, IndexSelect,
    Matmul, Permute, Reduce, ReduceKind, Reshape, Slice, Unary, Where,
};
use fusionllm_graph::{DType, HostTensor, TensorType};

use super::{Context, Result, Value};

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
        // A number that is a size of the batch has other values for other batches, for which the graph is the same.
        if identity && !self.has_dynamic_sizes {
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
        let index = self.positions(positions)?;
        self.op(IndexSelect { dim }, &[x, index])
    }

    /// A constant with these positions.
    pub(crate) fn positions(&mut self, positions: &[i64]) -> Result<Value> {
        self.constant(HostTensor::from_i64([positions.len()], positions)?)
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
        if self.carries_gradient(x) { self.op(Detach, &[x]) } else { Ok(x) }
    }

    /// The numbers of `data`, with the gradient of `old`: `data - (detached old - old)`, where the difference is 0.
    pub(crate) fn with_gradient_of(&mut self, old: Value, data: Value) -> Result<Value> {
        let data = self.detach(data)?;
        if !self.carries_gradient(old) {
            return Ok(data);
        }
        let fixed = self.detach(old)?;
        let difference = self.op(Binary::Sub, &[fixed, old])?;
        // The difference of two infinities is no number.
        let number = self.compare(Compare::Eq, difference, difference)?;
        let zero = self.full(self.dtype(old), &[], 0.0)?;
        let difference = self.where_(number, difference, zero)?;
        self.op(Binary::Sub, &[data, difference])
    }
}
