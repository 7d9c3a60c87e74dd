use fusionllm_node::NodeError;
use fusionllm_node::checkpoint::CheckpointError;
use fusionllm_node::run_dir::RunDirError;

/// Why a command ended early, with its exit status.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Bad usage or bad input: 2.
    Input(String),
    /// Something went wrong while running: 1.
    Running(String),
    /// Whoever read standard output has read enough, as in `| head`: 0.
    Closed,
}

impl Failure {
    pub(crate) fn status(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Running(_) => 1,
            Self::Closed => 0,
        }
    }

    /// What to tell the user.
    pub(crate) fn message(&self) -> Option<&str> {
        match self {
            Self::Input(message) | Self::Running(message) => Some(message),
            Self::Closed => None,
        }
    }
}

impl From<NodeError> for Failure {
    fn from(e: NodeError) -> Self {
        let message = e.to_string();
        match e {
            // Before a run begins, what does not fit was given by the user.
            NodeError::Input(_) | NodeError::Graph(_) | NodeError::Plan(_) | NodeError::Bind(_) => Self::Input(message),
            NodeError::RunDir(RunDirError::Disk(_))
            | NodeError::Checkpoint(CheckpointError::Disk(_) | CheckpointError::Unexpected { .. }) => {
                Self::Running(message)
            }
            NodeError::RunDir(_) | NodeError::Checkpoint(_) => Self::Input(message),
            _ => Self::Running(message),
        }
    }
}
