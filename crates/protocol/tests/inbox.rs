//! A peer admits the tensors that its Programs expect, once, and no others.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;

use common::{ChoiceRng, programs};
use fusionllm_graph::{TensorType, ValueId};
use fusionllm_program::{Address, PassKind, PeerId, Program};
use fusionllm_protocol::{Inbox, TensorHeader};
use proptest::prelude::*;

const WINDOW: u64 = 3;

/// Every frame that a pass expects, with its sender and size.
fn awaited(pass: u64, kind: PassKind, program: &Program) -> Vec<(PeerId, TensorHeader, TensorType)> {
    program
        .incoming()
        .into_iter()
        .map(|(tensor, (from, ty))| (from, TensorHeader { pass, kind, tensor, coded: false }, ty))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// Frames of the passes in flight, in any order, each sent twice.
    #[test]
    fn expected_tensors_are_admitted_once(peers in 1usize..4, who in 0usize..4, first in 0u64..5, seed in any::<u64>()) {
        let (train, eval) = &programs(peers, 2)[who % peers];
        let mut inbox = Inbox::new(train, eval, WINDOW, 0);
        inbox.passes_done(first);
        let mut choices = ChoiceRng::new(seed);
        let mut frames: Vec<_> = (1..=WINDOW)
            .flat_map(|ahead| if choices.below(2) == 0 {
                awaited(first + ahead, PassKind::Train, train)
            } else {
                awaited(first + ahead, PassKind::Eval, eval)
            })
            .collect();
        frames.extend(frames.clone());
        let mut admitted = BTreeSet::new();
        while !frames.is_empty() {
            let (from, header, ty) = frames.swap_remove(choices.below(frames.len()));
            let answer = inbox.admit(from, &header, ty.bytes() as u64);
            if admitted.insert(header) {
                prop_assert_eq!(answer, Ok(Some(ty)));
            } else {
                prop_assert_eq!(answer.unwrap_err().reason, "it has already arrived");
            }
        }
        // The first pass is complete: its frames are too old, and one more pass is in flight.
        inbox.passes_done(first + 1);
        for (kind, program) in [(PassKind::Train, train), (PassKind::Eval, eval)] {
            for (from, header, ty) in awaited(first + 1, kind, program) {
                let refused = inbox.admit(from, &header, ty.bytes() as u64).unwrap_err();
                prop_assert_eq!(refused.reason, "that pass is not in flight");
                let header = TensorHeader { pass: first + 1 + WINDOW, ..header };
                prop_assert_eq!(inbox.admit(from, &header, ty.bytes() as u64), Ok(Some(ty)));
            }
        }
    }

    /// Any header is admitted exactly if its program expects it from this sender and the pass is in flight.
    #[test]
    fn nothing_else_is_admitted(
        who in 0usize..3, from in prop_oneof![0u32..4, Just(u32::MAX)], kind in prop::sample::select(&PassKind::ALL[..]), pass in prop_oneof![0u64..6, Just(u64::MAX)],
        tensor in addresses(), payload in prop_oneof![Just(0u64), Just(4), Just(16), Just(32), Just(64), Just(u64::MAX)],
    ) {
        let programs = programs(3, 2);
        let (t, e) = &programs[who];
        let mut inbox = Inbox::new(t, e, WINDOW, 0);
        let header = TensorHeader { pass, kind, tensor, coded: false };
        let due = awaited(pass, kind, if kind == PassKind::Train { t } else { e });
        let fits = due.into_iter().find(|(f, h, ty)| f.0 == from && *h == header && ty.bytes() as u64 == payload);
        let admitted = inbox.admit(PeerId(from), &header, payload);
        match fits.filter(|_| (1..=WINDOW).contains(&pass)) {
            Some((_, _, ty)) => prop_assert_eq!(admitted, Ok(Some(ty))),
            // Pass 0 would be of an earlier generation, and is skipped.
            None => prop_assert_eq!(admitted.is_ok(), pass == 0),
        }
    }
}

