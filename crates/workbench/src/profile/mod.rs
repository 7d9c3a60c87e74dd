//! Measures how fast a backend computes, with the operators of small training steps.

mod bench;
mod brief;
mod file;
mod left_out;
mod sample;
mod updates;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

pub use bench::Stopwatch;
pub use brief::measure_briefly;
pub use file::to_toml;
pub use left_out::LeftOut;
pub use sample::samples;

use bench::{Took, middle, run};
use fusionllm_backend::Backend;
use fusionllm_compress::Codec;
use fusionllm_exec::{self as exec, Coder, Message};
use fusionllm_graph::ops::OpClass;
use fusionllm_graph::{
    Cost, CounterRng, DType, Graph, HostTensor, Node, Op, TensorType, TrainGraph, ValueId, autodiff,
};
use fusionllm_models::{AttentionImplementation, Gpt2Config, ResNetConfig, ResNetStem};
use fusionllm_plan::{CodecStep, CopyDirection, Curve, Curves, Device, Measured, Rates, work_units};
use fusionllm_program::{Address, PeerId, Program};

use crate::WorkbenchError;
use crate::model::Model;

/// The memory of a device whose backend does not say it.
const MEMORY: u64 = 8 << 30;

/// The effort that goes into measuring operators.
#[derive(Clone, Copy)]
struct Effort {
    /// Steps that do not count, during which the process takes its memory from the system. They run without pauses.
    warm_up: usize,
    /// Each step repeats until this time has passed, and at least `repeats` times.
    patience: Duration,
    repeats: usize,
}

const THOROUGH: Effort = Effort { warm_up: 1, patience: Duration::from_millis(700), repeats: 3 };
const BRIEF: Effort = Effort { warm_up: 1, patience: Duration::from_millis(150), repeats: 1 };
/// The effort for a model's own step, whose micro-batches need much more memory.
const OWN: Effort = Effort { warm_up: 5, patience: Duration::from_secs(5), repeats: 5 };
const MAX_REPEATS: usize = 40;

/// Measures operators in general, and those of `models`, which step in micro-batches over `batch` samples. If there
/// are models, fewer general networks are measured. `on_progress` gets the name of each network before it runs. With
/// a `slowdown` above 1, the backend pauses between operators as a slowed peer does, which cools its caches. The
/// figures still exclude the pauses.
///
/// # Errors
///
/// The backend fails.
pub fn measure(
    backend: &Arc<dyn Backend>,
    slowdown: f64,
    batch: usize,
    models: &[Model],
    on_progress: impl FnMut(&str) + Send,
) -> Result<Device, WorkbenchError> {
    let general = if models.is_empty() { (networks()?, THOROUGH) } else { (few_networks()?, BRIEF) };
    measure_on(backend, general, (models, batch), slowdown, on_progress)
}

/// The cost of a node of a valid Program.
fn cost_of(program: &Program, node: &Node) -> Cost {
    let types = |values: &[ValueId]| values.iter().map(|v| &program.values[v].ty).collect::<Vec<_>>();
    node.op.cost(&types(&node.inputs), &types(&node.outputs))
}

fn measure_on(
    backend: &Arc<dyn Backend>,
    (graphs, effort): (Vec<Graph>, Effort),
    (models, batch): (&[Model], usize),
    slowdown: f64,
    mut on_progress: impl FnMut(&str) + Send,
) -> Result<Device, WorkbenchError> {
    // On a pool thread, kernels need no hand-over to another thread.
    crate::machine::compute_threads(slowdown)?.install(|| {
        let mut samples = Samples::default();
        for graph in &graphs {
            on_progress(&graph.name);
            let loss = graph.outputs.get("loss").copied();
            let loss = loss.ok_or_else(|| WorkbenchError::State(format!("{:?} has no loss", graph.name)))?;
            let train = autodiff::differentiate(graph, loss)?;
            samples.step(backend, &train, effort, slowdown)?;
            samples.updates(backend.as_ref(), &train.graph, effort, slowdown)?;
        }
        for model in models {
            on_progress(&format!("{} in micro-batches of {}", model.forward.name, model.micro_batch));
            let sample = sample::sample(&model.train, batch / model.micro_batch);
            samples.own(backend, &sample, &model.train.graph.constants, OWN, slowdown)?;
            samples.updates(backend.as_ref(), &model.train.graph, THOROUGH, slowdown)?;
        }
        let mut device = samples.device(backend.as_ref());
        codecs(&mut device.measured)?;
        copies(backend.as_ref(), effort.repeats, &mut device.measured)?;
        Ok(device)
    })
}

