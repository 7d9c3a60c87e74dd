//! From a job, and what is known of the machines, to a plan.

use fusionllm_plan::{
    Cluster, Origin, Plan, PlanError, PlanOptions, Prepared, Program, SavedPlan, Scheduled, Simulation, Workload,
    prepare, schedule, schedule_unknown,
};

use crate::NodeError;
use crate::config::{Choice, Job};
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
    /// The least that the scheduler's cost formula gives any plan, where it was computed.
    pub lower_bound_s: Option<f64>,
    /// What people should know of it.
    pub notes: Vec<String>,
    /// The training Programs, one per peer; empty before [`Self::prepared`].
    pub programs: Vec<Program>,
    /// The predicted step, where the machines are known; not before [`Self::prepared`].
    pub predicted: Option<Simulation>,
}

impl Planned {
    /// A plan that was made for `model`, of which nothing else is known.
    pub(crate) fn new(job: &Job, model: Model, plan: Plan) -> Self {
        let mut job = job.clone();
        job.train.micro_batch = Choice::made(model.micro_batch);
        job.train.schedule = Choice::made(plan.schedule);
        Self {
            job,
            model,
            plan,
            named: true,
            cluster: None,
            lower_bound_s: None,
            notes: Vec::new(),
            programs: Vec::new(),
            predicted: None,
        }
    }

    /// The same with its codecs, its Programs, and, where the machines are known, its prediction. A job that asks for no
    /// compression keeps a given plan's codecs.
    pub(crate) fn prepared(self) -> Result<Self, NodeError> {
        let train = &self.job.train;
        let workload = Workload {
            forward: &self.model.forward,
            train: &self.model.train,
            micro_batches: (train.batch / self.model.micro_batch) as u32,
        };
        let optimizer = train.optimizer.update_rule();
        let prepared =
            prepare(self.plan, workload, self.cluster.as_ref(), self.job.compression, optimizer).map_err(hinted)?;
        let Prepared { plan, programs, simulation } = prepared;
        Ok(Self { plan, programs, predicted: simulation, ..self })
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

/// An error that the user can act on.
fn hinted(e: PlanError) -> NodeError {
    match e.hint() {
        Some(hint) => NodeError::Input(format!("{e}\n  hint: {hint}")),
        None => e.into(),
    }
}

/// A plan for so many peers of which nothing is known.
pub(crate) fn plan_blind(job: &Job, model: Model, count: usize) -> Result<Planned, NodeError> {
    let names: Vec<String> = (0..count).map(|i| format!("peer-{i}")).collect();
    let Model { micro_batch, forward, train, .. } = &model;
    let workload = Workload { forward, train, micro_batches: (job.train.batch / micro_batch) as u32 };
    let scheduler = job.plan.scheduler.map(|s| s.name().parse()).transpose()?;
    let plan = schedule_unknown(workload, &names, scheduler, job.train.schedule.value).map_err(hinted)?;
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
    let options = PlanOptions {
        scheduler,
        optimizer: job.train.optimizer.update_rule(),
        schedules: job.train.schedules(),
        replicas: testbed.devices().len() as u32,
        compression: job.compression,
    };
    let Scheduled { plan, cluster, workload, programs, simulation, lower_bound_s, notes, .. } =
        schedule(&workloads, testbed, &options)?;
    let made = Planned::new(job, models.swap_remove(workload), plan);
    Ok(Planned {
        cluster: Some(cluster),
        lower_bound_s: Some(lower_bound_s).filter(|b| *b > 0.0),
        notes,
        programs,
        predicted: Some(simulation),
        ..made
    })
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
