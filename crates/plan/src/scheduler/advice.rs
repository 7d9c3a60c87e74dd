//! Better machines, and what a plan for them gives.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use fusionllm_program::{PeerId, Program};

use super::options::{PlanOptions, Workload};
use super::schedule_until;
use crate::cost::Cluster;
use crate::error::PlanError;
use crate::simulate::{Change, SimulateOptions, Simulation, WhatIf, candidates, what_if, worthwhile};

/// How many lines are tried: those whose change makes the present plan fastest.
const MAX_LINES: usize = 3;

/// A peer that needs more than this share of its memory is tried with twice as much.
const FULL_SHARE: f64 = 0.7;

/// A plan for known machines, as far as advice on them needs it.
#[derive(Debug, Clone, Copy)]
pub struct Made<'a> {
    /// By peer: its device in the whole cluster.
    pub devices: &'a [PeerId],
    /// The Programs of its peers.
    pub programs: &'a [Program],
    /// The cluster of its devices.
    pub cluster: &'a Cluster,
    /// Its predicted step.
    pub simulation: &'a Simulation,
}

/// Like [`what_if`], but with a new plan for each change of the whole `cluster`. So a change may also bring in devices
/// that the present plan leaves out. Besides faster lines and devices, it tries more memory where a peer's is nearly full,
/// and one more device.
///
/// At most six plans are made, and none once `stop` is set.
///
/// # Errors
///
/// The plan and the cluster do not fit each other. A change for which no plan fits is left out.
pub fn advise(
    workloads: &[Workload<'_>],
    cluster: &Cluster,
    options: &PlanOptions,
    made: Made<'_>,
    stop: &AtomicBool,
) -> Result<Vec<WhatIf>, PlanError> {
    let now = made.simulation.step_s;
    let mut found = Vec::new();
    for change in changes(options, made)? {
        let change = change.before_selection(made.devices);
        let Some(changed) = change.apply(cluster)? else { continue };
        let Ok(new) = schedule_until(workloads, &changed, options, stop) else { continue };
        // A plan that was cut short says too little.
        if stop.load(Relaxed) {
            break;
        }
        let step_s = new.simulation.step_s;
        found.push(WhatIf { change, replanned: true, step_s, speedup: now / step_s });
    }
    Ok(worthwhile(found))
}

/// The changes to try, of the plan's own cluster.
fn changes(options: &PlanOptions, made: Made<'_>) -> Result<Vec<Change>, PlanError> {
    let Made { programs, cluster, simulation, .. } = made;
    let faster = what_if(programs, cluster, &SimulateOptions::new(options.optimizer), simulation)?;
    let is_line = |change: &Change| matches!(change, Change::Line { .. });
    let mut changes: Vec<Change> = faster.into_iter().map(|w| w.change).filter(is_line).take(MAX_LINES).collect();
    // The device that computes longest, even if the present plan would gain nothing.
    let busiest = candidates(simulation, cluster).into_iter().find(|change| matches!(change, Change::Device { .. }));
    changes.extend(busiest);
    let loads = || (0..).map(PeerId).zip(simulation.peers.iter().zip(cluster.devices()));
    let full =
        loads().map(|(peer, (load, device))| (peer, load.peak_bytes as f64 / device.memory as f64, device.memory));
    let fullest = full.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, share, _)| *share > FULL_SHARE);
    changes.extend(fullest.map(|(peer, _, memory)| Change::Memory { peer, then: memory.saturating_mul(2) }));
    let longest = loads().max_by(|a, b| a.1.0.compute_s.total_cmp(&b.1.0.compute_s));
    changes.extend(longest.map(|(like, _)| Change::OneMore { like }));
    Ok(changes)
}
