//! Whole models on the default backend, and what the conformance suite does not cover: error texts, wrapping
//! integers, empty sums.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use fusionllm_backend::{Backend, BackendError, Cpu, Tensor, interpret, names, open};
use fusionllm_graph::ops::{Binary, Conv2d, CrossEntropy, Embedding, Gather, Index, Matmul};
use fusionllm_graph::{DType, Graph, HostTensor, Op, TrainGraph, ValueKind, autodiff};
use fusionllm_models::{Gpt2Config, ResNetConfig, ResNetStem};
use safetensors::SafeTensors;

fn run(op: impl Into<Op>, inputs: &[HostTensor]) -> Result<Vec<HostTensor>, BackendError> {
    let (op, backend) = (op.into(), Cpu);
    let outputs = op.infer(&inputs.iter().map(HostTensor::ty).collect::<Vec<_>>()).unwrap();
    let inputs = inputs.iter().map(|t| backend.upload(t).unwrap()).collect();
    backend.run(&op, inputs, &outputs)?.iter().map(|t| backend.download(t)).collect()
}

fn i64s(shape: &[usize], v: &[i64]) -> HostTensor {
    HostTensor::from_i64(shape, v).unwrap()
}

fn f32s(shape: &[usize], v: &[f32]) -> HostTensor {
    HostTensor::from_f32(shape, v).unwrap()
}

/// The loss of a model and its gradients, with each parameter's contributions added in order.
fn loss_and_gradients(
    graph: &Graph,
    mut inputs: BTreeMap<&str, HostTensor>,
    parameter: impl Fn(&str) -> HostTensor,
) -> (f64, BTreeMap<String, Vec<f64>>) {
    let backend = Cpu;
    let train: TrainGraph = autodiff::differentiate(graph, graph.outputs["loss"]).unwrap();
    let g = &train.graph;
    inputs.insert("loss_weight", HostTensor::scalar(g.ty(train.loss_weight).dtype, 1.0).unwrap());
    let mut sources = BTreeMap::new();
    for v in g.inputs().chain(g.parameters()).chain(g.buffers()) {
        let value = g.value(v);
        let host = match &value.kind {
            ValueKind::Input => inputs[value.name.as_str()].clone(),
            ValueKind::Buffer(init) => init.draw(0, &value.name, &value.ty).unwrap(),
            _ => parameter(&value.name),
        };
        sources.insert(v, backend.upload(&host).unwrap());
    }
    let mut targets = vec![train.loss];
    targets.extend(train.gradients.iter().flat_map(|p| &p.contributions));
    let results: Vec<Tensor> = interpret(&backend, g, sources, &targets).unwrap();
    let mut results = results.iter().map(|t| backend.download(t).unwrap().to_f64());
    let loss = results.next().unwrap()[0];
    let mut gradients = BTreeMap::new();
    for p in &train.gradients {
        let mut parts = results.by_ref().take(p.contributions.len());
        let first = parts.next().unwrap();
        let sum = parts.fold(first, |a, b| a.iter().zip(b).map(|(a, b)| a + b).collect());
        gradients.insert(g.value(p.parameter).name.clone(), sum);
    }
    (loss, gradients)
}

/// ‖a - b‖ / ‖b‖
fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()).max(1e-12)
}

fn host(file: &SafeTensors<'_>, name: &str) -> HostTensor {
    let view = file.tensor(name).unwrap();
    let (shape, bytes) = (view.shape(), view.data());
    match view.dtype() {
        safetensors::Dtype::F32 => f32s(shape, &bytemuck::pod_collect_to_vec(bytes)),
        safetensors::Dtype::I64 => i64s(shape, &bytemuck::pod_collect_to_vec(bytes)),
        other => panic!("{name} is {other:?}"),
    }
}

#[test]
fn gpt2_agrees_with_pytorch() {
    let zoo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo");
    let read = |name: &str| fs::read(zoo.join(name)).unwrap();
    let (reference, weights) = (read("gpt2.safetensors"), read("gpt2.weights.safetensors"));
    let (reference, weights) =
        (SafeTensors::deserialize(&reference).unwrap(), SafeTensors::deserialize(&weights).unwrap());
    let config: Gpt2Config = serde_json::from_slice(&read("gpt2.config.json")).unwrap();
    let x = host(&reference, "input.x");
    let (batch, sequence) = (x.shape()[0], x.shape()[1]);
    // The exported model compares the logits of a position with the target at the same position.
    let labels = host(&reference, "input.y");
    assert_eq!(labels.shape(), [batch, sequence]);
    let graph = config.build(batch, sequence, DType::F32).unwrap();
    let inputs = BTreeMap::from([("input_ids", x), ("labels", labels)]);
    let (loss, gradients) = loss_and_gradients(&graph, inputs, |name| host(&weights, name));

    let want = host(&reference, "loss").to_f64()[0];
    assert!((loss - want).abs() < 1e-5 * want, "loss {loss}, PyTorch's is {want}");
    let mut worst = (0.0, String::new());
    for (name, gradient) in &gradients {
        let want = host(&reference, &format!("grad.model.{name}")).to_f64();
        let error = relative_error(gradient, &want);
        assert!(error < 1e-4, "gradient of {name} is off by {error:e}");
        worst = if error > worst.0 { (error, name.clone()) } else { worst };
    }
    let known = reference.names().iter().filter(|n| n.starts_with("grad.")).count();
    assert_eq!(gradients.len(), known, "gradients of {:?}", gradients.keys());
    println!("loss off by {:e}, gradients by at most {:e} ({})", (loss - want).abs() / want, worst.0, worst.1);
}

