//! A plan with its codecs, its Programs and its prediction.

use fusionllm_program::{Optimizer, Program};

use super::options::Workload;
use crate::codecs::{Compression, Compressor, assign};
use crate::compile::compile;
use crate::cost::Cluster;
use crate::error::PlanError;
use crate::plan::Plan;
use crate::simulate::{SimulateOptions, Simulation, Simulator};

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
    plan: Plan,
    workload: Workload<'_>,
    cluster: Option<&Cluster>,
    compression: Compression,
    optimizer: Optimizer,
) -> Result<PreparedPlan, PlanError> {
    Ok(with_simulator(plan, workload, cluster, compression, optimizer)?.0)
}

/// See [`prepare`]. The simulator is that of the plan, if the cluster is known.
pub(super) fn with_simulator<'c>(
    mut plan: Plan,
    workload: Workload<'_>,
    cluster: Option<&'c Cluster>,
    compression: Compression,
    optimizer: Optimizer,
) -> Result<(PreparedPlan, Option<Simulator<'c>>), PlanError> {
    if compression.compressor != Compressor::None {
        plan.compression = compression;
        plan.codecs.clear();
    }
    let programs = compile(&plan, workload.forward, workload.train)?;
    with_codecs(plan, programs, cluster, compression, optimizer)
}

/// See [`with_simulator`]. `programs` are those of the plan, or of a plan that differs in its codecs.
pub(super) fn with_codecs(
    mut plan: Plan,
    mut programs: Vec<Program>,
    cluster: Option<&Cluster>,
    compression: Compression,
    optimizer: Optimizer,
) -> Result<(PreparedPlan, Option<Simulator<'_>>), PlanError> {
    let simulator = |cluster| Simulator::new(&programs, cluster, &SimulateOptions::new(optimizer));
    let mut simulator = cluster.map(simulator).transpose()?;
    if compression.compressor != Compressor::None {
        plan.compression = compression;
        plan.codecs = compression.choose_with(&mut programs, cluster, simulator.as_mut())?;
        assign(&mut programs, &plan.codecs);
        simulator.iter_mut().try_for_each(|s| s.set_codecs(&programs))?;
    }
    let simulation = simulator.as_ref().map(|s| s.run(false)).transpose()?;
    Ok((PreparedPlan { plan, programs, simulation }, simulator))
}
