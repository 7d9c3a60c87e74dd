//! The directory in which a run leaves what it used and what it did.
//!
//! ```text
//! runs/0001/
//!   job.toml         the job, every default filled in
//!   plan.json        who ran which operators
//!   ticket           how to join, while the run takes joiners
//!   metrics.jsonl    a line for each step
//!   checkpoints/     see `checkpoint`
//!   summary.json     the whole run, at its end
//! ```

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::files::checkpoint::Checkpoints;
use crate::files::{DiskError, write_atomic};

/// The directory of the run that this process makes. No second process can open it meanwhile.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// At its end, and locked.
    metrics: File,
}

const JOB: &str = "job.toml";
const PLAN: &str = "plan.json";
const TICKET: &str = "ticket";
const METRICS: &str = "metrics.jsonl";
const SUMMARY: &str = "summary.json";
const CHECKPOINTS: &str = "checkpoints";

/// Why a directory cannot be a run's.
#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    /// It holds another run.
    #[error("{}: another run is there ({found})", path.display())]
    Taken {
        /// The directory.
        path: PathBuf,
        /// What is in the way.
        found: &'static str,
    },
    /// It holds no run to go on with.
    #[error("{}: there is no run here ({missing} is missing)", path.display())]
    NotARun {
        /// The directory.
        path: PathBuf,
        /// What should be in it.
        missing: &'static str,
    },
    /// Another process is at work in it.
    #[error("{}: another process is running in this directory", path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// It cannot be read or written.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

impl RunDirError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Taken { path, .. } => {
                return Some(format!("choose another --run-dir, or continue that run: --resume {}", path.display()));
            }
            Self::NotARun { .. } => "--resume takes the directory of a run, such as runs/0001",
            Self::Busy { .. } => "wait for it, stop it, or choose another --run-dir",
            Self::Disk(e) => e.hint(),
        };
        Some(hint.into())
    }
}

/// A line of `metrics.jsonl`. A figure that is not finite is written as `null`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean loss over the step's targets, before the update.
    pub loss: Option<f64>,
    /// Seconds the step took.
    pub step_s: f64,
    /// Tokens (for images: images) a second.
    pub tokens_per_s: f64,
    /// Bytes of tensors that peers sent each other.
    pub bytes_sent: u64,
    /// Learning rate of the update.
    pub lr: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: Option<f64>,
    /// Whether the update was left out because the loss or the gradient was not finite.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// Codecs of links that changed with this step, and what speaks against them, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub codecs: Vec<String>,
    /// Spectra of what was compressed, where this step was to be looked at.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spectra: Vec<Spectrum>,
    /// Mean loss over the held-out targets, where this step was followed by a measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// Fraction of the held-out targets that the largest logit hits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_accuracy: Option<f64>,
}

/// What a codec does to the spectrum of one micro-batch's tensors on a link: of the one with the largest stable rank, ‖X‖_F² / σ₁², before and after.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Spectrum {
    /// The sending peer.
    pub from: String,
    /// The receiving peer.
    pub to: String,
    /// The stable rank of what was to be sent.
    pub before: f64,
    /// That of what arrives.
    pub after: f64,
}

/// `summary.json`. A figure that is not known is `None`, written as `null`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Steps done.
    pub steps: u64,
    /// Loss of the first step.
    pub loss_first: Option<f64>,
    /// Loss of the last step.
    pub loss_last: Option<f64>,
    /// Median over the steps, in seconds.
    pub median_step_s: Option<f64>,
    /// What the planner predicted, in seconds.
    pub predicted_step_s: Option<f64>,
    /// Bytes of tensors that peers sent each other in a step, on average.
    pub bytes_sent_per_step: Option<u64>,
    /// Time spent in steps over the time of the whole run.
    pub training_overhead_ratio: Option<f64>,
    /// What made the plan.
    pub scheduler: String,
    /// The order of forward and backward work.
    #[serde(default)]
    pub schedule: String,
    /// Micro-batches a step.
    #[serde(default)]
    pub micro_batches: u32,
    /// What was done to tensors on links.
    pub compression: String,
    /// In the plan's order.
    pub peers: Vec<PeerSummary>,
    /// Those that carried tensors, by names of their ends.
    pub links: Vec<LinkSummary>,
}

/// What one peer did.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PeerSummary {
    /// Its name.
    pub name: String,
    /// What it computes with.
    pub backend: String,
    /// How many operators it runs, forward and backward.
    pub operators: u64,
    /// Seconds of computing in a step, the median.
    pub compute_s: Option<f64>,
    /// What the planner predicted, in seconds.
    #[serde(default)]
    pub predicted_compute_s: Option<f64>,
    /// Seconds of encoding and decoding in a step, beside the computing: the median.
    #[serde(default)]
    pub codec_s: Option<f64>,
    /// Most bytes allocated at once while training: tensors, buffers of what comes and goes, and all else.
    pub peak_memory_bytes: Option<u64>,
    /// Most bytes that the system kept in memory for its process.
    #[serde(default)]
    pub resident_memory_bytes: Option<u64>,
    /// What the planner predicted.
    pub predicted_memory_bytes: Option<u64>,
}

