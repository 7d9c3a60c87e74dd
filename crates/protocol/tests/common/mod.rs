//! Helpers of the protocol's tests: programs, and simulated peers that send what the programs require.
#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod simulation;
pub(crate) mod stage;

pub(crate) use fusionllm_graph::ChoiceRng;
use fusionllm_graph::ops::Unary;
use fusionllm_graph::{Builder, DType, Init, autodiff};
use fusionllm_plan::{Plan, Schedule, compile, compile_forward};
use fusionllm_program::Program;

/// Training and evaluation programs of peers with one layer each. The last peer shares the first peer's weight.
/// Activations are just as large as codecs take them.
pub(crate) fn programs(peers: usize, micro_batches: u32) -> Vec<(Program, Program)> {
    programs_of(peers, peers, micro_batches)
}

/// Programs like those of [`programs`], for a model of this many layers that the peers share evenly. There are at most
/// as many peers as layers.
pub(crate) fn programs_of(layers: usize, peers: usize, micro_batches: u32) -> Vec<(Program, Program)> {
    let mut b = Builder::new("layers");
    let mut y = b.input("x", DType::F32, [16, 4]).unwrap();
    let labels = b.input("labels", DType::I64, [16]).unwrap();
    let tied = b.parameter("tied", DType::F32, [4, 4], Init::Constant(0.5)).unwrap();
    let mut stage_of = Vec::new();
    for layer in 0..layers {
        y = match layer {
            0 => b.linear(y, tied, None).unwrap(),
            // A layer without parameters, so that a peer may have an empty share.
            4 => b.unary(Unary::Relu, y).unwrap(),
            p => {
                let w = b.parameter(&format!("w{p}"), DType::F32, [4, 4], Init::Constant(0.5)).unwrap();
                b.linear(y, w, None).unwrap()
            }
        };
        stage_of.push((layer * peers / layers) as u32);
    }
    y = b.linear(y, tied, None).unwrap();
    let loss = b.cross_entropy(y, labels, -100).unwrap();
    let correct = b.sum(y, &[0, 1], false).unwrap();
    b.output("loss", loss).unwrap();
    b.output("correct", correct).unwrap();
    let graph = b.finish().unwrap();
    stage_of.resize(graph.nodes.len(), peers as u32 - 1);
    let peer_of: Vec<u32> = (0..peers as u32).collect();
    let plan = Plan::from_stages(&graph, &stage_of, &peer_of, names(peers), micro_batches, Schedule::OneFOneB, "test");
    let train = compile(&plan, &graph, &autodiff::differentiate(&graph, loss).unwrap()).unwrap();
    let eval = compile_forward(&plan, &graph, &graph.evaluation().unwrap(), &["loss", "correct"]).unwrap();
    train.into_iter().zip(eval).collect()
}

pub(crate) fn names(peers: usize) -> Vec<String> {
    (0..peers).map(|p| format!("p{p}")).collect()
}
