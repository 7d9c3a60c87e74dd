//! From a graph to a plan to a training run. Both peers of the plan are threads of this process.
//!
//!     cargo run --release --example train

use std::collections::BTreeMap;
use std::error::Error;

use fusionllm_backend as backend;
use fusionllm_exec::ExecError;
use fusionllm_exec::local::{LocalRun, Training};
use fusionllm_graph::ops::{AdamwStep, Unary};
use fusionllm_graph::{Builder, DType, Graph, GraphError, HostTensor, Init, ValueKind, autodiff};
use fusionllm_plan::{Schedule, compile, equal_compute};
use fusionllm_program::{LearningRate, Optimizer};

const SAMPLES: usize = 64;
const MICRO_BATCHES: usize = 4;

/// Does a point of the plane lie inside the circle? The output `loss` is the mean over a micro-batch.
fn classifier() -> Result<Graph, GraphError> {
    let mut b = Builder::new("classifier");
    let x = b.input("x", DType::F32, [SAMPLES, 2])?;
    let y = b.input("y", DType::I64, [SAMPLES])?;
    let weight = b.parameter("hidden.weight", DType::F32, [32, 2], Init::Normal { std: 1.0 })?;
    let bias = b.parameter("hidden.bias", DType::F32, [32], Init::Normal { std: 1.0 })?;
    let hidden = b.linear(x, weight, Some(bias))?;
    let hidden = b.unary(Unary::Tanh, hidden)?;
    let weight = b.parameter("head.weight", DType::F32, [2, 32], Init::Normal { std: 0.1 })?;
    let logits = b.linear(hidden, weight, None)?;
    let loss = b.cross_entropy(logits, y, -100)?;
    b.output("loss", loss)?;
    b.finish()
}

/// The inputs of one micro-batch by name: points, their classes, and the micro-batch's share of the batch's loss.
fn micro_batch(number: usize) -> Result<BTreeMap<String, HostTensor>, GraphError> {
    let point = |i: usize| [0.754_877 * i as f32, 0.569_84 * i as f32].map(|x| 2.0 * x.fract() - 1.0);
    let points: Vec<[f32; 2]> = (number * SAMPLES..(number + 1) * SAMPLES).map(point).collect();
    let classes: Vec<i64> = points.iter().map(|[x, y]| i64::from(x * x + y * y < 0.5)).collect();
    Ok(BTreeMap::from([
        ("x".to_owned(), HostTensor::from_f32([SAMPLES, 2], points.as_flattened())?),
        ("y".to_owned(), HostTensor::from_i64([SAMPLES], &classes)?),
        ("loss_weight".to_owned(), HostTensor::from_f32([], &[1.0 / MICRO_BATCHES as f32])?),
    ]))
}

/// Trains over these peers: the loss of each step.
fn train(peers: &[String], steps: usize) -> Result<Vec<f64>, Box<dyn Error>> {
    // The model as a graph, and the same graph with its backward operators.
    let graph = classifier()?;
    let with_backward = autodiff::differentiate(&graph, graph.outputs["loss"])?;

    // The plan says which peer runs which operators. Each peer gets its share as a program.
    let plan = equal_compute(&graph, peers, MICRO_BATCHES as u32, Schedule::default())?;
    for stage in &plan.stages {
        let names: Vec<&str> = stage.nodes.iter().map(|node| graph.node(*node).name.as_str()).collect();
        println!("{}: {}", plan.peers[stage.peers[0] as usize], names.join(", "));
    }
    let programs = compile(&plan, &graph, &with_backward)?;

    // Each peer computes on a backend of its own. Parameters are drawn from the seed and their names.
    let backends = peers.iter().map(|_| backend::open(backend::names()[0])).collect::<Result<Vec<_>, _>>()?;
    let training = Training {
        optimizer: Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 }),
        learning_rate: LearningRate { base: 0.02, warmup: 0, cosine_until: None, min: 0.0 },
        clip: Some(1.0),
        seed: 1,
    };
    let mut run = LocalRun::new(programs, &backends, training, |value| match &value.kind {
        ValueKind::Parameter(init) => Ok(init.draw(training.seed, &value.name, &value.ty)?),
        _ => Err(ExecError::State(format!("{} is no parameter", value.name))),
    })?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let inputs =
            (0..MICRO_BATCHES).map(|m| micro_batch(step * MICRO_BATCHES + m)).collect::<Result<Vec<_>, _>>()?;
        losses.push(run.step(&inputs)?.loss);
    }
    Ok(losses)
}

fn main() -> Result<(), Box<dyn Error>> {
    let losses = train(&["left".to_owned(), "right".to_owned()], 100)?;
    for (step, loss) in losses.iter().enumerate().step_by(20).chain([(99, &losses[99])]) {
        println!("step {}: loss {loss:.4}", step + 1);
    }
    Ok(())
}

#[test]
fn two_peers_learn_what_one_does() {
    let names = ["left", "right"].map(String::from);
    let losses = train(&names, 60).unwrap();
    assert!(losses[59] < 0.3 && losses[0] > 0.5, "{losses:?}");
    assert_eq!(losses, train(&names[..1], 60).unwrap(), "bit for bit");
}
