//! The evaluation form of a graph.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use fusionllm_graph::{Builder, DType, Graph, HostTensor, Init, Op, Phase, ValueId, ValueKind};
use fusionllm_models::{AttentionImplementation, Gpt2Config, ResNetConfig, ResNetStem};

fn names(g: &Graph, of: impl Fn(&ValueKind) -> bool) -> BTreeSet<&str> {
    g.values.iter().filter(|v| of(&v.kind)).map(|v| v.name.as_str()).collect()
}

fn check_evaluation(train: &Graph, eval: &Graph) {
    eval.validate().unwrap();
    assert!(eval.state_updates.is_empty());
    assert_eq!(eval.outputs.keys().collect::<Vec<_>>(), train.outputs.keys().collect::<Vec<_>>());
    for (name, v) in &eval.outputs {
        assert_eq!(eval.ty(*v), train.ty(train.outputs[name]), "{name}");
    }
    assert_eq!(eval.metadata, train.metadata);
    // Weights and statistics keep their names.
    for kind in [
        |k: &ValueKind| matches!(k, ValueKind::Parameter(_)),
        |k: &ValueKind| matches!(k, ValueKind::Buffer(_)),
        |k: &ValueKind| matches!(k, ValueKind::Input),
    ] {
        assert_eq!(names(eval, kind), names(train, kind));
    }
    for node in &eval.nodes {
        assert_eq!(node.phase, Phase::Forward);
        let origin = &train.nodes[node.origin.unwrap().index()];
        let same = node.op == origin.op;
        assert!(same || matches!(origin.op, Op::BatchNorm(_)), "{} replaces {}", node.name, origin.name);
    }
    assert!(!eval.nodes.iter().any(|n| matches!(n.op, Op::Dropout(_) | Op::BatchNorm(_))));
}

#[test]
fn gpt2_has_no_dropout_in_evaluation() {
    for attention in [AttentionImplementation::Sdpa, AttentionImplementation::Eager] {
        let config = Gpt2Config {
            n_layer: 2,
            n_embd: 8,
            n_head: 2,
            vocab_size: 11,
            attn_implementation: attention,
            ..Gpt2Config::default()
        };
        let train = config.build(2, 4, DType::F32).unwrap();
        let dropouts = train.nodes.iter().filter(|n| matches!(n.op, Op::Dropout(_))).count();
        assert_eq!(dropouts, 1 + 2 * 3);
        let eval = train.evaluation().unwrap();
        check_evaluation(&train, &eval);
        assert_eq!(eval.nodes.len(), train.nodes.len() - dropouts);
        assert!(names(&eval, |k| *k == ValueKind::RngKey).is_empty());
        // A graph without dropout is its own evaluation form.
        let without_dropout = Gpt2Config { resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0, ..config };
        let without_dropout = without_dropout.build(2, 4, DType::F32).unwrap();
        assert_eq!(without_dropout.evaluation().unwrap().nodes.len(), without_dropout.nodes.len());
    }
}

#[test]
fn resnet_normalises_by_running_statistics() {
    let train =
        ResNetConfig { depth: 18, width: 4, num_classes: 3, stem: ResNetStem::Cifar }.build(2, 32, DType::F32).unwrap();
    assert_eq!(train.state_updates.len(), 2 * 20);
    let eval = train.evaluation().unwrap();
    check_evaluation(&train, &eval);
    // Every running statistic is read.
    let users = eval.consumers();
    for b in eval.buffers() {
        assert!(!users[b.index()].is_empty(), "{} is not read", eval.value(b).name);
    }
}

/// Regression: the second call of one batch norm reads the statistics that the first has updated, which evaluation does
/// not have. Both calls normalise by the buffers.
#[test]
fn one_batch_norm_called_twice_reads_its_buffers_in_both_calls() {
    let mut b = Builder::new("twice");
    let x = b.input("x", DType::F32, [4, 3]).unwrap();
    let weight = b.parameter("weight", DType::F32, [3], Init::Constant(1.0)).unwrap();
    let bias = b.parameter("bias", DType::F32, [3], Init::Constant(0.0)).unwrap();
    let mean = b.buffer("running_mean", DType::F32, [3], Init::Constant(0.0)).unwrap();
    let var = b.buffer("running_var", DType::F32, [3], Init::Constant(1.0)).unwrap();
    let op = fusionllm_graph::ops::BatchNorm { momentum: 0.1, eps: 1e-5 };
    let first = b.apply(op, &[x, weight, bias, mean, var]).unwrap();
    let second = b.apply(op, &[first[0], weight, bias, first[3], first[4]]).unwrap();
    b.update_buffer(mean, second[3]).unwrap();
    b.update_buffer(var, second[4]).unwrap();
    b.output("y", second[0]).unwrap();
    let eval = b.finish().unwrap().evaluation().unwrap();
    assert!(eval.state_updates.is_empty());
    for name in ["running_mean", "running_var"] {
        assert_eq!(eval.consumers()[eval.find(name).unwrap().index()].len(), 2, "{name}");
    }
}

/// The evaluation form of the evaluation form is the same.
#[test]
fn evaluation_is_idempotent() {
    let train = ResNetConfig { depth: 18, width: 2, num_classes: 3, stem: ResNetStem::Imagenet }
        .build(1, 64, DType::F64)
        .unwrap();
    let once = train.evaluation().unwrap();
    let twice = once.evaluation().unwrap();
    let ops = |g: &Graph| g.nodes.iter().map(|n| n.op.clone()).collect::<Vec<_>>();
    assert_eq!(ops(&once), ops(&twice));
}

#[test]
fn constants_are_copied_and_must_be_loaded() {
    let mut b = Builder::new("constant");
    let x = b.input("x", DType::F32, [2]).unwrap();
    let c = b.constant("table", HostTensor::from_f32([2], &[1.0, 2.0]).unwrap()).unwrap();
    let y = b.mul(x, c).unwrap();
    let y = b.dropout(y, 0.5).unwrap();
    b.output("y", y).unwrap();
    let train = b.finish().unwrap();
    let eval = train.evaluation().unwrap();
    assert_eq!(eval.constants, train.constants);
    let mut without = train;
    without.constants.clear();
    let error = without.evaluation().unwrap_err().to_string();
    assert!(error.contains(r#"the content of constant "table" is missing"#), "{error}");
}

/// The mask of a dropout exists only in training. An output of it is an error.
#[test]
fn an_output_that_exists_only_in_training_is_an_error() {
    let mut b = Builder::new("mask");
    let x = b.input("x", DType::F32, [2]).unwrap();
    let key = b.rng_key().unwrap();
    let out = b.apply(fusionllm_graph::ops::Dropout { p: 0.5, stream: 0 }, &[x, key]).unwrap();
    let mask: ValueId = out[1];
    b.output("mask", mask).unwrap();
    let error = b.finish().unwrap().evaluation().unwrap_err().to_string();
    assert!(error.contains(r#"output "mask" exists only in training"#), "{error}");
}
