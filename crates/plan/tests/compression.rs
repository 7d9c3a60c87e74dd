//! The codec of each link, by rule.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fusionllm_compress::Codec;
use fusionllm_graph::Advice;
use fusionllm_graph::ops::SgdStep;
use fusionllm_graph::{DType, Graph, TrainGraph, autodiff};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Cluster, Compression, Compressor, Curve, Device, Link, Measured, Optimizer, PeerId, Plan, Program, Rates, Schedule,
    SimulateOptions, Site, compile, equal_compute, simulate,
};

const SGD: Optimizer = Optimizer::Sgd(SgdStep { momentum: 0.9, weight_decay: 0.0, nesterov: false });

fn gpt2() -> (Graph, TrainGraph) {
    let config =
        Gpt2Config { vocab_size: 256, n_positions: 64, n_embd: 64, n_layer: 4, n_head: 4, ..Gpt2Config::default() };
    let graph = config.build(2, 64, DType::F32).unwrap();
    let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
    (graph, train)
}

/// Four devices of `rate` FLOP/s, two at each of two sites. Links inside a site have 1 Gbps; uplinks have `uplink`
/// bytes/s.
fn cluster(rate: f64, uplink: f64) -> Cluster {
    let rates = Rates { matmul: rate, convolution: rate, memory: rate, overhead: 1e-6 };
    let at = |name: &str, site| Device { site: Some(site), ..Device::new(name, rates, 1 << 30) };
    let inside = Some(Link { latency: 2e-4, bandwidth: 1.25e8 });
    let site = |name: &str| Site {
        name: name.into(),
        inside,
        uplink: Some(Link { latency: 0.005, bandwidth: uplink }),
        downlink: None,
    };
    let devices = vec![at("a0", 0), at("a1", 0), at("b0", 1), at("b1", 1)];
    Cluster::new(devices, vec![site("a"), site("b")], Vec::new(), None).unwrap()
}

fn planned(graph: &Graph, train: &TrainGraph) -> (Plan, Vec<Program>) {
    let names: Vec<String> = ["a0", "a1", "b0", "b1"].map(String::from).to_vec();
    let plan = equal_compute(graph, &names, 4, Schedule::OneFOneB).unwrap();
    let programs = compile(&plan, graph, train).unwrap();
    (plan, programs)
}

fn step_s(plan: &Plan, graph: &Graph, train: &TrainGraph, cluster: &Cluster) -> f64 {
    let programs = compile(plan, graph, train).unwrap();
    simulate(&programs, cluster, &SimulateOptions::new(SGD)).unwrap().step_s
}

#[test]
fn adatopk_compresses_only_the_slow_link() {
    let (graph, train) = gpt2();
    let (mut plan, programs) = planned(&graph, &train);
    let compression = Compression { compressor: Compressor::AdaTopK, ratio: 50.0, ..Compression::default() };
    plan.codecs = compression.choose(&programs, Some(&cluster(1e10, 1e6)), SGD).unwrap();
    plan.validate(&graph).unwrap();
    // The link is 125 times as fast as the uplink, so its share of the ratio is below one.
    assert_eq!(plan.codec(PeerId(0), PeerId(1)), Codec::None);
    assert_eq!(plan.codec(PeerId(3), PeerId(2)), Codec::None);
    for (from, to) in [(PeerId(1), PeerId(2)), (PeerId(2), PeerId(1))] {
        let Codec::TopK(top) = plan.codec(from, to) else { panic!("{:?}", plan.codecs) };
        assert!((top.ratio - 50.0).abs() < 1e-9, "as much crosses in both directions: {}", top.ratio);
    }
    let without = compression.choose(&programs, None, SGD).unwrap_err();
    assert!(without.hint().is_some_and(|hint| hint.contains("--testbed")), "{without}");
}

#[test]
fn auto_takes_the_least_lossy_codecs_that_do_not_slow_the_step() {
    let (graph, train) = gpt2();
    let (mut plan, programs) = planned(&graph, &train);
    let slow = cluster(1e10, 2e5);
    let compression = Compression { compressor: Compressor::Auto, ratio: 30.0, ..Compression::default() };
    let exact = step_s(&plan, &graph, &train, &slow);
    plan.codecs = compression.choose(&programs, Some(&slow), SGD).unwrap();
    let chosen = step_s(&plan, &graph, &train, &slow);
    assert!(chosen < exact / 3.0, "{chosen} s for {exact} s");
    assert_eq!(plan.codec(PeerId(0), PeerId(1)), Codec::None, "{:?}", plan.codecs);
    assert_ne!(plan.codec(PeerId(1), PeerId(2)), Codec::None, "{:?}", plan.codecs);
    assert!(plan.codecs.iter().all(|l| !matches!(l.codec, Codec::TopK(_))), "{:?}", plan.codecs);
    // The strongest codec on every link is hardly faster.
    let top = Compression { compressor: Compressor::Int4Hadamard, ..Compression::default() };
    let strongest = Plan { codecs: top.choose(&programs, None, SGD).unwrap(), ..plan.clone() };
    let most = 1.005 * step_s(&strongest, &graph, &train, &slow);
    assert!(chosen <= most);
    // The step is too slow if any link loses its codec.
    for i in 0..plan.codecs.len() {
        let mut milder = plan.clone();
        milder.codecs.remove(i);
        assert!(step_s(&milder, &graph, &train, &slow) > most, "{:?}", plan.codecs[i]);
    }
    // The ratio of a rule limits `auto`. Links that do not slow the step keep their tensors exact.
    let bounded = Compression { ratio: 5.0, ..compression }.choose(&programs, Some(&slow), SGD).unwrap();
    assert!(!bounded.is_empty() && bounded.iter().all(|l| l.codec.ratio(1 << 20) <= 5.0), "{bounded:?}");
    assert_eq!(compression.choose(&programs, Some(&cluster(1e7, 1e9)), SGD).unwrap(), []);
}

#[test]
fn fast_links_get_codecs_if_sending_keeps_processors_busy() {
    let (graph, train) = gpt2();
    let (mut plan, programs) = planned(&graph, &train);
    let free = cluster(1e7, 1e9);
    let traffic = Curve::new(vec![(1.0, 1e-5), (1e6, 10.0)]).unwrap();
    let measured = Measured { traffic: Some(traffic), ..Measured::default() };
    let busy = |d: &Device| Device { measured: measured.clone(), ..d.clone() };
    let busy =
        Cluster::new(free.devices().iter().map(busy).collect(), free.sites().to_vec(), Vec::new(), None).unwrap();
    let auto = Compression { compressor: Compressor::Auto, ratio: 30.0, ..Compression::default() };
    for (cluster, coded) in [(&free, false), (&busy, true)] {
        plan.codecs = auto.choose(&programs, Some(cluster), SGD).unwrap();
        assert_eq!(plan.codec(PeerId(0), PeerId(1)) != Codec::None, coded, "{:?}", plan.codecs);
        let int4 = Compression { compressor: Compressor::Int4Hadamard, ..Compression::default() };
        let strongest = Plan { codecs: int4.choose(&programs, None, SGD).unwrap(), ..plan.clone() };
        assert!(step_s(&plan, &graph, &train, cluster) <= 1.005 * step_s(&strongest, &graph, &train, cluster));
    }
}
