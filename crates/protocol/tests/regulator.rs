//! Codecs that follow links, and give way where they do harm.
#![allow(clippy::unwrap_used)]

use fusionllm_graph::models::Gpt2Config;
use fusionllm_graph::ops::SgdStep;
use fusionllm_graph::{DType, autodiff};
use fusionllm_plan::{
    Cluster, Compression, Compressor, Device, Link, Optimizer, PeerId, Plan, Program, Rates, Schedule, Site, compile,
    equal_compute,
};
use fusionllm_protocol::{CodecUpdate, PassReport, Regulator, StepRecord};

const SGD: Optimizer = Optimizer::Sgd(SgdStep { momentum: 0.9, weight_decay: 0.0, nesterov: false });

/// Bytes/s of each site's uplink.
const UPLINK: f64 = 8e6;

/// A run over two peers at each of two sites, and where it stands.
struct Run {
    plan: Plan,
    regulator: Regulator,
    step: u64,
    /// What was said, with the step it was said at.
    lines: Vec<String>,
}

/// What a step told.
#[derive(Clone, Copy)]
struct Told {
    /// How many times as fast as planned the uplinks are.
    factor: f64,
    /// From peer 1 to peer 2.
    error: f64,
    loss: f64,
    applied: bool,
}

const WELL: Told = Told { factor: 1.0, error: 0.1, loss: 2.0, applied: true };

impl Run {
    fn new(compression: Compression) -> Self {
        let config =
            Gpt2Config { vocab_size: 256, n_positions: 64, n_embd: 64, n_layer: 4, n_head: 4, ..Gpt2Config::default() };
        let graph = config.build(2, 64, DType::F32).unwrap();
        let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
        let rates = Rates { matmul: 5e8, convolution: 5e8, memory: 5e8, overhead: 1e-6 };
        let at = |name: &str, site| Device { site: Some(site), ..Device::new(name, rates, 1 << 30) };
        let inside = Some(Link { latency: 2e-4, bandwidth: 5e8 });
        let uplink = Some(Link { latency: 0.005, bandwidth: UPLINK });
        let site = |name: &str| Site { name: name.into(), inside, uplink };
        let devices = vec![at("a0", 0), at("a1", 0), at("b0", 1), at("b1", 1)];
        let cluster = Cluster::new(devices, vec![site("a"), site("b")], Vec::new(), None).unwrap();
        let names = ["a0", "a1", "b0", "b1"].map(String::from);
        let mut plan = equal_compute(&graph, &names, 4, Schedule::OneFOneB).unwrap();
        let programs: Vec<Program> = compile(&plan, &graph, &train).unwrap();
        plan.codecs = compression.choose(&programs, Some(&cluster), SGD).unwrap();
        plan.compression = compression;
        let regulator = Regulator::new(&plan, programs, Some(cluster), SGD);
        Self { plan, regulator, step: 0, lines: Vec::new() }
    }

    /// So many steps that tell the same, but for what the links' codecs change.
    fn go(&mut self, steps: u64, told: Told) {
        for _ in 0..steps {
            self.step += 1;
            let bytes = 100_000;
            let mut peers = vec![PassReport::default(); 4];
            peers[1].errors = vec![(PeerId(2), told.error)];
            peers[2].received = vec![(PeerId(1), bytes, bytes as f64 / UPLINK / told.factor)];
            peers[1].received = vec![(PeerId(2), bytes, bytes as f64 / UPLINK / told.factor)];
            let (loss, applied) = (told.loss, told.applied);
            let mut record = StepRecord {
                step: self.step,
                version: self.plan.version,
                loss,
                applied,
                peers,
                ..StepRecord::default()
            };
            if let Some(CodecUpdate { codecs, changes }) = self.regulator.step(&record).unwrap() {
                self.lines.extend(changes.iter().map(|c| {
                    let (from, to) = (&self.plan.peers[c.from.0 as usize], &self.plan.peers[c.to.0 as usize]);
                    format!("{}: {from} -> {to}: {} -> {}: {}", self.step, c.before, c.now, c.reason)
                }));
                if self.plan.codecs == codecs {
                    continue;
                }
                // Passes by the version before are still under way, and tell nothing.
                record.applied = false;
                assert_eq!(self.regulator.step(&record).unwrap(), None);
                self.plan.codecs = codecs;
                self.plan.version += 1;
            }
        }
    }
}

fn auto() -> Compression {
    Compression { name: Compressor::Auto, ratio: 30.0, guard: true, ..Compression::default() }
}

