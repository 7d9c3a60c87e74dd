//! Whole models on the optional frameworks train as on the default backend.

#![cfg(any(feature = "burn", feature = "wgpu"))]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use backends::backends;
use fusionllm_backend::{Backend, Cpu, interpret};
use fusionllm_graph::{DType, Graph, HostTensor, Init, TrainGraph, ValueKind, autodiff};
use fusionllm_models::{AttentionImplementation, Gpt2Config, ResNetConfig, ResNetStem};

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
