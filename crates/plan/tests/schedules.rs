//! What the schedules are worth, on the virtual clock.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use fusionllm_graph::ops::SgdStep;
use fusionllm_graph::{Builder, DType, Graph, Init};
use fusionllm_plan::{
    Cluster, Device, Link, Optimizer, Plan, Rates, Schedule, SimulateOptions, Simulation, Site, compile, simulate,
};

const DEPTH: usize = 4;

/// As many layers as stages, all alike.
fn layers() -> Graph {
    let mut b = Builder::new("layers");
    let mut y = b.input("x", DType::F32, [64, 64]).unwrap();
    for s in 0..DEPTH * 4 {
        // One more before the first, so that every stage has an input gradient to make.
        let w = b.parameter(&format!("w{s}"), DType::F32, [64, 64], Init::Constant(0.5)).unwrap();
        y = b.scope(format!("{}", s / 4), |b| b.linear(y, w, None)).unwrap();
    }
    let loss = b.scope(format!("{}", DEPTH - 1), |b| b.sum(y, &[0, 1], false)).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

/// Devices for which matrix products are all that takes time, and links that take none.
fn devices(count: usize) -> Cluster {
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e18, overhead: 0.0 };
    let device = |i| Device { site: Some(0), ..Device::new(format!("p{i}"), rates, 1 << 40) };
    let site = Site { name: "here".into(), inside: Some(Link { latency: 0.0, bandwidth: 1e18 }), uplink: None };
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

/// A pass of a stage over a micro-batch in each direction, and for its weights, is four products: F, B and W. With p stages, 1F1B leaves each peer without work
/// for (p - 1)(F + B + W) in a step, ZB-H1 for (p - 1)(F + B - W) (Qi et al., 2023), for about the memory that 1F1B takes on its first peer.
#[test]
fn a_pipeline_waits_less_where_weights_can_wait() {
    let graph = layers();
    let (f, b, w) = (4.0, 4.0, 4.0);
    let others = (DEPTH - 1) as f64;
    for micro_batches in [4, 8, 16] {
        let [gpipe, one_f_one_b, zero_bubble, deep] = Schedule::ALL.map(|schedule| {
            let plan = plan_by(&graph, micro_batches, schedule, |name| name[..1].parse().unwrap());
            step(&plan, &graph, &devices(DEPTH))
        });
        let working = f64::from(micro_batches) * (f + b + w);
        // The first layer needs no gradient of the input, and what is sent early is there early: up to a pass less.
        for (simulation, idle) in
            [(&gpipe, others * (f + b + w)), (&one_f_one_b, others * (f + b + w)), (&zero_bubble, others * (f + b - w))]
        {
            let products = simulation.step_s / PRODUCT;
            assert!((working + idle - b..working + idle + 1.0).contains(&products), "{micro_batches}: {products}");
        }
        // ZB-H2, whose order makes room for ways that take no time here, is no slower.
        assert!(deep.step_s <= zero_bubble.step_s * 1.001, "{} {}", deep.step_s, zero_bubble.step_s);
        // What GPipe keeps for all micro-batches and 1F1B does not is what there is to lose.
        let peak = |s: &Simulation| s.peers.iter().map(|p| p.peak_bytes).max().unwrap() as f64;
        assert!(peak(&zero_bubble) < 1.1 * peak(&one_f_one_b));
        let lost = (peak(&zero_bubble) - peak(&one_f_one_b)) / (peak(&gpipe) - peak(&one_f_one_b));
        assert!(micro_batches < 16 || lost < 0.2, "{lost}");
    }
}

/// With p stages, messages that take as long as a pass have ZB-H1, which lets p micro-batches go ahead, wait for what comes back. ZB-H2 lets 2p - 1.
#[test]
fn more_micro_batches_under_way_hide_slow_links() {
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
    // Every p micro-batches or so the first peer waits for the ways there and back, less what it has to do meanwhile.
    assert!(longer[0] > 100.0, "{longer:?}");
    // The way there at the beginning and the way back at the end are all that nothing hides.
    assert!(longer[1] < 2.0 * 3.0 * 4.0 * 2.0, "{longer:?}");
    let peak = |s: &Simulation| s.peers.iter().map(|p| p.peak_bytes).max().unwrap() as f64;
    assert!(peak(&there[1]) > peak(&there[0]), "for memory");
}