fn addresses() -> impl Strategy<Value = Address> {
    let value = (0u32..40).prop_map(ValueId);
    let m = prop_oneof![0u32..3, Just(u32::MAX)];
    prop_oneof![
        (value.clone(), m.clone()).prop_map(|(value, micro_batch)| Address::Value { value, micro_batch }),
        (value.clone(), m.clone()).prop_map(|(parameter, part)| Address::Part { parameter, part }),
        value.clone().prop_map(|value| Address::Held { value }),
        (value, m).prop_map(|(buffer, micro_batch)| Address::BufferAfter { buffer, micro_batch }),
    ]
}

/// An evaluation's value was once given the shape of a training value with the same number and size.
#[test]
fn training_and_evaluation_number_their_values_independently() {
    let (train, mut eval) = programs(2, 1).swap_remove(1);
    let (tensor, (from, ty)) = train.incoming().into_iter().find(|(s, _)| eval.incoming().contains_key(s)).unwrap();
    let other = TensorType::new(ty.dtype, [1, ty.numel()]);
    assert_ne!(ty, other);
    eval.values.get_mut(&tensor.value()).unwrap().ty = other.clone();
    let mut inbox = Inbox::new(&train, &eval, WINDOW, 0);
    let mut admit = |kind| inbox.admit(from, &TensorHeader { pass: 1, kind, tensor, coded: false }, ty.bytes() as u64);
    assert_eq!(admit(PassKind::Eval), Ok(Some(other)));
    assert_eq!(admit(PassKind::Train), Ok(Some(ty.clone())));
}

/// An encoded tensor has at least the 8 bytes of its header, and at most 8 bytes more than the tensor.
#[test]
fn encoded_tensors_have_bounded_sizes() {
    let programs = programs(3, 2);
    let mut seen = [0, 0];
    for (train, eval) in &programs {
        for (kind, program) in [(PassKind::Train, train), (PassKind::Eval, eval)] {
            for (from, header, ty) in awaited(1, kind, program) {
                let header = TensorHeader { coded: true, ..header };
                let admit = |payload| Inbox::new(train, eval, WINDOW, 0).admit(from, &header, payload);
                let refused = |payload| admit(payload).unwrap_err().reason;
                let activation = program.coded.contains(&header.tensor.value()) && from != PeerId::BROKER;
                assert!(!activation || kind == PassKind::Train, "evaluation is exact");
                seen[usize::from(activation)] += 1;
                if activation {
                    let most = ty.bytes() as u64 + 8;
                    assert_eq!(admit(8), Ok(Some(ty.clone())));
                    assert_eq!(admit(most), Ok(Some(ty)));
                    assert_eq!([refused(7), refused(most + 1)], ["it has the wrong size"; 2]);
                } else {
                    assert_eq!(refused(ty.bytes() as u64), "it must not be encoded");
                }
            }
        }
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

#[test]
fn tensors_of_earlier_generations_are_skipped() {
    let (train, eval) = &programs(2, 1)[1];
    let mut inbox = Inbox::new(train, eval, WINDOW, 7);
    let (from, header, ty) = awaited(8, PassKind::Train, train).swap_remove(0);
    for pass in [1, 7] {
        assert_eq!(inbox.admit(from, &TensorHeader { pass, ..header }, ty.bytes() as u64), Ok(None));
    }
    assert_eq!(inbox.admit(from, &header, ty.bytes() as u64), Ok(Some(ty)));
}

#[test]
fn a_refusal_names_the_sender() {
    let (train, eval) = &programs(2, 1)[1];
    let mut inbox = Inbox::new(train, eval, WINDOW, 0);
    let tensor = Address::Held { value: ValueId(7) };
    let refused =
        inbox.admit(PeerId(0), &TensorHeader { pass: 1, kind: PassKind::Train, tensor, coded: false }, 4).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "peer 0 sent Held { value: ValueId(7) } of pass 1: no program expects it from this peer"
    );
    // The largest pass number does not overflow.
    inbox.passes_done(u64::MAX);
    inbox.admit(PeerId(0), &TensorHeader { pass: 1, kind: PassKind::Train, tensor, coded: false }, 4).unwrap_err();
}
