use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;

use fusionllm_backend::BackendError;
use fusionllm_data::weights::WeightsError;
use fusionllm_data::{DataError, DiskError};
use fusionllm_exec::ExecError;
use fusionllm_graph::{Advice, GraphError};
use fusionllm_plan::PlanError;
use fusionllm_program::ProgramError;
use fusionllm_transport::{
    BindError, ConnectError, DisconnectReason, NoRelay, ReceiveError, SendError, TicketError, relay::RelayError,
};
use fusionllm_workbench::WorkbenchError;
use fusionllm_workspace::checkpoint::CheckpointError;
use fusionllm_workspace::config::JobError;
use fusionllm_workspace::run_dir::RunDirError;

/// The reason why a run, or a peer's part in it, ended.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The job, the model or another file of the user cannot be used, or this machine cannot compute with it.
    #[error(transparent)]
    Workbench(#[from] WorkbenchError),
    /// The text is not a ticket.
    #[error(transparent)]
    Ticket(#[from] TicketError),
    /// The broker refuses this peer.
    #[error("the broker refused this peer: {0}")]
    Refused(String),
    /// The broker does not do what the run's owner asks.
    #[error("the broker refused: {0}")]
    Denied(String),
    /// The run was stopped.
    #[error("stopped: {0}")]
    Stopped(String),
    /// The run was stopped, and nobody could save its newest state.
    #[error("stopped without another checkpoint: {0}")]
    Suspended(String),
    /// The run goes on without this machine.
    #[error("this machine was put out of the run: {0}")]
    PutOut(String),
    /// The broker says that the run has failed.
    #[error("the run has failed: {0}")]
    Failed(String),
    /// A connection is lost.
    #[error("{0}")]
    Lost(DisconnectReason),
    /// The broker does not answer, or not as a broker.
    #[error("cannot reach the broker")]
    BrokerUnreachable(#[source] ConnectError),
    /// Another peer does not answer, or not as a peer.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Peers could not be connected, or a connection was too slow.
    #[error("{0}")]
    Network(String),
    /// The other side broke the protocol.
    #[error("protocol: {0}")]
    Protocol(String),
    /// The links of a testbed cannot be emulated.
    #[error("cannot emulate the testbed's links")]
    Emulation(#[source] io::Error),
    /// Something on this machine failed.
    #[error("{0}")]
    State(String),
    /// A peer failed, or every step was skipped.
    #[error("{0}")]
    Run(String),
    /// A run ended, and none of its steps was applied, or none of the last ones.
    #[error("{message}")]
    NothingApplied {
        /// The number of these steps, and the peer that made the first number that is not finite.
        message: String,
        /// Advice to the user.
        hint: String,
    },
    /// A run ended early.
    #[error("{error}")]
    Unfinished {
        /// The error that ended the run.
        error: Box<NodeError>,
        /// The results that are safe, and how to go on.
        hint: String,
    },
    /// A directory cannot be the run's.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// An endpoint could not be opened.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The run's page cannot be served at the address that the user gave.
    #[error("--dashboard {addr}: cannot listen at this address")]
    Dashboard {
        /// The address.
        addr: SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// The relay cannot be used.
    #[error(transparent)]
    NoRelay(#[from] NoRelay),
    /// A relay could not be started.
    #[error(transparent)]
    Relay(#[from] RelayError),
}

impl NodeError {
    pub(crate) fn input(message: impl Into<String>) -> Self {
        WorkbenchError::input(message).into()
    }

    pub(crate) fn input_with_hint(message: impl Into<String>, hint: impl Into<String>) -> Self {
        WorkbenchError::input_with_hint(message, hint).into()
    }

    /// Adds which results of a run are safe, unless the error has a hint of its own.
    pub(crate) fn unfinished(self, hint: String) -> Self {
        match self {
            Self::Run(_)
            | Self::Stopped(_)
            | Self::Suspended(_)
            | Self::State(_)
            | Self::Workbench(WorkbenchError::State(_))
            | Self::Network(_) => Self::Unfinished { error: Box::new(self), hint },
            other => other,
        }
    }
}

impl Advice for NodeError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        let hint = match self {
            Self::Unfinished { hint, .. } | Self::NothingApplied { hint, .. } => hint,
            Self::Workbench(e) => return e.hint(),
            Self::RunDir(e) => return e.hint(),
            Self::Ticket(e) => e.hint(),
            Self::BrokerUnreachable(ConnectError::NobodyListens(_)) => {
                "the run has ended, or its broker does not run at present; its owner knows, and goes on with it by --resume"
            }
            Self::BrokerUnreachable(ConnectError::NoAnswer { obstacle: Some(obstacle), .. }) => obstacle,
            Self::BrokerUnreachable(ConnectError::NoAnswer { .. }) => {
                "the run may have ended: its owner knows. If it goes on, look for a firewall that blocks UDP between the two: \
                 `fusionllm doctor` with the ticket"
            }
            Self::BrokerUnreachable(e) | Self::Connect(e) => e.hint()?,
            Self::NoRelay(e) => e.hint(),
            Self::Dashboard { source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
                "choose another port; port 0 takes any that is free"
            }
            Self::Dashboard { source, .. } if source.kind() == io::ErrorKind::AddrNotAvailable => {
                "give an address of this machine, such as 127.0.0.1:8800, or 0.0.0.0:8800 for all of them"
            }
            Self::Dashboard { .. } => "choose another address, or \"off\"",
            Self::Emulation(_) => {
                "each pair of connected peers takes two sockets; `ulimit -n` says how many files may be open"
            }
            _ => return None,
        };
        Some(hint.into())
    }
}

/// What goes wrong on this machine alone is the workbench's error.
macro_rules! of_the_workbench {
    ($($error:ty),* $(,)?) => {
        $(impl From<$error> for NodeError {
            fn from(e: $error) -> Self {
                Self::Workbench(e.into())
            }
        })*
    };
}

of_the_workbench!(
    BackendError,
    CheckpointError,
    DataError,
    DiskError,
    ExecError,
    GraphError,
    JobError,
    PlanError,
    ProgramError,
    WeightsError,
);

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