/// What one link carried, in one direction.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LinkSummary {
    /// The sending peer.
    pub from: String,
    /// The receiving peer.
    pub to: String,
    /// What made the tensors smaller.
    pub codec: String,
    /// By how much: bytes before over bytes after.
    pub ratio: Option<f64>,
    /// How far what arrived was from what was meant, |received - meant| / |meant|: the median over steps of the worst of one micro-batch. `None` without a codec.
    #[serde(default)]
    pub relative_error: Option<f64>,
    /// Bytes in a step.
    pub bytes_per_step: Option<u64>,
    /// Rate while sending.
    pub measured_bytes_per_s: Option<f64>,
}

impl RunDir {
    /// Makes the directory of a new run and writes the job into it: `path`, or without one the next free number in
    /// `runs/` of the working directory.
    ///
    /// # Errors
    ///
    /// Another run is there, or the disk fails.
    pub fn create(path: Option<&Path>, job: &str) -> Result<Self, RunDirError> {
        let path = match path {
            Some(path) => {
                fs::create_dir_all(path).map_err(DiskError::at(path, "created"))?;
                path.to_owned()
            }
            None => next_in(Path::new("runs"))?,
        };
        let taken = |found| RunDirError::Taken { path: path.clone(), found };
        if let Some(found) = [PLAN, METRICS, SUMMARY, CHECKPOINTS].into_iter().find(|name| path.join(name).exists()) {
            return Err(taken(found));
        }
        let job_path = path.join(JOB);
        // Of two processes that come this far, one makes the file.
        match OpenOptions::new().write(true).create_new(true).open(&job_path) {
            Ok(mut file) => file.write_all(job.as_bytes()).map_err(|e| {
                // Half a job would pass for a run.
                let _ = fs::remove_file(&job_path);
                DiskError::at(&job_path, "written")(e)
            })?,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(taken(JOB)),
            Err(e) => return Err(DiskError::at(&job_path, "written")(e).into()),
        }
        Self::lock(path)
    }

    /// Opens the directory of an earlier run to go on after `step` steps: what `metrics.jsonl` says of later ones,
    /// which will be done again, is cut off, and checkpoints that were not finished are removed.
    ///
    /// # Errors
    ///
    /// There is no run, another process is at it, or the disk fails.
    pub fn resume(path: &Path, step: u64) -> Result<Self, RunDirError> {
        if !path.join(JOB).is_file() {
            return Err(RunDirError::NotARun { path: path.to_owned(), missing: JOB });
        }
        let mut run = Self::lock(path.to_owned())?;
        let metrics = path.join(METRICS);
        let text = fs::read(&metrics).map_err(DiskError::at(&metrics, "read"))?;
        let kept = text.split_inclusive(|&b| b == b'\n').take_while(|line| {
            let whole = line.ends_with(b"\n");
            let done = serde_json::from_slice::<StepMetrics>(line);
            whole && done.is_ok_and(|m| m.step <= step)
        });
        let kept = kept.map(<[u8]>::len).sum::<usize>() as u64;
        let cut = run.metrics.set_len(kept).and_then(|()| run.metrics.seek(SeekFrom::Start(kept)));
        cut.map_err(DiskError::at(&metrics, "written"))?;
        // It is about a run that ended.
        remove(&path.join(SUMMARY))?;
        Checkpoints::new(run.checkpoints()).clean()?;
        Ok(run)
    }

    fn lock(path: PathBuf) -> Result<Self, RunDirError> {
        let name = path.join(METRICS);
        let opened = OpenOptions::new().write(true).create(true).truncate(false).open(&name);
        let metrics = opened.map_err(DiskError::at(&name, "written"))?;
        match metrics.try_lock() {
            Ok(()) => Ok(Self { path, metrics }),
            Err(TryLockError::WouldBlock) => Err(RunDirError::Busy { path }),
            // A file system without locks: nothing to hold on to.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => Ok(Self { path, metrics }),
            Err(TryLockError::Error(e)) => Err(DiskError::at(&name, "locked")(e).into()),
        }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where checkpoints go.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join(CHECKPOINTS)
    }

    /// Replaces the job, for a resumed run whose settings have changed.
    ///
    /// # Errors
    ///
    /// The disk fails, as for all that write here.
    pub fn write_job(&self, toml: &str) -> Result<(), DiskError> {
        write_atomic(&self.path.join(JOB), toml.as_bytes())
    }

