//! Local search: small changes to a plan, kept if they make it better.

use super::cut::{Effort, cut, cut_like};
use super::problem::Problem;
use super::score::{ScoredPlan, StageRange};
use crate::parallel::for_each;
use crate::schedule::Schedule;

/// Changes the order of units, and cuts anew after each change, until nothing helps or `cuts` have been made. For few
/// units.
pub(crate) fn reorder(
    problem: &Problem,
    order: &[u32],
    schedules: &[Schedule],
    found: ScoredPlan,
    mut cuts: usize,
) -> ScoredPlan {
    let mut best = found;
    // First the units that the plan uses, in its order. Then the units that it leaves out, so that a change may bring
    // them back.
    let mut order = with_rest(&best, order);
    let n = order.len();
    loop {
        let mut gained = false;
        let moves = (0..n).flat_map(|from| (0..n).map(move |to| (from, to, false)));
        let swaps = (0..n).flat_map(|a| (a + 2..n).map(move |b| (a, b, true)));
        for (from, to, swap) in moves.chain(swaps) {
            if from == to || (!swap && from == to + 1) {
                continue;
            }
            let Some(left) = cuts.checked_sub(1) else {
                return best;
            };
            cuts = left;
            let mut other = order.clone();
            if swap {
                other.swap(from, to);
            } else {
                let unit = other.remove(from);
                other.insert(to, unit);
            }
            if let Some(new) = cut_like(problem, &other, &best).map(|f| with_best_schedule(problem, f, schedules))
                && new.score.step < best.score.step * (1.0 - 1e-9)
            {
                (best, order, gained) = (new, other, true);
            }
        }
        if !gained {
            return best;
        }
    }
}

/// The plan under the best of `schedules`.
pub(crate) fn with_best_schedule(problem: &Problem, mut found: ScoredPlan, schedules: &[Schedule]) -> ScoredPlan {
    for &schedule in schedules {
        let score = problem.evaluate(&found.stages, schedule);
        if score.better(&found.score) {
            (found.score, found.schedule) = (score, schedule);
        }
    }
    found
}

fn with_rest(found: &ScoredPlan, order: &[u32]) -> Vec<u32> {
    let mut all: Vec<u32> = Vec::with_capacity(order.len());
    for u in found.stages.iter().map(|g| &g.unit).chain(order) {
        if !all.contains(u) {
            all.push(*u);
        }
    }
    all
}

/// Shifts cuts, exchanges units, drops stages and adds unused units, until nothing helps or `tries` plans have been
/// tried.
pub(crate) fn polish(problem: &Problem, found: ScoredPlan, tries: &mut usize) -> ScoredPlan {
    let mut state = Polish { problem, best: found, tries };
    state.shift();
    while state.exchange() {}
    state.best
}

struct Polish<'a> {
    problem: &'a Problem,
    best: ScoredPlan,
    tries: &'a mut usize,
}

