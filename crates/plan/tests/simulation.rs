//! The simulator against a second, simpler simulator, and against figures computed by hand.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::*;
use fusionllm_graph::DType;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Activity, Card, Cluster, Curve, Device, DirectLink, Line, LineLoad, Link, Measured, Place, Plan, Processor, Rates,
    Schedule, SimulateOptions, Simulation, Site, equal_compute, message_bytes, simulate,
};
use fusionllm_program::{Address, Instruction, Optimizer, PeerId, Program};
use proptest::prelude::*;

const OPTIMIZER: Optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });

fn options() -> SimulateOptions {
    SimulateOptions { optimizer: OPTIMIZER, record: true }
}

/// A device on which every operator takes `seconds`.
fn device(name: String, seconds: f64) -> Device {
    Device::new(name, Rates { matmul: 1e30, convolution: 1e30, memory: 1e30, overhead: seconds }, 1 << 30)
}

/// Devices and a broker, with a link between any two in each direction.
fn lines(seconds: &[f64], choices: &mut ChoiceRng) -> Cluster {
    // Cards that never limit: the messages of one link do not slow those of another.
    let at = |(i, s): (u32, &f64)| Device { network: Card::new(1e9), ..device(format!("p{i}"), *s) };
    let devices = (0..).zip(seconds).map(at).collect();
    let ends: Vec<Place> = (0..seconds.len() as u32).map(Place::Device).chain([Place::Broker]).collect();
    let mut all = Vec::new();
    for &from in &ends {
        for &to in ends.iter().filter(|to| **to != from) {
            let link = Link { latency: choices.below(5) as f64 * 0.5, bandwidth: 10.0 + choices.below(1000) as f64 };
            all.push(DirectLink { from, to, link });
        }
    }
    Cluster::new(devices, Vec::new(), all, Some(Place::Broker)).unwrap().with_broker_network(Card::new(1e9)).unwrap()
}

/// A simpler simulator for the clusters of [`lines`]. Each peer has its own clock and runs as far as it can.
struct Peers<'a> {
    programs: &'a [Program],
    cluster: &'a Cluster,
    seconds: &'a [f64],
    clock: Vec<f64>,
    free: BTreeMap<(PeerId, PeerId), f64>,
    mail: BTreeMap<(PeerId, Address), f64>,
}

