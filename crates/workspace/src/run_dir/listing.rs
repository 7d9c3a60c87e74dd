//! The runs of a directory, as their files tell of them. Long files are read at their ends alone.

use std::borrow::Cow;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use fusionllm_data::DiskError;
use fusionllm_events::StepMetrics;
use serde::{Deserialize, Serialize};

use super::reading::{RunFiles, last_record, read};
use super::{EVENTS, JOB, METRICS, OWNER_TICKET};

/// The bytes at the end of `metrics.jsonl` that are searched for the last loss and the last validation: a thousand
/// steps at least, and more than that without spectra.
const TAIL_BYTES: u64 = 256 << 10;

/// The runs of a directory.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Runs {
    /// The runs, the newest last.
    pub runs: Vec<RunOverview>,
    /// The directories that hold no run, or one that cannot be read, by their names.
    pub broken: Vec<BrokenRun>,
}

/// A directory that is no run, or whose files cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BrokenRun {
    /// The directory.
    pub directory: PathBuf,
    /// The file, and what is wrong with it.
    pub reason: String,
}

/// A run, as its files tell of it.
#[derive(Debug, Clone, PartialEq)]
pub struct RunOverview {
    /// The directory.
    pub directory: PathBuf,
    /// Whether it goes on.
    pub state: RunState,
    /// Steps in the metrics.
    pub step: u64,
    /// The step at which the run stops, if its job says so.
    pub steps: Option<u64>,
    /// The loss of the last of these steps. `None` if it was not finite.
    pub loss: Option<f64>,
    /// The last validation loss among the last steps.
    pub val_loss: Option<f64>,
    /// When the run was first started, in seconds since 1970, in UTC.
    pub started: Option<f64>,
    /// Seconds that it went on, without the time between a stop and the next start.
    pub took_s: Option<f64>,
    /// The job, with every default filled in.
    pub job: toml::Table,
}

/// Whether a run goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// A process conducts it.
    Running,
    /// It was trained to its end, or stopped in good order.
    Over,
    /// Nobody conducts it, and it has no summary.
    Stopped,
}

impl RunState {
    /// The name, as people and programs read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Over => "over",
            Self::Stopped => "stopped",
        }
    }
}

/// Reads the runs in a directory such as `runs`. If it is itself the directory of a run, that is the only one.
///
/// # Errors
///
/// The directory cannot be read.
pub fn list_runs(directory: &Path) -> Result<Runs, DiskError> {
    let mut directories = Vec::new();
    if directory.join(JOB).is_file() {
        directories.push(directory.to_owned());
    } else {
        for entry in fs::read_dir(directory).map_err(DiskError::at(directory, "read"))? {
            directories.push(entry.map_err(DiskError::at(directory, "read"))?.path());
        }
        directories.retain(|path| path.is_dir());
        directories.sort();
    }
    let mut found = Runs::default();
    for directory in directories {
        match RunOverview::read(&directory) {
            Ok(run) => found.runs.push(run),
            Err(reason) => found.broken.push(BrokenRun { directory, reason }),
        }
    }
    found.runs.sort_by(|a, b| a.started.unwrap_or(0.0).total_cmp(&b.started.unwrap_or(0.0)));
    Ok(found)
}

impl RunOverview {
    /// Reads the files of one run.
    ///
    /// # Errors
    ///
    /// A sentence about the file that is missing or damaged.
    pub fn read(run: &Path) -> Result<Self, String> {
        let path = run.join(JOB);
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(format!("{JOB} is missing")),
            text => text.map_err(|e| format!("{JOB} cannot be read: {e}"))?,
        };
        let job: toml::Table =
            text.parse().map_err(|e: toml::de::Error| format!("{JOB} is damaged: {}", e.message()))?;
        let (last, val_loss) = last_steps(run).map_err(|e| format!("{METRICS} cannot be read: {e}"))?;
        let (started, took_s) = times(run).map_err(|e| format!("{EVENTS} cannot be read: {e}"))?;
        Ok(Self {
            directory: run.to_owned(),
            state: state(run),
            step: last.as_ref().map_or(0, |metrics| metrics.step),
            steps: RunFiles::steps(&job),
            loss: last.and_then(|metrics| metrics.loss),
            val_loss,
            started: started.or_else(|| since_1970(fs::metadata(&path).and_then(|file| file.modified()).ok()?)),
            took_s,
            job,
        })
    }
}

fn state(run: &Path) -> RunState {
    if RunFiles::is_over(run) {
        return RunState::Over;
    }
    let locked = File::open(run.join(METRICS)).is_ok_and(|metrics| match metrics.try_lock_shared() {
        Ok(()) => false,
        Err(TryLockError::WouldBlock) => true,
        // The file system has no locks. A run that ends in good order takes its ticket away.
        Err(TryLockError::Error(_)) => run.join(OWNER_TICKET).is_file(),
    });
    if locked { RunState::Running } else { RunState::Stopped }
}

/// The last step in `metrics.jsonl`, and the last validation loss.
fn last_steps(run: &Path) -> io::Result<(Option<StepMetrics>, Option<f64>)> {
    let mut file = match File::open(run.join(METRICS)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((None, None)),
        file => file?,
    };
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut tail)?;
    // The first line may be cut off, and the last one may not be whole. Neither can be read.
    let read = |line: &[u8]| serde_json::from_slice::<StepMetrics>(line).ok();
    let lines = || tail.rsplit(|byte| *byte == b'\n');
    let last = lines().find_map(read);
    let has_validation = |line: &&[u8]| line.windows(VALIDATION.len()).any(|part| part == VALIDATION);
    let val_loss = lines().filter(has_validation).find_map(read).and_then(|metrics| metrics.val_loss);
    Ok((last, val_loss))
}

