//! The profile file: measured devices as TOML.

use std::collections::BTreeMap;

use fusionllm_plan::{Curve, Curves, Device};
use serde::Serialize;

use crate::WorkbenchError;

/// Measured devices with their threads, as a file for [`load_profile`](fusionllm_workspace::config::load_profile).
///
/// # Errors
///
/// TOML cannot hold a figure.
pub fn to_toml(devices: &[(usize, Device)]) -> Result<String, WorkbenchError> {
    #[derive(Serialize)]
    struct File {
        device: Vec<Entry>,
    }
    #[derive(Serialize)]
    struct Entry {
        name: String,
        backend: Option<String>,
        threads: usize,
        tflops: f64,
        convolution_tflops: f64,
        memory_bandwidth: String,
        memory: String,
        overhead: String,
        operators: BTreeMap<String, Vec<(f64, f64)>>,
        scratch: BTreeMap<String, Vec<(f64, f64)>>,
    }
    let points = |curves: &Curves| {
        let short = |c: &Curve| c.points().iter().map(|(work, took)| (short(*work), short(*took))).collect();
        curves.iter().map(|(name, c)| (name.clone(), short(c))).collect()
    };
    let entry = |(threads, d): &(usize, Device)| Entry {
        name: format!("{}-{threads}", d.name),
        backend: d.backend.clone(),
        threads: *threads,
        tflops: short(d.rates.matmul / 1e12),
        convolution_tflops: short(d.rates.convolution / 1e12),
        memory_bandwidth: format!("{} GB/s", short(d.rates.memory / 1e9)),
        memory: format!("{} GiB", short(d.memory as f64 / (1u64 << 30) as f64)),
        overhead: format!("{} us", short(d.rates.overhead * 1e6)),
        operators: points(&d.measured.clone().into()),
        scratch: points(&d.scratch.clone().into()),
    };
    let file = File { device: devices.iter().map(entry).collect() };
    let text =
        toml::to_string(&file).map_err(|e| WorkbenchError::State(format!("the profile cannot be written: {e}")))?;
    Ok(format!(
        "# Measured by `fusionllm profile`. In a testbed: profile = \"THIS FILE\".\n\
         # Operators: [work, seconds], work in FLOPs for products and convolutions, in bytes for all others; scratch: [bytes, bytes beside operands and results].\n\
         # With types: those of the job that was measured; OPERAND<OPERATOR is what that operator made a view of.\n\n{text}"
    ))
}

/// Rounds to four significant digits.
fn short(x: f64) -> f64 {
    format!("{x:.3e}").parse().unwrap_or(x)
}
