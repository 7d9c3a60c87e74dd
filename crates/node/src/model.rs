//! From a job to graphs.

use fusionllm_graph::{DType, Graph, TrainGraph, autodiff};

use crate::NodeError;
use crate::config::{Data, Family, Job};
use crate::data::IMAGE_SIZE;

/// A model's graphs at the micro-batch's size.
#[derive(Debug)]
pub struct Model {
    /// What plans are made for.
    pub forward: Graph,
    /// With its backward operators.
    pub train: TrainGraph,
    /// Without dropout, with running statistics.
    pub eval: Graph,
}

impl Model {
    /// The graphs of a job.
    pub fn build(job: &Job) -> Result<Self, NodeError> {
        Self::from_forward(forward(job, job.train.micro_batch)?)
    }

    /// The graphs of any forward graph with an output `loss`.
    pub fn from_forward(forward: Graph) -> Result<Self, NodeError> {
        let Some(&loss) = forward.outputs.get("loss") else {
            return Err(NodeError::Input(format!("graph {:?} has no output named \"loss\"", forward.name)));
        };
        let train = autodiff::differentiate(&forward, loss)?;
        let eval = forward.evaluation()?;
        Ok(Self { forward, train, eval })
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
