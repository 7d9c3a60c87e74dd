//! Times operators inside a Program that the executor runs, as a peer does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use cpu_time::ProcessTime;
use fusionllm_backend::Backend;
use fusionllm_exec::{Communicator, EncodeOptions, ExecError, Executor};
use fusionllm_graph::ops::SgdStep;
use fusionllm_graph::{DType, Graph, HostTensor, NodeId, Phase, ValueId, ValueKind};
use fusionllm_plan::{Holding, Instruction, Optimizer, PeerId, Program, Slot, Verdict};

use super::{Effort, MAX_REPEATS, mean, noise};
use crate::NodeError;
use crate::machine::memory;

/// Runs the `chosen` nodes repeatedly: forward for all micro-batches, then backward. Values that other nodes would
/// make are invented. Returns the typical time of each node.
pub(super) fn run(
    backend: &Arc<dyn Backend>,
    graph: &Graph,
    chosen: &[bool],
    micro_batches: usize,
    effort: Effort,
    slowdown: f64,
) -> Result<Vec<(NodeId, Took)>, NodeError> {
    let program = program(graph, chosen, micro_batches as u32);
    // Nothing is drawn and no parameter is updated, so seed and rule have no effect.
    let sgd = Optimizer::Sgd(SgdStep { momentum: 0.0, weight_decay: 0.0, nesterov: false });
    let mut executor = Executor::new(backend.clone(), sgd, 1);
    for held in &program.holdings {
        executor.load(&graph.value(held.value).name, &content(graph, held.value)?)?;
    }
    executor.prepare(&program)?;
    let alone = backend.device().threads == Some(1);
    let mut bench = Bench::new(&program, backend.as_ref(), alone);
    let started = Instant::now();
    for repeat in 0..effort.warm_up + MAX_REPEATS {
        if repeat == effort.warm_up {
            bench.passes.clear();
            executor.set_slowdown(slowdown);
        }
        bench.begin();
        executor.run(&program, 0, 0, &mut bench)?;
        if repeat + 1 >= effort.warm_up + effort.repeats && started.elapsed() > effort.patience {
            break;
        }
    }
    Ok(bench.took())
}

/// The program of a peer with the `chosen` nodes, if all their other inputs were constants.
fn program(graph: &Graph, chosen: &[bool], micro_batches: u32) -> Program {
    let nodes: Vec<NodeId> = graph.node_ids().filter(|n| chosen[n.index()]).collect();
    let mut uses = vec![0usize; graph.values.len()];
    let (mut values, mut holdings) = (BTreeMap::new(), Vec::new());
    for n in &nodes {
        let node = graph.node(*n);
        for v in &node.inputs {
            uses[v.index()] += 1;
        }
        values.extend(node.inputs.iter().chain(&node.outputs).map(|v| (*v, graph.value(*v).clone())));
    }
    for (v, value) in &mut values {
        let made = graph.producer(*v).is_some_and(|n| chosen[n.index()]);
        if !made && value.kind != ValueKind::RngKey {
            value.kind = ValueKind::Constant;
            holdings.push(Holding { value: *v, owner: false });
        }
    }
    let mut instructions = Vec::new();
    let mut left = vec![uses; micro_batches as usize];
    let (forward, backward) = nodes.split_at(nodes.partition_point(|n| graph.node(*n).phase == Phase::Forward));
    for half in [forward, backward] {
        for (micro_batch, left) in (0..).zip(&mut left) {
            for n in half {
                instructions.push(Instruction::Run { node: *n, micro_batch });
                let node = graph.node(*n);
                for v in &node.inputs {
                    left[v.index()] -= 1;
                }
                let touched: BTreeSet<ValueId> = node.inputs.iter().chain(&node.outputs).copied().collect();
                let done = touched.into_iter().filter(|v| left[v.index()] == 0);
                let done = done.filter(|v| matches!(values[v].kind, ValueKind::Result { .. }));
                instructions.extend(done.map(|value| Instruction::Free { value, micro_batch }));
            }
        }
    }
    Program {
        peer: PeerId(0),
        version: 0,
        micro_batches,
        nodes: nodes.iter().map(|n| (*n, graph.node(*n).clone())).collect(),
        values,
        holdings,
        reductions: Vec::new(),
        reports: Vec::new(),
        instructions,
        coded: BTreeSet::new(),
        masks: BTreeMap::new(),
        codecs: BTreeMap::new(),
    }
}

/// Times the instructions of a program without peers.
struct Bench<'a> {
    program: &'a Program,
    backend: &'a dyn Backend,
    alone: bool,
    /// Seconds of each instruction, pass by pass.
    passes: Vec<Vec<f64>>,
    /// For each instruction, the most bytes held beside operands and results.
    scratch: Vec<u64>,
    /// Runs since the last instruction.
    watch: Stopwatch,
    held: u64,
}

impl<'a> Bench<'a> {
    fn new(program: &'a Program, backend: &'a dyn Backend, alone: bool) -> Self {
        let scratch = vec![0; program.instructions.len()];
        Self { program, backend, alone, passes: Vec::new(), scratch, watch: Stopwatch::start(alone), held: 0 }
    }

    /// Starts a pass.
    fn begin(&mut self) {
        self.passes.push(Vec::with_capacity(self.program.instructions.len()));
        self.restart();
    }

    fn restart(&mut self) {
        memory::take_peak();
        (self.watch, self.held) = (Stopwatch::start(self.alone), memory::live_bytes());
    }

