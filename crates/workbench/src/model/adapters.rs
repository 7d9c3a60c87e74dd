//! The part of a network that a job trains: the parameters that it freezes, and low-rank adapters beside them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fusionllm_data::weights::Weights;
use fusionllm_graph::lora::{LinearLayer, is_in_block, names};
use fusionllm_graph::units::counted;
use fusionllm_graph::{DType, Graph, HostTensor, StateTensor};
use fusionllm_workspace::config::{Job, Lora};

use super::state::notes;
use crate::WorkbenchError;

/// The graph that a job trains, and the names of its adapters' matrices.
///
/// # Errors
///
/// A pattern of the job matches nothing, or nothing is left to train.
pub(super) fn adapt(job: &Job, graph: Graph) -> Result<(Graph, BTreeSet<String>), WorkbenchError> {
    check_patterns(job, &graph)?;
    let graph = graph.freeze(|name| job.freezes(name));
    let Some(lora) = &job.lora else {
        if !job.model.freeze.is_empty() && graph.parameters().next().is_none() {
            return Err(WorkbenchError::input_with_hint(
                "`model.freeze` freezes every parameter of the model, so there is nothing to train",
                "name fewer parameters, or write [lora] to train adapters",
            ));
        }
        return Ok((graph, BTreeSet::new()));
    };
    let layers = targets(lora, &graph)?;
    let adapters = layers.iter().flat_map(LinearLayer::adapter_names).collect();
    Ok((graph.with_adapters(&lora.adapters(), &layers)?, adapters))
}

fn check_patterns(job: &Job, graph: &Graph) -> Result<(), WorkbenchError> {
    let parameters = || graph.parameters().map(|v| graph.value(v).name.as_str());
    match job.model.freeze.iter().find(|pattern| !parameters().any(|name| names(pattern, name))) {
        Some(pattern) => Err(WorkbenchError::input_with_hint(
            format!("`model.freeze`: no parameter is named {pattern:?}"),
            format!("the parameters are {}; `*` stands for any text", listed(parameters())),
        )),
        None => Ok(()),
    }
}

/// The linear layers of a network, and whether each has an adapter.
pub(super) struct AdaptedLayers(pub(super) Vec<(LinearLayer, bool)>);

impl AdaptedLayers {
    /// The layers with an adapter.
    pub(super) fn adapted(&self) -> impl Iterator<Item = &LinearLayer> {
        self.0.iter().filter(|(_, adapted)| *adapted).map(|(layer, _)| layer)
    }
}

/// The linear layers that get an adapter.
///
/// # Errors
///
/// A pattern matches no layer, or the network has none.
pub fn targets(lora: &Lora, graph: &Graph) -> Result<Vec<LinearLayer>, WorkbenchError> {
    let mut layers = graph.linear_layers();
    let there = |layers: &[LinearLayer]| listed(layers.iter().map(|layer| layer.name.as_str()));
    if layers.is_empty() {
        return Err(WorkbenchError::input_with_hint(
            format!("[lora]: {} has no linear layer that could get an adapter", graph.name),
            "leave [lora] out, and write freeze in [model] to train a part of the model",
        ));
    }
    if lora.targets.is_empty() {
        // Without blocks, all of them are meant.
        if layers.iter().any(|layer| is_in_block(&layer.name)) {
            layers.retain(|layer| is_in_block(&layer.name));
        }
        return Ok(layers);
    }
    let of = |pattern: &String, layer: &LinearLayer| names(pattern, &layer.name);
    if let Some(pattern) = lora.targets.iter().find(|pattern| !layers.iter().any(|layer| of(pattern, layer))) {
        return Err(WorkbenchError::input_with_hint(
            format!("`lora.targets`: no linear layer is named {pattern:?}"),
            format!("the linear layers are {}; `*` stands for any text", there(&layers)),
        ));
    }
    layers.retain(|layer| lora.targets.iter().any(|pattern| of(pattern, layer)));
    Ok(layers)
}

