//! Planning speed: seconds to plan GPT-2 XL on clusters of 48 and of 1,000 devices, with each scheduler.
//!
//! It also prints the simulated step time of each plan.
//!
//! ```console
//! $ cargo bench -p fusionllm-plan --bench planning_speed [-- DEVICES ... --results FILE]
//! ```
//!
//! `--results` also writes the figures to a file, as JSON.

use std::error::Error;
use std::time::Instant;

use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{DType, autodiff};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Cluster, Compression, Device, DirectLink, Link, Place, PlanOptions, Rates, Schedule, Scheduler, SimulateOptions,
    Site, Workload, compile, schedule, simulate,
};
use fusionllm_program::{Optimizer, PeerId};
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let sizes: Vec<usize> = arguments.iter().filter_map(|a| a.parse().ok()).collect();
    let mut plans = Vec::new();
    let config = Gpt2Config {
        n_layer: 48,
        n_embd: 1600,
        n_head: 25,
        attn_pdrop: 0.0,
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        ..Gpt2Config::default()
    };
    let graph = config.build(1, 1024, DType::F32)?;
    let train = autodiff::differentiate(&graph, graph.outputs["loss"])?;
    let workloads = [Workload { forward: &graph, train: &train, micro_batches: 64 }];
    let optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
    for devices in if sizes.is_empty() { vec![48, 1000] } else { sizes } {
        let cluster = cluster(devices)?;
        for scheduler in [Scheduler::OpFence, Scheduler::EqualCompute, Scheduler::EqualNumber] {
            let options = PlanOptions {
                scheduler,
                optimizer,
                schedules: Schedule::ALL.to_vec(),
                replicas: 8,
                compression: Compression::default(),
            };
            let start = Instant::now();
            let made = match schedule(&workloads, &cluster, &options) {
                Ok(made) => made,
                Err(e) => {
                    println!("{devices} devices, {scheduler}: {e}");
                    continue;
                }
            };
            let planned = start.elapsed().as_secs_f64();
            let programs = compile(&made.plan, &graph, &train)?;
            let used = cluster.select(&made.devices)?;
            let conditions = SimulateOptions::new(optimizer);
            let start = Instant::now();
            let simulation = simulate(&programs, &used, &conditions)?;
            let simulated_in = start.elapsed().as_secs_f64();
            plans.push(json!({
                "devices": devices, "scheduler": scheduler.name(), "planned_s": planned, "step_s": simulation.step_s,
                "simulated_in_s": simulated_in, "lower_bound_s": made.lower_bound_s,
            }));
            println!(
                "{devices} devices, {scheduler}: planned in {planned:.2} s; {} peers in {} stages, {:?}, at most {} replicas; closed form {:.1} s, \
                 simulated {:.1} s (in {:.1} s), lower bound {:.1} s; peak {:.0} % of a device's memory",
                made.devices.len(),
                made.plan.stages.len(),
                made.plan.schedule,
                made.plan.stages.iter().map(|s| s.peers.len()).max().unwrap_or(0),
                made.estimate_s.unwrap_or(f64::NAN),
                simulation.step_s,
                simulated_in,
                made.lower_bound_s,
                simulation
                    .peers
                    .iter()
                    .zip(used.devices())
                    .map(|(p, d)| 100.0 * p.peak_bytes as f64 / d.memory as f64)
                    .fold(0.0, f64::max),
            );
        }
    }
    if let Some(at) = arguments.iter().position(|a| a == "--results") {
        std::fs::write(arguments.get(at + 1).ok_or("--results takes a file")?, json!({ "plans": plans }).to_string())?;
    }
    Ok(())
}

/// Sites of eight devices, of four makes of GPU.
///
/// Every third site is a home with an uplink of 20 Mbps to 200 Mbps. Links of 1 Gbps to 10 Gbps join the other sites.
fn cluster(devices: usize) -> Result<Cluster, Box<dyn Error>> {
    const GIB: u64 = 1 << 30;
    let makes = [(60e12, 800e9, 24), (30e12, 600e9, 12), (15e12, 400e9, 16), (90e12, 1500e9, 40)];
    let sites = devices.div_ceil(8);
    let devices = (0..devices).map(|d| {
        let (flops, memory, gib) = makes[d * 7 % 4];
        let rates = Rates { matmul: flops, convolution: flops, memory, overhead: 1e-5 };
        Device { site: Some((d % sites) as u32), ..Device::new(format!("gpu-{d}"), rates, gib * GIB) }
    });
    let mbps = |m: f64| m * 1e6 / 8.0;
    let site = |s: usize| Site {
        name: format!("site-{s}"),
        inside: Some(Link { latency: 1e-4, bandwidth: mbps(10_000.0) }),
        downlink: None,
        uplink: (s % 3 == 2).then(|| Link { latency: 0.01, bandwidth: mbps(20.0 * (1 + s % 10) as f64) }),
    };
    let mut lines = Vec::new();
    for a in 0..sites {
        for b in (0..sites).filter(|b| *b != a) {
            let rate = mbps(1000.0 * (1 + (a + b) % 10) as f64);
            let link = Link { latency: 0.005 + 0.001 * ((a * b) % 40) as f64, bandwidth: rate };
            lines.push(DirectLink { from: Place::Site(a as u32), to: Place::Site(b as u32), link });
        }
    }
    Ok(Cluster::new(devices.collect(), (0..sites).map(site).collect(), lines, Some(Place::Device(PeerId(0).0)))?)
}