impl Peers<'_> {
    fn send(&mut self, at: f64, from: PeerId, to: PeerId, tensor: Address, bytes: usize) {
        let link = self.cluster.link(from, to).unwrap();
        let free = self.free.entry((from, to)).or_insert(0.0);
        *free = free.max(at) + message_bytes(bytes as u64) / link.bandwidth;
        self.mail.insert((to, tensor), *free + link.latency);
    }

    /// Seconds of a small message to or from the broker.
    fn control(&self, from: PeerId, to: PeerId, bytes: u64) -> f64 {
        self.cluster.link(from, to).unwrap().seconds(message_bytes(bytes))
    }

    fn norms(&self, p: &Program) -> f64 {
        self.control(p.peer, PeerId::BROKER, 10 * p.owned().count() as u64)
    }

    /// Runs a part of each peer's instructions.
    fn run(&mut self, stretch: &[&[Instruction]]) {
        let mut at = vec![0; stretch.len()];
        while (0..at.len()).any(|i| at[i] < stretch[i].len()) {
            let before = at.clone();
            for i in 0..at.len() {
                while let Some(instruction) = stretch[i].get(at[i]) {
                    if !self.step(i, instruction) {
                        break;
                    }
                    at[i] += 1;
                }
            }
            assert_ne!(at, before, "all peers wait");
        }
    }

    fn step(&mut self, i: usize, instruction: &Instruction) -> bool {
        let p = &self.programs[i];
        let operators = match *instruction {
            Instruction::Receive { tensor, .. } => match self.mail.remove(&(p.peer, tensor)) {
                Some(time) => {
                    self.clock[i] = self.clock[i].max(time);
                    0
                }
                None => return false,
            },
            Instruction::Send { tensor, to } => {
                self.send(self.clock[i], p.peer, to, tensor, p.values[&tensor.value()].ty.bytes());
                0
            }
            Instruction::Run { .. } | Instruction::Update { .. } => 1,
            // The first term of a sum is moved.
            Instruction::Accumulate { micro_batch, .. } => usize::from(micro_batch > 0),
            Instruction::Join { .. } => 1,
            Instruction::Reduce { parameter } => p.reductions[&parameter].terms().count() - 1,
            Instruction::Clip => p.owned().count(),
            _ => 0,
        };
        self.clock[i] += self.seconds[i] * operators as f64;
        true
    }

    /// When all peers had finished each of eight steps.
    fn ends(mut self) -> Vec<f64> {
        let clip = |p: &Program| p.instructions.iter().position(|i| *i == Instruction::Clip).map_or(0, |i| i + 1);
        let first: Vec<&[Instruction]> = self.programs.iter().map(|p| &p.instructions[..clip(p)]).collect();
        let second: Vec<&[Instruction]> = self.programs.iter().map(|p| &p.instructions[clip(p)..]).collect();
        let (mut ends, mut reported) = (Vec::new(), vec![0.0f64; 3]);
        for pass in 0..8 {
            // Inputs are sent once all peers have reported the pass three before.
            let mut inputs = Vec::new();
            for p in self.programs {
                for (tensor, (from, ty)) in p.incoming() {
                    if let (PeerId::BROKER, Address::Value { micro_batch, value }) = (from, tensor) {
                        inputs.push((micro_batch, p.peer, value, tensor, ty.bytes()));
                    }
                }
            }
            inputs.sort();
            for (_, to, _, tensor, bytes) in inputs {
                self.send(reported[pass], PeerId::BROKER, to, tensor, bytes);
            }
            self.run(&first);
            let voters = self.programs.iter().filter(|p| !p.instructions.is_empty());
            let norms = voters.map(|p| self.clock[p.peer.0 as usize] + self.norms(p));
            let judged = norms.fold(0.0, f64::max);
            // Idle peers do nothing.
            for i in (0..self.programs.len()).filter(|i| !self.programs[*i].instructions.is_empty()) {
                self.clock[i] = judged + self.control(PeerId::BROKER, PeerId(i as u32), 32);
            }
            self.run(&second);
            ends.push(self.clock.iter().copied().fold(0.0, f64::max));
            let reports = self.programs.iter().map(|p| self.clock[p.peer.0 as usize] + self.norms(p));
            reported.push(reports.fold(0.0, f64::max));
        }
        ends
    }
}

fn second_opinion(programs: &[Program], cluster: &Cluster, seconds: &[f64]) -> f64 {
    let clock = vec![0.0; programs.len()];
    let peers = Peers { programs, cluster, seconds, clock, free: BTreeMap::new(), mail: BTreeMap::new() };
    let ends = peers.ends();
    let took = |k: usize| ends[k] - ends[k - 1];
    // The first of two equal steps, as in the simulator.
    let steady = (2..7).find(|&k| (took(k) - took(k - 1)).abs() <= 1e-3 * took(k));
    took(steady.unwrap_or(7))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn two_clocks_agree(
        size in 0usize..10, peers in 1usize..=5, micro_batches in 1u32..=5, gpipe in any::<bool>(), seed in any::<u64>(),
    ) {
        let mut choices = ChoiceRng::new(seed);
        let graph = random_graph(size, &mut choices);
        let schedule = if gpipe { Schedule::GPipe } else { Schedule::OneFOneB };
        let plan = random_plan(&graph, peers, micro_batches, schedule, &mut choices);
        let [programs, _] = programs(&graph, &plan);
        let seconds: Vec<f64> = (0..peers).map(|_| 0.25 * (1 + choices.below(8)) as f64).collect();
        let cluster = lines(&seconds, &mut choices);
        let simulation = simulate(&programs, &cluster, &options()).unwrap();
        let expected = second_opinion(&programs, &cluster, &seconds);
        prop_assert!((simulation.step_s - expected).abs() < 1e-6 * expected, "{} is not {expected}", simulation.step_s);
        prop_assert_eq!(&simulation, &simulate(&programs, &cluster, &options()).unwrap());
        for (p, load) in (0..).map(PeerId).zip(&simulation.peers) {
            let spent: f64 = simulation.spans.iter().filter(|s| s.peer == p).map(|s| s.end - s.start).sum();
            prop_assert!((load.compute_s + load.wait_s - spent).abs() < 1e-6 * expected, "a peer computes or waits");
            let left_out = programs[p.0 as usize].instructions.is_empty();
            prop_assert!(left_out || (spent - expected).abs() < 2e-3 * expected, "and does nothing else: {} of {}", spent, expected);
        }
    }
}

