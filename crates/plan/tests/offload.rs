//! Plans for devices with less memory than their share needs.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashSet;

use common::*;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{DType, Graph, TrainGraph};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Cluster, Compression, Device, Disk, Link, PROCESS_BYTES, Plan, PlanError, PlanOptions, Rates, Schedule, Scheduled,
    Scheduler, SimulateOptions, Site, Workload, compile, compile_forward, schedule, simulate,
};
use fusionllm_program::{Address, Instruction, Medium, Optimizer, Program};

const OPTIMIZER: Optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });

/// Parameters, gradients and two moments of 1.7 million parameters.
fn model() -> Graph {
    let config =
        Gpt2Config { vocab_size: 256, n_positions: 16, n_embd: 128, n_layer: 8, n_head: 4, ..Gpt2Config::default() };
    config.build(1, 16, DType::F32).unwrap()
}

fn state_bytes(graph: &Graph) -> u64 {
    graph.parameters().map(|v| 4 * graph.ty(v).bytes() as u64).sum()
}

fn cluster(count: usize, change: impl Fn(&mut Device)) -> Cluster {
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
    let device = |i| {
        let mut device = Device { site: Some(0), ..Device::new(format!("p{i}"), rates, 1 << 40) };
        change(&mut device);
        device
    };
    let link = Some(Link { latency: 1e-3, bandwidth: 1e7 });
    let site = Site { name: "here".into(), inside: link, uplink: None, downlink: None };
    Cluster::new((0..count).map(device).collect(), vec![site], vec![], None).unwrap()
}

fn plan(graph: &Graph, train: &TrainGraph, scheduler: Scheduler, cluster: &Cluster) -> Result<Scheduled, PlanError> {
    let options = PlanOptions {
        scheduler,
        optimizer: OPTIMIZER,
        schedules: vec![Schedule::OneFOneB],
        replicas: 1,
        compression: Compression::default(),
    };
    schedule(&[Workload { forward: graph, train, micro_batches: 2 }], cluster, &options)
}

fn moves(program: &Program) -> Vec<Address> {
    let tensor = |i: &Instruction| match *i {
        Instruction::Offload { tensor, .. } => Some(tensor),
        _ => None,
    };
    program.instructions.iter().filter_map(tensor).collect()
}

#[test]
fn a_third_of_the_state_is_enough() {
    let graph = model();
    let train = train_graph(&graph);
    let limit = state_bytes(&graph) / 3 + PROCESS_BYTES;
    for scheduler in [Scheduler::OpFence, Scheduler::Exact, Scheduler::EqualCompute] {
        let cluster = cluster(1, |d| d.memory = limit);
        let made = plan(&graph, &train, scheduler, &cluster).unwrap();
        let load = made.simulation.peers[0];
        assert!(load.peak_bytes <= limit, "{} of {limit}", load.peak_bytes);
        assert_eq!(made.notes.len(), 1);
        assert!(made.notes[0].starts_with("p0 has too little memory for its share, and "), "{:?}", made.notes);
        assert!(made.notes[0].contains("offloads "), "{:?}", made.notes);
        let program = &made.programs[0];
        program.validate().unwrap();
        assert!(program.kept_bytes(2) + program.peak_bytes() + PROCESS_BYTES <= limit);
        let state = program.offloaded_bytes(Medium::Disk);
        assert!(state.optimizer > 0 && state.gradients > 0 && state.total() > limit, "{state:?}");
        // The plan alone is enough to compile the same programs.
        let read = Plan::from_json(&made.plan.to_json().unwrap()).unwrap();
        assert_eq!(read, made.plan);
        assert_eq!(compile(&read, &graph, &train).unwrap(), made.programs);
        let eval = compile_forward(&read, &graph, &graph.evaluation().unwrap(), &["loss"]).unwrap();
        eval[0].validate().unwrap();
        assert_eq!(eval[0].resting().len(), program.resting().keys().filter(is_parameter).count());
    }
}

fn is_parameter(tensor: &&Address) -> bool {
    matches!(tensor, Address::Held { .. })
}

