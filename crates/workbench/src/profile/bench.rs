//! Times operators inside a Program that the executor runs, as a peer does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use cpu_time::ProcessTime;
use fusionllm_backend::Backend;
use fusionllm_exec::{Communicator, EncodeOptions, ExecError, Executor, Script};
use fusionllm_graph::ops::SgdStep;
use fusionllm_graph::{DType, HostTensor, NodeId, Value, ValueId};
use fusionllm_program::{Address, Instruction, Optimizer, PeerId, Program, Verdict};

use super::sample::with_fewer;
use super::{Effort, MAX_REPEATS, mean, noise};
use crate::WorkbenchError;
use crate::machine::memory;

/// Runs a Program without peers repeatedly. The tensors that it holds are invented, except for these constants. Returns
/// the typical time of each node.
///
/// # Errors
///
/// The Program is not valid, or the backend fails.
pub(super) fn run(
    backend: &Arc<dyn Backend>,
    program: &Program,
    constants: &BTreeMap<String, HostTensor>,
    effort: Effort,
    slowdown: f64,
) -> Result<Vec<(NodeId, Took)>, WorkbenchError> {
    program.validate()?;
    // Nothing is drawn and no parameter is updated, so seed and rule have no effect.
    let sgd = Optimizer::Sgd(SgdStep { momentum: 0.0, weight_decay: 0.0, nesterov: false });
    let mut executor = Executor::new(backend.clone(), sgd, 1);
    for value in program.holdings.iter().map(|held| &program.values[&held.value]) {
        executor.load(&value.name, &content(value, constants)?)?;
    }
    if !backend.runs_segments_whole() {
        let script = executor.prepare(program)?;
        return Ok(time(&mut executor, program, &script, effort, slowdown)?.took());
    }
    // Operators take less time in a segment than alone. So each operator gets its share of the segments' time.
    let program = &with_results(program);
    let each = executor.prepare_each(program)?;
    let whole = executor.prepare(program)?;
    let each = time(&mut executor, program, &each, effort, slowdown)?;
    let ratio = time(&mut executor, program, &whole, effort, slowdown)?.total() / each.total().max(1e-9);
    let share = |(node, took): (NodeId, Took)| (node, Took { seconds: took.seconds * ratio, ..took });
    Ok(each.took().into_iter().map(share).collect())
}

/// The first micro-batch of a Program. Values that nothing reads are freed after everything else. Such results leave
/// their segment, so a compiler cannot leave out the operators that make them. In a step they end in gradients.
fn with_results(program: &Program) -> Program {
    let read: BTreeSet<ValueId> = program.nodes.values().flat_map(|node| node.inputs.iter().copied()).collect();
    let first = with_fewer(program, 1);
    let (mut instructions, results): (Vec<Instruction>, Vec<Instruction>) =
        first.instructions.iter().partition(|instruction| match instruction {
            Instruction::Free { value, .. } => read.contains(value),
            _ => true,
        });
    // No segment goes beyond this instruction.
    instructions.push(Instruction::Clip);
    instructions.extend(results);
    Program { instructions, ..first }
}

/// Runs a program repeatedly.
fn time<'a>(
    executor: &mut Executor,
    program: &'a Program,
    script: &Script,
    effort: Effort,
    slowdown: f64,
) -> Result<Bench<'a>, WorkbenchError> {
    let backend = executor.backend().clone();
    let mut bench = Bench::new(program, backend);
    executor.set_slowdown(1.0);
    let started = Instant::now();
    for repeat in 0..effort.warm_up + MAX_REPEATS {
        if repeat == effort.warm_up {
            bench.passes.clear();
            executor.set_slowdown(slowdown);
        }
        bench.begin();
        executor.run(program, script, 0, 0, &mut bench)?;
        if repeat + 1 >= effort.warm_up + effort.repeats && started.elapsed() > effort.patience {
            break;
        }
    }
    Ok(bench)
}

/// Times the instructions of a program without peers.
struct Bench<'a> {
    program: &'a Program,
    backend: Arc<dyn Backend>,
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
    fn new(program: &'a Program, backend: Arc<dyn Backend>) -> Self {
        let alone = backend.device().threads == Some(1);
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

    /// The mean time of a pass over the middle half of all passes.
    fn total(&self) -> f64 {
        let mut passes: Vec<f64> = self.passes.iter().map(|pass| pass.iter().sum()).collect();
        passes.sort_by(f64::total_cmp);
        mean(middle(&passes))
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
    fn receive(&mut self, _pass: u64, _tensor: Address, _from: PeerId) -> Result<HostTensor, ExecError> {
        Err(ExecError::Communication(NO_PEERS.into()))
    }

    fn send(&mut self, _: u64, _: Address, _: PeerId, _: HostTensor, _: EncodeOptions) -> Result<(), ExecError> {
        Err(ExecError::Communication(NO_PEERS.into()))
    }

    fn report(&mut self, _pass: u64, _report: u32, _micro_batch: u32, _value: f64) -> Result<(), ExecError> {
        Err(ExecError::Communication(NO_PEERS.into()))
    }

    fn verdict(&mut self, _pass: u64, _squared_norms: Vec<(ValueId, f64)>) -> Result<Verdict, ExecError> {
        Ok(Verdict { apply: false, update: 0, lr: 0.0, factor: 1.0 })
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
#[derive(Debug)]
pub struct Stopwatch {
    started: Instant,
    processor: Option<ProcessTime>,
}

impl Stopwatch {
    /// Starts now. The process computes with one thread if `alone`.
    pub fn start(alone: bool) -> Self {
        Self { started: Instant::now(), processor: alone.then(|| ProcessTime::try_now().ok()).flatten() }
    }

    /// Seconds since the start.
    pub fn seconds(&self) -> f64 {
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

/// The content of a constant, or else an invented one: small classes and tokens, and small numbers.
fn content(value: &Value, constants: &BTreeMap<String, HostTensor>) -> Result<HostTensor, WorkbenchError> {
    if let Some(tensor) = constants.get(&value.name) {
        return Ok(tensor.clone());
    }
    Ok(match value.ty.dtype {
        DType::I64 => {
            let numbers: Vec<i64> = (0..value.ty.numel() as i64).map(|i| i % 2).collect();
            HostTensor::from_i64(value.ty.shape.clone(), &numbers)?
        }
        DType::F32 => noise(&value.ty, 0.05)?,
        _ => HostTensor::zeros(value.ty.clone()),
    })
}