    /// Writes the plan.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_plan(&self, json: &str) -> Result<(), DiskError> {
        write_atomic(&self.path.join(PLAN), json.as_bytes())
    }

    /// Reads what [`Self::write_plan`] wrote.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub fn read_plan(&self) -> Result<String, DiskError> {
        let path = self.path.join(PLAN);
        fs::read_to_string(&path).map_err(DiskError::at(&path, "read"))
    }

    /// Writes the ticket, readable by this user alone where the system has such rights: whoever has it may join.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn write_ticket(&self, ticket: &str) -> Result<(), DiskError> {
        let path = self.path.join(TICKET);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        self.remove_ticket()?;
        let written = options.open(&path).and_then(|mut file| writeln!(file, "{ticket}"));
        written.map_err(DiskError::at(&path, "written"))
    }

    /// Removes the ticket, once the run takes no more joiners.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn remove_ticket(&self) -> Result<(), DiskError> {
        remove(&self.path.join(TICKET))
    }

    /// Adds a step to `metrics.jsonl`.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn record(&mut self, metrics: &StepMetrics) -> Result<(), DiskError> {
        let line = serde_json::to_string(metrics).map_err(io::Error::from);
        let written = line.and_then(|line| self.metrics.write_all(format!("{line}\n").as_bytes()));
        written.map_err(DiskError::at(&self.path.join(METRICS), "written"))
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

/// The lines of a run's `metrics.jsonl`; a last line that was cut short is left out.
///
/// # Errors
///
/// The file cannot be read.
pub fn read_metrics(run: &Path) -> Result<Vec<StepMetrics>, DiskError> {
    let path = run.join(METRICS);
    let text = fs::read_to_string(&path).map_err(DiskError::at(&path, "read"))?;
    Ok(text.lines().map_while(|line| serde_json::from_str(line).ok()).collect())
}

/// Removes a file that may be there.
fn remove(path: &Path) -> Result<(), DiskError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(DiskError::at(path, "removed")),
    }
}

