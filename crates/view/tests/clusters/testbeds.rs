//! The testbeds of the repository.

use std::path::{Path, PathBuf};

use fusionllm_graph::DType;
use fusionllm_graph::autodiff::differentiate;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{
    Compression, PlanOptions, Schedule, Scheduler, SimulateOptions, Workload, schedule, unused, what_if,
};
use fusionllm_program::Optimizer;
use fusionllm_view::picture;
use fusionllm_workspace::config::Testbed;

use super::check;

fn testbeds() -> Vec<PathBuf> {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let files = std::fs::read_dir(examples.join("testbeds")).unwrap().map(|f| f.unwrap().path());
    let mut all: Vec<PathBuf> = files.filter(|f| f.extension().is_some_and(|e| e == "toml")).collect();
    all.push(examples.join("three-homes/testbed.toml"));
    all.sort();
    all
}

/// With OP-Fence, which leaves devices out, and with a baseline, which uses all of them.
#[test]
fn texts_of_testbeds_do_not_overlap() {
    let config =
        Gpt2Config { vocab_size: 512, n_positions: 64, n_embd: 256, n_layer: 6, n_head: 4, ..Gpt2Config::default() };
    let graph = config.build(1, 64, DType::F32).unwrap();
    let train = differentiate(&graph, graph.outputs["loss"]).unwrap();
    let optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
    for file in testbeds() {
        let cluster = Testbed::load(&file).unwrap().cluster;
        for scheduler in [Scheduler::OpFence, Scheduler::EqualCompute] {
            let options = PlanOptions {
                scheduler,
                optimizer,
                schedules: vec![Schedule::OneFOneB],
                replicas: 2,
                compression: Compression::default(),
            };
            let workload = Workload { forward: &graph, train: &train, micro_batches: 16 };
            let made = schedule(&[workload], &cluster, &options).unwrap();
            let changes =
                what_if(&made.programs, &made.cluster, &SimulateOptions::new(optimizer), &made.simulation).unwrap();
            let picture = picture::cluster(&made.cluster, &made.plan, &made.simulation, &changes, &made.notes);
            let case = format!("{}, {scheduler}", file.display());
            check(&picture, &case);
            let said = |what: &str| picture.texts().iter().filter(|(_, t)| t.contains(what)).count();
            // The first of them is in the key.
            let marks = said("limits the step") + said("limit: ");
            assert!(if changes.is_empty() { marks == 0 } else { marks >= 2 }, "{case}: the limit is marked");
            let absent: usize = unused(&made.notes).iter().map(|u| u.count).sum();
            assert_eq!(cluster.devices().len(), made.plan.used().len() + absent, "{case}: no device is forgotten");
            assert_eq!(said("unused machine") > 0, absent > 0, "{case}: unused devices are shown");
        }
    }
}