fn few_networks() -> Result<Vec<Graph>, WorkbenchError> {
    Ok(vec![
        gpt2((64, 2, 64, 1, 256), AttentionImplementation::Sdpa)?,
        gpt2((256, 4, 64, 2, 512), AttentionImplementation::Sdpa)?,
        resnet(18, 16, 2)?,
    ])
}

/// GPT-2 and residual networks, up to a step of a fraction of a second.
fn networks() -> Result<Vec<Graph>, WorkbenchError> {
    let mut graphs = Vec::new();
    let sizes = [
        (64, 2, 64, 1, 256),
        (128, 4, 128, 2, 256),
        (256, 4, 128, 4, 1024),
        (512, 8, 128, 2, 256),
        (768, 12, 128, 2, 8192),
    ];
    for size in sizes {
        let implementations = match size.0 {
            128 => &[AttentionImplementation::Sdpa, AttentionImplementation::Eager][..],
            _ => &[AttentionImplementation::Sdpa][..],
        };
        for attention in implementations {
            graphs.push(gpt2(size, *attention)?);
        }
    }
    for (depth, width, batch) in [(18, 16, 2), (18, 32, 4), (18, 64, 4), (50, 32, 4)] {
        graphs.push(resnet(depth, width, batch)?);
    }
    Ok(graphs)
}

/// A GPT-2 of two layers: width, heads, context, samples, vocabulary.
fn gpt2(
    (n_embd, n_head, context, batch, vocab_size): (usize, usize, usize, usize, usize),
    attn_implementation: AttentionImplementation,
) -> Result<Graph, WorkbenchError> {
    let config = Gpt2Config {
        vocab_size,
        n_positions: context,
        n_embd,
        n_head,
        n_layer: 2,
        attn_implementation,
        ..Gpt2Config::default()
    };
    Ok(config.build(batch, context, DType::F32)?)
}

fn resnet(depth: usize, width: usize, batch: usize) -> Result<Graph, WorkbenchError> {
    let config = ResNetConfig { depth, width, num_classes: 10, stem: ResNetStem::Cifar };
    Ok(config.build(batch, 32, DType::F32)?)
}

/// Times to encode and decode tensors, by their bytes, under the names that plans use. Top-k is measured at one ratio,
/// since selection takes its time and reads the whole tensor. As in a run, gradients follow activations, whose masks
/// they need, other tensors are coded in between, and what was decoded waits to be used.
fn codecs(measured: &mut Measured) -> Result<(), WorkbenchError> {
    const NAMES: [&str; 6] = ["bf16", "int8", "int4", "int4-hadamard", "nvfp4", "topk"];
    const RATIO: f64 = 10.0;
    /// Of the tensors that are coded in turn: their most bytes, and the range of their number.
    const TOGETHER: (usize, [usize; 2]) = (4 << 20, [2, 8]);
    let (activation, gradient, other) = (ValueId(0), ValueId(1), PeerId(0));
    let masks = BTreeMap::from([((gradient, other), BTreeSet::from([activation]))]);
    let mut points: BTreeMap<(CodecStep, &str), Vec<(f64, f64)>> = BTreeMap::new();
    for elements in [1 << 13, 1 << 16, 1 << 19] {
        let ty = TensorType::new(DType::F32, [elements]);
        let (most, [fewest, many]) = TOGETHER;
        let tensors = (most / ty.bytes()).clamp(fewest, many);
        let tensors = (0..tensors).map(|_| noise(&ty, 1.0)).collect::<Result<Vec<_>, _>>()?;
        for codec in NAMES.iter().filter_map(|name| Codec::from_name(name, RATIO)) {
            let options = exec::EncodeOptions { codec, seed: 1 };
            let mut ends = [Coder::new(&masks), Coder::new(&masks)];
            let mut seconds = [0.0; 2];
            // The first pass fills buffers and does not count.
            for pass in 0..2 {
                seconds = [0.0; 2];
                for value in [activation, gradient] {
                    let [sender, receiver] = &mut ends;
                    let message =
                        |micro_batch| Message { pass, peer: other, tensor: Address::Value { value, micro_batch } };
                    let mut coded = vec![Vec::new(); tensors.len()];
                    let watch = Stopwatch::start(true);
                    for ((micro_batch, tensor), coded) in (0..).zip(&tensors).zip(&mut coded) {
                        sender.encode(message(micro_batch), tensor, &options, coded)?;
                    }
                    seconds[0] += watch.seconds();
                    let mut decoded = Vec::with_capacity(coded.len());
                    let watch = Stopwatch::start(true);
                    for (micro_batch, coded) in (0..).zip(&coded) {
                        decoded.push(receiver.decode(message(micro_batch), coded, ty.clone())?);
                    }
                    seconds[1] += watch.seconds();
                    ends.reverse();
                }
            }
            for (step, seconds) in [CodecStep::Encode, CodecStep::Decode].into_iter().zip(seconds) {
                let of_message = seconds / (2 * tensors.len()) as f64;
                points.entry((step, codec.name())).or_default().push((4.0 * elements as f64, of_message.max(1e-8)));
            }
        }
    }
    for ((step, name), points) in points {
        measured.codecs_mut(step).extend(Curve::new(points).map(|curve| (name.to_owned(), curve)));
    }
    Ok(())
}

