//! Any cut of a graph gives the same numbers, bit for bit.

mod common;

use common::*;
use fusionllm_exec::local::Training;
use fusionllm_graph::ops::{BatchNorm, CrossEntropy, Linear, Unary};
use fusionllm_graph::{Builder, DType, Graph, Init, Op};
use fusionllm_models::AttentionImplementation::{Eager, Sdpa};
use fusionllm_plan::Schedule;
use fusionllm_program::TensorKey;

/// Trains on one peer, then under random cuts, and compares every loss and the last parameter.
fn check(graph: &Graph, training: Training, steps: u64, seed: u64) {
    let micro_batches = 3;
    let mut single = local_run(graph, &one_peer(graph, micro_batches), &backends("cpu", 1), training);
    let expected = losses(graph, &mut single, micro_batches, steps);
    assert!(expected.iter().all(|l| l.is_finite()), "{expected:?}");
    assert!(expected[expected.len() - 1] < expected[0], "it learns: {expected:?}");
    let last = graph.value(graph.parameters().last().unwrap()).name.clone();
    let mut choices = ChoiceRng::new(seed);
    for peers in [1, 2, 4, 7] {
        let plan = random_plan(graph, peers, micro_batches, &mut choices);
        let mut cut = local_run(graph, &plan, &backends("cpu", peers), training);
        let got = losses(graph, &mut cut, micro_batches, steps);
        assert_eq!(got, expected, "{peers} peers, seed {seed}");
        assert_eq!(cut.read(&last).unwrap(), single.read(&last).unwrap(), "{peers} peers, seed {seed}: {last}");
    }
}

#[test]
fn gpt2_losses_do_not_depend_on_the_cut() {
    check(&gpt2(Sdpa, 0.0), adamw(), 50, 1);
}

#[test]
fn gpt2_losses_with_dropout_and_eager_attention_do_not_depend_on_the_cut() {
    check(&gpt2(Eager, 0.1), adamw(), 12, 2);
}

#[test]
fn resnet_losses_do_not_depend_on_the_cut() {
    check(&resnet(DType::F32), plain_sgd(0.02, 0.9, 5e-4), 50, 3);
}

/// The type of each value is the graph's, so it does not matter which operators run together.
#[test]
fn losses_in_bf16_do_not_depend_on_the_cut() {
    check(&narrow(gpt2(Sdpa, 0.1)), adamw(), 20, 7);
    check(&narrow(gpt2(Eager, 0.0)), adamw(), 20, 8);
    check(&narrow(resnet(DType::F32)), plain_sgd(0.001, 0.9, 5e-4), 20, 9);
}

/// When each segment chose the types of its operators by itself, moving this cut from before the attention to before
/// its scale changed the first loss.
#[test]
fn a_cut_before_the_scale_of_attention_changes_no_loss_in_bf16() {
    let graph = narrow(gpt2(Eager, 0.0));
    let cut_before = |node: usize| {
        let mut plan = one_peer(&graph, 2);
        let all = std::mem::take(&mut plan.stages[0].nodes);
        let (first, second) = all.into_iter().partition(|n| n.index() < node);
        plan.peers.push("second".into());
        plan.stages[0].nodes = first;
        plan.stages.push(plan.stages[0].clone());
        (plan.stages[1].nodes, plan.stages[1].peers) = (second, vec![1]);
        let mut run = local_run(&graph, &plan, &backends("cpu", 2), adamw());
        losses(&graph, &mut run, 2, 20)
    };
    let position = |of: fn(&Op) -> bool, from: usize| {
        from + graph.nodes[from..].iter().position(|n| of(&n.op)).expect("the model has such an operator")
    };
    let norm = position(|op| matches!(op, Op::LayerNorm(_)), 0);
    let scale = position(|op| matches!(op, Op::BinaryScalar(_)), norm);
    let made = graph.node(fusionllm_graph::NodeId(scale as u32)).inputs[0];
    assert_eq!(graph.ty(made).dtype, DType::BF16, "the product that is scaled crosses in bf16");
    assert_eq!(cut_before(scale), cut_before(norm));
}

