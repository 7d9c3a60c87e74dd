//! Helpers of the executor's tests: small models, random cuts, batches.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use fusionllm_backend::{Backend, open};
use fusionllm_exec::ExecError;
use fusionllm_exec::local::{LocalRun, Training};
pub(crate) use fusionllm_graph::ChoiceRng;
use fusionllm_graph::ops::{AdamwStep, SgdStep};
use fusionllm_graph::{
    CounterRng, DType, Graph, HostTensor, Precision, TensorType, TrainGraph, Value, ValueKind, autodiff,
};
use fusionllm_models::{AttentionImplementation, Gpt2Config, ResNetConfig, ResNetStem};
use fusionllm_plan::{Plan, Schedule, compile};
use fusionllm_program::{LearningRate, Optimizer};

pub(crate) fn gpt2(attention: AttentionImplementation, dropout: f64) -> Graph {
    let config = Gpt2Config {
        vocab_size: 31,
        n_positions: 12,
        n_embd: 16,
        n_layer: 2,
        n_head: 2,
        resid_pdrop: dropout,
        embd_pdrop: dropout,
        attn_pdrop: dropout,
        attn_implementation: attention,
        ..Gpt2Config::default()
    };
    config.build(2, 12, DType::F32).unwrap()
}

/// The graph in bf16.
pub(crate) fn narrow(graph: Graph) -> Graph {
    graph.in_precision(Precision::Bf16, Precision::F32).unwrap()
}

pub(crate) fn resnet(dtype: DType) -> Graph {
    let config = ResNetConfig { depth: 18, num_classes: 10, stem: ResNetStem::Cifar, width: 4 };
    config.build(2, 16, dtype).unwrap()
}

pub(crate) fn adamw() -> Training {
    Training {
        optimizer: Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }),
        learning_rate: LearningRate { base: 3e-3, warmup: 5, cosine_until: Some(60), min: 1e-4 },
        clip: Some(1.0),
        seed: 7,
    }
}

pub(crate) fn plain_sgd(lr: f64, momentum: f64, weight_decay: f64) -> Training {
    Training {
        optimizer: Optimizer::Sgd(SgdStep { momentum, weight_decay, nesterov: false }),
        learning_rate: LearningRate { base: lr, warmup: 0, cosine_until: None, min: 0.0 },
        clip: None,
        seed: 7,
    }
}

pub(crate) fn train_graph(graph: &Graph) -> TrainGraph {
    autodiff::differentiate(graph, graph.outputs["loss"]).unwrap()
}

/// A random cut with any number of stages on `peers` peers. Each node is at a random stage, not before its operands'.
pub(crate) fn random_plan(graph: &Graph, peers: usize, micro_batches: u32, choices: &mut ChoiceRng) -> Plan {
    let stages = if peers == 1 { 1 + choices.below(3) } else { peers + choices.below(3) };
    let n = graph.nodes.len();
    let mut cuts: Vec<usize> = (1..stages).map(|_| choices.below(n)).collect();
    cuts.sort_unstable();
    let mut stage_of: Vec<u32> = Vec::new();
    for id in graph.node_ids() {
        let near = cuts.iter().filter(|c| **c <= id.index()).count() as u32;
        let earliest = graph
            .node(id)
            .inputs
            .iter()
            .filter_map(|v| graph.producer(*v))
            .map(|p| stage_of[p.index()])
            .max()
            .unwrap_or(0);
        // Some nodes run elsewhere than their neighbours, like a branch.
        let stray = if choices.below(6) == 0 { choices.below(stages) as u32 } else { near };
        stage_of.push(stray.max(earliest));
    }
    // Batch norm's statistics stay with their operator, so any stage may be on any peer.
    let mut peer_of_stage: Vec<u32> = (0..stages).map(|s| (s % peers) as u32).collect();
    for s in 1..stages {
        peer_of_stage.swap(s, choices.below(s + 1));
    }
    let schedule = Schedule::ALL[choices.below(Schedule::ALL.len())];
    let names = (0..peers).map(|p| format!("p{p}")).collect();
    Plan::from_stages(graph, &stage_of, &peer_of_stage, names, micro_batches, schedule, "random")
}