#[test]
fn with_enough_memory_nothing_is_offloaded() {
    let graph = model();
    let train = train_graph(&graph);
    let made = plan(&graph, &train, Scheduler::OpFence, &cluster(1, |_| {})).unwrap();
    let need = made.simulation.peers[0].peak_bytes;
    let exact = plan(&graph, &train, Scheduler::OpFence, &cluster(1, |d| d.memory = need + need / 10)).unwrap();
    assert_eq!(made.plan, exact.plan);
    assert!(!made.plan.to_json().unwrap().contains("offload"));
    assert!(made.notes.is_empty() && moves(&made.programs[0]).is_empty());
}

/// The bytes that cost least time are offloaded first: state that is touched once in a step.
#[test]
fn little_is_offloaded_where_little_is_missing() {
    let graph = model();
    let train = train_graph(&graph);
    let need = plan(&graph, &train, Scheduler::OpFence, &cluster(1, |_| {})).unwrap().simulation.peers[0].peak_bytes;
    let made = plan(&graph, &train, Scheduler::OpFence, &cluster(1, |d| d.memory = need - (1 << 20))).unwrap();
    let away = made.programs[0].offloaded_bytes(Medium::Disk);
    assert!(away.optimizer >= 1 << 20 && away.optimizer < 8 << 20, "{away:?}");
    assert_eq!(away.total(), away.optimizer);
}

#[test]
fn what_cannot_fit_is_refused_as_before() {
    let graph = model();
    let train = train_graph(&graph);
    let error = plan(&graph, &train, Scheduler::OpFence, &cluster(1, |d| d.memory = 1 << 20)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("operator") && text.contains("needs") || text.contains("are missing"), "{text}");
}

/// Regression: a job that fits only into more than 85 % of the memory was refused.
#[test]
fn what_fits_only_into_most_of_the_memory_is_planned_and_told() {
    let graph = model();
    let train = train_graph(&graph);
    let made = |memory: u64| plan(&graph, &train, Scheduler::OpFence, &cluster(1, |d| d.memory = memory));
    let (mut refused, mut planned) = (PROCESS_BYTES, PROCESS_BYTES + 2 * state_bytes(&graph));
    while planned - refused > 1 << 16 {
        let middle = (planned + refused) / 2;
        match made(middle) {
            Ok(_) => planned = middle,
            Err(_) => refused = middle,
        }
    }
    let tight = made(planned).unwrap();
    let share = tight.simulation.peers[0].peak_bytes as f64 / planned as f64;
    assert!((0.85..=0.95).contains(&share), "{share}");
    assert!(tight.notes.iter().any(|note| note.contains("is expected to need")), "{:?}", tight.notes);
    // With more memory, some is left for what predictions do not know.
    let roomy = made(planned * 5 / 4).unwrap();
    assert!(roomy.simulation.peers[0].peak_bytes as f64 <= 0.85 * (planned * 5 / 4) as f64);
    assert!(!roomy.notes.iter().any(|note| note.contains("is expected to need")), "{:?}", roomy.notes);
}

/// A step of many micro-batches is planned on one of few. Both need about the same memory, so the choices are alike.
#[test]
fn the_number_of_micro_batches_hardly_changes_what_is_computed_again() {
    let graph = long_context();
    let train = train_graph(&graph);
    let options = PlanOptions {
        scheduler: Scheduler::OpFence,
        optimizer: OPTIMIZER,
        schedules: vec![Schedule::OneFOneB],
        replicas: 1,
        compression: Compression::default(),
    };
    let made = |micro_batches, memory| {
        let workload = Workload { forward: &graph, train: &train, micro_batches };
        schedule(&[workload], &cluster(1, |d| d.memory = memory), &options).unwrap()
    };
    let whole = made(3, 1 << 40).simulation.peers[0].peak_bytes;
    let (few, many) = (made(3, whole * 3 / 4), made(24, whole * 3 / 4));
    let [of_few, of_many] = [&few, &many].map(|made| &made.plan.offload[0].recomputed);
    assert!(of_few.len() > 10 && of_few.symmetric_difference(of_many).count() <= 2, "{of_few:?} {of_many:?}");
    assert!(many.simulation.peers[0].peak_bytes <= whole * 3 / 4);
}

