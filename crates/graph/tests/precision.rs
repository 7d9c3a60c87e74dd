//! Graphs in bf16: the type of each value, and how backward follows.

#![allow(clippy::unwrap_used)]

use fusionllm_graph::autodiff::differentiate;
use fusionllm_graph::ops::{Approximate, Gelu};
use fusionllm_graph::{Builder, DType, Graph, Init, Op, Phase, Precision, ValueId};
use fusionllm_models::{Gpt2Config, ResNetConfig, ResNetStem};

const F: DType = DType::F32;

/// Two layers with a GELU between, a residual, and a loss.
fn network() -> Graph {
    let mut b = Builder::new("network");
    let x = b.input("x", F, [8, 16]).unwrap();
    let w = b.parameter("w", F, [16, 16], Init::Normal { std: 0.1 }).unwrap();
    let y = b.input("y", DType::I64, [8]).unwrap();
    let h = b.linear(x, w, None).unwrap();
    let h = b.op(Gelu { approximate: Approximate::None }, &[h]).unwrap();
    let h = b.linear(h, w, None).unwrap();
    let h = b.add(h, x).unwrap();
    let loss = b.cross_entropy(h, y, -100).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

fn narrow(graph: Graph) -> Graph {
    graph.in_precision(Precision::Bf16, Precision::F32).unwrap()
}

fn made(graph: &Graph, node: usize) -> String {
    let node = &graph.nodes[node];
    format!("{} {}", node.op.name(), graph.ty(node.outputs[0]).dtype)
}

#[test]
fn products_are_narrow_and_losses_wide() {
    let graph = narrow(network());
    let all: Vec<String> = (0..graph.nodes.len()).map(|n| made(&graph, n)).collect();
    let expected = [
        "_to_copy bf16", // x
        "_to_copy bf16", // w
        "linear bf16",
        "gelu bf16",
        "_to_copy bf16", // w again, so that no copy of it stays
        "linear bf16",
        "_to_copy f32",
        "add f32",
        "cross_entropy_loss f32",
    ];
    assert_eq!(all, expected);
    assert_eq!(graph.ty(graph.outputs["loss"]).dtype, F);
}

#[test]
fn in_f32_a_graph_stays_as_it_is() {
    assert_eq!(network().in_precision(Precision::F32, Precision::F32).unwrap(), network());
}

/// Gradients of parameters are f32. No backward node reads a parameter's cast that forward made, because that would be
/// kept for every micro-batch in flight.
#[test]
fn backward_casts_parameters_again_and_adds_in_f32() {
    let gpt2 = Gpt2Config { n_layer: 2, n_embd: 16, n_head: 2, vocab_size: 11, ..Gpt2Config::default() };
    let resnet = ResNetConfig { depth: 18, num_classes: 10, stem: ResNetStem::Cifar, width: 4 };
    for graph in [network(), gpt2.build(2, 8, F).unwrap(), resnet.build(2, 16, F).unwrap()] {
        let parameters: Vec<String> = graph.parameters().map(|v| graph.value(v).name.clone()).collect();
        let graph = narrow(graph);
        let kept: Vec<String> = graph.parameters().map(|v| graph.value(v).name.clone()).collect();
        assert_eq!(kept, parameters);
        let train = differentiate(&graph, graph.outputs["loss"]).unwrap();
        let terms = train.gradients.iter().flat_map(|g| &g.contributions);
        assert!(terms.clone().count() >= parameters.len() && terms.clone().all(|v| train.graph.ty(*v).dtype == F));
        let is_cast_of_parameter = |v: ValueId| {
            let maker = train.graph.producer(v).map(|n| train.graph.node(n));
            maker.is_some_and(|n| {
                matches!(n.op, Op::Cast(_))
                    && n.phase == Phase::Forward
                    && train.graph.parameters().any(|p| n.inputs[0] == p)
            })
        };
        for node in train.graph.nodes.iter().filter(|n| n.phase != Phase::Forward) {
            assert!(!node.inputs.iter().any(|v| is_cast_of_parameter(*v)), "{}", node.name);
            if node.op.name() == "add" {
                assert_eq!(train.graph.ty(node.outputs[0]).dtype, F, "{}", node.name);
            }
        }
        graph.evaluation().unwrap();
    }
}
