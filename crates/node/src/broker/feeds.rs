//! The inputs of a pass: a batch that fits the model, cut into micro-batches.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use fusionllm_backend::Backend;
use fusionllm_data::{Batch, Dataset};
use fusionllm_graph::batch::Weights;
use fusionllm_graph::ops::View;
use fusionllm_graph::{DType, Graph, HostTensor, Op, TensorType};
use fusionllm_import::TARGETS_KEY;
use fusionllm_workbench::WorkbenchError;
use fusionllm_workbench::model::Model;
use fusionllm_workbench::model::imported::evaluate;

use crate::NodeError;

/// The tensor of a batch with each token's place in its document, which texts have if documents are kept apart, and
/// chats if they are packed.
const POSITIONS: &str = "position_ids";

/// The assignment of the data's tensors to the inputs of the model.
pub(super) struct Feeds {
    /// The model's input, by the name that the data use.
    pub(super) names: BTreeMap<String, String>,
    /// The name in the data of the tensor that holds the targets, where it is known.
    targets: Option<String>,
    /// Computes what the loss of a batch needs beside its micro-batches.
    backend: Arc<dyn Backend>,
    /// The numbers that each input may hold, by the name of the input.
    indices: BTreeMap<String, Indices>,
}

impl Feeds {
    /// Matches inputs by name. If the names differ, the inputs of text and of images match in order, provided that
    /// their numbers and types agree. The order of a file's tensors means nothing, so they match by type, if each fits
    /// one input alone.
    pub(super) fn new(model: &Model, data: &Dataset) -> Result<Self, NodeError> {
        let own = |name: &str| !model.loss.fills_in(name);
        Self::of(&model.forward, own, data, model.micro_batch)
    }

    /// Matches those inputs of a graph that are the model's own.
    fn of(graph: &Graph, own: impl Fn(&str) -> bool, data: &Dataset, micro_batch: usize) -> Result<Self, NodeError> {
        let given = data.inputs(micro_batch);
        let inputs = graph.inputs().map(|v| (graph.value(v).name.as_str(), graph.ty(v)));
        let wanted: Vec<(&str, &TensorType)> = inputs.filter(|(name, _)| own(name)).collect();
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
        } else if data.are_inputs_ordered() {
            let pairs = given.iter().zip(&wanted).filter(|((_, a), (_, b))| fits(a, b));
            pairs.map(|((from, _), (to, _))| (from.as_ref(), *to)).collect()
        } else {
            let from = |ty: &TensorType| given.iter().find(|(_, t)| fits(t, ty) && alone(t));
            wanted.iter().filter_map(|(to, ty)| Some((from(ty)?.0.as_ref(), *to))).collect()
        };
        if pairs.len() != wanted.len() {
            return Err(mismatch(&wanted, &given, data, micro_batch));
        }
        if given.iter().any(|(name, _)| name == POSITIONS) && !pairs.iter().any(|(from, _)| *from == POSITIONS) {
            return Err(NodeError::input_with_hint(
                format!("{}: the model takes no `{POSITIONS}`, so it cannot keep documents apart", graph.name),
                "leave `documents` and `packing` out of [data], or export a model that takes them and attends by them",
            ));
        }
        let names: BTreeMap<String, String> =
            pairs.iter().map(|(from, to)| (from.to_string(), to.to_string())).collect();
        let input = match graph.metadata.get(TARGETS_KEY) {
            Some(targets) => targets["input"].as_str(),
            None => Some("labels").filter(|_| graph.metadata.contains_key("family")),
        };
        let from = |input: &str| names.iter().find(|(_, to)| *to == input).map(|(from, _)| from.clone());
        let targets = input.and_then(from);
        Ok(Self { names, targets, backend: fusionllm_backend::open("cpu")?, indices: indices(graph) })
    }

    /// Refuses a token that the model's embedding does not have, and a class that its loss does not have. `origin`
    /// names the place of a row of the batch.
    fn check_indices(
        &self,
        name: &str,
        tensor: &HostTensor,
        origin: impl Fn(usize) -> String,
    ) -> Result<(), NodeError> {
        let input = self.names.get(name);
        let Some(Indices { size, ignored }) = input.and_then(|input| self.indices.get(input)) else { return Ok(()) };
        let numbers = tensor.cast(DType::I64).ok().and_then(|t| t.to_i64()).unwrap_or_default();
        let valid = |n: &i64| usize::try_from(*n).is_ok_and(|n| n < *size) || Some(*n) == *ignored;
        let Some(at) = numbers.iter().position(|n| !valid(n)) else { return Ok(()) };
        let row_len = numbers.len() / tensor.shape().first().copied().unwrap_or(1).max(1);
        let (row, number, last) = (origin(at / row_len.max(1)), numbers[at], size.saturating_sub(1));
        Err(match ignored {
            None => NodeError::input_with_hint(
                format!("{row}: `{name}` holds the token {number}, but the model's vocabulary has {size} tokens"),
                format!("tokens are 0 to {last}: prepare the data with the model's own tokenizer"),
            ),
            Some(ignored) => NodeError::input_with_hint(
                format!("{row}: `{name}` holds the class {number}, but the model has {size} classes"),
                format!("classes are 0 to {last}, and {ignored} stands for a target that does not count"),
            ),
        })
    }
}

