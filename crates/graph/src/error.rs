use std::borrow::Cow;

use crate::{NodeId, TensorType};

/// An invalid graph, operator, configuration or tensor.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GraphError {
    /// An operator cannot take the operands given.
    #[error("{op} ({name}): {reason}; operands: {}", list(operands))]
    Operand {
        /// The operator's name in ATen.
        op: String,
        /// The node's name.
        name: String,
        /// The types of the operands.
        operands: Vec<TensorType>,
        /// The requirement that the operands fail.
        reason: String,
    },
    /// The graph's structure is invalid.
    #[error("graph {graph:?}: {reason}")]
    Structure {
        /// The graph's name.
        graph: String,
        /// The invalid part.
        reason: String,
    },
    /// A gradient reaches an operator that cannot be differentiated.
    #[error("{op} ({name}, node {node}) has no derivative, but a gradient reaches it: {reason}")]
    NotDifferentiable {
        /// The operator's name in ATen.
        op: String,
        /// The node's name.
        name: String,
        /// The node.
        node: NodeId,
        /// The reason.
        reason: String,
    },
    /// A model family's configuration is invalid.
    #[error("model configuration: {0}")]
    Config(String),
    /// A graph file cannot be read.
    #[error("graph file: {0}")]
    File(String),
    /// The data does not match the tensor's type.
    #[error("tensor: {0}")]
    Tensor(String),
}

fn list(types: &[TensorType]) -> String {
    if types.is_empty() {
        return "none".into();
    }
    types.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ")
}

/// An error that may know what its reader can do about it.
pub trait Advice: std::error::Error {
    /// The action that helps the reader, if one is known.
    fn hint(&self) -> Option<Cow<'_, str>>;

    /// The message, its causes and the hint, one below the other.
    fn report(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(e) = cause {
            text += &format!("\ncaused by: {e}");
            cause = e.source();
        }
        text + &self.hint().map(|hint| format!("\nhint: {hint}")).unwrap_or_default()
    }

    /// The message and all causes on one line, for logs and for other machines.
    fn one_line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = self.source();
        while let Some(e) = cause {
            line += &format!(": {e}");
            cause = e.source();
        }
        line
    }
}
