//! `backend check`, and the choice of the backend that a command computes with.

use std::sync::Arc;
use std::time::Instant;

use fusionllm_backend::conformance::{self, Case, Report};
use fusionllm_backend::{Backend, BackendError, names, open, worker_name};
use fusionllm_graph::units::counted;

use crate::args::{BackendArgs, CheckBackendArgs};
use crate::failure::Failure;
use crate::output::{complain, print, print_json, tell};
use crate::table::Table;

impl BackendArgs {
    /// The backend's name for [`open`].
    pub(crate) fn name(&self) -> String {
        match (&self.worker, &self.backend) {
            (Some(command), _) => worker_name(command),
            (None, Some(name)) => name.clone(),
            (None, None) => names().first().copied().unwrap_or_default().to_owned(),
        }
    }

    /// Whether it was chosen by an option.
    pub(crate) fn is_given(&self) -> bool {
        self.worker.is_some() || self.backend.is_some()
    }

    pub(crate) fn open(&self) -> Result<Arc<dyn Backend>, Failure> {
        open_backend(&self.name())
    }
}

/// The backend of this name.
pub(crate) fn open_backend(name: &str) -> Result<Arc<dyn Backend>, Failure> {
    open(name).map_err(|e| match e {
        BackendError::Unknown { .. } => Failure::input(format!("--backend {name}: {e}")).hint(how_to_get(name)),
        _ => Failure::input(e.to_string()),
    })
}

/// Advice about a name that no backend of this build has.
fn how_to_get(name: &str) -> String {
    let framework = name.split(':').next().unwrap_or(name);
    let build = |feature| format!("`cargo install --path crates/cli --features {feature}` brings it");
    match framework {
        _ if names().contains(&framework) => format!("{framework} takes no device: write --backend {framework}"),
        "burn" => build("burn"),
        "burn-wgpu" => build("wgpu"),
        _ => "a GPU takes part through PyTorch or JAX, such as --worker \"python -m fusionllm_torch\"; \
              `fusionllm profile --list` shows what this machine has"
            .to_owned(),
    }
}

/// Runs the conformance suite.
pub(crate) fn check(args: &CheckBackendArgs, json: bool) -> Result<(), Failure> {
    let backend = args.backend.open()?;
    let backend = &*backend;
    tell(format_args!("checking {} on {}", backend.name(), backend.device().name));
    let mut cases = conformance::cases().map_err(Failure::running)?;
    if let Some(word) = &args.only {
        cases.retain(|case| case.op.tag().contains(word));
        if cases.is_empty() {
            return Err(Failure::input(format!("--only {word}: no operator's name contains that")));
        }
    }
    let cases = conformance::sample(cases, args.every.get());
    type Part<'a> = (&'static str, &'a dyn Fn(&dyn Backend, &[Case]) -> Report);
    let parts: [Part<'_>; 5] = [
        ("transfers", &|backend, _| conformance::transfers(backend)),
        ("values", &|backend, cases| conformance::values(backend, cases)),
        ("gradients", &|backend, cases| conformance::gradients(backend, cases)),
        ("segments", &|backend, _| conformance::segments(backend)),
        ("bits", &|backend, _| conformance::determinism(backend)),
    ];
    let mut table = Table::new(["part", "checks", "failed", "seconds"], [1, 2, 3]);
    let mut results = Vec::new();
    let mut failed = 0;
    let mut lacking = Default::default();
    // If operators are chosen by name, the parts that have operators of their own are left out.
    let wanted = |name: &str| args.only.is_none() || !matches!(name, "segments" | "bits");
    for (name, run) in parts.into_iter().filter(|(name, _)| wanted(name)) {
        tell(format_args!("    {name}"));
        let started = Instant::now();
        let report = run(backend, &cases);
        let seconds = started.elapsed().as_secs_f64();
        if !report.failures.is_empty() {
            complain(&report);
        }
        failed += report.failures.len();
        table.row([
            name.to_owned(),
            report.checks.to_string(),
            report.failures.len().to_string(),
            format!("{seconds:.1}"),
        ]);
        results.push(serde_json::json!({
            "part": name, "checks": report.checks, "seconds": seconds, "failures": report.failures,
        }));
        if name == "transfers" {
            lacking = report.unsupported;
        }
    }
    if json {
        let lacking: Vec<String> = lacking.iter().map(ToString::to_string).collect();
        print_json(&serde_json::json!({
            "backend": backend.name(), "device": backend.device().name, "lacks": lacking, "parts": results,
        }))?;
    } else {
        let lacking: Vec<String> = lacking.iter().map(ToString::to_string).collect();
        let lacking = match lacking.is_empty() {
            true => String::new(),
            false => format!("\nit does not hold {}; their cases were left out\n", lacking.join(", ")),
        };
        print(&format!("{table}{lacking}"))?;
    }
    match failed {
        0 => Ok(()),
        _ => Err(Failure::running(format!("{} failed {}", backend.name(), counted(failed, "check")))),
    }
}
