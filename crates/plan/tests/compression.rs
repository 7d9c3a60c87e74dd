//! The codec of each link, by rule.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use common::ChoiceRng;
use fusionllm_compress::{Bits, Codec, Element, ValueFormat};
use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::ops::{Compare, SgdStep, Unary};
use fusionllm_graph::{
    Advice, Builder, DType, Graph, GraphError, Init, Phase, Precision, TrainGraph, Value, ValueId, autodiff,
};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Cluster, Compression, Compressor, Curve, Device, Link, LinkCodec, LossBudget, Measured, Plan, Rates, Schedule,
    SimulateOptions, Site, Traffic, compile, equal_compute, simulate,
};
use fusionllm_program::{Address, Optimizer, PeerId, Program};

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
fn the_published_rule_compresses_only_the_slow_link() {
    let (graph, train) = gpt2();
    let (mut plan, programs) = planned(&graph, &train);
    let compression = Compression { compressor: Compressor::AdaTopKPublished, ratio: 50.0, ..Compression::default() };
    plan.codecs = compression.choose(&programs, Some(&cluster(1e10, 1e6)), SGD).unwrap();
    plan.validate(&graph).unwrap();
    // The link is 125 times as fast as the uplink, so its share of the ratio is below one.
    assert_eq!(plan.codec(PeerId(0), PeerId(1)), Codec::None);
    assert_eq!(plan.codec(PeerId(3), PeerId(2)), Codec::None);
    for (from, to) in [(PeerId(1), PeerId(2)), (PeerId(2), PeerId(1))] {
        let Codec::TopK(top) = plan.codec(from, to) else { panic!("{:?}", plan.codecs) };
        assert!((top.ratio - 50.0).abs() < 1e-9, "as much crosses in both directions: {}", top.ratio);
        assert_eq!(top.values, Some(ValueFormat::Int(Bits::Eight)));
    }
    let without = compression.choose(&programs, None, SGD).unwrap_err();
    assert!(without.hint().is_some_and(|hint| hint.contains("--testbed")), "{without}");
}

#[test]
fn rules_by_need_take_the_least_lossy_codecs_that_do_not_slow_the_step() {
    let (graph, train) = gpt2();
    let (mut plan, programs) = planned(&graph, &train);
    for compressor in [Compressor::AdaTopK, Compressor::Auto] {
        let slow = cluster(1e10, 2e5);
        let compression = Compression { compressor, ratio: 30.0, ..Compression::default() };
        plan.codecs.clear();
        let exact = step_s(&plan, &graph, &train, &slow);
        plan.codecs = compression.choose(&programs, Some(&slow), SGD).unwrap();
        let chosen = step_s(&plan, &graph, &train, &slow);
        assert!(chosen < exact / 3.0, "{compressor}: {chosen} s for {exact} s");
        assert_eq!(plan.codec(PeerId(0), PeerId(1)), Codec::None, "{:?}", plan.codecs);
        let Codec::TopK(top) = plan.codec(PeerId(1), PeerId(2)) else { panic!("{:?}", plan.codecs) };
        // The budget of loss is the bound of `auto`, the ratio that of `adatopk`.
        assert_eq!(top.ratio > 10.0, compressor == Compressor::AdaTopK, "{}", top.ratio);
        // The strongest codec on every link is hardly faster.
        let top = Compression { compressor: Compressor::TopK, ratio: top.ratio, ..Compression::default() };
        let strongest = Plan { codecs: top.choose(&programs, None, SGD).unwrap(), ..plan.clone() };
        let most = 1.005 * step_s(&strongest, &graph, &train, &slow);
        assert!(chosen <= most);
        // The step is too slow if any link loses its codec.
        for i in 0..plan.codecs.len() {
            let mut milder = plan.clone();
            milder.codecs.remove(i);
            assert!(step_s(&milder, &graph, &train, &slow) > most, "{:?}", plan.codecs[i]);
        }
        // The ratio of a rule limits it. Links that do not slow the step keep their tensors exact.
        let bounded = Compression { ratio: 4.0, ..compression }.choose(&programs, Some(&slow), SGD).unwrap();
        let ratios = bounded.iter().map(|l| l.codec.ratio(1 << 20, Element::F32));
        assert!(!bounded.is_empty() && ratios.clone().all(|r| r <= 4.0), "{bounded:?}");
        assert_eq!(compression.choose(&programs, Some(&cluster(1e7, 1e9)), SGD).unwrap(), []);
    }
}

