//! The best cut for units in a given order, any of which may be left out: dynamic programming from the end of the chain.

use super::objective::{Score, Segment, under_way};
use super::problem::Problem;
use crate::Schedule;

/// Units up to which the dynamic programme keeps apart how many stages follow; beyond, it keeps the best alone.
const COUNTED: usize = 12;

/// How many units of the order may be left out between two stages once there are too many to try all.
const SKIPS: usize = 12;

/// A plan and its cost.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// Segments in the order of the atoms.
    pub segments: Vec<Segment>,
    /// When.
    pub schedule: Schedule,
    /// What it costs.
    pub score: Score,
}

/// How closely the trade between a short pipeline and a short period is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// A few periods around that of a plan that shares the work out evenly.
    Least,
    /// Periods that fall by a fifth, down to where the best lies.
    Coarse,
    /// Periods that fall by a twentieth, then by a fiftieth around the best.
    Fine,
}

/// The best cut for some of the units of `order`, taken in that order. `None` if nothing fits.
pub(crate) fn cut(problem: &Problem, order: &[u32], schedule: Schedule, effort: Effort) -> Option<Found> {
    let mut best: Option<Found> = None;
    let tails = if effort == Effort::Least { vec![None] } else { tails(problem) };
    for tail in tails {
        let cutter = Cutter::new(problem, order, schedule, tail);
        cutter.search(effort, &mut best);
    }
    best
}

/// As [`cut`], but for plans whose periods are about that of `like` alone: for orders that differ little from its own.
pub(crate) fn cut_alike(problem: &Problem, order: &[u32], like: &Found) -> Option<Found> {
    let last = like.segments.last().filter(|l| like.segments.len() > 1 && l.unit == like.segments[0].unit);
    let mut best = None;
    let mut table = Vec::new();
    for tail in last.map(|l| Some(l.lo as usize)).into_iter().chain([None]) {
        let cutter = Cutter::new(problem, order, like.schedule, tail);
        let about = cutter.measure(&like.segments);
        for factor in [1.15, 1.0, 0.93, 0.85] {
            match cutter.cut(about * factor, &mut table) {
                Some((segments, _)) => cutter.offer(segments, &mut best),
                None => break,
            };
        }
    }
    best
}

/// Where the last stage may begin if the unit of the first holds it too; `None` if it does not. Worth a try where the ends of the chain share a parameter.
fn tails(problem: &Problem) -> Vec<Option<usize>> {
    let mut tails = vec![None];
    let last = problem.chain.ties.iter().filter_map(|t| t.atoms.last()).map(|(a, _)| *a as usize).max();
    if let Some(last) = last {
        tails.extend((last.saturating_sub(2).max(1)..=last).map(Some));
    }
    tails
}

struct Cutter<'a> {
    problem: &'a Problem,
    order: &'a [u32],
    schedule: Schedule,
    /// See [`tails`].
    tail: Option<usize>,
    /// Layers of the table: numbers of stages kept apart.
    layers: usize,
}

/// The best way on from an atom.
#[derive(Clone, Copy)]
struct Label {
    /// Seconds that one micro-batch takes from here to the end and back.
    pipe: f64,
    /// Machines from here to the last.
    machines: u16,
    /// Where the stage ends.
    hi: u16,
    /// The order's entry that follows; its length if none.
    next: u16,
}

const NO_WAY: Label = Label { pipe: f64::INFINITY, machines: 0, hi: 0, next: 0 };

impl<'a> Cutter<'a> {
    fn new(problem: &'a Problem, order: &'a [u32], schedule: Schedule, tail: Option<usize>) -> Self {
        let layers = if order.len() <= COUNTED { order.len() } else { 1 };
        Self { problem, order, schedule, tail, layers }
    }

    /// Lowers the period until nothing fits or the pipeline alone takes longer than the best step.
    fn search(&self, effort: Effort, best: &mut Option<Found>) {
        let mut table = Vec::new();
        let ratio = match effort {
            Effort::Least => 0.65,
            Effort::Coarse => 0.8,
            Effort::Fine => 0.95,
        };
        // Long periods make long stages, of which there are many: with many units they are tried only if short ones do not do.
        let (mut period, mut near) = (f64::INFINITY, f64::INFINITY);
        if self.layers == 1 && self.order.len() > 1 {
            period = 4.0 * self.even();
            while period < 1e6 * self.even() && self.cut(period, &mut table).is_none() {
                period *= 4.0;
            }
        }
        let mut best_here = f64::INFINITY;
        while let Some((segments, pipe)) = self.cut(period, &mut table) {
            let measured = self.measure(&segments);
            if self.offer(segments, best) < best_here {
                (best_here, near) = (best.as_ref().map_or(best_here, |b| b.score.step), period.min(measured / ratio));
            }
            if best.as_ref().is_some_and(|b| pipe >= b.score.step) {
                break;
            }
            period = measured.min(period) * ratio;
        }
        if effort == Effort::Fine && near.is_finite() {
            for step in 0..10 {
                if let Some((segments, _)) = self.cut(near * 0.98_f64.powi(step), &mut table) {
                    self.offer(segments, best);
                }
            }
        }
    }

