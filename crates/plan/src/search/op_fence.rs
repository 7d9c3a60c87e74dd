//! OP-Fence: groups and orders the machines, cuts the chain for each order, and refines the best plans.

use super::cut::{Effort, cut};
use super::exact::beam_search;
use super::orders::orders;
use super::problem::{MAX_THOROUGH_UNITS, Problem};
use super::refine::{best_cuts, polish, reorder, with_best_schedule};
use super::score::{ScoredPlan, StageRange};
use crate::parallel::for_each;
use crate::schedule::Schedule;

/// Partial plans that the beam search keeps, per position and number of stages.
const BEAM_WIDTH: usize = 24;

/// How many orders a thorough search refines.
const REFINED_ORDERS: usize = 3;

/// How many cuts a thorough search may try while it changes one order.
const REORDER_CUTS: usize = 300;

/// How many changed plans one refinement may try.
const POLISH_TRIES: usize = 4_000;

/// How many changed plans a thorough search may try, starting from the known plans.
const POLISH_TRIES_KNOWN: usize = 30_000;

/// How long OP-Fence searches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SearchDepth {
    /// Takes the orders as they are, for many units.
    Quick,
    /// Also changes the orders, for few units.
    Thorough,
}

/// The best plan found, with one of `schedules`. It is no worse than any plan of `known`. `None` if none fits.
///
/// The search is limited by the number of plans tried, not by seconds. So the result is a function of the problem.
pub fn op_fence(problem: &Problem, schedules: &[Schedule], known: &[Vec<StageRange>]) -> Option<ScoredPlan> {
    let depth = match problem.machines.units.len() {
        0..=MAX_THOROUGH_UNITS => SearchDepth::Thorough,
        _ => SearchDepth::Quick,
    };
    search(problem, schedules, known, depth)
}

/// See [`op_fence`].
pub(crate) fn search(
    problem: &Problem,
    schedules: &[Schedule],
    known: &[Vec<StageRange>],
    depth: SearchDepth,
) -> Option<ScoredPlan> {
    let orders = orders(problem);
    let (mut best, mut tries) = match depth {
        SearchDepth::Thorough => (thorough(problem, schedules, &orders), POLISH_TRIES_KNOWN),
        SearchDepth::Quick => (quick(problem, schedules, &orders), POLISH_TRIES),
    };
    for stages in known {
        for &schedule in schedules {
            let score = problem.evaluate(stages, schedule);
            if score.feasible() && best.as_ref().is_none_or(|b| score.better(&b.score)) {
                let plan = ScoredPlan { stages: stages.clone(), schedule, score };
                best = Some(polish(problem, plan, &mut tries));
            }
        }
    }
    best
}

fn thorough(problem: &Problem, schedules: &[Schedule], orders: &[Vec<u32>]) -> Option<ScoredPlan> {
    let starts = best_cuts(problem, orders, schedules, Effort::Fine, REFINED_ORDERS);
    let refined = for_each(&starts, |(i, start)| {
        let plan = reorder(problem, &orders[*i], schedules, start.clone(), REORDER_CUTS);
        let order: Vec<u32> = plan.stages.iter().map(|g| g.unit).collect();
        let fine = cut(problem, &without_repeats(order), plan.schedule, Effort::Fine);
        let plan = fine.filter(|f| f.score.better(&plan.score)).unwrap_or(plan);
        polish(problem, plan, &mut { POLISH_TRIES })
    });
    let mut best: Option<ScoredPlan> = None;
    for plan in refined {
        if best.as_ref().is_none_or(|b| plan.score.better(&b.score)) {
            best = Some(plan);
        }
    }
    // The beam search also finds orders that no change of one unit's place leads to.
    if problem.machines.units.iter().all(|u| u.copies() == 1) {
        let below = best.as_ref().map(|b| b.score.step);
        if let Some(plan) = beam_search(problem, schedules, below, BEAM_WIDTH) {
            best = Some(polish(problem, plan, &mut { POLISH_TRIES }));
        }
    }
    best
}

fn quick(problem: &Problem, schedules: &[Schedule], orders: &[Vec<u32>]) -> Option<ScoredPlan> {
    // One schedule shows which order is best. The best orders of other schedules differ little.
    let usual = if schedules.contains(&Schedule::OneFOneB) {
        &[Schedule::OneFOneB]
    } else {
        &schedules[..schedules.len().min(1)]
    };
    let (i, start) = best_cuts(problem, orders, usual, Effort::Least, 1).into_iter().next()?;
    let best = with_best_schedule(problem, start, schedules);
    let closer = cut(problem, &orders[i], best.schedule, Effort::Coarse);
    let best = closer.filter(|f| f.score.better(&best.score)).unwrap_or(best);
    Some(polish(problem, best, &mut { POLISH_TRIES }))
}

/// Each unit once, at its first place.
fn without_repeats(order: Vec<u32>) -> Vec<u32> {
    let mut once = Vec::with_capacity(order.len());
    for u in order {
        if !once.contains(&u) {
            once.push(u);
        }
    }
    once
}
