//! The files and the seed that a model starts from.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fusionllm_data::weights::Weights;
use fusionllm_graph::{Graph, HostTensor, StateTensor, Value};
use fusionllm_workspace::config::{Family, Job, Network};

use super::imported::ImportedModel;
use super::state::{compare, state};
use super::{Model, adapters, open_imported};
use crate::WorkbenchError;

/// The state that a new run starts from. What it lacks comes from the seed.
pub struct Origin {
    /// Files of weights: those of the network, and those of its adapters.
    files: Vec<StateFile>,
    /// The archive of an imported model.
    archive: Option<Mutex<ImportedModel>>,
}

/// A file of weights, and the tensors of the model's state that it may have, by name.
pub(super) struct StateFile {
    weights: Weights,
    state: BTreeMap<String, StateTensor>,
}

impl StateFile {
    pub(super) fn new(weights: Weights, state: &[StateTensor]) -> Self {
        let named = state.iter().filter_map(|t| Some((t.names.first()?.clone(), t.clone())));
        Self { weights, state: named.collect() }
    }

    /// Reads a tensor. `None` if the file lacks it.
    pub(super) fn read(&self, name: &str) -> Result<Option<HostTensor>, WorkbenchError> {
        let tensor = self.state.get(name).map(|tensor| self.weights.state_tensor(tensor)).transpose()?;
        Ok(tensor.flatten())
    }
}

impl Origin {
    /// Opens the files that a job names, and returns notes about them. Files of weights must be of the job's model if
    /// the run is `new`.
    pub fn open(job: &Job, model: &Model, new: bool) -> Result<(Self, Vec<String>), WorkbenchError> {
        let needed = new || model.forward.frozen().next().is_some();
        let weights = job.model.weights.as_deref().filter(|path| needed || path.exists());
        if let Some(path) = weights.filter(|path| !new && !path.exists()) {
            return Err(gone(path));
        }
        let (mut files, mut archive, mut notes) = (Vec::new(), None, Vec::new());
        if let Family::Imported { file, loss } = &job.model.family {
            let imported = open_imported(file, weights, loss.as_deref(), model.micro_batch)?;
            notes = imported.warnings();
            archive = Some(Mutex::new(imported));
        } else if let Some(weights) = weights.map(Weights::open).transpose()? {
            let state = state(&job.model.family, &model.forward, &model.adapters);
            if new {
                notes = compare(&weights, &job.model.family, &state)?;
            }
            files.push(StateFile::new(weights, &state));
        }
        if let Some(path) = job.lora.as_ref().and_then(|lora| lora.weights.as_deref()) {
            let (weights, state) = (adapters::open(path)?, adapters::state(&model.forward, &model.adapters));
            if new {
                notes.extend(adapters::compare(&weights, &state)?);
            }
            files.push(StateFile::new(weights, &state));
        }
        Ok((Self { files, archive }, notes))
    }

    /// Opens the files that the network of a trained model started from, without its adapters. `graph` is the network's
    /// graph.
    pub fn of_network(network: &Network, graph: &Graph) -> Result<Self, WorkbenchError> {
        let weights = network.weights.as_deref();
        if let Some(path) = weights.filter(|path| !path.exists()) {
            return Err(gone(path));
        }
        if let Family::Imported { file, loss } = &network.family {
            let imported = open_imported(file, weights, loss.as_deref(), network.micro_batch)?;
            return Ok(Self { files: Vec::new(), archive: Some(Mutex::new(imported)) });
        }
        let state = state(&network.family, graph, &BTreeSet::new());
        let weights = weights.map(Weights::open).transpose()?;
        Ok(Self { files: weights.map(|weights| StateFile::new(weights, &state)).into_iter().collect(), archive: None })
    }

    /// Writes the archive of an imported model to a file of its run, without its parameters, which checkpoints have. So the
    /// run goes on where the archive is gone.
    ///
    /// # Errors
    ///
    /// The archive can no longer be read, or the disk fails.
    pub fn keep_graph(&self, path: &Path) -> Result<(), WorkbenchError> {
        match &self.archive {
            Some(archive) if !path.exists() => locked(archive).write_graph(path),
            _ => Ok(()),
        }
    }

    /// A digest of a graph's frozen parameters, as the files have them. `None` if there are none.
    ///
    /// # Errors
    ///
    /// A file can no longer be read.
    pub fn digest_of_frozen(&self, graph: &Graph) -> Result<Option<String>, WorkbenchError> {
        let mut hasher = blake3::Hasher::new();
        let mut any = false;
        for value in graph.frozen().map(|v| graph.value(v)) {
            any = true;
            hasher.update(value.name.as_bytes()).update(&[0]);
            let stored = match self.file_of(&value.name) {
                Some((weights, tensor)) => weights.stored_floats(tensor)?.map(|(name, _)| weights.read(&name)),
                None => None,
            };
            let content = match stored {
                Some(tensor) => tensor?,
                None => self.read(value)?,
            };
            // What no file has comes from the seed.
            if let Some(tensor) = content {
                hasher.update(tensor.ty().to_string().as_bytes()).update(&[0]).update(tensor.bytes());
            }
        }
        Ok(any.then(|| hasher.finalize().to_hex().to_string()))
    }

    /// The file that has a parameter or buffer, and the tensor there.
    pub fn file_of(&self, name: &str) -> Option<(&Weights, &StateTensor)> {
        let in_file = |file: &'_ StateFile| file.state.get(name).is_some_and(|tensor| file.weights.holds(tensor));
        let file = self.files.iter().find(|file| in_file(file))?;
        Some((&file.weights, file.state.get(name)?))
    }

    /// Whether a parameter or buffer comes from a file.
    pub fn has(&self, name: &str) -> bool {
        let in_archive = |archive: &Mutex<ImportedModel>| locked(archive).has(name);
        self.file_of(name).is_some() || self.archive.as_ref().is_some_and(in_archive)
    }

    /// Reads a parameter or buffer; `None` if it comes from the seed.
    pub fn read(&self, value: &Value) -> Result<Option<HostTensor>, WorkbenchError> {
        if let Some((weights, tensor)) = self.file_of(&value.name) {
            return Ok(weights.state_tensor(tensor)?);
        }
        let archive = self.archive.as_ref().map(|archive| locked(archive)).filter(|archive| archive.has(&value.name));
        archive.map(|mut archive| archive.initial(value)).transpose()
    }
}

/// The error for weights that a run started from and still needs.
fn gone(path: &Path) -> WorkbenchError {
    WorkbenchError::input_with_hint(
        format!("{}: the weights that the run started from are not there", path.display()),
        "put them back; a run goes on with them from elsewhere with --resume RUN --set model.weights=PATH",
    )
}

fn locked(archive: &Mutex<ImportedModel>) -> MutexGuard<'_, ImportedModel> {
    archive.lock().unwrap_or_else(PoisonError::into_inner)
}