    /// The period if the work were shared out evenly, whatever crosses.
    fn even(&self) -> f64 {
        let speed = |j: usize| 1.0 / self.compute(j, 0, self.problem.chain.atoms).1.max(1e-300);
        1.0 / (0..self.order.len()).map(speed).sum::<f64>()
    }

    /// Keeps the plan if it is better; its step's seconds.
    fn offer(&self, segments: Vec<Segment>, best: &mut Option<Found>) -> f64 {
        let score = self.problem.evaluate(&segments, self.schedule);
        if score.feasible() && best.as_ref().is_none_or(|b| score.better(&b.score)) {
            *best = Some(Found { segments, schedule: self.schedule, score });
        }
        if score.feasible() { score.step } else { f64::INFINITY }
    }

    fn unit(&self, j: usize) -> usize {
        self.order[j] as usize
    }

    fn copies(&self, j: usize) -> usize {
        self.problem.machines.units[self.unit(j)].copies()
    }

    /// Seconds of both passes, and how long a micro-batch occupies the machine.
    fn compute(&self, j: usize, lo: usize, hi: usize) -> (f64, f64) {
        let [forward, backward] = self.problem.compute(self.unit(j), lo, hi);
        let delayed = self.problem.delayed(self.schedule, self.unit(j), lo, hi);
        (forward + backward - delayed, (forward + backward) / self.copies(j) as f64)
    }

    /// What crosses a cut between two units: how long a micro-batch waits for it there and back, and how long it occupies the busier line.
    fn transfer(&self, j: usize, k: usize, at: usize) -> (f64, f64) {
        let (a, b) = (self.unit(j), self.unit(k));
        let machines = &self.problem.machines;
        let [down, up] = self.problem.across[at];
        let wait = machines.route(a, b).seconds(down) + machines.route(b, a).seconds(up);
        let (forward, backward) = (self.problem.busy(a, b, down), self.problem.busy(b, a, up));
        let busy = if self.schedule == Schedule::GPipe { forward + backward } else { forward.max(backward) };
        (wait, busy)
    }

    /// How long the inputs of some atoms occupy the broker's line per micro-batch.
    fn read(&self, j: usize, lo: usize, hi: usize) -> f64 {
        let bytes = self.problem.read[hi] - self.problem.read[lo];
        self.problem.busy(self.problem.machines.broker(), self.unit(j), bytes)
    }

    /// The longest period of a plan's stages and lines, as the dynamic programme counts them.
    fn measure(&self, segments: &[Segment]) -> f64 {
        let place = |u: u32| self.order.iter().position(|o| *o == u).unwrap_or(0);
        let mut longest = 0.0_f64;
        let (mut pipe, mut ahead) = (0.0, 0);
        for (s, g) in segments.iter().enumerate().rev() {
            let (j, lo, hi) = (place(g.unit), g.lo as usize, g.hi as usize);
            let (seconds, occupied) = self.compute(j, lo, hi);
            let other = segments.iter().rposition(|o| o.unit == g.unit).filter(|o| *o != s);
            let twice = other.map_or(0.0, |o| self.compute(j, segments[o].lo as usize, segments[o].hi as usize).1);
            longest = longest.max(occupied + twice).max(self.read(j, lo, hi));
            pipe += seconds;
            if let Some(next) = segments.get(s + 1) {
                let (wait, busy) = self.transfer(j, place(next.unit), hi);
                longest = longest.max(busy);
                pipe += wait;
            }
            ahead += self.copies(j);
            longest = longest.max(self.round_trip(pipe, ahead));
        }
        longest
    }

    /// The period that a round trip of `pipe` seconds from a stage with `ahead` machines to the last allows.
    fn round_trip(&self, pipe: f64, ahead: usize) -> f64 {
        let fly = under_way(self.schedule, self.problem.micro_batches, ahead);
        if fly < self.problem.micro_batches as usize { pipe / fly as f64 } else { 0.0 }
    }

