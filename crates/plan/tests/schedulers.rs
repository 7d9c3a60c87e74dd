//! Plans of real graphs on clusters: which devices are left out or joined, and which inputs are refused.
#![allow(clippy::unwrap_used)]

use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{DType, Graph, TrainGraph, autodiff};
use fusionllm_models::{Gpt2Config, ResNetConfig};
use fusionllm_plan::{
    Cluster, Compression, Compressor, Device, DirectLink, Link, LossBudget, Place, PlanError, PlanOptions, Rates,
    Schedule, Scheduled, Scheduler, SimulateOptions, Site, Workload, compile, schedule, simulate,
};
use fusionllm_program::{Optimizer, PeerId};

const OPTIMIZER: Optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
const MIB: u64 = 1 << 20;

fn gpt2(samples: usize) -> (Graph, TrainGraph) {
    let config = Gpt2Config {
        vocab_size: 512,
        n_embd: 64,
        n_layer: 4,
        n_head: 4,
        attn_pdrop: 0.0,
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        ..Gpt2Config::default()
    };
    let graph = config.build(samples, 64, DType::F32).unwrap();
    let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
    (graph, train)
}

/// A device with this many GFLOP/s.
fn device(name: &str, gflops: f64, memory: u64) -> Device {
    let rates = Rates { matmul: gflops * 1e9, convolution: gflops * 1e9, memory: 1e10, overhead: 1e-6 };
    Device::new(name, rates, memory)
}

/// Links of 1 ms between all pairs of devices for which `mbps` returns a rate.
fn mesh(devices: Vec<Device>, mbps: impl Fn(u32, u32) -> Option<f64>) -> Cluster {
    let n = devices.len() as u32;
    let pairs = (0..n).flat_map(|a| (0..n).filter(move |b| *b != a).map(move |b| (a, b)));
    let lines = pairs.filter_map(|(from, to)| {
        let link = Link { latency: 0.001, bandwidth: mbps(from.min(to), from.max(to))? * 1e6 / 8.0 };
        Some(DirectLink { from: Place::Device(from), to: Place::Device(to), link })
    });
    Cluster::new(devices, Vec::new(), lines.collect(), None).unwrap()
}

fn plan(scheduler: Scheduler, cluster: &Cluster, replicas: u32) -> Result<Scheduled, PlanError> {
    compressed(scheduler, cluster, replicas, Compression::default())
}

fn compressed(
    scheduler: Scheduler,
    cluster: &Cluster,
    replicas: u32,
    compression: Compression,
) -> Result<Scheduled, PlanError> {
    let (forward, train) = gpt2(2);
    let workload = Workload { forward: &forward, train: &train, micro_batches: 8 };
    let options =
        PlanOptions { scheduler, optimizer: OPTIMIZER, schedules: Schedule::ALL.to_vec(), replicas, compression };
    let made = schedule(&[workload], cluster, &options)?;
    made.plan.validate(&forward)?;
    let programs = compile(&made.plan, &forward, &train)?;
    programs.iter().try_for_each(|p| p.validate())?;
    Ok(made)
}

fn step(made: &Scheduled, cluster: &Cluster) -> f64 {
    let (forward, train) = gpt2(2);
    let programs = compile(&made.plan, &forward, &train).unwrap();
    let used = cluster.select(&made.devices).unwrap();
    simulate(&programs, &used, &SimulateOptions::new(OPTIMIZER)).unwrap().step_s
}

#[test]
fn a_device_behind_a_slow_link_is_left_out() {
    let devices = ["a", "b", "c"].map(|n| device(n, 20.0, 1 << 30)).to_vec();
    let cluster = mesh(devices, |_, to| Some(if to == 2 { 0.1 } else { 1000.0 }));
    let made = plan(Scheduler::OpFence, &cluster, 1).unwrap();
    assert_eq!(made.plan.peers, ["a", "b"]);
    assert!(made.notes.iter().any(|n| n.contains("not used") && n.contains('c')), "{:?}", made.notes);
    let all = plan(Scheduler::EqualCompute, &cluster, 1).unwrap();
    assert_eq!(all.plan.peers, ["a", "b", "c"]);
    assert!(step(&made, &cluster) < step(&all, &cluster) / 5.0);
    assert!(made.lower_bound_s <= made.estimate_s.unwrap());
}

