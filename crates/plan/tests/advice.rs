//! Advice on better machines: it tells the step that a plan for them takes.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::AtomicBool;

use common::ChoiceRng;
use common::clusters::cluster;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{DType, Graph, TrainGraph, autodiff};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Change, Cluster, Compression, Device, Line, Link, Made, Place, PlanOptions, Processor, Rates, Schedule, Scheduled,
    Scheduler, Site, WhatIf, Workload, advise, schedule, what_if_sentences,
};
use fusionllm_program::{Optimizer, PeerId};

const OPTIMIZER: Optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });

fn model(n_embd: usize) -> (Graph, TrainGraph) {
    let config =
        Gpt2Config { vocab_size: 128, n_positions: 16, n_embd, n_layer: 2, n_head: 2, ..Gpt2Config::default() };
    let graph = config.build(1, 16, DType::F32).unwrap();
    let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
    (graph, train)
}

fn options(cluster: &Cluster) -> PlanOptions {
    PlanOptions {
        scheduler: Scheduler::OpFence,
        optimizer: OPTIMIZER,
        schedules: Schedule::ALL.to_vec(),
        replicas: cluster.devices().len() as u32,
        compression: Compression::default(),
    }
}

fn advice(workload: Workload<'_>, cluster: &Cluster) -> (Scheduled, Vec<WhatIf>) {
    let options = options(cluster);
    let scheduled = schedule(&[workload], cluster, &options).unwrap();
    let Scheduled { devices, programs, cluster: used, simulation, .. } = &scheduled;
    let made = Made { devices, programs, cluster: used, simulation };
    let stopped = advise(&[workload], cluster, &options, made, &AtomicBool::new(true)).unwrap();
    assert!(stopped.is_empty(), "no plan is whole: {stopped:?}");
    let found = advise(&[workload], cluster, &options, made, &AtomicBool::new(false)).unwrap();
    (scheduled, found)
}

/// The changed cluster, made by hand from its parts.
fn changed(cluster: &Cluster, change: Change) -> Cluster {
    let (mut devices, mut sites) = (cluster.devices().to_vec(), cluster.sites().to_vec());
    let mut direct = cluster.direct_links().to_vec();
    match change {
        Change::Device { peer, times } => {
            let rates = &mut devices[peer.0 as usize].rates;
            (rates.matmul, rates.convolution, rates.memory) =
                (rates.matmul * times, rates.convolution * times, rates.memory * times);
            rates.overhead /= times;
        }
        Change::Memory { peer, then } => devices[peer.0 as usize].memory = then,
        Change::OneMore { like } => {
            let device = devices[like.0 as usize].clone();
            devices.push(Device { name: "another".into(), host: None, ..device });
        }
        Change::Line { line: Line::Uplink { site, .. }, now, then } => {
            let site = &mut sites[site as usize];
            for link in [&mut site.uplink, &mut site.downlink].into_iter().flatten() {
                link.bandwidth = link.bandwidth.max(then.bandwidth);
                link.latency = link.latency.min(if then.latency < now.latency { then.latency } else { f64::MAX });
            }
        }
        Change::Line { line: Line::Link { from: Place::Site(a), to: Place::Site(b) }, now, then } => {
            for link in direct.iter_mut().filter(|l| {
                [(Place::Site(a), Place::Site(b)), (Place::Site(b), Place::Site(a))].contains(&(l.from, l.to))
            }) {
                link.link.bandwidth = link.link.bandwidth.max(then.bandwidth);
                link.link.latency =
                    link.link.latency.min(if then.latency < now.latency { then.latency } else { f64::MAX });
            }
        }
        // Cards and links inside a site have many forms in a file.
        Change::Line { .. } => return change.apply(cluster).unwrap().unwrap(),
    }
    Cluster::new(devices, sites, direct, Some(cluster.broker())).unwrap()
}

