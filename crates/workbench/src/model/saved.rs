//! Trained models on disk: from a run, a checkpoint or Hugging Face.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fusionllm_data::ChatTemplate;
use fusionllm_data::weights::Weights;
use fusionllm_graph::lora::LinearLayer;
use fusionllm_graph::{Graph, HostTensor, StateTensor, TensorType};
use fusionllm_workspace::checkpoint::{Checkpoint, Part};
use fusionllm_workspace::config::{Lora, Network};
use fusionllm_workspace::run_dir::best_checkpoint;

use super::adapters::PEFT_CONFIG;
use super::origin::{Origin, StateFile};
use super::state::names;
use super::{adapters, forward};
use crate::WorkbenchError;

fn has(checkpoint: &Checkpoint, name: &str) -> bool {
    checkpoint.tensor_types(Part::Model).any(|(stored, _)| stored == name)
}

/// A network and its tensors, which are read when needed.
pub struct SavedModel {
    /// The network.
    pub network: Network,
    path: PathBuf,
    tensors: Tensors,
    adapters: Option<SavedAdapters>,
}

enum Tensors {
    Checkpoint(Box<Checkpoint>, Option<Box<Base>>),
    Published(Weights),
}

/// The frozen parameters of a run that trained a part of its model.
struct Base {
    origin: Origin,
    graph: Graph,
    seed: u64,
}

/// Adapters beside a model's weights.
struct SavedAdapters {
    /// The linear layers of the network.
    layers: Vec<LinearLayer>,
    /// Those with adapters, by the names of their weights.
    adapted: BTreeMap<String, LinearLayer>,
    scale: f64,
    /// The file with the matrices. Otherwise, they are in the checkpoint.
    file: Option<StateFile>,
}

impl SavedAdapters {
    /// The adapters that a run trained. `graph` is the network's graph without them.
    fn of_run(lora: &Lora, graph: &Graph) -> Result<Self, WorkbenchError> {
        let named = adapters::targets(lora, graph)?.into_iter();
        let adapted = named.map(|layer| (graph.value(layer.weight).name.clone(), layer)).collect();
        Ok(Self { layers: graph.linear_layers(), adapted, scale: lora.adapters().scale, file: None })
    }

    /// Adapters that PEFT or an export wrote.
    fn of_folder(folder: &Path, network: &Network) -> Result<Self, WorkbenchError> {
        let lora = Lora::of_peft(folder)?;
        let graph = forward(&network.family, 1, 1)?.freeze(|_| true);
        let mut found = Self::of_run(&lora, &graph)?;
        let layers: Vec<LinearLayer> = found.adapted.values().cloned().collect();
        let names = layers.iter().flat_map(LinearLayer::adapter_names).collect();
        let weights = adapters::open(folder)?;
        let state = adapters::state(&graph.with_adapters(&lora.adapters(), &layers)?, &names);
        if let Some(difference) = adapters::compare(&weights, &state)?.into_iter().next() {
            return Err(WorkbenchError::input_with_hint(difference, "give adapters of this model"));
        }
        found.file = Some(StateFile::new(weights, &state));
        Ok(found)
    }
}

impl Base {
    /// The base of a checkpoint, which must be the one that the run started from. `None` if the run trained the whole
    /// model.
    fn open(network: &Network, checkpoint: &Checkpoint) -> Result<Option<Self>, WorkbenchError> {
        let digest = &checkpoint.state().frozen;
        if digest.is_none() && network.lora.is_none() {
            return Ok(None);
        }
        let graph = forward(&network.family, 1, 1)?.freeze(|name| network.freezes(name));
        let origin = Origin::of_network(network, &graph)?;
        if origin.digest_of_frozen(&graph)? != *digest {
            return Err(WorkbenchError::input_with_hint(
                format!("{}: the weights that the run started from have changed since", checkpoint.path().display()),
                "restore the files of model.weights or model.file",
            ));
        }
        Ok(Some(Self { origin, seed: checkpoint.state().seed, graph }))
    }

    /// Reads a frozen parameter.
    fn read(&self, name: &str) -> Result<HostTensor, WorkbenchError> {
        let absent = || WorkbenchError::State(format!("{name} is not there"));
        let value = self.graph.find(name).map(|v| self.graph.value(v)).ok_or_else(absent)?;
        match self.origin.read(value)? {
            Some(tensor) => Ok(tensor),
            None => Ok(value.kind.init().ok_or_else(absent)?.draw(self.seed, name, &value.ty)?),
        }
    }
}

impl SavedModel {
    /// Opens the newest checkpoint of the run at `path` (the best one, if its job keeps that), the checkpoint at `path`,
    /// or a directory from Hugging Face with `config.json` and `model.safetensors`. `adapters` is a folder with adapters
    /// that are added to its weights.
    ///
    /// # Errors
    ///
    /// There is no model, or it is damaged. The adapters are those of another model.
    pub fn open(path: &Path, adapters: Option<&Path>) -> Result<Self, WorkbenchError> {
        if !path.is_dir() {
            let problem = if path.exists() { "is no directory" } else { "is not there" };
            return Err(WorkbenchError::input_with_hint(
                format!("{}: this checkpoint {problem}", path.display()),
                "give a run directory such as runs/0001, a checkpoint in it, or a directory from Hugging Face",
            ));
        }
        if adapters.is_none() && path.join(PEFT_CONFIG).is_file() && !path.join("config.json").exists() {
            return Err(WorkbenchError::input_with_hint(
                format!("{}: here are adapters, and no model that they are for", path.display()),
                "give the model's folder, and this one with --adapter",
            ));
        }
        let published = path.join("config.json").is_file() && !path.join("manifest.json").exists();
        let mut tensors = if published {
            Tensors::Published(Weights::open(path)?)
        } else {
            Tensors::Checkpoint(Box::new(Self::checkpoint(path)?), None)
        };
        let at = match &tensors {
            Tensors::Checkpoint(checkpoint, _) => checkpoint.path().to_owned(),
            Tensors::Published(_) => path.to_owned(),
        };
        let network = Network::at(&at)?;
        if let Tensors::Checkpoint(checkpoint, base) = &mut tensors {
            *base = Base::open(&network, checkpoint)?.map(Box::new);
        }
        let adapters = match (adapters, &network.lora, &tensors) {
            (Some(_), Some(_), _) => {
                return Err(WorkbenchError::input_with_hint(
                    format!("{}: this run has trained adapters of its own", path.display()),
                    "leave --adapter out, or add it to what `fusionllm export --merge` writes",
                ));
            }
            (Some(folder), None, _) => Some(SavedAdapters::of_folder(folder, &network)?),
            (None, Some(lora), Tensors::Checkpoint(_, Some(base))) => Some(SavedAdapters::of_run(lora, &base.graph)?),
            (None, ..) => None,
        };
        Ok(Self { network, path: at, tensors, adapters })
    }

