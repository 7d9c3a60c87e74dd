//! The best plan of a small problem, which OP-Fence is measured against, and a beam search over the same states.

mod stage;
mod state;

use std::collections::BTreeMap;
use std::ops::Range;

use stage::{LineLoad, Stage, UnitUse};
use state::State;

use super::problem::Problem;
use super::round_trip::RoundTrip;
use super::score::{ScoredPlan, StageRange};
use crate::parallel::for_each;
use crate::schedule::Schedule;

/// Most units of a problem that [`exact`] solves.
pub const MAX_UNITS: usize = 8;

/// Most positions between atoms where a problem for [`exact`] may be cut. It refuses larger problems.
pub const MAX_CUT_POSITIONS: usize = 40;

/// The best of all plans: every subset of units, in every order, with every cut, under each of `schedules`. If the
/// model has tied parameters, also the plans in which one unit holds the first stage and the last.
///
/// `below` is the cost of a known plan; only better plans are searched. `None` if no plan is better or none fits, or
/// if the problem is not [small](is_small).
///
/// Dynamic programming from the end of the chain over (units used, first unit, position). Of each state it keeps the
/// costs that no other cost beats in every respect.
pub fn exact(problem: &Problem, schedules: &[Schedule], below: Option<f64>) -> Option<ScoredPlan> {
    if is_small(problem) { beam_search(problem, schedules, below, usize::MAX) } else { None }
}

/// Whether [`exact`] solves the problem: at most [`MAX_UNITS`] units of one member each, and at most
/// [`MAX_CUT_POSITIONS`] cuts.
pub fn is_small(problem: &Problem) -> bool {
    let units = &problem.machines.units;
    units.len() <= MAX_UNITS && problem.chain.atoms <= MAX_CUT_POSITIONS + 1 && units.iter().all(|u| u.copies() == 1)
}

/// Searches like [`exact`], but extends only the `width` ends with the lowest bounds, per position and number of
/// stages. It is fast, but may miss the best plan. Units have one member each, and there are at most 32.
pub(super) fn beam_search(
    problem: &Problem,
    schedules: &[Schedule],
    below: Option<f64>,
    width: usize,
) -> Option<ScoredPlan> {
    let run = |schedule, below| Search::new(problem, schedule, below).run(width);
    let (&first, others) = schedules.split_first()?;
    let below = below.unwrap_or(f64::INFINITY);
    let first = run(first, below);
    // The others have less to search once a plan is known.
    let below = first.as_ref().map_or(below, |plan| plan.score.step);
    let found = for_each(others, |schedule| run(*schedule, below));
    let better = |best: ScoredPlan, plan: ScoredPlan| if plan.score.better(&best.score) { plan } else { best };
    first.into_iter().chain(found.into_iter().flatten()).reduce(better)
}

/// The cost of a plan's end. No figure falls as stages are added.
#[derive(Debug, Clone)]
struct Label {
    /// Seconds of one micro-batch, there and back.
    pipeline: f64,
    /// Seconds of reductions.
    reductions: f64,
    /// Seconds that the limiting station takes for all micro-batches but the first: in the forward phase (GPipe
    /// alone).
    forward: f64,
    /// The same seconds, for the rest of the step.
    rest: f64,
    /// The load of each shared line.
    lines: Vec<LineLoad>,
    /// Index in [`Search::stages`]; `None` for the empty end.
    stage: Option<usize>,
}

impl Label {
    fn empty(lines: usize) -> Self {
        let lines = vec![LineLoad::default(); lines];
        Self { pipeline: 0.0, reductions: 0.0, forward: 0.0, rest: 0.0, lines, stage: None }
    }

    /// Whether it is at least as good as another in every respect.
    fn dominates(&self, other: &Self) -> bool {
        self.pipeline <= other.pipeline
            && self.pipeline + self.reductions <= other.pipeline + other.reductions
            && self.forward <= other.forward
            && self.rest <= other.rest
            && self.lines.iter().zip(&other.lines).all(|(a, b)| a.forward <= b.forward && a.backward <= b.backward)
    }
}

