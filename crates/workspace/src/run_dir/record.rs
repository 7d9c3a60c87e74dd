//! All that the directory of a run says about it.

use std::path::{Path, PathBuf};

use fusionllm_data::DiskError;
use fusionllm_events::{StepMetrics, Timed};

use super::{
    JOB, LAST_STEP, METRICS, PLAN, RunDirError, StepTrace, Summary, read, read_events, read_metrics, read_summary,
};

/// A run, as its directory describes it. The run may be over, or go on, or have been killed.
#[derive(Debug, Clone, PartialEq)]
pub struct RunRecord {
    /// The directory.
    pub directory: PathBuf,
    /// The job, with every default filled in.
    pub job: toml::Table,
    /// The text of `plan.json`, if a plan was made.
    pub plan: Option<String>,
    /// The steps. A run that has not taken one has none.
    pub metrics: Vec<StepMetrics>,
    /// Everything else that happened.
    pub events: Vec<Timed>,
    /// The activities of each peer in the last step, if the run has ended in good order.
    pub last_step: Option<StepTrace>,
    /// The whole run, if it has ended in good order.
    pub summary: Option<Summary>,
}

impl RunRecord {
    /// Reads the directory of a run.
    ///
    /// # Errors
    ///
    /// There is no run, or one of its files cannot be read.
    pub fn read(directory: &Path) -> Result<Self, RunDirError> {
        let missing = |missing| RunDirError::NotARun { path: directory.to_owned(), missing };
        let text = |name: &str| -> Result<Option<String>, DiskError> {
            Ok(read(&directory.join(name))?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
        };
        let job = text(JOB)?.ok_or_else(|| missing(JOB))?;
        let metrics = if directory.join(METRICS).is_file() { read_metrics(directory)? } else { Vec::new() };
        Ok(Self {
            directory: directory.to_owned(),
            // A job that another version wrote is still a table, and a broken one has nothing to show.
            job: job.parse().unwrap_or_default(),
            plan: text(PLAN)?,
            metrics,
            events: read_events(directory)?,
            last_step: read(&directory.join(LAST_STEP))?.and_then(|bytes| serde_json::from_slice(&bytes).ok()),
            summary: read_summary(directory)?,
        })
    }
}
