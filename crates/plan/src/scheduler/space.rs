//! The search over workloads, schedules and numbers of replicas.

use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use fusionllm_program::PeerId;

use super::atoms::ModelChain;
use super::misfit::misfit;
use super::options::{PlanOptions, Scheduler, Workload};
use super::prepare::{PreparedPlan, with_simulator};
use super::scheduled::Scheduled;
use super::units::{DeviceLinks, SEARCHED_UNITS};
use super::unused::{unused_alone, unused_together};
use crate::codecs::{Compression, assign};
use crate::cost::{Cluster, classes};
use crate::error::PlanError;
use crate::parallel::{for_each, threads};
use crate::plan::Plan;
use crate::schedule::Schedule;
use crate::search::{
    MAX_CUT_POSITIONS, MAX_THOROUGH_UNITS, MAX_UNITS, Problem, ScoredPlan, SearchDepth, StageRange, equal_compute,
    equal_number, exact, lower_bound, op_fence, polish, search, typical_message_bytes,
};
use crate::simulate::{STEADY_TOLERANCE, SimulateOptions, Simulator};

/// Most positions for cuts in the first search.
const MAX_COARSE_CUTS: usize = 159;

/// How many scopes are searched thoroughly. Of many devices, the second takes too long unless the closed form is wrong
/// about the first.
const THOROUGH_SCOPES: usize = 2;

/// The closed form is wrong about a plan if the simulated step is this many times as long.
const MISJUDGED_RATIO: f64 = 1.1;

/// Most operators times micro-batches that are simulated to choose among the best plans.
const MAX_SIMULATED_RUNS: usize = 1_200_000;

/// How often the search is repeated with less memory, if a simulated plan needs more than estimated.
const MAX_MEMORY_ATTEMPTS: usize = 3;

/// Each attempt plans for this share of the memory that would have fitted exactly.
const MEMORY_MARGIN: f64 = 0.98;

/// How many changed plans the last refinement may try.
const REFINE_TRIES: usize = 3_000;

/// Numbers of devices that may share a stage.
const COPIES: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// How many neighbourhoods are searched as if there were no other devices: those with the most speed.
const SEARCHED_NEIGHBOURHOODS: usize = 3;

/// Scopes whose estimate is at most this many times the best are refined and simulated.
const MAX_ESTIMATE_RATIO: f64 = 1.5;

/// Workloads on a cluster, ready to be planned.
pub(super) struct SearchSpace<'a> {
    cluster: &'a Cluster,
    links: DeviceLinks<'a>,
    /// The class of each device.
    class: Vec<u32>,
    /// The devices that a plan can use.
    devices: Vec<u32>,
    /// The share of each device's memory that plans may use.
    memory_share: f64,
    /// The share of a device's memory that is used where devices offload what does not fit. `None` if they do not.
    offload_share: Option<f64>,
    /// The rule by which messages between stages are assumed to be compressed.
    rule: Option<Compression>,
    /// The case of each workload.
    cases: Vec<Case<'a>>,
    /// Once it is set, the search ends with what it has.
    stop: &'a AtomicBool,
}

/// A workload's model as a chain, on single devices.
struct Case<'a> {
    workload: Workload<'a>,
    model: ModelChain,
    problem: Problem,
    /// See [`SearchSpace::communities`].
    communities: OnceLock<Vec<Vec<u32>>>,
}

/// A plan over a workload's atoms, and the devices of each unit.
#[derive(PartialEq)]
struct Choice {
    workload: usize,
    plan: ScoredPlan,
    members: Vec<Vec<u32>>,
}

/// What one search looks at.
#[derive(Clone)]
struct Scope {
    workload: usize,
    /// The only devices that are used. `None` for all.
    neighbourhood: Option<Vec<u32>>,
    /// How many devices are joined as replicas.
    copies: usize,
}

/// The plans that a first search found.
struct Trial {
    plans: Vec<ScoredPlan>,
    scope: Scope,
}

impl Trial {
    /// The shortest estimated step.
    fn step(&self) -> f64 {
        self.plans.iter().map(|p| p.score.step).fold(f64::INFINITY, f64::min)
    }
}

/// A plan that was simulated.
struct Judged {
    /// The least quotient of a device's memory and what it needs. Below 1, some device lacks memory.
    headroom: f64,
    /// Seconds of a step, with codecs if the plan will get those that suit its links.
    step_s: f64,
    scheduled: Scheduled,
}

