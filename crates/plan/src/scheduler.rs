//! The one door to everything that makes plans.

use std::fmt;
use std::str::FromStr;

use fusionllm_graph::{Graph, TrainGraph};

use crate::auto;
use crate::cut::{equal_compute, equal_number};
use crate::{
    Cluster, Compression, Compressor, Conditions, Optimizer, PeerId, Plan, PlanError, Program, Schedule, compile,
    fence, simulate,
};

/// Who cuts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Scheduler {
    /// The same number of operators for every device, in the order listed.
    EqualNumber,
    /// The same number of floating-point operations for every device, in the order listed.
    EqualCompute,
    /// By communities of bandwidth, their order, and dynamic programming over cuts: see [`crate::fence`].
    #[default]
    OpFence,
    /// The best of all, for a few devices: see [`crate::exact`].
    Exact,
}

impl Scheduler {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::EqualNumber, Self::EqualCompute, Self::OpFence, Self::Exact];

    /// What users call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::EqualNumber => "equal-number",
            Self::EqualCompute => "equal-compute",
            Self::OpFence => "op-fence",
            Self::Exact => "exact",
        }
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scheduler {
    type Err = PlanError;

    fn from_str(s: &str) -> Result<Self, PlanError> {
        Self::ALL.into_iter().find(|k| k.name() == s).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|k| k.name()).collect();
            PlanError::Plan(format!("there is no scheduler {s:?}; use one of {}", known.join(", ")))
        })
    }
}

/// A model at one size of micro-batch. Where the size is free, a planner is given one for each.
#[derive(Debug, Clone, Copy)]
pub struct Workload<'a> {
    /// What plans are made for.
    pub forward: &'a Graph,
    /// With its backward operators.
    pub train: &'a TrainGraph,
    /// Micro-batches a step at this size.
    pub micro_batches: u32,
}

/// What a planner may choose, and what it must know besides model and machines.
#[derive(Debug, Clone)]
pub struct Options {
    /// Who cuts.
    pub scheduler: Scheduler,
    /// How parameters are updated, which decides how much is kept beside them.
    pub optimizer: Optimizer,
    /// The schedules to choose from, the preferred first; the baselines take the first.
    pub schedules: Vec<Schedule>,
    /// Most peers that may hold a stage together.
    pub replicas: u32,
    /// How links get codecs.
    pub compression: Compression,
}

/// A plan and how it came about.
#[derive(Debug, Clone, PartialEq)]
pub struct Scheduled {
    /// The plan. Its peers are the devices it uses, in the cluster's order.
    pub plan: Plan,
    /// By peer of the plan: its device. [`Cluster::select`] with these gives the cluster whose device `i` is peer `i`.
    pub devices: Vec<PeerId>,
    /// Which of the workloads it is for.
    pub workload: usize,
    /// Seconds of a step as [`crate::fence::Problem::evaluate`] counts; `None` from planners that do not ask.
    pub estimate_s: Option<f64>,
    /// Seconds that no plan's step undercuts by the same count, whichever of the workloads, schedules and replicas it takes: see [`crate::bound`].
    pub lower_bound_s: f64,
    /// Sentences for whoever asked, such as which devices were left out and why.
    pub notes: Vec<String>,
}

/// Makes a plan for one of `workloads` (the same model and batch, cut into more or fewer micro-batches) on some of the cluster's devices, with the codecs of its links.
///
/// Planners know no codecs, but the messages they cut between may be as small as codecs make them. Cuts for messages as they are and for smaller ones each get the codecs
/// that suit them, and the simulator has the last word among them.
///
/// # Errors
///
/// There is nothing to choose from, no device that the broker reaches, or no plan that fits: the error says what is missing where.
pub fn schedule(workloads: &[Workload<'_>], cluster: &Cluster, options: &Options) -> Result<Scheduled, PlanError> {
    let mut best = cut(workloads, cluster, options, None)?;
    if options.compression.name == Compressor::None {
        return Ok(best);
    }
    let (unfit, step_s) = compress(&mut best, workloads, cluster, options)?;
    // Baselines ask nothing of links.
    let rule = match options.scheduler {
        Scheduler::OpFence | Scheduler::Exact => options.compression.for_cuts(),
        Scheduler::EqualNumber | Scheduler::EqualCompute => None,
    };
    let Some(rule) = rule else { return Ok(best) };
    // What does not fit with smaller messages did not fit before either.
    let Ok(mut other) = cut(workloads, cluster, options, Some(rule)) else { return Ok(best) };
    let (other_unfit, other_step_s) = compress(&mut other, workloads, cluster, options)?;
    let bound = best.lower_bound_s.min(other.lower_bound_s);
    // As link by link, a step may take a little longer for the sake of milder codecs, and fewer things that must go as predicted.
    let margin = if options.compression.name == Compressor::Auto { auto::SLACK } else { 1.0 };
    if (other_unfit, margin * other_step_s) < (unfit, step_s) {
        best = other;
    }
    best.lower_bound_s = bound;
    Ok(best)
}

/// Gives a plan its codecs; whether some device has too little memory for it, and seconds of a step.
fn compress(
    made: &mut Scheduled,
    workloads: &[Workload<'_>],
    cluster: &Cluster,
    options: &Options,
) -> Result<(bool, f64), PlanError> {
    let cluster = cluster.select(&made.devices)?;
    let programs = coded(&mut made.plan, workloads[made.workload], &cluster, options.compression, options.optimizer)?;
    let conditions = Conditions { optimizer: options.optimizer, record: false };
    let simulation = simulate(&programs, &cluster, &conditions)?;
    let misfit = simulation.peers.iter().zip(cluster.devices()).any(|(p, d)| p.peak_bytes > d.memory);
    Ok((misfit, simulation.step_s))
}

/// The programs of a plan that is given the codecs which suit it on `cluster`, whose devices are its peers.
pub(crate) fn coded(
    plan: &mut Plan,
    workload: Workload<'_>,
    cluster: &Cluster,
    rule: Compression,
    optimizer: Optimizer,
) -> Result<Vec<Program>, PlanError> {
    let Workload { forward, train, .. } = workload;
    plan.compression = rule;
    plan.codecs = rule.choose(&compile(plan, forward, train)?, Some(cluster), optimizer)?;
    compile(plan, forward, train)
}

/// A plan made for messages that are as small as a rule of compression makes them.
fn cut(
    workloads: &[Workload<'_>],
    cluster: &Cluster,
    options: &Options,
    rule: Option<Compression>,
) -> Result<Scheduled, PlanError> {
    let (Some(first), Some(&order)) = (workloads.first(), options.schedules.first()) else {
        return Err(PlanError::Plan("there is no workload, or no schedule, to choose from".into()));
    };
    let names: Vec<String> = cluster.devices().iter().map(|d| d.name.clone()).collect();
    let plan = match options.scheduler {
        Scheduler::EqualNumber => equal_number(first.forward, &names, first.micro_batches, order)?,
        Scheduler::EqualCompute => equal_compute(first.forward, &names, first.micro_batches, order)?,
        Scheduler::OpFence | Scheduler::Exact => return fence::plan(workloads, cluster, options, rule),
    };
    let devices = (0..names.len() as u32).map(PeerId).collect();
    let bound = fence::bound(workloads, cluster, options)?;
    Ok(Scheduled { plan, devices, workload: 0, estimate_s: None, lower_bound_s: bound, notes: Vec::new() })
}
