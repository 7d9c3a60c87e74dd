use fusionllm_graph::{GraphError, TensorType};

/// The reason why a backend failed.
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
    #[error("{op} on {backend}: {reason}; operands: {}", list(operands))]
    Operator {
        /// The backend's name.
        backend: String,
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
        backend: String,
        /// The cause.
        reason: String,
    },
    /// There is no such device, or it does not work.
    #[error("{backend} has no device: {reason}")]
    Device {
        /// The backend's name.
        backend: String,
        /// The cause.
        reason: String,
    },
    /// A value that is read was not given.
    #[error("no tensor was given for {name:?}")]
    Missing {
        /// The value's name.
        name: String,
    },
    /// The caller stopped a segment.
    #[error("the segment was stopped")]
    Stopped,
    /// A process that computes for this one did not carry out a request.
    #[error("worker {command:?}: {reason}")]
    Worker {
        /// The command that started it.
        command: String,
        /// The failure, with the last lines that the process wrote to its standard error.
        reason: String,
    },
    /// A graph is invalid.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

fn list(types: &[TensorType]) -> String {
    types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use fusionllm_graph::DType;

    use super::*;

    /// Regression: a label out of range printed `TensorType { dtype: F32, shape: [2, 10] }`.
    #[test]
    fn operands_read_as_types() {
        let operands = vec![TensorType::new(DType::F32, [2, 10]), TensorType::new(DType::I64, [2])];
        let (backend, op, reason) = ("cpu".into(), "cross_entropy_loss".into(), "index 12 is out of range".into());
        let error = BackendError::Operator { backend, op, reason, operands };
        let text = "cross_entropy_loss on cpu: index 12 is out of range; operands: f32[2, 10], i64[2]";
        assert_eq!(error.to_string(), text);
    }
}
