//! Peers with different tensor frameworks in one run.
#![cfg(feature = "candle")]

mod common;

use common::*;
use fusionllm_backend::open;
use fusionllm_graph::models::AttentionImplementation::Sdpa;
use fusionllm_plan::equal_compute;

#[test]
fn two_frameworks_train_as_one() {
    let graph = gpt2(Sdpa, 0.0);
    let names: Vec<String> = (0..4).map(|p| format!("p{p}")).collect();
    let plan = equal_compute(&graph, &names, 2, Default::default()).unwrap();
    let mut alone = local_run(&graph, &plan, &backends("cpu", 4), adamw());
    let expected = losses(&graph, &mut alone, 2, 50);
    let mixed: Vec<_> = ["cpu", "candle-cpu", "cpu", "candle-cpu"].iter().map(|n| open(n).unwrap()).collect();
    let mut together = local_run(&graph, &plan, &mixed, adamw());
    for (step, (got, expected)) in losses(&graph, &mut together, 2, 50).iter().zip(&expected).enumerate() {
        assert!((got - expected).abs() < 1e-4 * expected, "step {step}: {got} {expected}");
    }
}