#[test]
fn each_suggestion_is_what_a_plan_for_the_changed_testbed_takes() {
    let (graph, train) = model(16);
    let workload = Workload { forward: &graph, train: &train, micro_batches: 12 };
    let mut tried = [0; 4];
    for seed in 0..10 {
        let cluster = cluster(&mut ChoiceRng::new(seed));
        let (now, found) = advice(workload, &cluster);
        for WhatIf { change, replanned, step_s, speedup } in found {
            let changed = changed(&cluster, change);
            let new = schedule(&[workload], &changed, &options(&cluster)).unwrap();
            assert!((new.simulation.step_s / step_s - 1.0).abs() < 0.02, "{seed}: {change:?}");
            assert!(replanned && (speedup - now.simulation.step_s / step_s).abs() < 1e-9);
            tried[match change {
                Change::Line { .. } => 0,
                Change::Device { .. } => 1,
                Change::Memory { .. } => 2,
                Change::OneMore { .. } => 3,
            }] += 1;
        }
    }
    assert!(tried[0] > 5 && tried[1] > 2 && tried[3] > 2, "{tried:?}");
}

/// Twice as fast a processor helps all of its devices, and is suggested once.
#[test]
fn a_shared_processor_is_one_machine() {
    let (graph, train) = model(16);
    let workload = Workload { forward: &graph, train: &train, micro_batches: 12 };
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e10, overhead: 1e-6 };
    let processor = Some(Processor { name: "pc".into(), cores: 2.0, busy: 1.0, crowded: 1.2, crowd: 3.0 });
    let device =
        |i: u32| Device { site: Some(0), processor: processor.clone(), ..Device::new(format!("p{i}"), rates, 1 << 30) };
    let inside = Some(Link { latency: 1e-6, bandwidth: 1e10 });
    let site = Site { name: "home".into(), inside, uplink: None, downlink: None };
    let cluster = Cluster::new((0..3).map(device).collect(), vec![site], Vec::new(), None).unwrap();
    let (_, found) = advice(workload, &cluster);
    let faster: Vec<&WhatIf> = found.iter().filter(|w| matches!(w.change, Change::Device { .. })).collect();
    let [faster] = faster[..] else { panic!("{found:?}") };
    assert!((1.9..=2.1).contains(&faster.speedup), "{faster:?}");
    assert!(what_if_sentences(&cluster, &found)[0].starts_with("the processor of p"), "{found:?}");
    let another = found.iter().find(|w| matches!(w.change, Change::OneMore { .. })).unwrap();
    assert!(another.speedup > 1.2, "it computes on its own: {another:?}");
}

#[test]
fn more_memory_is_suggested_where_it_is_short() {
    let (graph, train) = model(16);
    let workload = Workload { forward: &graph, train: &train, micro_batches: 12 };
    let cluster = cluster(&mut ChoiceRng::new(1));
    let (_, found) = advice(workload, &cluster);
    assert!(!found.iter().any(|w| matches!(w.change, Change::Memory { .. })), "a gigabyte is plenty: {found:?}");
    let (graph, train) = model(256);
    let workload = Workload { forward: &graph, train: &train, micro_batches: 12 };
    let alone = |memory| {
        let devices = cluster.devices().iter().take(1).map(|d| Device { memory, ..d.clone() }).collect();
        Cluster::new(devices, cluster.sites().to_vec(), Vec::new(), Some(Place::Device(0))).unwrap()
    };
    let ample = schedule(&[workload], &alone(1 << 30), &options(&cluster)).unwrap();
    let memory = ample.simulation.peers[0].peak_bytes * 3 / 4;
    let (now, found) = advice(workload, &alone(memory));
    assert!(!now.plan.offload.is_empty(), "it offloads: {:?}", now.notes);
    let more = |w: &&WhatIf| w.change == Change::Memory { peer: PeerId(0), then: 2 * memory };
    let more = found.iter().find(more).unwrap_or_else(|| panic!("{found:?}"));
    assert!((more.step_s / ample.simulation.step_s - 1.0).abs() < 1e-9, "with twice as much, all of it fits");
    let said = what_if_sentences(&alone(memory), std::slice::from_ref(more));
    assert!(said[0].starts_with("the memory of gpu-0-0 limits the step: with "), "{said:?}");
    assert!(said[0].contains(" a new plan would be "), "{said:?}");
}
