//! The bytes of messages, and invalid assignments.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::{names, programs};
use fusionllm_compress::Codec;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{DType, TensorType, Value, ValueId, ValueKind};
use fusionllm_plan::Activity;
use fusionllm_program::{
    Address, Cause, Holding, Instruction, Optimizer, ParameterGroup, PassKind, PeerId, Poison, TensorKey, Verdict,
};
use fusionllm_protocol::{
    Answer, Assignment, BulkHeader, CodecError, CodecSpectrum, ComputeCommand, Contact, Farewell, FromPeer, Heartbeat,
    Hello, MemberId, PassReport, PassSpan, PeerHello, Question, ReceivedBytes, ReceivedMessage, Request, SentBytes,
    Source, TensorHeader, ToPeer, VERSION, decode, encode, hello_version,
};
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

fn assignment() -> Assignment {
    let (train, eval) = programs(3, 2).swap_remove(0);
    let contact = |(m, name)| Contact { member: MemberId(m), name, addr: vec![1, 2] };
    let optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
    let mut assignment = Assignment {
        generation: 3,
        peers: (5..).zip(names(3)).map(contact).collect(),
        donors: vec![contact((9, "leaver".into()))],
        seed: 7,
        start: 12,
        passes_before: 40,
        mirrors: BTreeMap::from([(MemberId(6), BTreeMap::from([(TensorKey::value("w1"), f32s([4, 4]))]))]),
        ..Assignment::new(train, eval, optimizer)
    };
    let members = [Source::Member(MemberId(5)), Source::Member(MemberId(9)), Source::Broker, Source::Seed];
    assignment.sources = assignment.tensor_types().into_keys().zip(members.into_iter().cycle()).collect();
    assignment
}

fn f32s(shape: [usize; 2]) -> TensorType {
    TensorType::new(DType::F32, shape)
}

/// A message round-trips. Truncated or followed by more bytes, it is refused.
fn round_trip<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: T) {
    let bytes = encode(&message).unwrap();
    assert_eq!(decode::<T>(&bytes), Ok(message));
    for end in 0..bytes.len() {
        assert!(decode::<T>(&bytes[..end]).is_err());
    }
    let longer = [&bytes[..], &[0, 0]].concat();
    assert_eq!(decode::<T>(&longer), Err("2 bytes too many".into()));
}

#[test]
fn messages_round_trip() {
    let verdict = Verdict { apply: true, update: 3, lr: 1e-3, factor: 0.5 };
    let tensor = Address::Part { parameter: ValueId(3), part: 1 };
    let hello = Hello {
        version: VERSION,
        secret: [7; 16],
        process: 3,
        name: "a".into(),
        backend: "cpu".into(),
        device: "CPU".into(),
        slow_bf16: true,
        processor: None,
        addr: vec![1, 2, 3],
    };
    let report = PassReport {
        compute_s: 1.0,
        wait_s: 0.5,
        total_s: 2.0,
        peak_bytes: 9,
        resident_bytes: 10,
        codec_s: 0.1,
        sent: vec![SentBytes { to: PeerId(1), bytes: 5 }],
        errors: vec![CodecError { to: PeerId(1), relative_error: 0.5 }],
        spectra: vec![CodecSpectrum { to: PeerId(1), exact: 3.5, decoded: 4.0 }],
        received: vec![ReceivedBytes { from: PeerId(2), bytes: 70_000, seconds: 0.25 }],
        spans: vec![PassSpan { activity: Activity::Wait, micro_batch: Some(1), start_us: 4, end_us: 900 }],
        arrivals: vec![ReceivedMessage { from: PeerId(2), bytes: 70_000, start_us: 0, end_us: 400 }],
        poison: Some(Poison { cause: Cause::Arrived, tensor, from: Some(PeerId(2)) }),
    };
    for m in [
        FromPeer::Hello(hello),
        FromPeer::Ready { generation: 2 },
        FromPeer::Heartbeat(Heartbeat {
            generation: 2,
            progress: 70,
            waits_for: Some(MemberId(1)),
            disk_free: Some(5),
        }),
        FromPeer::Kept { step: 4 },
        FromPeer::Mirrored { step: 4, of: MemberId(0) },
        FromPeer::Links { with: MemberId::BROKER, links: None, relayed: true },
        FromPeer::Visit { version: VERSION, secret: [7; 16] },
        FromPeer::Leaving,
        FromPeer::Report { pass: 1, report: 0, micro_batch: 2, value: f64::INFINITY },
        FromPeer::Norms { pass: u64::MAX, squared_norms: vec![(ValueId(4), 0.25)] },
        FromPeer::PassDone { pass: 2, report },
        FromPeer::LinkLost { generation: 1, member: MemberId(3), reason: "gone".into() },
        FromPeer::Failed { generation: 1, reason: "no memory".into() },
    ] {
        round_trip(m);
    }
    round_trip(FromPeer::Ask(Request {
        version: VERSION,
        secret: [9; 16],
        question: Question::Kick { name: "a".into() },
    }));
    round_trip(FromPeer::Ask(Request { version: VERSION, secret: [9; 16], question: Question::Page }));
    round_trip(Answer::Refused { reason: "no".into() });
    round_trip(Answer::Page { parts: vec![("now".into(), "<p>a</p>".into())], is_last: true });
    for m in [
        ToPeer::Refused { reason: "full".into() },
        ToPeer::Compute(ComputeCommand::Run { pass: 4, version: 2, kind: PassKind::Train, step: 3, inspect: true }),
        ToPeer::Compute(ComputeCommand::SetCodecs { version: 3, codecs: BTreeMap::from([(PeerId(1), Codec::Bf16)]) }),
        ToPeer::Verdict { pass: 4, verdict },
        ToPeer::Compute(ComputeCommand::Snapshot { step: 9, save: true }),
        ToPeer::Mirror { step: 9, of: MemberId(2), bytes_per_s: Some(1e6) },
        ToPeer::Release { before: 9 },
        ToPeer::Regroup { generation: 2 },
        ToPeer::Contacts(assignment().peers),
        ToPeer::Measure { programs: vec![assignment().train] },
        ToPeer::Probe { with: MemberId::BROKER, patience_s: 0.3 },
        ToPeer::Stop(Farewell::Over { step: 9, steps: 10 }),
        ToPeer::Stop(Farewell::Left),
        ToPeer::Stop(Farewell::PutOut { reason: "it failed".into() }),
        ToPeer::Welcome { seen_as: Some(([192, 0, 2, 1], 4433).into()), clock_s: 1.8e9 },
        ToPeer::Welcome { seen_as: None, clock_s: 1.8e9 },
    ] {
        round_trip(m);
    }
    for m in [
        PeerHello::Exchange { generation: 4 },
        PeerHello::Fetch { step: 9, tensors: vec![TensorKey::slot("w", "exp_avg")], bytes_per_s: None },
        PeerHello::Probe,
        PeerHello::Restarted,
    ] {
        round_trip(m);
    }
    round_trip(TensorHeader { pass: 3, kind: PassKind::Eval, tensor, coded: false });
    for m in [
        BulkHeader::Assign,
        BulkHeader::Load { generation: 2, key: TensorKey::slot("w", "exp_avg"), dtype: DType::F16 },
        BulkHeader::Copy,
        BulkHeader::NoCopy,
        BulkHeader::Saved { step: 3, key: TensorKey::value("w"), ty: TensorType::new(DType::BF16, [3, 0]), start: 2 },
        BulkHeader::SavedAll { step: 3 },
    ] {
        round_trip(m);
    }
}