impl Judged {
    /// Of two plans that fit, the faster one is better. An equally fast plan never replaces an earlier one.
    fn better(&self, other: &Self) -> bool {
        match self.headroom >= 1.0 && other.headroom >= 1.0 {
            true => self.step_s < (1.0 - STEADY_TOLERANCE) * other.step_s,
            false => self.headroom > other.headroom,
        }
    }
}

impl<'a> SearchSpace<'a> {
    pub(super) fn new(
        workloads: &[Workload<'a>],
        cluster: &'a Cluster,
        options: &PlanOptions,
        rule: Option<Compression>,
        stop: &'a AtomicBool,
    ) -> Result<Self, PlanError> {
        if workloads.is_empty() {
            return Err(PlanError::Plan("there is no workload to plan for".into()));
        }
        let links = DeviceLinks::new(cluster);
        let (class, kinds) = classes(cluster.devices());
        let unreachable = links.out_of_reach();
        let devices: Vec<u32> =
            (0..cluster.devices().len() as u32).filter(|d| unreachable.iter().all(|(u, _)| u.0 != *d)).collect();
        if devices.is_empty() {
            let (d, reason) = unreachable[0];
            return Err(PlanError::Cluster(format!(
                "the broker reaches no device; of {}: {reason}. Declare a link between it and the broker's place",
                cluster.name(d)
            )));
        }
        let mut space = Self {
            cluster,
            links,
            class,
            devices,
            memory_share: 1.0,
            offload_share: None,
            rule,
            cases: Vec::new(),
            stop,
        };
        for &workload in workloads {
            let model = ModelChain::new(workload.forward, workload.train, &options.optimizer, &kinds, rule);
            if model.chain.atoms == 0 {
                return Err(PlanError::Plan("the graph has no operators".into()));
            }
            let machines = {
                let seconds = model_seconds(&model, &space.class);
                let groups = space.links.groups(std::slice::from_ref(&space.devices), 1, &seconds);
                space.links.machines(&groups, &space.class, &seconds)
            };
            let problem = Problem::new(model.chain.clone(), machines, workload.micro_batches);
            space.cases.push(Case { workload, model, problem, communities: OnceLock::new() });
        }
        Ok(space)
    }

    /// The same for devices that offload what does not fit into their memory. The search counts the time that takes.
    pub(super) fn offloading(mut self, share: f64) -> Self {
        self.offload_share = Some(share);
        self.cases.iter_mut().flat_map(|c| &mut c.problem.machines.units).for_each(|u| self.links.let_offload(u));
        self
    }

    /// Makes a plan by [`Scheduler::OpFence`] or [`Scheduler::Exact`].
    pub(super) fn plan(mut self, options: &PlanOptions) -> Result<Scheduled, PlanError> {
        let bound = self.bound(options);
        let mut tried = BTreeSet::new();
        let mut best: Option<Judged> = None;
        for _ in 0..MAX_MEMORY_ATTEMPTS {
            let choices = match options.scheduler {
                Scheduler::Exact => self.exact(options, &mut tried).map(|c| vec![c]),
                _ => self.op_fence(options, &mut tried),
            };
            let choices = match (choices, &best) {
                (Ok(choices), _) => choices,
                (Err(e), None) => return Err(e),
                (Err(_), Some(_)) => break,
            };
            let judged = self.judge(choices, bound, options)?;
            let headroom = judged.headroom;
            if headroom >= 1.0 || self.offload_share.is_some() {
                return Ok(self.explained(judged.scheduled, &tried));
            }
            if best.as_ref().is_none_or(|b| headroom > b.headroom) {
                best = Some(judged);
            }
            self.memory_share *= MEMORY_MARGIN * headroom;
            let units = self.cases.iter_mut().flat_map(|c| &mut c.problem.machines.units);
            units.for_each(|u| u.memory *= MEMORY_MARGIN * headroom);
        }
        let Some(Judged { headroom, scheduled, .. }) = best else { return Err(self.misfit(options)) };
        let mut scheduled = self.explained(scheduled, &tried);
        scheduled.notes.push(format!("a device is expected to need {:.0} % of its memory", 100.0 / headroom));
        Ok(scheduled)
    }

    /// See [`Scheduled::lower_bound_s`].
    pub(super) fn bound(&self, options: &PlanOptions) -> f64 {
        let bounds = self
            .cases
            .iter()
            .map(|c| lower_bound(&c.problem, &options.schedules, self.max_copies(&c.problem, options)));
        bounds.fold(f64::INFINITY, f64::min)
    }

    /// Simulates plans and returns the best. Plans that fit the simulated memory come first, then faster ones.
    fn judge(&self, choices: Vec<Choice>, bound: f64, options: &PlanOptions) -> Result<Judged, PlanError> {
        let mut left = MAX_SIMULATED_RUNS;
        let affordable = choices.iter().take_while(|choice| {
            let workload = self.cases[choice.workload].workload;
            let runs = workload.train.graph.nodes.len() * workload.micro_batches as usize;
            let is_first = left == MAX_SIMULATED_RUNS;
            let is_affordable = is_first || runs <= left;
            left = left.saturating_sub(runs);
            is_affordable
        });
        let affordable = affordable.count();
        let mut best: Option<Judged> = None;
        for choices in choices[..affordable].chunks(threads()) {
            if best.is_some() && self.stop.load(Relaxed) {
                break;
            }
            for judged in for_each(choices, |choice| self.simulated(choice, bound, options)) {
                let judged = judged?;
                if best.as_ref().is_none_or(|b| judged.better(b)) {
                    best = Some(judged);
                }
            }
        }
        best.ok_or_else(|| self.misfit(options))
    }

    fn simulated(&self, choice: &Choice, bound: f64, options: &PlanOptions) -> Result<Judged, PlanError> {
        let workload = self.cases[choice.workload].workload;
        let used = self.used(choice);
        let devices: Vec<PeerId> = used.iter().copied().map(PeerId).collect();
        let cluster = self.cluster.select(&devices)?;
        let plan = self.whole_plan(choice, &used, options);
        let adapts = options.compression.looks_for_need();
        let rule = self.rule.filter(|_| !adapts).unwrap_or_default();
        let (PreparedPlan { plan, programs, simulation }, simulator) =
            with_simulator(plan, workload, Some(&cluster), rule, options.optimizer)?;
        let simulation = simulation.ok_or_else(|| PlanError::Plan("the plan was not simulated".into()))?;
        let mut scheduled = Scheduled {
            plan,
            devices,
            cluster: cluster.clone(),
            workload: choice.workload,
            programs,
            simulation,
            estimate_s: Some(choice.plan.score.step),
            lower_bound_s: bound,
            notes: Vec::new(),
        };
        if let Some(share) = self.offload_share {
            scheduled.offload(workload, options.optimizer, &[share])?;
        }
        let needs = scheduled.simulation.peers.iter().zip(scheduled.cluster.devices());
        let headroom = needs.map(|(p, d)| d.memory as f64 / p.peak_bytes.max(1) as f64).fold(f64::INFINITY, f64::min);
        let step_s = match adapts {
            true => {
                let programs = &mut scheduled.programs;
                let simulator = match simulator.filter(|_| scheduled.plan.offload.is_empty()) {
                    Some(simulator) => simulator,
                    None => Simulator::new(programs, &cluster, &SimulateOptions::new(options.optimizer))?,
                };
                let step_s = options.compression.shortest_step_s(programs, &cluster, simulator)?;
                assign(programs, &scheduled.plan.codecs);
                step_s
            }
            false => scheduled.simulation.step_s,
        };
        Ok(Judged { headroom, step_s, scheduled })
    }

    /// The devices that a plan uses, ascending.
    fn used(&self, choice: &Choice) -> Vec<u32> {
        let members = |g: &StageRange| choice.members[g.unit as usize].clone();
        let mut used: Vec<u32> = choice.plan.stages.iter().flat_map(members).collect();
        used.sort_unstable();
        used.dedup();
        used
    }

    fn whole_plan(&self, choice: &Choice, used: &[u32], options: &PlanOptions) -> Plan {
        let Case { workload, model, .. } = &self.cases[choice.workload];
        let stages = &choice.plan.stages;
        let names: Vec<String> = used.iter().map(|d| self.cluster.devices()[*d as usize].name.clone()).collect();
        let stage_of: Vec<u32> = model.atom_of.iter().map(|a| stages.partition_point(|g| g.hi <= *a) as u32).collect();
        let mut plan = Plan::from_stages(
            workload.forward,
            &stage_of,
            &vec![0; stages.len()],
            names,
            workload.micro_batches,
            choice.plan.schedule,
            options.scheduler.name(),
        );
        for (stage, range) in plan.stages.iter_mut().zip(stages) {
            let peers = choice.members[range.unit as usize].iter().filter_map(|d| used.binary_search(d).ok());
            stage.peers = peers.map(|p| p as u32).collect();
        }
        plan
    }

    /// The plan with sentences about the devices that it does not use. `tried` are those that any candidate used.
    fn explained(&self, mut scheduled: Scheduled, tried: &BTreeSet<u32>) -> Scheduled {
        let unreachable = self.links.out_of_reach().into_iter();
        let mut notes: Vec<String> =
            unreachable.map(|(d, reason)| unused_alone(self.cluster.name(d), reason)).collect();
        let idle = |is_tried: bool| {
            let idle = self.devices.iter().filter(|d| !scheduled.devices.contains(&PeerId(**d)));
            let names = idle.filter(|d| tried.contains(d) == is_tried).map(|d| self.cluster.name(PeerId(*d)));
            names.collect::<Vec<_>>().join(", ")
        };
        let reasons = [
            (idle(true), "of the plans that were tried, none with them is faster".to_owned()),
            (idle(false), format!("the search takes the {SEARCHED_UNITS} fastest groups of devices at most")),
        ];
        let reasons = reasons.iter().filter(|(names, _)| !names.is_empty());
        notes.extend(reasons.map(|(names, reason)| unused_together(names, reason)));
        notes.append(&mut scheduled.notes);
        Scheduled { notes, ..scheduled }
    }

    /// The best plans found, the best first. They cover the scopes that come near the best, under each schedule.
    fn op_fence(&self, options: &PlanOptions, tried: &mut BTreeSet<u32>) -> Result<Vec<Choice>, PlanError> {
        let mut choices: Vec<Choice> = Vec::new();
        let are_many = self.devices.len() > MAX_THOROUGH_UNITS;
        // For each scope that was searched thoroughly: whether it has replicas.
        let mut thorough: Vec<bool> = Vec::with_capacity(THOROUGH_SCOPES);
        let mut is_misjudged: Option<bool> = None;
        for Trial { plans: mut best, scope } in self.trials(options, tried) {
            if !choices.is_empty() && self.stop.load(Relaxed) {
                break;
            }
            let workload = scope.workload;
            let problem = self.problem(&scope);
            let cuts = coarse_cuts(&problem);
            let has_replicas = scope.copies > 1;
            let is_due = match thorough[..] {
                // The closed form is most often wrong about the sums of replicas.
                [first] if are_many => {
                    first != has_replicas && *is_misjudged.get_or_insert_with(|| self.misjudges(&choices, options))
                }
                _ => thorough.len() < THOROUGH_SCOPES,
            };
            if is_due
                && (best.is_empty() || !self.stop.load(Relaxed))
                && problem.machines.units.len() <= MAX_THOROUGH_UNITS
            {
                thorough.push(has_replicas);
                let coarse = problem.with_cuts(&cuts);
                let known: Vec<Vec<StageRange>> = best.iter().map(|f| f.stages.clone()).collect();
                best.extend(op_fence(&coarse, &options.schedules, &known));
            }
            let members: Vec<Vec<u32>> = problem.machines.units.iter().map(|u| u.members.clone()).collect();
            let scheduled = |plan| schedules_of(plan, &members, options).into_iter().map(move |s| (&plan.stages, s));
            let rough: Vec<(&Vec<StageRange>, Schedule)> = best.iter().flat_map(scheduled).collect();
            for plan in for_each(&rough, |(stages, schedule)| refined(&problem, stages, *schedule, &cuts)) {
                let feasible = plan.score.feasible();
                let choice = Choice { workload, plan, members: members.clone() };
                if feasible && !choices.contains(&choice) {
                    choices.push(choice);
                }
            }
        }
        if choices.is_empty() {
            return Err(self.misfit(options));
        }
        choices.sort_by(|a, b| a.plan.score.step.total_cmp(&b.plan.score.step));
        Ok(choices)
    }

    /// Whether the plan that the closed form finds best takes longer than it says, see [`MISJUDGED_RATIO`].
    fn misjudges(&self, choices: &[Choice], options: &PlanOptions) -> bool {
        let best = choices.iter().min_by(|a, b| a.plan.score.step.total_cmp(&b.plan.score.step));
        let simulated = best.and_then(|best| Some((best, self.simulated(best, 0.0, options).ok()?)));
        simulated.is_some_and(|(best, judged)| judged.step_s > MISJUDGED_RATIO * best.plan.score.step)
    }

    /// The first search: for each scope, the best coarse plans. The best come first. It adds the devices that it tries.
    fn trials(&self, options: &PlanOptions, tried: &mut BTreeSet<u32>) -> Vec<Trial> {
        let mut trials: Vec<Trial> = Vec::new();
        let is_found = AtomicBool::new(false);
        let quick = |scope: &Scope| {
            if is_found.load(Relaxed) && self.stop.load(Relaxed) {
                return None;
            }
            let problem = self.problem(scope);
            let coarse = problem.with_cuts(&coarse_cuts(&problem));
            let known = [equal_number(&coarse), equal_compute(&coarse)];
            let searched = self.at_once(options).filter_map(|s| search(&coarse, s, &known, SearchDepth::Quick));
            let plans: Vec<ScoredPlan> = searched.collect();
            is_found.fetch_or(!plans.is_empty(), Relaxed);
            let units = problem.machines.units;
            Some((Trial { plans, scope: scope.clone() }, units.into_iter().flat_map(|u| u.members)))
        };
        for (trial, members) in for_each(&self.scopes(options), quick).into_iter().flatten() {
            tried.extend(members);
            trials.push(trial);
        }
        trials.sort_by(|a, b| a.step().total_cmp(&b.step()));
        let shortest = trials.first().map_or(f64::INFINITY, Trial::step);
        trials.retain(|t| t.step() < MAX_ESTIMATE_RATIO * shortest);
        // If nothing fits, single devices are searched thoroughly.
        if trials.is_empty() {
            let scope = Scope { workload: 0, neighbourhood: None, copies: 1 };
            trials.push(Trial { plans: Vec::new(), scope });
        }
        trials
    }

    /// The schedules that one quick search covers. With many devices, one search for each would take too long.
    fn at_once<'o>(&self, options: &'o PlanOptions) -> impl Iterator<Item = &'o [Schedule]> {
        let together = if self.devices.len() <= MAX_THOROUGH_UNITS { 1 } else { options.schedules.len() };
        options.schedules.chunks(together)
    }

    /// The scopes of a search: each workload with each number of replicas, on all devices. If they are too many for a
    /// thorough search, then also on the fastest neighbourhoods alone: a search among many devices easily misses a plan
    /// that uses few of them well.
    fn scopes(&self, options: &PlanOptions) -> Vec<Scope> {
        let mut scopes = Vec::new();
        for (workload, case) in self.cases.iter().enumerate() {
            let mut among = vec![(None, self.devices.len())];
            if self.devices.len() > MAX_THOROUGH_UNITS {
                let seconds = model_seconds(&case.model, &self.class);
                let speed = |members: &Vec<u32>| members.iter().map(|d| 1.0 / seconds(*d)).sum::<f64>();
                let mut fastest = self.neighbourhoods(case);
                fastest.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
                fastest.truncate(SEARCHED_NEIGHBOURHOODS);
                among.extend(fastest.into_iter().map(|members| (Some(members.clone()), members.len())));
            }
            let most = self.max_copies(&case.problem, options);
            for (neighbourhood, devices) in among {
                let copies = COPIES.into_iter().filter(|c| *c <= most.min(devices));
                scopes.extend(copies.map(|copies| Scope { workload, neighbourhood: neighbourhood.clone(), copies }));
            }
        }
        scopes
    }

    /// The communities of the devices, for the messages of this workload.
    fn communities<'c>(&self, case: &'c Case<'_>) -> &'c [Vec<u32>] {
        let found = || self.links.communities(&self.devices, typical_message_bytes(&case.problem));
        case.communities.get_or_init(found)
    }

    /// The communities, divided into communities again until they have few devices. What has many and cannot be divided
    /// is left out.
    fn neighbourhoods(&self, case: &Case<'_>) -> Vec<Vec<u32>> {
        let bytes = typical_message_bytes(&case.problem);
        let mut found = Vec::new();
        let mut left = self.communities(case).to_vec();
        while let Some(members) = left.pop() {
            if members.len() <= MAX_THOROUGH_UNITS {
                found.push(members);
                continue;
            }
            let parts = self.links.communities(&members, bytes);
            if parts.len() > 1 {
                left.extend(parts);
            }
        }
        found.sort();
        found
    }

    /// A workload's problem on the scope's devices.
    fn problem(&self, Scope { workload, neighbourhood, copies }: &Scope) -> Problem {
        let case = &self.cases[*workload];
        let Case { model, problem, .. } = case;
        if neighbourhood.is_none() && *copies == 1 {
            return problem.clone();
        }
        let communities = neighbourhood.as_ref().map_or_else(|| self.communities(case), std::slice::from_ref);
        let seconds = model_seconds(model, &self.class);
        let groups = self.links.groups(communities, *copies, &seconds);
        let mut machines = self.links.machines(&groups, &self.class, &seconds);
        machines.units.iter_mut().for_each(|u| u.memory *= self.memory_share);
        if self.offload_share.is_some() {
            machines.units.iter_mut().for_each(|u| self.links.let_offload(u));
        }
        problem.with_machines(machines)
    }

    /// Most devices that may share a stage.
    fn max_copies(&self, problem: &Problem, options: &PlanOptions) -> usize {
        let most = (options.replicas as usize).min(problem.micro_batches as usize);
        most.min(self.devices.len()).max(1)
    }

    fn exact(&self, options: &PlanOptions, tried: &mut BTreeSet<u32>) -> Result<Choice, PlanError> {
        if self.devices.len() > MAX_UNITS {
            return Err(PlanError::Plan(format!(
                "the exact scheduler takes up to {MAX_UNITS} devices, but there are {}; use op-fence",
                self.devices.len()
            )));
        }
        tried.extend(&self.devices);
        let mut best: Option<(usize, ScoredPlan)> = None;
        for (w, Case { problem, .. }) in self.cases.iter().enumerate() {
            let cuts = problem.cuts(MAX_CUT_POSITIONS);
            let coarse = problem.with_cuts(&cuts);
            let known = op_fence(&coarse, &options.schedules, &[]);
            let below = known.as_ref().map(|f| f.score.step);
            let Some(plan) = exact(&coarse, &options.schedules, below).or(known) else { continue };
            if best.as_ref().is_none_or(|(_, b)| plan.score.better(&b.score)) {
                best = Some((w, ScoredPlan { stages: spread(&plan.stages, &cuts), ..plan }));
            }
        }
        let Some((workload, plan)) = best else { return Err(self.misfit(options)) };
        let units = &self.cases[workload].problem.machines.units;
        Ok(Choice { workload, plan, members: units.iter().map(|u| u.members.clone()).collect() })
    }

    /// The error that says why no plan fits.
    fn misfit(&self, options: &PlanOptions) -> PlanError {
        let Case { workload, model, problem, .. } = &self.cases[0];
        misfit(workload.forward, self.cluster, model, problem, options.schedules[0])
    }
}

