//! Writes graphs: every call checks its operands and adds nodes.

use std::collections::{BTreeMap, HashSet};

use crate::ops::{
    Arange, ArgReduce, Binary, BinaryScalar, Cast, Cat, Compare, CompareScalar, Conv2d, CrossEntropy, CumSum, Dropout,
    Embedding, Expand, Flip, Full, Gather, LayerNorm, Linear, Matmul, Permute, Reduce, ReduceKind, Reshape, Slice,
    Softmax, Split, Unary, Where,
};
use crate::{
    DType, Graph, GraphError, HostTensor, Init, Node, NodeId, Op, Phase, Shape, StateUpdate, TensorType, Value,
    ValueId, ValueKind,
};

/// A graph being written.
#[derive(Debug, Clone)]
pub struct Builder {
    graph: Graph,
    scope: Vec<String>,
    names: HashSet<String>,
    /// How often each base name was used, so that finding a free one stays cheap.
    counts: BTreeMap<String, usize>,
    phase: Phase,
    origin: Option<NodeId>,
}

impl Builder {
    /// An empty graph of this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self::extend(Graph {
            name: name.into(),
            values: Vec::new(),
            nodes: Vec::new(),
            outputs: BTreeMap::new(),
            state_updates: Vec::new(),
            metadata: BTreeMap::new(),
            constants: BTreeMap::new(),
        })
    }

    /// Goes on writing a graph.
    pub fn extend(graph: Graph) -> Self {
        let names =
            graph.values.iter().map(|v| v.name.clone()).chain(graph.nodes.iter().map(|n| n.name.clone())).collect();
        Self { graph, scope: Vec::new(), names, counts: BTreeMap::new(), phase: Phase::Forward, origin: None }
    }

    /// The graph so far.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Nodes from now on carry these tags.
    pub(crate) fn tag(&mut self, phase: Phase, origin: Option<NodeId>) {
        self.phase = phase;
        self.origin = origin;
    }

    /// Runs `f` with `name` in front of the names it gives, as PyTorch names submodules.
    pub fn scope<T>(
        &mut self,
        name: impl Into<String>,
        f: impl FnOnce(&mut Self) -> Result<T, GraphError>,
    ) -> Result<T, GraphError> {
        self.scope.push(name.into());
        let out = f(self);
        self.scope.pop();
        out
    }

    /// Names given from now on stand behind `path`, whatever the scope was.
    pub fn set_scope(&mut self, path: &str) {
        self.scope = vec![path.into()];
    }

    /// `name` behind the present scope.
    pub fn path(&self, name: &str) -> String {
        let mut parts: Vec<&str> = self.scope.iter().map(String::as_str).filter(|s| !s.is_empty()).collect();
        if !name.is_empty() {
            parts.push(name);
        }
        parts.join(".")
    }

    fn free_name(&mut self, base: String) -> String {
        if self.names.insert(base.clone()) {
            return base;
        }
        let mut n = self.counts.get(&base).copied().unwrap_or(1);
        loop {
            n += 1;
            let name = format!("{base}_{n}");
            if self.names.insert(name.clone()) {
                self.counts.insert(base, n);
                return name;
            }
        }
    }

    fn source(&mut self, name: &str, ty: TensorType, kind: ValueKind) -> Result<ValueId, GraphError> {
        let name = self.path(name);
        if !self.names.insert(name.clone()) {
            return Err(GraphError::Structure {
                graph: self.graph.name.clone(),
                reason: format!("the name {name:?} is given twice"),
            });
        }
        self.graph.values.push(Value { name, ty, kind });
        Ok(ValueId(self.graph.values.len() as u32 - 1))
    }

    /// A value given with every micro-batch.
    pub fn input(&mut self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Result<ValueId, GraphError> {
        self.source(name, TensorType::new(dtype, shape), ValueKind::Input)
    }

    /// A trained value; its name is the present scope's path.
    pub fn parameter(
        &mut self,
        name: &str,
        dtype: DType,
        shape: impl Into<Shape>,
        init: Init,
    ) -> Result<ValueId, GraphError> {
        self.source(name, TensorType::new(dtype, shape), ValueKind::Parameter(init))
    }

    /// State without a gradient; see [`Self::update_buffer`].
    pub fn buffer(
        &mut self,
        name: &str,
        dtype: DType,
        shape: impl Into<Shape>,
        init: Init,
    ) -> Result<ValueId, GraphError> {
        self.source(name, TensorType::new(dtype, shape), ValueKind::Buffer(init))
    }

    /// A fixed tensor.
    pub fn constant(&mut self, name: &str, tensor: HostTensor) -> Result<ValueId, GraphError> {
        let id = self.source(name, tensor.ty().clone(), ValueKind::Constant)?;
        let name = self.graph.value(id).name.clone();
        self.graph.constants.insert(name, tensor);
        Ok(id)
    }

    /// The graph's random key, made on first use.
    pub fn rng_key(&mut self) -> Result<ValueId, GraphError> {
        match self.graph.values.iter().position(|v| v.kind == ValueKind::RngKey) {
            Some(i) => Ok(ValueId(i as u32)),
            None => {
                let scope = std::mem::take(&mut self.scope);
                let id = self.source("rng_key", TensorType::new(DType::I64, []), ValueKind::RngKey);
                self.scope = scope;
                id
            }
        }
    }

    /// Forward leaves `value` in `buffer` after every micro-batch.
    pub fn update_buffer(&mut self, buffer: ValueId, value: ValueId) -> Result<(), GraphError> {
        self.graph.state_updates.push(StateUpdate { buffer, value });
        Ok(())
    }

    /// Names a result.
    pub fn output(&mut self, name: &str, value: ValueId) -> Result<(), GraphError> {
        match self.graph.outputs.insert(name.into(), value) {
            None => Ok(()),
            Some(_) => Err(GraphError::Structure {
                graph: self.graph.name.clone(),
                reason: format!("the output {name:?} is named twice"),
            }),
        }
    }

    /// Facts for importers and exporters.
    pub fn metadata(&mut self, key: &str, value: serde_json::Value) {
        self.graph.metadata.insert(key.into(), value);
    }

    /// The graph, validated.
    pub fn finish(self) -> Result<Graph, GraphError> {
        self.graph.validate()?;
        Ok(self.graph)
    }

    /// A value's type.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        self.graph.ty(id)
    }

    /// Applies an operator and returns its results.
    pub fn apply(&mut self, op: impl Into<Op>, inputs: &[ValueId]) -> Result<Vec<ValueId>, GraphError> {
        let op = op.into();
        let types = self.graph.types(inputs);
        let name = op.name().trim_start_matches('_');
        let base = self.path(name.split('.').next().unwrap_or(name));
        let outputs = op.infer(&types).map_err(|reason| GraphError::Operand {
            op: op.name().into(),
            name: base.clone(),
            operands: types.iter().map(|t| (*t).clone()).collect(),
            reason,
        })?;
        let name = self.free_name(base);
        let node = NodeId(self.graph.nodes.len() as u32);
        let first = self.graph.values.len() as u32;
        let outputs: Vec<ValueId> = outputs
            .into_iter()
            .enumerate()
            .map(|(i, ty)| {
                // A single result bears its node's name.
                let name = if i == 0 { name.clone() } else { self.free_name(format!("{name}.{i}")) };
                self.graph.values.push(Value { name, ty, kind: ValueKind::Result { node, index: i as u32 } });
                ValueId(first + i as u32)
            })
            .collect();
        self.graph.nodes.push(Node {
            name,
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            phase: self.phase,
            origin: self.origin,
        });
        Ok(outputs)
    }

    /// Applies an operator and returns its first result.
    pub fn op(&mut self, op: impl Into<Op>, inputs: &[ValueId]) -> Result<ValueId, GraphError> {
        let outputs = self.apply(op, inputs)?;
        outputs.first().copied().ok_or_else(|| GraphError::Structure {
            graph: self.graph.name.clone(),
            reason: "an operator without results was applied".into(),
        })
    }
}

