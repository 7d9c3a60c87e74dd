//! Checkpoints: everything that a run needs to continue as if it had not stopped.
//!
//! Version 1 of the layout:
//!
//! ```text
//! checkpoints/
//!   step-200/                 one checkpoint, after 200 steps
//!     manifest.json           format and version, the run's state, a digest of every tensor and file below
//!     model.safetensors       parameters and buffers, under the graph's names (for GPT-2, Hugging Face's)
//!     optimizer.safetensors   the optimizer state: NAME.exp_avg, NAME.exp_avg_sq, NAME.momentum_buffer
//!     config.json, ...        further files of the run, such as the model's configuration
//!   step-300.partial/         a checkpoint that is being written
//!   step-200.old/             a checkpoint that is being replaced by another of the same step
//! ```
//!
//! ```text
//! manifest.json
//!   { "format": "fusionllm-checkpoint", "version": 1,
//!     "state": { "step", "updates", "samples", "seed", "graph", "data", "loss_first" },
//!     "model": { NAME: DIGEST }, "optimizer": { NAME: DIGEST }, "extra": { FILE: DIGEST } }
//! DIGEST = BLAKE3 in hexadecimal
//!   of a tensor: over its type as printed (`f32[2, 3]`), a zero byte and its bytes
//!   of a file:   over its bytes
//! ```
//!
//! A checkpoint is written under a temporary name, flushed to the disk, and then renamed. So a directory with a
//! checkpoint's name and a manifest is complete. A failed write does not harm other checkpoints.

mod writer;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use fusionllm_graph::{Advice, HostTensor, TensorType};
use serde::{Deserialize, Serialize};

pub use writer::CheckpointWriter;

use fusionllm_data::DiskError;
use fusionllm_data::weights::{Weights, WeightsError};

/// The progress of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct State {
    /// Steps done.
    pub step: u64,
    /// Updates done. Steps whose loss or gradient is not finite make no update.
    pub updates: u64,
    /// Training samples drawn: the position in the data.
    pub samples: u64,
    /// The seed of the run.
    pub seed: u64,
    /// Digest of the graph.
    pub graph: String,
    /// Digest of the data, from [`Dataset::digest`](fusionllm_data::Dataset::digest).
    pub data: String,
    /// Digest of the parameters that are not trained. The checkpoint does not have them: they are in the files that the
    /// run started from. `None` if all parameters are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<String>,
    /// Loss of the first step of the run.
    pub loss_first: Option<f64>,
}

/// One of the two tensor files of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Parameters and buffers, and what else the model keeps.
    Model,
    /// The optimizer state. The names are `PARAMETER.SLOT`, such as `wte.weight.exp_avg`.
    Optimizer,
}

impl Part {
    const ALL: [Self; 2] = [Self::Model, Self::Optimizer];

    fn file_name(self) -> &'static str {
        match self {
            Self::Model => "model.safetensors",
            Self::Optimizer => "optimizer.safetensors",
        }
    }
}

/// The reason why a checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file cannot be read or written.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// There is no checkpoint.
    #[error("{}: there is no checkpoint here", path.display())]
    Missing {
        /// The directory that was searched.
        path: PathBuf,
    },
    /// The checkpoint has another version of the layout.
    #[error("{}: the checkpoint has version {found} of the layout, but this program reads version {VERSION}", path.display())]
    Version {
        /// The checkpoint.
        path: PathBuf,
        /// Its version.
        found: u64,
    },
    /// A file is missing, incomplete, or from another checkpoint.
    #[error("{}: the checkpoint is damaged: {message}", path.display())]
    Damaged {
        /// The checkpoint.
        path: PathBuf,
        /// A description of the damage.
        message: String,
    },
    /// The checkpoint is complete, but of another model.
    #[error("{}: the checkpoint is of another model: {message}", path.display())]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor that does not fit.
        message: String,
    },
    /// A tensor or file to write is not the announced one.
    #[error("checkpoint of step {step}: {message}")]
    Unexpected {
        /// The checkpoint's step.
        step: u64,
        /// The tensor, and what is wrong.
        message: String,
    },
}

impl CheckpointError {
    /// If a checkpoint of a run is damaged, the step and the directory of the newest one before it that can be opened.
    pub fn older(&self) -> Option<(u64, PathBuf)> {
        let Self::Damaged { path, .. } = self else { return None };
        let mut all = Checkpoints::new(path.parent()?).list().ok()?;
        all.truncate(all.iter().position(|(_, other)| other == path)?);
        all.into_iter().rev().find(|(_, path)| Checkpoint::open(path).is_ok())
    }
}