fn gpt2(layers: usize) -> fusionllm_graph::Graph {
    let config =
        Gpt2Config { vocab_size: 64, n_positions: 16, n_embd: 16, n_layer: layers, n_head: 2, ..Gpt2Config::default() };
    config.build(1, 16, DType::F32).unwrap()
}

/// One device sends two messages over an uplink that another uses too.
#[test]
fn an_uplink_is_shared_evenly() {
    let graph = gpt2(2);
    let plan = equal_compute(&graph, &names(2), 4, Schedule::GPipe).unwrap();
    let [programs, _] = programs(&graph, &plan);
    let slow = Link { latency: 0.0, bandwidth: 1000.0 };
    let site = |name: &str, uplink| Site { name: name.into(), inside: None, uplink, downlink: None };
    let at = |i: u32| Device { site: Some(i), ..device(format!("p{i}"), 1e-6) };
    let step = |sites: Vec<Site>, lines: Vec<DirectLink>| {
        let cluster = Cluster::new(vec![at(0), at(1)], sites, lines, Some(Place::Device(1))).unwrap();
        simulate(&programs, &cluster, &options()).unwrap()
    };
    let both = |link| {
        vec![
            DirectLink { from: Place::Site(0), to: Place::Site(1), link },
            DirectLink { from: Place::Site(1), to: Place::Site(0), link },
        ]
    };
    // For two devices alone, a slow link and a slow uplink are the same.
    let line = step(vec![site("a", None), site("b", None)], both(slow));
    let fast = Link { latency: 0.0, bandwidth: 1e12 };
    let up = step(vec![site("a", Some(slow)), site("b", Some(fast))], both(fast));
    close(line.step_s, up.step_s);
    let of_site = |l: &&LineLoad| matches!(l.line, Line::Uplink { site: 0, .. });
    let used: u64 = up.lines.iter().filter(of_site).map(|l| l.bytes).sum();
    let crossing = up.links.iter().filter(|l| (l.from, l.to) != (PeerId::BROKER, PeerId(1)));
    assert_eq!(used, crossing.map(|l| l.bytes).sum::<u64>());
}

