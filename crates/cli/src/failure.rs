use fusionllm_node::NodeError;

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
        match e {
            // Before a run begins, what does not fit was given by the user.
            NodeError::Input(_)
            | NodeError::Graph(_)
            | NodeError::Plan(_)
            | NodeError::Bind(_)
            | NodeError::RunDir(_)
            | NodeError::Checkpoint(_) => Self::Input(e.to_string()),
            e => Self::Running(e.to_string()),
        }
    }
}