impl Advice for CheckpointError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        Some(match self {
            Self::Disk(e) => return e.hint(),
            Self::Missing { .. } => {
                "give a run directory with a checkpoint in it, or a checkpoint, such as runs/0001/checkpoints/step-200"
            }
            Self::Version { .. } => "use the release that wrote it",
            Self::Damaged { .. } => "use another one; the checkpoints of a run are in its directory checkpoints/",
            Self::OtherModel { .. } => {
                "[model] and train.optimizer.name must have the settings of the run that wrote the checkpoint"
            }
            Self::Unexpected { .. } => return None,
        }.into())
    }
}

const MANIFEST: &str = "manifest.json";
const FORMAT: &str = "fusionllm-checkpoint";
const VERSION: u64 = 1;

/// The content of `manifest.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: String,
    version: u64,
    state: State,
    model: BTreeMap<String, String>,
    optimizer: BTreeMap<String, String>,
    extra: BTreeMap<String, String>,
}

impl Manifest {
    fn digests(&self, part: Part) -> &BTreeMap<String, String> {
        match part {
            Part::Model => &self.model,
            Part::Optimizer => &self.optimizer,
        }
    }
}

fn digest(tensor: &HostTensor) -> String {
    begin_digest(tensor.ty()).update(tensor.bytes()).finalize().to_hex().to_string()
}

/// The digest of a tensor of this type, before its bytes.
fn begin_digest(ty: &TensorType) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    hasher.update(ty.to_string().as_bytes()).update(&[0]);
    hasher
}

/// A tensor of a checkpoint that is read piece by piece.
#[derive(Debug)]
pub struct TensorReading {
    part: Part,
    name: String,
    ty: TensorType,
    read: usize,
    hasher: blake3::Hasher,
}

impl TensorReading {
    /// The type of the tensor.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }
}

/// The directory of a run's checkpoints.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    directory: PathBuf,
}

impl Checkpoints {
    /// The checkpoints in `directory`, which need not exist.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// Steps and directories of all checkpoints, the oldest first.
    ///
    /// # Errors
    ///
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
        let entries = match fs::read_dir(&self.directory) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(DiskError::at(&self.directory, "read"))?,
        };
        let mut found = BTreeMap::new();
        for entry in entries {
            let path = entry.map_err(DiskError::at(&self.directory, "read"))?.path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let Some(step) = name.strip_prefix("step-") else { continue };
            // A crash between the two renames of a replacement leaves only the old checkpoint.
            let (step, old) = step.strip_suffix(".old").map_or((step, false), |step| (step, true));
            let Ok(step) = step.parse::<u64>() else { continue };
            if path.join(MANIFEST).is_file() && !(old && found.contains_key(&step)) {
                found.insert(step, path);
            }
        }
        Ok(found.into_iter().collect())
    }

    /// Starts to write the checkpoint after `step` steps. `model` and `optimizer` announce all its tensors, which the
    /// caller then writes in any order. [`CheckpointWriter::commit`] finishes the checkpoint.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn begin(
        &self,
        step: u64,
        model: &[(String, TensorType)],
        optimizer: &[(String, TensorType)],
    ) -> Result<CheckpointWriter, CheckpointError> {
        CheckpointWriter::begin(&self.directory, step, model, optimizer)
    }

    /// The directory of the checkpoints.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Removes all checkpoints except the newest `keep` up to this step and the one of step `best`. One always stays.
    /// Checkpoints of later steps are void, because the run has gone back behind them.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn prune(&self, step: u64, keep: usize, best: Option<u64>) -> Result<(), CheckpointError> {
        let found = self.list()?;
        let (valid, void) = found.split_at(found.partition_point(|(s, _)| *s <= step));
        let old = valid[..valid.len().saturating_sub(keep.max(1))].iter().filter(|(step, _)| Some(*step) != best);
        for (_, path) in old.chain(void) {
            remove(path)?;
        }
        Ok(())
    }

    /// Removes incomplete checkpoints of earlier processes. It must not run while a checkpoint is being written.
    ///
    /// # Errors
    ///
    /// The disk fails.
    pub fn clean(&self) -> Result<(), DiskError> {
        let Ok(entries) = fs::read_dir(&self.directory) else { return Ok(()) };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let replaced =
                name.strip_suffix(".old").is_some_and(|new| path.with_file_name(new).join(MANIFEST).is_file());
            let ours = name.starts_with("step-");
            if ours && (name.ends_with(".partial") || replaced || !path.join(MANIFEST).exists()) {
                remove(&path)?;
            }
        }
        Ok(())
    }
}

