use fusionllm_backend::BackendError;
use fusionllm_exec::ExecError;
use fusionllm_graph::GraphError;
use fusionllm_plan::{PeerId, PlanError};
use fusionllm_transport::{BindError, DisconnectReason, ReceiveError, SendError};

use crate::DiskError;
use crate::checkpoint::CheckpointError;
use crate::run_dir::RunDirError;
use crate::weights::WeightsError;

/// Why a run, or a peer's part in it, ended.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// What the user gave cannot be used.
    #[error("{0}")]
    Input(String),
    /// The broker does not let this peer take part.
    #[error("the broker refused this peer: {0}")]
    Refused(String),
    /// The run was called off.
    #[error("stopped: {0}")]
    Stopped(String),
    /// A peer is gone.
    #[error("lost peer {name:?}: {reason}")]
    LostPeer {
        /// Which.
        peer: PeerId,
        /// Its name.
        name: String,
        /// Why.
        reason: String,
    },
    /// A connection is gone.
    #[error("{0}")]
    Lost(DisconnectReason),
    /// A connection could not be made.
    #[error("{0}")]
    Network(String),
    /// Somebody broke the protocol.
    #[error("protocol: {0}")]
    Protocol(String),
    /// Something on this machine failed.
    #[error("{0}")]
    State(String),
    /// A checkpoint, or another file of the run, could not be written or read.
    #[error("{0}")]
    Disk(String),
    /// A peer failed, or all steps did.
    #[error("{0}")]
    Run(String),
    /// A file of the run could not be written.
    #[error(transparent)]
    File(#[from] DiskError),
    /// A directory cannot be the run's.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An endpoint could not be opened.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A graph or tensor is not sound.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A plan or program is not sound.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A kernel failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A program could not be carried out.
    #[error(transparent)]
    Exec(#[from] ExecError),
}

impl From<WeightsError> for NodeError {
    fn from(e: WeightsError) -> Self {
        match e {
            WeightsError::Disk(e) => Self::File(e),
            e => Self::Input(e.to_string()),
        }
    }
}

impl From<SendError> for NodeError {
    fn from(e: SendError) -> Self {
        match e {
            SendError::Disconnected(gone) => Self::Lost(gone.reason),
            e => Self::Protocol(e.to_string()),
        }
    }
}

impl From<ReceiveError> for NodeError {
    fn from(e: ReceiveError) -> Self {
        match e {
            ReceiveError::Disconnected(gone) => Self::Lost(gone.reason),
            e => Self::Protocol(e.to_string()),
        }
    }
}