#[test]
fn a_device_with_memory_of_its_own_offloads_to_its_host() {
    let graph = model();
    let train = train_graph(&graph);
    let limit = state_bytes(&graph) / 3 + PROCESS_BYTES;
    let with = |host_link| {
        let cluster = cluster(1, |d| (d.memory, d.host_link) = (limit, host_link));
        plan(&graph, &train, Scheduler::OpFence, &cluster).unwrap()
    };
    let (host, disk) = (with(Some(1e10)), with(None));
    assert_eq!(host.programs[0].offloaded_bytes(Medium::Disk).total(), 0);
    assert!(host.programs[0].offloaded_bytes(Medium::Host).total() > 0);
    assert!(host.notes[0].ends_with(" in the host's memory"), "{:?}", host.notes);
    assert!(host.simulation.step_s < disk.simulation.step_s, "the link to the host is faster than the disk");
}

/// Two devices that have too little memory even together. Each gets a share.
#[test]
fn several_devices_offload() {
    let graph = model();
    let train = train_graph(&graph);
    let limit = state_bytes(&graph) / 5 + PROCESS_BYTES;
    // The disk is so slow that dividing the model pays.
    let cluster = cluster(2, |d| (d.memory, d.disk) = (limit, Disk::new(1e7)));
    let made = plan(&graph, &train, Scheduler::OpFence, &cluster).unwrap();
    assert_eq!(made.plan.offload.len(), 2, "{:?}", made.notes);
    assert!(made.simulation.peers.iter().all(|p| p.peak_bytes <= limit));
    made.programs.iter().for_each(|p| p.validate().unwrap());
}

/// A slower disk makes a longer step, by the bytes that move.
#[test]
fn the_simulator_counts_the_moves() {
    let graph = model();
    let train = train_graph(&graph);
    let limit = state_bytes(&graph) / 3 + PROCESS_BYTES;
    let with = |disk: f64| cluster(1, |d| (d.memory, d.disk) = (limit, Disk::new(disk)));
    let made = plan(&graph, &train, Scheduler::OpFence, &with(1e9)).unwrap();
    let at = |disk: f64| simulate(&made.programs, &with(disk), &SimulateOptions::new(OPTIMIZER)).unwrap().step_s;
    let (fast, slow, away) = (at(1e9), at(1e6), made.programs[0].offloaded_bytes(Medium::Disk));
    assert_eq!(fast, made.simulation.step_s);
    // Optimizer state and gradients leave and return once at the least.
    let least = 2.0 * (away.optimizer + away.gradients) as f64;
    assert!(slow - fast > 0.99 * least * (1e-6 - 1e-9), "{slow} {fast}");
}

/// Many activations and few parameters.
fn long_context() -> Graph {
    let config =
        Gpt2Config { vocab_size: 64, n_positions: 256, n_embd: 64, n_layer: 12, n_head: 4, ..Gpt2Config::default() };
    config.build(2, 256, DType::F32).unwrap()
}

/// The instructions that run a node a second time.
fn second_runs(program: &Program) -> Vec<usize> {
    let mut seen = HashSet::new();
    let again = |i: &Instruction| matches!(i, Instruction::Run { .. }) && !seen.insert(*i);
    program.instructions.iter().map(again).enumerate().filter(|(_, again)| *again).map(|(at, _)| at).collect()
}

