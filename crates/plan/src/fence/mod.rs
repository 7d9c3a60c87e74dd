//! OP-Fence: who runs what, so that a step takes the least time.
//!
//! The model is a [`Chain`] of atoms, the cluster [`Machines`]. Machines are grouped by community detection on the graph of throughputs, clusters
//! and the machines in them are ordered so that the pipeline takes the cheapest ways, each order is cut by dynamic programming, which may leave
//! machines out, and the best are refined by local search. All of it compares plans by [`Problem::evaluate`].

mod candidates;
mod communities;
mod cut;
mod machines;
mod objective;
mod order;
mod planner;
mod problem;
mod refine;

pub use communities::communities;
pub use cut::Found;
pub(crate) use objective::under_way;
pub use objective::{Bottleneck, Score, Segment};
pub(crate) use planner::{bound, plan};
pub use problem::{Chain, Input, Machines, Message, Problem, Route, Seconds, Tie, Unit};

use crate::Schedule;
use crate::exact::narrow;
use cut::Effort;

/// Units up to which whole orders are searched.
const FEW: usize = 12;

/// Ends of plans that are kept per position and number of stages when those of few units are looked for from all sides.
const WIDTH: usize = 24;

/// The best plan found, with one of `schedules`, no worse than any of `known`. `None` if none fits.
///
/// How long it searches is counted in plans, not in seconds, so that the result is a function of the problem.
pub fn op_fence(problem: &Problem, schedules: &[Schedule], known: &[Vec<Segment>]) -> Option<Found> {
    search(problem, schedules, known, problem.machines.units.len() <= FEW)
}

/// See [`op_fence`]; `few` units' orders are searched.
fn search(problem: &Problem, schedules: &[Schedule], known: &[Vec<Segment>], few: bool) -> Option<Found> {
    let orders = order::orders(problem);
    let (mut best, mut tries) =
        if few { (thorough(problem, schedules, &orders), 30_000) } else { (quick(problem, schedules, &orders), 4_000) };
    for segments in known {
        for &schedule in schedules {
            let score = problem.evaluate(segments, schedule);
            if score.feasible() && best.as_ref().is_none_or(|b| score.better(&b.score)) {
                let found = Found { segments: segments.clone(), schedule, score };
                best = Some(refine::polish(problem, found, &mut tries));
            }
        }
    }
    best
}

/// Searches the orders of a few units.
fn thorough(problem: &Problem, schedules: &[Schedule], orders: &[Vec<u32>]) -> Option<Found> {
    let mut best: Option<Found> = None;
    for (i, start) in refine::best_of(problem, orders, schedules, Effort::Fine, 3) {
        let (mut cuts, mut tries) = (300, 4_000);
        let found = refine::reorder(problem, &orders[i], schedules, start, &mut cuts);
        let order: Vec<u32> = found.segments.iter().map(|g| g.unit).collect();
        let fine = cut::cut(problem, &dedup(order), found.schedule, Effort::Fine);
        let found = fine.filter(|f| f.score.better(&found.score)).unwrap_or(found);
        let found = refine::polish(problem, found, &mut tries);
        if best.as_ref().is_none_or(|b| found.score.better(&b.score)) {
            best = Some(found);
        }
    }
    // Orders that no change of one unit's place leads to.
    if problem.machines.units.iter().all(|u| u.copies() == 1) {
        let below = best.as_ref().map(|b| b.score.step);
        if let Some(found) = narrow(problem, schedules, below, WIDTH) {
            best = Some(refine::polish(problem, found, &mut 4_000));
        }
    }
    best
}

/// Takes the orders of many units as they are.
fn quick(problem: &Problem, schedules: &[Schedule], orders: &[Vec<u32>]) -> Option<Found> {
    // One schedule shows which order is best; what suits the others differs little.
    let usual = if schedules.contains(&Schedule::OneFOneB) {
        &[Schedule::OneFOneB]
    } else {
        &schedules[..schedules.len().min(1)]
    };
    let (i, start) = refine::best_of(problem, orders, usual, Effort::Least, 1).into_iter().next()?;
    let best = refine::suited(problem, start, schedules);
    let closer = cut::cut(problem, &orders[i], best.schedule, Effort::Coarse);
    let best = closer.filter(|f| f.score.better(&best.score)).unwrap_or(best);
    Some(refine::polish(problem, best, &mut 4_000))
}

/// The cut that gives every unit the same number of atoms as nearly as can be, in the order listed.
pub fn equal_number(problem: &Problem) -> Vec<Segment> {
    equal_shares(problem, |atom| atom as f64)
}

/// The cut that gives every unit the same work as nearly as can be, in the order listed.
pub fn equal_compute(problem: &Problem) -> Vec<Segment> {
    equal_shares(problem, |atom| problem.compute(0, 0, atom).iter().sum())
}

/// The cut that gives every unit parameters in proportion to its memory as nearly as can be, in the order listed.
pub(crate) fn equal_memory(problem: &Problem) -> Vec<Segment> {
    let (atoms, units) = (problem.chain.atoms, &problem.machines.units);
    let total: f64 = units.iter().map(|u| u.memory).sum();
    let state = |a: usize| problem.chain.state[a] / problem.chain.state[atoms].max(1e-300);
    let mut segments: Vec<Segment> = Vec::with_capacity(units.len());
    let (mut lo, mut share) = (0, 0.0);
    for (u, unit) in units.iter().enumerate() {
        share += unit.memory / total.max(1e-300);
        let mut hi = lo;
        while hi < atoms && (u + 1 == units.len() || state(hi + 1) <= share) {
            hi += 1;
        }
        if hi > lo {
            segments.push(Segment { unit: u as u32, lo: lo as u32, hi: hi as u32 });
        }
        lo = hi;
    }
    segments
}

/// `before(a)` is the weight of all atoms before `a`.
fn equal_shares(problem: &Problem, before: impl Fn(usize) -> f64) -> Vec<Segment> {
    let (atoms, units) = (problem.chain.atoms, problem.machines.units.len());
    let share = before(atoms) / units as f64;
    let unit_of = |a: usize| (((before(a) + before(a + 1)) / 2.0 / share) as usize).min(units - 1) as u32;
    let mut segments: Vec<Segment> = Vec::with_capacity(units);
    for a in 0..atoms {
        match segments.last_mut() {
            Some(last) if last.unit == unit_of(a) => last.hi += 1,
            _ => segments.push(Segment { unit: unit_of(a), lo: a as u32, hi: a as u32 + 1 }),
        }
    }
    segments
}

/// Each unit once, where it stands first.
fn dedup(order: Vec<u32>) -> Vec<u32> {
    let mut once = Vec::with_capacity(order.len());
    for u in order {
        if !once.contains(&u) {
            once.push(u);
        }
    }
    once
}
