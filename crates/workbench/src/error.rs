use std::borrow::Cow;
use std::path::PathBuf;

use fusionllm_backend::BackendError;
use fusionllm_data::weights::WeightsError;
use fusionllm_data::{DataError, DiskError};
use fusionllm_exec::ExecError;
use fusionllm_graph::{Advice, GraphError};
use fusionllm_import::ImportError;
use fusionllm_plan::PlanError;
use fusionllm_program::ProgramError;
use fusionllm_workspace::checkpoint::CheckpointError;
use fusionllm_workspace::config::JobError;

/// The reason why something cannot be done with a job or a model.
#[derive(Debug, thiserror::Error)]
pub enum WorkbenchError {
    /// The user's input cannot be used.
    #[error("{message}")]
    Input {
        /// A description of the error, and its place.
        message: String,
        /// Advice to the user.
        hint: Option<String>,
    },
    /// A job, testbed or profile file is wrong.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A file of weights cannot be used.
    #[error(transparent)]
    Weights(WeightsError),
    /// A `.pt2` archive cannot be used.
    #[error(transparent)]
    Import(ImportError),
    /// Something on this machine failed.
    #[error("{0}")]
    State(String),
    /// A trained model computes no numbers.
    #[error("{}: the model's logits are not numbers; its training may have diverged", path.display())]
    Diverged {
        /// The checkpoint.
        path: PathBuf,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] DiskError),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A graph or tensor is invalid.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A plan or program is invalid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A kernel failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A program could not be carried out.
    #[error(transparent)]
    Exec(#[from] ExecError),
}

impl WorkbenchError {
    /// The user's input cannot be used, for the reason that `message` says.
    pub fn input(message: impl Into<String>) -> Self {
        Self::Input { message: message.into(), hint: None }
    }

    /// The user's input cannot be used, for the reason that `message` says. `hint` says what helps.
    pub fn input_with_hint(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Input { message: message.into(), hint: Some(hint.into()) }
    }
}

impl Advice for WorkbenchError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Input { hint, .. } => Some(hint.as_deref()?.into()),
            Self::Job(e) => e.hint(),
            Self::Import(e) => e.hint(),
            Self::Data(e) => e.hint(),
            Self::Weights(e) => e.hint(),
            Self::File(e) => e.hint(),
            Self::Checkpoint(e) => e.hint(),
            Self::Plan(e) => e.hint(),
            Self::Diverged { .. } => Some("use an earlier checkpoint".into()),
            Self::State(_) | Self::Graph(_) | Self::Backend(_) | Self::Exec(_) => None,
        }
    }
}

impl From<ProgramError> for WorkbenchError {
    fn from(e: ProgramError) -> Self {
        Self::Plan(e.into())
    }
}

impl From<WeightsError> for WorkbenchError {
    fn from(e: WeightsError) -> Self {
        match e {
            WeightsError::Disk(e) => Self::File(e),
            e => Self::Weights(e),
        }
    }
}

impl From<ImportError> for WorkbenchError {
    fn from(e: ImportError) -> Self {
        match e {
            // The tensors of a model may come from a file of weights.
            ImportError::State(e) => match e.downcast::<WeightsError>() {
                Ok(e) => (*e).into(),
                Err(e) => Self::Import(ImportError::State(e)),
            },
            e => Self::Import(e),
        }
    }
}