#[test]
fn resnet_in_f32_agrees_with_f64() {
    let config = ResNetConfig { depth: 18, num_classes: 10, stem: ResNetStem::Imagenet, width: 8 };
    let pixels: Vec<f32> = (0..4 * 3 * 32 * 32).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let of = |dtype: DType| {
        let graph = config.build(4, 32, dtype).unwrap();
        let inputs = BTreeMap::from([
            ("pixel_values", f32s(&[4, 3, 32, 32], &pixels).cast(dtype).unwrap()),
            ("labels", i64s(&[4], &[0, 3, 9, 3])),
        ]);
        // Drawn in f32, so that both types start from the same numbers.
        let parameter = |name: &str| {
            let value = graph.value(graph.find(name).unwrap());
            let ValueKind::Parameter(init) = &value.kind else { panic!("{name} is no parameter") };
            let ty = fusionllm_graph::TensorType::new(DType::F32, value.ty.shape.clone());
            init.draw(1, name, &ty).unwrap().cast(dtype).unwrap()
        };
        loss_and_gradients(&graph, inputs, parameter)
    };
    let ((loss, gradients), (want, exact)) = (of(DType::F32), of(DType::F64));
    assert!((loss - want).abs() < 1e-5 * want, "{loss} and {want}");
    assert_eq!(gradients.len(), 62);
    for (name, want) in exact {
        let error = relative_error(&gradients[&name], &want);
        assert!(error < 1e-3, "gradient of {name} is off by {error:e}");
    }
}

#[test]
fn it_is_the_default() {
    assert_eq!(names()[0], "cpu");
    let backend = open("cpu").unwrap();
    assert!(backend.device().threads.unwrap() >= 1);
    let Err(BackendError::Unknown { known, .. }) = open("burn-gpu") else { panic!("opened an unknown backend") };
    assert!(known.contains("cpu"));
}

#[test]
fn an_index_outside_is_an_error_that_names_it() {
    let w = f32s(&[3, 2], &[0.0; 6]);
    let at = |v: i64| i64s(&[1], &[v]);
    let failures = [
        run(Embedding { padding_idx: None }, &[w.clone(), at(3)]),
        run(Gather { dim: 0 }, &[w.clone(), i64s(&[1, 2], &[0, 3])]),
        run(Index { indexed: vec![true, false] }, &[w.clone(), at(3)]),
        run(CrossEntropy { ignore_index: -1 }, &[w.clone(), i64s(&[3], &[-1, 1, 3])]),
    ];
    for failure in failures {
        let text = failure.unwrap_err().to_string();
        assert!(text.contains("index 3 is out of range"), "{text}");
    }
    assert!(run(Embedding { padding_idx: None }, &[w, at(-1)]).is_err());
}

#[test]
fn integers_wrap_around_and_do_not_divide_by_zero() {
    let x = i64s(&[2], &[i64::MAX, i64::MIN]);
    let y = i64s(&[2], &[1, -1]);
    assert_eq!(run(Binary::Add, &[x.clone(), y.clone()]).unwrap()[0].to_i64().unwrap(), [i64::MIN, i64::MAX]);
    assert_eq!(run(Binary::FloorDivide, &[x.clone(), y]).unwrap()[0].to_i64().unwrap(), [i64::MAX, i64::MIN]);
    let error = run(Binary::Remainder, &[x, i64s(&[1], &[0])]).unwrap_err().to_string();
    assert!(error.contains("zero"), "{error}");
}

#[test]
fn an_empty_sum_is_zero() {
    let empty = |shape: &[usize]| f32s(shape, &[]);
    assert_eq!(run(Matmul, &[empty(&[2, 0]), empty(&[0, 1])]).unwrap()[0].to_f64(), [0.0; 2]);
    let conv = Conv2d { stride: [1, 1], padding: [1, 1], dilation: [1, 1], groups: 1 };
    let y = run(conv, &[empty(&[1, 0, 1, 1]), empty(&[2, 0, 3, 3]), f32s(&[2], &[5.0, 6.0])]).unwrap();
    assert_eq!(y[0].to_f64(), [5.0, 6.0]);
}

#[test]
fn a_tensor_that_is_held_elsewhere_is_not_overwritten() {
    let backend = Cpu;
    let x = backend.upload(&f32s(&[3], &[1.0, 2.0, 3.0])).unwrap();
    let op = Op::from(Binary::Add);
    let outputs = [x.ty().clone()];
    let held = x.clone();
    let y = backend.run(&op, vec![x.clone(), x], &outputs).unwrap();
    assert_eq!(backend.download(&y[0]).unwrap().to_f64(), [2.0, 4.0, 6.0]);
    assert_eq!(backend.download(&held).unwrap().to_f64(), [1.0, 2.0, 3.0]);
}
