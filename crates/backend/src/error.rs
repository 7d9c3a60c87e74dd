use fusionllm_graph::{GraphError, TensorType};

/// Why a backend could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// No backend of that name is built in.
    #[error("there is no backend {name:?} in this build; known: {known}")]
    Unknown {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// An operator failed.
    #[error("{op} on {backend}: {reason}; operands: {operands:?}")]
    Operator {
        /// The backend's name.
        backend: &'static str,
        /// The operator's ATen name.
        op: String,
        /// What went wrong.
        reason: String,
        /// The operands' types.
        operands: Vec<TensorType>,
    },
    /// A tensor of another backend, or of an element type this one cannot hold.
    #[error("{backend} cannot take this tensor: {reason}")]
    Tensor {
        /// The backend's name.
        backend: &'static str,
        /// Why.
        reason: String,
    },
    /// A graph given to run is not sound.
    #[error(transparent)]
    Graph(#[from] GraphError),
}