impl Polish<'_> {
    /// Keeps the change if it helps.
    fn offer(&mut self, stages: Vec<StageRange>) -> bool {
        let Some(left) = self.tries.checked_sub(1) else {
            return false;
        };
        *self.tries = left;
        if stages.is_empty() || stages.iter().any(|g| g.lo >= g.hi) {
            return false;
        }
        let score = self.problem.evaluate(&stages, self.best.schedule);
        let (old, new) = (self.best.score.key(), score.key());
        // The same numbers summed in another order differ in the last bits.
        let helps = new.0 < old.0 || (new.0 == old.0 && new.1 < old.1 * (1.0 - 1e-9));
        if helps {
            self.best = ScoredPlan { stages, schedule: self.best.schedule, score };
        }
        helps
    }

    /// Shifts every cut as far as it helps.
    fn shift(&mut self) -> bool {
        let mut ever = false;
        loop {
            let mut gained = false;
            for s in 1..self.best.stages.len() {
                for by in [1_i64, -1, 2, -2, 4, -4, 8, -8, 16, -16, 32, -32] {
                    let mut stages = self.best.stages.clone();
                    let at = i64::from(stages[s].lo) + by;
                    if at <= i64::from(stages[s - 1].lo) || at >= i64::from(stages[s].hi) {
                        continue;
                    }
                    (stages[s - 1].hi, stages[s].lo) = (at as u32, at as u32);
                    gained |= self.offer(stages);
                }
            }
            if !gained || *self.tries == 0 {
                return ever || gained;
            }
            ever = true;
        }
    }

    /// One round of changes of units; returns whether any helped.
    fn exchange(&mut self) -> bool {
        let mut gained = false;
        let units = self.problem.machines.units.len() as u32;
        let unused =
            |p: &Self| -> Vec<u32> { (0..units).filter(|u| p.best.stages.iter().all(|g| g.unit != *u)).collect() };
        let mut s = 0;
        while s < self.best.stages.len() && *self.tries > 0 {
            gained |= self.drop_stage(s);
            for t in s + 1..self.best.stages.len() {
                let mut stages = self.best.stages.clone();
                (stages[s].unit, stages[t].unit) = (stages[t].unit, stages[s].unit);
                if self.offer(stages) {
                    gained = true;
                    self.shift();
                }
            }
            for u in unused(self) {
                gained |= self.use_unit(s, u);
            }
            s += 1;
        }
        gained
    }

    /// Drops a stage. Its atoms go to a neighbour, or to both; returns whether it helped.
    fn drop_stage(&mut self, s: usize) -> bool {
        let mut gained = false;
        for heir in [Heir::Next, Heir::Previous, Heir::Both] {
            let old = &self.best.stages;
            if old.len() < 2 || s >= old.len() {
                break;
            }
            let StageRange { lo, hi, .. } = old[s];
            let mut stages = old.clone();
            stages.remove(s);
            let middle = match heir {
                _ if s == 0 => lo,
                _ if s == stages.len() => hi,
                Heir::Next => lo,
                Heir::Previous => hi,
                Heir::Both => (lo + hi) / 2,
            };
            if s > 0 {
                stages[s - 1].hi = middle;
            }
            if s < stages.len() {
                stages[s].lo = middle;
            }
            if self.offer(stages) {
                gained = true;
                self.shift();
            }
        }
        gained
    }

    /// Gives an unused unit a stage, or half of it; returns whether it helped.
    fn use_unit(&mut self, s: usize, unused: u32) -> bool {
        if s >= self.best.stages.len() {
            return false;
        }
        let mut stages = self.best.stages.clone();
        stages[s].unit = unused;
        let mut helped = self.offer(stages);
        for half in [Half::First, Half::Second] {
            if s >= self.best.stages.len() || self.best.stages.iter().any(|g| g.unit == unused) {
                break;
            }
            let mut stages = self.best.stages.clone();
            let StageRange { unit, lo, hi } = stages[s];
            let middle = (lo + hi) / 2;
            let (first, last) = match half {
                Half::First => (unused, unit),
                Half::Second => (unit, unused),
            };
            stages[s] = StageRange { unit: first, lo, hi: middle };
            stages.insert(s + 1, StageRange { unit: last, lo: middle, hi });
            helped |= self.offer(stages);
        }
        if helped {
            self.shift();
        }
        helped
    }
}

/// The stage that takes a dropped stage's atoms.
#[derive(Clone, Copy)]
enum Heir {
    Next,
    Previous,
    Both,
}

/// The half of a stage that an unused unit takes.
#[derive(Clone, Copy)]
enum Half {
    First,
    Second,
}

/// The best cuts for some orders, each under its best schedule, the best first. Each comes with the index of its order.
pub(crate) fn best_cuts(
    problem: &Problem,
    orders: &[Vec<u32>],
    schedules: &[Schedule],
    effort: Effort,
    keep: usize,
) -> Vec<(usize, ScoredPlan)> {
    let best = for_each(orders, |order| {
        let cuts = schedules.iter().filter_map(|s| cut(problem, order, *s, effort));
        cuts.min_by(|a, b| a.score.step.total_cmp(&b.score.step))
    });
    let mut found: Vec<(usize, ScoredPlan)> = (0..).zip(best).filter_map(|(i, plan)| Some((i, plan?))).collect();
    found.sort_by(|a, b| a.1.score.step.total_cmp(&b.1.score.step));
    found.dedup_by(|a, b| a.1.stages == b.1.stages);
    found.truncate(keep);
    found
}
