//! Models: graphs from a job, trained models on disk, and models from and for PyTorch.

pub mod adapters;
pub mod check;
mod continuation;
pub mod export;
pub mod generate;
mod groups;
pub mod imported;
mod last_token;
mod origin;
mod saved;
pub mod state;

pub use origin::Origin;
pub use saved::SavedModel;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fusionllm_data::{Chats, Data, Documents, IMAGE_SIZE, Text};
use fusionllm_graph::batch::{BatchLoss, Doubt, Sizes};
use fusionllm_graph::{DType, Graph, HostTensor, TrainGraph, ValueId, autodiff};
use fusionllm_import::{ImportError, ImportOptions};
use fusionllm_program::ParameterGroup;
use fusionllm_workspace::config::{Choice, Family, Job};
use imported::ImportedModel;

use crate::WorkbenchError;

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
    /// How the loss of a batch follows from its micro-batches.
    pub loss: BatchLoss,
    /// The rest of the model's state, which is no value of the graphs and does not change.
    pub kept: BTreeMap<String, HostTensor>,
    /// The names of the matrices of adapters, which no file of the model's own weights has.
    pub adapters: BTreeSet<String>,
    /// The parameters whose rate or decay is not the optimizer's.
    pub groups: BTreeMap<String, ParameterGroup>,
}

impl Model {
    /// Builds the graphs of a job at one micro-batch size.
    pub fn build(job: &Job, micro_batch: usize) -> Result<Self, WorkbenchError> {
        Builds::default().model(job, micro_batch)
    }

    /// The note for the user about a loss that this model's micro-batches do not add up to, for batches of `batch`
    /// samples.
    pub fn doubt(&self, batch: usize) -> Option<String> {
        let of_kind = |kind: fn(&Doubt) -> bool| {
            let mut doubts = self.loss.doubts.iter().zip(&self.loss.places);
            doubts.find(|(doubt, _)| kind(doubt))
        };
        let (doubt, at) = of_kind(|d| matches!(d, Doubt::Couples(_)))
            .or_else(|| of_kind(|d| matches!(d, Doubt::Unknown(_))))
            .or_else(|| of_kind(|d| matches!(d, Doubt::Number(_))))?;
        let size = self.micro_batch;
        match doubt {
            Doubt::Couples(_) if size == batch => Some(format!(
                "samples of a batch meet in the loss, at {at}, so each batch of {batch} stays in one piece"
            )),
            _ if size == batch => None,
            Doubt::Couples(_) => Some(format!(
                "samples of a batch meet in the loss, at {at}. In micro-batches of {size}, they meet {size} at a time, \
                 and the loss is the mean. Write micro_batch = {batch} in [train] for the loss of the whole batch"
            )),
            Doubt::Unknown(_) => Some(format!(
                "how the loss of a batch follows from its samples is not known at {at}. The loss of each micro-batch is \
                 taken for a mean over its samples or targets. Write micro_batch = {batch} in [train] if that is wrong"
            )),
            Doubt::Number(_) => Some(format!(
                "the number at {at} is taken for the number of rows, because the archive has one batch size. Export with \
                 a dynamic batch dimension to tell it from a constant"
            )),
        }
    }

    /// The outputs that a validation reports. An imported model may have no `correct`.
    pub fn reports(&self) -> Vec<&'static str> {
        let has = |name: &&str| self.eval.outputs.contains_key(*name);
        ["loss", "correct"].into_iter().filter(has).collect()
    }
}

/// The forward graphs of a job, by their number of samples.
#[derive(Default)]
struct Builds {
    graphs: BTreeMap<usize, Option<Graph>>,
}

impl Builds {
    /// The job's model at one micro-batch size.
    fn model(&mut self, job: &Job, micro_batch: usize) -> Result<Model, WorkbenchError> {
        let (forward, kept) = forward_of(job, micro_batch)?;
        let (forward, adapters) = adapters::adapt(job, forward)?;
        let groups = groups::groups(&job.train.optimizer, &forward)?;
        let loss = loss_of(&forward)?;
        let group = job.data.group();
        // A second size tells a number of rows from a constant. Few numbers of a model are three times a group.
        let other = if micro_batch == 3 * group { 5 * group } else { 3 * group };
        let build = || adapters::adapt(job, forward_of(job, other)?.0);
        let other_graph = self.graphs.entry(other).or_insert_with(|| build().ok().map(|(graph, _)| graph));
        let other = other_graph.as_ref().map(|graph| (graph, other));
        let (forward, batch_loss) = BatchLoss::of(forward, loss, Sizes { samples: micro_batch, group, other })?;
        let forward = forward.in_precision(job.train.precision, job.model.frozen_dtype)?;
        let loss = loss_of(&forward)?;
        let train = autodiff::differentiate(&forward, loss)?;
        let eval = forward.evaluation()?;
        Ok(Model { micro_batch, forward, train, eval, loss: batch_loss, kept, adapters, groups })
    }
}

