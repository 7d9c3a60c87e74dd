//! Tensors that leave the device's memory come back with the same bits, and so do those that are computed again.

mod common;

use std::collections::BTreeSet;

use common::*;
use fusionllm_exec::local::{LocalRun, Training};
use fusionllm_graph::{DType, Graph};
use fusionllm_models::AttentionImplementation::{Eager, Sdpa};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Cluster, Compression, Device, PROCESS_BYTES, PeerOffload, Plan, PlanOptions, Rates, Schedule, Scheduler, Workload,
    compile, schedule,
};
use fusionllm_program::{Medium, PeerId, TensorKey};

/// The plan with every tensor away that can be away.
fn away(graph: &Graph, plan: Plan, slots: usize, to: Medium) -> Plan {
    away_or_again(graph, plan, slots, to, |_| false)
}

/// The plan with the activations that `again` picks computed twice, and every other tensor away that can be away.
fn away_or_again(graph: &Graph, mut plan: Plan, slots: usize, to: Medium, again: impl Fn(&str) -> bool) -> Plan {
    let parameters: BTreeSet<String> = graph.parameters().map(|v| graph.value(v).name.clone()).collect();
    let offload = |peer: u32| PeerOffload {
        peer: PeerId(peer),
        to,
        optimizer: vec![parameters.clone(); slots],
        recomputed: graph.values.iter().map(|v| v.name.clone()).filter(|name| again(name)).collect(),
        activations: graph.values.iter().map(|v| v.name.clone()).collect(),
        gradients: parameters.clone(),
        parameters: parameters.clone(),
    };
    plan.offload = (0..plan.peers.len() as u32).map(offload).collect();
    plan
}

fn equal_state(graph: &Graph, training: Training, a: &LocalRun, b: &LocalRun) {
    for name in graph.parameters().map(|v| &graph.value(v).name) {
        assert_eq!(a.read(name).unwrap(), b.read(name).unwrap(), "{name}");
        for slot in training.optimizer.slots() {
            assert_eq!(
                a.read(TensorKey::slot(name, *slot)).unwrap(),
                b.read(TensorKey::slot(name, *slot)).unwrap(),
                "{name}, {slot}"
            );
        }
    }
}

fn check(graph: &Graph, training: Training, seed: u64) {
    let (micro_batches, steps) = (3, 6);
    let slots = training.optimizer.slots().len();
    let mut choices = ChoiceRng::new(seed);
    for peers in [1, 2, 4] {
        let plan = replicate(random_plan(graph, peers, micro_batches, &mut choices), &mut choices);
        let mut kept = local_run(graph, &plan, &backends("cpu", peers), training);
        let expected = losses(graph, &mut kept, micro_batches, steps);
        for to in [Medium::Disk, Medium::Host] {
            let plan = away(graph, plan.clone(), slots, to);
            let mut run = local_run(graph, &plan, &backends("cpu", peers), training);
            assert_eq!(losses(graph, &mut run, micro_batches, steps), expected, "{peers} peers");
            equal_state(graph, training, &run, &kept);
        }
        // First all activations are computed again, then some of them, and the others are away.
        for one_in in [1, 2, 5] {
            let picked: BTreeSet<&str> =
                graph.values.iter().map(|v| &*v.name).filter(|_| choices.one_in(one_in)).collect();
            let plan = away_or_again(graph, plan.clone(), slots, Medium::Disk, |name| picked.contains(name));
            let programs = compile(&plan, graph, &train_graph(graph)).unwrap();
            programs.iter().for_each(|p| p.validate().unwrap());
            assert!(programs.iter().any(|p| p.recomputed_bytes() > 0));
            let mut run = local_run(graph, &plan, &backends("cpu", peers), training);
            assert_eq!(losses(graph, &mut run, micro_batches, steps), expected, "{peers} peers, one in {one_in}");
            equal_state(graph, training, &run, &kept);
        }
    }
}

