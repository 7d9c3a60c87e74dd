//! The values of a training step that codecs may change.

use std::collections::BTreeSet;

use fusionllm_compress::Element;
use fusionllm_graph::{Graph, Phase, TrainGraph, ValueId, ValueKind};
use fusionllm_program::{element, takes_codec};

/// The values that a codec may change on their way to another peer: activations that have a gradient, and gradients of
/// activations.
///
/// All else arrives exactly. A preprocessed target, a float mask, a time embedding or the output of a frozen part has no
/// gradient. Its error would be the same in every step, so training would not average it out.
pub(crate) fn coded_values(train: &TrainGraph) -> BTreeSet<ValueId> {
    let graph = &train.graph;
    let differentiated: BTreeSet<ValueId> = train.gradient_of.values().flatten().copied().collect();
    let mut coded = BTreeSet::new();
    for (node, varies) in graph.nodes.iter().zip(varies(graph)) {
        let carries = |v: &ValueId| match node.phase {
            Phase::Forward => differentiated.contains(v),
            Phase::InputGrad => true,
            Phase::WeightGrad => false,
        };
        coded.extend(node.outputs.iter().filter(|v| varies && carries(v) && takes_codec(graph.ty(**v))));
    }
    coded
}

/// The widest numbers of the values that a codec may change. `None` if there is no such value.
pub(crate) fn widest_coded(train: &TrainGraph) -> Option<Element> {
    coded_values(train).into_iter().filter_map(|v| element(train.graph.ty(v).dtype)).max()
}

/// By node: whether it depends on an input. False for nodes that depend on parameters alone.
fn varies(graph: &Graph) -> Vec<bool> {
    let mut varies = vec![false; graph.nodes.len()];
    for (n, node) in graph.nodes.iter().enumerate() {
        varies[n] = node.inputs.iter().any(|v| match graph.producer(*v) {
            Some(p) => varies[p.index()],
            None => graph.value(*v).kind == ValueKind::Input,
        });
    }
    varies
}
