//! A lower bound on [`Problem::evaluate`] over all plans.

use super::problem::Problem;
use super::round_trip::RoundTrip;
use crate::schedule::Schedule;

/// Up to this many units, the table has a layer for each number of stages.
const MAX_LAYERED_UNITS: usize = 16;

/// Most table steps of a walk. With more, only the bound by count is computed.
const MAX_WALK_STEPS: usize = 200_000_000;

/// Seconds below which [`Problem::evaluate`] gives no plan of the problem. Plans may use any units in any order, any
/// cuts, and any of `schedules`. Up to `copies` units may be joined for a stage. The problem's units have one member
/// each.
///
/// It bounds the closed form alone. The simulator overlaps more work, so a simulated step can be shorter.
///
/// A step is a pipeline and `n - 1` periods, or `n - copies` if so many units take turns. The pipeline holds each
/// member's first micro-batch, so a step is never much less than `n` periods.
///
/// For every possible period, the pipeline is bounded by the shortest walk through the chain whose stages and links
/// keep that period. A walk may return to a unit: this is the relaxation of Christofides et al. (1981) for routes.
/// The period is bounded by the work divided by the speed of the fastest units. Under 1F1B, it is also bounded by the
/// pipeline divided by its number of stages.
pub fn lower_bound(problem: &Problem, schedules: &[Schedule], copies: usize) -> f64 {
    let bounds = schedules.iter().map(|s| Bound::new(problem, *s, copies.max(1)).least());
    let least = bounds.fold(f64::INFINITY, f64::min);
    if least.is_finite() { least } else { 0.0 }
}

struct Bound<'a> {
    problem: &'a Problem,
    schedule: Schedule,
    round_trip: RoundTrip,
    copies: f64,
    /// The largest share of an atom's seconds that nothing waits for.
    delayed: f64,
    /// Layers of the table: one for each number of stages, or one for all.
    layers: usize,
    /// Most stages of a plan. One unit may hold two.
    max_stages: usize,
    /// See [`Problem::neighbours`], by cut.
    neighbours: Vec<[f64; 2]>,
    /// By number of stages less one: the least seconds per micro-batch of the busiest unit.
    work: Vec<f64>,
    /// By number of stages less one: whether so many units can hold the parameters.
    fits: Vec<bool>,
}

impl<'a> Bound<'a> {
    fn new(problem: &'a Problem, schedule: Schedule, copies: usize) -> Self {
        let (chain, units) = (&problem.chain, problem.machines.units.len());
        let max_stages = units + usize::from(!chain.ties.is_empty());
        // Any weights bound the largest load from below. Weights by speed give the exact bound if units differ only
        // in speed.
        let seconds = |u: usize, lo: usize, hi: usize| problem.compute(u, lo, hi).iter().sum::<f64>();
        let weights: Vec<f64> = (0..units).map(|u| 1.0 / seconds(u, 0, chain.atoms).max(1e-300)).collect();
        let classes = by_class(problem, &weights);
        let cheapest = |a: usize| classes.iter().map(|&(u, w)| w * seconds(u, a, a + 1)).fold(f64::INFINITY, f64::min);
        let weighed: f64 = (0..chain.atoms).map(cheapest).sum();
        let state = problem.state_bytes();
        let memories: Vec<f64> = problem.machines.units.iter().map(|u| u.memory).collect();
        let (speed, memory) = (largest(weights), largest(memories));
        let delayed = |u: usize, a: usize| problem.delayed(schedule, u, a, a + 1) / seconds(u, a, a + 1).max(1e-300);
        let delays = classes.iter().flat_map(|&(u, _)| (0..chain.atoms).map(move |a| delayed(u, a)));
        Self {
            schedule,
            round_trip: problem.round_trip(schedule),
            copies: copies as f64,
            delayed: delays.fold(0.0, f64::max).min(1.0),
            layers: if units <= MAX_LAYERED_UNITS && copies == 1 { max_stages } else { 1 },
            max_stages,
            neighbours: (0..=chain.atoms).map(|cut| problem.neighbours(cut)).collect(),
            work: (0..max_stages).map(|s| weighed / speed[s.min(units - 1)]).collect(),
            fits: (0..max_stages).map(|s| memory[s.min(units - 1)] >= state * (1.0 - 1e-9)).collect(),
            problem,
        }
    }

    /// The larger of the bound by count and the bound by walks. The bound by walks is left out if it takes too much
    /// work.
    fn least(&self) -> f64 {
        let steps = self.layers * self.problem.machines.units.len() * self.problem.chain.atoms.pow(2);
        let by_count = self.count_bound();
        match MAX_WALK_STEPS / steps.max(1) {
            0..20 => by_count,
            20..80 => by_count.max(self.walk_bound(1.2)),
            _ => by_count.max(self.walk_bound(1.05)),
        }
    }

