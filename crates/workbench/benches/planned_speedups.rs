//! Simulated speed-ups of OP-Fence over both baselines, for ResNet-101, GPT-2 small and GPT-2 XL, without codecs.
//!
//! ```console
//! $ cargo bench -p fusionllm-workbench --bench planned_speedups [-- TESTBED.toml ...]
//! ```
//!
//! The default testbeds are those in `examples/testbeds`. We wrote them ourselves, so no figure here was measured.
//! Each baseline runs with the schedule and the micro-batch size that are fastest for it. A `*` marks a baseline that
//! needs more memory than some device has.

use std::error::Error;
use std::path::{Path, PathBuf};

use fusionllm_graph::ops::{AdamwStep, SgdStep};
use fusionllm_graph::{DType, Graph, GraphError, TrainGraph, autodiff};
use fusionllm_models::{Gpt2Config, ResNetConfig};
use fusionllm_plan::{
    Cluster, Compression, PlanError, PlanOptions, Schedule, Scheduled, Scheduler, SimulateOptions, Workload, compile,
    schedule, simulate,
};
use fusionllm_program::Optimizer;
use fusionllm_workspace::config::Testbed;

/// A model, and one batch of it in micro-batches of several sizes.
struct Case {
    name: &'static str,
    optimizer: Optimizer,
    sizes: Vec<(u32, Graph, TrainGraph)>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut testbeds: Vec<PathBuf> =
        std::env::args_os().skip(1).filter(|a| a != "--bench").map(PathBuf::from).collect();
    if testbeds.is_empty() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/testbeds");
        testbeds = ["two-clusters", "mixed-homes", "48-gpus", "wan-regions"]
            .map(|n| folder.join(n).with_extension("toml"))
            .into();
    }
    let cases = cases()?;
    println!("Simulated seconds a step, without compression; testbeds of our own making.\n");
    println!(
        "| testbed | model | op-fence | used | stages | equal-number | equal-compute | speed-up over them | lower bound |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for path in &testbeds {
        let cluster = Testbed::load(path)?.cluster;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        for case in &cases {
            let fence = best(case, &cluster, Scheduler::OpFence)?;
            let [number, compute] = [Scheduler::EqualNumber, Scheduler::EqualCompute].map(|s| best(case, &cluster, s));
            let (number, compute) = (number?, compute?);
            println!(
                "| {name} | {} | {} | {} of {} | {}{} | {} | {} | {:.2}x, {:.2}x | {:.2} s |",
                case.name,
                fence.time(),
                fence.made.devices.len(),
                cluster.devices().len(),
                fence.made.plan.stages.len(),
                match fence.made.plan.stages.iter().map(|s| s.peers.len()).max() {
                    Some(replicas) if replicas > 1 => format!(", {replicas} replicas"),
                    _ => String::new(),
                },
                number.time(),
                compute.time(),
                number.step_s / fence.step_s,
                compute.step_s / fence.step_s,
                fence.made.lower_bound_s,
            );
        }
    }
    Ok(())
}

fn cases() -> Result<Vec<Case>, GraphError> {
    let adamw = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
    let sgd = Optimizer::Sgd(SgdStep { momentum: 0.9, weight_decay: 1e-4, nesterov: false });
    let small = Gpt2Config { attn_pdrop: 0.0, resid_pdrop: 0.0, embd_pdrop: 0.0, ..Gpt2Config::default() };
    let xl = Gpt2Config { n_layer: 48, n_embd: 1600, n_head: 25, ..small.clone() };
    let resnet = ResNetConfig { depth: 101, ..ResNetConfig::default() };
    let sizes = |batch: usize, build: &dyn Fn(usize) -> Result<Graph, GraphError>| {
        [1, 2, 4]
            .into_iter()
            .map(|samples| {
                let forward = build(samples * batch / 128)?;
                let train = autodiff::differentiate(&forward, forward.outputs["loss"])?;
                Ok(((128 / samples) as u32, forward, train))
            })
            .collect::<Result<Vec<_>, GraphError>>()
    };
    Ok(vec![
        Case {
            name: "ResNet-101, 256 images",
            optimizer: sgd,
            sizes: sizes(256, &|n| resnet.build(n, 224, DType::F32))?,
        },
        Case {
            name: "GPT-2 small, 128 x 1,024 tokens",
            optimizer: adamw,
            sizes: sizes(128, &|n| small.build(n, 1024, DType::F32))?,
        },
        Case {
            name: "GPT-2 XL, 128 x 1,024 tokens",
            optimizer: adamw,
            sizes: sizes(128, &|n| xl.build(n, 1024, DType::F32))?,
        },
    ])
}

/// A plan, and its simulation.
struct Outcome {
    made: Scheduled,
    step_s: f64,
    fits: bool,
}

impl Outcome {
    fn time(&self) -> String {
        format!("{:.2} s{}", self.step_s, if self.fits { "" } else { "*" })
    }
}

fn best(case: &Case, cluster: &Cluster, scheduler: Scheduler) -> Result<Outcome, PlanError> {
    let workloads: Vec<Workload<'_>> =
        case.sizes.iter().map(|(n, forward, train)| Workload { forward, train, micro_batches: *n }).collect();
    let options = |schedules| PlanOptions {
        scheduler,
        optimizer: case.optimizer,
        schedules,
        replicas: 8,
        compression: Compression::default(),
    };
    if scheduler == Scheduler::OpFence {
        let made = schedule(&workloads, cluster, &options(Schedule::ALL.to_vec()))?;
        return judge(case, cluster, workloads[made.workload], made);
    }
    let mut best: Option<Outcome> = None;
    for workload in &workloads {
        for order in Schedule::ALL {
            let made = schedule(&[*workload], cluster, &options(vec![order]))?;
            let new = judge(case, cluster, *workload, made)?;
            if best.as_ref().is_none_or(|b| new.step_s < b.step_s) {
                best = Some(new);
            }
        }
    }
    best.ok_or_else(|| PlanError::Plan("there are no workloads".into()))
}

fn judge(case: &Case, cluster: &Cluster, workload: Workload<'_>, made: Scheduled) -> Result<Outcome, PlanError> {
    let programs = compile(&made.plan, workload.forward, workload.train)?;
    let used = cluster.select(&made.devices)?;
    let simulation = simulate(&programs, &used, &SimulateOptions::new(case.optimizer))?;
    let fits = simulation.peers.iter().zip(used.devices()).all(|(p, d)| p.peak_bytes <= d.memory);
    Ok(Outcome { made, step_s: simulation.step_s, fits })
}
