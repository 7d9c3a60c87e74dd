//! The best cut for units in a given order, by dynamic programming from the end of the chain. Any unit may be left
//! out.

use super::problem::{LinkCost, Problem, Seconds};
use super::round_trip::RoundTrip;
use super::score::{ScoredPlan, StageRange};
use crate::schedule::Schedule;

/// Up to this many units, the table has a layer for each number of stages that follow. Beyond, it has one layer.
const MAX_LAYERED_UNITS: usize = 12;

/// How many units of the order may be left out between two stages, if the table has one layer.
const MAX_SKIPPED_UNITS: usize = 12;

/// How finely the search balances a short pipeline against a short period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effort {
    /// A few periods around the one of a plan that shares the work evenly.
    Least,
    /// Periods that fall by a fifth, until the best plan is found.
    Coarse,
    /// Periods that fall by a twentieth, then by a fiftieth around the best.
    Fine,
}

/// The best cut for some units of `order`, in that order. `None` if nothing fits.
pub(super) fn cut(problem: &Problem, order: &[u32], schedule: Schedule, effort: Effort) -> Option<ScoredPlan> {
    let mut best: Option<ScoredPlan> = None;
    let tails = if effort == Effort::Least { vec![None] } else { tails(problem) };
    for tail in tails {
        let cutter = Cutter::new(problem, order, schedule, tail);
        cutter.search(effort, &mut best);
    }
    best
}

/// Finds a cut like [`cut`], but tries only periods near that of `plan`. It is for orders that differ little from the
/// plan's.
pub(super) fn cut_like(problem: &Problem, order: &[u32], plan: &ScoredPlan) -> Option<ScoredPlan> {
    let last = plan.stages.last().filter(|l| plan.stages.len() > 1 && l.unit == plan.stages[0].unit);
    let mut best = None;
    let mut table = Vec::new();
    for tail in last.map(|l| Some(l.lo as usize)).into_iter().chain([None]) {
        let cutter = Cutter::new(problem, order, plan.schedule, tail);
        let period = cutter.longest_period(&plan.stages);
        for factor in [1.15, 1.0, 0.93, 0.85] {
            match cutter.cut(period * factor, &mut table) {
                Some((stages, _)) => cutter.offer(stages, &mut best),
                None => break,
            };
        }
    }
    best
}

/// The atom where the last stage may begin if the first stage's unit holds it too; `None` if it does not. Such plans
/// are tried where the ends of the chain share a parameter.
fn tails(problem: &Problem) -> Vec<Option<usize>> {
    let mut tails = vec![None];
    let last = problem.chain.ties.iter().filter_map(|t| t.users.last()).map(|u| u.atom as usize).max();
    if let Some(last) = last {
        tails.extend((last.saturating_sub(2).max(1)..=last).map(Some));
    }
    tails
}

struct Cutter<'a> {
    problem: &'a Problem,
    order: &'a [u32],
    schedule: Schedule,
    round_trip: RoundTrip,
    /// See [`tails`].
    tail: Option<usize>,
    /// Layers of the table: one for each number of stages, or one for all.
    layers: usize,
}

/// The best way to run all atoms from here to the end.
#[derive(Clone, Copy)]
struct Label {
    /// Seconds that one micro-batch takes from here to the end and back.
    pipeline: f64,
    /// Machines from here to the last.
    machines: u16,
    /// The atom at which the stage ends.
    hi: u16,
    /// The index in the order of the next stage's unit; the order's length if there is none.
    next: u16,
}

const UNREACHABLE: Label = Label { pipeline: f64::INFINITY, machines: 0, hi: 0, next: 0 };

/// Seconds of a stage per micro-batch.
#[derive(Clone, Copy, Default)]
struct StageTime {
    /// Seconds that the stage adds to the pipeline.
    pipeline: f64,
    /// Seconds for which each of the stage's machines is busy.
    busy: f64,
}

/// Seconds of a cut between two stages per micro-batch.
#[derive(Clone, Copy)]
struct CutTime {
    /// Seconds that a micro-batch waits, there and back.
    wait: f64,
    /// Seconds for which the busier link is busy.
    busy: f64,
}

/// A unit as the place of a stage. The search asks for the time of millions of stages.
struct Worker<'a> {
    seconds: &'a Seconds,
    /// Whether the schedule delays the gradients of weights.
    delays: bool,
    copies: f64,
    /// See [`Problem::read`].
    read: &'a [f64],
    /// The way of inputs from the broker, and the number of links that they are spread over.
    input: LinkCost,
    inputs: f64,
}

