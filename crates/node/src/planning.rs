//! From a job, and what is known of the machines, to a plan.

use fusionllm_plan::{
    Cluster, Compressor, Conditions, Options, Origin, Plan, SavedPlan, Scheduled, Simulation, Workload, compile,
    equal_compute, equal_number, schedule, simulate,
};

use crate::NodeError;
use crate::config::{Choice, Job, Scheduler};
use crate::model::Model;

/// A plan, and what it is for.
#[derive(Debug)]
pub struct Planned {
    /// The job, with nothing left open.
    pub job: Job,
    /// The model at the size of micro-batch that was chosen.
    pub model: Model,
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
    /// How its steps will go, where the machines are known; not before [`Self::predicted`].
    pub(crate) predicted: Option<Simulation>,
}

impl Planned {
    /// A plan that was made for `model`, of which nothing else is known.
    pub(crate) fn new(job: &Job, model: Model, plan: Plan) -> Self {
        let mut job = job.clone();
        job.train.micro_batch = Choice::made(model.micro_batch);
        job.train.schedule = Choice::made(plan.schedule);
        Self { job, model, plan, named: true, cluster: None, lower_bound_s: None, notes: Vec::new(), predicted: None }
    }

    /// The same with the codecs that the job asks for; a job that asks for none leaves a given plan its own.
    pub(crate) fn compressed(mut self) -> Result<Self, NodeError> {
        let compression = self.job.compression;
        if compression.name != Compressor::None {
            let programs = compile(&self.plan, &self.model.forward, &self.model.train)?;
            let optimizer = self.job.train.optimizer.update_rule();
            self.plan.codecs = compression.choose(&programs, self.cluster.as_ref(), optimizer)?;
            self.plan.compression = compression;
        }
        Ok(self)
    }

    /// The same with its prediction, where the machines are known.
    pub(crate) fn predicted(mut self) -> Result<Self, NodeError> {
        if let Some(cluster) = &self.cluster {
            let programs = compile(&self.plan, &self.model.forward, &self.model.train)?;
            let conditions = Conditions { optimizer: self.job.train.optimizer.update_rule(), record: false };
            self.predicted = Some(simulate(&programs, cluster, &conditions)?);
        }
        Ok(self)
    }

    /// The plan file's text: with the machines and all that its prediction was made from, where they are known.
    pub(crate) fn to_json(&self) -> Result<String, NodeError> {
        let (Some(cluster), Some(predicted)) = (&self.cluster, &self.predicted) else {
            return Ok(self.plan.to_json()?);
        };
        let saved = SavedPlan {
            plan: self.plan.clone(),
            cluster: cluster.clone(),
            graph: self.model.forward.clone(),
            optimizer: self.job.train.optimizer.update_rule(),
            origin: Origin { lower_bound_step_s: self.lower_bound_s, solve_s: None, notes: self.notes.clone() },
        };
        Ok(saved.to_json(predicted)?)
    }
}

/// A plan for so many peers of which nothing is known.
pub(crate) fn plan_blind(job: &Job, model: Model, count: usize) -> Result<Planned, NodeError> {
    let names: Vec<String> = (0..count).map(|i| format!("peer-{i}")).collect();
    let (micro_batches, order) = ((job.train.batch / model.micro_batch) as u32, job.train.schedule.value);
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
    Ok(Planned { named: false, ..Planned::new(job, model, plan) })
}

/// A plan for some of a testbed's devices, by the job's scheduler, with its links' codecs, for one of the job's [`models`](crate::model::models).
///
/// # Errors
///
/// As [`schedule`].
pub fn plan_for(job: &Job, mut models: Vec<Model>, testbed: &Cluster) -> Result<Planned, NodeError> {
    let scheduler = match job.plan.scheduler {
        Some(scheduler) => scheduler.name().parse()?,
        None => fusionllm_plan::Scheduler::default(),
    };
    let mut workloads = Vec::with_capacity(models.len());
    for Model { micro_batch, forward, train, .. } in &models {
        workloads.push(Workload { forward, train, micro_batches: (job.train.batch / micro_batch) as u32 });
    }
    let options = Options {
        scheduler,
        optimizer: job.train.optimizer.update_rule(),
        schedules: job.train.schedules(),
        replicas: testbed.devices().len() as u32,
        compression: job.compression,
    };
    let Scheduled { plan, devices, workload, lower_bound_s, notes, .. } = schedule(&workloads, testbed, &options)?;
    let cluster = Some(testbed.select(&devices)?);
    let made = Planned::new(job, models.swap_remove(workload), plan);
    Ok(Planned { cluster, lower_bound_s: Some(lower_bound_s).filter(|b| *b > 0.0), notes, ..made })
}

/// The testbed's devices that a given plan names, in its order.
pub(crate) fn place(mut given: Planned, testbed: &Cluster) -> Result<Planned, NodeError> {
    let devices = given.plan.peers.iter().map(|name| {
        testbed.find(name).ok_or_else(|| {
            NodeError::Input(format!("the plan names peer {name:?}, but the testbed has no device of that name"))
        })
    });
    given.cluster = Some(testbed.select(&devices.collect::<Result<Vec<_>, _>>()?)?);
    Ok(given)
}
