//! OP-Fence against the best plans and the baselines, and the lower bound against both, on random small problems. For
//! hundreds of problems: `cargo bench -p fusionllm-plan --bench search_quality`.
#![allow(clippy::unwrap_used)]

use fusionllm_plan::Schedule;
use fusionllm_plan::search::{
    LinkCost, Machines, Problem, StageRange, Unit, equal_compute, equal_number, exact, lower_bound, op_fence,
};

#[path = "common/cases.rs"]
mod cases;

#[test]
fn op_fence_is_near_the_best_and_never_behind_a_baseline() {
    let (mut ratios, mut bounds) = (Vec::new(), Vec::new());
    for seed in 1000..1040 {
        let problem = cases::case(seed, 6, 20);
        let baselines = [equal_number(&problem), equal_compute(&problem)];
        let found = op_fence(&problem, &Schedule::ALL, &baselines);
        let below = found.as_ref().map(|f| f.score.step);
        let best = exact(&problem, &Schedule::ALL, below).map(|b| b.score.step).or(below);
        let (Some(found), Some(best)) = (found, best) else {
            assert_eq!(best, None, "seed {seed}: OP-Fence finds no plan where there is one");
            continue;
        };
        for schedule in Schedule::ALL {
            for baseline in &baselines {
                let score = problem.evaluate(baseline, schedule);
                assert!(!score.feasible() || found.score.step <= score.step, "seed {seed}: a baseline is better");
            }
        }
        assert_eq!(problem.evaluate(&found.stages, found.schedule), found.score, "seed {seed}");
        let bound = lower_bound(&problem, &Schedule::ALL, 1);
        assert!(bound <= best * (1.0 + 1e-9), "seed {seed}: the bound {bound} is above the best step {best}");
        ratios.push(found.score.step / best);
        bounds.push(bound / best);
    }
    ratios.sort_by(f64::total_cmp);
    bounds.sort_by(f64::total_cmp);
    assert!(ratios.len() >= 35, "most of the problems have plans");
    assert!(ratios[ratios.len() / 2] <= 1.05, "{ratios:?}");
    assert!(ratios[ratios.len() - 1] <= 1.15, "{ratios:?}");
    assert!(bounds[bounds.len() / 2] >= 0.7, "{bounds:?}");
}

/// Joins neighbouring units, as the scheduler joins devices. Each group is as slow, small and distant as its worst
/// member.
fn joined(problem: &Problem, copies: usize) -> Machines {
    let machines = &problem.machines;
    let whole = |u: usize| problem.compute(u, 0, problem.chain.atoms).iter().sum::<f64>();
    let all: Vec<usize> = (0..machines.units.len()).collect();
    let broker = [machines.broker()];
    let mut groups: Vec<&[usize]> = all.chunks(copies).collect();
    let worst = |a: &[usize], b: &[usize]| {
        let pairs = a.iter().flat_map(|x| b.iter().map(move |y| (*x, *y))).filter(|(x, y)| x != y);
        pairs.map(|(x, y)| machines.link(x, y)).fold(LinkCost::NONE, LinkCost::worse)
    };
    let units = groups.iter().map(|group| {
        let slowest = group.iter().copied().max_by(|a, b| whole(*a).total_cmp(&whole(*b))).unwrap();
        let inside = worst(group, group);
        Unit {
            members: group.iter().map(|u| *u as u32).collect(),
            class: machines.units[slowest].class,
            memory: group.iter().map(|u| machines.units[*u].memory).fold(f64::INFINITY, f64::min),
            inside,
            exchange: LinkCost::new(2.0 * inside.latency, 2.0 * inside.per_byte),
            processors: Vec::new(),
            offload: None,
        }
    });
    let units = units.collect();
    groups.push(&broker);
    let link = |(a, b): (&[usize], &[usize])| if a == b { LinkCost::NONE } else { worst(a, b) };
    let pairs = groups.iter().flat_map(|a| groups.iter().map(move |b| (*a, *b)));
    Machines { units, links: pairs.map(link).collect(), lines: Vec::new(), line_count: 0, processor_count: 0 }
}

#[test]
fn the_bound_holds_for_replicas() {
    let mut bounds = Vec::new();
    for (seed, copies) in (0..60).zip([2, 3, 6].into_iter().cycle()) {
        let problem = cases::case(seed, 6, 20);
        let replicated = problem.with_machines(joined(&problem, copies));
        let bound = lower_bound(&problem, &Schedule::ALL, copies);
        let mut best = f64::INFINITY;
        for (problem, schedule) in [&problem, &replicated].into_iter().flat_map(|p| Schedule::ALL.map(|s| (p, s))) {
            let Some(found) = op_fence(problem, &[schedule], &[]) else { continue };
            let step = found.score.step;
            assert!(
                bound <= step * (1.0 + 1e-9),
                "seed {seed}, {schedule:?}: the bound {bound} is above the step {step}"
            );
            best = best.min(step);
        }
        if best.is_finite() {
            bounds.push(bound / best);
        }
    }
    bounds.sort_by(f64::total_cmp);
    assert!(bounds.len() > 40, "most have plans");
    assert!(bounds[bounds.len() / 2] >= 0.45, "{bounds:?}");
}

/// Tries all plans of a tiny problem.
#[test]
fn exact_finds_the_best_of_all_plans() {
    let mut tied = 0;
    for seed in 0..40 {
        let problem = cases::case(seed, 3, 5);
        tied += usize::from(!problem.chain.ties.is_empty());
        for schedule in Schedule::ALL {
            let mut all = Vec::new();
            plans(&problem, &mut Vec::new(), 0, &mut all);
            let scores = all.iter().map(|p| problem.evaluate(p, schedule)).filter(|s| s.feasible());
            let best = scores.map(|s| s.step).min_by(f64::total_cmp);
            let found = exact(&problem, &[schedule], None).map(|f| f.score.step);
            match (best, found) {
                (Some(best), Some(found)) => {
                    assert!((best - found).abs() <= 1e-9 * best, "seed {seed}, {schedule:?}: {found} for {best}");
                }
                _ => assert_eq!(best, found, "seed {seed}, {schedule:?}"),
            }
        }
    }
    assert!(tied > 3, "in some of them the ends share a parameter");
}

/// Every way to complete a plan. The first unit may come again at the very end if the ends share a parameter.
fn plans(problem: &Problem, begun: &mut Vec<StageRange>, lo: usize, all: &mut Vec<Vec<StageRange>>) {
    let atoms = problem.chain.atoms;
    if lo == atoms {
        all.push(begun.clone());
        return;
    }
    for unit in 0..problem.machines.units.len() as u32 {
        for hi in lo + 1..=atoms {
            let used = begun.iter().any(|g| g.unit == unit);
            let again = begun.len() > 1 && begun[0].unit == unit && hi == atoms && !problem.chain.ties.is_empty();
            if !used || again {
                begun.push(StageRange { unit, lo: lo as u32, hi: hi as u32 });
                plans(problem, begun, hi, all);
                begun.pop();
            }
        }
    }
}

#[test]
fn plans_are_a_function_of_the_problem() {
    for seed in [3, 14] {
        let found = || op_fence(&cases::case(seed, 6, 20), &Schedule::ALL, &[]);
        assert_eq!(found(), found());
    }
}
