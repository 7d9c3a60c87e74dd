//! A run outlives its members: random losses, sleeps, cuts, joiners and leavers on a virtual clock.
//!
//! `FUSIONLLM_SEEDS=10000 cargo test -p fusionllm-protocol --test churn` tries more seeds, from `FUSIONLLM_FIRST_SEED`
//! on. A seed that fails is shrunk to a scenario with few faults, which is printed as a file for `scenarios/`. A test
//! runs each file there, and `FUSIONLLM_SCENARIO=NAME` one alone. With `FUSIONLLM_TRACE=1`, a world prints all that
//! happens in it.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod failure;
mod scenario;
mod shrink;
mod world;

use std::collections::BTreeMap;
use std::path::Path;

use failure::{Failure, caught};
use scenario::{Fault, Scenario};
use shrink::shrink;
use world::{History, live};

const SCENARIOS: &str = "crates/protocol/tests/churn/scenarios";

/// Runs a scenario to its end, and checks that every step was done once.
fn check(scenario: &Scenario) -> History {
    let history = live(scenario);
    if let Some(reason) = &history.failed {
        panic!("the run failed: {reason}");
    }
    assert_eq!(history.finished.unwrap().step, scenario.steps);
    assert!(history.steps.iter().copied().eq(1..=scenario.steps), "not every step was done once\n{history:?}");
    assert_eq!(history.saved.last(), Some(&scenario.steps), "the last checkpoint is not whole");
    for step in (7..=scenario.steps).step_by(7).chain([scenario.steps]) {
        assert!(history.evaluated.contains(&step), "no evaluation after step {step}");
    }
    history
}

fn simulate(scenario: &Scenario) -> Result<History, Failure> {
    caught(|| check(scenario))
}