/// Times to copy tensors from the device to the host and back, by their bytes.
fn copies(backend: &dyn Backend, repeats: usize, measured: &mut Measured) -> Result<(), WorkbenchError> {
    let alone = backend.device().threads == Some(1);
    let mut points = [Vec::new(), Vec::new()];
    for elements in [1 << 8, 1 << 12, 1 << 15, 1 << 18] {
        let ty = TensorType::new(DType::F32, [elements]);
        let tensor = noise(&ty, 1.0)?;
        // Each copy uses another tensor, as in a run, so that no copy finds warm caches.
        let uploads = (0..=repeats.max(8)).map(|_| {
            let watch = Stopwatch::start(alone);
            let there = backend.upload(&tensor)?;
            backend.synchronize()?;
            Ok((there, watch.seconds()))
        });
        let (there, up): (Vec<_>, Vec<_>) = uploads.collect::<Result<Vec<_>, WorkbenchError>>()?.into_iter().unzip();
        let downloads = there.iter().map(|there| {
            let watch = Stopwatch::start(alone);
            let _host = backend.download(there)?;
            Ok(watch.seconds())
        });
        let down = downloads.collect::<Result<Vec<_>, WorkbenchError>>()?;
        for (points, mut took) in points.iter_mut().zip([down, up]) {
            took.sort_by(f64::total_cmp);
            points.push((ty.bytes() as f64, mean(middle(&took)).max(1e-8)));
        }
    }
    for (direction, points) in [CopyDirection::Download, CopyDirection::Upload].into_iter().zip(points) {
        *measured.copies_mut(direction) = Curve::new(points);
    }
    Ok(())
}

/// Measured times of operators.
#[derive(Default)]
struct Samples {
    /// By operator name.
    operators: BTreeMap<&'static str, Vec<Sample>>,
    /// By signature: the seconds of a model's own operators.
    seconds: Curves,
    /// By signature: their scratch bytes, if they use any.
    scratch: Curves,
}

#[derive(Debug, Clone, Copy)]
struct Sample {
    class: OpClass,
    flops: f64,
    bytes: f64,
    work: f64,
    seconds: f64,
    /// Bytes held beside operands and results.
    scratch: f64,
}

impl Samples {
    fn add(&mut self, op: &Op, inputs: &[&TensorType], outputs: &[&TensorType], took: Took) {
        let Cost { class, flops, bytes } = op.cost(inputs, outputs);
        let work = work_units(&Cost { class, flops, bytes });
        let sample = Sample { class, flops, bytes, work, seconds: took.seconds, scratch: took.scratch as f64 };
        self.operators.entry(op.name()).or_default().push(sample);
    }

    /// Measures all operators of a step with one micro-batch.
    fn step(
        &mut self,
        backend: &Arc<dyn Backend>,
        train: &TrainGraph,
        effort: Effort,
        slowdown: f64,
    ) -> Result<(), WorkbenchError> {
        let graph = &train.graph;
        let program = sample::program(graph, &sample::live(train), 1);
        for (id, took) in run(backend, &program, &graph.constants, effort, slowdown)? {
            let node = graph.node(id);
            self.add(&node.op, &graph.types(&node.inputs), &graph.types(&node.outputs), took);
        }
        Ok(())
    }