/// The error about data that do not match the model's inputs. The hint is about the first input that does not fit.
fn mismatch(
    wanted: &[(&str, &TensorType)],
    given: &[(Cow<'static, str>, TensorType)],
    data: &Dataset,
    micro_batch: usize,
) -> NodeError {
    let message = format!(
        "the model takes {}, but the data have {}",
        wanted.iter().map(|(n, t)| format!("{n}: {t}")).collect::<Vec<_>>().join(", "),
        given.iter().map(|(n, t)| format!("{n}: {t}")).collect::<Vec<_>>().join(", "),
    );
    if data.are_inputs_ordered() {
        return NodeError::input_with_hint(
            message,
            "write kind = \"tensors\" and files = [\"PATH\"] in [data]: safetensors files with a tensor for each of the \
             model's inputs",
        );
    }
    let of = |name: &str| given.iter().find(|(n, _)| n == name).map(|(_, t)| t);
    let fits = |a: &TensorType, b: &TensorType| a.shape == b.shape && a.dtype.is_float() == b.dtype.is_float();
    let first = wanted.iter().find(|(name, ty)| !of(name).is_some_and(|given| fits(given, ty)));
    let hint = first.map(|(name, ty)| how_to_store(name, ty, of(name), micro_batch));
    WorkbenchError::Input { message, hint }.into()
}

/// The advice about an input that the data lack, or have in another shape.
fn how_to_store(name: &str, wanted: &TensorType, given: Option<&TensorType>, micro_batch: usize) -> String {
    let sample = wanted.shape.get(1..).unwrap_or_default();
    let only_rows_differ = given.is_some_and(|g| g.shape.len() == wanted.shape.len() && g.shape[1..] == *sample);
    match wanted.shape.first() {
        None => format!("store `{name}` as a single number, a tensor of {} without dimensions", wanted.dtype),
        Some(rows) if *rows != micro_batch && only_rows_differ => format!(
            "the model takes {rows} rows of `{name}`, however many samples there are: export it with a dynamic first \
             dimension that is that of the samples, or make `{name}` a buffer of the model"
        ),
        Some(_) => {
            let dims: Vec<String> =
                ["rows".to_owned()].into_iter().chain(sample.iter().map(usize::to_string)).collect();
            format!("store `{name}` in each file as {}[{}], with one row a sample", wanted.dtype, dims.join(", "))
        }
    }
}

/// The numbers from 0 to below `size`.
struct Indices {
    size: usize,
    /// For classes, another number that is valid.
    ignored: Option<i64>,
}

/// The sizes of the embeddings and of the losses that read an input, by the input's name.
fn indices(graph: &Graph) -> BTreeMap<String, Indices> {
    let mut all: BTreeMap<String, Indices> = BTreeMap::new();
    for node in &graph.nodes {
        let (mut value, size, ignored) = match (&node.op, &node.inputs[..]) {
            (Op::Embedding(_), [weight, ids]) => (*ids, graph.ty(*weight).shape.first().copied(), None),
            (Op::CrossEntropy(op), [logits, target]) => {
                (*target, graph.ty(*logits).shape.get(1).copied(), Some(op.ignore_index))
            }
            _ => continue,
        };
        // A loss that reads a part of its labels does not limit the others. So only views of all labels may stand
        // between such a loss and its input.
        while let Some(producer) = graph.producer(value).map(|n| graph.node(n))
            && producer.op.view().is_some_and(|view| ignored.is_none() || view == View::Whole)
        {
            value = producer.inputs[0];
        }
        if let Some(size) = size.filter(|_| graph.inputs().any(|v| v == value)) {
            let entry = all.entry(graph.value(value).name.clone()).or_insert(Indices { size, ignored });
            // A number that a loss ignores is no token.
            *entry = Indices { size: entry.size.min(size), ignored: entry.ignored.filter(|i| Some(*i) == ignored) };
        }
    }
    all
}

/// The micro-batches of a pass, and how much they count.
pub(super) struct MicroBatches {
    /// The model's inputs of each micro-batch, by name.
    pub(super) tensors: Vec<BTreeMap<String, HostTensor>>,
    /// The share of each micro-batch in the loss of the batch, or of the evaluation.
    pub(super) weights: Vec<f64>,
    /// The weights of sums over each micro-batch's samples, in an evaluation.
    pub(super) sums: Vec<f64>,
}

impl Feeds {
    /// The number of targets in a step, if none of its labels is ignored; `None` if the model does not tell which
    /// labels are targets.
    pub(super) fn targets_per_step(&self, data: &Dataset, batch: usize) -> Option<f64> {
        let name = self.targets.as_ref()?;
        data.inputs(batch).iter().find(|(n, _)| n == name).map(|(_, ty)| ty.numel() as f64)
    }

    /// Draws the batch of a step, of `size` samples, and cuts it into `count` micro-batches.
    pub(super) fn training_pass(
        &self,
        data: &Dataset,
        step: u64,
        size: usize,
        count: u32,
        model: &Model,
    ) -> Result<MicroBatches, NodeError> {
        let first = step * size as u64;
        let batch = data.train_batch(first, size)?;
        self.check(&batch, |row| data.train_origin(first + row as u64))?;
        let mut tensors = self.cut(&batch, count, model)?;
        let weights = self.weigh(&mut tensors, &vec![1.0; count as usize], count as usize, model)?.weights;
        let dtype = model.train.graph.ty(model.train.loss_weight).dtype;
        for (inputs, weight) in tensors.iter_mut().zip(&weights) {
            inputs.insert("loss_weight".into(), HostTensor::scalar(dtype, *weight)?);
        }
        Ok(MicroBatches { tensors, weights, sums: Vec::new() })
    }

    /// The held-out samples of these numbers.
    pub(super) fn held_out(&self, data: &Dataset, samples: &[usize]) -> Result<Batch, NodeError> {
        let batch = data.held_out(samples, |_| true)?;
        self.check(&batch, |row| samples.get(row).map_or_else(String::new, |sample| data.eval_origin(*sample)))?;
        Ok(batch)
    }

    /// Refuses numbers that the model has no embeddings or classes for. `origin` names the place of a row.
    fn check(&self, batch: &Batch, origin: impl Fn(usize) -> String) -> Result<(), NodeError> {
        batch.tensors.iter().try_for_each(|(name, tensor)| self.check_indices(name, tensor, &origin))
    }

    /// Whether the weights of micro-batches depend on the data's tensor of this name.
    pub(super) fn weighs(&self, name: &str, model: &Model) -> bool {
        self.names.get(name).is_some_and(|input| model.loss.reads(input))
    }

    /// Cuts a batch into this number of micro-batches: the model's inputs of each, by name.
    pub(super) fn cut(
        &self,
        batch: &Batch,
        count: u32,
        model: &Model,
    ) -> Result<Vec<BTreeMap<String, HostTensor>>, NodeError> {
        let (size, graph) = (model.micro_batch, &model.forward);
        let types: BTreeMap<&str, DType> =
            graph.inputs().map(|v| (graph.value(v).name.as_str(), graph.ty(v).dtype)).collect();
        let mut micro_batches = vec![BTreeMap::new(); count as usize];
        for (m, tensors) in micro_batches.iter_mut().enumerate() {
            for (name, tensor) in &batch.tensors {
                let Some(input) = self.names.get(name.as_ref()) else { continue };
                let part = rows(tensor, m * size, size)?;
                let part = types.get(input.as_str()).map_or(Ok(part.clone()), |dtype| part.cast(*dtype))?;
                tensors.insert(input.clone(), part);
            }
        }
        Ok(micro_batches)
    }

    /// Adds to the inputs of micro-batches what the loss needs: see [`feed`](fusionllm_graph::batch::BatchLoss::feed).
    pub(super) fn weigh(
        &self,
        micro_batches: &mut [BTreeMap<String, HostTensor>],
        factors: &[f64],
        per_batch: usize,
        model: &Model,
    ) -> Result<Weights, NodeError> {
        let run = |op: &Op, inputs: Vec<HostTensor>, types: &[TensorType]| evaluate(&*self.backend, op, inputs, types);
        Ok(model.loss.feed(micro_batches, factors, per_batch, &run)?)
    }
}

/// `count` rows of a tensor's first dimension, from row `first` on. A single number belongs to all rows.
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
    use fusionllm_data::write_tensors;
    use fusionllm_data::{Data, Documents, Tensors, Text, Tokenizer, Validation};
    use fusionllm_graph::Advice;
    use fusionllm_graph::{Builder, Init};
    use fusionllm_models::Gpt2Config;
    use insta::assert_snapshot;

    use super::*;

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
        let feeds = Feeds::of(&config.build(3, 2, DType::F32).unwrap(), |_| true, &data, 3).unwrap();

        let batch = data.train_batch(0, 3).unwrap();
        let origin = |row: usize| data.train_origin(row as u64);
        let check = |wanted: &str| {
            let (name, tensor) = batch.tensors.iter().find(|(name, _)| *name == wanted).unwrap();
            feeds.check_indices(name, tensor, origin)
        };
        check("labels").unwrap();
        let error = check("input_ids").unwrap_err().report();
        assert_snapshot!(error.replace(&dir.path().display().to_string(), "DIR"), @r"
        DIR/tokens.safetensors, row 2: `input_ids` holds the token 9, but the model's vocabulary has 8 tokens
        hint: tokens are 0 to 7: prepare the data with the model's own tokenizer
        ");
    }
    /// Two samples of four pixels in `x`, and their classes in `y`.
    fn classes(dir: &std::path::Path, labels: &[i64]) -> Dataset {
        let path = dir.join("rows.safetensors");
        let x = HostTensor::from_f32([2, 4], &[0.0; 8]).unwrap();
        let y = HostTensor::from_i64([2], labels).unwrap();
        write_tensors(&path, &BTreeMap::from([("x", x), ("y", y)])).unwrap();
        let tensors = Tensors { files: vec![path], validation: Validation::Fraction(0.0), shuffle: false, group: 1 };
        Dataset::open(&Data::Tensors(tensors), 1).unwrap()
    }

    /// A classifier of `rows` rows of `width` numbers into three classes.
    fn classifier(rows: usize, width: usize) -> Graph {
        let mut b = Builder::new("classifier");
        let x = b.input("x", DType::F32, [rows, width]).unwrap();
        let y = b.input("y", DType::I64, [2]).unwrap();
        let w = b.parameter("w", DType::F32, [3, width], Init::Constant(0.0)).unwrap();
        let logits = b.linear(x, w, None).unwrap();
        let loss = b.cross_entropy(logits, y, -100).unwrap();
        b.output("loss", loss).unwrap();
        b.finish().unwrap()
    }

    /// Regression: the kernel of one peer failed, and printed `TensorType { dtype: F32, ...`.
    #[test]
    fn a_class_that_the_model_does_not_have_is_reported_with_file_and_row() {
        let dir = tempfile::tempdir().unwrap();
        let check = |labels: &[i64]| {
            let data = classes(dir.path(), labels);
            let feeds = Feeds::of(&classifier(2, 4), |_| true, &data, 2).unwrap();
            let batch = data.train_batch(0, 2).unwrap();
            let (_, tensor) = batch.tensors.iter().find(|(name, _)| *name == "y").unwrap();
            feeds.check_indices("y", tensor, |row| data.train_origin(row as u64))
        };
        check(&[2, -100]).unwrap();
        let error = check(&[0, 3]).unwrap_err().report();
        assert_snapshot!(error.replace(&dir.path().display().to_string(), "DIR"), @r"
        DIR/rows.safetensors, row 1: `y` holds the class 3, but the model has 3 classes
        hint: classes are 0 to 2, and -100 stands for a target that does not count
        ");
    }

    /// Regression: the hint was `train.micro_batch`, whatever did not fit.
    #[test]
    fn the_hint_about_data_that_do_not_fit_is_about_what_differs() {
        let dir = tempfile::tempdir().unwrap();
        let data = classes(dir.path(), &[0, 1]);
        let error = |graph: &Graph, data: &Dataset| Feeds::of(graph, |_| true, data, 2).err().unwrap().report();
        assert_snapshot!(error(&classifier(2, 5), &data), @r"
        the model takes x: f32[2, 5], y: i64[2], but the data have x: f32[2, 4], y: i64[2]
        hint: store `x` in each file as f32[rows, 5], with one row a sample
        ");
        let mut b = Builder::new("weighted");
        let x = b.input("x", DType::F32, [2, 4]).unwrap();
        let y = b.input("y", DType::F32, [7]).unwrap();
        let (x, y) = (b.sum(x, &[0, 1], false).unwrap(), b.sum(y, &[0], false).unwrap());
        let loss = b.add(x, y).unwrap();
        b.output("loss", loss).unwrap();
        let floats = dir.path().join("floats.safetensors");
        let tensor =
            |shape: &[usize]| HostTensor::from_f32(shape.to_vec(), &vec![0.0; shape.iter().product()]).unwrap();
        write_tensors(&floats, &BTreeMap::from([("x", tensor(&[2, 4])), ("y", tensor(&[2]))])).unwrap();
        let tensors = Tensors { files: vec![floats], validation: Validation::Fraction(0.0), shuffle: true, group: 1 };
        let floats = Dataset::open(&Data::Tensors(tensors), 1).unwrap();
        assert_snapshot!(error(&b.finish().unwrap(), &floats), @r"
        the model takes x: f32[2, 4], y: f32[7], but the data have x: f32[2, 4], y: f32[2]
        hint: the model takes 7 rows of `y`, however many samples there are: export it with a dynamic first dimension that is that of the samples, or make `y` a buffer of the model
        ");
        let text = Text {
            files: Vec::new(),
            tokenizer: Tokenizer::Bytes,
            context: 8,
            validation: Validation::Fraction(0.0),
            shuffle: true,
            documents: Documents::Joined,
        };
        let apart = Text { tokenizer: Tokenizer::Gpt2, documents: Documents::Apart, ..text.clone() };
        let apart = Dataset::open(&Data::Text(apart), 1).unwrap();
        let gpt2 = Gpt2Config { n_positions: 8, n_embd: 8, n_layer: 1, n_head: 1, ..Gpt2Config::default() };
        assert_snapshot!(error(&gpt2.build(2, 8, DType::F32).unwrap(), &apart), @r"
        gpt2: the model takes no `position_ids`, so it cannot keep documents apart
        hint: leave `documents` and `packing` out of [data], or export a model that takes them and attends by them
        ");
        let text = Dataset::open(&Data::Text(text), 1).unwrap();
        assert_snapshot!(error(&classifier(2, 4), &text), @r#"
        the model takes x: f32[2, 4], y: i64[2], but the data have input_ids: i64[2, 8], labels: i64[2, 8]
        hint: write kind = "tensors" and files = ["PATH"] in [data]: safetensors files with a tensor for each of the model's inputs
        "#);
    }
}
