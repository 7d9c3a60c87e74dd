//! The broker with peers whose messages arrive in any order that the lanes permit.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;

use common::simulation::{Disturbance, End, Scenario, Trace, loss, run, share, weight_of_sum};
use fusionllm_events::Event;
use fusionllm_graph::ValueId;
use fusionllm_program::{Address, Cause, LearningRate, PeerId, Poison};
use fusionllm_protocol::{
    EvalSchedule, FromPeer, Hello, Notice, PassReport, RunSettings, SentBytes, TrainingProgress, VERSION,
};
use proptest::prelude::*;

fn scenarios() -> impl Strategy<Value = Scenario> {
    let settings = (0u64..4, 0u64..3, 0u64..12, 1u32..4, 1u64..5);
    let every = (prop::option::of((0u64..4, 1u64..4)), prop::option::of(0u64..4), 1usize..5);
    (settings, every, 1usize..5, prop::collection::btree_set(0u64..16, 0..6), any::<u64>()).prop_map(
        |(
            (step, skipped, steps, micro_batches, window),
            (eval, checkpoint, checkpoints_under_way),
            peers,
            broken,
            seed,
        )| {
            let settings = RunSettings {
                start: TrainingProgress { step, updates: step.saturating_sub(skipped) },
                steps,
                micro_batches,
                eval: eval.map(|(steps, passes)| EvalSchedule { steps, passes }),
                checkpoint,
                checkpoints_under_way,
                window,
                ..Scenario::default().settings
            };
            Scenario { peers, settings, broken, disturbances: Vec::new(), seed }
        },
    )
}

/// Checks the trace of a run that ended after step `last`.
fn check(s: &Scenario, trace: &Trace, last: u64, interrupted: bool) {
    let RunSettings { start, steps, micro_batches, eval, checkpoint, learning_rate, .. } = s.settings;
    let mut at = start;
    let (mut states, mut due_checkpoints) = (Vec::new(), Vec::new());
    let mut evaluated = Vec::new();
    assert_eq!(trace.steps.len() as u64, last.saturating_sub(start.step));
    for record in &trace.steps {
        let broken = s.broken.contains(&at.step);
        let mean: f64 = (0..micro_batches).map(|m| share(micro_batches, m) * loss(at.step, m)).sum();
        assert_eq!((record.step, record.applied), (at.step + 1, !broken));
        let version =
            trace.codec_versions.iter().rfind(|(_, first)| *first <= record.step).map_or(1, |(version, _)| *version);
        assert_eq!(record.version, version);
        assert_eq!(record.lr, learning_rate.at(at.updates + 1));
        assert!(record.loss == mean || (broken && record.loss.is_nan()));
        assert!(record.grad_norm == 2.0 * (s.peers as f64).sqrt() || (broken && record.grad_norm.is_infinite()));
        assert!(record.step_s > 0.0);
        assert_eq!(record.peers.len(), s.peers);
        assert_eq!(record.bytes_sent, if s.peers > 1 { 8 * s.peers as u64 } else { 0 });
        at = TrainingProgress { step: at.step + 1, updates: at.updates + u64::from(!broken) };
        let due = |every: u64| at.step == steps || (every > 0 && at.step.is_multiple_of(every));
        if eval.is_some_and(|e| due(e.steps)) {
            evaluated.push(at.step);
        }
        states.push(at);
        if checkpoint.is_some_and(due) || (checkpoint.is_some() && at.step == last) {
            due_checkpoints.push(at.step);
        }
    }
    assert_eq!(trace.end, Some(End::Finished(at)));
    // Checkpoints are those of the steps that the settings name, and always that of the last one. If one is left out,
    // because too many others were under way, people are told.
    assert!(trace.commits.iter().all(|c| states.contains(c)) && trace.commits.is_sorted_by(|a, b| a.step < b.step));
    let saved: Vec<u64> = trace.commits.iter().map(|c| c.step).collect();
    assert!(saved.iter().all(|step| due_checkpoints.contains(step)), "{saved:?} of {due_checkpoints:?}");
    assert_eq!(saved.last(), due_checkpoints.last());
    let left_out = due_checkpoints.iter().copied().find(|step| !saved.contains(step));
    let told = trace.notices.iter().find_map(|notice| match notice {
        Notice::Event(Event::CheckpointLeftOut { step, under_way }) => Some((*step, *under_way)),
        _ => None,
    });
    let expected = left_out.map(|step| (step, s.settings.checkpoints_under_way));
    // A step that was left out is saved after all if the run is stopped there.
    assert!(told == expected || (interrupted && told.is_some_and(|(step, _)| step == last)), "{told:?} {expected:?}");
    let got: Vec<u64> = trace.evaluated.iter().map(|e| e.step).collect();
    // An interrupt may skip the last evaluation or its rest.
    assert!(got == evaluated || (interrupted && evaluated.starts_with(&got) && got.len() + 1 == evaluated.len()));
    for e in &trace.evaluated {
        let passes = eval.unwrap().passes;
        // Each pass has the same values here.
        let mean = |weight: &dyn Fn(u32) -> f64| -> f64 {
            (0..micro_batches).map(|m| weight(m) * loss(e.step, m)).sum::<f64>() * passes as f64
        };
        assert_eq!(e.means.len(), 2);
        assert!((e.means[0] - mean(&|m| share(micro_batches, m))).abs() < 1e-9);
        assert!((e.means[1] - mean(&weight_of_sum)).abs() < 1e-9);
    }
}