#[test]
fn codecs_follow_the_links() {
    let mut run = Run::new(auto());
    let first = run.plan.codecs.clone();
    run.go(30, WELL);
    run.go(30, Told { factor: 0.5, ..WELL });
    let slow = run.plan.codecs.clone();
    assert_ne!(slow, first);
    run.go(30, WELL);
    assert_eq!(run.plan.codecs, first, "as it was");
    insta::assert_snapshot!(run.lines.join("\n"), @r"
    35: a1 -> b0: int8 -> int4-hadamard: its rate fell from 64.0 to 32.0 Mbps
    64: a1 -> b0: int4-hadamard -> int8: its rate rose from 32.0 to 64.0 Mbps
    ");
    run.go(200, Told { factor: 1.2, ..WELL });
    assert_eq!(run.lines.len(), 2, "a fifth is no reason");
}

#[test]
fn what_is_the_same_again_is_not_sent() {
    let at = |name| {
        let mut run = Run::new(Compression { name, ratio: 30.0, ..Compression::default() });
        let first = run.plan.codecs.clone();
        run.go(20, WELL);
        // The two ways are to each other as before, so AdaTopK gives them the same again.
        run.go(20, Told { factor: 0.1, ..WELL });
        (first != run.plan.codecs, run.lines.len())
    };
    assert_eq!(at(Compressor::AdaTopK), (false, 0));
    assert_eq!(at(Compressor::Int8), (false, 0));
}

#[test]
fn a_codec_that_does_harm_gives_way_and_stays_away() {
    let mut run = Run::new(auto());
    run.go(16, Told { factor: 0.5, ..WELL });
    run.go(1, Told { error: 0.9, factor: 0.5, ..WELL });
    run.go(20, Told { factor: 0.5, ..WELL });
    assert_eq!(run.lines, [""; 0], "once is no reason");
    run.go(3, Told { error: 0.9, factor: 0.5, ..WELL });
    run.go(20, Told { factor: 0.5, ..WELL });
    // What the link calls for is stronger, but it does not get that at once.
    run.go(100, Told { factor: 0.25, ..WELL });
    run.go(100, Told { factor: 0.5, ..WELL });
    run.go(30, Told { factor: 0.25, ..WELL });
    insta::assert_snapshot!(run.lines.join("\n"), @r"
    40: a1 -> b0: int8 -> bf16: what arrives is off by 90 % of its norm
    265: a1 -> b0: bf16 -> int4-hadamard: its rate fell from 32.0 to 16.0 Mbps
    ");
}

#[test]
fn a_loss_that_rises_is_every_codec_s_fault() {
    let mut run = Run::new(Compression { name: Compressor::Int4, guard: true, ..Compression::default() });
    for i in 0..60 {
        // It falls, and no two batches are alike.
        run.go(1, Told { loss: 3.0 - 0.01 * f64::from(i) + 0.2 * f64::from(i % 3), ..WELL });
    }
    run.go(16, Told { loss: 2.8, ..WELL });
    assert_eq!(run.lines, [""; 0], "three are not lasting");
    run.go(24, Told { loss: 3.4, ..WELL });
    run.go(40, WELL);
    run.go(1, Told { applied: false, loss: f64::NAN, ..WELL });
    insta::assert_snapshot!(run.lines.join("\n"), @r"
    91: a0 -> a1: int4 -> int8: the loss rose from 2.710 to 3.400
    91: a1 -> a0: int4 -> int8: the loss rose from 2.710 to 3.400
    91: a1 -> b0: int4 -> int8: the loss rose from 2.710 to 3.400
    91: b0 -> a1: int4 -> int8: the loss rose from 2.710 to 3.400
    91: b0 -> b1: int4 -> int8: the loss rose from 2.710 to 3.400
    91: b1 -> b0: int4 -> int8: the loss rose from 2.710 to 3.400
    141: a0 -> a1: int8 -> bf16: loss or gradient was not finite
    141: a1 -> a0: int8 -> bf16: loss or gradient was not finite
    141: a1 -> b0: int8 -> bf16: loss or gradient was not finite
    141: b0 -> a1: int8 -> bf16: loss or gradient was not finite
    141: b0 -> b1: int8 -> bf16: loss or gradient was not finite
    141: b1 -> b0: int8 -> bf16: loss or gradient was not finite
    ");
}

#[test]
fn who_named_a_codec_is_warned() {
    let mut run = Run::new(Compression { name: Compressor::TopK, ratio: 100.0, ..Compression::default() });
    let first = run.plan.clone();
    run.go(20, Told { error: 0.95, ..WELL });
    run.go(5, Told { applied: false, ..WELL });
    assert_eq!(run.plan, first);
    insta::assert_snapshot!(run.lines.join("\n"), @"3: a1 -> b0: topk 100x -> topk 100x: what arrives is off by 95 % of its norm");
}
