//! Numbers that are not finite: the operator that made them is named, and nobody is put out but a peer that sends them
//! without a reason.
#![allow(clippy::unwrap_used)]

mod common;

use common::stage::{Said, Stage};
use fusionllm_events::Event;
use fusionllm_graph::ValueId;
use fusionllm_program::{Address, Cause, PeerId, Poison};
use fusionllm_protocol::{Action, Farewell, FromPeer, Notice, PassReport, Standing, StepRecord, ToPeer};

fn poison(cause: Cause, tensor: Address) -> Option<Poison> {
    Some(Poison { cause, tensor, from: None })
}

/// The result of a peer's first node.
fn first_node(stage: &Stage, peer: usize, cause: Cause) -> Option<Poison> {
    let value = stage.programs[peer].nodes.values().next().unwrap().outputs[0];
    poison(cause, Address::Value { value, micro_batch: 0 })
}

/// The first message to a peer from another one.
fn message(stage: &Stage, to: usize, from: PeerId) -> Option<Poison> {
    let incoming = stage.programs[to].incoming();
    let (tensor, _) = incoming.into_iter().find(|(_, (sender, _))| *sender == from).unwrap();
    Some(Poison { cause: Cause::Arrived, tensor, from: Some(from) })
}

/// The sentences that people read about numbers that are not finite.
fn told(stage: &Stage) -> Vec<String> {
    let lines = stage.actions.iter().filter_map(|a| match a {
        Action::Notice(Notice::Poisoned { member, step, what, advice, .. }) => {
            let name = member.map_or("the broker", |member| stage.run.roster().display_name(member));
            Some(format!("step {step}: {name} {what}; {advice}"))
        }
        _ => None,
    });
    lines.collect()
}

fn steps(stage: &Stage) -> Vec<&StepRecord> {
    stage.actions.iter().filter_map(|a| if let Action::Step(record) = a { Some(record) } else { None }).collect()
}

fn failure(stage: &Stage) -> Option<&str> {
    stage.actions.iter().find_map(|a| if let Action::Fail(reason) = a { Some(reason.as_str()) } else { None })
}

