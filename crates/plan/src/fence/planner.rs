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
use crate::{Cluster, Options, PeerId, Plan, PlanError, Scheduled, Scheduler, Stage, Workload};

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
    /// By workload: the graph's candidates, on single devices.
    cases: Vec<(Candidates, Problem)>,
}

/// See [`crate::schedule`]; for [`Scheduler::OpFence`] and [`Scheduler::Exact`].
pub(crate) fn plan(workloads: &[Workload<'_>], cluster: &Cluster, options: &Options) -> Result<Scheduled, PlanError> {
    let ground = Ground::new(workloads, cluster, options)?;
    let (workload, found, machines) = match options.scheduler {
        Scheduler::Exact => ground.exact(options)?,
        _ => ground.op_fence(options)?,
    };
    let candidates = &ground.cases[workload].0;
    let forward = workloads[workload].forward;
    let micro_batches = workloads[workload].micro_batches;
    let mut used: Vec<u32> = found.segments.iter().flat_map(|g| machines[g.unit as usize].clone()).collect();
    used.sort_unstable();
    used.dedup();
    let names: Vec<String> = used.iter().map(|d| cluster.devices()[*d as usize].name.clone()).collect();
    let stage_of: Vec<u32> =
        candidates.atom_of.iter().map(|a| found.segments.partition_point(|g| g.hi <= *a) as u32).collect();
    let first_peer = vec![0; found.segments.len()];
    let mut plan = Plan::from_stages(
        forward,
        &stage_of,
        &first_peer,
        names,
        micro_batches,
        found.schedule,
        options.scheduler.name(),
    );
    for (stage, segment) in plan.stages.iter_mut().zip(&found.segments) {
        let peers = machines[segment.unit as usize].iter().filter_map(|d| used.binary_search(d).ok());
        *stage = Stage { peers: peers.map(|p| p as u32).collect(), nodes: std::mem::take(&mut stage.nodes) };
    }
    let mut notes: Vec<String> = Vec::new();
    for (d, reason) in ground.ways.out_of_reach() {
        notes.push(format!("{} is left out: {reason}", cluster.name(d)));
    }
    let idle: Vec<&str> =
        ground.devices.iter().filter(|d| !used.contains(d)).map(|d| cluster.name(PeerId(*d))).collect();
    if !idle.is_empty() {
        notes.push(format!("left out, since a step takes no less time with them: {}", idle.join(", ")));
    }
    let lower_bound_s = ground.bound(options).min(found.score.step);
    Ok(Scheduled {
        plan,
        devices: used.into_iter().map(PeerId).collect(),
        workload,
        estimate_s: Some(found.score.step),
        lower_bound_s,
        notes,
    })
}

/// See [`Scheduled::lower_bound_s`].
pub(crate) fn bound(workloads: &[Workload<'_>], cluster: &Cluster, options: &Options) -> Result<f64, PlanError> {
    Ok(Ground::new(workloads, cluster, options)?.bound(options))
}

impl<'a> Ground<'a> {
    fn new(workloads: &[Workload<'a>], cluster: &'a Cluster, options: &Options) -> Result<Self, PlanError> {
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
        let mut ground =
            Self { forward: first.forward, cluster, ways, class, devices, cases: Vec::with_capacity(workloads.len()) };
        for w in workloads {
            let candidates = Candidates::new(w.forward, w.train, &options.optimizer, &kinds);
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

    /// The index of the best workload, its best plan over the graph's atoms, and the devices of each unit.
    fn op_fence(&self, options: &Options) -> Result<(usize, Found, Vec<Vec<u32>>), PlanError> {
        let mut best: Option<(Found, usize, usize)> = None;
        for (w, (_, single)) in self.cases.iter().enumerate() {
            let most = self.most_copies(single, options);
            for copies in [1, 2, 4, 8, 16, 32].into_iter().filter(|c| *c <= most) {
                let problem = self.joined(w, copies);
                let coarse = problem.restrict(&coarse_cuts(&problem));
                let known = [super::equal_number(&coarse), super::equal_compute(&coarse)];
                let Some(found) = search(&coarse, &options.schedules, &known, false) else { continue };
                if best.as_ref().is_none_or(|(b, ..)| found.score.better(&b.score)) {
                    best = Some((found, w, copies));
                }
            }
        }
        // What looked best is looked at more closely; if nothing fitted, at single devices.
        let (w, copies) = best.as_ref().map_or((0, 1), |(_, w, copies)| (*w, *copies));
        let problem = self.joined(w, copies);
        let cuts = coarse_cuts(&problem);
        let mut found = best.map(|(found, ..)| found);
        if problem.machines.units.len() <= FEW {
            let coarse = problem.restrict(&cuts);
            let known: Vec<Vec<Segment>> = found.iter().map(|f| f.segments.clone()).collect();
            found = op_fence(&coarse, &options.schedules, &known).or(found);
        }
        match found {
            Some(found) => Ok((w, refined(&problem, found, &cuts), members(&problem))),
            None => Err(self.misfit(options)),
        }
    }

    /// A workload's problem with devices joined in groups of `copies`.
    fn joined(&self, workload: usize, copies: usize) -> Problem {
        let (candidates, single) = &self.cases[workload];
        if copies == 1 {
            return single.clone();
        }
        let whole = whole(candidates, &self.class);
        let groups = self.ways.groups(&self.devices, copies, typical(single), &whole);
        single.on(self.ways.machines(&groups, &self.class, &whole))
    }

    /// Most devices that may hold a stage together.
    fn most_copies(&self, problem: &Problem, options: &Options) -> usize {
        let most = (options.replicas as usize).min(problem.micro_batches as usize);
        most.min(self.devices.len()).max(1)
    }

    fn exact(&self, options: &Options) -> Result<(usize, Found, Vec<Vec<u32>>), PlanError> {
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
            Some((w, found)) => Ok((w, found, members(&self.cases[w].1))),
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

fn members(problem: &Problem) -> Vec<Vec<u32>> {
    problem.machines.units.iter().map(|u| u.members.clone()).collect()
}

fn size(bytes: f64) -> String {
    match bytes {
        b if b >= 1024.0 * 1024.0 * 1024.0 => format!("{:.1} GiB", b / 1024.0 / 1024.0 / 1024.0),
        b if b >= 1024.0 * 1024.0 => format!("{:.1} MiB", b / 1024.0 / 1024.0),
        b => format!("{b:.0} bytes"),
    }
}
