//! Plan files contain everything needed to simulate them.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use fusionllm_graph::DType;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Change, Cluster, Device, Line, Link, Origin, Plan, Rates, SavedPlan, Schedule, SimulateOptions, Site,
    equal_compute, what_if,
};
use fusionllm_program::Optimizer;

fn saved() -> SavedPlan {
    // With an explicit mask, which is filled with minus infinity.
    let attn_implementation = fusionllm_models::AttentionImplementation::Eager;
    let config = Gpt2Config {
        vocab_size: 64,
        n_positions: 16,
        n_embd: 16,
        n_layer: 4,
        n_head: 2,
        attn_implementation,
        ..Gpt2Config::default()
    };
    let graph = config.build(1, 16, DType::F32).unwrap();
    let plan = equal_compute(&graph, &names(3), 4, Schedule::OneFOneB).unwrap();
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
    let devices = (0..)
        .zip(&plan.peers)
        .map(|(i, name): (u32, _)| Device { site: Some(i / 2), ..Device::new(name, rates, 1 << 20) });
    let uplink = Some(Link { latency: 0.01, bandwidth: 1e5 });
    let sites = ["a", "b <&\">"].map(|name| Site {
        name: name.into(),
        inside: Some(Link { latency: 1e-4, bandwidth: 1e8 }),
        uplink,
        downlink: None,
    });
    let cluster = Cluster::new(devices.collect(), sites.to_vec(), Vec::new(), None).unwrap();
    let optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
    let origin = Origin { lower_bound_step_s: Some(0.5), solve_s: None, notes: vec!["a note".into()] };
    SavedPlan { plan, cluster, graph, optimizer, origin }
}

#[test]
fn a_plan_file_simulates_like_its_plan() {
    let saved = saved();
    let simulation = saved.simulate(true).unwrap();
    let text = saved.to_json(&simulation).unwrap();
    let back = SavedPlan::from_json(&text).unwrap();
    assert_eq!(back, saved);
    assert_eq!(back.simulate(true).unwrap(), simulation);
    assert_eq!(back.to_json(&simulation).unwrap(), text, "the same bytes again");
    assert_eq!(Plan::from_json(&text).unwrap(), saved.plan, "and `train` reads it");
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["predicted_step_s"].as_f64(), Some(simulation.step_s));
    assert_eq!(value["peers"][1]["name"], "p1");
    assert_eq!(value["peers"][1]["predicted_memory_bytes"].as_u64(), Some(simulation.peers[1].peak_bytes));
    assert_eq!(value["lower_bound_step_s"].as_f64(), Some(0.5));
    let links = value["links"].as_array().unwrap();
    assert!(
        links.iter().any(|l| l["from"] == "p1" && l["to"] == "p2" && l["predicted_bytes_per_step"].as_u64() > Some(0))
    );
}

#[test]
fn a_file_that_lacks_something_is_refused() {
    let saved = saved();
    let plan = saved.plan.to_json().unwrap();
    let e = SavedPlan::from_json(&plan).unwrap_err().to_string();
    assert_eq!(e, "plan file: it holds a plan, but not the devices and the model it is for");
    let text = saved.to_json(&saved.simulate(false).unwrap()).unwrap();
    let e = SavedPlan::from_json(&text.replacen("\"p2\"", "\"p9\"", 1)).unwrap_err().to_string();
    assert_eq!(e, "plan file: its devices are not its peers");
}

#[test]
fn a_what_if_change_makes_the_step_faster() {
    let saved = saved();
    let programs = saved.programs().unwrap();
    let conditions = SimulateOptions::new(saved.optimizer);
    let simulation = saved.simulate(false).unwrap();
    let found = what_if(&programs, &saved.cluster, &conditions, &simulation).unwrap();
    assert!(
        matches!(found[0].change, Change::Line { line: Line::Uplink { .. }, .. }),
        "the slow uplinks come first: {found:?}"
    );
    assert!(found.windows(2).all(|w| w[0].speedup >= w[1].speedup));
    for w in &found {
        assert!((w.speedup - simulation.step_s / w.step_s).abs() < 1e-12 && w.speedup > 1.0);
    }
}
