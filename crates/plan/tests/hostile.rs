//! Programs from strangers. A program with any change is refused, or it can be carried out as it is.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use fusionllm_graph::{DType, TensorType, ValueId, ValueKind};
use fusionllm_plan::Schedule;
use fusionllm_program::{Address, Instruction, Medium, PeerId, Program};
use proptest::prelude::*;

fn some_programs(seed: u64) -> Vec<Program> {
    let mut choices = ChoiceRng::new(seed);
    let graph = random_graph(6, &mut choices);
    let mut plan = random_plan(&graph, 3, 2, Schedule::ALL[seed as usize % Schedule::ALL.len()], &mut choices);
    if seed >= 3 {
        replicate(&mut plan, &mut choices);
    }
    programs(&graph, &plan).concat()
}

/// Runs a program alone, as the executor would; returns whether everything it names exists.
fn can_run(p: &Program) -> bool {
    use std::collections::BTreeSet;
    let mut there: BTreeSet<Address> = p.holdings.iter().map(|h| Address::Held { value: h.value }).collect();
    let mut judged = false;
    let has = |there: &BTreeSet<Address>, v: ValueId, m: u32| match p.operand(v, m) {
        Some(operand) => there.contains(&operand),
        None => p.values.contains_key(&v),
    };
    for i in &p.instructions {
        let ok = match *i {
            Instruction::Receive { tensor, .. } => {
                p.values.contains_key(&tensor.value()) && there.insert(tensor.place()) != tensor.place().stays()
            }
            Instruction::Send { tensor: tensor @ Address::Part { .. }, .. } => there.remove(&tensor),
            Instruction::Send { tensor, .. } => there.contains(&tensor.place()),
            Instruction::Run { node, micro_batch } => p.nodes.get(&node).is_some_and(|n| {
                let ready = n.inputs.iter().all(|v| has(&there, *v, micro_batch));
                there.extend(n.outputs.iter().map(|v| Address::Value { value: *v, micro_batch }));
                ready
            }),
            Instruction::Free { value, micro_batch } => there.remove(&Address::Value { value, micro_batch }),
            Instruction::Accumulate { parameter, part, value, micro_batch } => {
                there.insert(Address::Part { parameter, part });
                p.reductions.contains_key(&parameter) && has(&there, value, micro_batch)
            }
            Instruction::Join { parameter, part } => there.remove(&Address::Part { parameter, part }),
            Instruction::UpdateState { buffer, value, micro_batch } => {
                let held = there.contains(&Address::Held { value: buffer });
                held && p.values[&buffer].ty == p.values[&value].ty && has(&there, value, micro_batch)
            }
            Instruction::Report { report, value, micro_batch } => {
                (report as usize) < p.reports.len() && has(&there, value, micro_batch)
            }
            Instruction::Reduce { parameter } => p.reductions.get(&parameter).is_some_and(|r| {
                let mut terms = r.terms().map(|(_, part)| Address::Part { parameter, part });
                terms.all(|part| there.remove(&part)) && there.insert(Address::Gradient { parameter })
            }),
            Instruction::Clip => !std::mem::replace(&mut judged, true),
            Instruction::Update { parameter } => judged && there.remove(&Address::Gradient { parameter }),
            Instruction::Offload { tensor, .. } | Instruction::Load { tensor, .. } => {
                p.values.contains_key(&tensor.value())
            }
        };
        if !ok {
            return false;
        }
    }
    there.iter().all(|tensor| tensor.stays())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Changed bytes are not decoded, are refused, or still make a valid program. They never cause a panic.
    #[test]
    fn damaged_bytes(seed in 0u64..6, which in any::<prop::sample::Index>(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let programs = some_programs(seed);
        let mut bytes = postcard::to_stdvec(which.get(&programs[..])).unwrap();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(p) = postcard::from_bytes::<Program>(&bytes) && p.validate().is_ok() {
            prop_assert!(can_run(&p));
            let _ = (p.to_string(), p.incoming());
        }
    }

    /// One instruction is replaced by another of the same program, or moved.
    #[test]
    fn shuffled_instructions(seed in 0u64..6, which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), other in any::<prop::sample::Index>(), swap in any::<bool>()) {
        let programs = some_programs(seed);
        let mut p = which.get(&programs[..]).clone();
        prop_assume!(!p.instructions.is_empty());
        let (at, other) = (at.index(p.instructions.len()), other.index(p.instructions.len()));
        if swap {
            p.instructions.swap(at, other);
        } else {
            p.instructions[at] = p.instructions[other];
        }
        if p.validate().is_ok() {
            prop_assert!(can_run(&p));
        }
    }
}

/// A program is invalid without any instruction that it relies on. Instructions that only other programs rely on may
/// be missing.
#[test]
fn every_instruction_is_needed_once() {
    for program in (1..=4).flat_map(some_programs) {
        assert!(can_run(&program));
        for at in 0..program.instructions.len() {
            let i = program.instructions[at];
            let mut without = program.clone();
            without.instructions.remove(at);
            let for_others = matches!(
                i,
                Instruction::Send {
                    tensor: Address::Value { .. } | Address::Held { .. } | Address::BufferAfter { .. },
                    ..
                } | Instruction::Receive { tensor: Address::Held { .. } | Address::BufferAfter { .. }, .. }
                    | Instruction::Report { .. }
                    | Instruction::UpdateState { .. }
            ) || (i == Instruction::Clip && program.owned().count() == 0);
            assert_eq!(without.validate().is_ok(), for_others, "{i:?}");
            let mut twice = program.clone();
            twice.instructions.insert(at, i);
            assert!(twice.validate().is_err(), "{i:?}");
        }
    }
}

