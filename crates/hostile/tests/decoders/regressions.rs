//! Bytes that once did harm.

use fusionllm_hostile::TARGETS;

use crate::corpus::samples;

fn accepts(target: &str, bytes: &[u8]) -> bool {
    let target = TARGETS.iter().find(|t| t.name == target).unwrap();
    (target.decode)(bytes)
}

/// A run counts its generations from the number in the file. After the largest one it stopped with an overflow.
#[test]
fn the_last_generation() {
    let state = samples("run-state").remove(0);
    let last = [&[0xff, 0xff, 0xff, 0xff, 0x0f], &state[1..]].concat();
    assert!(accepts("run-state", &last));
}
