//! One training step: its time, the share of it outside `Backend::run`, and its memory.
//!
//! ```console
//! $ cargo bench -p fusionllm-exec --bench step -- [MODEL] [--peers N] [--micro-batches N] [--steps N] [--serve]
//!       [--backend NAME | --worker CMD] [--bf16] [--results FILE]
//! ```
//!
//! | model | what |
//! | --- | --- |
//! | `gpt2` | GPT-2 small's width, heads and vocabulary at 4 layers, batch 4 x 256 |
//! | `gpt2-small` | all 12 layers of it, batch 4 x 1024: for a GPU |
//! | `gpt2-narrow` | 8 layers of width 256 with a byte vocabulary, batch 2 x 128: small operators |
//! | `resnet50` | 4 images of 224 x 224 |
//!
//! All peers run in this process. With `--bf16` the model is in that precision. A wrapper around the backend measures
//! each segment. With `--serve` the benchmark runs one step for every line on standard input and answers with one line
//! of JSON. That is how `scripts/against_pytorch.py` alternates these steps with PyTorch's. `--results` also writes the
//! figures to a file, as JSON.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use fusionllm_backend::{Backend, BackendError, DeviceInfo, Done, Prepared, Segment, Tensor, open, worker_name};
use fusionllm_exec::ExecError;
use fusionllm_exec::local::{LocalRun, StepResult, Training};
use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{CounterRng, DType, Graph, HostTensor, Op, Precision, TensorType, ValueKind, autodiff};
use fusionllm_models::{Gpt2Config, ResNetConfig};
use fusionllm_plan::{Schedule, compile, equal_compute};
use fusionllm_program::{LearningRate, Optimizer};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Options {
    model: String,
    peers: usize,
    micro_batches: usize,
    steps: usize,
    serve: bool,
    bf16: bool,
    backend: String,
    results: Option<String>,
}

fn options() -> Result<Options, Box<dyn Error>> {
    let (model, backend) = ("gpt2".into(), "cpu".into());
    let mut o =
        Options { model, peers: 1, micro_batches: 1, steps: 10, serve: false, bf16: false, backend, results: None };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number =
            || args.next().ok_or(format!("{arg} takes a number"))?.parse::<usize>().map_err(|e| e.to_string());
        match arg.as_str() {
            "gpt2" | "gpt2-small" | "gpt2-narrow" | "resnet50" => o.model = arg,
            "--peers" => o.peers = number()?,
            "--micro-batches" => o.micro_batches = number()?,
            "--steps" => o.steps = number()?,
            "--serve" => o.serve = true,
            "--bf16" => o.bf16 = true,
            "--results" => o.results = Some(args.next().ok_or("--results takes a file")?),
            "--backend" => o.backend = args.next().ok_or("--backend takes a name")?,
            "--worker" => o.backend = worker_name(&args.next().ok_or("--worker takes a command")?),
            // Cargo passes it to every benchmark.
            "--bench" => {}
            other => return Err(format!("unknown argument {other:?}").into()),
        }
    }
    Ok(o)
}

/// A backend that measures the time inside [`Backend::run_segment`].
struct Timed {
    backend: Arc<dyn Backend>,
    nanoseconds: AtomicU64,
}

impl Backend for Timed {
    fn name(&self) -> &str {
        self.backend.name()
    }

    fn device(&self) -> DeviceInfo {
        self.backend.device()
    }

    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError> {
        self.backend.upload(tensor)
    }

    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError> {
        self.backend.download(tensor)
    }

    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError> {
        let started = Instant::now();
        let results = self.backend.run(op, inputs, outputs);
        self.nanoseconds.fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
        results
    }

    fn prepare(&self, segment: Segment) -> Result<Prepared, BackendError> {
        self.backend.prepare(segment)
    }

    fn run_segment(
        &self,
        segment: &Prepared,
        inputs: Vec<Tensor>,
        done: Done<'_>,
    ) -> Result<Vec<Tensor>, BackendError> {
        let started = Instant::now();
        let results = self.backend.run_segment(segment, inputs, done);
        self.nanoseconds.fetch_add(started.elapsed().as_nanos() as u64, Relaxed);
        results
    }
}

/// The model for one micro-batch, and the number of its classes.
fn model(name: &str, micro_batches: usize) -> Result<(Graph, f64), Box<dyn Error>> {
    let batch = if name == "gpt2-narrow" { 2 } else { 4 };
    let micro_batch = batch / micro_batches;
    if micro_batch * micro_batches != batch {
        return Err(format!("the batch is {batch}, which {micro_batches} micro-batches do not divide").into());
    }
    if name == "resnet50" {
        let config = ResNetConfig { depth: 50, ..ResNetConfig::default() };
        return Ok((config.build(micro_batch, 224, DType::F32)?, config.num_classes as f64));
    }
    let small = Gpt2Config { n_layer: 4, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0, ..Gpt2Config::default() };
    let (config, context) = match name {
        "gpt2-narrow" => {
            (Gpt2Config { n_layer: 8, n_embd: 256, n_head: 4, vocab_size: 256, n_positions: 128, ..small }, 128)
        }
        "gpt2-small" => (Gpt2Config { n_layer: 12, ..small }, 1024),
        _ => (small, 256),
    };
    Ok((config.build(micro_batch, context, DType::F32)?, config.vocab_size as f64))
}