impl Worker<'_> {
    fn time(&self, lo: usize, hi: usize) -> StageTime {
        let s = self.seconds;
        let [forward, backward] = [s.forward[hi] - s.forward[lo], s.backward[hi] - s.backward[lo]];
        let delayed = if self.delays { s.weight[hi] - s.weight[lo] } else { 0.0 };
        StageTime { pipeline: forward + backward - delayed, busy: (forward + backward) / self.copies }
    }

    /// Seconds per micro-batch for which the broker's link is busy with the inputs of these atoms.
    fn input_time(&self, lo: usize, hi: usize) -> f64 {
        self.input.busy(self.read[hi] - self.read[lo]) / self.inputs
    }
}

/// Two units as neighbours in the pipeline.
struct Joint<'a> {
    /// See [`Problem::across`].
    across: &'a [[f64; 2]],
    /// There and back.
    ways: [LinkCost; 2],
    /// The number of links that messages are spread over.
    links: f64,
    /// Whether messages go one way first, and then the other.
    in_turn: bool,
}

impl Joint<'_> {
    fn time(&self, at: usize) -> CutTime {
        let ([down, up], [there, back]) = (self.across[at], self.ways);
        let wait = there.seconds(down) + back.seconds(up);
        let (forward, backward) = (there.busy(down) / self.links, back.busy(up) / self.links);
        CutTime { wait, busy: if self.in_turn { forward + backward } else { forward.max(backward) } }
    }
}

/// The last stage, if the first stage's unit holds it.
#[derive(Clone, Copy, Default)]
struct Tail {
    time: StageTime,
    memory: f64,
}

impl<'a> Cutter<'a> {
    fn new(problem: &'a Problem, order: &'a [u32], schedule: Schedule, tail: Option<usize>) -> Self {
        let layers = if order.len() <= MAX_LAYERED_UNITS { order.len() } else { 1 };
        Self { problem, order, schedule, round_trip: problem.round_trip(schedule), tail, layers }
    }

    /// Lowers the period until nothing fits, or until the pipeline alone takes longer than the best step.
    fn search(&self, effort: Effort, best: &mut Option<ScoredPlan>) {
        let mut table = Vec::new();
        let ratio = match effort {
            Effort::Least => 0.65,
            Effort::Coarse => 0.8,
            Effort::Fine => 0.95,
        };
        // A long period allows many long stages, which take time to search. With many units, long periods are tried
        // only if short ones allow no plan.
        let (mut period, mut near) = (f64::INFINITY, f64::INFINITY);
        if self.layers == 1 && self.order.len() > 1 {
            period = 4.0 * self.even_period();
            while period < 1e6 * self.even_period() && self.cut(period, &mut table).is_none() {
                period *= 4.0;
            }
        }
        let mut best_here = f64::INFINITY;
        while let Some((stages, pipeline)) = self.cut(period, &mut table) {
            let longest = self.longest_period(&stages);
            if self.offer(stages, best) < best_here {
                (best_here, near) = (best.as_ref().map_or(best_here, |b| b.score.step), period.min(longest / ratio));
            }
            if best.as_ref().is_some_and(|b| pipeline >= b.score.step) {
                break;
            }
            period = longest.min(period) * ratio;
        }
        if effort == Effort::Fine && near.is_finite() {
            for step in 0..10 {
                if let Some((stages, _)) = self.cut(near * 0.98_f64.powi(step), &mut table) {
                    self.offer(stages, best);
                }
            }
        }
    }

    /// The period if the work were shared evenly and links were free.
    fn even_period(&self) -> f64 {
        let speed = |j: usize| 1.0 / self.stage_time(j, 0, self.problem.chain.atoms).busy.max(1e-300);
        1.0 / (0..self.order.len()).map(speed).sum::<f64>()
    }

    /// Keeps the plan if it is better; returns its step's seconds.
    fn offer(&self, stages: Vec<StageRange>, best: &mut Option<ScoredPlan>) -> f64 {
        let plan = self.problem.scored(stages, self.schedule);
        if !plan.score.feasible() {
            return f64::INFINITY;
        }
        let step = plan.score.step;
        if best.as_ref().is_none_or(|b| plan.score.better(&b.score)) {
            *best = Some(plan);
        }
        step
    }

    fn unit(&self, j: usize) -> usize {
        self.order[j] as usize
    }

