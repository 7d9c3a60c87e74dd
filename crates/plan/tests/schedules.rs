//! The gain of each schedule, on the virtual clock.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use fusionllm_graph::ops::SgdStep;
use fusionllm_graph::{Builder, DType, Graph, Init};
use fusionllm_plan::{
    Cluster, Device, Link, Plan, Rates, Schedule, SimulateOptions, Simulation, Site, compile, simulate,
};
use fusionllm_program::Optimizer;

const DEPTH: usize = 4;

/// A graph with as many equal layers as stages.
fn layers() -> Graph {
    let mut b = Builder::new("layers");
    let mut y = b.input("x", DType::F32, [64, 64]).unwrap();
    for s in 0..DEPTH * 4 {
        // One more layer before the first, so that every stage computes an input gradient.
        let w = b.parameter(&format!("w{s}"), DType::F32, [64, 64], Init::Constant(0.5)).unwrap();
        y = b.scope(format!("{}", s / 4), |b| b.linear(y, w, None)).unwrap();
    }
    let loss = b.scope(format!("{}", DEPTH - 1), |b| b.sum(y, &[0, 1], false)).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

/// Devices on which only matrix products take time, with free links.
fn devices(count: usize) -> Cluster {
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e18, overhead: 0.0 };
    let device = |i| Device { site: Some(0), ..Device::new(format!("p{i}"), rates, 1 << 40) };
    let site = Site {
        name: "here".into(),
        inside: Some(Link { latency: 0.0, bandwidth: 1e18 }),
        uplink: None,
        downlink: None,
    };
    Cluster::new((0..count).map(device).collect(), vec![site], vec![], None).unwrap()
}

fn step(plan: &Plan, graph: &Graph, cluster: &Cluster) -> Simulation {
    let programs = compile(plan, graph, &train_graph(graph)).unwrap();
    let sgd = SgdStep { momentum: 0.0, weight_decay: 0.0, nesterov: false };
    let conditions = SimulateOptions::new(Optimizer::Sgd(sgd));
    simulate(&programs, cluster, &conditions).unwrap()
}

/// Seconds of one matrix product.
const PRODUCT: f64 = 2.0 * 64.0 * 64.0 * 64.0 / 1e9;

/// A stage's forward pass, backward pass and weight gradients take four matrix products: F, B and W. With p stages,
/// 1F1B leaves each peer idle for (p - 1)(F + B + W) per step. ZB-H1 leaves it idle for (p - 1)(F + B - W) (Qi et
/// al., 2023), with about the memory of 1F1B's first peer.
#[test]
fn a_pipeline_waits_less_if_weight_gradients_can_wait() {
    let graph = layers();
    let (f, b, w) = (4.0, 4.0, 4.0);
    let others = (DEPTH - 1) as f64;
    for micro_batches in [4, 8, 16] {
        let [gpipe, one_f_one_b, zero_bubble, deep] = Schedule::ALL.map(|schedule| {
            let plan = plan_by(&graph, micro_batches, schedule, |name| name[..1].parse().unwrap());
            step(&plan, &graph, &devices(DEPTH))
        });
        let working = f64::from(micro_batches) * (f + b + w);
        // The first layer needs no input gradient, and early messages arrive early. So the idle time is up to one
        // pass shorter.
        for (simulation, idle) in
            [(&gpipe, others * (f + b + w)), (&one_f_one_b, others * (f + b + w)), (&zero_bubble, others * (f + b - w))]
        {
            let products = simulation.step_s / PRODUCT;
            assert!((working + idle - b..working + idle + 1.0).contains(&products), "{micro_batches}: {products}");
        }
        // ZB-H2 orders tasks for slow links. With free links it is no slower.
        assert!(deep.step_s <= zero_bubble.step_s * 1.001, "{} {}", deep.step_s, zero_bubble.step_s);
        // GPipe keeps all micro-batches; 1F1B does not.
        let peak = |s: &Simulation| s.peers.iter().map(|p| p.peak_bytes).max().unwrap() as f64;
        assert!(peak(&zero_bubble) < 1.1 * peak(&one_f_one_b));
        let lost = (peak(&zero_bubble) - peak(&one_f_one_b)) / (peak(&gpipe) - peak(&one_f_one_b));
        assert!(micro_batches < 16 || lost < 0.2, "{lost}");
    }
}

/// With p stages and messages that take as long as a pass, ZB-H1 has p micro-batches in flight and waits. ZB-H2 has
/// 2p - 1 in flight and does not.
#[test]
fn more_micro_batches_in_flight_hide_slow_links() {
    let graph = layers();
    let near = devices(DEPTH);
    let apart = Link { latency: 4.0 * PRODUCT, bandwidth: 1e18 };
    let site = Site { inside: Some(apart), ..near.sites()[0].clone() };
    let far = Cluster::new(near.devices().to_vec(), vec![site], vec![], None).unwrap();
    let [here, there] = [&near, &far].map(|cluster| {
        [Schedule::ZeroBubble, Schedule::DeepZeroBubble]
            .map(|schedule| step(&plan_by(&graph, 24, schedule, |name| name[..1].parse().unwrap()), &graph, cluster))
    });
    let longer = [0, 1].map(|s| (there[s].step_s - here[s].step_s) / PRODUCT);
    // About every p micro-batches, the first peer waits for the links there and back. Its own work meanwhile shortens
    // the wait.
    assert!(longer[0] > 100.0, "{longer:?}");
    // Only the first message there and the last message back are not hidden.
    assert!(longer[1] < 2.0 * 3.0 * 4.0 * 2.0, "{longer:?}");
    let peak = |s: &Simulation| s.peers.iter().map(|p| p.peak_bytes).max().unwrap() as f64;
    assert!(peak(&there[1]) > peak(&there[0]), "for memory");
}