/// Makes the directory after the highest number in `runs`.
fn next_in(runs: &Path) -> Result<PathBuf, DiskError> {
    fs::create_dir_all(runs).map_err(DiskError::at(runs, "created"))?;
    let entries = fs::read_dir(runs).map_err(DiskError::at(runs, "read"))?;
    let number = |e: fs::DirEntry| e.file_name().to_str()?.parse::<u32>().ok();
    let mut next = entries.filter_map(|e| number(e.ok()?)).max().unwrap_or(0);
    loop {
        next = next.saturating_add(1);
        let path = runs.join(format!("{next:04}"));
        match fs::create_dir(&path) {
            // Another process was faster.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && next < u32::MAX => {}
            made => return made.map(|()| path.clone()).map_err(DiskError::at(&path, "created")),
        }
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::printed;

    fn line(step: u64) -> StepMetrics {
        StepMetrics { step, loss: Some(5.5), step_s: 0.25, tokens_per_s: 512.0, bytes_sent: 1024, ..Default::default() }
    }

    #[test]
    fn a_run_leaves_what_the_contract_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/run");
        let mut run = RunDir::create(Some(&path), "[train]\n").unwrap();
        run.write_plan("{}").unwrap();
        run.write_ticket("fusionllmabc").unwrap();
        assert_eq!(fs::read_to_string(path.join("ticket")).unwrap(), "fusionllmabc\n");
        run.record(&StepMetrics { lr: 3e-4, grad_norm: Some(1.5), ..line(1) }).unwrap();
        let measured = StepMetrics { val_loss: Some(2.0), val_accuracy: Some(0.5), ..line(2) };
        run.record(&measured).unwrap();
        run.record(&StepMetrics { loss: None, skipped: true, ..line(3) }).unwrap();
        let peers = vec![PeerSummary { name: "a0".into(), backend: "cpu".into(), operators: 37, ..Default::default() }];
        let links = vec![LinkSummary {
            from: "a0".into(),
            to: "b0".into(),
            codec: "none".into(),
            ratio: Some(1.0),
            ..Default::default()
        }];
        let summary =
            Summary { steps: 3, loss_first: Some(5.5), loss_last: Some(f64::NAN), peers, links, ..Default::default() };
        run.write_summary(&summary).unwrap();
        run.remove_ticket().unwrap();

        let mut names: Vec<_> = fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["job.toml", "metrics.jsonl", "plan.json", "summary.json"]);
        assert_eq!(read_metrics(&path).unwrap()[1], measured);
        assert_snapshot!(fs::read_to_string(path.join("metrics.jsonl")).unwrap(), @r#"
        {"step":1,"loss":5.5,"step_s":0.25,"tokens_per_s":512.0,"bytes_sent":1024,"lr":0.0003,"grad_norm":1.5}
        {"step":2,"loss":5.5,"step_s":0.25,"tokens_per_s":512.0,"bytes_sent":1024,"lr":0.0,"grad_norm":null,"val_loss":2.0,"val_accuracy":0.5}
        {"step":3,"loss":null,"step_s":0.25,"tokens_per_s":512.0,"bytes_sent":1024,"lr":0.0,"grad_norm":null,"skipped":true}
        "#);
        assert_snapshot!(fs::read_to_string(path.join("summary.json")).unwrap(), @r#"
        {
          "steps": 3,
          "loss_first": 5.5,
          "loss_last": null,
          "median_step_s": null,
          "predicted_step_s": null,
          "bytes_sent_per_step": null,
          "training_overhead_ratio": null,
          "scheduler": "",
          "schedule": "",
          "micro_batches": 0,
          "compression": "",
          "peers": [
            {
              "name": "a0",
              "backend": "cpu",
              "operators": 37,
              "compute_s": null,
              "predicted_compute_s": null,
              "codec_s": null,
              "peak_memory_bytes": null,
              "resident_memory_bytes": null,
              "predicted_memory_bytes": null
            }
          ],
          "links": [
            {
              "from": "a0",
              "to": "b0",
              "codec": "none",
              "ratio": 1.0,
              "relative_error": null,
              "bytes_per_step": null,
              "measured_bytes_per_s": null
            }
          ]
        }
        "#);
    }

    #[test]
    fn another_run_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let hide = |e: RunDirError| printed(e).replace(&dir.path().display().to_string(), "DIR");
        let path = dir.path().join("run");
        drop(RunDir::create(Some(&path), "first").unwrap());
        assert_snapshot!(hide(RunDir::create(Some(&path), "second").unwrap_err()), @r"
        DIR/run: another run is there (metrics.jsonl)
        hint: choose another --run-dir, or continue that run: --resume DIR/run
        ");
        fs::remove_file(path.join("metrics.jsonl")).unwrap();
        assert_snapshot!(hide(RunDir::create(Some(&path), "second").unwrap_err()), @r"
        DIR/run: another run is there (job.toml)
        hint: choose another --run-dir, or continue that run: --resume DIR/run
        ");
        assert_eq!(fs::read_to_string(path.join("job.toml")).unwrap(), "first");

        let run = RunDir::resume(&path, 0).unwrap();
        assert_snapshot!(hide(RunDir::resume(&path, 0).unwrap_err()), @r"
        DIR/run: another process is running in this directory
        hint: wait for it, stop it, or choose another --run-dir
        ");
        drop(run);
        assert_snapshot!(hide(RunDir::resume(dir.path(), 0).unwrap_err()), @r"
        DIR: there is no run here (job.toml is missing)
        hint: --resume takes the directory of a run, such as runs/0001
        ");
        fs::write(dir.path().join("file"), "").unwrap();
        assert_snapshot!(hide(RunDir::create(Some(&dir.path().join("file")), "").unwrap_err()), @r"
        DIR/file: cannot be created
        caused by: File exists (os error 17)
        hint: check the disk and the path
        ");
    }

    #[test]
    fn a_resumed_run_forgets_the_steps_it_does_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut run = RunDir::create(Some(dir.path()), "").unwrap();
        for step in 1..=4 {
            run.record(&line(step)).unwrap();
        }
        // The process died within a line.
        run.metrics.write_all(b"{\"step\": 5, \"lo").unwrap();
        run.write_summary(&Summary::default()).unwrap();
        fs::create_dir_all(run.checkpoints().join("step-5.partial")).unwrap();
        drop(run);
        assert_eq!(read_metrics(dir.path()).unwrap().len(), 4);

        let mut run = RunDir::resume(dir.path(), 2).unwrap();
        run.record(&line(3)).unwrap();
        let steps: Vec<u64> = read_metrics(dir.path()).unwrap().iter().map(|m| m.step).collect();
        assert_eq!(steps, [1, 2, 3]);
        assert!(!dir.path().join("summary.json").exists());
        assert_eq!(fs::read_dir(run.checkpoints()).unwrap().count(), 0);
    }

    #[test]
    fn runs_are_numbered() {
        let dir = tempfile::tempdir().unwrap();
        let runs = dir.path().join("runs");
        assert_eq!(next_in(&runs).unwrap(), runs.join("0001"));
        fs::create_dir(runs.join("0041")).unwrap();
        fs::create_dir(runs.join("mine")).unwrap();
        assert_eq!(next_in(&runs).unwrap(), runs.join("0042"));
    }

    #[test]
    fn what_to_do_about_a_full_disk() {
        let path = Path::new("runs/0001/metrics.jsonl");
        let error = DiskError::at(path, "written")(io::Error::from(io::ErrorKind::StorageFull));
        assert_snapshot!(error, @r"
        runs/0001/metrics.jsonl: cannot be written
        caused by: no storage space
        hint: free some space, then continue with --resume; all earlier checkpoints are intact
        ");
    }
}