/// Eight replicas exchange gradients and parameters over the cards of one site.
#[test]
fn devices_of_a_site_exchange_no_more_than_their_cards_carry() {
    let graph = gpt2(2);
    let mut plan = Plan { peers: names(8), ..one_peer(&graph, 8) };
    plan.stages[0].peers = (0..8).collect();
    let [programs, _] = programs(&graph, &plan);
    let link = Link { latency: 0.0, bandwidth: 1e4 };
    let site = Site { name: "hall".into(), inside: Some(link), uplink: None, downlink: None };
    let step = |network: Card| {
        let at = |i| Device { site: Some(0), network, ..device(format!("p{i}"), 1e-9) };
        let cluster = Cluster::new((0..8).map(at).collect(), vec![site.clone()], Vec::new(), None).unwrap();
        simulate(&programs, &cluster, &options()).unwrap()
    };
    let s = step(Card::default());
    let busiest = s.lines.iter().max_by(|a, b| a.busy_s.total_cmp(&b.busy_s)).unwrap();
    assert!(matches!(busiest.line, Line::Card { .. }), "{busiest:?}");
    assert!(s.lines.iter().all(|l| l.busy_s <= s.step_s * (1.0 + 1e-9)), "no line carries more than it can");
    let links = s.lines.iter().filter(|l| matches!(l.line, Line::Link { .. }));
    assert!(links.map(|l| l.busy_s).fold(0.0, f64::max) < busiest.busy_s / 2.0, "each pair has a link of its own");
    // Cards that never limit leave the links.
    let free = step(Card::new(7e4));
    assert!(free.step_s < s.step_s / 1.5, "{} is not much less than {}", free.step_s, s.step_s);
    // Devices of one host send nothing over a card.
    let at = |i| Device { site: Some(0), host: Some("box".into()), ..device(format!("p{i}"), 1e-9) };
    let cluster = Cluster::new((0..8).map(at).collect(), vec![site.clone()], Vec::new(), None).unwrap();
    let s = simulate(&programs, &cluster, &options()).unwrap();
    assert!(s.lines.is_empty(), "{:?}", s.lines);
}

/// Four replicas compute at the same time on a processor of two cores.
#[test]
fn devices_of_one_processor_divide_its_cores() {
    let graph = gpt2(2);
    let mut plan = Plan { peers: names(4), ..one_peer(&graph, 4) };
    plan.stages[0].peers = (0..4).collect();
    let [programs, _] = programs(&graph, &plan);
    let link = Link { latency: 0.0, bandwidth: 1e18 };
    let site = Site { name: "hall".into(), inside: Some(link), uplink: None, downlink: None };
    let step = |processor: &dyn Fn(u32) -> Option<Processor>| {
        let at = |i| Device { site: Some(0), processor: processor(i), ..device(format!("p{i}"), 1e-3) };
        let cluster = Cluster::new((0..4).map(at).collect(), vec![site.clone()], Vec::new(), None).unwrap();
        simulate(&programs, &cluster, &options()).unwrap()
    };
    let on = |name: &str, busy, crowded| Some(Processor { name: name.into(), cores: 2.0, busy, crowded, crowd: 4.0 });
    let apart = step(&|_| None);
    close(step(&|i| on(&format!("pc-{i}"), 1.0, 3.0)).step_s, apart.step_s);
    close(step(&|_| on("pc", 0.5, 1.0)).step_s, apart.step_s);
    // They own different parameters, so some of them have less to update, and leave their cores to the others.
    let (shared, crowded) = (step(&|_| on("pc", 1.0, 1.0)), step(&|_| on("pc", 1.0, 1.5)));
    let times = |s: &Simulation| s.step_s / apart.step_s;
    assert!((1.9..=2.0).contains(&times(&shared)) && (2.7..=3.0).contains(&times(&crowded)), "{}", times(&shared));
    let computing = |s: &Simulation| s.peers.iter().map(|p| p.compute_s).sum::<f64>();
    assert!((1.9..=2.0).contains(&(computing(&shared) / computing(&apart))));
    let spans = shared.spans.iter().filter(|s| s.activity.computes()).map(|s| s.end - s.start).sum();
    close(computing(&shared), spans);
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-6 * a, "{a} is not {b}");
}

/// A peer alone never waits, and holds at least its state.
#[test]
fn a_peer_alone_computes_all_the_time() {
    let graph = gpt2(1);
    let plan = one_peer(&graph, 3);
    let [programs, _] = programs(&graph, &plan);
    let cluster = Cluster::new(vec![device("p0".into(), 0.5)], Vec::new(), Vec::new(), None).unwrap();
    let s = simulate(&programs, &cluster, &options()).unwrap();
    assert_eq!(s.links.iter().map(|l| l.busy_s).sum::<f64>(), 0.0, "its inputs come from its own machine");
    assert!((s.step_s - s.peers[0].compute_s).abs() < 1e-9, "and it never waits");
    assert!(s.spans.iter().all(|s| !matches!(s.activity, Activity::Wait)));
    let state: usize = programs[0].holdings.iter().map(|h| programs[0].values[&h.value].ty.bytes()).sum();
    let trained: usize = programs[0].owned().map(|(parameter, _)| programs[0].values[&parameter].ty.bytes()).sum();
    let least = (state + 3 * trained) as u64;
    assert!(s.peers[0].peak_bytes > least, "parameters, two moments and gradients at the least");
}