/// Trains with replicated stages. The losses equal those of one peer that takes all turns, bit for bit. They are within
/// `tolerance` of a plan without turns, whose sums have another order.
fn check_replicas(graph: &Graph, training: Training, tolerance: f64, seed: u64) {
    let (micro_batches, steps) = (4, 50);
    let mut single = local_run(graph, &one_peer(graph, micro_batches), &backends("cpu", 1), training);
    let expected = losses(graph, &mut single, micro_batches, steps);
    assert!(expected[49] < expected[0], "it learns: {expected:?}");
    let mut choices = ChoiceRng::new(seed);
    for peers in [2, 4, 7] {
        let plan = replicate(random_plan(graph, peers, micro_batches, &mut choices), &mut choices);
        let mut one_per_stage = plan.clone();
        one_per_stage.stages.iter_mut().for_each(|s| s.peers.fill(0));
        let mut cut = local_run(graph, &plan, &backends("cpu", peers), training);
        let got = losses(graph, &mut cut, micro_batches, steps);
        let mut alone = local_run(graph, &one_per_stage, &backends("cpu", peers), training);
        assert_eq!(got, losses(graph, &mut alone, micro_batches, steps), "{peers} peers, {:?}", plan.schedule);
        let values = graph.parameters().chain(graph.buffers());
        for name in values.map(|v| &graph.value(v).name) {
            assert_eq!(cut.read(name).unwrap(), alone.read(name).unwrap(), "{peers} peers: {name}");
        }
        for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let off = (got - expected).abs() / expected;
            assert!(off <= if step == 0 { 0.0 } else { tolerance }, "{peers} peers, step {step}: off by {off}");
        }
    }
}

#[test]
fn replicas_of_gpt2_agree_with_one_peer() {
    check_replicas(&gpt2(Sdpa, 0.1), adamw(), 1e-5, 4);
}

#[test]
fn replicas_of_resnet_agree_with_one_peer() {
    check_replicas(&resnet(DType::F32), plain_sgd(0.001, 0.9, 5e-4), 1e-5, 5);
}

/// At this rate, every difference grows tenfold in four steps. In f64 the replicas still agree, so the difference in
/// f32 comes from rounding alone.
#[test]
fn replicas_of_resnet_differ_by_rounding_alone() {
    check_replicas(&resnet(DType::F64), plain_sgd(0.02, 0.9, 5e-4), 1e-9, 6);
}

