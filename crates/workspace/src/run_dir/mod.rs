//! The directory of a run: its job, plan, metrics, checkpoints and summary.
//!
//! ```text
//! runs/0001/
//!   job.toml         the job, with every default filled in
//!   tokenizer/       the files of the job's tokenizer, if it has any
//!   graph.pt2        the archive of an imported model without its parameters, which checkpoints have
//!   plan.json        the operators of each peer
//!   ticket           what joiners need, while the run goes on
//!   owner-ticket     what `status` and `kick` need, while the run goes on
//!   dashboard        the address of the run's page, while it is served
//!   metrics.jsonl    one line per step
//!   events.jsonl     one line for whatever else happens
//!   tensorboard/     the metrics again, for TensorBoard
//!   broker-key       who the broker is, so that tickets stay valid when it is started again
//!   state            where the run stands, while it goes on with joiners
//!   measured         their machines and links
//!   checkpoints/     see `checkpoint`
//!   last_step.json   what each peer did in the last step, written at the end
//!   summary.json     the whole run, written at its end
//! ```

mod best;
mod listing;
mod reading;
mod record;
mod records;
mod settings;
mod tensorboard;

use std::borrow::Cow;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use best::best_checkpoint;
use fusionllm_data::{
    ChatTemplate, DiskError, Tokenizer, cannot_flush, write_atomic, write_private, write_private_atomic,
};
use fusionllm_events::{StepMetrics, Timed};
use fusionllm_graph::Advice;
pub use listing::{BrokenRun, RunOverview, RunState, Runs, list_runs};
use reading::read;
pub use reading::{RunFiles, last_record, read_dashboard, read_events, read_metrics, read_owner_ticket, read_summary};
pub use record::RunRecord;
pub use records::{LinkSummary, PeerSummary, PeerTrace, StepTrace, Summary};
use serde::Serialize;
pub use settings::{DifferingSetting, differing_settings, settings};
use tensorboard::TensorBoard;

use crate::checkpoint::Checkpoints;

/// The directory of a run that this process conducts. A lock keeps other processes out.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// The file `metrics.jsonl`, which is locked. Its position is the end of the file.
    metrics: File,
    /// The file `events.jsonl`, at its end.
    events: File,
    /// The files for TensorBoard.
    tensorboard: TensorBoard,
    /// If the run is new: the directories that were made for it, the innermost first.
    made: Option<Vec<PathBuf>>,
    /// Notes about promises that the file system does not keep.
    notes: Vec<String>,
}

/// The time after which whoever only looked whether a run goes on has surely given its lock back.
const LISTING: Duration = Duration::from_millis(50);

/// The folder with the files of a run's tokenizer.
pub const TOKENIZER: &str = "tokenizer";
/// The archive of a run's imported model, without its parameters.
pub const GRAPH: &str = "graph.pt2";
/// The key of the directory that a run had when it wrote a job file.
pub(crate) const WRITTEN_IN: &str = "written_in";
const JOB: &str = "job.toml";
const PLAN: &str = "plan.json";
const TICKET: &str = "ticket";
const OWNER_TICKET: &str = "owner-ticket";
const DASHBOARD: &str = "dashboard";
const METRICS: &str = "metrics.jsonl";
const EVENTS: &str = "events.jsonl";
const LAST_STEP: &str = "last_step.json";
const SUMMARY: &str = "summary.json";
const CHECKPOINTS: &str = "checkpoints";
const TENSORBOARD: &str = "tensorboard";
const IDENTITY: &str = "broker-key";
const STATE: &str = "state";
const ATLAS: &str = "measured";

/// The reason why a directory cannot be used for a run.
#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    /// The directory holds another run.
    #[error("{}: another run is there ({found})", path.display())]
    Taken {
        /// The directory.
        path: PathBuf,
        /// The file of the other run.
        found: &'static str,
        /// Whether that run can be continued: it has a checkpoint, or its broker was killed.
        resumable: bool,
    },
    /// The directory holds no run to resume.
    #[error("{}: there is no run here ({missing} is missing)", path.display())]
    NotARun {
        /// The directory.
        path: PathBuf,
        /// The missing file.
        missing: &'static str,
    },
    /// Another process uses the directory.
    #[error("{}: another process is running in this directory", path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

impl Advice for RunDirError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        let hint = match self {
            Self::Taken { path, resumable: true, .. } => {
                let path = path.display();
                return Some(
                    format!("choose another --run-dir, or continue that run: --resume {path}, without --run-dir")
                        .into(),
                );
            }
            Self::Taken { .. } => "choose another --run-dir; the run there has no checkpoint to continue from",
            Self::NotARun { .. } => "give the directory of a run, such as runs/0001",
            Self::Busy { .. } => "wait for it, stop it, or choose another --run-dir",
            Self::Disk(e) => return e.hint(),
        };
        Some(hint.into())
    }
}