fn lies() -> impl Strategy<Value = FromPeer> {
    let pass = prop_oneof![0u64..12, Just(u64::MAX)];
    let small = prop_oneof![0u32..4, Just(u32::MAX)];
    let number = prop::sample::select(vec![0.0, 1.0, -1.0, f64::NAN, f64::INFINITY, f64::MAX]);
    let norms = prop::collection::vec((0u32..8, number.clone()), 0..4);
    let figures = (number.clone(), prop::collection::vec((small.clone(), any::<u64>()), 0..3), small.clone());
    prop_oneof![
        Just(FromPeer::Ready { generation: 1 }),
        Just(FromPeer::Kept { step: 3 }),
        Just(FromPeer::Hello(Hello {
            version: VERSION,
            secret: [0; 16],
            process: 0,
            name: "p0".into(),
            backend: String::new(),
            device: String::new(),
            slow_bf16: false,
            processor: None,
            addr: Vec::new(),
        })),
        (pass.clone(), small.clone(), small, number).prop_map(|(pass, report, micro_batch, value)| FromPeer::Report {
            pass,
            report,
            micro_batch,
            value
        }),
        (pass.clone(), norms).prop_map(|(pass, n)| FromPeer::Norms {
            pass,
            squared_norms: n.into_iter().map(|(v, n)| (ValueId(v), n)).collect()
        }),
        (pass, figures).prop_map(|(pass, (wait_s, sent, node))| FromPeer::PassDone {
            pass,
            report: PassReport {
                wait_s,
                poison: (node > 0).then_some(Poison {
                    cause: Cause::Arose,
                    tensor: Address::Value { value: ValueId(node), micro_batch: 0 },
                    from: None,
                }),
                sent: sent.into_iter().map(|(to, bytes)| SentBytes { to: PeerId(to), bytes }).collect(),
                ..PassReport::default()
            }
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_step_runs_once_and_in_order(s in scenarios()) {
        check(&s, &run(&s), s.settings.steps.max(s.settings.start.step), false);
    }

    /// The simulated peers check that each pass uses the codecs that were sent last. The trace has the first step of
    /// each version.
    #[test]
    fn codecs_change_between_passes(mut s in scenarios(), at in prop::collection::vec(0usize..400, 1..5), interrupt in prop::option::of(0usize..400)) {
        s.disturbances.extend(at.into_iter().map(|at| (at, Disturbance::SetCodecs)));
        s.disturbances.extend(interrupt.map(|at| (at, Disturbance::Interrupt)));
        s.disturbances.sort_by_key(|(at, _)| *at);
        let trace = run(&s);
        let last = trace.steps.last().map_or(s.settings.start.step, |r| r.step);
        check(&s, &trace, last, interrupt.is_some());
        prop_assert!(trace.codec_versions.iter().map(|r| r.0).eq(2..2 + trace.codec_versions.len() as u32));
    }

    #[test]
    fn an_interrupted_run_takes_a_last_checkpoint(mut s in scenarios(), at in 0usize..400, twice in prop::option::of(0usize..40)) {
        s.disturbances.push((at, Disturbance::Interrupt));
        s.disturbances.extend(twice.map(|later| (at + later, Disturbance::Interrupt)));
        let trace = run(&s);
        let last = trace.steps.last().map_or(s.settings.start.step, |r| r.step);
        check(&s, &trace, last, at <= trace.events);
        prop_assert!(last == s.settings.steps.max(s.settings.start.step) || at <= trace.events);
    }

    /// An unexpected message can stop a run only with an error that names its sender.
    #[test]
    fn the_error_names_a_peer_that_breaks_the_protocol(mut s in scenarios(), lies in prop::collection::vec((0usize..200, lies()), 1..4), who in 0u32..5) {
        let who = who % s.peers as u32;
        s.disturbances.extend(lies.into_iter().map(|(at, lie)| (at, Disturbance::Lie(who, Box::new(lie)))));
        s.disturbances.sort_by_key(|(at, _)| *at);
        match run(&s).end.unwrap() {
            End::Failed(reason) => {
                prop_assert!(reason.starts_with(&format!("p{who} ")), "{}", reason);
            }
            End::Finished(_) => {}
        }
    }
}

#[test]
fn a_run_interrupted_before_its_first_step_makes_no_progress() {
    let mut s = Scenario::default();
    s.settings.start = TrainingProgress { step: 3, updates: 2 };
    s.disturbances.push((0, Disturbance::Interrupt));
    let trace = run(&s);
    assert_eq!(trace.end, Some(End::Finished(s.settings.start)));
    assert!(trace.commits.is_empty() && trace.steps.is_empty());
}

#[test]
fn a_run_that_diverges_ends_with_advice() {
    let mut s = Scenario { broken: (3..40).collect(), ..Scenario::default() };
    s.settings.steps = 100;
    let trace = run(&s);
    let Some(End::Failed(reason)) = &trace.end else { unreachable!("{trace:?}") };
    insta::assert_snapshot!(reason, @r#"the loss or gradient was not finite in 20 consecutive steps up to step 23; "p0" made the first number that is not finite: the result of linear "linear" in forward of micro-batch 0; try a lower learning rate or clipping"#);
    assert_eq!(trace.steps.len(), 23);
    // Where the number was made, and how many steps were skipped: 8 and 16.
    let kinds: Vec<bool> =
        trace.notices.iter().map(|notice| matches!(notice, Notice::Event(Event::Skipping { .. }))).collect();
    assert_eq!(kinds, [false, true, true]);
}

#[test]
fn skipped_steps_do_not_advance_the_learning_rate() {
    let mut s = Scenario { broken: BTreeSet::from([1, 2]), ..Scenario::default() };
    s.settings.learning_rate = LearningRate { base: 1.0, warmup: 4, cosine_until: None, min: 0.0 };
    let trace = run(&s);
    let rates: Vec<(f64, bool)> = trace.steps.iter().map(|r| (r.lr, r.applied)).collect();
    assert_eq!(rates, [(0.25, true), (0.5, false), (0.5, false), (0.5, true), (0.75, true)]);
    assert_eq!(trace.end, Some(End::Finished(TrainingProgress { step: 5, updates: 3 })));
}

/// Sends each wrong message while the run waits for this peer.
#[test]
fn errors_describe_wrong_messages() {
    let end = |at: usize, lie: FromPeer| {
        let s =
            Scenario { peers: 1, disturbances: vec![(at, Disturbance::Lie(0, Box::new(lie)))], ..Scenario::default() };
        match run(&s).end.unwrap() {
            End::Failed(reason) => reason,
            End::Finished(_) => "nothing".into(),
        }
    };
    let report = |pass, report, micro_batch| FromPeer::Report { pass, report, micro_batch, value: 1.0 };
    let norms = |pass, squared_norms| FromPeer::Norms { pass, squared_norms };
    let done = |sent| FromPeer::PassDone { pass: 1, report: PassReport { sent, ..PassReport::default() } };
    let slow = FromPeer::PassDone { pass: 1, report: PassReport { wait_s: f64::NAN, ..PassReport::default() } };
    let lines = [
        end(0, report(1, 0, 0)),
        end(1, FromPeer::Ready { generation: 1 }),
        end(1, report(1, 0, 0)),
        end(1, report(1, 1, 0)),
        end(1, report(1, 0, 2)),
        end(1, report(2, 0, 0)),
        end(1, norms(1, Vec::new())),
        end(1, done(Vec::new())),
        end(1, done(vec![SentBytes { to: PeerId(1), bytes: 0 }])),
        end(1, done(vec![SentBytes { to: PeerId(0), bytes: u64::MAX }])),
        end(1, slow),
        end(1, FromPeer::Leaving),
    ];
    insta::assert_snapshot!(lines.join("\n"), @"
    p0 sent a message of a pass that it is not in
    p0 said twice that it is ready
    p0 reported the same value twice
    p0 reported a value that it does not compute
    p0 reported a value that it does not compute
    p0 sent a message of a pass that it is not in
    p0 sent norms before its reports
    p0 ended a pass that was not complete
    p0 sent impossible numbers
    p0 sent impossible numbers
    p0 sent impossible numbers
    p0 sent a message that belongs to no pass
    ");
}