    /// The bound for each number of stages. The pipeline computes everything once and crosses one link fewer than it
    /// has stages. No two of these links join the same units. So together they take at least as long as a forest of
    /// the cheapest links (Kruskal, 1956).
    fn count_bound(&self) -> f64 {
        let (problem, machines) = (self.problem, &self.problem.machines);
        let (units, atoms) = (machines.units.len(), problem.chain.atoms);
        let classes = by_class(problem, &vec![1.0; units]);
        let seconds = |u: usize, a: usize| {
            problem.compute(u, a, a + 1).iter().sum::<f64>() - problem.delayed(self.schedule, u, a, a + 1)
        };
        let least = |a: usize| classes.iter().map(|(u, _)| seconds(*u, a)).fold(f64::INFINITY, f64::min);
        let compute: f64 = (0..atoms).map(least).sum();
        let smallest =
            |direction: usize| self.neighbours[1..atoms].iter().map(|b| b[direction]).fold(f64::INFINITY, f64::min);
        let (down, up) = if atoms > 1 { (smallest(0), smallest(1)) } else { (0.0, 0.0) };
        let mut links = Vec::with_capacity(units * units);
        for u in 0..units {
            for v in (0..units).filter(|v| *v != u) {
                let wait = machines.link(u, v).seconds(down) + machines.link(v, u).seconds(up);
                links.push((wait, u, v));
            }
        }
        links.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut tree: Vec<usize> = (0..units).collect();
        let mut forest = Vec::with_capacity(units);
        for (wait, u, v) in links {
            let (a, b) = (tree[u], tree[v]);
            if a != b && forest.len() + 1 < units {
                tree.iter_mut().filter(|t| **t == a).for_each(|t| *t = b);
                forest.push(wait);
            }
        }
        // A unit that holds two stages closes a circle.
        let closing = self.max_stages - units;
        let steps = (0..self.max_stages.min(atoms)).filter(|s| self.fits[*s]).map(|s| {
            let pipeline = compute + forest.iter().take(s.saturating_sub(closing)).sum::<f64>();
            // So many stages may have several times as many units.
            let work = self.work[((s + 1) * self.copies as usize).min(self.max_stages) - 1];
            self.step(pipeline, work.max(self.round_trip_period(pipeline, s + 1)))
        });
        steps.fold(f64::INFINITY, f64::min)
    }

    fn walk_bound(&self, ratio: f64) -> f64 {
        let problem = self.problem;
        let layered = self.layers > 1 || self.max_stages == 1;
        let slowest = (0..problem.machines.units.len())
            .map(|u| problem.compute(u, 0, problem.chain.atoms).iter().sum::<f64>())
            .fold(0.0, f64::max);
        // A period between two of a series is at least the shorter one. The pipeline is at least what the longer one
        // allows.
        let mut shorter = *self.work.last().unwrap_or(&0.0);
        let mut least = f64::INFINITY;
        let mut table = Vec::new();
        loop {
            let longer = if shorter >= slowest { f64::INFINITY } else { (shorter * ratio).max(slowest * 1e-6) };
            for (layer, pipeline) in self.pipelines(longer, &mut table).into_iter().enumerate() {
                let stages = if layered { layer + 1 } else { self.max_stages };
                if pipeline.is_finite() && (!layered || self.fits[layer]) {
                    let round_trip = self.round_trip_period(pipeline, stages);
                    least = least.min(self.step(pipeline, shorter.max(self.work[stages - 1]).max(round_trip)));
                }
            }
            if longer.is_infinite() || self.step(0.0, longer) >= least {
                return least;
            }
            shorter = longer;
        }
    }

    /// The least seconds of a step with this pipeline and this period of the busiest station.
    ///
    /// Of `c` machines that take turns, each is busy for `c` periods with a micro-batch. One of them takes at least a
    /// `c`-th of the `n` micro-batches. Its first one is part of the pipeline, so `n - c` periods are added. If the
    /// rest of the pipeline is left out, all `n` periods count, less the part of the first micro-batch that nothing
    /// waits for. For a station that is no machine, `n - 1` periods count.
    fn step(&self, pipeline: f64, period: f64) -> f64 {
        let n = f64::from(self.problem.micro_batches);
        let beside_pipeline = (n - self.copies).max(0.0) * period;
        let without_pipeline = (n - (self.delayed * self.copies).max(1.0)) * period;
        (pipeline + beside_pipeline).max(without_pipeline)
    }