/// A model that calls one batch norm twice, with layers before, between and after the calls.
fn one_norm_twice() -> Graph {
    let mut b = Builder::new("twice");
    let x = b.input("x", DType::F32, [8, 6]).unwrap();
    let labels = b.input("labels", DType::I64, [8]).unwrap();
    let source = |b: &mut Builder, name: &str, shape: &[usize], constant: Option<f64>| {
        let init = constant.map_or(Init::Normal { std: 0.3 }, Init::Constant);
        b.parameter(name, DType::F32, shape.to_vec(), init).unwrap()
    };
    let matrices = ["a", "b", "c"].map(|name| source(&mut b, name, &[6, 6], None));
    let (weight, bias) = (source(&mut b, "weight", &[6], Some(1.0)), source(&mut b, "bias", &[6], Some(0.0)));
    let mean = b.buffer("mean", DType::F32, [6], Init::Constant(0.0)).unwrap();
    let var = b.buffer("var", DType::F32, [6], Init::Constant(1.0)).unwrap();
    let (mut y, mut statistics) = (x, [mean, var]);
    for matrix in &matrices[..2] {
        y = b.op(Linear, &[y, *matrix]).unwrap();
        y = b.unary(Unary::Tanh, y).unwrap();
        let op = BatchNorm { momentum: 0.1, eps: 1e-5 };
        let out = b.apply(op, &[y, weight, bias, statistics[0], statistics[1]]).unwrap();
        (y, statistics) = (out[0], [out[3], out[4]]);
    }
    let logits = b.op(Linear, &[y, matrices[2]]).unwrap();
    let loss = b.op(CrossEntropy { ignore_index: -100 }, &[logits, labels]).unwrap();
    b.output("logits", logits).unwrap();
    b.update_buffer(mean, statistics[0]).unwrap();
    b.update_buffer(var, statistics[1]).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

/// Regression: such a model was refused, because its evaluation form read statistics that exist only in training.
#[test]
fn one_batch_norm_called_twice_trains_on_any_number_of_peers() {
    let graph = one_norm_twice();
    assert!(graph.evaluation().is_ok());
    let training = plain_sgd(0.1, 0.9, 0.0);
    let mut single = local_run(&graph, &one_peer(&graph, 3), &backends("cpu", 1), training);
    let expected = losses(&graph, &mut single, 3, 10);
    for peers in [2, 4] {
        let names: Vec<String> = (0..peers).map(|p| format!("p{p}")).collect();
        let plan = fusionllm_plan::equal_compute(&graph, &names, 3, Schedule::OneFOneB).unwrap();
        let mut cut = local_run(&graph, &plan, &backends("cpu", peers), training);
        assert_eq!(losses(&graph, &mut cut, 3, 10), expected, "{peers} peers");
        for name in ["mean", "var", "weight", "c"] {
            assert_eq!(cut.read(name).unwrap(), single.read(name).unwrap(), "{peers} peers: {name}");
        }
    }
}

#[test]
fn a_peer_without_stages_does_not_stop_a_run() {
    let graph = gpt2(Sdpa, 0.0);
    let mut plan = one_peer(&graph, 4);
    plan.peers = vec!["idle".into(), "a".into(), "b".into()];
    plan.stages[0].peers = vec![2, 1];
    let mut cut = local_run(&graph, &plan, &backends("cpu", 3), adamw());
    let mut single = local_run(&graph, &one_peer(&graph, 4), &backends("cpu", 1), adamw());
    for (got, expected) in losses(&graph, &mut cut, 4, 5).iter().zip(losses(&graph, &mut single, 4, 5)) {
        assert!((got - expected).abs() < 1e-6 * expected, "{got} {expected}");
    }
}

#[test]
fn one_step_is_the_same_under_many_random_cuts() {
    same_under_many_random_cuts(&gpt2(Eager, 0.0));
    same_under_many_random_cuts(&narrow(gpt2(Eager, 0.0)));
}

fn same_under_many_random_cuts(graph: &Graph) {
    let micro_batches = 2;
    let mut single = local_run(graph, &one_peer(graph, micro_batches), &backends("cpu", 1), adamw());
    let expected = single.step(&batch(graph, micro_batches, 0)).unwrap();
    for seed in 0..24 {
        let mut choices = ChoiceRng::new(100 + seed);
        let peers = 1 + choices.below(7);
        let plan = random_plan(graph, peers, micro_batches, &mut choices);
        let mut cut = local_run(graph, &plan, &backends("cpu", peers), adamw());
        let got = cut.step(&batch(graph, micro_batches, 0)).unwrap();
        assert_eq!((got.loss, got.grad_norm), (expected.loss, expected.grad_norm), "seed {seed}");
    }
}

/// The micro-batches' weights give the gradient of the whole batch's mean, even if ignored targets are spread unevenly.
#[test]
fn the_split_into_micro_batches_does_not_change_the_loss() {
    let graph = gpt2(Sdpa, 0.0);
    let parts = batch(&graph, 4, 0);
    let mut four = local_run(&graph, &one_peer(&graph, 4), &backends("cpu", 1), plain_sgd(0.1, 0.9, 0.0));
    let loss = four.step(&parts).unwrap().loss;
    let config = fusionllm_models::Gpt2Config {
        vocab_size: 31,
        n_positions: 12,
        n_embd: 16,
        n_layer: 2,
        n_head: 2,
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Default::default()
    };
    let whole = config.build(8, 12, fusionllm_graph::DType::F32).unwrap();
    let mut joined = std::collections::BTreeMap::new();
    for name in ["input_ids", "labels"] {
        let ids: Vec<i64> = parts.iter().flat_map(|p| p[name].to_i64().unwrap()).collect();
        joined.insert(name.to_string(), fusionllm_graph::HostTensor::from_i64([8, 12], &ids).unwrap());
    }
    joined.insert("loss_weight".into(), fusionllm_graph::HostTensor::from_f32([], &[1.0]).unwrap());
    let mut one = local_run(&whole, &one_peer(&whole, 1), &backends("cpu", 1), plain_sgd(0.1, 0.9, 0.0));
    let whole_loss = one.step(&[joined]).unwrap().loss;
    assert!((loss - whole_loss).abs() < 1e-6 * whole_loss, "{loss} {whole_loss}");
    let name = "transformer.wte.weight";
    let (a, b) = (
        four.read(TensorKey::slot(name, "momentum_buffer")).unwrap().to_f64(),
        one.read(TensorKey::slot(name, "momentum_buffer")).unwrap().to_f64(),
    );
    let norm: f64 = b.iter().map(|x| x * x).sum::<f64>().sqrt();
    let diff: f64 = a.iter().zip(&b).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt();
    assert!(diff < 1e-5 * norm, "{diff} of {norm}");
}
