//! Builds graphs. Every call checks its operands and adds a value or a node.

use std::collections::{BTreeMap, HashSet};

use crate::{
    DType, Graph, GraphError, HostTensor, Init, Node, NodeId, Op, Phase, Shape, StateUpdate, TensorType, Value,
    ValueId, ValueKind,
};

/// A graph under construction.
#[derive(Debug, Clone)]
pub struct Builder {
    graph: Graph,
    scope: Vec<String>,
    names: HashSet<String>,
    /// The last number appended to each base name, so that finding a free name stays cheap.
    counts: BTreeMap<String, usize>,
    phase: Phase,
    origin: Option<NodeId>,
    rng_key: Option<ValueId>,
    /// The number of dropouts.
    dropouts: u64,
}

impl Builder {
    /// Starts an empty graph.
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

    /// Continues an existing graph.
    pub fn extend(graph: Graph) -> Self {
        let names =
            graph.values.iter().map(|v| v.name.clone()).chain(graph.nodes.iter().map(|n| n.name.clone())).collect();
        let rng_key = graph.values.iter().position(|v| v.kind == ValueKind::RngKey).map(|i| ValueId(i as u32));
        let dropouts = graph.nodes.iter().filter(|n| matches!(n.op, Op::Dropout(_))).count() as u64;
        let (scope, counts, phase) = (Vec::new(), BTreeMap::new(), Phase::Forward);
        Self { graph, scope, names, counts, phase, origin: None, rng_key, dropouts }
    }

    /// The graph so far.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Sets the phase and origin of all nodes added from now on.
    pub(crate) fn tag(&mut self, phase: Phase, origin: Option<NodeId>) {
        self.phase = phase;
        self.origin = origin;
    }

    /// Calls `f`. The names it gives get the prefix `name.`, as in PyTorch's submodules.
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

    /// Replaces the current scope: names given from now on get the prefix `path.`.
    pub fn set_scope(&mut self, path: &str) {
        self.scope = vec![path.into()];
    }

    /// `name` with the prefix of the current scope.
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
        let broken = |reason| Err(GraphError::Structure { graph: self.graph.name.clone(), reason });
        if let Err(reason) = ty.check() {
            return broken(format!("value {name:?}: {reason}"));
        }
        if !self.names.insert(name.clone()) {
            return broken(format!("two values are named {name:?}"));
        }
        self.graph.values.push(Value { name, ty, kind });
        Ok(ValueId(self.graph.values.len() as u32 - 1))
    }

    /// Adds an input, given with every micro-batch.
    pub fn input(&mut self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Result<ValueId, GraphError> {
        self.source(name, TensorType::new(dtype, shape), ValueKind::Input)
    }

    /// Adds a trained value. Its full name, with the scope, is its name in checkpoints.
    pub fn parameter(
        &mut self,
        name: &str,
        dtype: DType,
        shape: impl Into<Shape>,
        init: Init,
    ) -> Result<ValueId, GraphError> {
        self.source(name, TensorType::new(dtype, shape), ValueKind::Parameter(init))
    }

    /// Adds a source of another graph, with its name there, in the type `ty`.
    ///
    /// # Errors
    ///
    /// The name is taken, or the value is a constant whose content is missing.
    pub(crate) fn copy_source(&mut self, graph: &Graph, id: ValueId, ty: TensorType) -> Result<ValueId, GraphError> {
        let Value { name, kind, .. } = graph.value(id);
        match kind {
            ValueKind::RngKey => self.rng_key(),
            ValueKind::Constant => match graph.constants.get(name) {
                Some(tensor) => self.constant(name, tensor.clone()),
                None => Err(GraphError::File(format!("the content of constant {name:?} is missing"))),
            },
            kind => self.source(name, ty, kind.clone()),
        }
    }

    /// Adds state without a gradient; see [`Self::update_buffer`].
    pub fn buffer(
        &mut self,
        name: &str,
        dtype: DType,
        shape: impl Into<Shape>,
        init: Init,
    ) -> Result<ValueId, GraphError> {
        self.source(name, TensorType::new(dtype, shape), ValueKind::Buffer(init))
    }

    /// Adds a fixed tensor.
    pub fn constant(&mut self, name: &str, tensor: HostTensor) -> Result<ValueId, GraphError> {
        let id = self.source(name, tensor.ty().clone(), ValueKind::Constant)?;
        let name = self.graph.value(id).name.clone();
        self.graph.constants.insert(name, tensor);
        Ok(id)
    }

    /// The random key of the graph, added on first use.
    pub fn rng_key(&mut self) -> Result<ValueId, GraphError> {
        if let Some(id) = self.rng_key {
            return Ok(id);
        }
        let scope = std::mem::take(&mut self.scope);
        let id = self.source("rng_key", TensorType::new(DType::I64, []), ValueKind::RngKey);
        self.scope = scope;
        self.rng_key = id.as_ref().ok().copied();
        id
    }

    /// The number that distinguishes the next dropout from those before it; see [`Dropout`](crate::ops::Dropout).
    pub fn next_stream(&self) -> u64 {
        self.dropouts
    }

    /// Stores `value` in `buffer` after every micro-batch.
    pub fn update_buffer(&mut self, buffer: ValueId, value: ValueId) -> Result<(), GraphError> {
        self.graph.state_updates.push(StateUpdate { buffer, value });
        Ok(())
    }

    /// Names a result of the graph. Fails if the name is taken.
    pub fn output(&mut self, name: &str, value: ValueId) -> Result<(), GraphError> {
        match self.graph.outputs.insert(name.into(), value) {
            None => Ok(()),
            Some(_) => Err(GraphError::Structure {
                graph: self.graph.name.clone(),
                reason: format!("two outputs are named {name:?}"),
            }),
        }
    }

    /// Stores a fact for importers and exporters.
    pub fn metadata(&mut self, key: &str, value: serde_json::Value) {
        self.graph.metadata.insert(key.into(), value);
    }

    /// Validates and returns the graph.
    pub fn finish(self) -> Result<Graph, GraphError> {
        self.graph.validate()?;
        Ok(self.graph)
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        self.graph.ty(id)
    }

    /// Applies an operator and returns its results. Fails if the operator cannot take the operands.
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
                // The first result has the name of the node.
                let name = if i == 0 { name.clone() } else { self.free_name(format!("{name}.{i}")) };
                self.graph.values.push(Value { name, ty, kind: ValueKind::Result { node, index: i as u32 } });
                ValueId(first + i as u32)
            })
            .collect();
        self.dropouts += u64::from(matches!(op, Op::Dropout(_)));
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

    /// Applies an operator and returns its first result. Fails if the operator cannot take the operands.
    pub fn op(&mut self, op: impl Into<Op>, inputs: &[ValueId]) -> Result<ValueId, GraphError> {
        let outputs = self.apply(op, inputs)?;
        outputs.first().copied().ok_or_else(|| GraphError::Structure {
            graph: self.graph.name.clone(),
            reason: "an operator without results was applied".into(),
        })
    }
}
