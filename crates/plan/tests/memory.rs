//! The bytes that a Program holds, beside those that the simulator plans for.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use fusionllm_graph::ops::{AdamwStep, Unary};
use fusionllm_graph::{Builder, DType, Graph};
use fusionllm_models::{Gpt2Config, ResNetConfig, ResNetStem};
use fusionllm_plan::{
    Cluster, Compression, Device, Link, PROCESS_BYTES, Plan, PlanOptions, Rates, Schedule, Scheduler, SimulateOptions,
    Site, Workload, compile, compile_forward, equal_compute, schedule, simulate,
};
use fusionllm_program::{Optimizer, Program};

const OPTIMIZER: Optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });

/// Equal devices with this much memory, at one place.
fn cluster(count: usize, memory: u64) -> Cluster {
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
    let device = |i| Device { site: Some(0), ..Device::new(format!("p{i}"), rates, memory) };
    let link = Some(Link { latency: 1e-3, bandwidth: 1e7 });
    let site = Site { name: "here".into(), inside: link, uplink: link, downlink: None };
    Cluster::new((0..count).map(device).collect(), vec![site], vec![], None).unwrap()
}

/// Bytes that a peer keeps from pass to pass.
fn kept(program: &Program) -> u64 {
    let bytes = |v| program.values[&v].ty.bytes() as u64;
    let state = program.owned().map(|(parameter, _)| bytes(parameter) * OPTIMIZER.slots().len() as u64);
    program.holdings.iter().map(|h| bytes(h.value)).chain(state).sum()
}

fn gpt2(layers: usize) -> Graph {
    let config =
        Gpt2Config { vocab_size: 97, n_positions: 16, n_embd: 24, n_layer: layers, n_head: 2, ..Gpt2Config::default() };
    config.build(2, 16, DType::F32).unwrap()
}

fn resnet(depth: usize) -> Graph {
    let config = ResNetConfig { depth, num_classes: 10, stem: ResNetStem::Cifar, width: 4 };
    config.build(2, 16, DType::F32).unwrap()
}

/// Compares two counts of a pass's memory: the one by which a peer checks whether it can take part, and the planner's.
/// The peer's count is never more, and it is less only by messages that wait. Returns the bytes that each peer keeps
/// from pass to pass, and the bytes that the planner expects it to hold in all.
fn compare(graph: &Graph, plan: &Plan) -> Vec<(u64, u64)> {
    let train = compile(plan, graph, &train_graph(graph)).unwrap();
    let options = SimulateOptions::new(OPTIMIZER);
    let simulation = simulate(&train, &cluster(plan.peers.len(), 1 << 30), &options).unwrap();
    let peers = train.iter().zip(&simulation.peers).map(|(train, load)| {
        let (peak, planned) = (kept(train) + train.peak_bytes(), load.peak_bytes - PROCESS_BYTES);
        let waiting: u64 = train.receives().chain(train.sends()).map(|(tensor, _)| train.bytes(tensor)).sum();
        assert!(peak <= planned, "{} of {}: {peak} of {planned}", train.peer, graph.name);
        assert!(planned <= peak + 3 * waiting, "{} of {}: {peak} of {planned}", train.peer, graph.name);
        (kept(train), planned)
    });
    peers.collect()
}

#[test]
fn a_peer_counts_no_more_than_the_planner() {
    for graph in [gpt2(1), gpt2(4), resnet(18), resnet(50)] {
        for schedule in Schedule::ALL {
            for (peers, micro_batches) in [(1, 1), (1, 3), (2, 4), (4, 8)] {
                let plan = equal_compute(&graph, &names(peers), micro_batches, schedule).unwrap();
                let eval = compile_forward(&plan, &graph, &graph.evaluation().unwrap(), &["loss", "correct"]).unwrap();
                for ((kept, planned), eval) in compare(&graph, &plan).into_iter().zip(&eval) {
                    assert!(kept + eval.peak_bytes() <= planned, "evaluation of {}, {}", graph.name, eval.peer);
                }
            }
        }
    }
}