fn batch(
    graph: &Graph,
    classes: f64,
    micro_batches: usize,
) -> Result<Vec<BTreeMap<String, HostTensor>>, Box<dyn Error>> {
    let rng = CounterRng::new(1);
    let mut batch = Vec::new();
    for m in 0..micro_batches as u64 {
        let mut inputs = BTreeMap::new();
        for value in graph.values.iter().filter(|v| v.kind == ValueKind::Input) {
            let draw = |i: u64| f64::from(rng.uniform(i, m));
            let shape = value.ty.shape.clone();
            let n = value.ty.numel() as u64;
            let tensor = match value.ty.dtype {
                DType::I64 => {
                    HostTensor::from_i64(shape, &(0..n).map(|i| (draw(i) * classes) as i64).collect::<Vec<_>>())?
                }
                _ => HostTensor::from_f32(shape, &(0..n).map(|i| draw(i) as f32 - 0.5).collect::<Vec<_>>())?,
            };
            inputs.insert(value.name.clone(), tensor);
        }
        inputs.insert("loss_weight".into(), HostTensor::from_f32([], &[1.0 / micro_batches as f32])?);
        batch.push(inputs);
    }
    Ok(batch)
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let (graph, classes) = model(&options.model, options.micro_batches)?;
    let graph = graph.in_precision(if options.bf16 { Precision::Bf16 } else { Precision::F32 }, Precision::F32)?;
    let train = autodiff::differentiate(&graph, graph.outputs["loss"])?;
    let names: Vec<String> = (0..options.peers).map(|p| format!("p{p}")).collect();
    let plan = equal_compute(&graph, &names, options.micro_batches as u32, Schedule::OneFOneB)?;
    let backend = open(&options.backend)?;
    let timed = Arc::new(Timed { backend, nanoseconds: AtomicU64::new(0) });
    let backends: Vec<Arc<dyn Backend>> =
        vec![timed.clone(); options.peers].into_iter().map(|backend| backend as Arc<dyn Backend>).collect();
    let training = Training {
        optimizer: Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }),
        learning_rate: LearningRate { base: 1e-4, warmup: 0, cosine_until: None, min: 0.0 },
        clip: None,
        seed: 1,
    };
    let batch = batch(&graph, classes, options.micro_batches)?;
    let before = memory("VmRSS");
    let mut cluster = LocalRun::new(compile(&plan, &graph, &train)?, &backends, training, |value| match &value.kind {
        ValueKind::Parameter(init) | ValueKind::Buffer(init) => Ok(init.draw(1, &value.name, &value.ty)?),
        _ => Err(ExecError::State(format!("{:?} has no initial value", value.name))),
    })?;
    let mut out = std::io::stdout().lock();
    if options.serve {
        writeln!(out, "{}", serde_json::json!({ "parameters": parameters(&graph), "before_bytes": before }))?;
        out.flush()?;
        for line in std::io::stdin().lock().lines() {
            line?;
            let started = Instant::now();
            let result = cluster.step(&batch)?;
            let step_s = started.elapsed().as_secs_f64();
            let answer = serde_json::json!({ "step_s": step_s, "loss": result.loss, "peak_bytes": memory("VmHWM") });
            writeln!(out, "{answer}")?;
            out.flush()?;
        }
        return Ok(());
    }
    // The first step fills caches and pools.
    cluster.step(&batch)?;
    timed.nanoseconds.store(0, Relaxed);
    let (mut times, mut results) = (Vec::new(), Vec::new());
    for _ in 0..options.steps.max(1) {
        let started = Instant::now();
        results.push(cluster.step(&batch)?);
        times.push(started.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let sum = |f: fn(&fusionllm_exec::PassStats) -> f64| -> f64 {
        results.iter().flat_map(|r: &StepResult| &r.stats).map(f).sum()
    };
    let working = sum(|s| s.total_s) - sum(|s| s.wait_s);
    let kernels = timed.nanoseconds.load(Relaxed) as f64 * 1e-9;
    writeln!(
        out,
        "{} of {} parameters on {} peers, {} micro-batches",
        options.model,
        parameters(&graph),
        options.peers,
        options.micro_batches
    )?;
    writeln!(out, "step          {:8.1} ms, median of {}", times[times.len() / 2] * 1e3, times.len())?;
    let outside = (working - kernels) / working;
    writeln!(out, "outside       {:8.2} % of the peers' working time is not in Backend::run", 100.0 * outside)?;
    writeln!(
        out,
        "peak resident {:8.1} MiB, {:.1} before parameters",
        memory("VmHWM") as f64 / 1048576.0,
        before as f64 / 1048576.0
    )?;
    if let Some(file) = options.results {
        let figures = serde_json::json!({
            "model": options.model, "parameters": parameters(&graph), "peers": options.peers, "steps": times.len(),
            "step_s": times[times.len() / 2], "outside_share": outside, "peak_bytes": memory("VmHWM"),
        });
        std::fs::write(file, figures.to_string())?;
    }
    Ok(())
}

fn parameters(graph: &Graph) -> usize {
    graph.values.iter().filter(|v| matches!(v.kind, ValueKind::Parameter(_))).map(|v| v.ty.numel()).sum()
}

/// A line of Linux's account of this process, in bytes; 0 elsewhere.
fn memory(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'));
    line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok()).map_or(0, |kib| kib * 1024)
}