/// The least cost that the missing first stages of a plan add.
#[derive(Default)]
struct Remaining {
    pipeline: f64,
    reductions: f64,
    forward: f64,
    rest: f64,
    /// Seconds that one second of the pipeline adds to the rest, by the limit of round trips.
    round_trip: f64,
}

/// A stage of some end, and the next stage of that end.
#[derive(Clone, Copy)]
struct LinkedStage {
    range: StageRange,
    next: Option<usize>,
}

/// Least seconds of the atoms before a position.
#[derive(Clone, Copy, Default)]
struct LeastBefore {
    /// The seconds on the fastest unit.
    pipeline: f64,
    /// Weighed by [`Search::weights`].
    forward: f64,
    backward: f64,
}

struct Search<'a> {
    problem: &'a Problem,
    schedule: Schedule,
    round_trip: RoundTrip,
    /// Micro-batches less one.
    more: f64,
    /// The cost of the best plan so far.
    below: f64,
    /// By unit: the weight of its load in the weighed sum that bounds the largest load. See `bound.rs`.
    weights: Vec<f64>,
    /// The least seconds before each position.
    least: Vec<LeastBefore>,
    /// See [`Problem::neighbours`], by cut.
    neighbours: Vec<[f64; 2]>,
    stages: Vec<LinkedStage>,
    best: Option<ScoredPlan>,
}

/// Whether one unit holds the first stage and the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Open,
    Closed,
}

type Layer = BTreeMap<State, Vec<Label>>;

impl<'a> Search<'a> {
    fn new(problem: &'a Problem, schedule: Schedule, below: f64) -> Self {
        let units = problem.machines.units.len();
        let atoms = problem.chain.atoms;
        let seconds = |u: usize, lo: usize, hi: usize| problem.compute(u, lo, hi).iter().sum::<f64>();
        let weights: Vec<f64> = (0..units).map(|u| 1.0 / seconds(u, 0, atoms).max(1e-300)).collect();
        let mut least = vec![LeastBefore::default()];
        for a in 0..atoms {
            let of = |f: &dyn Fn(usize) -> f64| (0..units).map(f).fold(f64::INFINITY, f64::min);
            let before = least[a];
            least.push(LeastBefore {
                pipeline: of(&|u| seconds(u, 0, a + 1) - problem.delayed(schedule, u, 0, a + 1)),
                forward: before.forward + of(&|u| weights[u] * problem.compute(u, a, a + 1)[0]),
                backward: before.backward + of(&|u| weights[u] * problem.compute(u, a, a + 1)[1]),
            });
        }
        Self {
            problem,
            schedule,
            round_trip: problem.round_trip(schedule),
            more: f64::from(problem.micro_batches) - 1.0,
            below,
            weights,
            least,
            neighbours: (0..=atoms).map(|cut| problem.neighbours(cut)).collect(),
            stages: Vec::new(),
            best: None,
        }
    }

    fn run(mut self, width: usize) -> Option<ScoredPlan> {
        let units = self.problem.machines.units.len() as u32;
        let closed = !self.problem.chain.ties.is_empty();
        let shapes: &[Shape] = if closed { &[Shape::Open, Shape::Closed] } else { &[Shape::Open] };
        for &shape in shapes {
            let empty = State::empty(self.problem.chain.atoms as u32);
            // Ends of plans, by their number of stages.
            let mut layer = Layer::from([(empty, vec![Label::empty(self.problem.machines.line_count)])]);
            for count in 1..=units + u32::from(shape == Shape::Closed) {
                let mut next = Layer::new();
                for (state, labels) in &layer {
                    for unit in 0..units {
                        self.extend_state(shape, count, state, labels, unit, &mut next);
                    }
                }
                layer = if width == usize::MAX { next } else { self.best_ends(next, count, width) };
            }
        }
        self.best
    }

