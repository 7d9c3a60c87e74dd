//! Trained models on disk: from a run, a checkpoint or Hugging Face.

use std::path::{Path, PathBuf};

use fusionllm_data::weights::Weights;
use fusionllm_graph::{HostTensor, StateTensor, TensorType};
use fusionllm_workspace::checkpoint::{Checkpoint, Part};
use fusionllm_workspace::config::Network;

use super::state::names;
use crate::WorkbenchError;

/// A network and its tensors, which are read when needed.
pub struct SavedModel {
    /// The network.
    pub network: Network,
    path: PathBuf,
    tensors: Tensors,
}

enum Tensors {
    Checkpoint(Box<Checkpoint>),
    Published(Weights),
}

impl SavedModel {
    /// Opens the newest checkpoint of the run at `path`, the checkpoint at `path`, or a directory from Hugging Face
    /// with `config.json` and `model.safetensors`.
    ///
    /// # Errors
    ///
    /// There is no model, or it is damaged.
    pub fn open(path: &Path) -> Result<Self, WorkbenchError> {
        if !path.is_dir() {
            let problem = if path.exists() { "is no directory" } else { "is not there" };
            return Err(WorkbenchError::input_with_hint(
                format!("{}: this checkpoint {problem}", path.display()),
                "give a run directory such as runs/0001, a checkpoint in it, or a directory from Hugging Face",
            ));
        }
        let published = path.join("config.json").is_file() && !path.join("manifest.json").exists();
        let tensors = if published {
            Tensors::Published(Weights::open(path)?)
        } else {
            Tensors::Checkpoint(Box::new(Checkpoint::find(path)?))
        };
        let at = match &tensors {
            Tensors::Checkpoint(checkpoint) => checkpoint.path(),
            Tensors::Published(_) => path,
        };
        let network = Network::at(at)?;
        Ok(Self { network, path: at.to_owned(), tensors })
    }

    /// The directory of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The steps that it was trained for, if known.
    pub fn step(&self) -> Option<u64> {
        match &self.tensors {
            Tensors::Checkpoint(checkpoint) => Some(checkpoint.state().step),
            Tensors::Published(_) => None,
        }
    }

    /// Whether it has a tensor of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        match &self.tensors {
            Tensors::Published(weights) => weights.tensor_types().any(|(stored, _)| stored == name),
            Tensors::Checkpoint(checkpoint) => checkpoint.tensor_types(Part::Model).any(|(stored, _)| stored == name),
        }
    }

    /// Reads a parameter or buffer.
    ///
    /// # Errors
    ///
    /// It is missing, has another type, or is damaged.
    pub fn read(&self, name: &str, ty: &TensorType) -> Result<HostTensor, WorkbenchError> {
        match &self.tensors {
            Tensors::Published(weights) => {
                let names = names(&self.network.family, name);
                let tensor = StateTensor { names, ty: ty.clone(), trained: true };
                weights.state_tensor(&tensor)?.ok_or_else(|| WorkbenchError::State(format!("{name} is not there")))
            }
            Tensors::Checkpoint(checkpoint) => {
                let tensor = checkpoint.read(Part::Model, name)?;
                if tensor.ty() != ty {
                    return Err(WorkbenchError::input_with_hint(
                        format!(
                            "{}: `{name}` is {} in the checkpoint, but {ty} in the model beside it",
                            self.path.display(),
                            tensor.ty()
                        ),
                        "use another checkpoint",
                    ));
                }
                Ok(tensor)
            }
        }
    }
}
