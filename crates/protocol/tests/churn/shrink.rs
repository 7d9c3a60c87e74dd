//! Makes a scenario that fails simpler, as long as it fails in the same way.

use crate::failure::Failure;
use crate::scenario::Scenario;

/// The most simulations that a scenario is shrunk with. A run takes milliseconds, and a stuck one a second.
const MOST_RUNS: usize = 1000;

/// A scenario that fails, and the simulations that it took to find it.
#[derive(Debug)]
pub(crate) struct Shrunk {
    pub(crate) scenario: Scenario,
    pub(crate) failure: Failure,
    pub(crate) runs: usize,
}

impl Shrunk {
    /// Takes a scenario if it fails in the same way. Returns whether it does.
    fn take(&mut self, scenario: Scenario, fails: &impl Fn(&Scenario) -> Option<Failure>) -> bool {
        if self.runs == MOST_RUNS {
            return false;
        }
        self.runs += 1;
        let Some(failure) = fails(&scenario).filter(|f| f.is_like(&self.failure)) else { return false };
        (self.scenario, self.failure) = (scenario, failure);
        true
    }
}

/// Shrinks a scenario that fails. `fails` simulates another one.
pub(crate) fn shrink(scenario: Scenario, failure: Failure, fails: impl Fn(&Scenario) -> Option<Failure>) -> Shrunk {
    let mut shrunk = Shrunk { scenario, failure, runs: 0 };
    while simpler(&shrunk.scenario).into_iter().any(|scenario| shrunk.take(scenario, &fails)) {}
    shrunk
}

/// Scenarios that are simpler by one thing, those that save most first. Each has fewer faults, machines or steps,
/// shorter times, or times with fewer digits. So shrinking ends.
fn simpler(scenario: &Scenario) -> Vec<Scenario> {
    let mut all = Vec::new();
    let changed = |change: &dyn Fn(&mut Scenario)| {
        let mut other = scenario.clone();
        change(&mut other);
        other
    };
    let count = scenario.faults.len();
    // All faults, halves of them, quarters, and at last single ones.
    let mut length = count;
    while length > 0 {
        let first = (0..count).step_by(length);
        all.extend(first.map(|i| changed(&|s| drop(s.faults.drain(i..count.min(i + length))))));
        length /= 2;
    }
    all.extend((1..scenario.machines).map(|machines| changed(&|s| s.machines = machines)));
    let steps = [10, 20, 50, 100, 150, 200, 250].into_iter().filter(|steps| *steps < scenario.steps);
    all.extend(steps.map(|steps| changed(&|s| s.steps = steps)));
    all.push(changed(&|s| s.checkpoint = 0));
    all.push(changed(&|s| s.measured = false));
    for i in 0..count {
        let (at, mut fault) = scenario.faults[i];
        let rounded = [at.round(), (at * 10.0).round() / 10.0];
        all.extend(rounded.map(|at| changed(&|s| s.faults[i].0 = at)));
        let Some(seconds) = fault.seconds_mut().copied() else { continue };
        let shorter = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0].into_iter().filter(|s| *s < seconds);
        all.extend(shorter.map(|shorter| changed(&|s| *s.faults[i].1.seconds_mut().unwrap() = shorter)));
    }
    all.retain(|other| other != scenario);
    all
}
