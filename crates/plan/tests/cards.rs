//! No step is shorter than its busiest network card, uplink, link or device needs.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::ChoiceRng;
use common::clusters::{by_hand, cluster};
use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{DType, Graph, TrainGraph, autodiff};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Cluster, Compression, Line, PlanOptions, Schedule, Scheduler, SimulateOptions, Workload, compile, message_bytes,
    schedule, simulate,
};
use fusionllm_program::{Optimizer, PeerId, Program};

const OPTIMIZER: Optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
/// Steps are measured until two differ by no more than this.
const STEADY: f64 = 1e-3;

fn model() -> (Graph, TrainGraph) {
    let config =
        Gpt2Config { vocab_size: 128, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2, ..Gpt2Config::default() };
    let graph = config.build(1, 16, DType::F32).unwrap();
    let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
    (graph, train)
}

/// By line: seconds that the messages of one step take at its full rate, counted from the programs alone.
fn needed(programs: &[Program], cluster: &Cluster) -> BTreeMap<Line, f64> {
    let mut lines = BTreeMap::new();
    for p in programs {
        for (tensor, from) in p.receives() {
            let payload = match programs.get(from.0 as usize) {
                Some(sender) => sender.payload(tensor, p).unwrap(),
                None => p.values[&tensor.value()].ty.bytes(),
            };
            for (line, link) in cluster.route(from, p.peer).unwrap().lines() {
                *lines.entry(line).or_default() += message_bytes(payload as u64) / link.bandwidth;
            }
        }
    }
    lines
}

#[test]
fn no_step_is_shorter_than_its_busiest_line_or_device_needs() {
    let (graph, train) = model();
    let mut limited = 0;
    for seed in 0..300 {
        let mut d = ChoiceRng::new(seed);
        let whole = cluster(&mut d);
        // A stage needs as many micro-batches as it has replicas.
        let micro_batches = d.between(9, 20) as u32;
        let (plan, cluster) = if d.one_in(2) {
            let workload = Workload { forward: &graph, train: &train, micro_batches };
            let options = PlanOptions {
                scheduler: Scheduler::OpFence,
                optimizer: OPTIMIZER,
                schedules: vec![d.choose(&Schedule::ALL)],
                replicas: d.between(1, 4) as u32,
                compression: Compression::default(),
            };
            let made = schedule(&[workload], &whole, &options).unwrap();
            let used = whole.select(&made.devices).unwrap();
            (made.plan, used)
        } else {
            (by_hand(&graph, &whole, micro_batches, &mut d), whole)
        };
        let programs = compile(&plan, &graph, &train).unwrap();
        let simulation = simulate(&programs, &cluster, &SimulateOptions::new(OPTIMIZER)).unwrap();
        let lines = needed(&programs, &cluster);
        for (line, seconds) in &lines {
            let name = cluster.line_name(*line);
            assert!(
                simulation.step_s >= seconds * (1.0 - STEADY),
                "{seed}: {} s, {name} {seconds} s",
                simulation.step_s
            );
            let load = simulation.lines.iter().find(|load| load.line == *line).unwrap();
            assert!((load.busy_s - seconds).abs() <= 1e-9 * seconds, "{seed}: {name}");
        }
        for (peer, load) in (0..).map(PeerId).zip(&simulation.peers) {
            let name = cluster.name(peer);
            assert!(simulation.step_s >= load.compute_s * (1.0 - STEADY), "{seed}: {name} {} s", load.compute_s);
        }
        let busiest = |cards| {
            let of_kind = lines.iter().filter(|(line, _)| matches!(line, Line::Card { .. }) == cards);
            of_kind.map(|(_, seconds)| *seconds).fold(0.0, f64::max)
        };
        limited += usize::from(busiest(true) > 0.5 * simulation.step_s && busiest(true) > 1.5 * busiest(false));
    }
    assert!(limited > 20, "cards limit only {limited} of the steps");
}