#[test]
fn traffic_takes_processor_time_from_computing() {
    let graph = gpt2(2);
    let plan = equal_compute(&graph, &names(2), 4, Schedule::OneFOneB).unwrap();
    let [programs, _] = programs(&graph, &plan);
    let computing = |a_byte: Option<f64>| {
        let traffic = a_byte.map(|s| Curve::new(vec![(1.0, s), (1e6, 1e6 * s)]).unwrap());
        let at = |i: u32| Device {
            site: Some(0),
            slowdown: 3.0,
            measured: Measured { traffic: traffic.clone(), ..Measured::default() },
            ..device(format!("p{i}"), 1e-6)
        };
        let site = Site {
            name: "s".into(),
            inside: Some(Link { latency: 0.0, bandwidth: 1e9 }),
            uplink: None,
            downlink: None,
        };
        let cluster = Cluster::new(vec![at(0), at(1)], vec![site], Vec::new(), None).unwrap();
        simulate(&programs, &cluster, &options()).unwrap()
    };
    let (free, costly) = (computing(None), computing(Some(2e-9)));
    for (i, (without, with)) in free.peers.iter().zip(&costly.peers).enumerate() {
        let here = PeerId(i as u32);
        let touched = costly.links.iter().filter(|l| l.from == here || l.to == here);
        let bytes: f64 = touched.map(|l| message_bytes(l.bytes) + f64::from(l.messages - 1) * message_bytes(0)).sum();
        assert!(bytes > 4096.0);
        close(with.compute_s - without.compute_s, 2e-9 * bytes);
    }
}

#[test]
fn a_plan_without_a_link_is_refused() {
    let graph = gpt2(1);
    let plan = equal_compute(&graph, &names(2), 1, Schedule::GPipe).unwrap();
    let [programs, _] = programs(&graph, &plan);
    let devices = vec![device("p0".into(), 0.5), device("p1".into(), 0.5)];
    let cluster = Cluster::new(devices, Vec::new(), Vec::new(), None).unwrap();
    let e = simulate(&programs, &cluster, &options()).unwrap_err().to_string();
    assert_eq!(e, "cluster: no link leads from p1 to p0");
    let cluster = cluster.select(&[PeerId(0)]).unwrap();
    assert_eq!(simulate(&programs, &cluster, &options()).unwrap_err().to_string(), "cluster: 1 devices for 2 peers");
}

/// Simulates 1000 peers, about the size of the published system.
#[test]
fn a_thousand_peers_step() {
    let graph = gpt2(80);
    let plan = equal_compute(&graph, &names(1000), 64, Schedule::OneFOneB).unwrap();
    let programs = fusionllm_plan::compile(&plan, &graph, &train_graph(&graph)).unwrap();
    let site =
        Site { name: "s".into(), inside: Some(Link { latency: 1e-3, bandwidth: 1e6 }), uplink: None, downlink: None };
    let devices = (0..1000).map(|i| Device { site: Some(0), ..device(format!("p{i}"), 1e-3) }).collect();
    let cluster = Cluster::new(devices, vec![site], Vec::new(), None).unwrap();
    let s = simulate(&programs, &cluster, &SimulateOptions { record: false, ..options() }).unwrap();
    assert_eq!(s.peers.len(), 1000);
    assert!(s.step_s > s.peers.iter().map(|p| p.compute_s).fold(0.0, f64::max));
}
