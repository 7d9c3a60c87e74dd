//! The inputs of a pass: draws a batch, cuts it into micro-batches, and streams each to the peers that read it.

use std::collections::BTreeMap;

use fusionllm_graph::{DType, Graph, HostTensor, Op, TensorType};
use fusionllm_import::TARGETS_KEY;
use fusionllm_plan::{Slot, is_view};
use fusionllm_protocol::{BatchId, TensorHeader};

use super::conductor::Conductor;
use super::generation::Generation;
use crate::NodeError;
use crate::data::{Batch, Dataset, IGNORED};
use crate::model::Model;

/// Which tensor of the data goes into which input of the model.
pub(super) struct Feeds {
    /// The model's input, by the name that the data use.
    pub(super) names: BTreeMap<String, String>,
    /// The tensor that holds the targets, where it is known.
    pub(super) targets: Option<Targets>,
    /// The size of the vocabulary of an input, by the name of the input.
    vocabularies: BTreeMap<String, usize>,
}

/// A tensor of targets.
pub(super) struct Targets {
    /// Its name in the data.
    pub(super) name: String,
    /// The label that counts neither in the loss nor in the accuracy.
    ignored: i64,
}

impl Feeds {
    /// Matches inputs by name. Where the names differ, the inputs of text and of images match in order, if their
    /// numbers and types agree. Tensors of a file have no order that means anything: they match by type, if each fits
    /// one input alone.
    pub(super) fn new(graph: &Graph, data: &Dataset, micro_batch: usize) -> Result<Self, NodeError> {
        let given = data.inputs(micro_batch);
        let wanted: Vec<(&str, &TensorType)> =
            graph.inputs().map(|v| (graph.value(v).name.as_str(), graph.ty(v))).collect();
        let fits = |a: &TensorType, b: &TensorType| a.shape == b.shape && a.dtype.is_float() == b.dtype.is_float();
        let named = |name: &str, ty: &TensorType| given.iter().any(|(n, t)| n == name && fits(t, ty));
        let alone = |ty: &TensorType| {
            wanted.iter().filter(|(_, t)| fits(t, ty)).count() == 1
                && given.iter().filter(|(_, t)| fits(t, ty)).count() == 1
        };
        let pairs: Vec<(&str, &str)> = if wanted.iter().all(|(name, ty)| named(name, ty)) {
            wanted.iter().map(|(name, _)| (*name, *name)).collect()
        } else if wanted.len() != given.len() {
            Vec::new()
        } else if data.has_order() {
            let pairs = given.iter().zip(&wanted).filter(|((_, a), (_, b))| fits(a, b));
            pairs.map(|((from, _), (to, _))| (from.as_ref(), *to)).collect()
        } else {
            let from = |ty: &TensorType| given.iter().find(|(_, t)| fits(t, ty) && alone(t));
            wanted.iter().filter_map(|(to, ty)| Some((from(ty)?.0.as_ref(), *to))).collect()
        };
        if pairs.len() != wanted.len() {
            let list = |all: Vec<String>| all.join(", ");
            return Err(NodeError::input_with_hint(
                format!(
                    "the model takes {}, but the data have {}",
                    list(wanted.iter().map(|(n, t)| format!("{n}: {t}")).collect()),
                    list(given.iter().map(|(n, t)| format!("{n}: {t}")).collect()),
                ),
                format!(
                    "give tensors of those names and types, for micro-batches of {micro_batch} (train.micro_batch)"
                ),
            ));
        }
        let names: BTreeMap<String, String> =
            pairs.iter().map(|(from, to)| (from.to_string(), to.to_string())).collect();
        let (input, ignored) = match graph.metadata.get(TARGETS_KEY) {
            Some(targets) => (targets["input"].as_str(), targets["ignore_index"].as_i64()),
            None if graph.metadata.contains_key("family") => (Some("labels"), Some(IGNORED)),
            None => (None, None),
        };
        let from = |input: &str| names.iter().find(|(_, to)| *to == input).map(|(from, _)| from.clone());
        let targets = input.and_then(from).zip(ignored).map(|(name, ignored)| Targets { name, ignored });
        Ok(Self { names, targets, vocabularies: vocabularies(graph) })
    }