    fn round_trip_period(&self, pipeline: f64, ahead: usize) -> f64 {
        self.round_trip.period(pipeline, ahead * self.copies as usize)
    }

    /// By layer: the shortest walk whose stations take no longer than `period`.
    fn pipelines(&self, period: f64, table: &mut Vec<f64>) -> Vec<f64> {
        let problem = self.problem;
        let (units, atoms) = (problem.machines.units.len(), problem.chain.atoms);
        let width = atoms + 1;
        let layered = self.layers > 1;
        table.clear();
        table.resize(self.layers * units * width, f64::INFINITY);
        let mut pipelines = vec![f64::INFINITY; self.layers];
        for layer in 0..self.layers {
            let onward = if layered { self.onward(&table[..], layer, period) } else { Vec::new() };
            let in_flight = self.round_trip.in_flight(if layered { layer + 1 } else { 1 });
            for lo in (0..atoms).rev() {
                for u in 0..units {
                    let mut least = f64::INFINITY;
                    let available = problem.machines.units[u].memory;
                    for hi in lo + 1..=atoms {
                        let seconds: f64 = problem.compute(u, lo, hi).iter().sum();
                        let in_flight = (in_flight as f64 / self.copies).ceil() as usize;
                        if seconds > period * self.copies || problem.memory(u, lo, hi, in_flight) > available {
                            break;
                        }
                        let rest = match (layered, hi == atoms) {
                            (true, _) => onward[u * width + hi],
                            (false, true) => 0.0,
                            (false, false) => table[u * width + hi],
                        };
                        least = least.min(seconds - problem.delayed(self.schedule, u, lo, hi) + rest);
                    }
                    if layered && self.round_trip_period(least, layer + 1) > period {
                        least = f64::INFINITY;
                    }
                    // Without layers, the entry becomes the best continuation from this cut once all units' stages
                    // from it are known.
                    table[(layer * units + u) * width + lo] = least;
                    if lo == 0 {
                        pipelines[layer] = pipelines[layer].min(least);
                    }
                }
                if !layered && lo > 0 {
                    let stages: Vec<f64> = (0..units).map(|u| table[u * width + lo]).collect();
                    for u in 0..units {
                        table[u * width + lo] = self.enter(u, lo, period, &stages);
                    }
                }
            }
        }
        pipelines
    }

    /// By unit and cut: the shortest continuation of a stage that ends there, with exactly `layer` stages to follow.
    fn onward(&self, table: &[f64], layer: usize, period: f64) -> Vec<f64> {
        let (units, atoms) = (self.problem.machines.units.len(), self.problem.chain.atoms);
        let width = atoms + 1;
        let mut onward = vec![f64::INFINITY; units * width];
        for u in 0..units {
            if layer == 0 {
                onward[u * width + atoms] = 0.0;
                continue;
            }
            let before = (layer - 1) * units * width;
            for cut in 1..atoms {
                let stages: Vec<f64> = (0..units).map(|v| table[before + v * width + cut]).collect();
                onward[u * width + cut] = self.enter(u, cut, period, &stages);
            }
        }
        onward
    }

    /// The shortest continuation from unit `u` over a cut to any other unit. `stages` has the continuations of the
    /// units behind the cut.
    fn enter(&self, u: usize, cut: usize, period: f64, stages: &[f64]) -> f64 {
        let (problem, machines) = (self.problem, &self.problem.machines);
        let [down, up] = self.neighbours[cut];
        let mut least = f64::INFINITY;
        for (v, rest) in stages.iter().enumerate() {
            if v == u || *rest >= least {
                continue;
            }
            let (forward, backward) = (problem.busy(u, v, down), problem.busy(v, u, up));
            let busy = if self.schedule == Schedule::GPipe { forward + backward } else { forward.max(backward) };
            if busy <= period * self.copies * self.copies {
                let wait = machines.link(u, v).seconds(down) + machines.link(v, u).seconds(up);
                least = least.min(rest + wait);
            }
        }
        least
    }
}

/// One unit of each class, with the smallest weight of its class.
fn by_class(problem: &Problem, weights: &[f64]) -> Vec<(usize, f64)> {
    let mut classes: Vec<(usize, f64)> = Vec::new();
    for (u, &w) in weights.iter().enumerate() {
        let class = |u: usize| problem.machines.units[u].class;
        match classes.iter_mut().find(|c| class(c.0) == class(u)) {
            Some(c) => c.1 = c.1.min(w),
            None => classes.push((u, w)),
        }
    }
    classes
}

/// By number less one: the sum of that many largest values.
fn largest(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(|a, b| b.total_cmp(a));
    let mut sum = 0.0;
    values
        .into_iter()
        .map(|v| {
            sum += v;
            sum
        })
        .collect()
}