#[test]
fn faster_devices_get_more() {
    let cluster = mesh(vec![device("slow", 10.0, 1 << 30), device("fast", 40.0, 1 << 30)], |_, _| Some(10_000.0));
    let made = plan(Scheduler::OpFence, &cluster, 1).unwrap();
    let (forward, train) = gpt2(2);
    let work = fusionllm_plan::Work::new(&forward, &train, &OPTIMIZER);
    let stage_of = made.plan.stage_of(&forward).unwrap();
    let mut flops = [0.0; 2];
    for o in &work.operators {
        flops[made.plan.stages[stage_of[o.home.index()] as usize].peers[0] as usize] += o.cost.flops;
    }
    assert!((2.0..8.0).contains(&(flops[1] / flops[0])), "{flops:?}");
}

#[test]
fn equal_devices_become_replicas() {
    let devices: Vec<Device> = (0..8).map(|i| device(&format!("d{i}"), 20.0, 1 << 30)).collect();
    let cluster = mesh(devices, |_, _| Some(10_000.0));
    let made = plan(Scheduler::OpFence, &cluster, 4).unwrap();
    let single = plan(Scheduler::OpFence, &cluster, 1).unwrap();
    assert!(made.plan.stages.iter().any(|s| s.peers.len() > 1), "{:?}", made.plan.stages);
    assert!(single.plan.stages.iter().all(|s| s.peers.len() == 1));
    assert!(step(&made, &cluster) < step(&single, &cluster));
}

/// A site with devices to spare is a plan of its own. A search among all devices finds one that is as fast.
#[test]
fn other_sites_make_no_plan_slower() {
    let sites: [(usize, f64, f64, f64); 4] =
        [(6, 40.0, 1000.0, 100.0), (6, 30.0, 1000.0, 50.0), (4, 50.0, 200.0, 30.0), (5, 10.0, 100.0, 10.0)];
    let mbps = |rate: f64, latency| Link { latency, bandwidth: rate * 1e6 / 8.0 };
    for replicas in [1, 8] {
        let mut devices = Vec::new();
        for (number, (count, gflops, ..)) in sites.iter().enumerate() {
            devices.extend((0..*count).map(|i| {
                let name = format!("site-{number}-{i}");
                Device { site: Some(number as u32), ..device(&name, *gflops, 1 << 30) }
            }));
        }
        let site = |(number, (_, _, inside, uplink)): (usize, &(usize, f64, f64, f64))| Site {
            name: format!("site-{number}"),
            inside: Some(mbps(*inside, 1e-4)),
            uplink: Some(mbps(*uplink, 0.01)),
            downlink: None,
        };
        let of_sites = sites.iter().enumerate().map(site).collect();
        let cluster = Cluster::new(devices, of_sites, Vec::new(), None).unwrap();
        let all = plan(Scheduler::OpFence, &cluster, replicas).unwrap().simulation.step_s;
        for number in 0..sites.len() as u32 {
            let members = (0..).zip(cluster.devices()).filter(|(_, d)| d.site == Some(number));
            let members: Vec<PeerId> = members.map(|(i, _)| PeerId(i)).collect();
            let alone = plan(Scheduler::OpFence, &cluster.select(&members).unwrap(), replicas).unwrap();
            let alone = alone.simulation.step_s;
            assert!(all <= 1.02 * alone, "{replicas} replicas: {all} s, {alone} s in site {number} alone");
        }
    }
}

