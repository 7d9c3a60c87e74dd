//! `profile`.

use std::process::{Command, Stdio};

use fusionllm_node::measure_traffic;
use fusionllm_plan::Device;
use fusionllm_workbench::model::models;
use fusionllm_workbench::profile::{measure, to_toml};

use crate::args::{BackendArgs, ProfileArgs};
use crate::backend::open_backend;
use crate::devices;
use crate::failure::Failure;
use crate::output::{print, print_json, tell};
use crate::table::Table;
use crate::train::load_job;
use crate::units;

/// Marks a process that measures one number of threads. Kernels choose their threads once in a process, so each number
/// takes a new process.
const HERE: &str = "FUSIONLLM_PROFILE_HERE";

/// Measures every backend and every worker that is found, alone and with more and more threads.
pub(crate) fn profile(args: &ProfileArgs, json: bool) -> Result<(), Failure> {
    if args.list {
        return devices::list(json);
    }
    let (batch, models) = match &args.job {
        Some(path) => {
            let mut job = load_job(path, &[], false)?;
            (job.train.batch, models(&mut job)?)
        }
        None => (0, Vec::new()),
    };
    let chosen = BackendArgs { backend: args.backend.clone(), worker: args.worker.clone() };
    if std::env::var_os(HERE).is_some() {
        let on_progress = |name: &str| tell(format_args!("    {name}"));
        let backend = chosen.open()?;
        let mut device = measure(&backend, args.slowdown, batch, &models, on_progress).map_err(Failure::running)?;
        measure_traffic(&mut device, backend.as_ref());
        return print_json(&device);
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads: Vec<usize> = match args.threads {
        Some(threads) => vec![usize::from(threads)],
        None => (0..).map(|i| 1 << i).take_while(|n| *n < cores).chain([cores]).collect(),
    };
    let names: Vec<String> = match chosen.is_given() {
        true => vec![chosen.name()],
        false => devices::all().into_iter().map(|candidate| candidate.name).collect(),
    };
    let mut devices = Vec::new();
    for name in &names {
        // A bad name, or a worker that cannot be started, is the user's error. A worker has its own threads.
        let alone = open_backend(name)?.device().threads.is_none();
        for &n in if alone { &threads[..1] } else { &threads } {
            tell(format_args!("measuring {name} with {}", units::counted(n, "thread")));
            devices.push((n, child(name, n, args)?));
        }
    }
    if let Some(path) = &args.output {
        let text = to_toml(&devices).map_err(Failure::running)?;
        std::fs::write(path, text)
            .map_err(|e| Failure::running(format!("{}: cannot be written", path.display())).because(&e))?;
    }
    if json {
        let devices = devices.iter().map(|(n, d)| serde_json::json!({ "threads": n, "device": d }));
        return print_json(&serde_json::json!({ "devices": devices.collect::<Vec<_>>() }));
    }
    let mut table =
        Table::new(["BACKEND", "THREADS", "PRODUCTS", "CONVOLUTIONS", "MEMORY", "OVERHEAD"], [1, 2, 3, 4, 5]);
    for (n, d) in &devices {
        table.row([
            d.name.clone(),
            n.to_string(),
            units::measure(d.rates.matmul, "FLOP/s"),
            units::measure(d.rates.convolution, "FLOP/s"),
            units::measure(d.rates.memory, "B/s"),
            format!("{:.1} µs", 1e6 * d.rates.overhead),
        ]);
    }
    let next = match &args.output {
        Some(path) => format!("\nuse it in a testbed: profile = \"{}\"\n", path.display()),
        None => "\nkeep it with -o DEVICE.toml, for testbeds to use\n".to_owned(),
    };
    print(&format!("{table}{next}"))
}

fn child(backend: &str, threads: usize, args: &ProfileArgs) -> Result<Device, Failure> {
    let failed =
        |reason: String| Failure::running(format!("{backend} with {}: {reason}", units::counted(threads, "thread")));
    let program = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
    let output = Command::new(program)
        .args(["profile", "--json", "--backend", backend, "--slowdown", &args.slowdown.to_string()])
        .args(&args.job)
        .env("RAYON_NUM_THREADS", threads.to_string())
        .env(HERE, "1")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| failed(e.to_string()))?;
    if !output.status.success() {
        return Err(failed(output.status.to_string()));
    }
    serde_json::from_slice(&output.stdout).map_err(|e| failed(e.to_string()))
}
