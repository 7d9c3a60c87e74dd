//! One [`Builder`] method per operator, and layers made of several operators.

use crate::ops::{
    Arange, ArgReduce, Binary, BinaryScalar, Cast, Cat, Compare, CompareScalar, Conv2d, CrossEntropy, CumSum, Dropout,
    Embedding, Expand, Flip, Full, Gather, LayerNorm, Linear, Matmul, Permute, Reduce, ReduceKind, Reshape, Slice,
    Softmax, Split, Unary, Where,
};
use crate::{Builder, DType, GraphError, Shape, TensorType, ValueId};

/// Operators by name. [`crate::ops`] documents their operands and shapes.
#[allow(missing_docs)]
impl Builder {
    pub fn unary(&mut self, op: Unary, x: ValueId) -> Result<ValueId, GraphError> {
        self.op(op, &[x])
    }

    pub fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.op(Binary::Add, &[a, b])
    }

    pub fn sub(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.op(Binary::Sub, &[a, b])
    }

    pub fn mul(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.op(Binary::Mul, &[a, b])
    }

    pub fn div(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.op(Binary::Div, &[a, b])
    }

    fn scalar(&mut self, op: Binary, x: ValueId, scalar: f64, reverse: bool) -> Result<ValueId, GraphError> {
        self.op(BinaryScalar { op, scalar, reverse }, &[x])
    }

    pub fn add_scalar(&mut self, x: ValueId, s: f64) -> Result<ValueId, GraphError> {
        self.scalar(Binary::Add, x, s, false)
    }

    pub fn sub_scalar(&mut self, x: ValueId, s: f64) -> Result<ValueId, GraphError> {
        self.scalar(Binary::Sub, x, s, false)
    }

    /// `s - x`
    pub fn scalar_sub(&mut self, s: f64, x: ValueId) -> Result<ValueId, GraphError> {
        self.scalar(Binary::Sub, x, s, true)
    }

    pub fn mul_scalar(&mut self, x: ValueId, s: f64) -> Result<ValueId, GraphError> {
        self.scalar(Binary::Mul, x, s, false)
    }

    pub fn div_scalar(&mut self, x: ValueId, s: f64) -> Result<ValueId, GraphError> {
        self.scalar(Binary::Div, x, s, false)
    }

    pub fn pow_scalar(&mut self, x: ValueId, s: f64) -> Result<ValueId, GraphError> {
        self.scalar(Binary::Pow, x, s, false)
    }

    pub fn compare_scalar(&mut self, op: Compare, x: ValueId, scalar: f64) -> Result<ValueId, GraphError> {
        self.op(CompareScalar { op, scalar }, &[x])
    }

    pub fn where_(&mut self, condition: ValueId, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.op(Where, &[condition, a, b])
    }

    pub fn cast(&mut self, x: ValueId, dtype: DType) -> Result<ValueId, GraphError> {
        if self.ty(x).dtype == dtype { Ok(x) } else { self.op(Cast { dtype }, &[x]) }
    }

    fn reduce(&mut self, kind: ReduceKind, x: ValueId, dims: &[usize], keepdim: bool) -> Result<ValueId, GraphError> {
        self.op(Reduce { kind, dims: dims.to_vec(), keepdim }, &[x])
    }

    pub fn sum(&mut self, x: ValueId, dims: &[usize], keepdim: bool) -> Result<ValueId, GraphError> {
        self.reduce(ReduceKind::Sum, x, dims, keepdim)
    }

    pub fn mean(&mut self, x: ValueId, dims: &[usize], keepdim: bool) -> Result<ValueId, GraphError> {
        self.reduce(ReduceKind::Mean, x, dims, keepdim)
    }

    pub fn amax(&mut self, x: ValueId, dims: &[usize], keepdim: bool) -> Result<ValueId, GraphError> {
        self.reduce(ReduceKind::Amax, x, dims, keepdim)
    }

    pub fn argmax(&mut self, x: ValueId, dim: usize) -> Result<ValueId, GraphError> {
        self.op(ArgReduce { largest: true, dim, keepdim: false }, &[x])
    }

    pub fn cumsum(&mut self, x: ValueId, dim: usize) -> Result<ValueId, GraphError> {
        self.op(CumSum { dim }, &[x])
    }

    pub fn reshape(&mut self, x: ValueId, shape: impl Into<Shape>) -> Result<ValueId, GraphError> {
        let shape = shape.into();
        if self.ty(x).shape == shape { Ok(x) } else { self.op(Reshape { shape }, &[x]) }
    }

    pub fn permute(&mut self, x: ValueId, dims: &[usize]) -> Result<ValueId, GraphError> {
        self.op(Permute { dims: dims.to_vec() }, &[x])
    }

    /// The last two dimensions swapped.
    pub fn transpose(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        let rank = self.ty(x).rank();
        let mut dims: Vec<usize> = (0..rank).collect();
        if rank >= 2 {
            dims.swap(rank - 1, rank - 2);
        }
        self.permute(x, &dims)
    }

    pub fn expand(&mut self, x: ValueId, shape: impl Into<Shape>) -> Result<ValueId, GraphError> {
        let shape = shape.into();
        if self.ty(x).shape == shape { Ok(x) } else { self.op(Expand { shape }, &[x]) }
    }

    pub fn slice(
        &mut self,
        x: ValueId,
        dim: usize,
        start: usize,
        end: usize,
        step: usize,
    ) -> Result<ValueId, GraphError> {
        if start == 0 && step == 1 && self.ty(x).shape.get(dim) == Some(&end) {
            return Ok(x);
        }
        self.op(Slice { dim, start, end, step }, &[x])
    }

    pub fn cat(&mut self, xs: &[ValueId], dim: usize) -> Result<ValueId, GraphError> {
        if let [x] = xs { Ok(*x) } else { self.op(Cat { dim }, xs) }
    }

    /// Cuts a dimension into equal parts.
    pub fn chunk(&mut self, x: ValueId, parts: usize, dim: usize) -> Result<Vec<ValueId>, GraphError> {
        let size = self.ty(x).shape.get(dim).copied().unwrap_or(0) / parts.max(1);
        self.apply(Split { dim, sizes: vec![size; parts] }, &[x])
    }

    pub fn flip(&mut self, x: ValueId, dims: &[usize]) -> Result<ValueId, GraphError> {
        self.op(Flip { dims: dims.to_vec() }, &[x])
    }

    pub fn full(&mut self, ty: TensorType, value: f64) -> Result<ValueId, GraphError> {
        self.op(Full { ty, value }, &[])
    }

    pub fn arange(&mut self, dtype: DType, start: f64, step: f64, len: usize) -> Result<ValueId, GraphError> {
        self.op(Arange { dtype, start, step, len }, &[])
    }

    pub fn gather(&mut self, x: ValueId, dim: usize, index: ValueId) -> Result<ValueId, GraphError> {
        self.op(Gather { dim }, &[x, index])
    }

    pub fn matmul(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, GraphError> {
        self.op(Matmul, &[a, b])
    }

    pub fn linear(&mut self, x: ValueId, weight: ValueId, bias: Option<ValueId>) -> Result<ValueId, GraphError> {
        let operands: Vec<ValueId> = [x, weight].into_iter().chain(bias).collect();
        self.op(Linear, &operands)
    }

    pub fn embedding(&mut self, weight: ValueId, ids: ValueId) -> Result<ValueId, GraphError> {
        self.op(Embedding { padding_idx: None }, &[weight, ids])
    }

    /// Layer normalisation over the last dimension, with weight and bias.
    pub fn layer_norm(&mut self, x: ValueId, weight: ValueId, bias: ValueId, eps: f64) -> Result<ValueId, GraphError> {
        self.op(LayerNorm { dims: 1, eps }, &[x, weight, bias])
    }

    /// `x / √(mean(x²) + eps) · weight` over the last dimension (Zhang and Sennrich, 2019).
    pub fn rms_norm(&mut self, x: ValueId, weight: ValueId, eps: f64) -> Result<ValueId, GraphError> {
        let last = self.ty(x).rank().saturating_sub(1);
        let square = self.mul(x, x)?;
        let mean = self.mean(square, &[last], true)?;
        let mean = self.add_scalar(mean, eps)?;
        let rstd = self.unary(Unary::Rsqrt, mean)?;
        let x = self.mul(x, rstd)?;
        self.mul(x, weight)
    }

    /// Group normalisation (Wu and He, 2018) of `x [N, C, ..]`, with weight and bias `[C]`.
    pub fn group_norm(
        &mut self,
        x: ValueId,
        groups: usize,
        weight: ValueId,
        bias: ValueId,
        eps: f64,
    ) -> Result<ValueId, GraphError> {
        let shape = self.ty(x).shape.clone();
        let [n, c, rest @ ..] = &shape[..] else {
            return Err(GraphError::Structure {
                graph: self.graph().name.clone(),
                reason: format!("group_norm needs at least two dimensions, got {shape:?}"),
            });
        };
        let flat = self.reshape(x, [*n, groups, (c / groups.max(1)) * rest.iter().product::<usize>()])?;
        let y = self.op(LayerNorm { dims: 1, eps }, &[flat])?;
        let y = self.reshape(y, shape.clone())?;
        let mut along = vec![1; shape.len()];
        along[1] = *c;
        let weight = self.reshape(weight, along.clone())?;
        let bias = self.reshape(bias, along)?;
        let y = self.mul(y, weight)?;
        self.add(y, bias)
    }

    pub fn softmax(&mut self, x: ValueId, dim: usize) -> Result<ValueId, GraphError> {
        self.op(Softmax { dim }, &[x])
    }

    pub fn conv2d(
        &mut self,
        x: ValueId,
        weight: ValueId,
        bias: Option<ValueId>,
        conv: Conv2d,
    ) -> Result<ValueId, GraphError> {
        let operands: Vec<ValueId> = [x, weight].into_iter().chain(bias).collect();
        self.op(conv, &operands)
    }

    /// Dropout with probability `p` and the graph's random key. Returns `x` if `p` is 0.
    pub fn dropout(&mut self, x: ValueId, p: f64) -> Result<ValueId, GraphError> {
        if p == 0.0 {
            return Ok(x);
        }
        let key = self.rng_key()?;
        let stream = self.next_stream();
        self.op(Dropout { p, stream }, &[x, key])
    }

    /// Mean cross-entropy of `logits [.., C]` and `target [..]`. Targets equal to `ignore_index` do not count.
    pub fn cross_entropy(
        &mut self,
        logits: ValueId,
        target: ValueId,
        ignore_index: i64,
    ) -> Result<ValueId, GraphError> {
        let logits = self.flatten_leading(logits)?;
        let n = self.ty(target).numel();
        let target = self.reshape(target, [n])?;
        self.op(CrossEntropy { ignore_index }, &[logits, target])
    }

    /// Merges all dimensions but the last into one.
    pub fn flatten_leading(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        let shape = &self.ty(x).shape;
        let Some((&last, lead)) = shape.split_last() else {
            return self.reshape(x, [1, 1]);
        };
        let rows = lead.iter().product();
        self.reshape(x, [rows, last])
    }

    /// Sums `x` over the dimensions in which `like` was broadcast to it. The result has the shape of `like`.
    pub fn sum_to(&mut self, x: ValueId, like: ValueId) -> Result<ValueId, GraphError> {
        let target = self.ty(like).shape.clone();
        let shape = self.ty(x).shape.clone();
        if shape == target {
            return Ok(x);
        }
        let lead = shape.len().saturating_sub(target.len());
        let dims: Vec<usize> =
            (0..shape.len()).filter(|&d| d < lead || (target[d - lead] == 1 && shape[d] != 1)).collect();
        let summed = self.sum(x, &dims, false)?;
        self.reshape(summed, target)
    }

    /// A scalar zero with the element type of `x`.
    pub fn zero_like_scalar(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        let dtype = self.ty(x).dtype;
        self.full(TensorType::new(dtype, []), 0.0)
    }
}
