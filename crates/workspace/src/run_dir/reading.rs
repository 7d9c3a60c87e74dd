//! The facts that the files of a run tell, whether or not its broker runs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use fusionllm_data::DiskError;
use fusionllm_events::{StepMetrics, Timed};

use super::{CHECKPOINTS, DASHBOARD, EVENTS, JOB, METRICS, OWNER_TICKET, RunDirError, SUMMARY, Summary};

/// The time when the last step of a run was recorded.
pub fn last_record(run: &Path) -> Option<SystemTime> {
    fs::metadata(run.join(METRICS)).and_then(|file| file.modified()).ok()
}

/// Reads the `metrics.jsonl` of a run. An incomplete last line is ignored.
///
/// # Errors
///
/// The file cannot be read.
pub fn read_metrics(run: &Path) -> Result<Vec<StepMetrics>, DiskError> {
    let path = run.join(METRICS);
    let text = fs::read_to_string(&path).map_err(DiskError::at(&path, "read"))?;
    Ok(text.lines().map_while(|line| serde_json::from_str(line).ok()).collect())
}

/// Reads the `events.jsonl` of a run; runs of earlier versions have none. Lines that are not whole, or of a later
/// version, are left out.
///
/// # Errors
///
/// The file cannot be read.
pub fn read_events(run: &Path) -> Result<Vec<Timed>, DiskError> {
    let bytes = read(&run.join(EVENTS))?.unwrap_or_default();
    Ok(bytes.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect())
}

/// The `summary.json` of a run, if it has one that this version understands.
///
/// # Errors
///
/// The file cannot be read.
pub fn read_summary(run: &Path) -> Result<Option<Summary>, DiskError> {
    let bytes = read(&run.join(SUMMARY))?;
    Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
}

/// The content of a file, if it exists.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>, DiskError> {
    match fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        content => content.map(Some).map_err(DiskError::at(path, "read")),
    }
}

/// Reads the owner's ticket of a run; `None` if there is none, because the run is over or there never was one.
///
/// # Errors
///
/// The file cannot be read.
pub fn read_owner_ticket(run: &Path) -> Result<Option<String>, DiskError> {
    let path = run.join(OWNER_TICKET);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(DiskError::at(&path, "read")(e)),
    }
}

/// The address of the page that the broker of a run serves; `None` if it serves none.
///
/// # Errors
///
/// The file cannot be read.
pub fn read_dashboard(run: &Path) -> Result<Option<String>, DiskError> {
    let bytes = read(&run.join(DASHBOARD))?;
    Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()))
}

/// The facts that the files of a run tell, whether or not its broker runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFiles {
    /// Whether there is a summary, because the run was trained to its end or stopped in good order.
    pub over: bool,
    /// The step at which the run stops, if its job says so.
    pub steps: Option<u64>,
    /// The directory of the checkpoints.
    pub checkpoints: PathBuf,
}

impl RunFiles {
    /// Reads the directory of a run.
    ///
    /// # Errors
    ///
    /// There is no run, or its job cannot be read.
    pub fn read(run: &Path) -> Result<Self, RunDirError> {
        let job = run.join(JOB);
        if !job.is_file() {
            return Err(RunDirError::NotARun { path: run.to_owned(), missing: JOB });
        }
        let text = fs::read_to_string(&job).map_err(DiskError::at(&job, "read"))?;
        let steps = text.parse::<toml::Table>().ok().and_then(|job| Self::steps(&job));
        Ok(Self { over: Self::is_over(run), steps, checkpoints: run.join(CHECKPOINTS) })
    }

    pub(super) fn is_over(run: &Path) -> bool {
        run.join(SUMMARY).is_file()
    }

    pub(super) fn steps(job: &toml::Table) -> Option<u64> {
        let train = job.get("train")?;
        u64::try_from(train.get("stop").or(train.get("steps"))?.as_integer()?).ok()
    }
}
