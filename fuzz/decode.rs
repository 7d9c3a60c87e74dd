//! Fuzzes one decoder of `fusionllm-hostile`. The variable `FUSIONLLM_TARGET` has its name.
//!
//! `assignment` and `operator` also run what they accept, so a program that passes its checks runs without a panic.
#![no_main]

use std::sync::LazyLock;

use fusionllm_hostile::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;

static CHOSEN: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("FUSIONLLM_TARGET").unwrap_or_default();
    TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        panic!("FUSIONLLM_TARGET must be one of: {}", names.join(", "))
    })
});

fuzz_target!(|bytes: &[u8]| {
    (CHOSEN.decode)(bytes);
});
