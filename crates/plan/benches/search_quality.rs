//! Search quality: OP-Fence's plans against the best plans, on small random problems that can be solved exactly.
//!
//! It prints the ratio of OP-Fence's step time to the best step time, and how often a baseline beats OP-Fence.
//! It also prints the ratio of the lower bound to the best step time.
//!
//! ```console
//! $ cargo bench -p fusionllm-plan --bench search_quality [-- SEEDS [UNITS [CUTS]] --results FILE]
//! ```
//!
//! `SEEDS` problems (300) have at most `UNITS` devices (8) and `CUTS` places to cut (40). A fourth argument prints
//! every problem. `--results` also writes the figures to a file, as JSON. A short version runs as a test, in
//! `tests/quality.rs`.

use std::time::Instant;

use fusionllm_plan::Schedule;
use fusionllm_plan::search::{equal_compute, equal_number, exact, lower_bound, op_fence};

#[path = "../tests/common/cases.rs"]
mod cases;

fn main() {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let at = |i: usize, default| given.get(i).copied().unwrap_or(default);
    let (seeds, units, cuts) = (at(0, 300), at(1, 8), at(2, 40));
    let schedules = Schedule::ALL;
    let (mut ratios, mut bounds, mut worse, mut none) = (Vec::new(), Vec::new(), 0, 0);
    let (mut fence_s, mut exact_s, mut bound_s) = (0.0, 0.0, 0.0);
    for seed in 0..seeds as u64 {
        let problem = cases::case(seed, units, cuts);
        let baselines = [equal_number(&problem), equal_compute(&problem)];
        let start = Instant::now();
        let found = op_fence(&problem, &schedules, &baselines);
        fence_s += start.elapsed().as_secs_f64();
        let start = Instant::now();
        let best = exact(&problem, &schedules, found.as_ref().map(|f| f.score.step));
        let took = start.elapsed().as_secs_f64();
        exact_s += took;
        let best = match (best, &found) {
            (Some(best), _) => best,
            (None, Some(found)) => found.clone(),
            (None, None) => {
                none += 1;
                continue;
            }
        };
        let Some(found) = found else {
            println!("seed {seed}: OP-Fence found nothing, exact {:.4} s {:?}", best.score.step, best.stages);
            ratios.push(f64::INFINITY);
            continue;
        };
        let start = Instant::now();
        let bound = lower_bound(&problem, &schedules, 1);
        bound_s += start.elapsed().as_secs_f64();
        let ratio = found.score.step / best.score.step;
        for (name, b) in ["equal-number", "equal-compute"].iter().zip(&baselines) {
            let score = problem.evaluate(b, Schedule::OneFOneB);
            if score.feasible() && score.step < found.score.step {
                println!("seed {seed}: {name} is better");
                worse += 1;
            }
        }
        if bound > best.score.step * (1.0 + 1e-9) {
            println!("seed {seed}: the bound {bound} is above the best, {}", best.score.step);
        }
        if ratio > 1.05 || given.len() > 3 {
            println!(
                "seed {seed}: {} units, {} atoms, {} micro-batches, {} ties: {:.4} s, best {:.4} s ({ratio:.3}x), bound {:.2}, exact took {took:.2} s\n  {:?} {:?}\n  {:?} {:?}",
                problem.machines.units.len(),
                problem.chain.atoms,
                problem.micro_batches,
                problem.chain.ties.len(),
                found.score.step,
                best.score.step,
                bound / best.score.step,
                found.schedule,
                show(&found.stages),
                best.schedule,
                show(&best.stages)
            );
        }
        ratios.push(ratio);
        bounds.push(bound / best.score.step);
    }
    ratios.sort_by(f64::total_cmp);
    bounds.sort_by(f64::total_cmp);
    let middle = |v: &[f64]| v.get(v.len() / 2).copied().unwrap_or(f64::NAN);
    println!(
        "{} problems ({none} fit no plan): OP-Fence / exact median {:.4}, 90 % {:.4}, worst {:.4}; worse than a baseline {worse}",
        ratios.len(),
        middle(&ratios),
        ratios.get(ratios.len() * 9 / 10).copied().unwrap_or(f64::NAN),
        ratios.last().copied().unwrap_or(f64::NAN)
    );
    println!(
        "lower bound / exact median {:.3}, lowest {:.3}",
        middle(&bounds),
        bounds.first().copied().unwrap_or(f64::NAN)
    );
    println!("seconds: OP-Fence {fence_s:.1}, exact {exact_s:.1}, bound {bound_s:.1}");
    if let Some(file) = std::env::args().skip_while(|a| a != "--results").nth(1) {
        let figures = serde_json::json!({
            "problems": ratios.len(), "median": middle(&ratios), "worst": ratios.last(), "beaten_by_baseline": worse,
            "bound_median": middle(&bounds),
        });
        if let Err(e) = std::fs::write(&file, figures.to_string()) {
            eprintln!("{file}: {e}");
            std::process::exit(1);
        }
    }
}

fn show(stages: &[fusionllm_plan::search::StageRange]) -> String {
    stages.iter().map(|s| format!("{}:{}..{}", s.unit, s.lo, s.hi)).collect::<Vec<_>>().join(" ")
}