impl RunDir {
    /// Creates the directory of a new run and writes the job into it. Without `path`, it takes the next free number in
    /// `runs/`.
    ///
    /// # Errors
    ///
    /// The directory holds another run, or the disk fails.
    pub fn create(path: Option<&Path>, job: &str) -> Result<Self, RunDirError> {
        let (path, made) = match path {
            Some(path) => (path.to_owned(), make(path)?),
            None => next_in(Path::new("runs"))?,
        };
        let taken = |found| RunDirError::Taken { path: path.clone(), found, resumable: is_resumable(&path) };
        if let Some(found) =
            [PLAN, METRICS, SUMMARY, CHECKPOINTS, GRAPH].into_iter().find(|name| path.join(name).exists())
        {
            return Err(taken(found));
        }
        let job_path = path.join(JOB);
        // If two processes race, only one of them creates the file.
        match OpenOptions::new().write(true).create_new(true).open(&job_path) {
            Ok(mut file) => file.write_all(written_in(&path, job).as_bytes()).map_err(|e| {
                // A run with half a job would look like a run, so the file is removed.
                let _ = fs::remove_file(&job_path);
                DiskError::at(&job_path, "written")(e)
            })?,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(taken(JOB)),
            Err(e) => return Err(DiskError::at(&job_path, "written")(e).into()),
        }
        Ok(Self { made: Some(made), ..Self::lock(path)? })
    }

