//! Messages whose lists are short as bytes and long in memory.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use allocation::peak;
use fusionllm_graph::ops::{AdamwStep, Full};
use fusionllm_graph::{DType, TensorType, ValueId, autodiff};
use fusionllm_hostile::{assignment_of, one_operator};
use fusionllm_models::Gpt2Config;
use fusionllm_node::decoders::accepts;
use fusionllm_plan::{Schedule, compile, compile_forward, equal_compute};
use fusionllm_program::{Optimizer, Program, TensorKey};
use fusionllm_protocol::{Assignment, FromPeer, PeerHello, decode, encode};

#[path = "decoders/allocation.rs"]
mod allocation;

/// Bytes that decoding may always take, and for each byte of a message: three times what `decode` allows to lists, and
/// the texts. Serde gives each list that has begun room for a mebibyte at most.
const ALWAYS: u64 = 4 << 20;
const PER_BYTE: u64 = 31;

const MARK: &str = "the only report";

fn adamw() -> Optimizer {
    Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 })
}

fn assignment(program: Program) -> Assignment {
    assignment_of(program.clone(), program, adamw()).unwrap()
}

/// An operator without operands whose result has this shape.
fn full(shape: Vec<usize>) -> Program {
    one_operator(Full { ty: TensorType::new(DType::F32, shape), value: 1.0 }.into(), &[]).unwrap()
}

/// The bytes of a message in which these bytes stand in place of `old`.
fn replaced(message: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
    let at = message.windows(old.len()).position(|window| window == old).unwrap();
    [&message[..at], new, &message[at + old.len()..]].concat()
}

fn list(length: usize, element: &[u8]) -> Vec<u8> {
    let mut bytes = encode(&length).unwrap();
    bytes.extend(element.iter().copied().cycle().take(length * element.len()));
    bytes
}

/// Decodes a message that must be refused because of its lists. Returns the memory that this took.
fn refused(bytes: &[u8]) -> u64 {
    let (decoded, most) = peak(|| decode::<Assignment>(bytes).map(drop));
    let reason = decoded.unwrap_err();
    assert!(reason.contains("lists"), "{reason}");
    most
}

/// One test, because memory is counted for the whole process.
#[test]
fn lists_take_memory_in_proportion_to_their_bytes() {
    // A hundred million empty names.
    let named = assignment(Program { reports: vec![MARK.into()], ..full(vec![2]) });
    let mark = [&[1, MARK.len() as u8], MARK.as_bytes()].concat();
    let names = |length| replaced(&encode(&named).unwrap(), &mark, &list(length, &[0]));
    assert_eq!(decode::<Assignment>(&names(1000)).unwrap().train.reports.len(), 1000);
    let most = refused(&names(100_000_000));
    assert!(most < ALWAYS, "{most}");

    // A shape of ten million dimensions.
    let dims = [9999, 77, 8888];
    let shaped = encode(&assignment(full(dims.to_vec()))).unwrap();
    let old = encode(&dims.to_vec()).unwrap();
    let many = |length| replaced(&shaped, &old, &list(length, &[1]));
    assert_eq!(decode::<Assignment>(&many(8)).map(drop), Ok(()));
    let bytes = many(10_000_000);
    let (accepted, most) = peak(|| accepts(decode(&bytes)?, None));
    assert!(accepted.is_err());
    assert!(most < PER_BYTE * bytes.len() as u64, "{most}");

    // A shape of a terabyte has a few bytes, and no memory is taken for it.
    let terabyte = encode(&assignment(full(vec![1 << 20, 1 << 18]))).unwrap();
    let (accepted, most) = peak(|| accepts(decode(&terabyte)?, Some(1 << 38)));
    assert!(accepted.unwrap_err().contains("memory"));
    assert!(most < ALWAYS, "{most}");

    // The worst that is accepted: names of two letters, lists of one tree after the other.
    for element in [&b"\x02ab"[..], b"\x01a", b"\x0aabcdefghij"] {
        let bytes = replaced(&encode(&named).unwrap(), &mark, &list(1 << 19, element));
        let (decoded, most) = peak(|| decode::<Assignment>(&bytes).is_ok());
        assert!(most < ALWAYS + PER_BYTE * bytes.len() as u64, "{} bytes: {most}, {decoded}", bytes.len());
    }
    let tensors = vec![TensorKey::value("ab"); 1 << 18];
    let fetch = encode(&PeerHello::Fetch { step: 1, tensors, bytes_per_s: None }).unwrap();
    let (_, most) = peak(|| decode::<PeerHello>(&fetch));
    assert!(most < ALWAYS + PER_BYTE * fetch.len() as u64, "{} bytes: {most}", fetch.len());

    // Short messages may have lists that are long for them.
    let report = FromPeer::Norms { pass: 1, squared_norms: vec![(ValueId(1), 0.5); 100] };
    assert_eq!(decode(&encode(&report).unwrap()), Ok(report));

    long_assignments_are_decoded();
}

/// A real assignment needs less than the allowed bytes.
fn long_assignments_are_decoded() {
    let config =
        Gpt2Config { vocab_size: 64, n_positions: 8, n_embd: 8, n_layer: 12, n_head: 2, ..Gpt2Config::default() };
    let graph = config.build(1, 8, DType::F32).unwrap();
    let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
    for micro_batches in [1, 64] {
        let plan = equal_compute(&graph, &["only".to_owned()], micro_batches, Schedule::OneFOneB).unwrap();
        let train = compile(&plan, &graph, &train).unwrap().swap_remove(0);
        let eval = compile_forward(&plan, &graph, &graph.evaluation().unwrap(), &["loss"]).unwrap().swap_remove(0);
        let assignment = assignment_of(train, eval, adamw()).unwrap();
        let bytes = encode(&assignment).unwrap();
        assert_eq!(decode(&bytes), Ok(assignment), "{} bytes", bytes.len());
    }
}
