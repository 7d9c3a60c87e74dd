use fusionllm_graph::{GraphError, TensorType};

/// Why a backend failed.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// This build has no backend of that name.
    #[error("there is no backend {name:?} in this build; known: {known}")]
    Unknown {
        /// The name asked for.
        name: String,
        /// The names of all backends in this build.
        known: String,
    },
    /// An operator failed.
    #[error("{op} on {backend}: {reason}; operands: {operands:?}")]
    Operator {
        /// The backend's name.
        backend: &'static str,
        /// The operator's ATen name.
        op: String,
        /// The cause.
        reason: String,
        /// The operands' types.
        operands: Vec<TensorType>,
    },
    /// A tensor of another backend, or of an element type that the backend lacks.
    #[error("{backend} cannot take this tensor: {reason}")]
    Tensor {
        /// The backend's name.
        backend: &'static str,
        /// The cause.
        reason: String,
    },
    /// A graph is invalid.
    #[error(transparent)]
    Graph(#[from] GraphError),
}
