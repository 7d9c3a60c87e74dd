//! Which tensors of a batch go into which inputs of a model.

use std::collections::BTreeMap;

use fusionllm_graph::{DType, Graph, HostTensor, TensorType};
use fusionllm_import::TARGETS_KEY;

use crate::NodeError;
use crate::data::{Dataset, IGNORED};

/// Which of the data's tensors a model reads as what.
pub(crate) struct Feeds {
    /// The model's input by the data's name.
    pub(crate) names: BTreeMap<String, String>,
    /// The data's tensor that holds the targets, and which of its elements do not count.
    pub(crate) targets: Option<(String, i64)>,
}

impl Feeds {
    /// By name, or else, where data and model have as many and of the same types, in their order.
    pub(crate) fn new(graph: &Graph, data: &Dataset, micro_batch: usize) -> Result<Self, NodeError> {
        let given = data.inputs(micro_batch);
        let wanted: Vec<(&str, &TensorType)> =
            graph.inputs().map(|v| (graph.value(v).name.as_str(), graph.ty(v))).collect();
        let fits = |a: &TensorType, b: &TensorType| a.shape == b.shape && a.dtype.is_float() == b.dtype.is_float();
        let named = |name: &str, ty: &TensorType| given.iter().any(|(n, t)| n == name && fits(t, ty));
        let names: BTreeMap<String, String> = if wanted.iter().all(|(name, ty)| named(name, ty)) {
            wanted.iter().map(|(name, _)| (name.to_string(), name.to_string())).collect()
        } else if wanted.len() == given.len() && wanted.iter().zip(&given).all(|((_, a), (_, b))| fits(a, b)) {
            given.iter().zip(&wanted).map(|((from, _), (to, _))| (from.to_string(), to.to_string())).collect()
        } else {
            let list = |all: Vec<String>| all.join(", ");
            return Err(NodeError::Input(format!(
                "the model takes {}, but the data have {}\n  hint: give tensors of those names and types, for micro-batches of {micro_batch} (train.micro_batch)",
                list(wanted.iter().map(|(n, t)| format!("{n}: {t}")).collect()),
                list(given.iter().map(|(n, t)| format!("{n}: {t}")).collect()),
            )));
        };
        let (input, ignored) = match graph.metadata.get(TARGETS_KEY) {
            Some(targets) => (targets["input"].as_str(), targets["ignore_index"].as_i64()),
            None if graph.metadata.contains_key("family") => (Some("labels"), Some(IGNORED)),
            None => (None, None),
        };
        let from = |input: &str| names.iter().find(|(_, to)| *to == input).map(|(from, _)| from.clone());
        let targets = input.and_then(from).zip(ignored);
        Ok(Self { names, targets })
    }
}

/// Elements that count.
pub(crate) fn count_targets(tensor: &HostTensor, ignored: i64) -> u64 {
    let labels = tensor.cast(DType::I64).ok().and_then(|t| t.to_i64());
    labels.map_or(0, |l| l.iter().filter(|l| **l != ignored).count() as u64)
}