    fn copies(&self, j: usize) -> usize {
        self.problem.machines.units[self.unit(j)].copies()
    }

    fn stage_time(&self, j: usize, lo: usize, hi: usize) -> StageTime {
        self.worker(j).time(lo, hi)
    }

    fn cut_time(&self, j: usize, k: usize, at: usize) -> CutTime {
        self.joint(j, k).time(at)
    }

    fn worker(&self, j: usize) -> Worker<'a> {
        let (problem, unit) = (self.problem, self.unit(j));
        let broker = problem.machines.broker();
        Worker {
            seconds: &problem.chain.seconds[problem.machines.units[unit].class as usize],
            delays: self.schedule.delays_weights(),
            copies: self.copies(j) as f64,
            read: &problem.read,
            input: problem.machines.link(broker, unit),
            inputs: problem.links_between(broker, unit),
        }
    }

    fn joint(&self, j: usize, k: usize) -> Joint<'a> {
        let (a, b) = (self.unit(j), self.unit(k));
        let machines = &self.problem.machines;
        Joint {
            across: &self.problem.across,
            ways: [machines.link(a, b), machines.link(b, a)],
            links: self.problem.links_between(a, b),
            in_turn: self.schedule == Schedule::GPipe,
        }
    }

    /// The longest period of a plan's stages, links and round trips, as the dynamic program counts them.
    fn longest_period(&self, stages: &[StageRange]) -> f64 {
        let place = |u: u32| self.order.iter().position(|o| *o == u).unwrap_or(0);
        let mut longest = 0.0_f64;
        let (mut pipeline, mut ahead) = (0.0, 0);
        for (s, g) in stages.iter().enumerate().rev() {
            let (j, lo, hi) = (place(g.unit), g.lo as usize, g.hi as usize);
            let time = self.stage_time(j, lo, hi);
            let other = stages.iter().rposition(|o| o.unit == g.unit).filter(|o| *o != s);
            let other = other.map_or(0.0, |o| self.stage_time(j, stages[o].lo as usize, stages[o].hi as usize).busy);
            longest = longest.max(time.busy + other).max(self.worker(j).input_time(lo, hi));
            pipeline += time.pipeline;
            if let Some(next) = stages.get(s + 1) {
                let time = self.cut_time(j, place(next.unit), hi);
                longest = longest.max(time.busy);
                pipeline += time.wait;
            }
            ahead += self.copies(j);
            longest = longest.max(self.round_trip.period(pipeline, ahead));
        }
        longest
    }

    fn at(&self, layer: usize, j: usize, lo: usize) -> usize {
        (layer * self.order.len() + j) * (self.problem.chain.atoms + 1) + lo
    }

    /// The atom where the last stage of the table ends.
    fn end(&self) -> usize {
        self.tail.unwrap_or(self.problem.chain.atoms)
    }

    /// The plan with the shortest pipeline whose stations take no longer than `period` per micro-batch, and the
    /// seconds of that pipeline.
    fn cut(&self, period: f64, table: &mut Vec<Label>) -> Option<(Vec<StageRange>, f64)> {
        let (units, atoms) = (self.order.len(), self.problem.chain.atoms);
        table.clear();
        table.resize(self.layers * units * (atoms + 1), UNREACHABLE);
        let tail = self.tail.map(|t| Tail {
            time: self.stage_time(0, t, atoms),
            memory: self.problem.memory(self.unit(0), t, atoms, self.round_trip.in_flight(self.copies(0))),
        });
        let mut onward = vec![UNREACHABLE; atoms + 1];
        let mut best = UNREACHABLE;
        let mut best_at = (0, 0);
        for layer in 0..self.layers {
            for j in (0..units).rev() {
                if self.layers > 1 && layer + j >= units {
                    continue;
                }
                self.fill_onward(layer, j, period, tail, table, &mut onward);
                self.fill_stages(layer, j, period, tail, &onward, table);
                let whole = table[self.at(layer, j, 0)];
                let allowed = tail.is_none() || j == 0;
                if allowed && whole.pipeline < best.pipeline {
                    (best, best_at) = (whole, (layer, j));
                }
            }
        }
        if best.pipeline.is_infinite() {
            return None;
        }
        Some((self.stages(best_at.0, best_at.1, table), best.pipeline))
    }

    /// By cut: the best label that follows a stage of unit `j` that ends there.
    fn fill_onward(
        &self,
        layer: usize,
        j: usize,
        period: f64,
        tail: Option<Tail>,
        table: &[Label],
        onward: &mut [Label],
    ) {
        let (units, end) = (self.order.len(), self.end());
        let layered = self.layers > 1;
        onward.fill(UNREACHABLE);
        if !layered || layer == 0 {
            onward[end] = Label { pipeline: 0.0, machines: 0, hi: 0, next: units as u16 };
            if let Some(Tail { time, .. }) = tail {
                let cut = match j {
                    0 => CutTime { wait: f64::INFINITY, busy: 0.0 },
                    _ => self.cut_time(j, 0, end),
                };
                let fits = cut.busy.max(time.busy) <= period;
                onward[end].pipeline = if fits { cut.wait + time.pipeline } else { f64::INFINITY };
                onward[end].machines = self.copies(0) as u16;
            }
        }
        if layered && layer == 0 {
            return;
        }
        let from = if layered { layer - 1 } else { 0 };
        let reach = if layered { units } else { (j + 1 + MAX_SKIPPED_UNITS).min(units) };
        // With a tail, the first unit of the order takes the first stage and the last.
        let first_free = usize::from(tail.is_some());
        for k in (j + 1).max(first_free)..reach {
            let labels = &table[self.at(from, k, 0)..self.at(from, k, end)];
            let joint = self.joint(j, k);
            for (cut, label) in labels.iter().enumerate().skip(1) {
                if label.pipeline >= onward[cut].pipeline {
                    continue;
                }
                let time = joint.time(cut);
                let pipeline = label.pipeline + time.wait;
                if time.busy <= period && pipeline < onward[cut].pipeline {
                    onward[cut] = Label { pipeline, machines: label.machines, hi: cut as u16, next: k as u16 };
                }
            }
        }
    }

    /// The best stage of unit `j` from each atom.
    fn fill_stages(
        &self,
        layer: usize,
        j: usize,
        period: f64,
        tail: Option<Tail>,
        onward: &[Label],
        table: &mut [Label],
    ) {
        let end = self.end();
        // The first unit also holds the tail.
        let (beside, starts) = match tail {
            Some(tail) if j == 0 => (tail, 0..1),
            _ => (Tail::default(), 0..end),
        };
        let (worker, copies) = (self.worker(j), self.copies(j));
        let most = self.problem.machines.units[self.unit(j)].memory;
        for lo in starts {
            let mut best = UNREACHABLE;
            let keeps_period =
                |hi| worker.time(lo, hi).busy + beside.time.busy <= period && worker.input_time(lo, hi) <= period;
            // A stage takes the longer the more atoms it has.
            let (mut most_atoms, mut too_many) = (lo, end + 1);
            while too_many - most_atoms > 1 {
                let middle = (most_atoms + too_many) / 2;
                if keeps_period(middle) { most_atoms = middle } else { too_many = middle }
            }
            for (hi, label) in onward.iter().enumerate().take(most_atoms + 1).skip(lo + 1) {
                // Most atoms end no stage, or a worse one.
                if label.pipeline >= best.pipeline {
                    continue;
                }
                let pipeline = label.pipeline + worker.time(lo, hi).pipeline;
                if pipeline >= best.pipeline {
                    continue;
                }
                let ahead = label.machines as usize + copies;
                if self.round_trip.period(pipeline, ahead) > period {
                    continue;
                }
                let in_flight = self.round_trip.in_flight(ahead);
                let memory = self.problem.memory(self.unit(j), lo, hi, in_flight) + beside.memory;
                if memory <= most {
                    best = Label { pipeline, machines: ahead as u16, hi: hi as u16, next: label.next };
                }
            }
            table[self.at(layer, j, lo)] = best;
        }
    }

    /// The plan whose first stage is unit `j`'s.
    fn stages(&self, mut layer: usize, mut j: usize, table: &[Label]) -> Vec<StageRange> {
        let mut stages = Vec::new();
        let mut lo = 0;
        loop {
            let label = table[self.at(layer, j, lo)];
            stages.push(StageRange { unit: self.order[j], lo: lo as u32, hi: u32::from(label.hi) });
            if label.next as usize == self.order.len() {
                break;
            }
            (j, lo) = (label.next as usize, label.hi as usize);
            layer = layer.saturating_sub(1);
        }
        if let Some(tail) = self.tail {
            stages.push(StageRange { unit: self.order[0], lo: tail as u32, hi: self.problem.chain.atoms as u32 });
        }
        stages
    }
}
