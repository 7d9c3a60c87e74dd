//! Frozen parameters and adapters: what backward still computes, and what the graph computes at first.

#![allow(clippy::unwrap_used)]

use fusionllm_graph::autodiff::differentiate;
use fusionllm_graph::lora::Adapters;
use fusionllm_graph::{DType, Graph, Phase, Precision, ValueKind};
use fusionllm_models::Gpt2Config;

const ADAPTERS: Adapters = Adapters { rank: 2, scale: 0.5, dropout: 0.1 };

fn gpt2() -> Graph {
    let config = Gpt2Config { vocab_size: 32, n_embd: 16, n_head: 2, n_layer: 2, n_positions: 8, ..Default::default() };
    config.build(2, 8, DType::F32).unwrap()
}

fn backward(graph: &Graph) -> Vec<String> {
    let train = differentiate(graph, graph.outputs["loss"]).unwrap();
    let nodes = train.graph.nodes.iter().filter(|node| node.phase != Phase::Forward);
    nodes.map(|node| node.name.clone()).collect()
}

#[test]
fn backward_ends_where_nothing_below_is_trained() {
    let graph = gpt2().freeze(|name| !name.starts_with("transformer.h.1."));
    let train = differentiate(&graph, graph.outputs["loss"]).unwrap();
    let trained: Vec<&str> = train.gradients.iter().map(|g| graph.value(g.parameter).name.as_str()).collect();
    assert_eq!(trained.len(), 12);
    assert!(trained.iter().all(|name| name.starts_with("transformer.h.1.")));
    let names = backward(&graph);
    assert!(names.iter().any(|name| name.starts_with("transformer.h.1.")));
    assert!(!names.iter().any(|name| name.starts_with("transformer.h.0.") || name.starts_with("transformer.wte")));
    assert!(names.len() < backward(&gpt2()).len() / 2 + 10);
}

#[test]
fn every_linear_layer_has_its_name_and_its_shape() {
    let graph = gpt2();
    let layers = graph.linear_layers();
    let shown: Vec<(&str, usize, usize, bool)> =
        layers.iter().map(|l| (l.name.as_str(), l.inputs, l.outputs, l.transposed)).collect();
    assert_eq!(shown[0], ("transformer.h.0.attn.c_attn", 16, 48, true));
    assert_eq!(shown[3], ("transformer.h.0.mlp.c_proj", 64, 16, true));
    assert_eq!(shown.last(), Some(&("transformer.wte", 16, 32, false)), "the head, which is tied");
    assert_eq!(layers.len(), 9);
}

#[test]
fn adapters_are_trained_and_nothing_else() {
    let graph = gpt2().freeze(|_| true);
    let layers: Vec<_> = graph.linear_layers().into_iter().filter(|l| l.name.contains(".h.")).collect();
    let adapted = graph.with_adapters(&ADAPTERS, &layers).unwrap();
    let train = differentiate(&adapted, adapted.outputs["loss"]).unwrap();
    let trained: Vec<&str> = train.gradients.iter().map(|g| adapted.value(g.parameter).name.as_str()).collect();
    let expected: Vec<String> = layers.iter().flat_map(|layer| layer.adapter_names()).collect();
    assert_eq!(trained, expected);
    // Each dropout has a stream of its own, and those of the model keep theirs.
    let streams = |graph: &Graph| {
        let of = graph.nodes.iter().filter_map(|node| match &node.op {
            fusionllm_graph::Op::Dropout(dropout) => Some((dropout.stream, node.name.clone())),
            _ => None,
        });
        of.collect::<std::collections::BTreeMap<u64, String>>()
    };
    let (before, after) = (streams(&graph), streams(&adapted));
    assert_eq!(after.len(), before.len() + layers.len());
    assert!(before.iter().all(|(stream, name)| after[stream].starts_with(name.trim_end_matches("_2"))));
}

#[test]
fn a_frozen_table_is_read_before_it_is_widened() {
    let graph = gpt2().freeze(|_| true).in_precision(Precision::F32, Precision::Bf16).unwrap();
    for v in graph.values.iter().filter(|v| matches!(v.kind, ValueKind::Frozen(_))) {
        assert_eq!(v.ty.dtype, DType::BF16, "{}", v.name);
    }
    let table = graph.find("transformer.wte.weight").unwrap();
    let readers: Vec<&str> =
        graph.nodes.iter().filter(|node| node.inputs.contains(&table)).map(|node| node.op.name()).collect();
    assert_eq!(readers, ["embedding", "_to_copy"]);
    assert_eq!(graph.ty(graph.outputs["loss"]).dtype, DType::F32);
}