#[test]
fn a_peer_counts_no_more_than_the_planner_for_random_plans() {
    for seed in 0..200 {
        let mut choices = ChoiceRng::new(seed);
        let graph = random_graph(1 + choices.below(10), &mut choices);
        let schedule = choices.choose(&Schedule::ALL);
        let mut plan = random_plan(&graph, 3, 1 + choices.below(5) as u32, schedule, &mut choices);
        if choices.one_in(2) {
            replicate(&mut plan, &mut choices);
        }
        compare(&graph, &plan);
    }
}

/// The planner cuts a model so that it just fits. Each peer's own count fits, too.
#[test]
fn a_plan_for_little_memory_fits() {
    let graph = gpt2(4);
    let train = train_graph(&graph);
    let eval = graph.evaluation().unwrap();
    let workload = Workload { forward: &graph, train: &train, micro_batches: 8 };
    let mut tight = 0;
    for memory in (0..6).map(|i| PROCESS_BYTES + (400 << 10) + i * (300 << 10)) {
        let options = PlanOptions {
            scheduler: Scheduler::OpFence,
            optimizer: OPTIMIZER,
            schedules: Schedule::ALL.to_vec(),
            replicas: 2,
            compression: Compression::default(),
        };
        let Ok(made) = schedule(&[workload], &cluster(4, memory), &options) else { continue };
        if made.simulation.peers.iter().any(|p| p.peak_bytes > memory) {
            continue;
        }
        let eval = compile_forward(&made.plan, &graph, &eval, &["loss", "correct"]).unwrap();
        for (train, eval) in made.programs.iter().zip(&eval) {
            let peak = kept(train) + train.peak_bytes().max(eval.peak_bytes());
            assert!(peak <= memory, "{memory}: {peak}");
            tight += usize::from(peak + PROCESS_BYTES > memory / 10 * 9);
        }
    }
    assert!(tight > 0, "no plan needed nearly all memory");
}

/// The only peer's Program of one pass over `x`.
fn pass(build: impl FnOnce(&mut Builder, fusionllm_graph::ValueId) -> fusionllm_graph::ValueId) -> Program {
    let mut b = Builder::new("pass");
    let x = b.input("x", DType::F32, [1, 1 << 10]).unwrap();
    let y = build(&mut b, x);
    let y = b.sum(y, &[0, 1], false).unwrap();
    b.output("loss", y).unwrap();
    let graph = b.finish().unwrap();
    compile_forward(&one_peer(&graph, 2), &graph, &graph.evaluation().unwrap(), &["loss"]).unwrap().swap_remove(0)
}

#[test]
fn bytes_are_counted_by_hand() {
    const KIB: u64 = 1 << 10;
    let chain = pass(|b, x| {
        let y = b.unary(Unary::Tanh, x).unwrap();
        b.add(x, y).unwrap()
    });
    // `x` as it arrives and its copy; then `x` and `y`, and the sum takes the place of either.
    assert_eq!(chain.peak_bytes(), 8 * KIB, "{chain}");
    // A view has no bytes of its own.
    let view = pass(|b, x| b.reshape(x, [32, 32]).unwrap());
    assert_eq!(view.peak_bytes(), 8 * KIB, "{view}");
}

/// A gibibyte from four kibibytes: as a view it is free, but not once it has another shape.
#[test]
fn repeated_elements_count_once_they_are_copied() {
    const ROWS: usize = 1 << 18;
    let expanded = pass(|b, x| b.expand(x, [ROWS, 1 << 10]).unwrap());
    assert!(expanded.peak_bytes() >= 1 << 30, "a kernel may need it whole");
    let copied = pass(|b, x| {
        let y = b.expand(x, [ROWS, 1 << 10]).unwrap();
        let one = b.reshape(y, [ROWS / 2, 1 << 11]).unwrap();
        let other = b.reshape(y, [ROWS / 4, 1 << 12]).unwrap();
        let one = b.sum(one, &[0], false).unwrap();
        let other = b.sum(other, &[0], false).unwrap();
        b.cat(&[one, other], 0).map(|y| b.reshape(y, [2, 3 << 10]).unwrap()).unwrap()
    });
    assert!(copied.peak_bytes() > 1 << 30, "{copied}");
}
