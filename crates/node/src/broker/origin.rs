//! The tensors that the broker has: those that a run starts from, and its checkpoints.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use fusionllm_data::weights::Weights;
use fusionllm_graph::{HostTensor, StateTensor, TensorType, Value, ValueKind};
use fusionllm_program::TensorKey;
use fusionllm_workbench::WorkbenchError;
use fusionllm_workbench::model::imported::ImportedModel;
use fusionllm_workbench::model::state::{compare, state};
use fusionllm_workbench::model::{Model, open_imported};
use fusionllm_workspace::checkpoint::{Checkpoint, Part, TensorReading};
use fusionllm_workspace::config::{Family, Job};

use crate::NodeError;
use crate::net::PIECE_BYTES;

/// The state that a new run starts from. What it lacks comes from the seed.
pub(super) enum Origin {
    /// Nothing but the seed.
    Seed,
    /// A file of weights, and the tensors of the model's state by name.
    Weights(Weights, BTreeMap<String, StateTensor>),
    /// The archive of an imported model.
    Archive(Box<Mutex<ImportedModel>>),
}

impl Origin {
    /// Opens the files that a job names, and returns notes about them. A file of weights must be of the job's model if
    /// the run is `new`.
    pub(super) fn open(job: &Job, model: &Model, new: bool) -> Result<(Self, Vec<String>), NodeError> {
        let weights = job.model.weights.as_deref();
        if let Family::Imported { file, loss } = &job.model.family {
            let archive = open_imported(file, weights, loss.as_deref(), model.micro_batch)?;
            let notes = archive.warnings();
            return Ok((Self::Archive(Box::new(Mutex::new(archive))), notes));
        }
        let Some(weights) = weights.map(Weights::open).transpose()? else { return Ok((Self::Seed, Vec::new())) };
        let notes = if new { compare(&weights, &job.model.family, &model.forward)? } else { Vec::new() };
        let state = state(&job.model.family, &model.forward).filter_map(|t| Some((t.names.first()?.clone(), t)));
        Ok((Self::Weights(weights, state.collect()), notes))
    }

    /// Whether a parameter or buffer comes from a file.
    fn has(&self, name: &str) -> bool {
        match self {
            Self::Seed => false,
            Self::Weights(weights, state) => state.get(name).is_some_and(|tensor| weights.holds(tensor)),
            Self::Archive(_) => true,
        }
    }

    /// Reads a parameter or buffer; `None` if it comes from the seed.
    pub(super) fn read(&self, value: &Value) -> Result<Option<HostTensor>, WorkbenchError> {
        match self {
            Self::Seed => Ok(None),
            Self::Weights(weights, state) => match state.get(&value.name) {
                Some(tensor) => Ok(weights.state_tensor(tensor)?),
                None => Ok(None),
            },
            Self::Archive(archive) => archive.lock().unwrap_or_else(PoisonError::into_inner).initial(value).map(Some),
        }
    }
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
            (None, _) => saved || self.origin.has(&value.name),
        }
    }

    /// The bytes that are read of a tensor of type `ty`.
    pub(super) fn bytes(&self, key: &TensorKey, ty: &TensorType) -> usize {
        let stored = match (&*self.origin, &self.checkpoint) {
            (Origin::Weights(weights, state), None) => state.get(&key.name).map(|tensor| weights.stored_floats(tensor)),
            _ => None,
        };
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
        if let Some(checkpoint) = &self.checkpoint {
            let reading = match &key.slot {
                None => checkpoint.begin_reading(Part::Model, name)?,
                Some(slot) => checkpoint.begin_reading(Part::Optimizer, &format!("{name}.{slot}"))?,
            };
            return Ok(Reading { ty: reading.ty().clone(), read: 0, from: Content::Checkpoint(Box::new(reading)) });
        }
        if let Origin::Weights(weights, state) = &*self.origin
            && let Some(tensor) = state.get(name)
            && let Some((stored, ty)) = weights.stored_floats(tensor).map_err(WorkbenchError::from)?
        {
            return Ok(Reading { ty, read: 0, from: Content::Weights(stored) });
        }
        let value = self.model.forward.find(name).map(|v| self.model.forward.value(v));
        let tensor = value.map(|value| self.origin.read(value)).transpose()?.flatten();
        let tensor = tensor.ok_or_else(|| NodeError::State(format!("nothing says what {name:?} starts as")))?;
        Ok(Reading::whole(tensor))
    }

    /// Reads the next piece of a tensor. It is empty at the end.
    pub(super) fn next(&self, reading: &mut Reading) -> Result<Bytes, NodeError> {
        let length = (reading.ty.bytes() - reading.read).min(PIECE_BYTES);
        let piece = match (&mut reading.from, &self.checkpoint, &*self.origin) {
            (Content::Whole(bytes), ..) => bytes.split_to(length),
            (Content::Checkpoint(reading), Some(checkpoint), _) => checkpoint.read_piece(reading, length)?.into(),
            (Content::Weights(name), _, Origin::Weights(weights, _)) => {
                let mut bytes = Vec::with_capacity(length);
                weights.append(name, reading.read, length, &mut bytes).map_err(WorkbenchError::from)?;
                bytes.into()
            }
            _ => return Err(NodeError::State("a tensor has no source any more".into())),
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
    /// The name in the file.
    Weights(String),
}

impl Reading {
    fn whole(tensor: HostTensor) -> Self {
        Self { ty: tensor.ty().clone(), read: 0, from: Content::Whole(tensor.into_bytes().into()) }
    }
}
