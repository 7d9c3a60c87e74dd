//! Bytes that once did harm.

use fusionllm_graph::ops::{Full, SgdStep};
use fusionllm_graph::{DType, Op, TensorType};
use fusionllm_hostile::{TARGETS, assignment_of, one_operator};
use fusionllm_node::decoders;
use fusionllm_program::Optimizer;

use crate::corpus::samples;
use crate::panics;

fn accepts(target: &str, bytes: &[u8]) -> bool {
    let target = TARGETS.iter().find(|t| t.name == target).unwrap();
    (target.decode)(bytes)
}

/// A run counts its generations from the number in the file. After the largest number, it stopped with an overflow.
#[test]
fn the_last_generation() {
    let state = samples("run-state").remove(0);
    let last = [&[0xff, 0xff, 0xff, 0xff, 0x0f], &state[1..]].concat();
    assert!(accepts("run-state", &last));
}

/// All these devices were made before anything was checked.
#[test]
fn a_testbed_of_two_billion_devices() {
    let testbed =
        |count| format!("[[device]]\nname = \"a\"\ngpu = \"RTX 3080\"\ncount = {count}\n[broker]\nat = \"a-0\"\n");
    assert!(accepts("testbed", testbed("1").as_bytes()));
    assert!(!accepts("testbed", testbed("2147483647").as_bytes()));
}

/// The length that the header describes did not fit 64 bits.
#[test]
fn tensors_as_long_as_the_largest_number() {
    let long = (1u64 << 61) - 1;
    let tensor =
        |i| format!(r#""t{i}":{{"dtype":"I8","shape":[{long}],"data_offsets":[{},{}]}}"#, i * long, (i + 1) * long);
    let header = format!("{{{}}}", (0..8).map(tensor).collect::<Vec<_>>().join(","));
    let file = |header: &str| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    assert!(!accepts("weights", &file(&header)));
    assert!(accepts("weights", &file("{}")));
}

/// A step that no 64-bit product holds made a kernel panic: in the slice, and in its gradient.
#[test]
fn a_slice_with_the_largest_step() {
    for op in [
        r#"{"slice":{"dim":0,"start":1,"end":2,"step":18446744073709551615}}"#,
        r#"{"slice_backward":{"slice":{"dim":0,"start":1,"end":2,"step":18446744073709551615},"size":3}}"#,
    ] {
        let shape = if op.contains("size") { "[1,5]" } else { "[3,5]" };
        let applied = format!(r#"{{"op":{op},"operands":[{{"dtype":"f32","shape":{shape}}}]}}"#);
        let before = panics();
        assert!(accepts("operator", applied.as_bytes()), "{applied}");
        assert_eq!(panics(), before, "{applied}");
    }
}

/// An empty tensor with a dimension of 2^32 took 32 GiB for the places of its elements.
#[test]
fn reductions_of_a_long_and_empty_tensor() {
    for (dims, shape) in [("[1]", "[0,4294967296]"), ("[0]", "[4294967296,0]"), ("[0,1]", "[4294967296,0]")] {
        let op = format!(r#"{{"reduce":{{"kind":"prod","dims":{dims},"keepdim":false}}}}"#);
        let applied = format!(r#"{{"op":{op},"operands":[{{"dtype":"f32","shape":{shape}}}]}}"#);
        assert!(accepts("operator", applied.as_bytes()), "{applied}");
    }
}

/// Only the tensors that a peer keeps were counted, so a value of any size was made, and the process ended without
/// memory.
#[test]
fn a_program_with_a_huge_value_is_refused() {
    const MEMORY: u64 = 1 << 20;
    let full = |size: usize| Op::from(Full { ty: TensorType::new(DType::F32, [size]), value: 1.0 });
    let accepted = |op: Op| {
        let program = one_operator(op, &[]).unwrap();
        let sgd = Optimizer::Sgd(SgdStep { momentum: 0.0, weight_decay: 0.0, nesterov: false });
        decoders::accepts(assignment_of(program.clone(), program, sgd).unwrap(), Some(MEMORY))
    };
    assert_eq!(accepted(full(1 << 18)), Ok(()));
    let refused = accepted(full(1 << 33)).unwrap_err();
    assert_eq!(refused, "its programs need 32 GiB of memory, and this machine gives the run 1 MiB");
}