    /// The checkpoint at `path`. Of a run, it is the newest one, or the best one if the job keeps that.
    fn checkpoint(path: &Path) -> Result<Checkpoint, WorkbenchError> {
        let is_run = path.join("job.toml").is_file() && !path.join("manifest.json").is_file();
        if is_run
            && Network::at(path)?.keep_best
            && let Some((_, best)) = best_checkpoint(path)?
        {
            return Ok(Checkpoint::open(&best)?);
        }
        Ok(Checkpoint::find(path)?)
    }

    /// The directory of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The steps that it was trained for, if known.
    pub fn step(&self) -> Option<u64> {
        match &self.tensors {
            Tensors::Checkpoint(checkpoint, _) => Some(checkpoint.state().step),
            Tensors::Published(_) => None,
        }
    }

    /// The template for chats: the one that the model's run keeps, or that of its folder. `None` if there is none, or
    /// the tokenizer is unknown.
    ///
    /// # Errors
    ///
    /// A file of a template cannot be used.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, WorkbenchError> {
        let Some(tokenizer) = &self.network.tokenizer else { return Ok(None) };
        // A checkpoint is at RUN/checkpoints/step-N.
        let runs = self.path.ancestors().take(3).map(|path| path.join("tokenizer"));
        let own = tokenizer.files().into_iter().filter_map(|(_, file)| file.parent().map(Path::to_owned));
        let folders = own.take(1).chain([self.path.clone()]).chain(runs).chain(self.network.weights.clone());
        for folder in folders.filter(|folder| folder.is_dir()) {
            if let Some(template) = ChatTemplate::find(&folder, tokenizer)? {
                return Ok(Some(template));
            }
        }
        Ok(None)
    }

    /// Whether it has a tensor of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        match &self.tensors {
            Tensors::Published(weights) => weights.tensor_types().any(|(stored, _)| stored == name),
            Tensors::Checkpoint(checkpoint, _) => has(checkpoint, name),
        }
    }

    /// The network's linear layers, and which of them a run trained adapters for. `None` if it trained none.
    pub(super) fn adapted_layers(&self) -> Option<adapters::AdaptedLayers> {
        let own = self.adapters.as_ref()?;
        let is_adapted = |layer: &LinearLayer| own.adapted.values().any(|other| other.name == layer.name);
        let layers = own.layers.iter().map(|layer| (layer.clone(), is_adapted(layer)));
        Some(adapters::AdaptedLayers(layers.collect()))
    }

    /// Reads a matrix of an adapter.
    ///
    /// # Errors
    ///
    /// It is missing or damaged.
    pub(super) fn read_adapter(&self, name: &str) -> Result<HostTensor, WorkbenchError> {
        let absent = || WorkbenchError::State(format!("{name} is not there"));
        match (self.adapters.as_ref().and_then(|adapters| adapters.file.as_ref()), &self.tensors) {
            (Some(file), _) => file.read(name)?.ok_or_else(absent),
            (None, Tensors::Checkpoint(checkpoint, _)) => Ok(checkpoint.read(Part::Model, name)?),
            (None, Tensors::Published(_)) => Err(absent()),
        }
    }

    /// Reads a parameter or buffer. Adapters are added to the weights beside them.
    ///
    /// # Errors
    ///
    /// It is missing, has another type, or is damaged.
    pub fn read(&self, name: &str, ty: &TensorType) -> Result<HostTensor, WorkbenchError> {
        let tensor = self.read_without_adapter(name, ty)?;
        let adapted = self.adapters.as_ref().and_then(|adapters| Some((adapters.scale, adapters.adapted.get(name)?)));
        let Some((scale, layer)) = adapted else { return Ok(tensor) };
        let [a, b] = layer.adapter_names();
        let matrices = [self.read_adapter(&a)?, self.read_adapter(&b)?];
        adapters::merged(&tensor, matrices.each_ref(), scale, layer.transposed)
    }

    fn read_without_adapter(&self, name: &str, ty: &TensorType) -> Result<HostTensor, WorkbenchError> {
        match &self.tensors {
            Tensors::Published(weights) => {
                let names = names(&self.network.family, name);
                let tensor = StateTensor { names, ty: ty.clone(), trained: true };
                weights.state_tensor(&tensor)?.ok_or_else(|| WorkbenchError::State(format!("{name} is not there")))
            }
            Tensors::Checkpoint(checkpoint, base) => {
                let tensor = match base {
                    Some(base) if !has(checkpoint, name) => base.read(name)?,
                    _ => checkpoint.read(Part::Model, name)?,
                };
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