#[test]
fn an_assignment_round_trips() {
    let a = assignment();
    a.validate().unwrap();
    assert_eq!(decode::<Assignment>(&encode(&a).unwrap()), Ok(a));
}

/// Postcard writes variants and numbers as variable-length integers. Another layout needs another version.
#[test]
fn the_layout_of_version_22() {
    let bytes = |m: &ToPeer| encode(m).unwrap();
    let run =
        ToPeer::Compute(ComputeCommand::Run { pass: 300, version: 7, kind: PassKind::Train, step: 2, inspect: true });
    assert_eq!(bytes(&run), [5, 0, 0xac, 2, 7, 0, 2, 1]);
    assert_eq!(bytes(&ToPeer::Stop(Farewell::Failed { reason: "no".into() })), [9, 3, 2, b'n', b'o']);
    let tensor = Address::Value { value: ValueId(5), micro_batch: 1 };
    assert_eq!(
        encode(&TensorHeader { pass: 1, kind: PassKind::Eval, tensor, coded: false }).unwrap(),
        [1, 1, 0, 5, 1, 0]
    );
    assert_eq!(bytes(&ToPeer::Measure { programs: Vec::new() }), [2, 0]);
    let load = BulkHeader::Load { generation: 2, key: TensorKey::value("w"), dtype: DType::F32 };
    assert_eq!(encode(&load).unwrap(), [1, 2, 1, b'w', 0, 1]);
    assert_eq!(encode(&Question::Page).unwrap(), [4]);
    assert_eq!(VERSION, 23);
}

/// A joiner of another version reads why it is refused, although its hello has other fields.
#[test]
fn the_version_of_a_hello_is_read_whatever_follows() {
    // Version 6 had no process number.
    let of_version_6 = encode(&(0u32, 6u32, [7u8; 16], "a", "cpu", "CPU", [1u8, 2])).unwrap();
    assert!(decode::<FromPeer>(&of_version_6).is_err());
    assert_eq!(hello_version(&of_version_6), Some(6));
    assert_eq!(hello_version(&encode(&FromPeer::Leaving).unwrap()), None);
    assert_eq!(hello_version(&[]), None);
}