/// With nearly free links, the estimate for replicas is close to the simulated step.
#[test]
fn the_estimate_for_replicas_matches_the_simulation() {
    let devices = (0..4).map(|i| device(&format!("d{i}"), 0.5, 1 << 30)).collect();
    let cluster = mesh(devices, |_, _| Some(10_000.0));
    let made = plan(Scheduler::OpFence, &cluster, 4).unwrap();
    assert!(made.plan.stages.iter().any(|s| s.peers.len() > 1), "{:?}", made.plan.stages);
    let (counted, simulated) = (made.estimate_s.unwrap(), step(&made, &cluster));
    assert!((0.95..1.05).contains(&(counted / simulated)), "{counted} s for {simulated} s");
    assert!(made.lower_bound_s <= simulated);
}

#[test]
fn exact_is_at_least_as_good() {
    let speeds = [10.0, 40.0, 20.0, 30.0];
    let devices = speeds.iter().enumerate().map(|(i, s)| device(&format!("d{i}"), *s, 1 << 30)).collect();
    let cluster = mesh(devices, |a, b| Some(if (a, b) == (0, 1) { 20.0 } else { 400.0 }));
    let exact = plan(Scheduler::Exact, &cluster, 1).unwrap();
    let fence = plan(Scheduler::OpFence, &cluster, 1).unwrap();
    // Exact is the best by the cost formula. Of equally good plans, OP-Fence takes the one with the shorter simulated
    // step.
    assert!(exact.lower_bound_s <= exact.estimate_s.unwrap());
    assert!(
        exact.estimate_s.unwrap() <= fence.estimate_s.unwrap() * 1.02,
        "the exact plan has 40 positions to choose from"
    );
    assert!(step(&fence, &cluster) <= step(&exact, &cluster) * 1.15);
    let nine = mesh((0..9).map(|i| device(&format!("d{i}"), 1.0, 1 << 30)).collect(), |_, _| Some(1.0));
    let e = plan(Scheduler::Exact, &nine, 1).unwrap_err().to_string();
    assert_eq!(e, "plan: the exact scheduler takes up to 8 devices, but there are 9; use op-fence");
}

#[test]
fn a_residual_network_is_cut_into_stages() {
    let config = ResNetConfig { depth: 18, num_classes: 10, width: 8, ..ResNetConfig::default() };
    let forward = config.build(4, 32, DType::F32).unwrap();
    let train = autodiff::differentiate(&forward, forward.outputs["loss"]).unwrap();
    let cluster = mesh((0..4).map(|i| device(&format!("d{i}"), 1.0, 1 << 30)).collect(), |_, _| Some(10_000.0));
    let workload = Workload { forward: &forward, train: &train, micro_batches: 16 };
    let options = PlanOptions {
        scheduler: Scheduler::OpFence,
        optimizer: OPTIMIZER,
        schedules: Schedule::ALL.to_vec(),
        replicas: 1,
        compression: Compression::default(),
    };
    let made = schedule(&[workload], &cluster, &options).unwrap();
    compile(&made.plan, &forward, &train).unwrap().iter().for_each(|p| p.validate().unwrap());
    assert_eq!(made.plan.stages.len(), 4);
}

#[test]
fn errors_say_what_is_missing_with_figures() {
    let lonely = mesh(vec![device("a", 1.0, 1 << 30), device("b", 1.0, 1 << 30)], |_, _| None);
    let made = plan(Scheduler::OpFence, &lonely, 1).unwrap();
    assert_eq!(made.plan.peers, ["a"], "the broker stands with a");
    assert!(made.notes[0].starts_with("b is not used: no link leads to it from the broker"), "{:?}", made.notes);

    let tiny = mesh(vec![device("a", 1.0, MIB / 8), device("b", 1.0, MIB / 4)], |_, _| Some(100.0));
    let e = plan(Scheduler::OpFence, &tiny, 1).unwrap_err().to_string();
    assert!(
        e.starts_with("memory: ")
            && e.contains("operator \"")
            && e.contains("alone needs")
            && e.contains("the largest device, b, has 256 KiB"),
        "{e}"
    );

    let small = mesh(vec![device("a", 1.0, MIB), device("b", 1.0, MIB)], |_, _| Some(100.0));
    let e = plan(Scheduler::Exact, &small, 1).unwrap_err().to_string();
    assert!(e.starts_with("memory: ") && (e.contains("are missing") || e.contains("alone needs")), "{e}");

    assert!("equal-compute".parse() == Ok(Scheduler::EqualCompute));
    let e = "fastest".parse::<Scheduler>().unwrap_err().to_string();
    assert_eq!(e, "plan: there is no scheduler \"fastest\"; use one of equal-number, equal-compute, op-fence, exact");
}