/// A job's model at each micro-batch size that the planner may choose, the default first. Sizes that the model does
/// not support are left out. An archive that was exported for one batch size has that size alone. If samples of a batch
/// meet in the loss, and the job does not name a size, the only micro-batch is the batch; the job is told.
///
/// # Errors
///
/// The model supports none of the sizes.
pub fn models(job: &mut Job) -> Result<Vec<Model>, WorkbenchError> {
    let (mut models, mut builds) = (Vec::new(), Builds::default());
    let mut refusal = None;
    let batch = job.train.batch;
    for size in job.train.sizes() {
        match builds.model(job, size) {
            Ok(model) if model.loss.couples() && size != batch && job.train.may_choose_micro_batch() => {
                if let Ok(whole) = builds.model(job, batch) {
                    job.train.micro_batch = Choice::made(batch);
                    return Ok(vec![whole]);
                }
                models.push(model);
            }
            Ok(model) => models.push(model),
            Err(e) => drop(refusal.get_or_insert(e)),
        }
    }
    match refusal {
        Some(WorkbenchError::Import(e @ ImportError::BatchSize { exported: exported @ 1.., .. }))
            if models.is_empty() =>
        {
            fixed(job, &e, exported).map(|model| vec![model])
        }
        Some(e) if models.is_empty() => Err(e),
        _ => Ok(models),
    }
}

/// The model of an archive that was exported for micro-batches of `exported` samples, if the planner may choose that
/// size. Otherwise, the error says what the job must have.
fn fixed(job: &Job, refusal: &ImportError, exported: usize) -> Result<Model, WorkbenchError> {
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
    Err(WorkbenchError::input_with_hint(
        refusal.to_string(),
        format!("write {keys} in [train], or export the model with a dynamic batch dimension"),
    ))
}

/// A job's forward graph for `samples` samples at once, in f32, and the state that is not in it.
fn forward_of(job: &Job, samples: usize) -> Result<(Graph, BTreeMap<String, HostTensor>), WorkbenchError> {
    if let (Some(decoder), Some(context)) = (job.model.family.decoder()?, context_of_documents(&job.data)) {
        return Ok((decoder.build_documents(samples, context, DType::F32)?, BTreeMap::new()));
    }
    let context = match (&job.model.family, &job.data) {
        (Family::Imported { file, loss }, _) => {
            let weights = job.model.weights.as_deref();
            let imported = open_imported(file, weights, loss.as_deref(), samples)?.into_imported();
            return match imported.without_loss() {
                Some(e) => Err(e.into()),
                None => Ok((imported.graph, imported.kept)),
            };
        }
        (
            Family::Gpt2(_) | Family::Decoder(_),
            Data::Text(Text { context, .. }) | Data::Chats(Chats { context, .. }),
        ) => *context,
        (Family::Gpt2(config), _) => config.n_positions,
        (Family::Decoder(decoder), _) => decoder.longest(),
        (Family::Resnet(_), _) => IMAGE_SIZE,
    };
    Ok((forward(&job.model.family, samples, context)?, BTreeMap::new()))
}

/// The context of data that have several documents in a sample, which do not see each other.
fn context_of_documents(data: &Data) -> Option<usize> {
    match data {
        Data::Text(Text { documents: Documents::Apart, context, .. })
        | Data::Chats(Chats { packing: true, context, .. }) => Some(*context),
        _ => None,
    }
}

/// The loss of a graph that is to be trained.
fn loss_of(forward: &Graph) -> Result<ValueId, WorkbenchError> {
    let loss = forward.outputs.get("loss").copied();
    loss.ok_or_else(|| WorkbenchError::State(format!("{} has no loss", forward.name)))
}

/// The model of an archive for `samples` samples at once, with the state of the file `weights`. `loss` is the output that
/// is the loss.
pub fn open_imported(
    file: &Path,
    weights: Option<&Path>,
    loss: Option<&str>,
    samples: usize,
) -> Result<ImportedModel, WorkbenchError> {
    let (batch_size, loss) = (Some(samples), loss.map(str::to_owned));
    ImportedModel::open(file, weights, ImportOptions { batch_size, loss, ..Default::default() })
}

/// A family's forward graph for `samples` samples of `context` tokens at once, in f32. For images, `context` is their
/// side. An imported graph has its own sizes, and the archive's constants.
///
/// # Errors
///
/// The settings describe no network, or `context` exceeds the model's positions.
pub fn forward(family: &Family, samples: usize, context: usize) -> Result<Graph, WorkbenchError> {
    match family {
        Family::Gpt2(config) => Ok(config.build(samples, context, DType::F32)?),
        Family::Decoder(decoder) => Ok(decoder.build(samples, context, DType::F32)?),
        Family::Resnet(config) => Ok(config.build(samples, context, DType::F32)?),
        Family::Imported { file, loss } => {
            Ok(open_imported(file, None, loss.as_deref(), samples)?.into_imported().graph)
        }
    }
}
