//! Codecs follow the links, and get less lossy where they do harm.
#![allow(clippy::unwrap_used)]

use fusionllm_graph::ops::SgdStep;
use fusionllm_graph::{DType, autodiff};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Cluster, Compression, Compressor, Device, Link, Plan, Rates, Schedule, Site, compile, equal_compute,
};
use fusionllm_program::{Optimizer, PeerId, Program};
use fusionllm_protocol::{CodecError, CodecUpdate, PassReport, ReceivedBytes, Regulator, StepRecord};

const SGD: Optimizer = Optimizer::Sgd(SgdStep { momentum: 0.9, weight_decay: 0.0, nesterov: false });

/// Bytes per second of each site's uplink.
const UPLINK: f64 = 8e6;

/// A run over two peers at each of two sites.
struct Run {
    plan: Plan,
    regulator: Regulator,
    step: u64,
    /// The changes, each with its step.
    lines: Vec<String>,
}

/// The measurements of a step.
#[derive(Clone, Copy)]
struct Measured {
    /// Measured rate of the uplinks over the planned rate.
    factor: f64,
    /// Relative error from peer 1 to peer 2.
    error: f64,
    loss: f64,
    applied: bool,
}

const GOOD: Measured = Measured { factor: 1.0, error: 0.1, loss: 2.0, applied: true };

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
        let site = |name: &str| Site { name: name.into(), inside, uplink, downlink: None };
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

    /// Runs steps with the same measurements.
    fn go(&mut self, steps: u64, measured: Measured) {
        for _ in 0..steps {
            self.step += 1;
            let bytes = 100_000;
            let mut peers = vec![PassReport::default(); 4];
            peers[1].errors = vec![CodecError { to: PeerId(2), relative_error: measured.error }];
            let seconds = bytes as f64 / UPLINK / measured.factor;
            peers[2].received = vec![ReceivedBytes { from: PeerId(1), bytes, seconds }];
            peers[1].received = vec![ReceivedBytes { from: PeerId(2), bytes, seconds }];
            let (loss, applied) = (measured.loss, measured.applied);
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
                // Passes of the previous version are still in flight. They are ignored.
                record.applied = false;
                assert_eq!(self.regulator.step(&record).unwrap(), None);
                self.plan.codecs = codecs;
                self.plan.version += 1;
            }
        }
    }
}

/// The ladder of this rule does not depend on measured losses, as that of `auto` does.
fn by_need() -> Compression {
    Compression { compressor: Compressor::AdaTopK, ratio: 7.0, guard: true, ..Compression::default() }
}