fn refusal(change: impl Fn(&mut Program)) -> String {
    let [train, _] = {
        let mut b = fusionllm_graph::Builder::new("affine");
        let x = b.input("x", DType::F32, [2, 3]).unwrap();
        let w = b.parameter("w", DType::F32, [3, 3], fusionllm_graph::Init::Constant(0.5)).unwrap();
        let y = b.scope("first", |b| b.linear(x, w, None)).unwrap();
        let y = b.scope("second", |b| b.linear(y, w, None)).unwrap();
        let loss = b.scope("second", |b| b.sum(y, &[0, 1], false)).unwrap();
        b.output("loss", loss).unwrap();
        b.output("correct", loss).unwrap();
        let graph = b.finish().unwrap();
        programs(&graph, &plan_by(&graph, 2, Schedule::GPipe, |name| u32::from(!name.starts_with("first"))))
    };
    let mut p = train[0].clone();
    change(&mut p);
    p.validate().unwrap_err().to_string()
}

fn value<'a>(p: &'a mut Program, name: &str) -> &'a mut fusionllm_graph::Value {
    p.values.values_mut().find(|v| v.name == name).unwrap()
}

#[test]
fn refusals_name_the_instruction() {
    insta::assert_snapshot!(refusal(|p| p.peer = PeerId::BROKER), @"program: it is for the broker, which runs no program");
    insta::assert_snapshot!(refusal(|p| p.micro_batches = 1), @"program: instruction 4, `[1] receive x from broker`: its micro-batch does not exist");
    insta::assert_snapshot!(refusal(|p| value(p, "x").name = "w".into()), @r#"program: two values are named "w""#);
    insta::assert_snapshot!(refusal(|p| value(p, "x").ty.shape = vec![usize::MAX, 3]), @r#"program: value "x": f32[18446744073709551615, 3] is larger than any memory"#);
    insta::assert_snapshot!(refusal(|p| value(p, "x").ty.shape = vec![2, 4]), @r#"program: node #0 "first.linear" (linear): the last dimension of the operand is 4, but that of the weight is 3"#);
    insta::assert_snapshot!(refusal(|p| value(p, "first.linear").kind = ValueKind::Input), @r#"program: node #0 "first.linear" (linear): %2 does not name it as its producer"#);
    insta::assert_snapshot!(refusal(|p| p.holdings.clear()), @"program: the owner of w is not consistent");
    insta::assert_snapshot!(refusal(|p| p.holdings[0].owner = false), @"program: the owner of w is not consistent");
    insta::assert_snapshot!(refusal(|p| p.reductions.values_mut().next().unwrap().parts.clear()), @"program: the gradient parts of w do not fit it");
    insta::assert_snapshot!(refusal(|p| p.nodes.clear()), @"program: instruction 1, `[0] run #0`: the node does not exist");
    insta::assert_snapshot!(refusal(|p| p.values.clear()), @r#"program: node #0 "first.linear" (linear) names a value that does not exist"#);
    insta::assert_snapshot!(refusal(|p| p.instructions.truncate(0)), @"program: the gradient of w is not applied");
    insta::assert_snapshot!(refusal(|p| p.instructions.truncate(p.instructions.len() - 2)), @"program: the gradient of w is not applied");
    insta::assert_snapshot!(refusal(|p| value(p, "w").ty = TensorType::new(DType::I64, [3, 3])), @r#"program: parameter "w" is i64[3, 3], but parameters are floats"#);
    insta::assert_snapshot!(refusal(|p| {
        let clip = p.instructions.iter().position(|i| *i == Instruction::Clip).unwrap();
        p.instructions.swap(clip, clip - 1);
    }), @"program: instruction 26, `reduce w`: it comes after the verdict");
    insta::assert_snapshot!(refusal(|p| {
        for i in &mut p.instructions {
            if let Instruction::Receive { from, tensor: Address::Part { .. } } = i {
                *from = PeerId(7);
            }
        }
    }), @"program: instruction 24, `receive part 0 of w from peer 7`: it is not for this peer");
    let first = |p: &mut Program, of: fn(&Instruction) -> bool, to: Instruction| {
        let at = p.instructions.iter().position(of).unwrap();
        p.instructions[at] = to;
    };
    let parameter = |p: &Program| *p.reductions.keys().next().unwrap();
    insta::assert_snapshot!(refusal(|p| {
        let tensor = Address::Gradient { parameter: parameter(p) };
        first(p, |i| matches!(i, Instruction::Receive { .. }), Instruction::Receive { tensor, from: PeerId(1) });
    }), @"program: instruction 0, `receive the gradient of w from peer 1`: no message carries it");
    insta::assert_snapshot!(refusal(|p| {
        let tensor = Address::OptimizerState { parameter: parameter(p), slot: 0 };
        first(p, |i| matches!(i, Instruction::Send { .. }), Instruction::Send { tensor, to: PeerId(1) });
    }), @"program: instruction 2, `send slot 0 of w to peer 1`: no message carries it");
    // A number of slots costs nothing to name, and time to count.
    insta::assert_snapshot!(refusal(|p| {
        let tensor = Address::OptimizerState { parameter: parameter(p), slot: u32::MAX };
        p.instructions.push(Instruction::Offload { tensor, to: Medium::Disk });
    }), @"program: no optimizer has as much state for a parameter as it offloads");
    insta::assert_snapshot!(refusal(|p| {
        value(p, "x").ty.shape = vec![];
        p.nodes.clear();
        let x = *p.values.iter().find(|(_, v)| v.name == "x").unwrap().0;
        p.instructions[1] = Instruction::Report { report: 0, value: x, micro_batch: 0 };
    }), @"program: instruction 1, `[0] report x as loss`: it is not a scalar that an operator makes");
}
