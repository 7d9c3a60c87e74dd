//! The target of the translation: a graph under construction, with constant folding and with PyTorch's shared memory.

mod constants;
mod operators;
mod storage;

use std::collections::HashMap;

use fusionllm_graph::{Builder, DType, HostTensor, Op, TensorType, ValueId, ValueKind};
use storage::{Storage, Tensor};

use crate::error::TranslationError;
pub(crate) use storage::{Step, TensorId};

pub(crate) type Result<T> = std::result::Result<T, TranslationError>;

/// Runs one operator on tensors in memory, like a backend. The third argument has the types of the results.
pub type Evaluate<'a> = &'a dyn Fn(&Op, Vec<HostTensor>, &[TensorType]) -> std::result::Result<Vec<HostTensor>, String>;

/// The largest tensor computed at import. A small file from a stranger can describe huge constants.
pub(crate) const MAX_CONSTANT_BYTES: usize = 64 << 20;
/// The longest list of positions that one operator may need.
pub(crate) const MAX_POSITIONS: usize = 1 << 24;
/// The total size of all tensors computed at import.
const MAX_TOTAL_CONSTANT_BYTES: usize = 512 << 20;
/// The total work at import, in bytes or floating-point operations. It counts repetitions of the same constant too, so
/// a small file cannot keep the import busy.
const MAX_WORK: u64 = 8 << 30;
/// The least work of one operator. Without it, operators on empty tensors would cost nothing.
const MIN_WORK: f64 = 256.0;
/// The most nodes of the graph for each node of the file, and the nodes that every file may have beyond that. Most
/// operators become a few nodes. But a write through a view rebuilds all tensors below the view.
const NODES_PER_NODE: usize = 64;
const SPARE_NODES: usize = 1 << 16;

/// A value: computed by the graph, or a constant of known content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value {
    /// A value of the graph.
    Node(ValueId),
    /// The index of a constant.
    Constant(usize),
}

/// The state of a translation.
pub(crate) struct Context<'a> {
    pub(crate) builder: Builder,
    evaluate: Evaluate<'a>,
    constants: Vec<Constant>,
    /// Constants by the hash of their content, so that equal ones are stored once.
    constants_by_hash: HashMap<u64, Vec<usize>>,
    /// Bytes of the constants computed here, each content once.
    constant_bytes: usize,
    /// The work at import so far; see [`MAX_WORK`].
    work: u64,
    /// The most nodes that the graph may have.
    max_nodes: usize,
    tensors: Vec<Tensor>,
    storages: Vec<Storage>,
    /// Whether the operators that come next compute gradients. They do not in `torch.no_grad`.
    pub(crate) gradients: bool,
    /// By value of the graph, whether a gradient may flow through it to a parameter.
    carriers: Vec<bool>,
    /// The element type that replaces single precision.
    pub(crate) single: DType,
    /// The version of PyTorch that wrote the archive; the newest if it is unknown. Some gradients differ between
    /// versions.
    pub(crate) torch: (u32, u32),
    /// Whether sizes of the batch are free, so that a number of the graph may be one of them.
    pub(crate) has_dynamic_sizes: bool,
}

struct Constant {
    tensor: HostTensor,
    /// The value in the graph, once a node reads it.
    value: Option<ValueId>,
}

impl<'a> Context<'a> {
    /// A translation of `nodes` exported nodes.
    pub(crate) fn new(name: &str, single: DType, nodes: usize, evaluate: Evaluate<'a>) -> Self {
        Self {
            builder: Builder::new(name),
            evaluate,
            constants: Vec::new(),
            constants_by_hash: HashMap::new(),
            constant_bytes: 0,
            work: 0,
            max_nodes: nodes.saturating_mul(NODES_PER_NODE).saturating_add(SPARE_NODES),
            tensors: Vec::new(),
            storages: Vec::new(),
            gradients: true,
            carriers: Vec::new(),
            single,
            torch: (u32::MAX, 0),
            has_dynamic_sizes: false,
        }
    }

    pub(crate) fn element_type(&self, code: i64) -> Result<DType> {
        match crate::archive::element_type(code)? {
            DType::F32 => Ok(self.single),
            dtype => Ok(dtype),
        }
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
            if let Some(work) = self.affordable(&op, &types, &outputs) {
                self.work += work;
                let operands = inputs.iter().filter_map(|v| self.constant_tensor(*v).cloned()).collect();
                let results = (self.evaluate)(&op, operands, &outputs)?;
                return results.into_iter().map(|t| self.constant(t)).collect();
            }
        }
        if self.builder.graph().nodes.len() >= self.max_nodes {
            return Err(
                format!("the graph would have more than {} operators, too many for this file", self.max_nodes).into()
            );
        }
        let operands = inputs.iter().map(|v| self.materialize(*v)).collect::<Result<Vec<_>>>()?;
        Ok(self.builder.apply(op, &operands)?.into_iter().map(Value::Node).collect())
    }

    /// The work of an operator on constants; `None` if it is too much to do at import.
    fn affordable(&self, op: &Op, inputs: &[&TensorType], outputs: &[TensorType]) -> Option<u64> {
        let bytes = outputs.iter().map(TensorType::bytes).fold(0, usize::saturating_add);
        let cost = op.cost(inputs, &outputs.iter().collect::<Vec<_>>());
        let work = cost.flops.max(cost.bytes).max(MIN_WORK) as u64;
        let total = self.work.saturating_add(work).saturating_add(bytes as u64);
        let small =
            bytes <= MAX_CONSTANT_BYTES && self.constant_bytes.saturating_add(bytes) <= MAX_TOTAL_CONSTANT_BYTES;
        (small && total <= MAX_WORK).then_some(work)
    }

    /// Counts work that the size of the file does not bound. Fails if there is too much.
    pub(crate) fn spend(&mut self, bytes: usize) -> Result<()> {
        self.work = self.work.saturating_add(bytes as u64);
        if self.work > MAX_WORK {
            return Err("the constants that its operators need take too much work to compute at import".into());
        }
        Ok(())
    }

    /// [`Self::apply`], for the first result.
    pub(crate) fn op(&mut self, op: impl Into<Op>, inputs: &[Value]) -> Result<Value> {
        self.apply(op, inputs)?.first().copied().ok_or_else(|| "the operator has no result".into())
    }

    /// Whether a gradient may flow through a value to a parameter.
    pub(crate) fn carries_gradient(&mut self, value: Value) -> bool {
        let Value::Node(id) = value else { return false };
        let graph = self.builder.graph();
        // Operands come before results.
        for value in graph.values.iter().take(id.index() + 1).skip(self.carriers.len()) {
            let carries = match &value.kind {
                ValueKind::Parameter(_) => true,
                ValueKind::Result { node, .. } if value.ty.dtype.is_float() => {
                    let node = graph.node(*node);
                    !matches!(node.op, Op::Detach(_)) && node.inputs.iter().any(|v| self.carriers[v.index()])
                }
                _ => false,
            };
            self.carriers.push(carries);
        }
        self.carriers[id.index()]
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
}
