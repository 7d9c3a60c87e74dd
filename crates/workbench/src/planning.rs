//! From a job, and from the known machines, to a plan.

use std::sync::atomic::AtomicBool;

use fusionllm_plan::{
    Cluster, Made, Origin, Plan, PlanOptions, PreparedPlan, SavedPlan, Scheduled, Simulation, WhatIf, Workload,
    idle_note, prepare, schedule_unknown, schedule_until,
};
use fusionllm_program::{Address, PeerId, Program};
use fusionllm_workspace::config::{Choice, Job};

use crate::WorkbenchError;
use crate::model::Model;

/// A plan with the job and the model that it is for.
#[derive(Debug)]
pub struct Planned {
    /// The job, with every choice made.
    pub job: Job,
    /// The model at the chosen micro-batch size.
    pub model: Model,
    /// The plan itself.
    pub plan: Plan,
    /// Whether joiners must use the names that the plan has for them.
    pub named: bool,
    /// The machines, where they are known: device `i` is peer `i`.
    pub cluster: Option<Cluster>,
    /// The least value of the scheduler's cost formula over all plans, where it was computed.
    pub lower_bound_s: Option<f64>,
    /// Sentences about the plan, for the user.
    pub notes: Vec<String>,
    /// The training Programs, one per peer; empty until the plan is prepared.
    pub programs: Vec<Program>,
    /// The predicted step, where the machines are known; `None` until the plan is prepared.
    pub predicted: Option<Simulation>,
}

impl Planned {
    /// A plan for `model`, with no known machines.
    pub fn new(job: &Job, model: Model, plan: Plan) -> Self {
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

    /// Adds the codecs, the Programs and, where the machines are known, the prediction. A job that asks for no
    /// compression keeps the codecs of a given plan.
    pub fn prepared(self) -> Result<Self, WorkbenchError> {
        let train = &self.job.train;
        let workload = Workload {
            forward: &self.model.forward,
            train: &self.model.train,
            micro_batches: (train.batch / self.model.micro_batch) as u32,
        };
        let optimizer = train.optimizer.update_rule();
        let prepared = prepare(self.plan, workload, self.cluster.as_ref(), self.job.compression, optimizer)?;
        let PreparedPlan { plan, programs, simulation } = prepared;
        Ok(Self { plan, programs, predicted: simulation, ..self })
    }

    /// By peer: the most bytes of tensors that it has in memory during a step, with those that it keeps from step to
    /// step. `programs` must be there.
    pub fn memory_bytes(&self) -> Vec<u64> {
        let slots = self.job.train.optimizer.update_rule().slots().len() as u64;
        let of = |program: &Program| {
            let held: u64 = program.holdings.iter().map(|h| program.bytes(Address::Held { value: h.value })).sum();
            let owned: u64 = program.owned().map(|(v, _)| program.bytes(Address::Held { value: v })).sum();
            held + slots * owned + program.peak_bytes()
        };
        self.programs.iter().map(of).collect()
    }

    /// The contents of the plan file where the machines are known: they and all that the prediction needs.
    pub fn saved(&self) -> Option<SavedPlan> {
        Some(SavedPlan {
            plan: self.plan.clone(),
            cluster: self.cluster.clone()?,
            graph: self.model.forward.clone(),
            optimizer: self.job.train.optimizer.update_rule(),
            origin: Origin { lower_bound_step_s: self.lower_bound_s, solve_s: None, notes: self.notes.clone() },
        })
    }

    /// The text of the plan file.
    pub fn to_json(&self) -> Result<String, WorkbenchError> {
        Ok(match (self.saved(), &self.predicted) {
            (Some(saved), Some(predicted)) => saved.to_json(predicted)?,
            _ => self.plan.to_json()?,
        })
    }
}

/// A plan for `count` peers that nothing is known about, or for as many of them as the model has operators for.
pub fn plan_blind(job: &Job, model: Model, count: usize) -> Result<Planned, WorkbenchError> {
    let names: Vec<String> = (0..count).map(|i| format!("peer-{i}")).collect();
    let Model { micro_batch, forward, train, .. } = &model;
    let workload = Workload { forward, train, micro_batches: (job.train.batch / micro_batch) as u32 };
    let plan = schedule_unknown(workload, &names, job.plan.scheduler, job.train.schedule.value)?;
    let notes = idle_note(&plan, workload).into_iter().collect();
    Ok(Planned { named: false, notes, ..Planned::new(job, model, plan.without_idle()) })
}

/// A plan for some of the testbed's devices, with codecs for its links. It is for one of the job's
/// [`models`](crate::model::models).
///
/// # Errors
///
/// The same as those of [`schedule`](fusionllm_plan::schedule).
pub fn plan_for(job: &Job, models: Vec<Model>, testbed: &Cluster) -> Result<Planned, WorkbenchError> {
    plan_until(job, models, testbed, &AtomicBool::new(false))
}

/// Like [`plan_for`], but once `stop` is set, the best plan so far is the result.
///
/// # Errors
///
/// The same as those of [`plan_for`].
pub fn plan_until(
    job: &Job,
    mut models: Vec<Model>,
    testbed: &Cluster,
    stop: &AtomicBool,
) -> Result<Planned, WorkbenchError> {
    let Scheduled { plan, cluster, workload, programs, simulation, lower_bound_s, notes, .. } =
        schedule_until(&workloads(job, &models), testbed, &plan_options(job, testbed), stop)?;
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

/// Better machines than the testbed's, with the step of a new plan for each. See [`advise`](fusionllm_plan::advise).
///
/// # Errors
///
/// The plan is not for devices of this testbed.
pub fn advise(
    job: &Job,
    models: &[Model],
    testbed: &Cluster,
    planned: &Planned,
    stop: &AtomicBool,
) -> Result<Vec<WhatIf>, WorkbenchError> {
    let devices: Vec<PeerId> = planned.plan.peers.iter().filter_map(|name| testbed.find(name)).collect();
    let (Some(cluster), Some(simulation)) = (&planned.cluster, &planned.predicted) else { return Ok(Vec::new()) };
    let made = Made { devices: &devices, programs: &planned.programs, cluster, simulation };
    Ok(fusionllm_plan::advise(&workloads(job, models), testbed, &plan_options(job, testbed), made, stop)?)
}

fn workloads<'a>(job: &Job, models: &'a [Model]) -> Vec<Workload<'a>> {
    let of = |Model { micro_batch, forward, train, .. }: &'a Model| Workload {
        forward,
        train,
        micro_batches: (job.train.batch / micro_batch) as u32,
    };
    models.iter().map(of).collect()
}

fn plan_options(job: &Job, testbed: &Cluster) -> PlanOptions {
    PlanOptions {
        scheduler: job.plan.scheduler.unwrap_or_default(),
        optimizer: job.train.optimizer.update_rule(),
        schedules: job.train.schedules(),
        replicas: testbed.devices().len() as u32,
        compression: job.compression,
    }
}

/// Gives a plan the testbed's devices that it names, in its order.
pub fn place(mut given: Planned, testbed: &Cluster) -> Result<Planned, WorkbenchError> {
    let devices = given.plan.peers.iter().map(|name| {
        testbed.find(name).ok_or_else(|| {
            WorkbenchError::input(format!("the plan names peer {name:?}, but the testbed has no device of that name"))
        })
    });
    given.cluster = Some(testbed.select(&devices.collect::<Result<Vec<_>, _>>()?)?);
    Ok(given)
}