    /// The mean time of each node over the middle half of all passes. The slowest and fastest passes include
    /// allocations from the system or another process's use of the caches. Predictions are sums, so the mean is the
    /// right average within a pass.
    fn took(self) -> Vec<(NodeId, Took)> {
        let total = |pass: &Vec<f64>| pass.iter().sum::<f64>();
        let mut passes = self.passes;
        passes.sort_by(|a, b| total(a).total_cmp(&total(b)));
        let passes = middle(&passes);
        let mut nodes: BTreeMap<NodeId, (usize, Took)> = BTreeMap::new();
        let mut ran = None;
        for (at, (instruction, scratch)) in self.program.instructions.iter().zip(self.scratch).enumerate() {
            if let Instruction::Run { node, .. } = *instruction {
                let (times, took) = nodes.entry(node).or_insert((0, Took { seconds: 0.0, scratch: 0 }));
                *times += passes.len();
                took.scratch = took.scratch.max(scratch);
                ran = Some(node);
            }
            // The time to free tensors belongs to the operator that needed them last.
            if let Some((_, took)) = ran.and_then(|n| nodes.get_mut(&n)) {
                took.seconds += passes.iter().map(|p| p[at]).sum::<f64>();
            }
        }
        let mean = |(times, took): (usize, Took)| Took { seconds: took.seconds / times as f64, ..took };
        nodes.into_iter().map(|(n, of)| (n, mean(of))).collect()
    }
}

/// The middle half of a slice, at least one element.
pub(super) fn middle<T>(sorted: &[T]) -> &[T] {
    let end = sorted.len().div_ceil(4).min(sorted.len().saturating_sub(1) / 2);
    &sorted[end..sorted.len() - end]
}

const NO_PEERS: &str = "a program that is measured has no peers";

impl Communicator for Bench<'_> {
    fn receive(&mut self, _pass: u64, _slot: Slot, _from: PeerId) -> Result<HostTensor, ExecError> {
        Err(ExecError::Communication(NO_PEERS.into()))
    }

    fn send(&mut self, _: u64, _: Slot, _: PeerId, _: HostTensor, _: EncodeOptions) -> Result<(), ExecError> {
        Err(ExecError::Communication(NO_PEERS.into()))
    }

    fn report(&mut self, _pass: u64, _report: u32, _micro_batch: u32, _value: f64) -> Result<(), ExecError> {
        Err(ExecError::Communication(NO_PEERS.into()))
    }

    fn verdict(&mut self, _pass: u64, _squared_norms: Vec<(ValueId, f64)>) -> Result<Verdict, ExecError> {
        Err(ExecError::Communication(NO_PEERS.into()))
    }

    fn instruction_done(&mut self, at: usize) -> Result<(), ExecError> {
        self.backend.synchronize()?;
        let (seconds, peak) = (self.watch.seconds(), memory::take_peak());
        if let Instruction::Run { node, .. } = self.program.instructions[at] {
            let made = self.program.nodes[&node].outputs.iter().map(|v| self.program.values[v].ty.bytes() as u64);
            self.scratch[at] = self.scratch[at].max(peak.saturating_sub(self.held + made.sum::<u64>()));
        }
        self.passes.last_mut().into_iter().for_each(|pass| pass.push(seconds));
        self.restart();
        Ok(())
    }
}

/// Measures computing time. With one thread it counts processor time, which other processes do not lengthen.
pub(super) struct Stopwatch {
    started: Instant,
    processor: Option<ProcessTime>,
}

impl Stopwatch {
    pub(super) fn start(alone: bool) -> Self {
        Self { started: Instant::now(), processor: alone.then(|| ProcessTime::try_now().ok()).flatten() }
    }

    pub(super) fn seconds(&self) -> f64 {
        let processor = self.processor.and_then(|p| p.try_elapsed().ok());
        processor.unwrap_or_else(|| self.started.elapsed()).as_secs_f64()
    }
}

/// The cost of one operator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Took {
    pub(super) seconds: f64,
    /// The most bytes held at once beside operands and results, if the allocator counts.
    pub(super) scratch: u64,
}

/// The mean of the middle half of the times, and the most scratch memory.
pub(super) fn typical(took: &[Took]) -> Took {
    let mut seconds: Vec<f64> = took.iter().map(|t| t.seconds).collect();
    seconds.sort_by(f64::total_cmp);
    Took { seconds: mean(middle(&seconds)), scratch: took.iter().map(|t| t.scratch).max().unwrap_or(0) }
}

/// Invented content: small classes and tokens, positive statistics, and small numbers.
fn content(graph: &Graph, v: ValueId) -> Result<HostTensor, NodeError> {
    let value = graph.value(v);
    let count = value.ty.numel();
    Ok(match (&value.kind, value.ty.dtype) {
        (ValueKind::Constant, _) => match graph.constants.get(&value.name) {
            Some(tensor) => tensor.clone(),
            None => HostTensor::zeros(value.ty.clone()),
        },
        (_, DType::I64) => {
            let numbers: Vec<i64> = (0..count as i64).map(|i| (i * 7) % 10).collect();
            HostTensor::from_i64(value.ty.shape.clone(), &numbers)?
        }
        (ValueKind::Buffer(_), _) => {
            let ones = vec![1.0f32; count];
            HostTensor::from_f32(value.ty.shape.clone(), &ones)?
        }
        (_, DType::F32) => noise(&value.ty, 0.05)?,
        _ => HostTensor::zeros(value.ty.clone()),
    })
}