/// Removes the directory of a checkpoint. The manifest goes first, so that a half-removed checkpoint counts as none.
fn remove(path: &Path) -> Result<(), DiskError> {
    match fs::remove_file(path.join(MANIFEST)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(DiskError::at(path, "removed")(e)),
        _ => {}
    }
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(DiskError::at(path, "removed")(e)),
        _ => Ok(()),
    }
}

/// An open checkpoint. Its manifest fits its files. Tensors are read on demand, and then checked against their
/// digests.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    model: Weights,
    optimizer: Weights,
}

impl Checkpoint {
    /// Opens the checkpoint at `path`, or the newest one of the run at `path`.
    ///
    /// # Errors
    ///
    /// There is no checkpoint, it has another version, or one of its files is missing or incomplete.
    pub fn find(path: &Path) -> Result<Self, CheckpointError> {
        if path.join(MANIFEST).exists() {
            return Self::open(path);
        }
        let mut found = Checkpoints::new(path.join("checkpoints")).list()?;
        if found.is_empty() {
            found = Checkpoints::new(path).list()?;
        }
        match found.pop() {
            Some((_, newest)) => Self::open(&newest),
            None => Err(CheckpointError::Missing { path: path.to_owned() }),
        }
    }

    /// Opens the checkpoint at `path`.
    ///
    /// # Errors
    ///
    /// The same as those of [`Self::find`].
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |message: String| CheckpointError::Damaged { path: path.to_owned(), message };
        let text = match fs::read(path.join(MANIFEST)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(CheckpointError::Missing { path: path.to_owned() });
            }
            text => text.map_err(DiskError::at(&path.join(MANIFEST), "read"))?,
        };

        // Check the version first, because other versions may have other fields.
        let bad_manifest = |e: serde_json::Error| damaged(format!("{MANIFEST}: {e}"));
        let any: serde_json::Value = serde_json::from_slice(&text).map_err(bad_manifest)?;
        match (any["format"].as_str(), any["version"].as_u64()) {
            (Some(FORMAT), Some(VERSION)) => {}
            (Some(FORMAT), Some(found)) => return Err(CheckpointError::Version { path: path.to_owned(), found }),
            _ => return Err(damaged(format!("{MANIFEST} is not a checkpoint's"))),
        }
        let manifest: Manifest = serde_json::from_value(any).map_err(bad_manifest)?;

        let weights = |part: Part| {
            let weights = Weights::open(&path.join(part.file_name())).map_err(|e| match e {
                WeightsError::Malformed { message, .. } => damaged(format!("{}: {message}", part.file_name())),
                WeightsError::Disk(e) if e.source.kind() == io::ErrorKind::NotFound => {
                    damaged(format!("{} is missing", part.file_name()))
                }
                WeightsError::Disk(e) => e.into(),
                WeightsError::OtherKind { kind, .. } => damaged(format!("{} is {}", part.file_name(), kind.name)),
                WeightsError::Absent { message, .. } | WeightsError::OtherModel { message, .. } => damaged(message),
            })?;
            let stored: Vec<&str> = weights.tensor_types().map(|(name, _)| name).collect();
            if manifest.digests(part).keys().ne(stored) {
                return Err(damaged(format!("{} is of another checkpoint", part.file_name())));
            }
            Ok(weights)
        };
        let (model, optimizer) = (weights(Part::Model)?, weights(Part::Optimizer)?);
        if let Some(name) = manifest.extra.keys().find(|name| !path.join(name).is_file()) {
            return Err(damaged(format!("{name} is missing")));
        }
        Ok(Self { path: path.to_owned(), manifest, model, optimizer })
    }

    /// The directory of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file with the tensors of a part.
    pub fn file(&self, part: Part) -> PathBuf {
        self.path.join(part.file_name())
    }

    /// The progress of the run.
    pub fn state(&self) -> &State {
        &self.manifest.state
    }

    /// Names and types of the tensors of a part, sorted by name.
    pub fn tensor_types(&self, part: Part) -> impl Iterator<Item = (&str, TensorType)> {
        self.weights(part).tensor_types()
    }

    /// Checks that a part has exactly the `expected` tensors.
    ///
    /// # Errors
    ///
    /// A tensor is missing, differs or is not expected. The error names the first one.
    pub fn check(&self, part: Part, expected: &[(String, TensorType)]) -> Result<(), CheckpointError> {
        let stored: BTreeMap<&str, TensorType> = self.tensor_types(part).collect();
        let other = |message| Err(CheckpointError::OtherModel { path: self.path.clone(), message });
        for (name, ty) in expected {
            match stored.get(name.as_str()) {
                None => return other(format!("it has no `{name}`")),
                Some(found) if found != ty => return other(format!("`{name}` is {found} there, and {ty} in the job")),
                Some(_) => {}
            }
        }
        let wanted: std::collections::BTreeSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        match stored.keys().find(|name| !wanted.contains(*name)) {
            Some(name) => other(format!("the job has no `{name}`")),
            None => Ok(()),
        }
    }

    /// Reads a tensor.
    ///
    /// # Errors
    ///
    /// It is missing, its bytes have changed since it was saved, or the disk fails.
    pub fn read(&self, part: Part, name: &str) -> Result<HostTensor, CheckpointError> {
        let damaged = |message: String| CheckpointError::Damaged { path: self.path.clone(), message };
        let tensor = self.weights(part).read(name).map_err(|e| match e {
            WeightsError::Disk(e) => e.into(),
            other => damaged(other.to_string()),
        })?;
        let other = || CheckpointError::OtherModel { path: self.path.clone(), message: format!("it has no `{name}`") };
        let tensor = tensor.ok_or_else(other)?;
        if self.manifest.digests(part).get(name) != Some(&digest(&tensor)) {
            let file = part.file_name();
            return Err(damaged(format!("`{name}` in {file} is not what was saved")));
        }
        Ok(tensor)
    }

    /// Begins to read a tensor piece by piece.
    ///
    /// # Errors
    ///
    /// It is missing.
    pub fn begin_reading(&self, part: Part, name: &str) -> Result<TensorReading, CheckpointError> {
        let other = || CheckpointError::OtherModel { path: self.path.clone(), message: format!("it has no `{name}`") };
        let ty = self.weights(part).type_of(name).ok_or_else(other)?;
        let hasher = begin_digest(&ty);
        Ok(TensorReading { part, name: name.to_owned(), ty, read: 0, hasher })
    }

    /// Reads the next piece of a tensor, of at most so many bytes. It is empty at the end.
    ///
    /// # Errors
    ///
    /// The bytes of the tensor have changed since it was saved, which is known with its last piece. Or the disk fails.
    pub fn read_piece(&self, reading: &mut TensorReading, most: usize) -> Result<Vec<u8>, CheckpointError> {
        let damaged = |message: String| CheckpointError::Damaged { path: self.path.clone(), message };
        let TensorReading { part, name, ty, read, hasher } = reading;
        let mut bytes = Vec::new();
        let read_now = self.weights(*part).append(name, *read, most.min(ty.bytes() - *read), &mut bytes);
        read_now.map_err(|e| match e {
            WeightsError::Disk(e) => e.into(),
            other => damaged(other.to_string()),
        })?;
        hasher.update(&bytes);
        *read += bytes.len();
        if *read == ty.bytes()
            && self.manifest.digests(*part).get(name) != Some(&hasher.finalize().to_hex().to_string())
        {
            return Err(damaged(format!("`{name}` in {} is not what was saved", part.file_name())));
        }
        Ok(bytes)
    }

    /// Reads a file from [`CheckpointWriter::put_extra`].
    ///
    /// # Errors
    ///
    /// It is missing, its bytes have changed since it was saved, or the disk fails.
    pub fn read_extra(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let damaged = |message: String| CheckpointError::Damaged { path: self.path.clone(), message };
        let saved = self.manifest.extra.get(name).ok_or_else(|| damaged(format!("it has no {name}")))?;
        let path = self.path.join(name);
        let content = fs::read(&path).map_err(DiskError::at(&path, "read"))?;
        if *saved != blake3::hash(&content).to_hex().as_str() {
            return Err(damaged(format!("{name} is not what was saved")));
        }
        Ok(content)
    }

    fn weights(&self, part: Part) -> &Weights {
        match part {
            Part::Model => &self.model,
            Part::Optimizer => &self.optimizer,
        }
    }
}

#[cfg(test)]
mod tests;