    /// Makes the directory of a run that is to begin later, under the next free number in `runs/`, and returns it.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn reserve() -> Result<PathBuf, RunDirError> {
        Ok(next_in(Path::new("runs"))?.0)
    }

    /// Removes a new run that never began: its files, and the directories that were made for it as far as nothing else
    /// is in them. What cannot be removed stays.
    pub fn discard(&self) {
        let Some(made) = &self.made else { return };
        for name in [JOB, GRAPH, PLAN, TICKET, OWNER_TICKET, DASHBOARD, METRICS, EVENTS, IDENTITY, STATE, ATLAS] {
            let _ = fs::remove_file(self.path.join(name));
        }
        for name in [TOKENIZER, TENSORBOARD] {
            let _ = fs::remove_dir_all(self.path.join(name));
        }
        for directory in made {
            let _ = fs::remove_dir(directory);
        }
    }

    /// Opens the directory of an earlier run to continue after `step` steps. Removes later steps from `metrics.jsonl`,
    /// and incomplete checkpoints.
    ///
    /// # Errors
    ///
    /// There is no run, another process uses the directory, or the disk fails.
    pub fn resume(path: &Path, step: u64) -> Result<Self, RunDirError> {
        if !path.join(JOB).is_file() {
            return Err(RunDirError::NotARun { path: path.to_owned(), missing: JOB });
        }
        let mut run = Self::lock(path.to_owned())?;
        run.rewind(step)?;
        // The old summary describes a run that had ended. A broker that was killed has left an address.
        remove(&path.join(SUMMARY))?;
        remove(&path.join(LAST_STEP))?;
        run.remove_dashboard()?;
        Checkpoints::new(run.checkpoints()).clean()?;
        Ok(run)
    }

    /// Drops the metrics of all steps after this one, and of lines that are not whole.
    ///
    /// # Errors
    ///
    /// The file cannot be read or written.
    pub fn rewind(&mut self, step: u64) -> Result<(), DiskError> {
        let metrics = self.path.join(METRICS);
        let text = fs::read(&metrics).map_err(DiskError::at(&metrics, "read"))?;
        let kept = text.split_inclusive(|&b| b == b'\n').take_while(|line| {
            let whole = line.ends_with(b"\n");
            let done = serde_json::from_slice::<StepMetrics>(line);
            whole && done.is_ok_and(|m| m.step <= step)
        });
        let kept = kept.map(<[u8]>::len).sum::<usize>() as u64;
        let cut = self.metrics.set_len(kept).and_then(|()| self.metrics.seek(SeekFrom::Start(kept)));
        cut.map_err(DiskError::at(&metrics, "written"))?;
        self.tensorboard.rewind();
        Ok(())
    }

    fn lock(path: PathBuf) -> Result<Self, RunDirError> {
        let open = |name: &Path| {
            let opened = OpenOptions::new().write(true).create(true).truncate(false).open(name);
            opened.map_err(DiskError::at(name, "written"))
        };
        let mut notes = Vec::new();
        let metrics = open(&path.join(METRICS))?;
        // Whoever lists runs has the lock for a moment.
        let locked = metrics.try_lock().or_else(|_| {
            std::thread::sleep(LISTING);
            metrics.try_lock()
        });
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(RunDirError::Busy { path }),
            // File systems over a network say in several ways that they have no locks.
            Err(TryLockError::Error(e)) => notes.push(format!(
                "{}: there are no locks on this file system ({e}), so nothing keeps a second process out of this run: do \
                 not continue it while it goes on",
                path.display()
            )),
        }
        notes.extend(cannot_flush(&path).map(|e| {
            format!(
                "{}: this file system does not say when a file is on the disk ({e}). After a power cut, the newest \
                 checkpoint may be missing or damaged; the one before it is then the one to go on from",
                path.display()
            )
        }));
        let name = path.join(EVENTS);
        let mut events = open(&name)?;
        events.seek(SeekFrom::End(0)).map_err(DiskError::at(&name, "written"))?;
        let tensorboard = TensorBoard::new(path.join(TENSORBOARD));
        Ok(Self { path, metrics, events, tensorboard, made: None, notes })
    }

    /// The notes for the user about what the file system does not do. They are returned once.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of the checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join(CHECKPOINTS)
    }

    /// Copies the files of the job's tokenizer into the directory, so that the run needs nothing else.
    ///
    /// # Errors
    ///
    /// A file cannot be read or written.
    pub fn keep_tokenizer(&self, tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Result<(), DiskError> {
        self.keep_files(tokenizer)?;
        let Some(template) = template else { return Ok(()) };
        let directory = self.path.join(TOKENIZER);
        make(&directory)?;
        let file = directory.join(ChatTemplate::FILE);
        match fs::read(&file) {
            Ok(content) if content == template.source().as_bytes() => Ok(()),
            _ => write_atomic(&file, template.source().as_bytes()),
        }
    }

    fn keep_files(&self, tokenizer: &Tokenizer) -> Result<(), DiskError> {
        let directory = self.path.join(TOKENIZER);
        let files = tokenizer.files();
        let is_there = |(name, path): &(&str, PathBuf)| same_file(path, &directory.join(name));
        if files.is_empty() || files.iter().all(is_there) {
            return Ok(());
        }
        match fs::remove_dir_all(&directory) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(DiskError::at(&directory, "removed")(e)),
            _ => make(&directory)?,
        };
        for (name, path) in files {
            let content = fs::read(&path).map_err(DiskError::at(&path, "read"))?;
            write_atomic(&directory.join(name), &content)?;
        }
        Ok(())
    }

    /// Replaces the job, for a resumed run whose settings have changed.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_job(&self, toml: &str) -> Result<(), DiskError> {
        write_atomic(&self.path.join(JOB), written_in(&self.path, toml).as_bytes())
    }

    /// Writes the plan.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_plan(&self, json: &str) -> Result<(), DiskError> {
        write_atomic(&self.path.join(PLAN), json.as_bytes())
    }

    /// Writes the peers' ticket and the owner's. On Unix only the user can read them: whoever has one can join, or put
    /// members out.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_tickets(&self, peers: &str, owner: &str) -> Result<(), DiskError> {
        self.remove_tickets()?;
        write_private(&self.path.join(TICKET), format!("{peers}\n").as_bytes())?;
        write_private(&self.path.join(OWNER_TICKET), format!("{owner}\n").as_bytes())
    }

    /// Removes the tickets, when the run is over.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn remove_tickets(&self) -> Result<(), DiskError> {
        remove(&self.path.join(TICKET))?;
        remove(&self.path.join(OWNER_TICKET))
    }

    /// Writes the address of the run's page, which only the user can read, because it may have a secret.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_dashboard(&self, url: &str) -> Result<(), DiskError> {
        write_private_atomic(&self.path.join(DASHBOARD), format!("{url}\n").as_bytes())
    }

    /// Removes the address of the run's page, when nobody is served there any more.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn remove_dashboard(&self) -> Result<(), DiskError> {
        remove(&self.path.join(DASHBOARD))
    }

    /// The broker's identity, if it was written.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn read_identity(&self) -> Result<Option<Vec<u8>>, DiskError> {
        read(&self.path.join(IDENTITY))
    }

    /// Writes the broker's identity, which only the user can read.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_identity(&self, bytes: &[u8]) -> Result<(), DiskError> {
        write_private_atomic(&self.path.join(IDENTITY), bytes)
    }

    /// The state of the run at `path`, if its broker did not end in good order.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn read_state(path: &Path) -> Result<Option<Vec<u8>>, DiskError> {
        read(&path.join(STATE))
    }

    /// Writes the state of the run. Only the user can read it, because it has the secrets of tickets.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_state(&self, bytes: &[u8]) -> Result<(), DiskError> {
        write_private_atomic(&self.path.join(STATE), bytes)
    }

    /// The measurements of the machines of the run at `path`.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn read_atlas(path: &Path) -> Result<Option<Vec<u8>>, DiskError> {
        read(&path.join(ATLAS))
    }

    /// Writes the measurements of machines and links.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_atlas(&self, bytes: &[u8]) -> Result<(), DiskError> {
        write_atomic(&self.path.join(ATLAS), bytes)
    }

    /// Removes the files that only a run in progress needs.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn remove_state(&self) -> Result<(), DiskError> {
        remove(&self.path.join(STATE))?;
        remove(&self.path.join(ATLAS))
    }

    /// Adds a step to `metrics.jsonl`, and to the files for TensorBoard. If that fails, `metrics.jsonl` is as before.
    ///
    /// # Errors
    ///
    /// The disk fails. For TensorBoard, a step that cannot be written is left out: [`Self::take_left_out`].
    pub fn record(&mut self, metrics: &StepMetrics) -> Result<(), DiskError> {
        add_line(&mut self.metrics, metrics).map_err(DiskError::at(&self.path.join(METRICS), "written"))?;
        self.tensorboard.record(metrics);
        Ok(())
    }

    /// The reason why steps are left out for TensorBoard. It is returned once.
    pub fn take_left_out(&mut self) -> Option<DiskError> {
        self.tensorboard.take_left_out()
    }

    /// Adds an event to `events.jsonl`. If that fails, the file is as before.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn tell(&mut self, event: &Timed) -> Result<(), DiskError> {
        add_line(&mut self.events, event).map_err(DiskError::at(&self.path.join(EVENTS), "written"))
    }

    /// Writes `last_step.json`.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_last_step(&self, trace: &StepTrace) -> Result<(), DiskError> {
        let path = self.path.join(LAST_STEP);
        let json = serde_json::to_vec(trace).map_err(|e| DiskError::at(&path, "written")(e.into()))?;
        write_atomic(&path, &json)
    }

    /// Writes `summary.json`.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_summary(&self, summary: &Summary) -> Result<(), DiskError> {
        let path = self.path.join(SUMMARY);
        let json = serde_json::to_vec_pretty(summary).map_err(|e| DiskError::at(&path, "written")(e.into()))?;
        write_atomic(&path, &json)
    }
}