/// Says how a seed fails, in the shortest way that was found.
fn report(scenario: Scenario, failure: Failure) -> String {
    let (seed, faults) = (scenario.seed, scenario.faults.len());
    let shrunk = shrink(scenario, failure, |scenario| simulate(scenario).err());
    format!(
        "seed {seed} fails: {}\n\nIts {faults} faults were shrunk to {} in {} runs. To keep them as a test, write \
         this to {SCENARIOS}/NAME.toml:\n\n{}\n\
         FUSIONLLM_SCENARIO=NAME cargo test -p fusionllm-protocol --test churn scenarios\n",
        shrunk.failure,
        shrunk.scenario.faults.len(),
        shrunk.runs,
        shrunk.scenario.text(),
    )
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn runs_end_with_every_step_done_once_whatever_happens() {
    let seeds = number("FUSIONLLM_SEEDS").unwrap_or(300);
    let first = number("FUSIONLLM_FIRST_SEED").unwrap_or(0);
    let run = |seed| {
        let scenario = Scenario::random(seed);
        simulate(&scenario).unwrap_or_else(|failure| panic!("{}", report(scenario, failure)))
    };
    let histories: Vec<History> = (first..first + seeds).map(run).collect();
    // The scenarios are not all harmless.
    let incidents: usize = histories.iter().map(|h| h.incidents).sum();
    let redone: usize = histories.iter().map(|h| h.redone).sum();
    let mut counts = BTreeMap::<String, u64>::new();
    for fault in histories.iter().flat_map(|h| &h.faults) {
        *counts.entry(fault.name()).or_default() += 1;
    }
    println!("{seeds} seeds: {counts:?}, {incidents} incidents, {redone} steps redone");
    assert!(
        incidents as u64 >= seeds / 2 && redone as u64 >= seeds / 2,
        "{incidents} incidents, {redone} steps redone"
    );
    assert!(seeds < 100 || counts.len() == 9 && counts.values().all(|n| *n >= seeds / 10), "{counts:?}");
}

/// Each of these scenarios fails if a rule is broken. Its file tells which.
#[test]
fn scenarios_of_broken_rules_succeed() {
    let only = std::env::var("FUSIONLLM_SCENARIO").ok();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(SCENARIOS);
    let mut files: Vec<_> = folder.read_dir().unwrap().map(|file| file.unwrap().path()).collect();
    files.retain(|file| only.as_ref().is_none_or(|name| file.file_stem().unwrap() == name.as_str()));
    files.sort();
    assert!(!files.is_empty(), "no scenario is called {only:?}");
    for file in files {
        let name = file.file_name().unwrap().display();
        let scenario = Scenario::parse(&std::fs::read_to_string(&file).unwrap());
        simulate(&scenario.unwrap_or_else(|e| panic!("{name}: {e}"))).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

/// A run whose machines have all died never ends. One machine is enough to show it.
#[test]
fn a_failure_is_shrunk_to_the_faults_that_cause_it() {
    let (pause, sleep) = (Fault::Pause(2.0), Fault::Sleep(0, 4.0));
    let faults = vec![(5.25, Fault::Kill(1)), (6.5, pause), (9.05, sleep), (9.12, Fault::Kill(0))];
    let scenario = Scenario { machines: 2, faults, ..quiet() };
    let failure = simulate(&scenario).unwrap_err();
    assert!(failure.message.starts_with("the run has not ended"), "{failure}");
    let shrunk = shrink(scenario, failure, |scenario| simulate(scenario).err());
    assert_eq!((shrunk.scenario.machines, &shrunk.scenario.faults[..]), (1, &[(9.0, Fault::Kill(0))][..]));
    assert!(shrunk.failure.message.starts_with("the run has not ended"), "{}", shrunk.failure);
}

#[test]
fn a_scenario_that_is_printed_can_be_read() {
    for scenario in (0..100).map(Scenario::random) {
        assert_eq!(Scenario::parse(&scenario.text()), Ok(scenario));
    }
}

fn quiet() -> Scenario {
    Scenario { machines: 3, steps: 300, checkpoint: 0, faults: Vec::new(), measured: true, seed: 1 }
}

#[test]
fn an_undisturbed_run_does_every_step_once() {
    let history = check(&quiet());
    assert_eq!((history.incidents, history.redone), (0, 0));
    assert_eq!(history.saved, [300]);
}

#[test]
fn a_killed_peer_costs_a_few_steps() {
    let history = check(&Scenario { steps: 1500, faults: vec![(60.0, Fault::Kill(1))], ..quiet() });
    assert_eq!(history.incidents, 1);
    assert!(history.redone < 400, "{} steps", history.redone);
}

/// Copies are made in every generation. Three losses, one after another, each cost a few steps.
#[test]
fn every_generation_makes_copies() {
    let faults = vec![(6.0, Fault::Leave(1)), (50.0, Fault::Kill(2)), (60.0, Fault::Join(5)), (110.0, Fault::Kill(3))];
    let history = check(&Scenario { machines: 5, steps: 2400, faults, ..quiet() });
    assert!(
        history.incidents >= 3 && history.redone < 900,
        "{} incidents, {} steps",
        history.incidents,
        history.redone
    );
}

#[test]
fn a_short_sleep_costs_only_the_wait() {
    let history = check(&Scenario { faults: vec![(10.0, Fault::Sleep(1, 4.0))], ..quiet() });
    assert_eq!((history.incidents, history.redone), (0, 0));
}

#[test]
fn a_peer_that_leaves_costs_no_step() {
    let history = check(&Scenario { faults: vec![(10.0, Fault::Leave(1))], ..quiet() });
    assert_eq!((history.incidents, history.redone), (1, 0));
}

/// The peer dies while the run stops. Those who are left save what there is.
#[test]
fn a_loss_does_not_undo_a_stop() {
    let faults = vec![(12.0, Fault::Kill(1)), (13.0, Fault::Interrupt)];
    let history = live(&Scenario { faults, ..quiet() });
    assert_eq!((history.failed.as_deref(), history.incidents), (None, 1));
    let stopped_at = history.finished.unwrap().step;
    assert!((10..300).contains(&stopped_at) && history.saved.last() == Some(&stopped_at), "{stopped_at}");
}

/// All machines die. Nobody is left who could save the run, so it ends with the first request, and says where the newest
/// state was.
#[test]
fn a_run_without_machines_can_be_stopped() {
    let killed = |m| (12.0, Fault::Kill(m));
    for at in [12.0, 14.0, 20.0, 60.0, 600.0] {
        let history =
            live(&Scenario { faults: vec![killed(0), killed(1), killed(2), (at, Fault::Interrupt)], ..quiet() });
        let reason = history.suspended.unwrap();
        assert!(reason.contains("no machine could save it: "), "{reason}");
        // A silence may end, so at first there is some patience.
        assert!(history.lived <= f64::max(at, 12.0 + 20.0 + 1.5), "{at}: {}", history.lived);
    }
}

/// A stop ends every run soon, with a checkpoint of all that somebody has, unless those who have it cannot be reached.
#[test]
fn a_stop_ends_every_run_whatever_has_happened() {
    let (mut saved, mut suspended) = (0, 0);
    for seed in 0..number("FUSIONLLM_SEEDS").unwrap_or(300) {
        let mut scenario = Scenario::random(seed);
        let at = 5.0 + (seed % 23) as f64;
        scenario.steps = 100_000;
        // The broker is there to be stopped, and is not started again.
        scenario.faults.retain(|(time, fault)| match fault {
            Fault::Restart(seconds) => time + seconds < at,
            _ => *time < at,
        });
        scenario.faults.push((at, Fault::Interrupt));
        if seed % 2 == 0 {
            scenario.faults.extend((0..scenario.machines).map(|m| (at - 2.0 + (seed % 5) as f64, Fault::Kill(m))));
            scenario.faults.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        }
        let history = live(&scenario);
        match (&history.finished, &history.suspended) {
            (Some(progress), None) => {
                saved += 1;
                assert!(progress.step == 0 || history.saved.last() == Some(&progress.step), "{scenario:?}");
            }
            (None, Some(_)) => suspended += 1,
            _ => assert_eq!(history.failed.as_deref(), Some("interrupted before all peers had joined"), "{scenario:?}"),
        }
        assert!(history.lived < at + 150.0, "{} after {at}\n{scenario:?}", history.lived);
    }
    assert!(saved >= 50 && suspended >= 20, "{saved} saved, {suspended} suspended");
}

/// The run is stopped while it changes to a plan with another member, at whatever moment of the change.
#[test]
fn a_run_that_regroups_can_be_stopped() {
    for tenths in 0..30 {
        let at = 12.0 + f64::from(tenths) / 10.0;
        let history = live(&Scenario { faults: vec![(12.0, Fault::Leave(1)), (at, Fault::Interrupt)], ..quiet() });
        let stopped_at = history.finished.map(|p| p.step);
        assert!(history.failed.is_none() && history.saved.last().copied() == stopped_at, "{at}: {stopped_at:?}");
    }
}

/// The plan is mended without the machine that has become slow, and nothing is computed again.
#[test]
fn a_machine_that_becomes_slow_is_left_out() {
    let history = check(&Scenario { steps: 600, faults: vec![(20.0, Fault::Slow(1, 5.0))], ..quiet() });
    assert_eq!((history.incidents, history.redone, &history.used[..]), (0, 0, &[0, 2][..]));
    // Without figures to plan with, the slow machine stays.
    let blind = Scenario { steps: 600, faults: vec![(20.0, Fault::Slow(1, 5.0))], measured: false, ..quiet() };
    assert_eq!(check(&blind).used, [0, 1, 2]);
}

#[test]
fn a_broker_that_stands_still_loses_nobody() {
    let history = check(&Scenario { faults: vec![(10.0, Fault::Pause(8.0))], ..quiet() });
    assert_eq!((history.incidents, history.redone), (0, 0));
}

/// Nobody hears the broker for a while, and it hears nobody. The peers are not to blame.
#[test]
fn a_broker_that_is_cut_off_loses_nobody() {
    let faults = (0..3).map(|m| (10.0, Fault::CutOff(m, 10.0))).collect();
    let history = check(&Scenario { faults, ..quiet() });
    assert_eq!((history.incidents, history.redone), (0, 0));
}

/// Two peers are cut off together, and each has the copy of the other's share. The run waits for them, because without
/// them it would begin again, which takes longer.
#[test]
fn a_run_waits_for_peers_that_have_what_nobody_else_has() {
    let faults = vec![(50.0, Fault::CutOff(1, 9.0)), (50.0, Fault::CutOff(2, 9.0))];
    let history = check(&Scenario { steps: 1500, faults, ..quiet() });
    assert!(history.incidents > 0 && history.redone < 150, "{} steps", history.redone);
}

/// The broker is killed. It goes on from a cut that its peers still have. With this seed, it reaches them.
#[test]
fn a_killed_broker_costs_a_few_steps() {
    let history = check(&Scenario { steps: 2500, seed: 2, faults: vec![(100.0, Fault::Restart(1.0))], ..quiet() });
    assert_eq!(history.incidents, 1);
    assert!(history.redone < 1000, "{} steps", history.redone);
}

/// One of five peers has a layer without parameters. Its share of a cut is empty, and it says that it has it.
#[test]
fn a_peer_with_nothing_to_copy_does_nothing_wrong() {
    let history = check(&Scenario { machines: 5, ..quiet() });
    assert_eq!((history.incidents, history.redone), (0, 0));
}
