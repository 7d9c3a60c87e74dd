//! From graphs and a cluster to a plan: tries the sizes of micro-batches, schedules and numbers of replicas there are to choose from.

use fusionllm_graph::Graph;

use super::candidates::{Candidates, classes};
use super::machines::Ways;
use super::objective::Segment;
use super::order::typical;
use super::problem::Problem;
use super::{FEW, Found, op_fence, search};

use crate::bound::lower_bound;
use crate::exact::{MAX_CUTS, MAX_UNITS, exact};
use crate::scheduler::coded;
use crate::simulate::ALIKE;
use crate::{
    Cluster, Compression, Conditions, Options, PeerId, Plan, PlanError, Scheduled, Scheduler, Workload, compile,
    simulate,
};

/// Most positions for cuts in the first search.
const MOST_CUTS: usize = 159;

/// A workload on a cluster, ready to be planned.
struct Ground<'a> {
    /// The first workload's graph, for names.
    forward: &'a Graph,
    cluster: &'a Cluster,
    ways: Ways<'a>,
    /// By device.
    class: Vec<u32>,
    /// The devices that a plan can use.
    devices: Vec<u32>,
    /// How much of its memory a device may be counted on for.
    share: f64,
    /// By which messages between stages are taken to get codecs.
    rule: Option<Compression>,
    /// By workload: the graph's candidates, on single devices.
    cases: Vec<(Candidates, Problem)>,
}

/// Workloads and numbers of replicas that are looked at closely.
const CLOSELY: usize = 2;

/// Operators times micro-batches that may be simulated to choose among the plans that look best.
const SIMULATED_RUNS: usize = 600_000;

/// How often memory is asked for more sparingly, when the simulator finds that a plan holds more than was counted.
const SPARING: usize = 3;

/// A plan over a workload's atoms, and the devices of each unit.
#[derive(PartialEq)]
struct Choice {
    workload: usize,
    found: Found,
    members: Vec<Vec<u32>>,
}

