//! No step is shorter than its busiest network card, uplink, link, device or processor needs.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::ChoiceRng;
use common::clusters::{by_hand, cluster};
use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{DType, Graph, TrainGraph, autodiff};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Cluster, Compression, Device, Line, PlanOptions, Processor, Schedule, Scheduler, SimulateOptions, Workload,
    compile, message_bytes, schedule, simulate,
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

/// The cluster with processors that some of its devices share, or with none.
fn with_processors(whole: &Cluster, d: &mut ChoiceRng) -> Cluster {
    let mut devices = whole.devices().to_vec();
    for shared in 0..d.between(0, 3) {
        let (cores, crowded) = (d.between(1, 4) as f64, 1.0 + d.below(3) as f64 / 2.0);
        for device in devices.iter_mut().filter(|device| device.processor.is_none()) {
            let busy = d.between(1, 4) as f64 / 4.0 * cores;
            let processor = Processor { name: format!("processor-{shared}"), cores, busy, crowded, crowd: 2.0 * cores };
            device.processor = d.one_in(2).then_some(processor);
        }
    }
    Cluster::new(devices, whole.sites().to_vec(), whole.direct_links().to_vec(), Some(whole.broker())).unwrap()
}

/// By processor: seconds that its devices take to compute one step on all of its cores.
fn computing(programs: &[Program], cluster: &Cluster) -> BTreeMap<String, f64> {
    let without = |device: &Device| Device { processor: None, ..device.clone() };
    let devices = cluster.devices().iter().map(without).collect();
    let (sites, links) = (cluster.sites().to_vec(), cluster.direct_links().to_vec());
    let apart = Cluster::new(devices, sites, links, Some(cluster.broker())).unwrap();
    let alone = simulate(programs, &apart, &SimulateOptions::new(OPTIMIZER)).unwrap();
    let mut seconds = BTreeMap::new();
    for (device, load) in cluster.devices().iter().zip(&alone.peers) {
        if let Some(Processor { name, cores, busy, .. }) = &device.processor {
            *seconds.entry(name.clone()).or_default() += load.compute_s * busy / cores;
        }
    }
    seconds
}

#[test]
fn no_step_is_shorter_than_its_busiest_line_or_device_needs() {
    let (graph, train) = model();
    let (mut limited, mut crowded) = (0, 0);
    for seed in 0..300 {
        let mut d = ChoiceRng::new(seed);
        let whole = cluster(&mut d);
        let whole = with_processors(&whole, &mut ChoiceRng::new(1000 + seed));
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
        for (name, seconds) in computing(&programs, &cluster) {
            assert!(
                simulation.step_s >= seconds * (1.0 - STEADY),
                "{seed}: {} s, {name} {seconds} s",
                simulation.step_s
            );
            crowded += usize::from(seconds > 0.9 * simulation.step_s);
        }
        let busiest = |cards| {
            let of_kind = lines.iter().filter(|(line, _)| matches!(line, Line::Card { .. }) == cards);
            of_kind.map(|(_, seconds)| *seconds).fold(0.0, f64::max)
        };
        limited += usize::from(busiest(true) > 0.5 * simulation.step_s && busiest(true) > 1.5 * busiest(false));
    }
    assert!(limited > 20, "cards limit only {limited} of the steps");
    assert!(crowded > 5, "processors limit only {crowded} of the steps");
}
