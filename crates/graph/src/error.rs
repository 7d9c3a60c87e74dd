use crate::{NodeId, TensorType};

/// What is wrong with a graph, naming the operator and the operands at fault.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GraphError {
    /// An operator was given operands it cannot take.
    #[error("{op} ({name}): {reason}; operands: {}", list(operands))]
    Operand {
        /// The operator's ATen name.
        op: String,
        /// The node's name in the graph.
        name: String,
        /// The types of the operands given.
        operands: Vec<TensorType>,
        /// What the operator asks for.
        reason: String,
    },
    /// The graph's structure is broken.
    #[error("graph {graph:?}: {reason}")]
    Structure {
        /// The graph's name.
        graph: String,
        /// What is wrong and where.
        reason: String,
    },
    /// A gradient was asked of an operator that has none.
    #[error("{op} ({name}, node {node}) has no derivative, but a gradient reaches it: {reason}")]
    NotDifferentiable {
        /// The operator's ATen name.
        op: String,
        /// The node's name.
        name: String,
        /// The node.
        node: NodeId,
        /// Why not.
        reason: String,
    },
    /// A configuration does not describe a model.
    #[error("model configuration: {0}")]
    Config(String),
    /// A graph file cannot be read.
    #[error("graph file: {0}")]
    File(String),
    /// Bytes do not fit the tensor they are said to be.
    #[error("tensor: {0}")]
    Tensor(String),
}

fn list(types: &[TensorType]) -> String {
    if types.is_empty() {
        return "none".into();
    }
    types.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ")
}
