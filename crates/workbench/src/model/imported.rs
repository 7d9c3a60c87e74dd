//! Models from PyTorch's `torch.export`.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;

use fusionllm_backend::{Backend, BackendError, open};
use fusionllm_data::weights::Weights;
use fusionllm_data::{DiskError, FileKind, Role, write_atomic, write_tensors};
use fusionllm_graph::{Graph, HostTensor, Op, StateTensor, TensorType, Value, ValueId, ValueKind};
use fusionllm_import::{Archive, ImportOptions, Imported, State, StateError};

use super::state::notes;
use crate::WorkbenchError;

/// A `.pt2` archive and its graph. Tensors are read when needed.
#[derive(Debug)]
pub struct ImportedModel {
    archive: Archive,
    imported: Imported,
    /// How the file that its state comes from differs from it.
    differences: Vec<String>,
}

/// A file of weights that replaces the state of an archive.
struct Replacement(Weights);

impl State for Replacement {
    fn tensor(&self, tensor: &StateTensor) -> Result<Option<HostTensor>, StateError> {
        Ok(self.0.state_tensor(tensor)?)
    }
}

impl ImportedModel {
    /// Reads and translates an archive. Its parameters and buffers are those of the file `weights`, where that has them.
    ///
    /// # Errors
    ///
    /// The archive cannot be read, is damaged, or uses operators that are not supported. Or the weights are of another
    /// model.
    pub fn open(path: &Path, weights: Option<&Path>, options: ImportOptions) -> Result<Self, WorkbenchError> {
        if let Some(kind) = FileKind::at(path, Role::Archive) {
            return Err(WorkbenchError::input_with_hint(
                format!("{}: this is {}, not {}", path.display(), kind.name, Role::Archive),
                kind.hint(Role::Archive, path),
            ));
        }
        let mut archive = Archive::open(path)?;
        let mut differences = Vec::new();
        if let Some(weights) = weights.map(Weights::open).transpose()? {
            differences = notes(&weights, weights.compare(&archive.state_dict()?)?, "in the archive");
            archive.replace_state(Replacement(weights));
        }
        let backend = open("cpu")?;
        let imported = archive.import(options, &|op, inputs, types| evaluate(&*backend, op, inputs, types))?;
        Ok(Self { archive, imported, differences })
    }

    /// The warnings that the user should read about the archive and its weights, where they are first used.
    pub fn warnings(&self) -> Vec<String> {
        let loss = self.imported.choice_of_loss();
        let warnings = self.archive.warning().into_iter().chain(loss).chain(unread_inputs(&self.imported.graph));
        warnings.chain(self.differences.iter().cloned()).collect()
    }

    /// The translated model.
    pub fn imported(&self) -> &Imported {
        &self.imported
    }

    /// The translated model, without the archive.
    pub fn into_imported(self) -> Imported {
        self.imported
    }

    /// Whether the archive has the first content of a parameter or buffer.
    pub fn has(&self, name: &str) -> bool {
        self.imported.graph.find(name).is_some_and(|v| self.imported.graph.value(v).kind.init().is_some())
    }

    /// The first content of a value.
    ///
    /// # Errors
    ///
    /// The archive or its weights can no longer be read, or are damaged.
    pub fn initial(&mut self, value: &Value) -> Result<HostTensor, WorkbenchError> {
        match (&value.kind, self.imported.graph.constants.get(&value.name)) {
            (ValueKind::Constant, Some(tensor)) => Ok(tensor.clone()),
            _ => Ok(self.archive.load(&self.imported, &value.name)?),
        }
    }

    /// Writes the graph and its tensors into `directory`: `graph.json`, `model.safetensors` and, if needed,
    /// `constants.safetensors`.
    ///
    /// # Errors
    ///
    /// The directory holds a graph, the archive is damaged, or the disk fails.
    pub fn write(&mut self, directory: &Path) -> Result<(), WorkbenchError> {
        let file = directory.join("graph.json");
        if file.exists() {
            return Err(WorkbenchError::input_with_hint(
                format!("{}: there is a graph already", file.display()),
                "choose another directory with -o, or remove that one",
            ));
        }
        std::fs::create_dir_all(directory).map_err(DiskError::at(directory, "made"))?;
        let Imported { graph, .. } = &self.imported;
        let state = graph.parameters().chain(graph.buffers()).map(|v| graph.value(v).name.clone());
        let mut tensors = BTreeMap::new();
        for name in state {
            let tensor = self.archive.load(&self.imported, &name)?;
            tensors.insert(name, tensor);
        }
        write_tensors(&directory.join("model.safetensors"), &tensors)?;
        drop(tensors);
        if !graph.constants.is_empty() {
            write_tensors(&directory.join("constants.safetensors"), &graph.constants)?;
        }
        Ok(write_atomic(&file, graph.to_json()?.as_bytes())?)
    }

    /// Writes the archive without the content of the model's parameters.
    ///
    /// # Errors
    ///
    /// The archive is damaged, or the disk fails.
    pub fn write_graph(&mut self, path: &Path) -> Result<(), WorkbenchError> {
        let mut bytes = Cursor::new(Vec::new());
        self.archive.write_without_parameters(&self.imported, &mut bytes)?;
        Ok(write_atomic(path, bytes.get_ref())?)
    }

    /// The archive.
    pub fn archive(&mut self) -> &mut Archive {
        &mut self.archive
    }
}

/// The warning about inputs that no operator reads. A language model that was exported with one tensor as its tokens
/// and as its labels trains to repeat its labels.
fn unread_inputs(graph: &Graph) -> Option<String> {
    let is_read = |v: &ValueId| graph.nodes.iter().any(|n| n.inputs.contains(v));
    let unread: Vec<String> =
        graph.inputs().filter(|v| !is_read(v)).map(|v| format!("`{}`", graph.value(v).name)).collect();
    (!unread.is_empty()).then(|| {
        format!(
            "{}: the model does not read {}. If torch.export.export got one tensor for two arguments, it took both for \
             the same input: export again with x.clone() for one of them",
            graph.name,
            unread.join(", ")
        )
    })
}

/// Runs one operator on tensors of the host.
pub fn evaluate(
    backend: &dyn Backend,
    op: &Op,
    inputs: Vec<HostTensor>,
    types: &[TensorType],
) -> Result<Vec<HostTensor>, String> {
    let run = || -> Result<Vec<HostTensor>, BackendError> {
        let inputs = inputs.iter().map(|t| backend.upload(t)).collect::<Result<_, _>>()?;
        backend.run(op, inputs, types)?.iter().map(|t| backend.download(t)).collect()
    };
    run().map_err(|e| e.to_string())
}
