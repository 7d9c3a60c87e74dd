//! Models: graphs from a job, trained models on disk, and models from and for PyTorch.

pub mod check;
pub mod export;
pub mod generate;
pub mod imported;
mod saved;

pub use saved::SavedModel;

use fusionllm_data::{Data, IMAGE_SIZE};
use fusionllm_graph::{DType, Graph, TrainGraph, autodiff};
use fusionllm_import::ImportError;
use fusionllm_workspace::config::{Family, Job};

use crate::NodeError;

/// The graphs of a model at one micro-batch size.
#[derive(Debug, Clone)]
pub struct Model {
    /// Samples per micro-batch.
    pub micro_batch: usize,
    /// The forward graph in the job's precision, which plans are made for.
    pub forward: Graph,
    /// The forward graph with its backward operators.
    pub train: TrainGraph,
    /// The evaluation form: no dropout, and running statistics.
    pub eval: Graph,
}

impl Model {
    /// Builds the graphs of a job at one micro-batch size.
    pub fn build(job: &Job, micro_batch: usize) -> Result<Self, NodeError> {
        let forward = match &job.model.family {
            Family::Imported { file, loss } => imported::trainable(file, micro_batch, loss.as_deref())?,
            _ => forward_of(job, micro_batch)?,
        };
        let forward = forward.in_precision(job.train.precision)?;
        let loss = forward.outputs.get("loss").copied();
        let loss = loss.ok_or_else(|| NodeError::State(format!("{} has no loss", forward.name)))?;
        let train = autodiff::differentiate(&forward, loss)?;
        let eval = forward.evaluation()?;
        Ok(Self { micro_batch, forward, train, eval })
    }

    /// The outputs that a validation reports. An imported model may have no `correct`.
    pub(crate) fn reports(&self) -> Vec<&'static str> {
        let has = |name: &&str| self.eval.outputs.contains_key(*name);
        ["loss", "correct"].into_iter().filter(has).collect()
    }
}

/// A job's model at each micro-batch size that the planner may choose, the default first. Sizes that the model does
/// not support are left out. An archive that was exported for one batch size has that size alone.
///
/// # Errors
///
/// The model supports none of the sizes.
pub fn models(job: &Job) -> Result<Vec<Model>, NodeError> {
    let mut models = Vec::new();
    let mut refusal = None;
    for size in job.train.sizes() {
        match Model::build(job, size) {
            Ok(model) => models.push(model),
            Err(e) => drop(refusal.get_or_insert(e)),
        }
    }
    match refusal {
        Some(NodeError::Import(e @ ImportError::BatchSize { exported: exported @ 1.., .. })) if models.is_empty() => {
            fixed(job, &e, exported).map(|model| vec![model])
        }
        Some(e) if models.is_empty() => Err(e),
        _ => Ok(models),
    }
}

/// The model of an archive that was exported for micro-batches of `exported` samples, if the planner may choose that
/// size. Otherwise, the error says what the job must have.
fn fixed(job: &Job, refusal: &ImportError, exported: usize) -> Result<Model, NodeError> {
    let batch = job.train.batch;
    let divides = batch.is_multiple_of(exported);
    if divides && job.train.micro_batch.open {
        return Model::build(job, exported);
    }
    let keys = match divides {
        true => format!("micro_batch = {exported}"),
        // The multiple that is nearest to the job's value.
        false => {
            let nearest = (batch + exported / 2) / exported * exported;
            format!("batch = {} and micro_batch = {exported}", nearest.max(exported))
        }
    };
    Err(NodeError::input_with_hint(
        refusal.to_string(),
        format!("write {keys} in [train], or export the model with a dynamic batch dimension"),
    ))
}

/// A job's forward graph for `samples` samples at once, in f32.
fn forward_of(job: &Job, samples: usize) -> Result<Graph, NodeError> {
    let context = match (&job.model.family, &job.data) {
        (Family::Gpt2(_), Data::Text(text)) => text.context,
        (Family::Gpt2(config), _) => config.n_positions,
        (Family::Resnet(_) | Family::Imported { .. }, _) => IMAGE_SIZE,
    };
    forward(&job.model.family, samples, context)
}

/// A family's forward graph for `samples` samples of `context` tokens at once, in f32. For images, `context` is their
/// side. An imported graph has its own sizes.
///
/// # Errors
///
/// The settings describe no network, or `context` exceeds the model's positions.
pub fn forward(family: &Family, samples: usize, context: usize) -> Result<Graph, NodeError> {
    match family {
        Family::Gpt2(config) => Ok(config.build(samples, context, DType::F32)?),
        Family::Resnet(config) => Ok(config.build(samples, context, DType::F32)?),
        Family::Imported { file, loss } => imported::graph(file, samples, loss.as_deref()),
    }
}