/// A peer takes the plan's versions one after another.
#[test]
fn codecs_change_only_with_the_next_version() {
    let mut program = assignment().train;
    let codecs = BTreeMap::from([(PeerId(1), Codec::Bf16)]);
    program.set_codecs(2, codecs.clone()).unwrap();
    assert_eq!((program.version, &program.codecs), (2, &codecs));
    let changed = program.clone();
    let mut refuse = |version, to| {
        let error = program.set_codecs(version, BTreeMap::from([(to, Codec::Nvfp4)])).unwrap_err();
        assert_eq!(program, changed);
        error.to_string()
    };
    insta::assert_snapshot!(refuse(2, PeerId(1)), @"program: version 2 of the plan cannot follow version 2");
    insta::assert_snapshot!(refuse(4, PeerId(1)), @"program: version 4 of the plan cannot follow version 2");
    insta::assert_snapshot!(refuse(3, PeerId(0)), @"program: a codec must be for a link to another peer");
}

fn refusal(change: impl FnOnce(&mut Assignment)) -> String {
    let mut a = assignment();
    change(&mut a);
    a.validate().unwrap_err().to_string()
}

#[test]
fn errors_describe_invalid_assignments() {
    insta::assert_snapshot!(refusal(|a| a.peer = PeerId(1)), @"program: it is for peer 0, not for peer 1");
    insta::assert_snapshot!(refusal(|a| a.peers.truncate(1)), @"program: it exchanges tensors with peer 1, but the number of peers is 1");
    insta::assert_snapshot!(refusal(|a| a.peers.clear()), @"program: it is for peer 0, but the number of peers is 0");
    let source = |key: TensorKey, source: Source| refusal(|a| a.sources.extend([(key, source)]));
    insta::assert_snapshot!(source(TensorKey::value("other"), Source::Seed), @r#"program: it says where "other" comes from, but no program needs it"#);
    insta::assert_snapshot!(source(TensorKey::slot("tied", "momentum_buffer"), Source::Seed), @r#"program: it says where momentum_buffer of "tied" comes from, but no program needs it"#);
    insta::assert_snapshot!(source(TensorKey::value("tied"), Source::Member(MemberId(8))), @r#"program: "tied" comes from member 8, whose address is unknown"#);
    insta::assert_snapshot!(refusal(|a| a.sources.clear()), @r#"program: it does not say where "tied" comes from"#);
    let group = |name: &str, rate: f64| {
        refusal(|a| a.groups.extend([(name.into(), ParameterGroup { rate, weight_decay: 0.0 })]))
    };
    insta::assert_snapshot!(group("other", 1.0), @r#"program: it gives "other" a rate and a decay that no update has"#);
    insta::assert_snapshot!(group("tied", f64::NAN), @r#"program: it gives "tied" a rate and a decay that no update has"#);
    insta::assert_snapshot!(refusal(|a| a.train.instructions.clear()), @"program: the gradient of tied is not applied");
    insta::assert_snapshot!(refusal(|a| a.eval.instructions.retain(|i| !matches!(i, Instruction::Free { .. }))), @"program: x of micro-batch 0 is never freed");
    insta::assert_snapshot!(refusal(|a| {
        // Training and evaluation each keep a tensor of this name, but of different types.
        let ty = TensorType::new(DType::F32, [9]);
        for (program, ty) in [(&mut a.train, ty), (&mut a.eval, TensorType::new(DType::F32, [8]))] {
            let value = Value { name: "mask".into(), ty, kind: ValueKind::Constant };
            program.values.insert(ValueId(99), value);
            program.holdings.push(Holding { value: ValueId(99), owner: false });
        }
    }), @r#"program: training and evaluation disagree about "mask""#);
}

/// A peer also keeps the tensors that only an evaluation reads.
#[test]
fn a_peer_keeps_the_state_of_both_programs() {
    let mut a = assignment();
    let value = Value { name: "mask".into(), ty: TensorType::new(DType::F32, [9]), kind: ValueKind::Constant };
    a.eval.values.insert(ValueId(99), value);
    a.eval.holdings.push(Holding { value: ValueId(99), owner: false });
    a.sources.insert(TensorKey::value("mask"), Source::Seed);
    assert!(a.validate().unwrap_err().to_string().contains("constant"));
    a.sources.insert(TensorKey::value("mask"), Source::Broker);
    assert_eq!(a.validate(), Ok(()));
    assert_eq!(a.mirrored_bytes(), 64, "a copy for another peer");
    assert_eq!(a.peak_bytes(), 3 * 64 + 36 + a.train.peak_bytes(), "a copy is no part of a pass");
    assert!(a.train.peak_bytes() > 0);
    assert_eq!(a.state().into_keys().collect::<Vec<_>>(), ["mask", "tied"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_decoding_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = (decode::<FromPeer>(&bytes), decode::<ToPeer>(&bytes), decode::<TensorHeader>(&bytes), decode::<BulkHeader>(&bytes));
        if let Ok(a) = decode::<Assignment>(&bytes) {
            prop_assert!(a.validate().is_err());
        }
    }

    #[test]
    fn a_damaged_assignment_is_refused_or_usable(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut bytes = encode(&assignment()).unwrap();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(a) = decode::<Assignment>(&bytes) && a.validate().is_ok() {
            prop_assert!(a.state().len() >= a.train.holdings.len());
        }
    }
}
