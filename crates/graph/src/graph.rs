//! The graph: values and nodes as plain data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{HostTensor, Init, NodeId, Op, TensorType, ValueId};

/// The source of a value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ValueKind {
    /// An input, given with every micro-batch.
    Input,
    /// An `i64` scalar that identifies seed, step and micro-batch. The executor computes it; see
    /// [`Dropout`](crate::ops::Dropout).
    RngKey,
    /// A trained value.
    Parameter(Init),
    /// A parameter that is not trained. Nothing changes it, so it has no gradient, and checkpoints do not have it.
    Frozen(Init),
    /// State that the forward pass may update. It has no gradient.
    Buffer(Init),
    /// A fixed tensor, stored in [`Graph::constants`] under the value's name.
    Constant,
    /// The result of a node.
    Result {
        /// The node.
        node: NodeId,
        /// The place of the value among the node's results.
        index: u32,
    },
}

impl ValueKind {
    /// How the content is drawn when no weights are loaded. `None` for values that are no state of the model.
    pub fn init(&self) -> Option<&Init> {
        match self {
            Self::Parameter(init) | Self::Frozen(init) | Self::Buffer(init) => Some(init),
            Self::Input | Self::RngKey | Self::Constant | Self::Result { .. } => None,
        }
    }
}

/// A tensor in the graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// The value's name, which is unique in the graph. Checkpoints name parameters by it.
    pub name: String,
    /// Element type and shape.
    #[serde(rename = "type")]
    pub ty: TensorType,
    /// The source of the value.
    pub kind: ValueKind,
}

/// The part of a training step that a node belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Computes the loss.
    Forward,
    /// Backward: the node carries the gradient on towards the inputs.
    InputGrad,
    /// Backward: the node computes the gradient of a parameter. No other backward node waits for it.
    WeightGrad,
}

/// One application of an operator.
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
    /// The part of the training step that the node belongs to.
    pub phase: Phase,
    /// For nodes of backward and of evaluation graphs: the forward node they derive from. Both run on the same peer.
    pub origin: Option<NodeId>,
}

/// The update of a buffer after every micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateUpdate {
    /// The buffer.
    pub buffer: ValueId,
    /// The value that replaces its content.
    pub value: ValueId,
}

/// A graph of operators. Nodes are listed in an order in which they can run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// Name of the model.
    pub name: String,
    /// All values.
    pub values: Vec<Value>,
    /// All nodes.
    pub nodes: Vec<Node>,
    /// Results by name, such as `loss` and `logits`.
    pub outputs: BTreeMap<String, ValueId>,
    /// Buffers that the forward pass updates.
    pub state_updates: Vec<StateUpdate>,
    /// Facts for importers and exporters, such as the configuration of a model family.
    #[serde(default)]
    pub metadata: BTreeMap<String, serde_json::Value>,
    /// Constants by value name. Stored as a safetensors file beside the graph file.
    #[serde(skip)]
    pub constants: BTreeMap<String, HostTensor>,
}

/// A graph with its backward operators, as [`differentiate`](crate::autodiff::differentiate) returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainGraph {
    /// The values and nodes of the forward graph, with the same ids, then those of the backward pass.
    pub graph: Graph,
    /// The loss of a micro-batch.
    pub loss: ValueId,
    /// A scalar input: the share of this micro-batch in the loss of the batch. Gradients are those of
    /// `loss_weight · loss`.
    pub loss_weight: ValueId,
    /// One entry per parameter that the loss depends on, in graph order.
    pub gradients: Vec<ParameterGradient>,
    /// For each value that is a gradient, or a term of one: the values it is the gradient of. All have its shape.
    pub gradient_of: BTreeMap<ValueId, Vec<ValueId>>,
}

/// The gradient of a parameter, as a list of terms.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterGradient {
    /// The parameter.
    pub parameter: ValueId,
    /// One term per use of the parameter, in the order of the backward graph. Each term is summed over the
    /// micro-batches on its own, and then the terms are added. So the sum does not depend on where the uses run.
    pub contributions: Vec<ValueId>,
}

impl Graph {
    /// The value of this id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        &self.values[id.index()].ty
    }

    /// The node of this id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// The ids of all nodes, in order.
    pub fn node_ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// The node that computes a value; `None` if the value comes from outside.
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

    /// Parameters that are not trained, in order.
    pub fn frozen(&self) -> impl Iterator<Item = ValueId> {
        self.of_kind(|k| matches!(k, ValueKind::Frozen(_)))
    }

    /// Buffers, in order.
    pub fn buffers(&self) -> impl Iterator<Item = ValueId> {
        self.of_kind(|k| matches!(k, ValueKind::Buffer(_)))
    }

    /// The value with this name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.values.iter().position(|v| v.name == name).map(|i| ValueId(i as u32))
    }

    /// A mask over [`Self::nodes`]: the nodes that compute `targets`, and all nodes that those depend on.
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

    /// The types of several values.
    pub fn types(&self, ids: &[ValueId]) -> Vec<&TensorType> {
        ids.iter().map(|v| self.ty(*v)).collect()
    }

    /// For each value, the nodes that read it, in order and without repetition.
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
}