#[test]
fn gpt2_is_the_same_with_everything_offloaded() {
    check(&gpt2(Sdpa, 0.1), adamw(), 11);
    check(&gpt2(Eager, 0.1), adamw(), 12);
}

#[test]
fn resnet_is_the_same_with_everything_offloaded() {
    check(&resnet(DType::F32), plain_sgd(0.02, 0.9, 5e-4), 13);
}

#[test]
fn models_in_bf16_are_the_same_with_everything_offloaded_or_computed_again() {
    check(&narrow(gpt2(Eager, 0.1)), adamw(), 14);
    check(&narrow(resnet(DType::F32)), plain_sgd(0.02, 0.9, 5e-4), 15);
}

/// An inspected pass runs each instruction alone, and reads the tensors that are away.
#[test]
fn an_inspected_step_is_the_same() {
    let graph = gpt2(Sdpa, 0.0);
    let plan = one_peer(&graph, 2);
    let moved = away(&graph, plan.clone(), 2, Medium::Disk);
    let mut kept = local_run(&graph, &plan, &backends("cpu", 1), adamw());
    let mut run = local_run(&graph, &moved, &backends("cpu", 1), adamw());
    run.set_inspect(true);
    assert_eq!(losses(&graph, &mut run, 2, 3), losses(&graph, &mut kept, 2, 3));
}

/// A step that is not applied leaves everything as it was.
#[test]
fn a_step_that_is_not_applied_changes_nothing() {
    let graph = gpt2(Sdpa, 0.0);
    let training = Training { clip: None, ..adamw() };
    let moved = away(&graph, one_peer(&graph, 1), 2, Medium::Disk);
    let mut run = local_run(&graph, &moved, &backends("cpu", 1), training);
    let start = local_run(&graph, &moved, &backends("cpu", 1), training);
    let mut spoilt = batch(&graph, 1, 0);
    let weight = spoilt[0].get_mut("loss_weight").unwrap();
    *weight = fusionllm_graph::HostTensor::scalar(weight.dtype(), f64::INFINITY).unwrap();
    assert!(!run.step(&spoilt).unwrap().grad_norm.is_finite());
    equal_state(&graph, training, &run, &start);
}

#[test]
fn the_state_of_three_devices_trains_on_one() {
    let config =
        Gpt2Config { vocab_size: 256, n_positions: 16, n_embd: 128, n_layer: 6, n_head: 4, ..Gpt2Config::default() };
    let graph = config.build(1, 16, DType::F32).unwrap();
    let state: u64 = graph.parameters().map(|v| 4 * graph.ty(v).bytes() as u64).sum();
    let limit = state / 3 + PROCESS_BYTES;
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
    let cluster = Cluster::new(vec![Device::new("p0", rates, limit)], vec![], vec![], None).unwrap();
    let options = PlanOptions {
        scheduler: Scheduler::OpFence,
        optimizer: adamw().optimizer,
        schedules: vec![Schedule::OneFOneB],
        replicas: 1,
        compression: Compression::default(),
    };
    let train = train_graph(&graph);
    let micro_batches = 2;
    let made = schedule(&[Workload { forward: &graph, train: &train, micro_batches }], &cluster, &options).unwrap();
    assert!(!made.plan.offload.is_empty());
    let program = &made.programs[0];
    let planned = program.kept_bytes(2) + program.peak_bytes();
    assert!(planned + PROCESS_BYTES <= limit);
    let mut run = local_run(&graph, &made.plan, &backends("cpu", 1), adamw());
    let mut kept = local_run(&graph, &one_peer(&graph, micro_batches), &backends("cpu", 1), adamw());
    for step in 0..3 {
        let batch = batch(&graph, micro_batches, step);
        let (here, there) = (run.step(&batch).unwrap(), kept.step(&batch).unwrap());
        assert_eq!((here.loss, here.grad_norm), (there.loss, there.grad_norm));
        assert!(here.stats[0].peak_bytes <= planned, "{:?} of {planned}", here.stats[0]);
        assert!(there.stats[0].peak_bytes > state);
    }
    equal_state(&graph, adamw(), &run, &kept);
}