    /// Puts every stage of `unit` before a state.
    fn extend_state(&mut self, shape: Shape, count: u32, state: &State, labels: &[Label], unit: u32, next: &mut Layer) {
        let problem = self.problem;
        let again = state.last.as_ref().is_some_and(|l| l.unit == unit && state.first != unit);
        if state.uses(unit) && !again {
            return;
        }
        let unit_use = if again { UnitUse::Again } else { UnitUse::First };
        let hi = state.lo;
        for lo in 0..hi {
            let complete = lo == 0;
            // A unit that comes again takes the first stage. A closed plan is complete only then.
            if again != complete && (again || shape == Shape::Closed) {
                continue;
            }
            if labels.iter().all(|label| self.total_with(label, unit, lo..hi) >= self.below) {
                continue;
            }
            let Some(stage) = Stage::new(problem, self.schedule, state, unit, lo, count, unit_use) else { continue };
            let open = if complete { Vec::new() } else { state.open_before(problem, unit, lo) };
            let last = (shape == Shape::Closed).then(|| stage.last(state, unit, lo));
            let state = State { lo, used: state.used | 1 << unit, first: unit, open, last };
            let remaining = if complete { Remaining::default() } else { self.remaining(&state, count) };
            let range = StageRange { unit, lo, hi };
            for label in labels {
                let mut new = self.extend(label, &stage, count, complete);
                if self.total(&new, &remaining) >= self.below {
                    continue;
                }
                self.add_lines(&mut new, label, &stage);
                if self.total(&new, &remaining) >= self.below {
                    continue;
                }
                let linked = LinkedStage { range, next: label.stage };
                if complete {
                    self.finish(linked);
                    continue;
                }
                let kept = next.entry(state.clone()).or_default();
                if !kept.iter().any(|k| k.dominates(&new)) {
                    kept.retain(|k| !new.dominates(k));
                    self.stages.push(linked);
                    kept.push(Label { stage: Some(self.stages.len() - 1), ..new });
                }
            }
        }
    }

    /// By position, the `width` ends with the lowest bounds.
    fn best_ends(&self, layer: Layer, count: u32, width: usize) -> Layer {
        let mut ends: BTreeMap<u32, Vec<(f64, State, Label)>> = BTreeMap::new();
        for (state, labels) in layer {
            let remaining = self.remaining(&state, count);
            let here = ends.entry(state.lo).or_default();
            here.extend(labels.into_iter().map(|l| (self.total(&l, &remaining), state.clone(), l)));
        }
        let mut kept = Layer::new();
        for mut ends in ends.into_values() {
            ends.sort_by(|a, b| a.0.total_cmp(&b.0));
            ends.truncate(width);
            for (_, state, label) in ends {
                kept.entry(state).or_default().push(label);
            }
        }
        kept
    }

    fn remaining(&self, state: &State, count: u32) -> Remaining {
        let units = self.problem.machines.units.len() as u32;
        let free = |u: &u32| !state.uses(*u) || state.last.as_ref().is_some_and(|l| l.unit == *u);
        let weight: f64 = (0..units).filter(free).map(|u| self.weights[u as usize]).sum();
        let LeastBefore { mut pipeline, forward, backward } = self.least[state.lo as usize];
        // One of the free units comes before the first stage.
        let machines = &self.problem.machines;
        let [down, up] = self.neighbours[state.lo as usize];
        let first = state.first as usize;
        let to_first = (0..units)
            .filter(free)
            .map(|u| u as usize)
            .filter(|u| *u != first)
            .map(|u| machines.link(u, first).seconds(down) + machines.link(first, u).seconds(up));
        pipeline += to_first.fold(f64::INFINITY, f64::min);
        // One of the free units owns each open tie.
        let ties = self.problem.chain.ties.iter().enumerate().filter(|(_, t)| t.owner_atom() < state.lo);
        let reductions = ties.map(|(t, _)| {
            let owners = (0..units).filter(free);
            owners.map(|u| state.reduction_seconds(self.problem, t, u)).fold(f64::INFINITY, f64::min)
        });
        let reductions = reductions.sum();
        let load = |weighed: f64| if weighed > 0.0 { self.more * weighed / weight } else { 0.0 };
        let stages = count + ((0..units).filter(free).count() as u32).min(state.lo);
        if self.schedule == Schedule::GPipe {
            return Remaining { pipeline, reductions, forward: load(forward), rest: load(backward), round_trip: 0.0 };
        }
        let round_trip = self.round_trip_rest(1.0, stages);
        Remaining { pipeline, reductions, forward: 0.0, rest: load(forward + backward), round_trip }
    }