#[test]
fn codecs_follow_the_links() {
    let mut run = Run::new(by_need());
    let first = run.plan.codecs.clone();
    run.go(30, GOOD);
    run.go(30, Measured { factor: 0.5, ..GOOD });
    let slow = run.plan.codecs.clone();
    assert_ne!(slow, first);
    run.go(30, GOOD);
    assert_eq!(run.plan.codecs, first, "as at first");
    insta::assert_snapshot!(run.lines.join("\n"), @r"
    35: a0 -> a1: none -> bf16: the rates of other links changed
    35: a1 -> a0: none -> int8: the rates of other links changed
    35: a1 -> b0: topk 5x -> topk 5.5x: its rate fell from 64 Mbps to 32 Mbps
    35: b0 -> b1: none -> int8: the rates of other links changed
    35: b1 -> b0: none -> topk 5x: the rates of other links changed
    64: a0 -> a1: bf16 -> none: the rates of other links changed
    64: a1 -> a0: int8 -> none: the rates of other links changed
    64: a1 -> b0: topk 5.5x -> topk 5x: its rate rose from 32 Mbps to 64 Mbps
    64: b0 -> b1: int8 -> none: the rates of other links changed
    64: b1 -> b0: topk 5x -> none: the rates of other links changed
    ");
    run.go(200, Measured { factor: 1.2, ..GOOD });
    assert_eq!(run.lines.len(), 10, "a change by a fifth is too small");
}

#[test]
fn unchanged_codecs_are_not_sent_again() {
    let at = |compressor| {
        let mut run = Run::new(Compression { compressor, ratio: 30.0, ..Compression::default() });
        let first = run.plan.codecs.clone();
        run.go(20, GOOD);
        // Both directions slowed down equally, so the published rule chooses the same codecs.
        run.go(20, Measured { factor: 0.1, ..GOOD });
        (first != run.plan.codecs, run.lines.len())
    };
    assert_eq!(at(Compressor::AdaTopKPublished), (false, 0));
    assert!(at(Compressor::AdaTopK).0, "a slower link needs more");
    assert_eq!(at(Compressor::Int8), (false, 0));
}

#[test]
fn a_harmful_codec_is_replaced_and_stays_forbidden_for_a_while() {
    let mut run = Run::new(by_need());
    run.go(16, Measured { factor: 0.5, ..GOOD });
    run.go(1, Measured { error: 0.9, factor: 0.5, ..GOOD });
    run.go(20, Measured { factor: 0.5, ..GOOD });
    assert_eq!(run.lines, [""; 0], "a single large error is ignored");
    run.go(3, Measured { error: 0.9, factor: 0.5, ..GOOD });
    run.go(20, Measured { factor: 0.5, ..GOOD });
    // The slower link needs a stronger codec, which is still forbidden.
    run.go(100, Measured { factor: 0.25, ..GOOD });
    run.go(100, Measured { factor: 0.5, ..GOOD });
    run.go(30, Measured { factor: 0.25, ..GOOD });
    insta::assert_snapshot!(run.lines.join("\n"), @r"
    40: a1 -> b0: topk 5x -> int8: the relative error of its tensors is 90 %
    65: a0 -> a1: none -> bf16: the rates of other links changed
    65: a1 -> a0: none -> int8: the rates of other links changed
    65: b0 -> b1: none -> int8: the rates of other links changed
    65: b1 -> b0: none -> topk 5x: the rates of other links changed
    164: a0 -> a1: bf16 -> none: the rates of other links changed
    164: a1 -> a0: int8 -> none: the rates of other links changed
    164: b0 -> b1: int8 -> none: the rates of other links changed
    164: b1 -> b0: topk 5x -> none: the rates of other links changed
    265: a0 -> a1: none -> bf16: the rates of other links changed
    265: a1 -> a0: none -> int8: the rates of other links changed
    265: a1 -> b0: int8 -> topk 5.5x: its rate fell from 32 Mbps to 16 Mbps
    265: b0 -> b1: none -> int8: the rates of other links changed
    265: b1 -> b0: none -> topk 5x: the rates of other links changed
    ");
}

#[test]
fn a_rising_loss_replaces_every_codec() {
    let mut run = Run::new(Compression { compressor: Compressor::Int4, guard: true, ..Compression::default() });
    for i in 0..60 {
        // The loss falls, with noise.
        run.go(1, Measured { loss: 3.0 - 0.01 * f64::from(i) + 0.2 * f64::from(i % 3), ..GOOD });
    }
    run.go(16, Measured { loss: 2.8, ..GOOD });
    assert_eq!(run.lines, [""; 0], "the rise is too short");
    run.go(24, Measured { loss: 3.4, ..GOOD });
    run.go(40, GOOD);
    run.go(1, Measured { applied: false, loss: f64::NAN, ..GOOD });
    insta::assert_snapshot!(run.lines.join("\n"), @r"
    91: a0 -> a1: int4 -> int8: the loss rose from 2.710 to 3.400
    91: a1 -> a0: int4 -> int8: the loss rose from 2.710 to 3.400
    91: a1 -> b0: int4 -> int8: the loss rose from 2.710 to 3.400
    91: b0 -> a1: int4 -> int8: the loss rose from 2.710 to 3.400
    91: b0 -> b1: int4 -> int8: the loss rose from 2.710 to 3.400
    91: b1 -> b0: int4 -> int8: the loss rose from 2.710 to 3.400
    141: a0 -> a1: int8 -> bf16: the loss or gradient was not finite
    141: a1 -> a0: int8 -> bf16: the loss or gradient was not finite
    141: a1 -> b0: int8 -> bf16: the loss or gradient was not finite
    141: b0 -> a1: int8 -> bf16: the loss or gradient was not finite
    141: b0 -> b1: int8 -> bf16: the loss or gradient was not finite
    141: b1 -> b0: int8 -> bf16: the loss or gradient was not finite
    ");
}

#[test]
fn a_codec_that_the_user_chose_only_gets_a_warning() {
    let mut run = Run::new(Compression { compressor: Compressor::TopK, ratio: 100.0, ..Compression::default() });
    let first = run.plan.clone();
    run.go(20, Measured { error: 0.95, ..GOOD });
    run.go(5, Measured { applied: false, ..GOOD });
    assert_eq!(run.plan, first);
    insta::assert_snapshot!(run.lines.join("\n"), @"3: a1 -> b0: topk 100x -> topk 100x: the relative error of its tensors is 95 %");
}