/// Operators by name. Shapes follow ATen's; see [`crate::ops`] for each.
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

    /// Equal parts of a dimension.
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

    /// Over the last dimension, with weight and bias.
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

    /// `x [N, C, ..]`, each of `groups` groups of channels normalised on its own (Wu and He, 2018); weight and bias `[C]`.
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
                graph: self.graph.name.clone(),
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

    /// Dropout with the graph's random key; the identity for `p` 0.
    pub fn dropout(&mut self, x: ValueId, p: f64) -> Result<ValueId, GraphError> {
        if p == 0.0 {
            return Ok(x);
        }
        let key = self.rng_key()?;
        let stream = self.graph.nodes.iter().filter(|n| matches!(n.op, Op::Dropout(_))).count() as u64;
        self.op(Dropout { p, stream }, &[x, key])
    }

    /// Mean cross-entropy of `logits [.., C]` against `target [..]`, whose leading dimensions are flattened.
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

    /// All dimensions but the last as one.
    pub fn flatten_leading(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        let shape = &self.ty(x).shape;
        let Some((&last, lead)) = shape.split_last() else {
            return self.reshape(x, [1, 1]);
        };
        let rows = lead.iter().product();
        self.reshape(x, [rows, last])
    }

    /// Sums `x` over the dimensions in which `like` was broadcast, so that it gets `like`'s shape.
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

    /// A zero scalar of a value's type.
    pub fn zero_like_scalar(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        let dtype = self.ty(x).dtype;
        self.full(TensorType::new(dtype, []), 0.0)
    }

    /// NaN replaced by 0.
    pub(crate) fn nan_to_zero(&mut self, x: ValueId) -> Result<ValueId, GraphError> {
        let number = self.op(Compare::Eq, &[x, x])?;
        let zero = self.zero_like_scalar(x)?;
        self.where_(number, x, zero)
    }

    /// The share of gradient `g` that `a` gets of a maximum (or minimum) of `a` and `b`: all where it wins, half of a tie.
    pub(crate) fn extremum_grad(
        &mut self,
        g: ValueId,
        a: ValueId,
        b: ValueId,
        max: bool,
    ) -> Result<ValueId, GraphError> {
        let wins = self.op(if max { Compare::Gt } else { Compare::Lt }, &[a, b])?;
        let ties = self.op(Compare::Eq, &[a, b])?;
        let half = self.mul_scalar(g, 0.5)?;
        let zero = self.zero_like_scalar(g)?;
        let rest = self.where_(ties, half, zero)?;
        self.where_(wins, g, rest)
    }
}