    /// Seconds that a round trip over so many stages adds for all micro-batches but the first.
    fn round_trip_rest(&self, pipeline: f64, stages: u32) -> f64 {
        self.more * self.round_trip.period(pipeline, stages as usize)
    }

    /// The least cost of a plan with this end.
    fn total(&self, label: &Label, remaining: &Remaining) -> f64 {
        let pipeline = label.pipeline + remaining.pipeline;
        let rest = label.rest.max(remaining.rest).max(pipeline * remaining.round_trip);
        pipeline + label.reductions + remaining.reductions + label.forward.max(remaining.forward) + rest
    }

    /// The least cost of a plan with this end and one more stage before it. It is quickly found, since it counts no
    /// messages.
    fn total_with(&self, label: &Label, unit: u32, atoms: Range<u32>) -> f64 {
        let (u, lo, hi) = (unit as usize, atoms.start as usize, atoms.end as usize);
        let [forward, backward] = self.problem.compute(u, lo, hi);
        let delayed = self.problem.delayed(self.schedule, u, lo, hi);
        let pipeline = label.pipeline + forward + backward - delayed + self.least[lo].pipeline;
        let phased = self.schedule == Schedule::GPipe;
        let [forward, rest] = if phased { [forward, backward] } else { [0.0, forward + backward] };
        pipeline + label.reductions + label.forward.max(self.more * forward) + label.rest.max(self.more * rest)
    }

    /// Keeps a whole plan if it is the best so far.
    fn finish(&mut self, first: LinkedStage) {
        let mut stages = vec![first.range];
        let mut next = first.next;
        while let Some(stage) = next.map(|i| self.stages[i]) {
            stages.push(stage.range);
            next = stage.next;
        }
        let new = self.problem.scored(stages, self.schedule);
        if new.score.feasible() {
            self.below = self.below.min(new.score.step);
        }
        if self.best.as_ref().is_none_or(|best| new.score.better(&best.score)) {
            self.best = Some(new);
        }
    }

    /// A label with one more stage before it, without the load of lines.
    fn extend(&self, label: &Label, stage: &Stage, count: u32, complete: bool) -> Label {
        let mut pipeline = label.pipeline + stage.pipeline;
        let round_trip = self.round_trip_rest(pipeline + stage.delayed, count);
        if complete {
            pipeline += stage.delayed;
        }
        Label {
            pipeline,
            reductions: label.reductions + stage.reductions,
            forward: label.forward.max(stage.limits.forward),
            rest: label.rest.max(stage.limits.rest).max(round_trip),
            lines: Vec::new(),
            stage: label.stage,
        }
    }

    /// Adds the load of lines to what [`Self::extend`] made of a label.
    fn add_lines(&self, new: &mut Label, label: &Label, stage: &Stage) {
        let phased = self.schedule == Schedule::GPipe;
        new.lines.clone_from(&label.lines);
        for (sum, add) in new.lines.iter_mut().zip(&stage.lines) {
            sum.forward += add.forward;
            sum.backward += add.backward;
            if phased {
                new.forward = new.forward.max(self.more * sum.forward);
                new.rest = new.rest.max(self.more * sum.backward);
            } else {
                new.rest = new.rest.max(self.more * (sum.forward + sum.backward));
            }
        }
    }
}
