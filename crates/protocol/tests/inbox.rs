//! What a peer lets in: what its Programs wait for, once, and nothing else.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;

use common::{ChoiceRng, programs};
use fusionllm_graph::{TensorType, ValueId};
use fusionllm_plan::{PeerId, Program, Slot};
use fusionllm_protocol::{Inbox, TensorHeader};
use proptest::prelude::*;

const WINDOW: u64 = 3;

/// Every frame that a pass waits for, with its sender and size.
fn awaited(pass: u64, train: bool, program: &Program) -> Vec<(PeerId, TensorHeader, TensorType)> {
    program
        .incoming()
        .into_iter()
        .map(|(slot, (from, ty))| (from, TensorHeader { pass, train, slot, coded: false }, ty))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// Frames of the passes under way, in any order, each twice.
    #[test]
    fn all_that_is_awaited_comes_in_once(peers in 1usize..4, who in 0usize..4, first in 0u64..5, seed in any::<u64>()) {
        let (train, eval) = &programs(peers, 2)[who % peers];
        let mut inbox = Inbox::new(train, eval, WINDOW);
        inbox.done(first);
        let mut choices = ChoiceRng::new(seed);
        let mut frames: Vec<_> = (1..=WINDOW)
            .flat_map(|ahead| if choices.below(2) == 0 {
                awaited(first + ahead, true, train)
            } else {
                awaited(first + ahead, false, eval)
            })
            .collect();
        frames.extend(frames.clone());
        let mut admitted = BTreeSet::new();
        while !frames.is_empty() {
            let (from, header, ty) = frames.swap_remove(choices.below(frames.len()));
            let answer = inbox.admit(from, &header, ty.bytes() as u64);
            if admitted.insert(header) {
                prop_assert_eq!(answer, Ok(ty));
            } else {
                prop_assert_eq!(answer.unwrap_err().reason, "it came already");
            }
        }
        // The first pass is over: its frames are too old, and one more pass is under way.
        inbox.done(first + 1);
        for train_first in [true, false] {
            let program = if train_first { train } else { eval };
            for (from, header, ty) in awaited(first + 1, train_first, program) {
                let refused = inbox.admit(from, &header, ty.bytes() as u64).unwrap_err();
                prop_assert_eq!(refused.reason, "that pass is not under way");
                let header = TensorHeader { pass: first + 1 + WINDOW, ..header };
                prop_assert_eq!(inbox.admit(from, &header, ty.bytes() as u64), Ok(ty));
            }
        }
    }

    /// Any header at all is let in just if the program of that kind waits for it from there and the pass is under way.
    #[test]
    fn nothing_else_comes_in(
        who in 0usize..3, from in prop_oneof![0u32..4, Just(u32::MAX)], train in any::<bool>(), pass in prop_oneof![0u64..6, Just(u64::MAX)],
        slot in slots(), payload in prop_oneof![Just(0u64), Just(4), Just(16), Just(32), Just(64), Just(u64::MAX)],
    ) {
        let programs = programs(3, 2);
        let (t, e) = &programs[who];
        let mut inbox = Inbox::new(t, e, WINDOW);
        let header = TensorHeader { pass, train, slot, coded: false };
        let due = awaited(pass, train, if train { t } else { e });
        let fits = due.into_iter().find(|(f, h, ty)| f.0 == from && *h == header && ty.bytes() as u64 == payload);
        let admitted = inbox.admit(PeerId(from), &header, payload);
        match fits.filter(|_| (1..=WINDOW).contains(&pass)) {
            Some((_, _, ty)) => prop_assert_eq!(admitted, Ok(ty)),
            None => prop_assert!(admitted.is_err()),
        }
    }
}

fn slots() -> impl Strategy<Value = Slot> {
    let value = (0u32..40).prop_map(ValueId);
    let m = prop_oneof![0u32..3, Just(u32::MAX)];
    prop_oneof![
        (value.clone(), m.clone()).prop_map(|(value, micro_batch)| Slot::Value { value, micro_batch }),
        (value.clone(), m.clone()).prop_map(|(parameter, part)| Slot::Part { parameter, part }),
        value.clone().prop_map(|parameter| Slot::Parameter { parameter }),
        (value, m).prop_map(|(buffer, micro_batch)| Slot::Buffer { buffer, micro_batch }),
    ]
}

/// A value of the evaluation with the number and the size of a training value was taken for that one, and got its shape.
#[test]
fn training_and_evaluation_number_their_values_apart() {
    let (train, mut eval) = programs(2, 1).swap_remove(1);
    let (slot, (from, ty)) = train.incoming().into_iter().find(|(s, _)| eval.incoming().contains_key(s)).unwrap();
    let other = TensorType::new(ty.dtype, [1, ty.numel()]);
    assert_ne!(ty, other);
    eval.values.get_mut(&slot.value()).unwrap().ty = other.clone();
    let mut inbox = Inbox::new(&train, &eval, WINDOW);
    let mut admit = |train| inbox.admit(from, &TensorHeader { pass: 1, train, slot, coded: false }, ty.bytes() as u64);
    assert_eq!(admit(false), Ok(other));
    assert_eq!(admit(true), Ok(ty.clone()));
}

/// The coded form of n numbers has at most 8 bytes more than they have, and no coded form is shorter than its header.
#[test]
fn what_is_coded_comes_within_bounds() {
    let programs = programs(3, 2);
    let mut seen = [0, 0];
    for (train, eval) in &programs {
        for (train_pass, program) in [(true, train), (false, eval)] {
            for (from, header, ty) in awaited(1, train_pass, program) {
                let header = TensorHeader { coded: true, ..header };
                let admit = |payload| Inbox::new(train, eval, WINDOW).admit(from, &header, payload);
                let refused = |payload| admit(payload).unwrap_err().reason;
                let activation = program.coded.contains(&header.slot.value()) && from != PeerId::BROKER;
                assert!(!activation || train_pass, "evaluation is exact");
                seen[usize::from(activation)] += 1;
                if activation {
                    let most = ty.bytes() as u64 + 8;
                    assert_eq!(admit(8), Ok(ty.clone()));
                    assert_eq!(admit(most), Ok(ty));
                    assert_eq!([refused(7), refused(most + 1)], ["it has the wrong size"; 2]);
                } else {
                    assert_eq!(refused(ty.bytes() as u64), "it must not be coded");
                }
            }
        }
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

#[test]
fn a_refusal_names_the_sender() {
    let (train, eval) = &programs(2, 1)[1];
    let mut inbox = Inbox::new(train, eval, WINDOW);
    let slot = Slot::Parameter { parameter: ValueId(7) };
    let refused = inbox.admit(PeerId(0), &TensorHeader { pass: 1, train: true, slot, coded: false }, 4).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "peer 0 sent Parameter { parameter: ValueId(7) } of pass 1: no program here waits for that from this peer"
    );
    // The last pass there can be is no trouble.
    inbox.done(u64::MAX);
    inbox.admit(PeerId(0), &TensorHeader { pass: 1, train: true, slot, coded: false }, 4).unwrap_err();
}
