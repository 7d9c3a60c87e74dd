//! From a job, and what is known of the machines, to a plan.

use fusionllm_plan::{
    Cluster, Compressor, Conditions, Options, Plan, Scheduled, Simulation, Workload, compile, equal_compute,
    equal_number, schedule, simulate,
};

use crate::NodeError;
use crate::config::{Job, Scheduler};
use crate::model::Model;

/// A plan, and what it is for.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// Who runs what.
    pub plan: Plan,
    /// Whether peers join under the names that it has for them.
    pub named: bool,
    /// The machines that run it, where they are known: device `i` is peer `i`.
    pub cluster: Option<Cluster>,
    /// Seconds that no plan's step undercuts, where they were reckoned.
    pub lower_bound_s: Option<f64>,
    /// What people should know of it.
    pub notes: Vec<String>,
}

impl Planned {
    /// The same with the codecs that the job asks for; a job that asks for none leaves a given plan its own.
    pub(crate) fn compressed(mut self, job: &Job, model: &Model) -> Result<Self, NodeError> {
        if job.compression.name != Compressor::None {
            let programs = compile(&self.plan, &model.forward, &model.train)?;
            self.plan.codecs =
                job.compression.choose(&programs, self.cluster.as_ref(), job.train.optimizer.update_rule())?;
            self.plan.compression = job.compression;
        }
        Ok(self)
    }

    /// How its steps will go, where the machines are known.
    pub(crate) fn predict(&self, job: &Job, model: &Model) -> Result<Option<Simulation>, NodeError> {
        let Some(cluster) = &self.cluster else { return Ok(None) };
        let programs = compile(&self.plan, &model.forward, &model.train)?;
        let conditions = Conditions { optimizer: job.train.optimizer.update_rule(), record: false };
        Ok(Some(simulate(&programs, cluster, &conditions)?))
    }
}

/// A plan for so many peers of which nothing is known.
pub(crate) fn plan_blind(job: &Job, model: &Model, count: usize) -> Result<Planned, NodeError> {
    let names: Vec<String> = (0..count).map(|i| format!("peer-{i}")).collect();
    let (micro_batches, order) = (job.micro_batches(), job.train.schedule);
    let plan = match job.plan.scheduler {
        None | Some(Scheduler::EqualCompute) => equal_compute(&model.forward, &names, micro_batches, order)?,
        Some(Scheduler::EqualNumber) => equal_number(&model.forward, &names, micro_batches, order)?,
        Some(scheduler) => {
            return Err(NodeError::Input(format!(
                "the scheduler {} must know the devices and their links\n  hint: describe them in a file for --testbed, or use equal-compute",
                scheduler.name()
            )));
        }
    };
    Ok(Planned { plan, named: false, cluster: None, lower_bound_s: None, notes: Vec::new() })
}

/// A plan for some of a testbed's devices, by the job's scheduler, with its links' codecs.
///
/// # Errors
///
/// As [`schedule`].
pub fn plan_for(job: &Job, model: &Model, testbed: &Cluster) -> Result<Planned, NodeError> {
    let scheduler = match job.plan.scheduler {
        Some(scheduler) => scheduler.name().parse()?,
        None => fusionllm_plan::Scheduler::default(),
    };
    let workload = Workload { forward: &model.forward, train: &model.train, micro_batches: job.micro_batches() };
    let options = Options {
        scheduler,
        optimizer: job.train.optimizer.update_rule(),
        schedules: vec![job.train.schedule],
        replicas: testbed.devices().len() as u32,
        compression: job.compression,
    };
    let Scheduled { plan, devices, lower_bound_s, notes, .. } = schedule(&[workload], testbed, &options)?;
    let cluster = Some(testbed.select(&devices)?);
    Ok(Planned { plan, named: true, cluster, lower_bound_s: Some(lower_bound_s), notes })
}

/// The testbed's devices that a given plan names, in its order.
pub(crate) fn place(plan: Plan, testbed: &Cluster) -> Result<Planned, NodeError> {
    let devices = plan.peers.iter().map(|name| {
        testbed.find(name).ok_or_else(|| {
            NodeError::Input(format!("the plan names peer {name:?}, but the testbed has no device of that name"))
        })
    });
    let cluster = testbed.select(&devices.collect::<Result<Vec<_>, _>>()?)?;
    Ok(Planned { plan, named: true, cluster: Some(cluster), lower_bound_s: None, notes: Vec::new() })
}