const VALIDATION: &[u8] = b"\"val_loss\"";

/// When a run was started, and the seconds that it went on since, by its events and its last step.
fn times(run: &Path) -> io::Result<(Option<f64>, Option<f64>)> {
    /// The beginning of a line of `events.jsonl`, whatever the version.
    #[derive(Deserialize)]
    struct When<'a> {
        time: f64,
        #[serde(borrow)]
        event: Cow<'a, str>,
    }
    let bytes = read(&run.join(EVENTS)).map_err(|e| io::Error::other(e.to_string()))?.unwrap_or_default();
    let (mut started, mut took) = (None, 0.0);
    // The first and the last time of the session.
    let mut session: Option<(f64, f64)> = None;
    for line in bytes.split(|byte| *byte == b'\n') {
        let Ok(When { time, event }) = serde_json::from_slice(line) else { continue };
        started.get_or_insert(time);
        session = match session {
            Some((first, last)) if event == "opened" => {
                took += last - first;
                Some((time, time))
            }
            Some((first, _)) => Some((first, time)),
            None => Some((time, time)),
        };
    }
    let Some((first, last)) = session else { return Ok((None, None)) };
    let recorded = last_record(run).and_then(since_1970).unwrap_or(last);
    Ok((started, Some((took + last.max(recorded) - first).max(0.0))))
}

fn since_1970(time: SystemTime) -> Option<f64> {
    Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use fusionllm_events::{Event, Timed};

    use super::*;
    use crate::run_dir::{RunDir, Summary};

    fn line(step: u64, val_loss: Option<f64>) -> StepMetrics {
        StepMetrics { step, loss: Some(1.0 / step as f64), val_loss, ..Default::default() }
    }

    fn event(run: &mut RunDir, time: f64, opens: bool) {
        let event = if opens { Event::Opened { directory: String::new() } } else { Event::Saved { step: 1 } };
        run.tell(&Timed { time, event }).unwrap();
    }

    #[test]
    fn runs_are_listed_from_the_oldest_to_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        let mut old = RunDir::create(Some(&dir.path().join("b")), "[train]\nsteps = 9\nstop = 4\n").unwrap();
        event(&mut old, 1_000.0, true);
        event(&mut old, 1_060.0, false);
        event(&mut old, 5_000.0, true);
        old.record(&line(1, Some(7.0))).unwrap();
        old.record(&line(2, None)).unwrap();
        let recorded = since_1970(last_record(old.path()).unwrap()).unwrap();
        let mut new = RunDir::create(Some(&dir.path().join("a")), "").unwrap();
        event(&mut new, 2_000.0, true);
        new.write_summary(&Summary::default()).unwrap();
        fs::create_dir(dir.path().join("empty")).unwrap();
        fs::create_dir(dir.path().join("broken")).unwrap();
        fs::write(dir.path().join("broken/job.toml"), "[train").unwrap();
        fs::write(dir.path().join("notes.txt"), "").unwrap();

        let found = list_runs(dir.path()).unwrap();
        let [first, second] = &found.runs[..] else { panic!("{found:?}") };
        assert_eq!(first.directory, dir.path().join("b"));
        assert_eq!((first.state, first.step, first.steps), (RunState::Running, 2, Some(4)));
        assert_eq!((first.loss, first.val_loss, first.started), (Some(0.5), Some(7.0), Some(1_000.0)));
        assert_eq!(first.took_s, Some(60.0 + recorded - 5_000.0), "the pause between two sessions does not count");
        assert_eq!((second.state, second.step, second.steps, second.loss), (RunState::Over, 0, None, None));
        let broken: Vec<_> = found.broken.iter().map(|broken| broken.directory.file_name().unwrap()).collect();
        assert_eq!(broken, ["broken", "empty"]);
        assert!(found.broken[0].reason.starts_with("job.toml is damaged: "), "{:?}", found.broken);
        assert_eq!(found.broken[1].reason, "job.toml is missing");

        drop(old);
        let alone = list_runs(&dir.path().join("b")).unwrap();
        assert_eq!(alone.runs.len(), 1);
        assert_eq!(alone.runs[0].state, RunState::Stopped);
        assert!(list_runs(&dir.path().join("none")).is_err());
    }

    #[test]
    fn the_end_of_the_metrics_is_enough() {
        let dir = tempfile::tempdir().unwrap();
        let mut run = RunDir::create(Some(dir.path()), "").unwrap();
        assert_eq!(last_steps(dir.path()).unwrap(), (None, None));
        for step in 1..=10_000 {
            run.record(&line(step, (step == 9_000).then_some(3.5))).unwrap();
        }
        drop(run);
        let path = dir.path().join(METRICS);
        let mut text = fs::read_to_string(&path).unwrap();
        assert!(text.len() as u64 > 2 * TAIL_BYTES);
        text += "{\"step\":10001,\"lo";
        fs::write(&path, text).unwrap();
        let (last, val_loss) = last_steps(dir.path()).unwrap();
        assert_eq!((last.unwrap().step, val_loss), (10_000, Some(3.5)));
    }
}
