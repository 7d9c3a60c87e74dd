//! Peers with different tensor frameworks in one run.
#![cfg(any(feature = "burn", feature = "wgpu"))]

#[path = "../../backend/tests/support/backends.rs"]
mod backends;
mod common;

use common::*;
use fusionllm_backend::Cpu;
use fusionllm_models::AttentionImplementation::Sdpa;
use fusionllm_plan::equal_compute;

#[test]
fn two_frameworks_train_as_one() {
    let graph = gpt2(Sdpa, 0.0);
    let names: Vec<String> = (0..4).map(|p| format!("p{p}")).collect();
    let plan = equal_compute(&graph, &names, 2, Default::default()).unwrap();
    let alone = backends("cpu", 4);
    let expected = losses(&graph, &mut local_run(&graph, &plan, &alone, adamw()), 2, 50);
    for other in backends::backends().into_iter().filter(|other| other.name() != Cpu::NAME) {
        let mixed = [alone[0].clone(), other.clone(), alone[0].clone(), other.clone()];
        let mut together = local_run(&graph, &plan, &mixed, adamw());
        for (step, (got, expected)) in losses(&graph, &mut together, 2, 50).iter().zip(&expected).enumerate() {
            let name = other.name();
            assert!((got - expected).abs() < 1e-4 * expected, "with {name}, step {step}: {got} {expected}");
        }
    }
}
