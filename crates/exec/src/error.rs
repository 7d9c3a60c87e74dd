use fusionllm_backend::BackendError;
use fusionllm_graph::GraphError;
use fusionllm_plan::PlanError;

/// Why a Program could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// A kernel failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A tensor or operator does not fit.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// The program is not sound.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// What the program needs was never given.
    #[error("{0}")]
    State(String),
    /// The world outside is gone.
    #[error("{0}")]
    Communication(String),
}
