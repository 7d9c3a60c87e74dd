//! The parameters whose learning rate or weight decay are not those of the optimizer.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::lora::names;
use fusionllm_graph::ops::Binary;
use fusionllm_graph::{Graph, Op, ValueId};
use fusionllm_program::ParameterGroup;
use fusionllm_workspace::config::OptimizerConfig;

use super::adapters::listed;
use crate::WorkbenchError;

/// The groups of a graph's parameters, by their names. A parameter that is not in the map has the optimizer's own rate
/// and decay. Without a group of the job, biases, norms and embeddings have no weight decay.
///
/// # Errors
///
/// A pattern of the job names no parameter.
pub(super) fn groups(
    config: &OptimizerConfig,
    graph: &Graph,
) -> Result<BTreeMap<String, ParameterGroup>, WorkbenchError> {
    let parameters = || graph.parameters().map(|v| graph.value(v).name.as_str());
    let patterns = config.groups.iter().flat_map(|group| &group.parameters);
    if let Some(pattern) = patterns.into_iter().find(|pattern| !parameters().any(|name| names(pattern, name))) {
        return Err(WorkbenchError::input_with_hint(
            format!("`train.optimizer.groups`: no parameter that is trained is named {pattern:?}"),
            format!("the parameters are {}; `*` stands for any text", listed(parameters())),
        ));
    }
    let tables = embeddings(graph);
    let standard = ParameterGroup { rate: 1.0, weight_decay: config.weight_decay };
    let group = |v: ValueId| {
        let name = &graph.value(v).name;
        let own = config.groups.iter().find(|group| group.parameters.iter().any(|pattern| names(pattern, name)));
        let decays = graph.ty(v).rank() >= 2 && name.rsplit('.').next() != Some("bias") && !tables.contains(&v);
        let group = ParameterGroup {
            rate: own.and_then(|group| group.lr).map_or(standard.rate, |lr| lr / config.lr),
            weight_decay: own.and_then(|group| group.weight_decay).unwrap_or(match decays {
                true => standard.weight_decay,
                false => 0.0,
            }),
        };
        (group != standard).then(|| (name.clone(), group))
    };
    Ok(graph.parameters().filter_map(group).collect())
}

/// The parameters whose rows are looked up, even if the output layer shares them, and those that are added to
/// activations, such as positions that a model has learnt.
fn embeddings(graph: &Graph) -> BTreeSet<ValueId> {
    let tables = graph.nodes.iter().flat_map(|node| match node.op {
        Op::Embedding(_) => &node.inputs[..1],
        Op::Binary(Binary::Add) => &node.inputs[..],
        _ => &[],
    });
    // A model may read a part of a parameter, a view of it, or a copy of another type.
    let origin = |mut v: ValueId| {
        while let Some([input]) = graph.producer(v).map(|node| &graph.node(node).inputs[..]) {
            v = *input;
        }
        v
    };
    tables.map(|v| origin(*v)).collect()
}