    /// Measures a model's own operators, by a [sample](sample::sample) of them.
    fn own(
        &mut self,
        backend: &Arc<dyn Backend>,
        sample: &Program,
        constants: &BTreeMap<String, HostTensor>,
        effort: Effort,
        slowdown: f64,
    ) -> Result<(), WorkbenchError> {
        let took = run(backend, sample, constants, effort, slowdown)?;
        let signatures = sample::signatures(sample);
        let mut by_signature: BTreeMap<&str, (Cost, Vec<Took>)> = BTreeMap::new();
        for (id, took) in took {
            let cost = cost_of(sample, &sample.nodes[&id]);
            by_signature.entry(&signatures[&id]).or_insert((cost, Vec::new())).1.push(took);
        }
        for (signature, (cost, took)) in by_signature {
            let seconds = mean(&took.iter().map(|t| t.seconds).collect::<Vec<_>>());
            let scratch = took.iter().map(|t| t.scratch).max().unwrap_or(0);
            let point = |at: f64, figure| Some((signature.to_owned(), Curve::new(vec![(at.max(1.0), figure)])?));
            self.seconds.extend(point(work_units(&cost), seconds.max(1e-8)));
            // A curve needs positive points.
            self.scratch.extend(point(cost.bytes, scratch as f64));
        }
        Ok(())
    }

    fn device(&self, backend: &dyn Backend) -> Device {
        let all: Vec<Sample> = self.operators.values().flatten().copied().collect();
        // The median rate of the larger half of a class.
        let rate = |class: OpClass, amount: fn(&Sample) -> f64| {
            let mut of: Vec<&Sample> = all.iter().filter(|s| s.class == class && amount(s) > 0.0).collect();
            of.sort_by(|a, b| amount(a).total_cmp(&amount(b)));
            median(of[of.len() / 2..].iter().map(|s| amount(s) / s.seconds.max(1e-9)).collect())
        };
        let matmul = rate(OpClass::Matmul, |s| s.flops).unwrap_or(1e9);
        let tiny = all.iter().filter(|s| s.bytes < 4096.0 && s.flops < 1e4).map(|s| s.seconds);
        let rates = Rates {
            matmul,
            convolution: rate(OpClass::Convolution, |s| s.flops).unwrap_or(matmul),
            memory: rate(OpClass::Memory, |s| s.bytes).unwrap_or(1e9),
            overhead: median(tiny.collect()).unwrap_or(1e-6),
        };
        let memory = backend.device().memory_bytes.unwrap_or(MEMORY);
        let mut device = Device::new(backend.name(), rates, memory);
        device.backend = Some(backend.name().to_owned());
        for (name, samples) in &self.operators {
            let seconds = samples.iter().map(|s| (s.work, s.seconds.max(1e-8)));
            device.measured.operators.by_name.extend(curve(seconds).map(|c| ((*name).to_owned(), c)));
            if samples.iter().any(|s| s.scratch > 0.0) {
                let scratch = samples.iter().map(|s| (s.bytes, s.scratch.max(1.0)));
                device.scratch.by_name.extend(curve(scratch).map(|c| ((*name).to_owned(), c)));
            }
        }
        device.measured.operators.by_signature.extend(self.seconds.clone());
        device.scratch.by_signature.extend(self.scratch.clone());
        device
    }
}

/// A curve through points of work and figure. Points of similar work become one point, their mean, because
/// predictions add such figures up.
fn curve(points: impl Iterator<Item = (f64, f64)>) -> Option<Curve> {
    /// One point spans this factor of work: eight points per decade.
    const SPAN: f64 = 1.333;
    let mut left: Vec<(f64, f64)> = points.map(|(work, took)| (work.max(1.0), took)).collect();
    left.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut points = Vec::new();
    while let Some(&(least, _)) = left.first() {
        let end = left.partition_point(|p| p.0 < least * SPAN);
        let (work, took): (Vec<f64>, Vec<f64>) = left.drain(..end).unzip();
        points.push((mean(&work), mean(&took)));
    }
    Curve::new(points)
}

fn mean(of: &[f64]) -> f64 {
    of.iter().sum::<f64>() / of.len() as f64
}

fn median(mut of: Vec<f64>) -> Option<f64> {
    of.sort_by(f64::total_cmp);
    of.get(of.len() / 2).copied()
}

fn noise(ty: &TensorType, size: f32) -> Result<HostTensor, WorkbenchError> {
    let dice = CounterRng::new(1);
    let number = |i: usize| (dice.block(i as u64, 0)[0] as f32 / u32::MAX as f32 - 0.5) * 2.0 * size;
    Ok(HostTensor::from_f32(ty.shape.clone(), &(0..ty.numel()).map(number).collect::<Vec<_>>())?)
}

#[cfg(test)]
mod tests;
