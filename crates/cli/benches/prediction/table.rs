//! Errors of the predictions, over all runs of a testbed and over all runs.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The largest error of a good prediction, in percent.
const TARGET: f64 = 10.0;

/// One training run: predicted and measured figures.
#[derive(Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) testbed: String,
    /// Peers with operators.
    peers: usize,
    step_s: Pair,
    /// The figure of the peer that computes longest.
    compute_s: Pair,
    /// The figure of the peer whose prediction is worst.
    memory_bytes: Pair,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct Pair {
    predicted: f64,
    measured: f64,
}

impl Pair {
    fn of(object: &Value, predicted: &str, measured: &str) -> Self {
        let number = |key: &str| object[key].as_f64().unwrap_or(f64::NAN);
        Self { predicted: number(predicted), measured: number(measured) }
    }

    /// The error in percent. It is positive if the prediction is too large.
    fn error(&self) -> f64 {
        100.0 * (self.predicted / self.measured - 1.0)
    }
}

impl Run {
    /// Reads a run's summary. Its steps take `step_s`.
    pub(crate) fn new(testbed: &str, summary: &Value, step_s: f64) -> Self {
        let none = Pair { predicted: f64::NAN, measured: f64::NAN };
        let peers: Vec<&Value> =
            summary["peers"].as_array().into_iter().flatten().filter(|p| p["operators"] != 0).collect();
        let compute = peers.iter().map(|p| Pair::of(p, "predicted_compute_s", "compute_s"));
        let memory = peers.iter().map(|p| Pair::of(p, "predicted_memory_bytes", "peak_memory_bytes"));
        Self {
            testbed: testbed.to_owned(),
            peers: peers.len(),
            step_s: Pair { measured: step_s, ..Pair::of(summary, "predicted_step_s", "median_step_s") },
            compute_s: compute.max_by(|a, b| a.measured.total_cmp(&b.measured)).unwrap_or(none),
            memory_bytes: memory.max_by(|a, b| a.error().abs().total_cmp(&b.error().abs())).unwrap_or(none),
        }
    }

    /// One line, for whoever watches.
    pub(crate) fn line(&self) -> String {
        format!(
            "{}: predicted {:.3} s, measured {:.3} s ({:+.1} %); computing {:+.1} %, memory {:+.1} %",
            self.testbed,
            self.step_s.predicted,
            self.step_s.measured,
            self.step_s.error(),
            self.compute_s.error(),
            self.memory_bytes.error()
        )
    }
}

/// Prints a row for each testbed, in the order of the first runs, and one for all runs together.
pub(crate) fn print(runs: &[Run]) {
    println!(
        "\n| testbed | peers | runs | predicted step, s | measured, s | step off by | within 10 % \
         | computing off by | memory off by |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut names: Vec<&str> = Vec::new();
    for run in runs {
        if !names.contains(&run.testbed.as_str()) {
            names.push(&run.testbed);
        }
    }
    for name in &names {
        let of: Vec<&Run> = runs.iter().filter(|r| r.testbed == *name).collect();
        let steps = |f: fn(&Pair) -> f64| median(of.iter().map(|r| f(&r.step_s)).collect());
        let (predicted, measured) = (steps(|p| p.predicted), steps(|p| p.measured));
        let peers = of.first().map_or(0, |r| r.peers);
        println!("| {name} | {peers} | {} | {predicted:.3} | {measured:.3} | {} |", of.len(), errors(&of));
    }
    let all: Vec<&Run> = runs.iter().collect();
    let absolute = |f: fn(&Run) -> f64| median(all.iter().map(|r| f(r).abs()).collect());
    println!("| all | | {} | | | {} |", all.len(), errors(&all));
    println!(
        "\nmedian of the errors' sizes: step {:.1} %, computing {:.1} %, memory {:.1} %",
        absolute(|r| r.step_s.error()),
        absolute(|r| r.compute_s.error()),
        absolute(|r| r.memory_bytes.error())
    );
    // What varies from run to run is the machine's speed. The median over repeats shows the planner's own error.
    let typical =
        |name: &&str| median(runs.iter().filter(|r| r.testbed == **name).map(|r| r.step_s.error()).collect()).abs();
    let (sum, worst) = names.iter().map(typical).fold((0.0, 0.0_f64), |(sum, worst), e| (sum + e, worst.max(e)));
    println!("of the testbeds' median errors: mean size {:.1} %, worst {worst:.1} %", sum / names.len() as f64);
}

/// Median and range of each error, and the share of steps within the target.
fn errors(runs: &[&Run]) -> String {
    let spread = |f: fn(&Run) -> f64| {
        let errors: Vec<f64> = runs.iter().map(|r| f(r)).collect();
        let (low, high) = errors.iter().fold((f64::MAX, f64::MIN), |(l, h), e| (l.min(*e), h.max(*e)));
        format!("{:+.1} % ({low:+.1} to {high:+.1})", median(errors))
    };
    let good = runs.iter().filter(|r| r.step_s.error().abs() <= TARGET).count();
    format!(
        "{} | {good} of {} | {} | {}",
        spread(|r| r.step_s.error()),
        runs.len(),
        spread(|r| r.compute_s.error()),
        spread(|r| r.memory_bytes.error())
    )
}

pub(crate) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    let middle = figures.len() / 2;
    match figures.len() % 2 {
        0 if middle > 0 => (figures[middle - 1] + figures[middle]) / 2.0,
        _ => figures.get(middle).copied().unwrap_or(f64::NAN),
    }
}