/// A budget of loss is spent only where a link needs it.
#[test]
fn a_larger_budget_of_loss_allows_shorter_steps() {
    let (graph, train) = gpt2();
    let (mut plan, programs) = planned(&graph, &train);
    let slow = cluster(1e10, 2e5);
    let mut steps = Vec::new();
    for budget in [0.0, 0.005, 0.02] {
        let loss_budget = LossBudget::new(budget).unwrap();
        let rule = Compression { compressor: Compressor::Auto, ratio: 30.0, loss_budget, ..Compression::default() };
        plan.codecs = rule.choose(&programs, Some(&slow), SGD).unwrap();
        steps.push(step_s(&plan, &graph, &train, &slow));
    }
    assert!(steps.windows(2).all(|pair| pair[1] < 0.95 * pair[0]), "{steps:?}");
}

#[test]
fn a_link_gets_the_smallest_ratio_that_it_needs() {
    let (graph, train) = gpt2();
    let (_, programs) = planned(&graph, &train);
    let rule = Compression { compressor: Compressor::AdaTopK, ratio: 10.0, ..Compression::default() };
    let mut taken = Vec::new();
    for uplink in [1e9, 4e6, 2e6, 1e6, 5e5, 2e5, 1e5, 5e4] {
        let codecs = rule.choose(&programs, Some(&cluster(3e8, uplink)), SGD).unwrap();
        let ratio = |l: &LinkCodec| l.codec.ratio(1 << 20, Element::F32);
        taken.push(codecs.iter().map(ratio).fold(1.0, f64::max));
    }
    assert!(taken.is_sorted() && taken[0] < 5.0 && taken[7] > 9.9, "{taken:?}");
    let between = taken.iter().filter(|ratio| (1.5..9.5).contains(*ratio)).count();
    assert!(between >= 2, "{taken:?}");
}

/// Encoding takes time, too, and a rule knows shares of a line better than it knows the step.
#[test]
fn no_rule_that_knows_the_links_makes_a_step_slower() {
    let config =
        Gpt2Config { vocab_size: 128, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2, ..Gpt2Config::default() };
    let graph = config.build(2, 16, DType::F32).unwrap();
    let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
    let mut kept = BTreeMap::new();
    for seed in 0..300 {
        let mut d = ChoiceRng::new(seed);
        let cluster = common::clusters::cluster(&mut d);
        let micro_batches = d.between(9, 12) as u32;
        let mut plan = common::clusters::by_hand(&graph, &cluster, micro_batches, &mut d);
        let programs = compile(&plan, &graph, &train).unwrap();
        let plain = step_s(&plan, &graph, &train, &cluster);
        for compressor in [Compressor::AdaTopK, Compressor::Auto] {
            let rule = Compression { compressor, ratio: d.log_uniform(1.5, 100.0), ..Compression::default() };
            plan.codecs = rule.choose(&programs, Some(&cluster), SGD).unwrap();
            let chosen = step_s(&plan, &graph, &train, &cluster);
            assert!(chosen <= plain, "{seed}, {compressor}: {chosen} s, {plain} s without: {:?}", plan.codecs);
            *kept.entry(compressor.name()).or_insert(0) += usize::from(!plan.codecs.is_empty());
        }
    }
    assert!(kept.values().all(|n| (50..290).contains(n)), "plans with codecs: {kept:?}");
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
        let int8 = Compression { compressor: Compressor::Int8, ..Compression::default() };
        let strongest = Plan { codecs: int8.choose(&programs, None, SGD).unwrap(), ..plan.clone() };
        assert!(step_s(&plan, &graph, &train, cluster) <= 1.005 * step_s(&strongest, &graph, &train, cluster));
    }
}

