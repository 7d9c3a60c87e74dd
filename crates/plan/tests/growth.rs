//! Graphs with long chains of nodes. Work and memory grow with the graph and not with its square, and no function calls
//! itself once for each node of a chain.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{Builder, DType, Graph, HostTensor, Init, TensorType};
use fusionllm_plan::{Schedule, Work};
use fusionllm_program::{Optimizer, Program};

const LENGTH: usize = 20_000;

fn on_a_small_stack<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        std::thread::Builder::new().stack_size(512 << 10).spawn_scoped(scope, work).unwrap().join().unwrap()
    })
}

/// A linear layer, then a chain of views of its result, then another linear layer.
fn views() -> Graph {
    let mut b = Builder::new("views");
    let x = b.input("x", DType::F32, [4, 6]).unwrap();
    let w = b.parameter("w", DType::F32, [6, 6], Init::Constant(0.1)).unwrap();
    let mut y = b.scope("first", |b| b.linear(x, w, None)).unwrap();
    for i in 0..LENGTH {
        y = b.scope("view", |b| b.reshape(y, if i % 2 == 0 { [6, 4] } else { [4, 6] })).unwrap();
    }
    finish(b, y)
}

/// Operators on constants alone, whose result a linear layer reads.
fn constants() -> Graph {
    let mut b = Builder::new("constants");
    let x = b.input("x", DType::F32, [4, 6]).unwrap();
    let w = b.parameter("w", DType::F32, [6, 6], Init::Constant(0.1)).unwrap();
    let first = b.scope("first", |b| b.linear(x, w, None)).unwrap();
    let mut c = b.constant("c", HostTensor::zeros(TensorType::new(DType::F32, [4, 6]))).unwrap();
    for _ in 0..LENGTH {
        c = b.scope("constant", |b| b.add_scalar(c, 1.0)).unwrap();
    }
    let y = b.scope("second", |b| b.add(first, c)).unwrap();
    finish(b, y)
}

fn finish(mut b: Builder, y: fusionllm_graph::ValueId) -> Graph {
    let w = b.parameter("last.w", DType::F32, [6, 6], Init::Constant(0.1)).unwrap();
    let y = b.scope("second", |b| b.linear(y, w, None)).unwrap();
    let loss = b.scope("second", |b| b.sum(y, &[0, 1], false)).unwrap();
    b.output("loss", loss).unwrap();
    b.output("correct", loss).unwrap();
    b.finish().unwrap()
}

/// The programs of two peers. The second has the nodes whose names begin with `second`.
fn two_peers(graph: &Graph) -> Vec<Program> {
    let plan = plan_by(graph, 2, Schedule::GPipe, |name| u32::from(name.starts_with("second")));
    programs(graph, &plan).concat()
}

/// The second peer runs the views again rather than receive their result, and the compiler called itself once for each.
#[test]
fn a_chain_of_views_is_compiled_on_a_small_stack() {
    for graph in [views(), constants()] {
        let programs = on_a_small_stack(|| two_peers(&graph));
        for program in &programs {
            program.validate().unwrap();
        }
        // No peer repeats most of the other's work.
        let total: usize = programs.iter().map(|p| p.nodes.len()).sum();
        assert!(total < 5 * LENGTH, "{total} nodes");
    }
}

/// A peer that reads a view also reads the tensors below it. Lists of these readers grew with the square of the chain.
#[test]
fn the_readers_of_a_chain_of_views_are_few() {
    let optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
    for graph in [views(), constants()] {
        let work = on_a_small_stack(|| Work::new(&graph, &train_graph(&graph), &optimizer));
        let flows = work.flows.iter().map(|f| f.to.len());
        let held = work.kept.iter().chain(&work.inputs).chain(&work.state).map(|t| t.readers.len());
        let readers: usize = flows.chain(held).sum();
        assert!(readers < 200 * LENGTH, "{readers} readers");
    }
}
