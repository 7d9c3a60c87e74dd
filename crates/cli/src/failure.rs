use std::borrow::Cow;
use std::error::Error;
use std::fmt::{self, Display};

use fusionllm_data::DataError;
use fusionllm_graph::Advice;
use fusionllm_node::NodeError;
use fusionllm_plan::PlanError;
use fusionllm_workbench::WorkbenchError;
use fusionllm_workspace::checkpoint::CheckpointError;
use fusionllm_workspace::config::JobError;
use fusionllm_workspace::run_dir::RunDirError;

/// The reason why a command ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Bad usage or bad input: exit status 2.
    Input(Report),
    /// Something failed while running: exit status 1.
    Running(Report),
    /// The reader of standard output has read enough, as in `| head`: exit status 0.
    Closed,
}

/// The message that the user reads: the error, its causes and a hint, each on lines of its own.
#[derive(Debug)]
pub(crate) struct Report {
    message: String,
    causes: Vec<String>,
    hint: Option<String>,
}

impl Failure {
    pub(crate) fn input(message: impl Display) -> Self {
        Self::Input(Report { message: message.to_string(), causes: Vec::new(), hint: None })
    }

    pub(crate) fn running(message: impl Display) -> Self {
        Self::Running(Report { message: message.to_string(), causes: Vec::new(), hint: None })
    }

    /// Adds an error as the cause, and the errors behind it.
    pub(crate) fn because(mut self, cause: &dyn Error) -> Self {
        if let Self::Input(report) | Self::Running(report) = &mut self {
            report.causes.push(cause.to_string());
            report.causes.extend(causes(cause));
        }
        self
    }

    /// Adds what the user can do.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        if let Self::Input(report) | Self::Running(report) = &mut self {
            report.hint = Some(hint.into());
        }
        self
    }

    pub(crate) fn status(&self) -> u8 {
        match self {
            Self::Input(_) => 2,
            Self::Running(_) => 1,
            Self::Closed => 0,
        }
    }

    /// The error alone, without causes and hint.
    pub(crate) fn message(&self) -> &str {
        self.report().map_or("", |report| &report.message)
    }

    pub(crate) fn report(&self) -> Option<&Report> {
        match self {
            Self::Input(report) | Self::Running(report) => Some(report),
            Self::Closed => None,
        }
    }
}

fn causes(error: &dyn Error) -> Vec<String> {
    let mut causes = Vec::new();
    let mut next = error.source();
    while let Some(cause) = next {
        causes.push(cause.to_string());
        next = cause.source();
    }
    causes
}

impl Report {
    fn of(e: &dyn Advice) -> Self {
        Self { message: e.to_string(), causes: causes(e), hint: e.hint().map(Cow::into_owned) }
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        self.causes.iter().try_for_each(|cause| write!(f, "\ncaused by: {cause}"))?;
        self.hint.iter().try_for_each(|hint| write!(f, "\nhint: {hint}"))
    }
}

impl From<NodeError> for Failure {
    fn from(e: NodeError) -> Self {
        let report = Report::of(&e);
        match e {
            NodeError::Workbench(e) => e.into(),
            // These errors come before a run begins, and are about the user's input.
            NodeError::Ticket(_) | NodeError::Bind(_) | NodeError::Relay(_) | NodeError::Dashboard { .. } => {
                Self::Input(report)
            }
            NodeError::RunDir(e) => e.into(),
            _ => Self::Running(report),
        }
    }
}

impl From<WorkbenchError> for Failure {
    fn from(e: WorkbenchError) -> Self {
        let report = Report::of(&e);
        match e {
            // These errors are about the user's input.
            WorkbenchError::Input { .. }
            | WorkbenchError::Job(_)
            | WorkbenchError::Data(_)
            | WorkbenchError::Weights(_)
            | WorkbenchError::Import(_)
            | WorkbenchError::Graph(_)
            | WorkbenchError::Plan(_) => Self::Input(report),
            WorkbenchError::Checkpoint(CheckpointError::Disk(_) | CheckpointError::Unexpected { .. }) => {
                Self::Running(report)
            }
            WorkbenchError::Checkpoint(_) => Self::Input(report),
            _ => Self::Running(report),
        }
    }
}

impl From<RunDirError> for Failure {
    fn from(e: RunDirError) -> Self {
        let report = Report::of(&e);
        match e {
            RunDirError::Disk(_) => Self::Running(report),
            _ => Self::Input(report),
        }
    }
}

impl From<JobError> for Failure {
    fn from(e: JobError) -> Self {
        WorkbenchError::from(e).into()
    }
}

impl From<DataError> for Failure {
    fn from(e: DataError) -> Self {
        WorkbenchError::from(e).into()
    }
}

impl From<PlanError> for Failure {
    fn from(e: PlanError) -> Self {
        WorkbenchError::from(e).into()
    }
}
