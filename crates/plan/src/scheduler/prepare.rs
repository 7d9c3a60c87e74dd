//! A plan with its codecs, its Programs and its prediction.

use fusionllm_program::{Optimizer, Program};

use super::options::Workload;
use crate::codecs::{Compression, Compressor, assign};
use crate::compile::compile;
use crate::cost::Cluster;
use crate::error::PlanError;
use crate::plan::Plan;
use crate::simulate::{SimulateOptions, Simulation, simulate};

/// A plan that is ready to run.
#[derive(Debug, Clone, PartialEq)]
pub struct PreparedPlan {
    /// The plan, with its codecs.
    pub plan: Plan,
    /// Its training Programs, one per peer.
    pub programs: Vec<Program>,
    /// The predicted step, if the cluster is known.
    pub simulation: Option<Simulation>,
}

/// Prepares a plan to run: chooses its codecs by `compression`, compiles it, and simulates a step on `cluster` if
/// that is known. Device `i` of the cluster runs peer `i`. Without compression, the plan keeps the codecs that it
/// has.
///
/// # Errors
///
/// The plan does not fit the workload, or the cluster cannot carry it out. Or the compression needs the links' rates,
/// and the cluster is unknown.
pub fn prepare(
    mut plan: Plan,
    workload: Workload<'_>,
    cluster: Option<&Cluster>,
    compression: Compression,
    optimizer: Optimizer,
) -> Result<PreparedPlan, PlanError> {
    let Workload { forward, train, .. } = workload;
    let programs = match compression.compressor {
        Compressor::None => compile(&plan, forward, train)?,
        _ => with_codecs(&mut plan, workload, cluster, compression, optimizer)?,
    };
    let simulation = cluster.map(|cluster| simulate(&programs, cluster, &SimulateOptions::new(optimizer)));
    Ok(PreparedPlan { plan, programs, simulation: simulation.transpose()? })
}

/// Gives a plan the codecs that `compression` chooses, and compiles it.
fn with_codecs(
    plan: &mut Plan,
    workload: Workload<'_>,
    cluster: Option<&Cluster>,
    compression: Compression,
    optimizer: Optimizer,
) -> Result<Vec<Program>, PlanError> {
    plan.compression = compression;
    plan.codecs.clear();
    let mut programs = compile(plan, workload.forward, workload.train)?;
    plan.codecs = compression.choose(&programs, cluster, optimizer)?;
    assign(&mut programs, &plan.codecs);
    Ok(programs)
}