#[test]
fn activations_are_computed_again_where_moving_takes_longer() {
    let graph = long_context();
    let train = train_graph(&graph);
    let ample = plan(&graph, &train, Scheduler::OpFence, &cluster(1, |_| {})).unwrap();
    let need = ample.simulation.peers[0].peak_bytes;
    let kept = ample.programs[0].kept_bytes(2) + PROCESS_BYTES;
    let mut before = ample.simulation.step_s;
    // With ever less memory, a step takes longer, but less than the third more of running all of forward again.
    for share in [0.7, 0.5, 0.35] {
        let limit = kept + (share * (need - kept) as f64) as u64;
        let slow = cluster(1, |d| (d.memory, d.disk) = (limit, Disk::new(1e4)));
        let made = plan(&graph, &train, Scheduler::OpFence, &slow).unwrap();
        let (step, again) = (made.simulation.step_s, made.programs[0].recomputed_bytes());
        assert!(made.simulation.peers[0].peak_bytes <= limit);
        assert!(step > before && step < 1.34 * ample.simulation.step_s, "{share}: {step} after {before}");
        assert!(moves(&made.programs[0]).is_empty() && again > 0);
        let note = &made.notes[0];
        assert!(note.starts_with("p0 has too little memory for its share, and computes "), "{note}");
        assert!(note.ends_with(" of activations again in each micro-batch"), "{note}");
        let read = Plan::from_json(&made.plan.to_json().unwrap()).unwrap();
        assert_eq!(compile(&read, &graph, &train).unwrap(), made.programs);
        let eval = compile_forward(&read, &graph, &graph.evaluation().unwrap(), &["loss"]).unwrap();
        assert!(second_runs(&eval[0]).is_empty());
        before = step;
    }
    // A fast disk is better than to run products again.
    let limit = kept + (need - kept) / 2;
    let fast = cluster(1, |d| (d.memory, d.disk, d.rates.matmul, d.rates.memory) = (limit, Disk::new(1e12), 1e7, 1e12));
    let made = plan(&graph, &train, Scheduler::OpFence, &fast).unwrap();
    assert!(made.programs[0].offloaded_bytes(Medium::Disk).activations > made.programs[0].recomputed_bytes());
}

/// Peers are strangers: a program that frees what it needs again, and does not compute it, is refused.
#[test]
fn what_is_computed_twice_is_checked() {
    let graph = long_context();
    let train = train_graph(&graph);
    let ample = plan(&graph, &train, Scheduler::OpFence, &cluster(1, |_| {})).unwrap();
    let limit = ample.simulation.peers[0].peak_bytes / 2;
    let made = plan(&graph, &train, Scheduler::OpFence, &cluster(1, |d| d.memory = limit)).unwrap();
    let program = &made.programs[0];
    program.validate().unwrap();
    let again = second_runs(program);
    assert!(again.len() > 10);
    for at in again {
        let mut without = program.clone();
        let run = without.instructions.remove(at);
        assert!(without.validate().is_err(), "without {run:?}");
        let mut repeated = program.clone();
        repeated.instructions.insert(at, run);
        assert!(repeated.validate().is_err(), "with {run:?} once more");
    }
}

/// Peers are strangers: a program that uses a tensor while it is away is refused.
#[test]
fn a_program_that_uses_what_is_away_is_refused() {
    let graph = model();
    let train = train_graph(&graph);
    let cluster = cluster(1, |d| d.memory = state_bytes(&graph) / 4 + PROCESS_BYTES);
    let made = plan(&graph, &train, Scheduler::OpFence, &cluster).unwrap();
    let program = &made.programs[0];
    let moves = (0..program.instructions.len())
        .filter(|at| matches!(program.instructions[*at], Instruction::Offload { .. } | Instruction::Load { .. }));
    let mut kinds: Vec<Address> = Vec::new();
    for at in moves {
        let mut changed = program.clone();
        let gone = changed.instructions.remove(at);
        assert!(changed.validate().is_err(), "without {gone:?}");
        let mut repeated = program.clone();
        repeated.instructions.insert(at, gone);
        assert!(repeated.validate().is_err(), "with {gone:?} twice");
        if let Instruction::Offload { tensor, .. } = gone
            && !kinds.iter().any(|k| std::mem::discriminant(k) == std::mem::discriminant(&tensor))
        {
            kinds.push(tensor);
        }
    }
    assert!(kinds.len() >= 3, "{kinds:?}");
}