#[test]
fn the_pass_after_a_skipped_step_is_inspected_and_names_who_made_the_number() {
    let mut stage = Stage::training();
    let found = [message(&stage, 0, PeerId(1)), first_node(&stage, 1, Cause::Arose), message(&stage, 2, PeerId(1))];
    let overflow = |m: u32, said: &mut Said| {
        *said = Said { loss: f64::NAN, squared_norm: f64::INFINITY, poison: found[m as usize] };
    };
    assert!(!stage.step(|_, _| {}), "nothing was skipped yet");
    assert!(!stage.step(overflow));
    assert_eq!(told(&stage), [""; 0], "nobody has looked yet");
    assert!(stage.step(overflow), "the batch of the same step");
    assert!(stage.step(overflow) && stage.step(overflow));
    assert_eq!(stage.fed[..5], [0, 1, 1, 2, 3]);
    insta::assert_snapshot!(told(&stage).join("\n"), @r#"step 2: m1 made the first number that is not finite: the result of linear "linear_2" in forward of micro-batch 0; try a lower learning rate or clipping"#);
    assert!(stage.step(|_, _| {}), "it is inspected, and nothing is found");
    assert!(!stage.step(|_, _| {}), "an update was applied");
    assert!(steps(&stage).iter().map(|r| r.applied).eq([true, false, false, false, true, true]));
    assert_eq!(told(&stage).len(), 1, "the same again is no news");
}

#[test]
fn another_place_is_news_and_the_last_one_stands_in_the_error() {
    let mut stage = Stage::training();
    let first = first_node(&stage, 0, Cause::Arose);
    let weight = poison(Cause::Arose, Address::Held { value: stage.programs[2].holdings[0].value });
    // 20 steps, and another look at the first one.
    for pass in 0..21 {
        let (at, found) = if pass < 10 { (0, first) } else { (2, weight) };
        stage.step(|m, said| {
            if m == at {
                (said.squared_norm, said.poison) = (f64::NAN, found);
            }
        });
    }
    insta::assert_snapshot!(told(&stage).join("\n"), @r#"
    step 1: m0 made the first number that is not finite: the result of linear "linear" in forward of micro-batch 0; no update was applied yet, so look at the model, its loss and the data, not at the learning rate
    step 10: m2 has "tied", which was not finite before the step; no update was applied yet, so look at the model, its loss and the data, not at the learning rate
    "#);
    insta::assert_snapshot!(failure(&stage).unwrap(), @r#"the loss or gradient was not finite in 20 consecutive steps up to step 20; "m2" has "tied", which was not finite before the step; no update was applied yet, so look at the model, its loss and the data, not at the learning rate"#);
}

/// Two peers contradict each other, and nobody else knows more. People read both names.
#[test]
fn a_message_that_its_sender_knows_nothing_of_names_both_ends() {
    let mut stage = Stage::training();
    let received = message(&stage, 2, PeerId(1));
    for _ in 0..5 {
        stage.step(|m, said| {
            if m == 2 {
                (said.squared_norm, said.poison) = (f64::NAN, received);
            }
        });
    }
    insta::assert_snapshot!(told(&stage).join("\n"), @r#"step 1: m2 says that "linear_2" of micro-batch 0 was not finite when it came from "m1"; one of the two is at fault, or the codec between them; `fusionllm kick` removes a peer"#);
    stage.goes_on_with(&[0, 1, 2]);
}

#[test]
fn data_that_is_not_finite_is_named() {
    let mut stage = Stage::training();
    let tensor = Address::Value { value: ValueId(0), micro_batch: 0 };
    let input = Some(Poison { cause: Cause::Arose, tensor, from: Some(PeerId::BROKER) });
    for _ in 0..2 {
        stage.step(|m, said| {
            if m == 0 {
                (said.squared_norm, said.poison) = (f64::NAN, input);
            }
        });
    }
    insta::assert_snapshot!(told(&stage).join("\n"), @r#"step 1: m0 got an input that is not finite: "x"; look for such numbers in the data"#);
}

/// A peer that skips every step by its word alone is put out. The run goes on without it after three inspected steps,
/// before the twenty that would end it.
#[test]
fn norms_that_are_not_finite_for_no_reason_put_their_sender_out() {
    for lie in [f64::NAN, f64::INFINITY] {
        let mut stage = Stage::training();
        // A step that was not inspected, another look at it, and two steps more.
        for pass in 0..4 {
            assert_eq!(stage.standing(1), Standing::Present, "before pass {pass}");
            stage.step(|m, said| {
                if m == 1 {
                    said.squared_norm = lie;
                }
            });
        }
        assert_eq!(stage.standing(1), Standing::Out);
        insta::allow_duplicates! {
            insta::assert_snapshot!(told(&stage).join("\n"), @"step 1: m1 sent a loss or norms that are not finite, but found no such number that they come from; the run goes on without it if it does so again");
            insta::assert_snapshot!(stage.lost(1).unwrap(), @"in 3 inspected steps in a row, it sent a loss or norms that are not finite, but found no such number that they come from");
        }
        let reason = stage.lost(1).unwrap().to_owned();
        assert_eq!(stage.stopped(1), Some(&Farewell::PutOut { reason }));
        stage.goes_on_with(&[0, 2]);
        stage.all_ready();
        stage.actions.clear();
        assert!(!stage.step(|_, _| {}));
        assert!(steps(&stage)[0].applied);
    }
}

/// The same happens with a loss. Only the last peer computes one.
#[test]
fn a_loss_that_is_not_finite_for_no_reason_puts_its_sender_out() {
    let mut stage = Stage::training();
    for _ in 0..4 {
        stage.step(|_, said| said.loss = f64::NAN);
    }
    assert!(stage.lost(2).unwrap().starts_with("in 3 inspected steps in a row, it sent a loss or norms"));
    stage.goes_on_with(&[0, 1]);
}

/// Three in a row. A real overflow now and then puts nobody out.
#[test]
fn a_contradiction_now_and_then_puts_nobody_out() {
    let mut stage = Stage::training();
    for pass in 0..30 {
        stage.step(|m, said| {
            if m == 1 && pass % 4 != 3 {
                said.squared_norm = f64::NAN;
            }
        });
    }
    assert_eq!(stage.lost(1), None);
    stage.goes_on_with(&[0, 1, 2]);
}

/// A batch that is bad alone: the steps after it are fine. So only another look at it can show why.
#[test]
fn a_single_bad_batch_is_looked_at_again() {
    let mut stage = Stage::training();
    let found = first_node(&stage, 2, Cause::Arose);
    let bad = |m: u32, said: &mut Said| {
        if m == 2 {
            *said = Said { loss: f64::NAN, squared_norm: f64::NAN, poison: found };
        }
    };
    stage.step(|_, _| {});
    stage.step(bad);
    assert_eq!(stage.fed.last(), Some(&1), "the batch of the second step comes again");
    assert!(stage.step(bad));
    for _ in 0..3 {
        stage.step(|_, _| {});
    }
    assert_eq!(stage.fed, [0, 1, 1, 2, 3, 4, 5]);
    let records = steps(&stage);
    assert!(records.iter().map(|r| r.step).eq(1..=5), "another look is no step");
    assert!(records.iter().map(|r| r.applied).eq([true, false, true, true, true]));
    // The skipped step and the look at it made no update.
    let updates: Vec<u64> = stage
        .actions
        .iter()
        .filter_map(|a| match a {
            Action::Send(to, ToPeer::Verdict { verdict, .. }) if to.0 == 0 => Some(verdict.update),
            _ => None,
        })
        .collect();
    assert_eq!(updates, [1, 2, 2, 2, 3, 4]);
    insta::assert_snapshot!(told(&stage).join("\n"), @r#"step 2: m2 made the first number that is not finite: the result of linear "linear_3" in forward of micro-batch 0; try a lower learning rate or clipping"#);
    stage.goes_on_with(&[0, 1, 2]);
}

/// The numbers of that batch are finite now, as those of a model that has changed may be. Nobody is at fault.
#[test]
fn another_look_that_shows_nothing_is_no_fault() {
    let mut stage = Stage::training();
    for pass in 0..40 {
        // A bad step, another look at it, at which all is well, and a good step.
        stage.step(|m, said| {
            if m == 1 && pass % 3 == 0 {
                said.squared_norm = f64::INFINITY;
            }
        });
    }
    assert_eq!(told(&stage), [""; 0]);
    assert!(steps(&stage).iter().any(|record| !record.applied) && failure(&stage).is_none());
    stage.goes_on_with(&[0, 1, 2]);
}

/// Regression: three machines were put out in turn, and the run waited for others for ever. The losses and norms are
/// finite, and only their sum at the broker is not.
#[test]
fn a_sum_that_overflows_at_the_broker_is_nobodys_fault() {
    for (weight, loss) in [(1e300, 1e20), (f64::NAN, 2.0), (f64::INFINITY, 0.0)] {
        let mut stage = Stage::training();
        // The first batch has its weight already.
        stage.weight = weight;
        while failure(&stage).is_none() {
            stage.step(|_, said| said.loss = loss);
        }
        assert!([0, 1, 2].iter().all(|m| stage.lost(*m).is_none()));
        assert_eq!(steps(&stage).len(), 21);
        insta::allow_duplicates! {
            insta::assert_snapshot!(told(&stage)[0], @"step 2: the broker got losses and norms that are all finite, but their sum over the batch is not; try a lower learning rate or clipping");
        }
        assert_eq!(told(&stage).len(), 1);
    }
}

/// Peers that contradict themselves one after the other. The last one is not put out: the run fails and says why.
#[test]
fn the_last_peer_is_not_put_out_but_ends_the_run() {
    let mut stage = Stage::training();
    for _ in 0..3 {
        while failure(&stage).is_none() && !stage.issued.is_empty() {
            // The peer with the highest number lies.
            let liar = stage.run.peers().iter().map(|m| m.0).max().unwrap();
            stage.step(|m, said| {
                if m == liar {
                    said.squared_norm = f64::NAN;
                }
            });
        }
        stage.all_ready();
    }
    assert_eq!([2, 1, 0].map(|m| stage.standing(m)), [Standing::Out, Standing::Out, Standing::Present]);
    insta::assert_snapshot!(failure(&stage).unwrap(), @r#"no other peer is left than "m0", and in 3 inspected steps in a row, it sent a loss or norms that are not finite, but found no such number that they come from"#);
    let told_to_it = stage.stopped(0).unwrap();
    assert!(matches!(told_to_it, Farewell::Failed { reason } if Some(reason.as_str()) == failure(&stage)));
}

/// A third of the steps is skipped, and never many in a row.
#[test]
fn a_run_that_skips_steps_again_and_again_says_so() {
    let mut stage = Stage::training();
    let found = first_node(&stage, 1, Cause::Arose);
    while steps(&stage).len() < 58 {
        let step = *stage.fed.last().unwrap();
        stage.step(|m, said| {
            if m == 1 && step % 3 == 2 {
                *said = Said { squared_norm: f64::NAN, poison: found, ..*said };
            }
        });
    }
    let notices = stage.actions.iter().filter_map(|a| match a {
        Action::Notice(Notice::Event(Event::Skipping { step, skipped, of, why })) => {
            Some((*step, *skipped, *of, why.clone()))
        }
        _ => None,
    });
    let notices: Vec<_> = notices.collect();
    assert!(notices.iter().map(|(step, skipped, of, _)| (*step, *skipped, *of)).eq([(24, 8, 24), (48, 16, 48)]));
    for (.., why) in notices {
        let why = why.unwrap();
        assert!(why.starts_with("\"m1\" made the first number that is not finite: the result of linear"), "{why}");
    }
    assert_eq!(told(&stage).len(), 1, "the same place is no news");
    // Looks get rare once the reason is known.
    let looks = stage.fed.len() - 1 - steps(&stage).len();
    assert!((3..=6).contains(&looks), "{looks} looks");
    stage.goes_on_with(&[0, 1, 2]);
}

/// Such norms look like those of parameters that do not matter to the loss. They can only weaken the clipping.
#[test]
fn tiny_norms_change_nothing_but_the_clipping() {
    for lie in [0.0, -0.0, 1e-300, f64::MIN_POSITIVE / 2.0] {
        let mut stage = Stage::clipping(0.5);
        for liars in [&[1][..], &[0, 1, 2]] {
            stage.actions.clear();
            stage.step(|m, said| {
                if liars.contains(&m) {
                    said.squared_norm = lie;
                }
            });
            let verdict = stage.actions.iter().find_map(|a| match a {
                Action::Send(_, ToPeer::Verdict { verdict, .. }) => Some(*verdict),
                _ => None,
            });
            let verdict = verdict.unwrap();
            assert!(verdict.apply && verdict.lr.is_finite(), "{verdict:?}");
            assert!(verdict.factor > 0.0 && verdict.factor <= 1.0, "no gradient grows: {verdict:?}");
            let record = steps(&stage)[0];
            assert!(record.applied && record.grad_norm.is_finite(), "{record:?}");
        }
        stage.goes_on_with(&[0, 1, 2]);
        assert_eq!(told(&stage), [""; 0]);
    }
}

/// A squared norm may be huge, but not larger than that of a gradient of the largest numbers.
#[test]
fn a_norm_that_no_gradient_can_have_puts_its_sender_out() {
    for (lie, refused) in [(1e70, false), (1e80, true), (f64::MAX, true), (-1.0, true), (-1e-300, true)] {
        let mut stage = Stage::training();
        stage.step(|m, said| {
            if m == 1 {
                said.squared_norm = lie;
            }
        });
        match refused {
            false => assert!(steps(&stage)[0].applied),
            true => {
                let reason = stage.lost(1).unwrap();
                assert_eq!(reason, "it broke the protocol: it sent a norm that no gradient of its type can have");
                stage.goes_on_with(&[0, 2]);
            }
        }
    }
}

/// A peer can name only places of its own program, and only if it was asked.
#[test]
fn a_place_that_a_peer_does_not_have_puts_it_out() {
    let mut stage = Stage::training();
    let others = first_node(&stage, 0, Cause::Arose);
    let value = ValueId(u32::MAX);
    let nowhere = [
        others,
        poison(Cause::Arose, Address::Held { value }),
        poison(Cause::Arose, Address::Gradient { parameter: value }),
        poison(Cause::Arose, Address::OptimizerState { parameter: value, slot: 0 }),
        // The same message from another sender, or from none.
        message(&stage, 1, PeerId(0)).map(|p| Poison { from: Some(PeerId(2)), ..p }),
        message(&stage, 1, PeerId(0)).map(|p| Poison { from: None, ..p }),
    ];
    for place in nowhere {
        let mut stage = Stage::training();
        stage.step(|_, said| said.squared_norm = f64::NAN);
        stage.step(|m, said| said.poison = if m == 1 { place } else { None });
        let reason = stage.lost(1).unwrap();
        assert!(reason.contains("in a place that it does not have"), "{place:?}: {reason}");
        stage.goes_on_with(&[0, 2]);
    }
    // Nobody asked the peer for a place.
    let own = first_node(&stage, 1, Cause::Arose);
    stage.say(1, FromPeer::PassDone { pass: 1, report: PassReport { poison: own, ..PassReport::default() } });
    assert!(stage.lost(1).unwrap().contains("was not asked to look at"));
}