/// A user learns what a larger budget of loss would bring, where the budget is what limits the step.
#[test]
fn a_plan_says_what_a_larger_budget_of_loss_would_bring() {
    let devices = || (0..3).map(|i| device(&format!("d{i}"), 2.0, 1 << 30)).collect();
    let auto = Compression { compressor: Compressor::Auto, ratio: 20.0, ..Compression::default() };
    let notes = |bandwidth: f64, compression| {
        let made =
            compressed(Scheduler::EqualCompute, &mesh(devices(), |_, _| Some(bandwidth)), 1, compression).unwrap();
        let notes: Vec<String> = made.notes.into_iter().filter(|note| note.contains("loss_budget")).collect();
        (notes, made.simulation.step_s)
    };
    let (said, step_s) = notes(1.0, auto);
    let [note] = &said[..] else { panic!("{said:?}") };
    let budget =
        ["1%", "2%", "5%"].into_iter().find(|b| note.ends_with(&format!("compression.loss_budget={b}"))).unwrap();
    // What it says is so.
    let percent: f64 = budget.trim_end_matches('%').parse().unwrap();
    let larger = Compression { loss_budget: LossBudget::new(percent / 100.0).unwrap(), ..auto };
    let faster = step_s / notes(1.0, larger).1;
    assert!(
        note.contains(&format!(" {faster:.1} times as fast, for about +{} % of loss", percent)),
        "{note}: {faster}"
    );
    // Fast links need nothing, and a codec that a user names is meant.
    assert_eq!(notes(1e6, auto).0, [""; 0]);
    assert_eq!(notes(1.0, Compression { compressor: Compressor::AdaTopK, ..auto }).0, [""; 0]);
}

/// Over links too slow for exact activations, one device trains alone. With codecs, sharing is faster.
#[test]
fn codecs_decide_which_devices_take_part() {
    let cluster = mesh((0..3).map(|i| device(&format!("d{i}"), 2.0, 1 << 30)).collect(), |_, _| Some(3.0));
    let alone = plan(Scheduler::OpFence, &cluster, 1).unwrap();
    assert_eq!(alone.devices.len(), 1);
    for compressor in [Compressor::Auto, Compressor::Int4, Compressor::AdaTopK] {
        let compression = Compression { compressor, ratio: 20.0, ..Compression::default() };
        let made = compressed(Scheduler::OpFence, &cluster, 1, compression).unwrap();
        assert!(made.devices.len() > 1 && !made.plan.codecs.is_empty(), "{compressor}: {:?}", made.plan);
        let (together, by_itself) = (step(&made, &cluster), step(&alone, &cluster));
        assert!(together < 0.9 * by_itself, "{compressor}: {together} s instead of {by_itself} s");
        // Gradients of the tied embedding are never compressed. So the plan avoids sending them.
        let ends = [made.plan.stages.first(), made.plan.stages.last()].map(|s| &s.unwrap().peers);
        assert_eq!(ends[0], ends[1], "{compressor}: {:?}", made.plan.stages);
        assert!(made.lower_bound_s <= together);
        // On links with a thousandth of that rate, codecs do not help.
        let far = mesh((0..3).map(|i| device(&format!("d{i}"), 2.0, 1 << 30)).collect(), |_, _| Some(0.01));
        assert_eq!(compressed(Scheduler::OpFence, &far, 1, compression).unwrap().devices.len(), 1, "{compressor}");
    }
}