/// See [`crate::schedule`]; for [`Scheduler::OpFence`] and [`Scheduler::Exact`]. Messages between stages are taken to be as small as `rule` makes them.
pub(crate) fn plan(
    workloads: &[Workload<'_>],
    cluster: &Cluster,
    options: &Options,
    rule: Option<Compression>,
) -> Result<Scheduled, PlanError> {
    let mut ground = Ground::new(workloads, cluster, options, rule)?;
    let bound = ground.bound(options);
    let mut best: Option<(f64, Scheduled)> = None;
    for _ in 0..SPARING {
        let choices = match options.scheduler {
            Scheduler::Exact => ground.exact(options).map(|c| vec![c]),
            _ => ground.op_fence(options),
        };
        let choices = match (choices, &best) {
            (Ok(choices), _) => choices,
            (Err(e), None) => return Err(e),
            (Err(_), Some(_)) => break,
        };
        let (room, made) = ground.judge(workloads, choices, bound, options)?;
        if room >= 1.0 {
            return Ok(made);
        }
        if best.as_ref().is_none_or(|(r, _)| room > *r) {
            best = Some((room, made));
        }
        ground.share *= 0.98 * room;
        ground.cases.iter_mut().for_each(|(_, p)| p.machines.units.iter_mut().for_each(|u| u.memory *= 0.98 * room));
    }
    match best {
        Some((room, mut made)) => {
            made.notes.push(format!("some device is expected to need {:.0} % of its memory", 100.0 / room));
            Ok(made)
        }
        None => Err(ground.misfit(options)),
    }
}

/// See [`Scheduled::lower_bound_s`].
pub(crate) fn bound(workloads: &[Workload<'_>], cluster: &Cluster, options: &Options) -> Result<f64, PlanError> {
    Ok(Ground::new(workloads, cluster, options, None)?.bound(options))
}

impl<'a> Ground<'a> {
    fn new(
        workloads: &[Workload<'a>],
        cluster: &'a Cluster,
        options: &Options,
        rule: Option<Compression>,
    ) -> Result<Self, PlanError> {
        let Some(first) = workloads.first() else {
            return Err(PlanError::Plan("there is no workload to plan for".into()));
        };
        let ways = Ways::new(cluster);
        let (class, kinds) = classes(cluster.devices());
        let unreachable = ways.out_of_reach();
        let devices: Vec<u32> =
            (0..cluster.devices().len() as u32).filter(|d| unreachable.iter().all(|(u, _)| u.0 != *d)).collect();
        if devices.is_empty() {
            let (d, reason) = unreachable[0];
            return Err(PlanError::Cluster(format!(
                "no device can take part; {}: {reason}. Give a link between it and the broker's place",
                cluster.name(d)
            )));
        }
        let mut ground = Self {
            forward: first.forward,
            cluster,
            ways,
            class,
            devices,
            share: 1.0,
            rule,
            cases: Vec::with_capacity(workloads.len()),
        };
        for w in workloads {
            let mut candidates = Candidates::new(w.forward, w.train, &options.optimizer, &kinds);
            if let Some(rule) = rule {
                let ratio = rule.shrinks();
                candidates.chain.messages.iter_mut().for_each(|m| m.bytes /= ratio);
            }
            if candidates.chain.atoms == 0 {
                return Err(PlanError::Plan("the graph has no operators".into()));
            }
            let machines = {
                let whole = whole(&candidates, &ground.class);
                let groups = ground.ways.groups(&ground.devices, 1, 1.0, &whole);
                ground.ways.machines(&groups, &ground.class, &whole)
            };
            let problem = Problem::new(candidates.chain.clone(), machines, w.micro_batches);
            ground.cases.push((candidates, problem));
        }
        Ok(ground)
    }

    /// Of some plans the one with the shortest simulated step, those before it that fit the simulated memory; and the least share of what a device has by what it needs.
    fn judge(
        &self,
        workloads: &[Workload<'_>],
        choices: Vec<Choice>,
        bound: f64,
        options: &Options,
    ) -> Result<(f64, Scheduled), PlanError> {
        let mut best: Option<(f64, f64, Scheduled)> = None;
        let mut left = SIMULATED_RUNS;
        for choice in choices {
            let workload = workloads[choice.workload];
            let runs = workload.train.graph.nodes.len() * workload.micro_batches as usize;
            if best.is_some() && runs > left {
                break;
            }
            left = left.saturating_sub(runs);
            let mut made = self.scheduled(&choice, workload, bound, options);
            let cluster = self.cluster.select(&made.devices)?;
            let programs = match self.rule {
                Some(rule) => coded(&mut made.plan, workload, &cluster, rule, options.optimizer)?,
                None => compile(&made.plan, workload.forward, workload.train)?,
            };
            let conditions = Conditions { optimizer: options.optimizer, record: false };
            let simulation = simulate(&programs, &cluster, &conditions)?;
            let rooms = simulation.peers.iter().zip(cluster.devices());
            let room = rooms.map(|(p, d)| d.memory as f64 / p.peak_bytes.max(1) as f64).fold(f64::INFINITY, f64::min);
            let better = best.as_ref().is_none_or(|(r, step, _)| match room >= 1.0 && *r >= 1.0 {
                // What is no faster by more than chance does not displace what is simpler to count.
                true => simulation.step_s < (1.0 - ALIKE) * step,
                false => room > *r,
            });
            if better {
                best = Some((room, simulation.step_s, made));
            }
        }
        match best {
            Some((room, _, made)) => Ok((room, made)),
            None => Err(self.misfit(options)),
        }
    }

    fn scheduled(&self, choice: &Choice, workload: Workload<'_>, bound: f64, options: &Options) -> Scheduled {
        let Choice { found, members, .. } = choice;
        let mut used: Vec<u32> = found.segments.iter().flat_map(|g| members[g.unit as usize].clone()).collect();
        used.sort_unstable();
        used.dedup();
        let names: Vec<String> = used.iter().map(|d| self.cluster.devices()[*d as usize].name.clone()).collect();
        let atom_of = &self.cases[choice.workload].0.atom_of;
        let stage_of: Vec<u32> =
            atom_of.iter().map(|a| found.segments.partition_point(|g| g.hi <= *a) as u32).collect();
        let mut plan = Plan::from_stages(
            workload.forward,
            &stage_of,
            &vec![0; found.segments.len()],
            names,
            workload.micro_batches,
            found.schedule,
            options.scheduler.name(),
        );
        for (stage, segment) in plan.stages.iter_mut().zip(&found.segments) {
            let peers = members[segment.unit as usize].iter().filter_map(|d| used.binary_search(d).ok());
            stage.peers = peers.map(|p| p as u32).collect();
        }
        let left_out = self.ways.out_of_reach().into_iter();
        let mut notes: Vec<String> =
            left_out.map(|(d, reason)| format!("{} is left out: {reason}", self.cluster.name(d))).collect();
        let idle = self.devices.iter().filter(|d| !used.contains(d)).map(|d| self.cluster.name(PeerId(*d)));
        let idle: Vec<&str> = idle.collect();
        if !idle.is_empty() {
            notes.push(format!("left out, since a step takes no less time with them: {}", idle.join(", ")));
        }
        Scheduled {
            plan,
            devices: used.into_iter().map(PeerId).collect(),
            workload: choice.workload,
            estimate_s: Some(found.score.step),
            lower_bound_s: bound,
            notes,
        }
    }

    /// The best plans found, the best first: of the workloads and numbers of replicas that come near the best, under each schedule.
    fn op_fence(&self, options: &Options) -> Result<Vec<Choice>, PlanError> {
        let mut tried: Vec<(Vec<Found>, usize, usize)> = Vec::new();
        for (w, (_, single)) in self.cases.iter().enumerate() {
            let most = self.most_copies(single, options);
            for copies in [1, 2, 4, 8, 16, 32].into_iter().filter(|c| *c <= most) {
                let problem = self.joined(w, copies);
                let coarse = problem.restrict(&coarse_cuts(&problem));
                let known = [super::equal_number(&coarse), super::equal_compute(&coarse)];
                // For many devices, one search for all schedules is what there is time for.
                let apart = if self.devices.len() <= FEW { 1 } else { options.schedules.len() };
                let found = options.schedules.chunks(apart).filter_map(|s| search(&coarse, s, &known, false));
                tried.push((found.collect(), w, copies));
            }
        }
        let least = |found: &[Found]| found.iter().map(|f| f.score.step).fold(f64::INFINITY, f64::min);
        tried.sort_by(|a, b| least(&a.0).total_cmp(&least(&b.0)));
        let shortest = tried.first().map_or(f64::INFINITY, |t| least(&t.0));
        tried.retain(|t| least(&t.0) < 1.5 * shortest);
        // If nothing fitted, single devices are looked at more closely.
        if tried.is_empty() {
            tried.push((Vec::new(), 0, 1));
        }
        let mut choices: Vec<Choice> = Vec::new();
        for (i, (mut best, w, copies)) in tried.into_iter().enumerate() {
            let problem = self.joined(w, copies);
            let cuts = coarse_cuts(&problem);
            // What looked best is, under each schedule.
            if i < CLOSELY && problem.machines.units.len() <= FEW {
                let coarse = problem.restrict(&cuts);
                let known: Vec<Vec<Segment>> = best.iter().map(|f| f.segments.clone()).collect();
                best.extend(options.schedules.iter().filter_map(|s| op_fence(&coarse, &[*s], &known)));
            }
            for found in best.into_iter().map(|found| refined(&problem, found, &cuts)) {
                for &schedule in &options.schedules {
                    let score = problem.evaluate(&found.segments, schedule);
                    let found = Found { schedule, score, ..found.clone() };
                    let members = problem.machines.units.iter().map(|u| u.members.clone()).collect();
                    let choice = Choice { workload: w, found, members };
                    if score.feasible() && !choices.contains(&choice) {
                        choices.push(choice);
                    }
                }
            }
        }
        if choices.is_empty() {
            return Err(self.misfit(options));
        }
        choices.sort_by(|a, b| a.found.score.step.total_cmp(&b.found.score.step));
        Ok(choices)
    }

    /// A workload's problem with devices joined in groups of `copies`.
    fn joined(&self, workload: usize, copies: usize) -> Problem {
        let (candidates, single) = &self.cases[workload];
        if copies == 1 {
            return single.clone();
        }
        let whole = whole(candidates, &self.class);
        let groups = self.ways.groups(&self.devices, copies, typical(single), &whole);
        let mut machines = self.ways.machines(&groups, &self.class, &whole);
        machines.units.iter_mut().for_each(|u| u.memory *= self.share);
        single.on(machines)
    }

    /// Most devices that may hold a stage together.
    fn most_copies(&self, problem: &Problem, options: &Options) -> usize {
        let most = (options.replicas as usize).min(problem.micro_batches as usize);
        most.min(self.devices.len()).max(1)
    }

    fn exact(&self, options: &Options) -> Result<Choice, PlanError> {
        if self.devices.len() > MAX_UNITS {
            return Err(PlanError::Plan(format!(
                "the exact scheduler takes up to {MAX_UNITS} devices, here are {}; use op-fence, which says how far from the best it may be",
                self.devices.len()
            )));
        }
        let mut best: Option<(usize, Found)> = None;
        for (w, (_, problem)) in self.cases.iter().enumerate() {
            let cuts = problem.cuts(MAX_CUTS);
            let coarse = problem.restrict(&cuts);
            let known = op_fence(&coarse, &options.schedules, &[]);
            let below = known.as_ref().map(|f| f.score.step);
            let Some(found) = exact(&coarse, &options.schedules, below).or(known) else { continue };
            if best.as_ref().is_none_or(|(_, b)| found.score.better(&b.score)) {
                best = Some((w, Found { segments: spread(&found.segments, &cuts), ..found }));
            }
        }
        match best {
            Some((workload, found)) => {
                let units = &self.cases[workload].1.machines.units;
                Ok(Choice { workload, found, members: units.iter().map(|u| u.members.clone()).collect() })
            }
            None => Err(self.misfit(options)),
        }
    }

    fn bound(&self, options: &Options) -> f64 {
        let bounds = self
            .cases
            .iter()
            .map(|(_, problem)| lower_bound(problem, &options.schedules, self.most_copies(problem, options)));
        bounds.fold(f64::INFINITY, f64::min)
    }

    /// Why no plan fits.
    fn misfit(&self, options: &Options) -> PlanError {
        let problem = &self.cases[0].1;
        let units = &problem.machines.units;
        let name = |u: usize| self.cluster.name(PeerId(units[u].members[0]));
        let largest = (0..units.len()).max_by(|a, b| units[*a].memory.total_cmp(&units[*b].memory)).unwrap_or(0);
        let atoms = problem.chain.atoms;
        let (need, at) = (0..atoms)
            .map(|a| (problem.memory(largest, a, a + 1, 1), a))
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap_or((0.0, 0));
        let have = units[largest].memory;
        if need > have {
            let node = self.cases[0].0.atom_of.iter().rposition(|a| *a as usize == at).unwrap_or(0);
            return PlanError::Memory(format!(
                "operator {:?} alone needs {} with what it keeps and updates, and the largest device, {}, has {}; use a smaller micro-batch or a device with more memory",
                self.forward.nodes[node].name,
                size(need),
                name(largest),
                size(have)
            ));
        }
        let total: f64 = units.iter().map(|u| u.memory).sum();
        let state = problem.chain.state[atoms]
            - problem.chain.ties.iter().map(|t| t.bytes * (t.atoms.len() - 1) as f64).sum::<f64>();
        if state > total {
            return PlanError::Memory(format!(
                "parameters, their gradients and the optimiser's state take {}, and all {} devices together have {}: {} are missing; add devices or make the model smaller",
                size(state),
                units.len(),
                size(total),
                size(state - total)
            ));
        }
        // The plan that misses least shows where.
        let coarse = problem.restrict(&problem.cuts(MAX_CUTS));
        let schedule = options.schedules[0];
        let plan = super::equal_memory(&coarse);
        let short: Vec<String> = (0..plan.len())
            .filter_map(|s| {
                let Segment { unit, lo, hi } = plan[s];
                let fly = super::under_way(schedule, coarse.micro_batches, plan.len() - s);
                let miss = coarse.memory(unit as usize, lo as usize, hi as usize, fly) - units[unit as usize].memory;
                (miss > 0.0).then(|| format!("{} on {}", size(miss), name(unit as usize)))
            })
            .collect();
        let missing = if short.is_empty() { "some device".into() } else { short.join(", ") };
        PlanError::Memory(format!(
            "no cut fits the devices' memory: shared out by memory, there are missing {missing}; use smaller micro-batches, or add devices"
        ))
    }
}

/// Seconds of a device for one micro-batch of the whole model.
fn whole<'a>(candidates: &'a Candidates, class: &'a [u32]) -> impl Fn(u32) -> f64 + 'a {
    |d| {
        let s = &candidates.chain.seconds[class[d as usize] as usize];
        s.forward.last().copied().unwrap_or(0.0) + s.backward.last().copied().unwrap_or(0.0)
    }
}

/// A plan over the positions `cuts`, over all positions.
fn spread(segments: &[Segment], cuts: &[usize]) -> Vec<Segment> {
    let at = |i: u32| cuts[i as usize] as u32;
    segments.iter().map(|g| Segment { unit: g.unit, lo: at(g.lo), hi: at(g.hi) }).collect()
}

/// A plan over some positions, its cuts shifted to better ones among all.
fn refined(problem: &Problem, found: Found, cuts: &[usize]) -> Found {
    let segments = spread(&found.segments, cuts);
    let score = problem.evaluate(&segments, found.schedule);
    let mut tries = 3000;
    super::refine::polish(problem, Found { segments, schedule: found.schedule, score }, &mut tries)
}

/// Positions for cuts in the first search.
fn coarse_cuts(problem: &Problem) -> Vec<usize> {
    problem.cuts(MOST_CUTS.min(4 * problem.machines.units.len().max(10)))
}

fn size(bytes: f64) -> String {
    match bytes {
        b if b >= 1024.0 * 1024.0 * 1024.0 => format!("{:.1} GiB", b / 1024.0 / 1024.0 / 1024.0),
        b if b >= 1024.0 * 1024.0 => format!("{:.1} MiB", b / 1024.0 / 1024.0),
        b => format!("{:.1} KiB", b / 1024.0),
    }
}