/// A denoiser of 4 rows of 64 numbers. Beside its layers, it computes much that has no gradient: a noisy input, a frozen
/// trunk, a time embedding, a positional encoding, a float mask and a target.
fn denoiser() -> Graph {
    let mut b = Builder::new("denoiser");
    let rows = [4, 64];
    let image = b.input("image", DType::F32, rows).unwrap();
    let noise = b.input("noise", DType::F32, rows).unwrap();
    let time = b.input("time", DType::F32, [4, 1]).unwrap();
    let keep = b.input("keep", DType::F32, rows).unwrap();
    let frozen = b.buffer("frozen", DType::F32, [64, 64], Init::Constant(0.1)).unwrap();
    let w0 = b.parameter("w0", DType::F32, [64, 64], Init::Constant(0.1)).unwrap();
    let w1 = b.parameter("w1", DType::F32, [64, 64], Init::Constant(0.1)).unwrap();
    let mut named = |name: &str, f: &dyn Fn(&mut Builder) -> Result<ValueId, GraphError>| b.scope(name, f).unwrap();
    let noisy = named("noisy", &|b| b.add(image, noise));
    let trunk = named("trunk", &|b| b.linear(noisy, frozen, None));
    let target = named("target", &|b| b.unary(Unary::Log1p, image));
    let frequencies = named("frequencies", &|b| b.arange(DType::F32, 1.0, 1.0, 64));
    let phases = named("phases", &|b| b.mul(time, frequencies));
    let embedding = named("embedding", &|b| b.unary(Unary::Sin, phases));
    let position = named("position", &|b| b.cumsum(image, 1));
    let kept = named("kept", &|b| b.compare_scalar(Compare::Gt, keep, 0.5));
    let mask = named("mask", &|b| b.cast(kept, DType::F32));
    let hidden = named("hidden", &|b| b.linear(trunk, w0, None));
    let timed = named("timed", &|b| b.add(hidden, embedding));
    let placed = named("placed", &|b| b.add(timed, position));
    let active = named("active", &|b| b.unary(Unary::Silu, placed));
    // It has a gradient, but only 16 bytes.
    let gate = named("gate", &|b| b.mean(active, &[1], true));
    let gated = named("gated", &|b| b.mul(active, gate));
    let predicted = named("predicted", &|b| b.linear(gated, w1, None));
    let error = named("error", &|b| b.sub(predicted, target));
    let masked = named("masked", &|b| b.mul(error, mask));
    let squared = named("squared", &|b| b.mul(masked, masked));
    let loss = named("loss", &|b| b.mean(squared, &[0, 1], false));
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

/// Programs of which every operator has a peer of its own, so that every value crosses a link.
fn scattered(graph: &Graph, train: &TrainGraph, compressor: Compressor) -> Vec<Program> {
    let each: Vec<u32> = (0..graph.nodes.len() as u32).collect();
    let names = each.iter().map(u32::to_string).collect();
    let mut plan = Plan::from_stages(graph, &each, &each, names, 2, Schedule::OneFOneB, "test");
    plan.compression.compressor = compressor;
    plan.codecs = plan.compression.choose(&compile(&plan, graph, train).unwrap(), None, SGD).unwrap();
    let programs = compile(&plan, graph, train).unwrap();
    programs.iter().for_each(|p| p.validate().unwrap());
    programs
}

/// The values that cross a link between peers, and whether a codec may apply.
fn crossing(programs: &[Program]) -> BTreeMap<ValueId, (Value, bool)> {
    let sent = programs.iter().flat_map(|p| p.sends().map(move |(tensor, _)| (p, tensor)));
    let values = sent.filter(|(_, tensor)| matches!(tensor, Address::Value { .. }));
    values.map(|(p, t)| (t.value(), (p.values[&t.value()].clone(), p.may_be_coded(t)))).collect()
}

/// Regression: all that depends on an input went through the codec. Top-k made most of a target or a mask zero.
#[test]
fn only_values_with_a_gradient_and_gradients_are_coded() {
    let graph = denoiser();
    let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
    let values = crossing(&scattered(&graph, &train, Compressor::TopK));
    let forward = |coded: bool| -> Vec<&str> {
        let forward = values.iter().filter(|(v, (_, c))| v.index() < graph.values.len() && *c == coded);
        forward.map(|(_, (value, _))| value.name.split('.').next().unwrap()).collect()
    };
    let with = ["hidden", "timed", "placed", "active", "gated", "predicted", "error", "masked", "squared"];
    let without = ["noisy", "trunk", "target", "phases", "embedding", "position", "kept", "mask", "gate"];
    assert_eq!((forward(true), forward(false)), (with.to_vec(), without.to_vec()));
    let backward: Vec<_> = values.iter().filter(|(v, _)| v.index() >= graph.values.len()).collect();
    assert!(backward.len() > 5);
    for (_, (value, coded)) in backward {
        assert_eq!(*coded, value.ty.bytes() >= 256, "{}: {}", value.name, value.ty);
    }
}

/// Every gradient that crosses is one of an activation, in both precisions. Of forward values, those that depend on a
/// parameter have one.
#[test]
fn no_gradient_of_an_activation_is_left_out() {
    for precision in [Precision::F32, Precision::Bf16] {
        let (graph, _) = gpt2();
        let graph = graph.in_precision(precision, Precision::F32).unwrap();
        let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
        let programs = scattered(&graph, &train, Compressor::Int8);
        let mut depends: BTreeSet<ValueId> = graph.parameters().collect();
        for node in &graph.nodes {
            if node.inputs.iter().any(|v| depends.contains(v)) {
                depends.extend(&node.outputs);
            }
        }
        let mut coded_in = [0; 2];
        for (v, (value, coded)) in crossing(&programs) {
            let Some(n) = train.graph.producer(v) else { continue };
            let (large, backward) = (value.ty.bytes() >= 256, train.graph.node(n).phase != Phase::Forward);
            coded_in[usize::from(backward)] += usize::from(coded);
            if backward && large && value.ty.dtype.is_float() {
                // The gradient of a view of a weight is a weight gradient.
                assert_eq!(coded, train.graph.node(n).phase == Phase::InputGrad, "{}: {}", value.name, value.ty);
            }
            assert!(backward || !coded || depends.contains(&v), "{}", value.name);
        }
        assert!(coded_in.iter().all(|count| *count > 50), "{coded_in:?}");
    }
}

/// A number of bf16 has two bytes, in every size and ratio.
#[test]
fn sizes_of_bf16_count_two_bytes() {
    let (graph, _) = gpt2();
    let graph = graph.in_precision(Precision::Bf16, Precision::F32).unwrap();
    let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
    let mut seen = BTreeMap::new();
    for (compressor, ratio) in [(Compressor::Bf16, 1.0), (Compressor::Int8, 1.0), (Compressor::TopK, 10.0)] {
        let each: Vec<u32> = (0..graph.nodes.len() as u32).collect();
        let names = each.iter().map(u32::to_string).collect();
        let mut plan = Plan::from_stages(&graph, &each, &each, names, 2, Schedule::OneFOneB, "test");
        plan.compression = Compression { compressor, ratio, ..Compression::default() };
        plan.codecs = plan.compression.choose(&compile(&plan, &graph, &train).unwrap(), None, SGD).unwrap();
        let all = compile(&plan, &graph, &train).unwrap();
        for program in &all {
            for (tensor, to) in program.sends().filter(|(t, _)| program.may_be_coded(*t)) {
                let ty = &program.values[&tensor.value()].ty;
                let (own, sent) = (ty.bytes(), program.payload(tensor, &all[to.0 as usize]).unwrap());
                assert!(sent <= own, "{compressor}: {ty} became {sent} bytes");
                assert_eq!(program.codec(tensor, to) == Codec::None, sent == own);
                let (_, most) = program.coded_bytes(tensor).unwrap();
                assert_eq!(most as usize, own + 8);
                // Gradients under a mask are smaller still.
                if ty.numel() >= 4096 && !program.masks.contains_key(&(tensor.value(), to)) {
                    seen.insert((compressor.name(), ty.dtype), (10.0 * own as f64 / sent as f64).round() / 10.0);
                }
            }
        }
        // A link whose tensors the codec makes no smaller has none.
        let bf16_alone = |l: &LinkCodec| {
            let program = &compile(&plan, &graph, &train).unwrap()[l.from.0 as usize];
            let sent = program.sends().filter(|(t, to)| *to == l.to && program.may_be_coded(*t));
            sent.map(|(t, _)| program.values[&t.value()].ty.dtype).all(|dtype| dtype == DType::BF16)
        };
        assert_eq!(plan.codecs.iter().take(40).any(bf16_alone), compressor != Compressor::Bf16, "{compressor}");
        if compressor == Compressor::Int8 {
            // Neither does the guard fall back on such a codec.
            let traffic = Traffic::new(&compile(&plan, &graph, &train).unwrap());
            for l in plan.codecs.iter().take(40) {
                let milder = traffic.less_lossy((l.from, l.to), l.codec);
                assert_eq!(milder, if bf16_alone(l) { Codec::None } else { Codec::Bf16 });
            }
        }
    }
    let ratio = |compressor, dtype| seen[&(compressor, dtype)];
    assert_eq!(["bf16", "int8", "topk"].map(|c| ratio(c, DType::F32)), [2.0, 3.8, 10.0]);
    assert_eq!(["bf16", "int8", "topk"].map(|c| ratio(c, DType::BF16)), [1.0, 1.9, 10.0]);
}

/// Both ends of a link keep the places that top-k sent of the activations in flight.
#[test]
fn masks_count_as_memory_until_the_gradient_goes_back() {
    let (graph, train) = gpt2();
    let (mut plan, programs) = planned(&graph, &train);
    let cluster = cluster(1e9, 1e6);
    let peaks = |plan: &Plan| -> Vec<u64> {
        let programs = compile(plan, &graph, &train).unwrap();
        let simulation = simulate(&programs, &cluster, &SimulateOptions::new(SGD)).unwrap();
        simulation.peers.iter().map(|peer| peer.peak_bytes).collect()
    };
    let rule = |compressor| Compression { compressor, ratio: 30.0, ..Compression::default() };
    plan.codecs = rule(Compressor::TopK).choose(&programs, Some(&cluster), SGD).unwrap();
    let shared = peaks(&plan);
    // Without shared masks, gradients are larger and nothing is kept.
    plan.compression = rule(Compressor::AdaTopKPublished);
    let own = peaks(&plan);
    // 2 x 64 x 64 numbers: a bit for each of one micro-batch at least, and of the four that are in flight at most.
    for (shared, own) in shared.iter().zip(&own) {
        let kept = shared.saturating_sub(*own);
        assert!((1024..=2 * 4 * 4 * 1024).contains(&kept), "{kept} of {shared} bytes");
    }
}
