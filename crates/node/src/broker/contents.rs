//! The tensors that the broker sends: those that a run starts from, and those of its checkpoints.

use std::sync::Arc;

use bytes::Bytes;
use fusionllm_graph::{HostTensor, TensorType, Value, ValueKind};
use fusionllm_program::TensorKey;
use fusionllm_workbench::WorkbenchError;
use fusionllm_workbench::model::{Model, Origin};
use fusionllm_workspace::checkpoint::{Checkpoint, Part, TensorReading};

use crate::NodeError;
use crate::net::PIECE_BYTES;

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
            (None, ValueKind::Frozen(_)) => self.origin.has(&value.name),
            (None, _) => saved || self.origin.has(&value.name),
        }
    }

    /// The checkpoint, if it has this tensor. It has none that never changes.
    fn checkpoint_of(&self, key: &TensorKey) -> Option<&Checkpoint> {
        let forward = &self.model.forward;
        let is_frozen = |v| key.slot.is_none() && matches!(forward.value(v).kind, ValueKind::Frozen(_));
        self.checkpoint.as_deref().filter(|_| !forward.find(&key.name).is_some_and(is_frozen))
    }

    /// The bytes that are read of a tensor of type `ty`.
    pub(super) fn bytes(&self, key: &TensorKey, ty: &TensorType) -> usize {
        let file = self.origin.file_of(&key.name).filter(|_| self.checkpoint_of(key).is_none());
        let stored = file.map(|(weights, tensor)| weights.stored_floats(tensor));
        // What cannot be read is reported when it is read.
        stored.and_then(Result::ok).flatten().map_or(ty.bytes(), |(_, stored)| stored.bytes())
    }

    /// Begins to read a tensor from the model's constants, the checkpoint, the imported archive or the weights file.
    /// Floats of a file of weights come in the element type of the file.
    pub(super) fn begin(&self, key: &TensorKey) -> Result<Reading, NodeError> {
        let name = key.name.as_str();
        if let Some(constant) = self.model.train.graph.constants.get(name) {
            return Ok(Reading::whole(constant.clone()));
        }
        if let Some(checkpoint) = self.checkpoint_of(key) {
            let reading = match &key.slot {
                None => checkpoint.begin_reading(Part::Model, name)?,
                Some(slot) => checkpoint.begin_reading(Part::Optimizer, &format!("{name}.{slot}"))?,
            };
            return Ok(Reading { ty: reading.ty().clone(), read: 0, from: Content::Checkpoint(Box::new(reading)) });
        }
        if let Some((weights, tensor)) = self.origin.file_of(name)
            && let Some((stored, ty)) = weights.stored_floats(tensor).map_err(WorkbenchError::from)?
        {
            return Ok(Reading { ty, read: 0, from: Content::Weights { of: name.to_owned(), stored } });
        }
        let value = self.model.forward.find(name).map(|v| self.model.forward.value(v));
        let tensor = value.map(|value| self.origin.read(value)).transpose()?.flatten();
        let tensor = tensor.ok_or_else(|| NodeError::State(format!("nothing says what {name:?} starts as")))?;
        Ok(Reading::whole(tensor))
    }

    /// Reads the next piece of a tensor. It is empty at the end.
    pub(super) fn next(&self, reading: &mut Reading) -> Result<Bytes, NodeError> {
        let length = (reading.ty.bytes() - reading.read).min(PIECE_BYTES);
        let lost = || NodeError::State("a tensor has no source any more".into());
        let piece = match &mut reading.from {
            Content::Whole(bytes) => bytes.split_to(length),
            Content::Checkpoint(reading) => {
                let checkpoint = self.checkpoint.as_ref().ok_or_else(lost)?;
                checkpoint.read_piece(reading, length)?.into()
            }
            Content::Weights { of, stored } => {
                let (weights, _) = self.origin.file_of(of).ok_or_else(lost)?;
                let mut bytes = Vec::with_capacity(length);
                weights.append(stored, reading.read, length, &mut bytes).map_err(WorkbenchError::from)?;
                bytes.into()
            }
        };
        reading.read += piece.len();
        Ok(piece)
    }
}

/// A tensor that is read piece by piece.
pub(super) struct Reading {
    /// The type in which it is read.
    pub(super) ty: TensorType,
    /// Bytes that are read.
    pub(super) read: usize,
    from: Content,
}

/// Where the bytes of a tensor come from.
enum Content {
    Whole(Bytes),
    Checkpoint(Box<TensorReading>),
    /// A file of weights that has the tensor `of` under the name `stored`.
    Weights {
        of: String,
        stored: String,
    },
}

impl Reading {
    fn whole(tensor: HostTensor) -> Self {
        Self { ty: tensor.ty().clone(), read: 0, from: Content::Whole(tensor.into_bytes().into()) }
    }
}