/// A job file of the run at `run`: the job, and that directory, so that files are found after the run was moved.
pub fn written_in(run: &Path, toml: &str) -> String {
    let directory = std::path::absolute(run).unwrap_or_else(|_| run.to_owned());
    // A path that is no UTF-8 cannot be written. Then files are found where they are now, and nowhere else.
    match directory.to_str() {
        Some(directory) => format!("{WRITTEN_IN} = {}\n\n{toml}", toml::Value::from(directory)),
        None => toml.to_owned(),
    }
}

/// Adds a line at the end of a file, or nothing.
fn add_line(file: &mut File, content: &impl Serialize) -> io::Result<()> {
    let line = format!("{}\n", serde_json::to_string(content)?);
    let end = file.stream_position()?;
    file.write_all(line.as_bytes()).inspect_err(|_| {
        // The disk may have had room for a part of the line.
        let _ = file.set_len(end).and_then(|()| file.seek(SeekFrom::Start(end)));
    })
}

/// Removes a file if it exists.
fn remove(path: &Path) -> Result<(), DiskError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(DiskError::at(path, "removed")),
    }
}

/// Whether both paths lead to one file.
fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Whether the run in a directory can be continued.
fn is_resumable(run: &Path) -> bool {
    let checkpoints = Checkpoints::new(run.join(CHECKPOINTS)).list();
    run.join(STATE).is_file() || checkpoints.is_ok_and(|all| !all.is_empty())
}

/// Makes a directory and those around it. Returns those that were not there before, the innermost first.
fn make(directory: &Path) -> Result<Vec<PathBuf>, DiskError> {
    let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let made = directory.ancestors().take_while(missing).map(Path::to_owned).collect();
    fs::create_dir_all(directory).map_err(DiskError::at(directory, "created"))?;
    Ok(made)
}

/// Creates the directory with the next number in `runs`. Returns it, and all directories that were made.
fn next_in(runs: &Path) -> Result<(PathBuf, Vec<PathBuf>), DiskError> {
    let mut all_made = make(runs)?;
    let entries = fs::read_dir(runs).map_err(DiskError::at(runs, "read"))?;
    let number = |e: fs::DirEntry| e.file_name().to_str()?.parse::<u32>().ok();
    let mut next = entries.filter_map(|e| number(e.ok()?)).max().unwrap_or(0);
    loop {
        next = next.saturating_add(1);
        let path = runs.join(format!("{next:04}"));
        match fs::create_dir(&path) {
            // Another process was faster.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && next < u32::MAX => {}
            made => {
                made.map_err(DiskError::at(&path, "created"))?;
                all_made.insert(0, path.clone());
                return Ok((path, all_made));
            }
        }
    }
}

#[cfg(test)]
mod tests;
