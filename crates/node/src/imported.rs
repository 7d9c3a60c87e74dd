//! Models from PyTorch: an archive with its graph.

use std::collections::BTreeMap;
use std::path::Path;

use fusionllm_backend::{Backend, open};
use fusionllm_graph::{Graph, GraphError, HostTensor, Op, TensorType, Value, ValueKind};
use fusionllm_import::{Archive, ImportError, ImportOptions, Imported};

use crate::NodeError;
use crate::disk::{DiskError, write_atomic};
use crate::export::write_tensors;

impl From<ImportError> for NodeError {
    fn from(e: ImportError) -> Self {
        let mut text = e.to_string();
        if let ImportError::Unreadable { source, .. } = &e {
            text += &format!(": {source}");
        }
        if let Some(hint) = e.hint() {
            text += &format!("\n  hint: {hint}");
        }
        Self::Input(text)
    }
}

/// A `.pt2` file and the graph made of it; the tensors are read when asked for.
#[derive(Debug)]
pub struct Model {
    archive: Archive,
    imported: Imported,
}

impl Model {
    /// Reads and translates a file.
    ///
    /// # Errors
    ///
    /// It cannot be read, is damaged, or the model has what is not supported.
    pub fn open(path: &Path, options: ImportOptions) -> Result<Self, NodeError> {
        let mut archive = Archive::open(path)?;
        let backend = open("cpu")?;
        let evaluate = |op: &Op, inputs: Vec<HostTensor>, types: &[TensorType]| {
            evaluate(&*backend, op, inputs, types).map_err(|e| e.to_string())
        };
        let imported = archive.import(options, &evaluate)?;
        Ok(Self { archive, imported })
    }

    /// What was made of it.
    pub fn imported(&self) -> &Imported {
        &self.imported
    }

    /// What was made of it, without the file.
    pub fn into_imported(self) -> Imported {
        self.imported
    }

    /// What a value from outside starts as.
    ///
    /// # Errors
    ///
    /// The file can no longer be read or is damaged.
    pub fn initial(&mut self, value: &Value) -> Result<HostTensor, NodeError> {
        match (&value.kind, self.imported.graph.constants.get(&value.name)) {
            (ValueKind::Constant, Some(tensor)) => Ok(tensor.clone()),
            _ => Ok(self.archive.load(&self.imported, &value.name)?),
        }
    }

    /// Writes the graph and what it starts from into `directory`: `graph.json`, `model.safetensors` and, if there are any, `constants.safetensors`.
    ///
    /// # Errors
    ///
    /// A graph is there already, the archive is damaged, or the disk fails.
    pub fn write(&mut self, directory: &Path) -> Result<(), NodeError> {
        let file = directory.join("graph.json");
        if file.exists() {
            return Err(NodeError::Input(format!(
                "{}: there is a graph already\n  hint: choose another directory with -o, or remove that one",
                file.display()
            )));
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

    /// The archive.
    pub fn archive(&mut self) -> &mut Archive {
        &mut self.archive
    }
}

/// The graph alone, for so many samples at once.
///
/// # Errors
///
/// As [`Model::open`], as a [`GraphError::File`].
pub fn graph(path: &Path, samples: usize) -> Result<Graph, GraphError> {
    let options = ImportOptions { batch_size: Some(samples), ..ImportOptions::default() };
    Model::open(path, options).map(|m| m.imported.graph).map_err(|e| GraphError::File(e.to_string()))
}

fn evaluate(
    backend: &dyn Backend,
    op: &Op,
    inputs: Vec<HostTensor>,
    types: &[TensorType],
) -> Result<Vec<HostTensor>, fusionllm_backend::BackendError> {
    let inputs = inputs.iter().map(|t| backend.upload(t)).collect::<Result<_, _>>()?;
    backend.run(op, inputs, types)?.iter().map(|t| backend.download(t)).collect()
}
