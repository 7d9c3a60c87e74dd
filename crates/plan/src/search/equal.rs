//! Plans that share the chain out evenly, in the order of the units.

use super::problem::Problem;
use super::score::StageRange;

/// Gives every unit the same number of atoms, as nearly as possible.
pub fn equal_number(problem: &Problem) -> Vec<StageRange> {
    equal_shares(problem, |atom| atom as f64)
}

/// Gives every unit the same work, as nearly as possible.
pub fn equal_compute(problem: &Problem) -> Vec<StageRange> {
    equal_shares(problem, |atom| problem.compute(0, 0, atom).iter().sum())
}

/// Gives every unit parameters in proportion to its memory, as nearly as possible.
pub(crate) fn equal_memory(problem: &Problem) -> Vec<StageRange> {
    let (atoms, units) = (problem.chain.atoms, &problem.machines.units);
    let total: f64 = units.iter().map(|u| u.memory).sum();
    let state = |a: usize| problem.chain.state[a] / problem.chain.state[atoms].max(1e-300);
    let mut stages: Vec<StageRange> = Vec::with_capacity(units.len());
    let (mut lo, mut share) = (0, 0.0);
    for (u, unit) in units.iter().enumerate() {
        share += unit.memory / total.max(1e-300);
        let mut hi = lo;
        while hi < atoms && (u + 1 == units.len() || state(hi + 1) <= share) {
            hi += 1;
        }
        if hi > lo {
            stages.push(StageRange { unit: u as u32, lo: lo as u32, hi: hi as u32 });
        }
        lo = hi;
    }
    stages
}

/// Cuts at equal weights. `before(a)` is the weight of all atoms before `a`.
fn equal_shares(problem: &Problem, before: impl Fn(usize) -> f64) -> Vec<StageRange> {
    let (atoms, units) = (problem.chain.atoms, problem.machines.units.len());
    let share = before(atoms) / units as f64;
    let unit_of = |a: usize| (((before(a) + before(a + 1)) / 2.0 / share) as usize).min(units - 1) as u32;
    let mut stages: Vec<StageRange> = Vec::with_capacity(units);
    for a in 0..atoms {
        match stages.last_mut() {
            Some(last) if last.unit == unit_of(a) => last.hi += 1,
            _ => stages.push(StageRange { unit: unit_of(a), lo: a as u32, hi: a as u32 + 1 }),
        }
    }
    stages
}
