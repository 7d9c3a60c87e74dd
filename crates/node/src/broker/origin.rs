//! The tensors that the broker has: those that a run starts from, and its checkpoints.

use std::sync::{Arc, Mutex, PoisonError};

use fusionllm_graph::{HostTensor, Value, ValueKind};

use fusionllm_data::weights::Weights;
use fusionllm_plan::TensorKey;
use fusionllm_workspace::checkpoint::{Checkpoint, Part};

use crate::NodeError;
use crate::model::Model;
use crate::model::imported::ImportedModel;

/// The files that a new run starts from, besides its seed.
pub(super) struct Origin {
    /// The archive that an imported model starts from.
    pub(super) source: Option<Mutex<ImportedModel>>,
    /// The weights that a model starts from.
    pub(super) weights: Option<Weights>,
}

/// The tensors that the broker sends for one generation.
pub(super) struct Contents {
    pub(super) origin: Arc<Origin>,
    pub(super) model: Arc<Model>,
    /// The checkpoint that the generation starts from; `None` for one that starts from members' copies, or from the
    /// beginning.
    pub(super) checkpoint: Option<Arc<Checkpoint>>,
}

impl Contents {
    /// Whether the broker sends this tensor. A new run draws all others from its seed.
    pub(super) fn has(&self, key: &TensorKey, value: &Value) -> bool {
        let saved = self.checkpoint.is_some();
        match (&key.slot, &value.kind) {
            (Some(_), _) => saved,
            (None, ValueKind::Constant) => true,
            (None, ValueKind::Parameter(_)) => saved || self.origin.source.is_some() || self.origin.weights.is_some(),
            (None, _) => saved || self.origin.source.is_some(),
        }
    }

    /// Reads a tensor from the model's constants, the checkpoint, the imported archive or the weights file.
    pub(super) fn read(&self, key: &TensorKey) -> Result<HostTensor, NodeError> {
        let name = key.name.as_str();
        if let Some(constant) = self.model.train.graph.constants.get(name) {
            return Ok(constant.clone());
        }
        if let Some(checkpoint) = &self.checkpoint {
            return Ok(match &key.slot {
                None => checkpoint.read(Part::Model, name)?,
                Some(slot) => checkpoint.read(Part::Optimizer, &format!("{name}.{slot}"))?,
            });
        }
        let value = self.model.forward.find(name);
        if let (Some(source), Some(v)) = (&self.origin.source, value) {
            let value = self.model.forward.value(v);
            // A weights file holds parameters only, so buffers still come from the archive.
            if self.origin.weights.is_none() || !matches!(value.kind, ValueKind::Parameter(_)) {
                return source.lock().unwrap_or_else(PoisonError::into_inner).initial(value);
            }
        }
        match (&self.origin.weights, value) {
            (Some(weights), Some(v)) => Ok(weights.parameter(name, self.model.forward.ty(v))?),
            _ => Err(NodeError::State(format!("nothing says what {name:?} starts as"))),
        }
    }
}
