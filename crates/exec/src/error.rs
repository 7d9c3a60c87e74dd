use fusionllm_backend::BackendError;
use fusionllm_graph::GraphError;
use fusionllm_program::ProgramError;

/// A Program could not be run.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// A kernel failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A tensor or an operator does not fit.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// The program is invalid.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// Something that the program needs is missing.
    #[error("{0}")]
    State(String),
    /// A message could not be sent, received, encoded or decoded.
    #[error("{0}")]
    Communication(String),
}
