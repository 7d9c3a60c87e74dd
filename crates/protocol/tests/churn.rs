//! A run outlives its members: random losses, sleeps, cuts, joiners and leavers on a virtual clock.
//!
//! `FUSIONLLM_SEEDS=10000 cargo test -p fusionllm-protocol --test churn` tries more seeds, from `FUSIONLLM_FIRST_SEED`
//! on. With `FUSIONLLM_TRACE=1`, a world prints all that happens in it.
#![allow(clippy::unwrap_used)]

mod common;

use common::ChoiceRng;
use common::world::{Fault, History, Scenario, live};

/// A scenario that a seed decides. The first machine may sleep and be cut off, but stays.
fn scenario(seed: u64) -> Scenario {
    let mut rng = ChoiceRng::new(seed);
    let machines = 1 + rng.below(5);
    let count = rng.below(9);
    let faults = (0..count).map(|_| {
        let at = 3.0 + rng.below(25_000) as f64 / 1000.0;
        let seconds = [0.5, 2.0, 4.0, 8.0, 20.0, 45.0][rng.below(6)];
        let others = 1 + rng.below(machines + 1);
        let fault = match rng.below(10) {
            0 | 1 => Fault::Kill(others),
            2 => Fault::Sleep(rng.below(machines + 1), seconds),
            3 => Fault::CutOff(rng.below(machines + 1), seconds),
            4 => Fault::Part(rng.below(machines), rng.below(machines), seconds),
            5 => Fault::Leave(others),
            6 => Fault::Join,
            7 => Fault::Restart(seconds),
            8 => Fault::Slow(others - 1, [1.0, 4.0, 10.0][rng.below(3)]),
            _ => Fault::Pause(seconds.min(8.0)),
        };
        (at, fault)
    });
    let faults = faults.collect();
    Scenario {
        machines,
        steps: 100 + rng.below(200) as u64,
        checkpoint: [0, 5, 25][rng.below(3)],
        faults,
        measured: rng.one_in(2),
        seed,
    }
}

fn check(scenario: &Scenario) -> History {
    let history = live(scenario);
    assert_eq!(history.failed, None, "{scenario:?}");
    assert_eq!(history.finished.unwrap().step, scenario.steps, "{scenario:?}");
    assert!(history.steps.iter().copied().eq(1..=scenario.steps), "{scenario:?}: {history:?}");
    assert_eq!(history.saved.last(), Some(&scenario.steps), "the last checkpoint is whole: {scenario:?}");
    for step in (7..=scenario.steps).step_by(7).chain([scenario.steps]) {
        assert!(history.evaluated.contains(&step), "no evaluation after step {step}: {scenario:?}");
    }
    history
}

#[test]
fn runs_end_with_every_step_done_once_whatever_happens() {
    let seeds = std::env::var("FUSIONLLM_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let first = std::env::var("FUSIONLLM_FIRST_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    let histories: Vec<History> = (first..first + seeds).map(|seed| check(&scenario(seed))).collect();
    // The scenarios are not all harmless.
    let incidents: usize = histories.iter().map(|h| h.incidents).sum();
    let redone: usize = histories.iter().map(|h| h.redone).sum();
    assert!(incidents as u64 > seeds / 2 && redone as u64 > seeds / 2, "{incidents} incidents, {redone} steps redone");
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
    let faults = vec![(6.0, Fault::Leave(1)), (50.0, Fault::Kill(2)), (60.0, Fault::Join), (110.0, Fault::Kill(3))];
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

/// The broker is killed. It goes on from a cut that its peers still have.
#[test]
fn a_killed_broker_costs_a_few_steps() {
    let history = check(&Scenario { steps: 2500, faults: vec![(100.0, Fault::Restart(1.0))], ..quiet() });
    assert_eq!(history.incidents, 1);
    assert!(history.redone < 1000, "{} steps", history.redone);
}

/// One of five peers has a layer without parameters. Its share of a cut is empty, and it says that it has it.
#[test]
fn a_peer_with_nothing_to_copy_does_nothing_wrong() {
    let history = check(&Scenario { machines: 5, ..quiet() });
    assert_eq!((history.incidents, history.redone), (0, 0));
}