    /// The plan with the shortest pipeline whose stations take no longer than `period` per micro-batch, and that pipeline's seconds.
    fn cut(&self, period: f64, table: &mut Vec<Label>) -> Option<(Vec<Segment>, f64)> {
        let units = self.order.len();
        let atoms = self.problem.chain.atoms;
        let end = self.tail.unwrap_or(atoms);
        let width = atoms + 1;
        table.clear();
        table.resize(self.layers * units * width, NO_WAY);
        let at = |layer: usize, j: usize, k: usize| (layer * units + j) * width + k;
        // With a tail, the first of the order takes the first stage and the last.
        let first_free = usize::from(self.tail.is_some());
        let last = self.tail.map(|t| self.compute(0, t, atoms));
        let last_memory = self.tail.map_or(0.0, |t| {
            let ahead = self.copies(0);
            self.problem.memory(self.unit(0), t, atoms, under_way(self.schedule, self.problem.micro_batches, ahead))
        });
        let mut onward = vec![NO_WAY; width];
        let mut best = NO_WAY;
        let mut best_at = (0, 0);
        for layer in 0..self.layers {
            for j in (0..units).rev() {
                let counted = self.layers > 1;
                if counted && layer + j >= units {
                    continue;
                }
                // The best way on from each cut, seen from this unit.
                onward.fill(NO_WAY);
                if !counted || layer == 0 {
                    let machines = if self.tail.is_some() { self.copies(0) as u16 } else { 0 };
                    onward[end] = Label { pipe: 0.0, machines, hi: 0, next: units as u16 };
                    if let Some((seconds, occupied)) = last {
                        let (wait, busy) = if j > 0 { self.transfer(j, 0, end) } else { (f64::INFINITY, 0.0) };
                        let fits = busy.max(occupied) <= period;
                        onward[end].pipe = if fits { wait + seconds } else { f64::INFINITY };
                    }
                }
                if !counted || layer > 0 {
                    let from = if counted { layer - 1 } else { 0 };
                    let reach = if counted { units } else { (j + 1 + SKIPS).min(units) };
                    for k in (j + 1).max(first_free)..reach {
                        let ways = &table[at(from, k, 0)..at(from, k, end)];
                        for (cut, way) in ways.iter().enumerate().skip(1) {
                            if way.pipe >= onward[cut].pipe {
                                continue;
                            }
                            let (wait, busy) = self.transfer(j, k, cut);
                            let pipe = way.pipe + wait;
                            if busy <= period && pipe < onward[cut].pipe {
                                onward[cut] = Label { pipe, machines: way.machines, hi: cut as u16, next: k as u16 };
                            }
                        }
                    }
                }
                let wraps = self.tail.is_some() && j == 0;
                let (shared, shared_memory) = if wraps { (last.map_or(0.0, |l| l.1), last_memory) } else { (0.0, 0.0) };
                let starts = if wraps { 0..1 } else { 0..end };
                for lo in starts {
                    let mut label = NO_WAY;
                    for (hi, way) in onward.iter().enumerate().take(end + 1).skip(lo + 1) {
                        let (seconds, occupied) = self.compute(j, lo, hi);
                        if (occupied + shared).max(self.read(j, lo, hi)) > period {
                            break;
                        }
                        if way.pipe + seconds >= label.pipe {
                            continue;
                        }
                        let ahead = way.machines as usize + self.copies(j);
                        let fly = under_way(self.schedule, self.problem.micro_batches, ahead);
                        let memory = self.problem.memory(self.unit(j), lo, hi, fly) + shared_memory;
                        let pipe = way.pipe + seconds;
                        if memory <= self.problem.machines.units[self.unit(j)].memory
                            && self.round_trip(pipe, ahead) <= period
                        {
                            label = Label { pipe, machines: ahead as u16, hi: hi as u16, next: way.next };
                        }
                    }
                    table[at(layer, j, lo)] = label;
                }
                let whole = table[at(layer, j, 0)];
                if (self.tail.is_none() || wraps) && whole.pipe < best.pipe {
                    (best, best_at) = (whole, (layer, j));
                }
            }
        }
        if best.pipe.is_infinite() {
            return None;
        }
        let mut segments = Vec::new();
        let (mut layer, mut j, mut lo) = (best_at.0, best_at.1, 0);
        loop {
            let label = table[at(layer, j, lo)];
            segments.push(Segment { unit: self.order[j], lo: lo as u32, hi: u32::from(label.hi) });
            if label.next as usize == units {
                break;
            }
            (j, lo) = (label.next as usize, label.hi as usize);
            layer = layer.saturating_sub(1);
        }
        if let Some(tail) = self.tail {
            segments.push(Segment { unit: self.order[0], lo: tail as u32, hi: atoms as u32 });
        }
        Some((segments, best.pipe))
    }
}
