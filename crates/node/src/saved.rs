//! Trained models on disk: a run's, a checkpoint's, or one from Hugging Face.

use std::path::{Path, PathBuf};

use fusionllm_graph::{HostTensor, TensorType};

use crate::NodeError;
use crate::checkpoint::{Checkpoint, Part};
use crate::config::Network;
use crate::weights::Weights;

/// A network and its tensors, which are read when asked for.
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
    /// The newest checkpoint of the run at `path`, the checkpoint at `path`, or the model in a directory as Hugging
    /// Face publishes them (`config.json` and `model.safetensors`).
    ///
    /// # Errors
    ///
    /// There is none, or it is damaged.
    pub fn open(path: &Path) -> Result<Self, NodeError> {
        if !path.is_dir() {
            let problem = if path.exists() { "is no directory" } else { "is not there" };
            return Err(NodeError::Input(format!(
                "{}: this checkpoint {problem}\n  hint: give a run directory such as runs/0001, a checkpoint in it, or a directory from Hugging Face",
                path.display()
            )));
        }
        let weights = path.join("model.safetensors");
        let published = path.join("config.json").is_file() && !path.join("manifest.json").exists();
        let tensors = if published {
            if !weights.is_file() {
                return Err(NodeError::Input(format!(
                    "{}: is missing\n  hint: fetch the model with its weights in one safetensors file",
                    weights.display()
                )));
            }
            Tensors::Published(Weights::open(&weights)?)
        } else {
            Tensors::Checkpoint(Box::new(Checkpoint::find(path)?))
        };
        let at = match &tensors {
            Tensors::Checkpoint(checkpoint) => checkpoint.path(),
            Tensors::Published(_) => path,
        };
        let network = Network::at(at).map_err(|e| NodeError::Input(e.to_string()))?;
        Ok(Self { network, path: at.to_owned(), tensors })
    }

    /// The checkpoint's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Steps it was trained for, where that is known.
    pub fn step(&self) -> Option<u64> {
        match &self.tensors {
            Tensors::Checkpoint(checkpoint) => Some(checkpoint.state().step),
            Tensors::Published(_) => None,
        }
    }

    /// The parameter or buffer of this name and type.
    ///
    /// # Errors
    ///
    /// It is missing, of another type, or damaged.
    pub fn read(&self, name: &str, ty: &TensorType) -> Result<HostTensor, NodeError> {
        match &self.tensors {
            Tensors::Published(weights) => Ok(weights.parameter(name, ty)?),
            Tensors::Checkpoint(checkpoint) => {
                let tensor = checkpoint.read(Part::Model, name)?;
                if tensor.ty() != ty {
                    return Err(NodeError::Input(format!(
                        "{}: `{name}` is {} in the checkpoint, but {ty} in the model beside it\n  hint: use another checkpoint",
                        self.path.display(),
                        tensor.ty()
                    )));
                }
                Ok(tensor)
            }
        }
    }
}
