//! How a run gets its plan: made for known machines, given, or made once joiners are measured.

use fusionllm_graph::units::counted;
use fusionllm_plan::{Plan, Scheduler};
use fusionllm_program::Program;
use fusionllm_protocol::ExpectedPeers;
use fusionllm_workbench::model::Model;
use fusionllm_workbench::planning::{Planned, place, plan_blind, plan_for};
use fusionllm_workbench::profile::samples;
use fusionllm_workspace::config::{Job, Known};

use super::options::Peers;
use super::planner::Planner;
use crate::NodeError;

/// The way in which a run gets its plan.
pub(super) enum Course {
    /// The plan is made.
    Start(Planned),
    /// Joiners first measure their machines and links.
    Measure {
        count: usize,
        /// The models that the planner chooses from.
        models: Vec<Model>,
        /// A given plan, whose codecs follow the measured links.
        given: Option<Planned>,
        /// The machines and links that the user describes. They count more than measurements.
        known: Option<Known>,
    },
}

impl Course {
    pub(super) fn new(
        job: &Job,
        mut models: Vec<Model>,
        plan: Option<Plan>,
        peers: &Peers,
        known: Option<Known>,
    ) -> Result<Self, NodeError> {
        let given = match plan {
            Some(plan) => {
                check_given(&plan, job, &models[0], peers)?;
                Some(Planned::new(job, models.swap_remove(0), plan))
            }
            None => None,
        };
        Ok(match (peers, given) {
            (Peers::Joiners(count), given) if known.is_some() || must_measure(job, given.is_some()) => {
                Self::Measure { count: *count, models, given, known }
            }
            (Peers::Emulated { testbed, .. }, Some(given)) => Self::Start(place(given, testbed)?.prepared()?),
            (Peers::Emulated { testbed, .. }, None) => Self::Start(plan_for(job, models, testbed)?),
            (_, Some(given)) => Self::Start(given.prepared()?),
            (peers, None) => Self::Start(plan_blind(job, models.swap_remove(0), peers.count())?.prepared()?),
        })
    }

    /// The joiners that the run waits for.
    pub(super) fn places(&self) -> ExpectedPeers {
        match self {
            Self::Start(planned) | Self::Measure { given: Some(planned), .. } if planned.named => {
                ExpectedPeers::Named(planned.plan.peers.clone())
            }
            Self::Start(planned) => ExpectedPeers::Any(planned.plan.peers.len()),
            Self::Measure { count, .. } => ExpectedPeers::Any(*count),
        }
    }

    /// The Programs by which joiners measure operators of the job's models.
    pub(super) fn samples(&self, job: &Job) -> Vec<Program> {
        match self {
            Self::Start(_) => Vec::new(),
            Self::Measure { given: Some(given), .. } => samples(std::slice::from_ref(&given.model), job.train.batch),
            Self::Measure { models, .. } => samples(models, job.train.batch),
        }
    }

    /// The planner that makes the run's plans. `held_out` is the number of held-out samples.
    pub(super) fn planner(self, job: &Job, held_out: usize) -> Result<Planner, NodeError> {
        Ok(match self {
            // Later plans are for the same machines, or for those that are left of them.
            Self::Start(first) => Planner {
                job: first.job.clone(),
                models: vec![first.model.clone()],
                testbed: first.cluster.clone(),
                first: Some(first),
                given: None,
                known: None,
                held_out,
            },
            Self::Measure { models, given, known, .. } => {
                let mut models = models;
                models.extend(given.as_ref().map(|g| g.model.clone()).filter(|_| models.is_empty()));
                Planner { job: job.clone(), models, first: None, given, testbed: None, known, held_out }
            }
        })
    }
}

fn check_given(plan: &Plan, job: &Job, model: &Model, peers: &Peers) -> Result<(), NodeError> {
    plan.validate(&model.forward)?;
    let count = peers.count();
    if plan.peers.len() != count && !matches!(peers, Peers::Emulated { .. }) {
        return Err(NodeError::input(format!("the plan is for {}, not {count}", counted(plan.peers.len(), "peer"))));
    }
    if plan.micro_batches != job.micro_batches() {
        return Err(NodeError::input(format!(
            "the plan is for {} a step, the job has {}; plan anew",
            counted(plan.micro_batches, "micro-batch"),
            job.micro_batches()
        )));
    }
    Ok(())
}

/// Whether the joiners must be measured, for the plan or for its codecs. A single joiner is measured, too, because it
/// offloads tensors that its memory cannot hold.
fn must_measure(job: &Job, given: bool) -> bool {
    let planner = match job.plan.scheduler {
        Some(Scheduler::EqualNumber | Scheduler::EqualCompute) => false,
        Some(Scheduler::OpFence | Scheduler::Exact) | None => true,
    };
    job.compression.needs_links() || (planner && !given)
}
