//! Every way to make a plan: for known machines, for unknown ones, and from a given plan.

mod advice;
mod atoms;
mod baselines;
mod misfit;
mod options;
mod prepare;
mod scheduled;
mod space;
mod units;
mod unused;

pub use advice::{Made, advise};
pub use baselines::{equal_compute, equal_number};
pub use options::{PlanOptions, Scheduler, Workload};
pub use prepare::{PreparedPlan, prepare};
pub use scheduled::Scheduled;
pub use unused::{Unused, unused};

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use space::SearchSpace;
use unused::unused_unnamed;

use fusionllm_compress::Element;
use fusionllm_graph::units::counted;
use fusionllm_program::PeerId;

use crate::codecs::{Compression, Compressor, LossBudget, SLACK, widest_coded};
use crate::cost::Cluster;
use crate::error::PlanError;
use crate::offload::MEMORY_SHARES;
use crate::plan::Plan;
use crate::schedule::Schedule;

/// Makes a plan for one of `workloads`, on some of the cluster's devices, with the codecs of its links. The workloads
/// are the same model and batch, cut into more or fewer micro-batches.
///
/// The search does not know codecs, but it knows how small they can make messages. So the model is cut twice: for
/// messages without a codec, and for small ones. Both cuts get the codecs that suit them, and the shorter simulated
/// step wins.
///
/// # Errors
///
/// There is no workload or no schedule, the broker reaches no device, or no plan fits. The error names what is
/// missing.
pub fn schedule(workloads: &[Workload<'_>], cluster: &Cluster, options: &PlanOptions) -> Result<Scheduled, PlanError> {
    schedule_until(workloads, cluster, options, &AtomicBool::new(false))
}

/// Like [`schedule`], but once `stop` is set, the best plan so far is the result, as soon as there is one. A sentence of
/// its notes says so.
///
/// # Errors
///
/// The same as those of [`schedule`].
pub fn schedule_until(
    workloads: &[Workload<'_>],
    cluster: &Cluster,
    options: &PlanOptions,
    stop: &AtomicBool,
) -> Result<Scheduled, PlanError> {
    let mut found = best(workloads, cluster, options, stop)?;
    if stop.load(Relaxed) {
        found.notes.push("planning was stopped, so there may be a faster plan".into());
    }
    Ok(found)
}

fn best(
    workloads: &[Workload<'_>],
    cluster: &Cluster,
    options: &PlanOptions,
    stop: &AtomicBool,
) -> Result<Scheduled, PlanError> {
    let mut best = cut(workloads, cluster, options, None, stop)?;
    // A device alone has no links to compress.
    if options.compression.compressor == Compressor::None || cluster.devices().len() == 1 {
        return Ok(best);
    }
    best.compress(workloads[best.workload], options)?;
    // The baselines ignore links.
    let Some(widest) = widest_coded(workloads[best.workload].train) else { return Ok(best) };
    let goes_on = options.scheduler.needs_cluster() && !stop.load(Relaxed);
    let rule = options.compression.for_planning(widest).filter(|_| goes_on);
    // If no plan fits with smaller messages, none fitted before either.
    if let Some(rule) = rule
        && let Ok(mut other) = cut(workloads, cluster, options, Some(rule), stop)
    {
        other.compress(workloads[other.workload], options)?;
        let bound = best.lower_bound_s.min(other.lower_bound_s);
        // Rules that know the links let a step be a little longer for the sake of less lossy codecs.
        let margin = if options.compression.looks_for_need() { SLACK } else { 1.0 };
        if other.key(margin) < best.key(1.0) {
            best = other;
        }
        best.lower_bound_s = bound;
    }
    if !stop.load(Relaxed) {
        let budget = larger_budget(&best, workloads[best.workload], options, widest)?;
        best.notes.extend(budget);
    }
    Ok(best)
}

/// Budgets of loss that a user may want to know about.
const BUDGETS: [f64; 4] = [0.01, 0.02, 0.05, 0.1];

/// The least speed-up that is worth a sentence.
const WORTH: f64 = 1.05;

/// A sentence about the next larger budget of loss with which `auto` makes this plan faster. `None` if no link has the
/// strongest codec that the budget allows.
fn larger_budget(
    best: &Scheduled,
    workload: Workload<'_>,
    options: &PlanOptions,
    widest: Element,
) -> Result<Option<String>, PlanError> {
    let rule = options.compression;
    let strongest = rule.ladder(widest).pop();
    if rule.compressor != Compressor::Auto || !best.plan.codecs.iter().any(|link| Some(link.codec) == strongest) {
        return Ok(None);
    }
    let larger = BUDGETS.into_iter().filter_map(LossBudget::new).filter(|budget| *budget > rule.loss_budget);
    for loss_budget in larger {
        let compression = Compression { loss_budget, ..rule };
        if compression.ladder(widest).pop() == strongest {
            continue;
        }
        let mut other = best.clone();
        other.compress(workload, &PlanOptions { compression, ..options.clone() })?;
        let faster = best.simulation.step_s / other.simulation.step_s;
        if faster >= WORTH {
            let set = loss_budget.to_string().replace(' ', "");
            return Ok(Some(format!(
                "with up to {} a step is {faster:.1} times as fast, for about +{loss_budget} of loss: --set \
                 compression.loss_budget={set}",
                compression.ladder(widest).pop().unwrap_or_default(),
            )));
        }
    }
    Ok(None)
}

/// Makes a plan for peers of which nothing but their names is known. `scheduler` is one of the baselines; `None` for
/// [`Scheduler::EqualCompute`].
///
/// # Errors
///
/// There is no peer, or the scheduler needs the devices.
pub fn schedule_unknown(
    workload: Workload<'_>,
    peers: &[String],
    scheduler: Option<Scheduler>,
    schedule: Schedule,
) -> Result<Plan, PlanError> {
    let Workload { forward, micro_batches, .. } = workload;
    match scheduler.unwrap_or(Scheduler::EqualCompute) {
        Scheduler::EqualNumber => equal_number(forward, peers, micro_batches, schedule),
        Scheduler::EqualCompute => equal_compute(forward, peers, micro_batches, schedule),
        other => Err(PlanError::UnknownDevices { scheduler: other.name() }),
    }
}

/// A sentence about the peers for which a plan has no operator; `None` if each peer has one.
pub fn idle_note(plan: &Plan, workload: Workload<'_>) -> Option<String> {
    let (all, used) = (plan.peers.len(), plan.used().len());
    let idle = all.checked_sub(used).filter(|idle| *idle > 0)?;
    let (operators, stages) = (counted(workload.forward.nodes.len(), "operator"), counted(used, "stage"));
    let (all, enough) = (counted(all, "peer"), counted(used, "peer"));
    let reason = format!("the model's {operators} make {stages}; {enough} would do as well");
    Some(unused_unnamed(idle, &all, &reason))
}

/// Makes a plan for messages that are as small as `rule` makes them.
fn cut(
    workloads: &[Workload<'_>],
    cluster: &Cluster,
    options: &PlanOptions,
    rule: Option<Compression>,
    stop: &AtomicBool,
) -> Result<Scheduled, PlanError> {
    let (Some(&first), Some(&schedule)) = (workloads.first(), options.schedules.first()) else {
        return Err(PlanError::Plan("there is no workload, or no schedule, to choose from".into()));
    };
    if options.scheduler.needs_cluster() {
        let space = || SearchSpace::new(workloads, cluster, options, rule, stop);
        let kept = space()?.plan(options);
        let lacks_memory = match &kept {
            Ok(scheduled) => !scheduled.fits(),
            Err(e) => matches!(e, PlanError::Memory(_)),
        };
        // If offloading does not help either, the message says what memory is missing.
        let shares = MEMORY_SHARES.into_iter().filter(|_| lacks_memory);
        let mut offloaded = shares.filter_map(|share| space().ok()?.offloading(share).plan(options).ok());
        return offloaded.find(Scheduled::fits).map_or(kept, Ok);
    }
    let names: Vec<String> = cluster.devices().iter().map(|d| d.name.clone()).collect();
    let plan = schedule_unknown(first, &names, Some(options.scheduler), schedule)?;
    let lower_bound_s = SearchSpace::new(workloads, cluster, options, None, stop)?.bound(options);
    let notes = idle_note(&plan, first).into_iter().collect();
    let devices: Vec<PeerId> = plan.used().into_iter().collect();
    let (plan, cluster) = (plan.without_idle(), &cluster.select(&devices)?);
    let PreparedPlan { plan, programs, simulation } =
        prepare(plan, first, Some(cluster), Compression::default(), options.optimizer)?;
    let simulation = simulation.ok_or_else(|| PlanError::Plan("the plan was not simulated".into()))?;
    let mut scheduled = Scheduled {
        plan,
        devices,
        cluster: cluster.clone(),
        workload: 0,
        programs,
        simulation,
        estimate_s: None,
        lower_bound_s,
        notes,
    };
    scheduled.offload(first, options.optimizer, &MEMORY_SHARES)?;
    Ok(scheduled)
}
