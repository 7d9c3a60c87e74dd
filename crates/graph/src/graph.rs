//! The graph itself: plain data, and the checks that make a stranger's graph safe to run.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{GraphError, HostTensor, Init, Op, TensorType};

/// Index of a value in [`Graph::values`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ValueId(pub u32);

/// Index of a node in [`Graph::nodes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u32);

impl ValueId {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl NodeId {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ValueKind {
    /// Given with every micro-batch.
    Input,
    /// An `i64` scalar that stands for (seed, step, micro-batch), made by whoever runs the graph. See [`Dropout`](crate::ops::Dropout).
    RngKey,
    /// Trained.
    Parameter(Init),
    /// State that forward may change, but no gradient.
    Buffer(Init),
    /// A fixed tensor, by its name in [`Graph::constants`].
    Constant,
    /// A node's result.
    Result {
        /// The node.
        node: NodeId,
        /// Which of its results.
        index: u32,
    },
}

/// A typed edge of the DAG.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// Unique in the graph; a parameter's is its name in checkpoints.
    pub name: String,
    /// Element type and shape.
    #[serde(rename = "type")]
    pub ty: TensorType,
    /// Where it comes from.
    pub kind: ValueKind,
}

/// Which part of a training step a node belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Computes the loss.
    Forward,
    /// Carries the gradient on towards the inputs.
    InputGrad,
    /// Makes a parameter's gradient; nothing else waits for it.
    WeightGrad,
}

/// One operator applied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Unique in the graph.
    pub name: String,
    /// The operator.
    pub op: Op,
    /// Operands.
    pub inputs: Vec<ValueId>,
    /// Results.
    pub outputs: Vec<ValueId>,
    /// Its part of the step.
    pub phase: Phase,
    /// The forward node it was derived from: a backward node's, or an evaluation node's. Where that is placed, this is.
    pub origin: Option<NodeId>,
}

/// State that changes with every micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateUpdate {
    /// The buffer.
    pub buffer: ValueId,
    /// Its new content.
    pub value: ValueId,
}

/// An OP-DAG. Nodes stand in an order in which they can run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// What it is called.
    pub name: String,
    /// All values.
    pub values: Vec<Value>,
    /// All nodes.
    pub nodes: Vec<Node>,
    /// Named results, such as `loss` and `logits`.
    pub outputs: BTreeMap<String, ValueId>,
    /// Buffers that forward changes.
    pub state_updates: Vec<StateUpdate>,
    /// What importers and exporters need to know, such as the family's configuration.
    #[serde(default)]
    pub metadata: BTreeMap<String, serde_json::Value>,
    /// Contents of constants by value name; in files they stand in a safetensors file beside the graph.
    #[serde(skip)]
    pub constants: BTreeMap<String, HostTensor>,
}

/// A graph with its backward operators.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainGraph {
    /// The forward graph's values and nodes, under their ids, then the backward ones.
    pub graph: Graph,
    /// The loss of a micro-batch.
    pub loss: ValueId,
    /// Input: this micro-batch's share of the batch's loss, a scalar. The gradients are those of `loss_weight · loss`.
    pub loss_weight: ValueId,
    /// Per trained parameter that the loss depends on, in graph order.
    pub gradients: Vec<ParameterGradient>,
    /// Of each value that is a gradient of other values, or an addend of one: these, each of its shape.
    pub gradient_of: BTreeMap<ValueId, Vec<ValueId>>,
}

/// What adds up to a parameter's gradient.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterGradient {
    /// The parameter.
    pub parameter: ValueId,
    /// One part per use, in the order of the backward graph. Each is summed over micro-batches on its own before they are
    /// added, so that the sum does not depend on where the uses are placed.
    pub contributions: Vec<ValueId>,
}

/// Version of the graph file.
pub const FORMAT_VERSION: u32 = 1;

/// The file form of a graph: JSON with a version.
#[derive(Debug, Serialize, Deserialize)]
pub struct GraphFile {
    /// [`FORMAT_VERSION`].
    pub fusionllm_graph: u32,
    /// The graph.
    pub graph: Graph,
}

impl Graph {
    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// A value's type.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        &self.values[id.index()].ty
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Every node's id, in order.
    pub fn node_ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// The node that makes a value, unless it comes from outside.
    pub fn producer(&self, id: ValueId) -> Option<NodeId> {
        match self.value(id).kind {
            ValueKind::Result { node, .. } => Some(node),
            _ => None,
        }
    }