/// Names for people. Those that differ in numbers alone are one, with `*` for each number.
pub(super) fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for name in names {
        let parts = name.split('.').map(|part| if part.parse::<u32>().is_ok() { "*" } else { part });
        *kinds.entry(parts.collect::<Vec<_>>().join(".")).or_default() += 1;
    }
    let (count, shown) = (kinds.len(), 24);
    let mut names: Vec<String> = kinds.into_keys().take(shown).collect();
    if count > shown {
        names.push(counted(count - shown, "other"));
    }
    names.join(", ")
}

/// The prefix that PEFT gives the names of a model's modules.
pub(super) const PEFT_PREFIX: &str = "base_model.model.";

/// The settings of adapters in a folder that PEFT wrote.
pub(super) const PEFT_CONFIG: &str = "adapter_config.json";

/// The file of adapters in a folder that PEFT wrote.
pub(super) const PEFT_FILE: &str = "adapter_model.safetensors";

/// Opens adapters: a folder that PEFT wrote, or a safetensors file.
///
/// # Errors
///
/// The file is missing or no safetensors file.
pub fn open(path: &Path) -> Result<Weights, WorkbenchError> {
    let inside = path.join(PEFT_FILE);
    Ok(Weights::open(if inside.is_file() { &inside } else { path })?)
}

/// The matrices of a graph's adapters, under the names that files have for them. `adapters` are their names in the graph.
pub fn state(graph: &Graph, adapters: &BTreeSet<String>) -> Vec<StateTensor> {
    let ours = graph.state().filter(|tensor| tensor.names.iter().all(|name| adapters.contains(name)));
    let named = |mut tensor: StateTensor| {
        let peft: Vec<String> = tensor.names.iter().map(|name| format!("{PEFT_PREFIX}{name}")).collect();
        tensor.names.extend(peft);
        tensor
    };
    ours.map(named).collect()
}

/// Compares a file of adapters with those of a model, and returns notes about their differences.
///
/// # Errors
///
/// The adapters are those of another model, or of another rank, or the file can no longer be read.
pub fn compare(weights: &Weights, state: &[StateTensor]) -> Result<Vec<String>, WorkbenchError> {
    Ok(notes(weights, weights.compare(state)?, "in new adapters"))
}

/// A weight with its adapter added to it: `weight + scale · B A`, computed in f32 and rounded once.
///
/// # Errors
///
/// The matrices do not fit the weight.
pub fn merged(
    weight: &HostTensor,
    [a, b]: [&HostTensor; 2],
    scale: f64,
    transposed: bool,
) -> Result<HostTensor, WorkbenchError> {
    let misfit = || WorkbenchError::State("the adapter does not fit the weight".into());
    let ([rank, inputs], [outputs, columns]) = (a.shape(), b.shape()) else { return Err(misfit()) };
    let (rank, inputs, outputs) = (*rank, *inputs, *outputs);
    let shape = if transposed { [inputs, outputs] } else { [outputs, inputs] };
    if *columns != rank || weight.shape() != shape {
        return Err(misfit());
    }
    let floats = |tensor: &HostTensor| tensor.cast(DType::F32)?.to_f32_exact().ok_or_else(misfit);
    let (a, b, mut sum) = (floats(a)?, floats(b)?, floats(weight)?);
    let mut row = vec![0.0; inputs];
    for (o, factors) in b.chunks(rank.max(1)).enumerate() {
        row.fill(0.0);
        for (factor, part) in factors.iter().zip(a.chunks(inputs.max(1))) {
            row.iter_mut().zip(part).for_each(|(sum, x)| *sum += factor * x);
        }
        for (i, change) in row.iter().enumerate() {
            let at = if transposed { i * outputs + o } else { o * inputs + i };
            sum[at] += scale as f32 * change;
        }
    }
    Ok(HostTensor::from_f32(weight.shape(), &sum)?.cast(weight.dtype())?)
}
