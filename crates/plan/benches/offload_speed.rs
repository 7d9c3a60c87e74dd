//! Planning speed for what does not fit: GPT-2 medium on one device of 24 TFLOP/s, with less and less memory.
//!
//! It prints processor seconds of planning, and the simulated seconds of a step.
//!
//! ```console
//! $ cargo bench -p fusionllm-plan --bench offload_speed [-- GIB ...]
//! ```

use std::error::Error;

use cpu_time::ProcessTime;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{DType, autodiff};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{Cluster, Compression, Device, PlanOptions, Rates, Schedule, Scheduler, Site, Workload, schedule};
use fusionllm_program::Optimizer;

/// Samples of a step.
const BATCH: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let sizes: Vec<u64> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let sizes = if sizes.is_empty() { vec![8, 9, 10, 11, 12, 13, 16, 24] } else { sizes };
    let config = Gpt2Config { n_layer: 24, n_embd: 1024, n_head: 16, ..Gpt2Config::default() };
    let graphs = [1, 2, 4, 8].map(|micro_batch| {
        let graph = config.build(micro_batch, 1024, DType::F32)?;
        let train = autodiff::differentiate(&graph, graph.outputs["loss"])?;
        Ok::<_, fusionllm_graph::GraphError>((micro_batch, graph, train))
    });
    let graphs = graphs.into_iter().collect::<Result<Vec<_>, _>>()?;
    let workload =
        |(micro_batch, forward, train)| Workload { forward, train, micro_batches: (BATCH / micro_batch) as u32 };
    let all: Vec<Workload<'_>> = graphs.iter().map(|(size, graph, train)| workload((*size, graph, train))).collect();
    for gib in sizes {
        for (name, workloads, schedules) in [
            ("micro-batches of 8, 1F1B", &all[3..], vec![Schedule::OneFOneB]),
            ("all sizes and schedules", &all[..], Schedule::ALL.to_vec()),
        ] {
            let options = PlanOptions {
                scheduler: Scheduler::OpFence,
                optimizer: Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }),
                schedules,
                replicas: 1,
                compression: Compression::default(),
            };
            let started = ProcessTime::now();
            let made = schedule(workloads, &cluster(gib)?, &options);
            let planned = started.elapsed().as_secs_f64();
            match made {
                Ok(made) => {
                    println!("{gib} GiB, {name}: planned in {planned:.2} s; {:.2} s a step", made.simulation.step_s)
                }
                Err(e) => println!("{gib} GiB, {name}: refused in {planned:.2} s: {e}"),
            }
        }
    }
    Ok(())
}

fn cluster(gib: u64) -> Result<Cluster, Box<dyn Error>> {
    let rates = Rates { matmul: 24e12, convolution: 24e12, memory: 448e9, overhead: 0.0 };
    let device = Device { site: Some(0), ..Device::new("one", rates, gib << 30) };
    let site = Site { name: "here".into(), inside: None, uplink: None, downlink: None };
    Ok(Cluster::new(vec![device], vec![site], vec![], None)?)
}