    fn of_kind(&self, f: impl Fn(&ValueKind) -> bool) -> impl Iterator<Item = ValueId> {
        (0..self.values.len() as u32).map(ValueId).filter(move |v| f(&self.value(*v).kind))
    }

    /// Inputs given with every micro-batch, in order.
    pub fn inputs(&self) -> impl Iterator<Item = ValueId> {
        self.of_kind(|k| matches!(k, ValueKind::Input))
    }

    /// Trained parameters, in order.
    pub fn parameters(&self) -> impl Iterator<Item = ValueId> {
        self.of_kind(|k| matches!(k, ValueKind::Parameter(_)))
    }

    /// Buffers, in order.
    pub fn buffers(&self) -> impl Iterator<Item = ValueId> {
        self.of_kind(|k| matches!(k, ValueKind::Buffer(_)))
    }

    /// The value of a name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.values.iter().position(|v| v.name == name).map(|i| ValueId(i as u32))
    }

    /// The nodes that `targets` depend on, themselves included, as a mask over [`Self::nodes`].
    pub fn ancestors(&self, targets: impl IntoIterator<Item = ValueId>) -> Vec<bool> {
        let mut live = vec![false; self.nodes.len()];
        for v in targets {
            if let Some(n) = self.producer(v) {
                live[n.index()] = true;
            }
        }
        for n in (0..self.nodes.len()).rev() {
            if live[n] {
                for v in &self.nodes[n].inputs {
                    if let Some(p) = self.producer(*v) {
                        live[p.index()] = true;
                    }
                }
            }
        }
        live
    }

    /// The types of some values.
    pub fn types(&self, ids: &[ValueId]) -> Vec<&TensorType> {
        ids.iter().map(|v| self.ty(*v)).collect()
    }

    /// The nodes that read each value, in order, each once.
    pub fn consumers(&self) -> Vec<Vec<NodeId>> {
        let mut users = vec![Vec::new(); self.values.len()];
        for id in self.node_ids() {
            for v in &self.node(id).inputs {
                let u: &mut Vec<NodeId> = &mut users[v.index()];
                if u.last() != Some(&id) {
                    u.push(id);
                }
            }
        }
        users
    }

    /// Checks everything that running it relies on, so that a graph from a file or a peer can be trusted afterwards: every
    /// reference, the order of nodes, and every type by the operator's own rule.
    pub fn validate(&self) -> Result<(), GraphError> {
        let fail = |reason: String| Err(GraphError::Structure { graph: self.name.clone(), reason });
        let count = self.values.len();
        let mut names = BTreeSet::new();
        for v in &self.values {
            if !names.insert(v.name.as_str()) {
                return fail(format!("two values are named {:?}", v.name));
            }
            if v.ty.checked_bytes().is_none_or(|b| b > isize::MAX as usize) {
                return fail(format!("value {:?} of type {} is larger than any memory", v.name, v.ty));
            }
            match &v.kind {
                ValueKind::RngKey if v.ty != TensorType::new(crate::DType::I64, []) => {
                    return fail(format!("random key {:?} must be an i64 scalar, is {}", v.name, v.ty));
                }
                ValueKind::Parameter(_) if !v.ty.dtype.is_float() => {
                    return fail(format!("parameter {:?} is {}, but only floats are trained", v.name, v.ty));
                }
                _ => {}
            }
        }
        let mut produced = vec![false; count];
        for (v, done) in self.values.iter().zip(&mut produced) {
            *done = !matches!(v.kind, ValueKind::Result { .. });
        }
        let mut node_names = BTreeSet::new();
        for (n, node) in self.nodes.iter().enumerate() {
            let at = || format!("node #{n} {:?} ({})", node.name, node.op.name());
            if !node_names.insert(node.name.as_str()) {
                return fail(format!("{} bears the name of an earlier node", at()));
            }
            for v in &node.inputs {
                match produced.get(v.index()) {
                    None => return fail(format!("{} reads {v}, which is not there", at())),
                    Some(false) => {
                        return fail(format!(
                            "{} reads {v} before it is made: the graph has a cycle or is out of order",
                            at()
                        ));
                    }
                    Some(true) => {}
                }
            }
            let types = self.types(&node.inputs);
            let outputs = node.op.infer(&types).map_err(|reason| GraphError::Operand {
                op: node.op.name().into(),
                name: node.name.clone(),
                operands: types.iter().map(|t| (*t).clone()).collect(),
                reason,
            })?;
            if outputs.len() != node.outputs.len() {
                return fail(format!(
                    "{} has {} results, but {} are declared",
                    at(),
                    outputs.len(),
                    node.outputs.len()
                ));
            }
            for (i, (v, ty)) in node.outputs.iter().zip(&outputs).enumerate() {
                let here = ValueKind::Result { node: NodeId(n as u32), index: i as u32 };
                match self.values.get(v.index()) {
                    Some(value) if value.kind == here && value.ty == *ty => produced[v.index()] = true,
                    Some(value) if value.kind == here => {
                        return fail(format!("{}: result {i} is {ty}, but {} is declared", at(), value.ty));
                    }
                    _ => return fail(format!("{}: result {i} is {v}, which does not name it as its producer", at())),
                }
            }
            // An evaluation graph's nodes stem from those of another graph.
            let forward = |o: NodeId| self.nodes[..n].get(o.index()).is_some_and(|f| f.phase == Phase::Forward);
            if node.phase != Phase::Forward && !node.origin.is_some_and(forward) {
                return fail(format!("{} is a backward node, but stems from no earlier forward node", at()));
            }
        }
        if let Some(v) = produced.iter().position(|p| !p) {
            return fail(format!("no node makes {:?}", self.values[v].name));
        }
        for (name, v) in &self.outputs {
            if v.index() >= count {
                return fail(format!("output {name:?} is {v}, which is not there"));
            }
        }
        let mut updated = BTreeSet::new();
        for u in &self.state_updates {
            if u.buffer.index() >= count || u.value.index() >= count {
                return fail("a state update names a value that is not there".into());
            }
            if !matches!(self.value(u.buffer).kind, ValueKind::Buffer(_)) {
                return fail(format!("{:?} is updated, but is no buffer", self.value(u.buffer).name));
            }
            if !updated.insert(u.buffer) {
                return fail(format!("buffer {:?} is updated twice", self.value(u.buffer).name));
            }
            if self.ty(u.buffer) != self.ty(u.value) {
                return fail(format!(
                    "buffer {:?} is {}, its update {}",
                    self.value(u.buffer).name,
                    self.ty(u.buffer),
                    self.ty(u.value)
                ));
            }
        }
        for (name, tensor) in &self.constants {
            match self.find(name).map(|v| self.value(v)) {
                Some(v) if v.kind == ValueKind::Constant && v.ty == *tensor.ty() => {}
                _ => return fail(format!("constant {name:?} does not fit the value of that name")),
            }
        }
        Ok(())
    }

    /// The versioned JSON form.
    pub fn to_json(&self) -> Result<String, GraphError> {
        let file = GraphFile { fusionllm_graph: FORMAT_VERSION, graph: self.clone() };
        serde_json::to_string_pretty(&file).map_err(|e| GraphError::File(e.to_string()))
    }

    /// Reads the versioned JSON form and validates it. Constants are to be filled in from the file beside it.
    pub fn from_json(text: &str) -> Result<Self, GraphError> {
        #[derive(Deserialize)]
        struct Version {
            fusionllm_graph: u32,
        }
        let version: Version =
            serde_json::from_str(text).map_err(|e| GraphError::File(format!("not a FusionLLM graph: {e}")))?;
        if version.fusionllm_graph != FORMAT_VERSION {
            return Err(GraphError::File(format!(
                "it has version {}, this program reads version {FORMAT_VERSION}",
                version.fusionllm_graph
            )));
        }
        let file: GraphFile = serde_json::from_str(text).map_err(|e| GraphError::File(e.to_string()))?;
        file.graph.validate()?;
        Ok(file.graph)
    }

    /// A digest (32 hexadecimal digits) of all that decides what the graph computes; checkpoints and plans name it.
    pub fn digest(&self) -> String {
        let mut h = blake3::Hasher::new();
        let add = |h: &mut blake3::Hasher, text: &str| {
            h.update(&(text.len() as u64).to_le_bytes());
            h.update(text.as_bytes());
        };
        for v in &self.values {
            add(&mut h, &v.name);
            add(&mut h, &v.ty.to_string());
            add(&mut h, &format!("{:?}", v.kind));
        }
        for n in &self.nodes {
            add(&mut h, &format!("{:?}{:?}{:?}", n.op, n.inputs, n.outputs));
        }
        add(&mut h, &format!("{:?}{:?}", self.outputs, self.state_updates));
        for (name, t) in &self.constants {
            add(&mut h, name);
            h.update(t.bytes());
        }
        h.finalize().to_hex()[..32].to_string()
    }
}
