//! Whole models on the optional frameworks train as on the default backend.

#![cfg(any(feature = "burn", feature = "candle", feature = "wgpu"))]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use backends::backends;
use fusionllm_backend::{Backend, Cpu, interpret};
use fusionllm_graph::models::{AttentionImplementation, Gpt2Config, ResNetConfig, ResNetStem};
use fusionllm_graph::{DType, Graph, HostTensor, Init, TrainGraph, ValueKind, autodiff};

#[path = "support/backends.rs"]
mod backends;

fn gpt2(attention: AttentionImplementation, dtype: DType) -> Graph {
    let config = Gpt2Config {
        vocab_size: 61,
        n_positions: 16,
        n_embd: 24,
        n_layer: 2,
        n_head: 3,
        attn_pdrop: if attention == AttentionImplementation::Eager { 0.1 } else { 0.0 },
        attn_implementation: attention,
        ..Gpt2Config::default()
    };
    config.build(2, 12, dtype).unwrap()
}

fn resnet(depth: usize, stem: ResNetStem, dtype: DType) -> Graph {
    ResNetConfig { depth, num_classes: 10, stem, width: 4 }.build(2, 32, dtype).unwrap()
}

/// Values that depend on names and shapes alone. Labels and token ids are below 10.
fn source(graph: &Graph, at: fusionllm_graph::ValueId) -> HostTensor {
    let value = graph.value(at);
    match (&value.kind, value.ty.dtype) {
        (ValueKind::RngKey, _) => HostTensor::from_i64([], &[77]).unwrap(),
        (ValueKind::Parameter(init) | ValueKind::Buffer(init), _) => init.draw(3, &value.name, &value.ty).unwrap(),
        (_, DType::I64) => {
            let ids: Vec<i64> = (0..value.ty.numel() as i64).map(|i| i * 7 % 10).collect();
            HostTensor::from_i64(value.ty.shape.clone(), &ids).unwrap()
        }
        _ if value.name == "loss_weight" => HostTensor::scalar(value.ty.dtype, 1.0).unwrap(),
        _ => Init::Normal { std: 1.0 }.draw(3, &value.name, &value.ty).unwrap(),
    }
}

/// The loss, every gradient and every changed buffer.
fn train_step(backend: &dyn Backend, train: &TrainGraph) -> Vec<Vec<f64>> {
    let g = &train.graph;
    let mut sources = BTreeMap::new();
    for i in 0..g.values.len() as u32 {
        let at = fusionllm_graph::ValueId(i);
        if g.producer(at).is_none() {
            sources.insert(at, backend.upload(&source(g, at)).unwrap());
        }
    }
    let mut targets = vec![train.loss];
    targets.extend(train.gradients.iter().flat_map(|p| &p.contributions));
    targets.extend(g.state_updates.iter().map(|u| u.value));
    let results = interpret(backend, g, sources, &targets).unwrap();
    results.iter().map(|t| backend.download(t).unwrap().to_f64()).collect()
}

fn agree(graph: &Graph, tolerance: f64) {
    let train = autodiff::differentiate(graph, graph.outputs["loss"]).unwrap();
    let expected = train_step(&Cpu, &train);
    for backend in backends().into_iter().filter(|backend| backend.name() != Cpu::NAME) {
        for (i, (found, expected)) in train_step(&*backend, &train).iter().zip(&expected).enumerate() {
            let size = expected.iter().fold(0.0f64, |m, v| m.max(v.abs())).max(1e-3);
            let apart = found.iter().zip(expected).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
            assert!(
                apart <= tolerance * size,
                "{} on {}, result {i}: {apart} apart at a size of {size}",
                graph.name,
                backend.name()
            );
        }
    }
}

#[test]
fn gpt2_trains_as_on_the_default_backend() {
    for attention in [AttentionImplementation::Sdpa, AttentionImplementation::Eager] {
        agree(&gpt2(attention, DType::F64), 1e-10);
        agree(&gpt2(attention, DType::F32), 1e-4);
    }
}

#[test]
fn resnets_train_as_on_the_default_backend() {
    agree(&resnet(18, ResNetStem::Cifar, DType::F64), 1e-8);
    agree(&resnet(50, ResNetStem::Imagenet, DType::F64), 1e-6);
    agree(&resnet(18, ResNetStem::Cifar, DType::F32), 1e-4);
}

/// The documentation of the candle backend promises this.
#[test]
#[cfg(feature = "candle")]
fn candle_runs_every_operator_of_the_model_families_itself() {
    use fusionllm_backend::candle::HOST_OPERATORS;
    use fusionllm_graph::Op;
    use fusionllm_graph::ops::{AdamwStep, SgdStep, SquaredNorm};

    let models = [
        gpt2(AttentionImplementation::Sdpa, DType::F32),
        gpt2(AttentionImplementation::Eager, DType::F32),
        resnet(18, ResNetStem::Cifar, DType::F32),
        resnet(50, ResNetStem::Imagenet, DType::F32),
    ];
    let own = |graph: &Graph, op: &Op, first: Option<&fusionllm_graph::TensorType>| {
        let integers = first.is_some_and(|t| matches!(t.dtype, DType::I64 | DType::I32));
        let found = HOST_OPERATORS.iter().find(|h| (h.applies)(op, integers));
        assert!(found.is_none(), "{} has {op:?}, which candle does not run: {}", graph.name, found.unwrap().what);
    };
    for model in models {
        let train = autodiff::differentiate(&model, model.outputs["loss"]).unwrap().graph;
        for graph in [train, model.evaluation().unwrap()] {
            for node in &graph.nodes {
                own(&graph, &node.op, node.inputs.first().map(|v| graph.ty(*v)));
            }
        }
    }
    let x = fusionllm_graph::TensorType::new(DType::F32, [2]);
    let adamw = AdamwStep { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };
    let sgd = SgdStep { momentum: 0.9, weight_decay: 0.0, nesterov: false };
    for op in [Op::from(adamw), sgd.into(), SquaredNorm.into()] {
        own(&gpt2(AttentionImplementation::Sdpa, DType::F32), &op, Some(&x));
    }
}
