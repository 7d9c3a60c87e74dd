//! From a job to graphs.

use fusionllm_graph::{DType, Graph, TrainGraph, autodiff};

use crate::NodeError;
use crate::config::{Data, Family, Job};
use crate::data::IMAGE_SIZE;

/// A model's graphs at the micro-batch's size.
#[derive(Debug)]
pub struct Model {
    /// Samples at once.
    pub micro_batch: usize,
    /// What plans are made for.
    pub forward: Graph,
    /// With its backward operators.
    pub train: TrainGraph,
    /// Without dropout, with running statistics.
    pub eval: Graph,
}

impl Model {
    /// The graphs of a job for so many samples at once.
    pub fn build(job: &Job, micro_batch: usize) -> Result<Self, NodeError> {
        let forward = forward(job, micro_batch)?;
        let Some(&loss) = forward.outputs.get("loss") else {
            return Err(NodeError::Input(format!("graph {:?} has no output named \"loss\"", forward.name)));
        };
        let train = autodiff::differentiate(&forward, loss)?;
        let eval = forward.evaluation()?;
        Ok(Self { micro_batch, forward, train, eval })
    }
}

/// A job's model at each size of micro-batch that a planner may choose, the usual one first. Sizes that the model cannot have, as where it was exported with one
/// size of batch, are left out.
///
/// # Errors
///
/// There is none that it can have.
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
        Some(e) if models.is_empty() => Err(e),
        _ => Ok(models),
    }
}

/// A job's forward graph for `samples` samples at once.
pub fn forward(job: &Job, samples: usize) -> Result<Graph, NodeError> {
    Ok(match (&job.model.family, &job.data) {
        (Family::Gpt2(config), Data::Text(text)) => config.build(samples, text.context, DType::F32)?,
        (Family::Gpt2(config), _) => config.build(samples, config.n_positions, DType::F32)?,
        (Family::Resnet(config), _) => config.build(samples, IMAGE_SIZE, DType::F32)?,
        (Family::Imported { file }, _) => crate::imported::graph(file, samples)?,
    })
}