/// The schedules that a plan is tried with. `members` are the devices of each unit. A device alone has nobody to wait for,
/// and 1F1B keeps the fewest activations.
fn schedules_of(plan: &ScoredPlan, members: &[Vec<u32>], options: &PlanOptions) -> Vec<Schedule> {
    let alone = matches!(&plan.stages[..], [stage] if members[stage.unit as usize].len() == 1);
    if alone && options.schedules.contains(&Schedule::OneFOneB) {
        vec![Schedule::OneFOneB]
    } else {
        options.schedules.clone()
    }
}

/// By device: seconds for one micro-batch of the whole model.
fn model_seconds<'m>(model: &'m ModelChain, class: &'m [u32]) -> impl Fn(u32) -> f64 + 'm {
    |d| {
        let s = &model.chain.seconds[class[d as usize] as usize];
        s.forward.last().copied().unwrap_or(0.0) + s.backward.last().copied().unwrap_or(0.0)
    }
}

/// A plan over the positions `cuts`, as a plan over all positions.
fn spread(stages: &[StageRange], cuts: &[usize]) -> Vec<StageRange> {
    let at = |i: u32| cuts[i as usize] as u32;
    stages.iter().map(|g| StageRange { unit: g.unit, lo: at(g.lo), hi: at(g.hi) }).collect()
}

/// A plan over the positions `cuts`, refined over all positions for a schedule.
fn refined(problem: &Problem, stages: &[StageRange], schedule: Schedule, cuts: &[usize]) -> ScoredPlan {
    let plan = problem.scored(spread(stages, cuts), schedule);
    polish(problem, plan, &mut { REFINE_TRIES })
}

/// Positions for cuts in the first search.
fn coarse_cuts(problem: &Problem) -> Vec<usize> {
    problem.cuts(MAX_COARSE_CUTS.min(4 * problem.machines.units.len().max(10)))
}