    /// Refuses a token that the model's embedding does not have. `origin` says where a row of the batch comes from.
    fn check_tokens(&self, name: &str, tensor: &HostTensor, origin: impl Fn(usize) -> String) -> Result<(), NodeError> {
        let input = self.names.get(name);
        let Some(size) = input.and_then(|input| self.vocabularies.get(input)) else { return Ok(()) };
        let tokens = tensor.cast(DType::I64).ok().and_then(|t| t.to_i64()).unwrap_or_default();
        let Some(at) = tokens.iter().position(|t| !usize::try_from(*t).is_ok_and(|t| t < *size)) else {
            return Ok(());
        };
        let row_len = tokens.len() / tensor.shape().first().copied().unwrap_or(1).max(1);
        Err(NodeError::input_with_hint(
            format!(
                "{}: `{name}` holds the token {}, but the model's vocabulary has {size} tokens",
                origin(at / row_len.max(1)),
                tokens[at]
            ),
            format!("tokens are 0 to {}: prepare the data with the model's own tokenizer", size - 1),
        ))
    }
}

impl Targets {
    /// How many labels are not ignored.
    fn count(&self, labels: &HostTensor) -> u64 {
        let labels = labels.cast(DType::I64).ok().and_then(|t| t.to_i64());
        labels.map_or(0, |l| l.iter().filter(|l| **l != self.ignored).count() as u64)
    }
}

/// The size of the embedding that reads an input, by the input's name.
fn vocabularies(graph: &Graph) -> BTreeMap<String, usize> {
    let mut sizes = BTreeMap::new();
    for node in &graph.nodes {
        let (Op::Embedding(_), [weight, ids]) = (&node.op, &node.inputs[..]) else { continue };
        let mut ids = *ids;
        while let Some(producer) = graph.producer(ids).map(|n| graph.node(n))
            && is_view(&producer.op, &graph.types(&producer.inputs), &graph.types(&producer.outputs))
        {
            ids = producer.inputs[0];
        }
        if graph.inputs().any(|v| v == ids) {
            let size = sizes.entry(graph.value(ids).name.clone()).or_insert(usize::MAX);
            *size = (*size).min(graph.ty(*weight).shape[0]);
        }
    }
    sizes
}

impl Conductor<'_> {
    /// Streams the inputs of a pass, and gives the state machine the weights of the micro-batches.
    pub(super) fn feed(&mut self, pass: u64, id: BatchId) -> Result<(), NodeError> {
        let Some(generation) = &self.current else { return Ok(()) };
        let Generation { job, model, plan, peers, .. } = generation;
        let batch_size = job.train.batch;
        let batch = match id {
            BatchId::Train { step } => self.data.train_batch(step * batch_size as u64, batch_size),
            BatchId::Eval { index, .. } => self.data.eval_batch(index as usize * batch_size, batch_size),
        };
        let batch = batch?;
        for (name, tensor) in &batch.tensors {
            self.feeds.check_tokens(name, tensor, |row| match id {
                BatchId::Train { step } => self.data.train_origin(step * batch_size as u64 + row as u64),
                BatchId::Eval { index, .. } => self.data.eval_origin(index as usize * batch_size + row),
            })?;
        }
        let MicroBatches { tensors, weights, targets } = self.feeds.cut(batch, plan.micro_batches, model)?;
        self.run.set_weights(pass, weights, targets);
        let graph = &model.train.graph;
        for peer in peers {
            let Some(link) = self.links.get(peer.member) else { continue };
            for input in &peer.inputs[id.kind()] {
                let tensor = tensors.get(input.micro_batch as usize).and_then(|t| t.get(input.name.as_str()));
                let ty = graph.find(&input.name).map(|v| graph.ty(v));
                let tensor = match (tensor, ty) {
                    (Some(tensor), Some(ty)) => Some(tensor.cast(ty.dtype)?),
                    (tensor, _) => tensor.cloned(),
                };
                let tensor = tensor.ok_or_else(|| {
                    NodeError::input(format!("the model reads {:?}, which the data do not have", input.name))
                })?;
                let slot = Slot::Value { value: input.value, micro_batch: input.micro_batch };
                link.outbox.tensor(&TensorHeader { pass, kind: id.kind(), slot, coded: false }, tensor)?;
            }
        }
        Ok(())
    }
}

/// A batch, cut into micro-batches.
struct MicroBatches {
    /// The model's inputs of each micro-batch, by name.
    tensors: Vec<BTreeMap<String, HostTensor>>,
    /// Each one's share of the loss.
    weights: Vec<f64>,
    /// Targets of the batch.
    targets: u64,
}