/// Gives every stage of a plan one to three turns, each on any peer.
pub(crate) fn replicate(mut plan: Plan, choices: &mut ChoiceRng) -> Plan {
    for stage in &mut plan.stages {
        let turns = 1 + choices.below(3.min(plan.micro_batches as usize));
        stage.peers = (0..turns).map(|_| choices.below(plan.peers.len()) as u32).collect();
    }
    plan
}

pub(crate) fn one_peer(graph: &Graph, micro_batches: u32) -> Plan {
    Plan::from_stages(
        graph,
        &vec![0; graph.nodes.len()],
        &[0],
        vec!["p0".into()],
        micro_batches,
        Schedule::OneFOneB,
        "one",
    )
}

pub(crate) fn initial(seed: u64) -> impl Fn(&Value) -> Result<HostTensor, ExecError> {
    move |value| match &value.kind {
        ValueKind::Parameter(init) | ValueKind::Buffer(init) => Ok(init.draw(seed, &value.name, &value.ty)?),
        _ => Err(ExecError::State(format!("{:?} has no initial value", value.name))),
    }
}

pub(crate) fn local_run(graph: &Graph, plan: &Plan, backends: &[Arc<dyn Backend>], training: Training) -> LocalRun {
    let programs = compile(plan, graph, &train_graph(graph)).unwrap();
    LocalRun::new(programs, backends, training, initial(training.seed)).unwrap()
}

pub(crate) fn backends(name: &str, count: usize) -> Vec<Arc<dyn Backend>> {
    (0..count).map(|_| open(name).unwrap()).collect()
}

/// A batch drawn from the step: every input of the graph, with some labels ignored. Micro-batches are weighted by their
/// targets.
pub(crate) fn batch(graph: &Graph, micro_batches: u32, step: u64) -> Vec<BTreeMap<String, HostTensor>> {
    let rng = CounterRng::new(1000 + step);
    let draw = |ty: &TensorType, stream: u64, m: u32| -> HostTensor {
        let n = ty.numel() as u64;
        let u = |i: u64| f64::from(rng.uniform(i + n * u64::from(m), stream));
        match ty.dtype {
            DType::I64 => {
                let classes = graph.ty(graph.outputs["logits"]).shape.last().copied().unwrap() as f64;
                // A noisy pattern to learn. Every ninth label is ignored.
                let values: Vec<i64> = (0..n)
                    .map(|i| {
                        if stream == 1 && i % 9 == 4 + u64::from(m) % 3 {
                            -100
                        } else {
                            (u(i).powi(2) * classes) as i64
                        }
                    })
                    .collect();
                HostTensor::from_i64(ty.shape.clone(), &values).unwrap()
            }
            _ => {
                let values: Vec<f64> = (0..n).map(|i| 2.0 * u(i) - 1.0).collect();
                HostTensor::from_f64(ty.shape.clone(), &values).unwrap().cast(ty.dtype).unwrap()
            }
        }
    };
    let inputs: Vec<(String, TensorType)> =
        graph.inputs().map(|v| (graph.value(v).name.clone(), graph.ty(v).clone())).collect();
    let mut parts: Vec<BTreeMap<String, HostTensor>> = (0..micro_batches)
        .map(|m| inputs.iter().enumerate().map(|(s, (name, ty))| (name.clone(), draw(ty, s as u64, m))).collect())
        .collect();
    let counts: Vec<usize> =
        parts.iter().map(|p| p["labels"].to_i64().unwrap().iter().filter(|l| **l >= 0).count()).collect();
    let total: usize = counts.iter().sum();
    for (part, count) in parts.iter_mut().zip(counts) {
        let dtype = graph.ty(graph.outputs["loss"]).dtype;
        part.insert("loss_weight".into(), HostTensor::scalar(dtype, count as f64 / total as f64).unwrap());
    }
    parts
}

pub(crate) fn losses(graph: &Graph, run: &mut LocalRun, micro_batches: u32, steps: u64) -> Vec<f64> {
    (0..steps).map(|s| run.step(&batch(graph, micro_batches, s)).unwrap().loss).collect()
}

/// A file of the reference results that PyTorch computed.
pub(crate) fn zoo(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo").join(name)).unwrap()
}