impl Feeds {
    /// Targets of a step, if none of its labels is ignored.
    pub(super) fn targets_per_step(&self, data: &Dataset, batch: usize) -> f64 {
        let inputs = data.inputs(batch);
        let targets = inputs.iter().find(|(name, _)| self.targets.as_ref().is_some_and(|t| t.name == *name));
        targets.map_or(batch as f64, |(_, ty)| ty.numel() as f64)
    }

    fn cut(&self, batch: Batch, count: u32, model: &Model) -> Result<MicroBatches, NodeError> {
        let size = model.micro_batch;
        let targets = self.targets.as_ref();
        let total = match targets {
            Some(t) => batch.tensors.iter().find(|(n, _)| *n == t.name).map_or(0, |(_, labels)| t.count(labels)),
            None => batch.targets,
        };
        let (mut micro_batches, mut weights) = (Vec::new(), Vec::new());
        for m in 0..count as usize {
            let mut tensors = BTreeMap::new();
            for (name, tensor) in &batch.tensors {
                let Some(input) = self.names.get(name.as_ref()) else { continue };
                tensors.insert(input.clone(), rows(tensor, m * size, size)?);
            }
            let weight = match targets {
                Some(t) => {
                    let labels = self.names.get(&t.name).and_then(|input| tensors.get(input.as_str()));
                    labels.map_or(0, |labels| t.count(labels)) as f64 / total.max(1) as f64
                }
                // Nothing says which targets count: the loss is the mean of the micro-batches' means.
                None => 1.0 / f64::from(count),
            };
            let dtype = model.train.graph.ty(model.train.loss_weight).dtype;
            tensors.insert("loss_weight".into(), HostTensor::scalar(dtype, weight)?);
            weights.push(weight);
            micro_batches.push(tensors);
        }
        Ok(MicroBatches { tensors: micro_batches, weights, targets: total })
    }
}

/// `count` rows of a tensor's first dimension, from row `first` on. A single number is that of all rows.
fn rows(tensor: &HostTensor, first: usize, count: usize) -> Result<HostTensor, NodeError> {
    if tensor.shape().is_empty() {
        return Ok(tensor.clone());
    }
    let mut shape = tensor.shape().to_vec();
    let total = shape.first().copied().unwrap_or(1).max(1);
    let row = tensor.bytes().len() / total;
    if let Some(n) = shape.first_mut() {
        *n = count;
    }
    let bytes = tensor.bytes().get(first * row..(first + count) * row);
    let bytes = bytes.ok_or_else(|| NodeError::State("a batch is smaller than its micro-batches".into()))?;
    Ok(HostTensor::from_bytes(TensorType::new(tensor.dtype(), shape), bytes.to_vec())?)
}

#[cfg(test)]
mod tests {
    use fusionllm_graph::models::Gpt2Config;
    use insta::assert_snapshot;

    use super::*;
    use crate::data::{Data, Tensors, Validation};
    use crate::files::write_tensors;
    use crate::printed;

    #[test]
    fn a_token_outside_the_vocabulary_is_reported_with_file_and_row() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens.safetensors");
        let tokens = HostTensor::from_i64([3, 2], &[0, 1, 2, 3, 4, 9]).unwrap();
        let labels = HostTensor::from_i64([3, 2], &[1, 2, 3, 4, 5, 6]).unwrap();
        write_tensors(&path, &BTreeMap::from([("input_ids", tokens), ("labels", labels)])).unwrap();
        let tensors = Tensors { files: vec![path], validation: Validation::Fraction(0.0), shuffle: true, group: 1 };
        let data = Dataset::open(&Data::Tensors(tensors), 1).unwrap();
        let config =
            Gpt2Config { vocab_size: 8, n_positions: 2, n_embd: 8, n_layer: 1, n_head: 1, ..Gpt2Config::default() };
        let feeds = Feeds::new(&config.build(3, 2, DType::F32).unwrap(), &data, 3).unwrap();

        let batch = data.train_batch(0, 3).unwrap();
        let origin = |row: usize| data.train_origin(row as u64);
        let check = |wanted: &str| {
            let (name, tensor) = batch.tensors.iter().find(|(name, _)| *name == wanted).unwrap();
            feeds.check_tokens(name, tensor, origin)
        };
        check("labels").unwrap();
        let error = printed(check("input_ids").unwrap_err());
        assert_snapshot!(error.replace(&dir.path().display().to_string(), "DIR"), @r"
        DIR/tokens.safetensors, row 2: `input_ids` holds the token 9, but the model's vocabulary has 8 tokens
        hint: tokens are 0 to 7: prepare the data with the model's own tokenizer
        ");
    }
}
