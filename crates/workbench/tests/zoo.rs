//! Stock PyTorch models against PyTorch's own results.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fusionllm_backend::open;
use fusionllm_data::weights::Weights;
use fusionllm_data::write_tensors;
use fusionllm_exec::ExecError;
use fusionllm_exec::local::{LocalRun, Training};
use fusionllm_graph::ops::{AdamwStep, SgdStep};
use fusionllm_graph::{HostTensor, autodiff};
use fusionllm_import::ImportOptions;
use fusionllm_plan::{Schedule, compile, equal_compute};
use fusionllm_program::{LearningRate, Optimizer};
use fusionllm_workbench::model::check::check;
use fusionllm_workbench::model::imported::ImportedModel;

const MODELS: [&str; 7] = ["gpt2", "llama", "opt", "bert", "hf_vit", "resnet_tiny", "mobilenet_v2"];

/// Models of which PyTorch trained twenty steps.
const TRAINED: [&str; 5] = ["gpt2", "llama", "opt", "bert", "hf_vit"];

fn zoo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo").join(name)
}

/// Single precision on both sides for language models, double for the others.
#[test]
fn loss_and_gradients_are_pytorchs() {
    for name in MODELS {
        let (model, reference) = (zoo(&format!("{name}.pt2")), zoo(&format!("{name}.safetensors")));
        for peers in [1, 3] {
            let result = check(&model, None, None, &reference, "cpu", peers).unwrap();
            assert!(result.error() < 1e-3, "{name}, {peers} peers: {result:?}");
            assert!(result.parameters > 10, "{name}: {result:?}");
        }
    }
}

/// Regression: running statistics, frozen parameters and buffers of class weights stayed those of the archive.
#[test]
fn loaded_weights_are_a_whole_state() {
    let [model, weights, reference] = ["loaded.pt2", "loaded.weights.safetensors", "loaded.safetensors"].map(zoo);
    for peers in [1, 3] {
        let result = check(&model, Some(&weights), None, &reference, "cpu", peers).unwrap();
        assert!(result.error() < 1e-5, "{peers} peers: {result:?}");
        assert!(result.warnings.is_empty(), "{result:?}");
    }
    // Each of them counts.
    let dir = tempfile::tempdir().unwrap();
    let part = dir.path().join("part.safetensors");
    let all = Weights::open(&weights).unwrap();
    for (left_out, warned) in
        [("body.1.running_mean", 1), ("gain", 1), ("class_weights", 1), ("body.1.num_batches_tracked", 0)]
    {
        let kept = all.tensor_types().filter(|(name, _)| *name != left_out);
        let kept: BTreeMap<&str, HostTensor> = kept.map(|(name, _)| (name, all.read(name).unwrap().unwrap())).collect();
        write_tensors(&part, &kept).unwrap();
        let result = check(&model, Some(&part), None, &reference, "cpu", 1).unwrap();
        let error = result.loss_rel_err.max(result.max_grad_rel_err).max(result.max_buffer_rel_err);
        assert!(error > 1e-2, "{left_out}: {result:?}");
        assert_eq!(result.warnings.len(), warned, "{result:?}");
        assert!(result.warnings.iter().all(|warning| warning.contains(left_out)), "{result:?}");
    }
}

#[test]
fn twenty_steps_follow_pytorchs() {
    let rate = |base| LearningRate { base, warmup: 0, cosine_until: None, min: 0.0 };
    let adamw = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
    let sgd = Optimizer::Sgd(SgdStep { momentum: 0.9, weight_decay: 5e-4, nesterov: false });
    for name in TRAINED {
        let file = zoo(&format!("{name}.pt2"));
        let losses = std::fs::read(zoo(&format!("{name}.train.json"))).unwrap();
        let losses: BTreeMap<String, Vec<f64>> = serde_json::from_slice(&losses).unwrap();
        let reference = Weights::open(&zoo(&format!("{name}.safetensors"))).unwrap();
        for (rule, optimizer, base) in [("adamw", adamw, 1e-3), ("sgd", sgd, 0.05)] {
            for peers in [1, 3] {
                let mut model = ImportedModel::open(&file, None, ImportOptions::default()).unwrap();
                let graph = model.imported().graph.clone();
                let mut batch = BTreeMap::from([("loss_weight".to_owned(), HostTensor::from_f32([], &[1.0]).unwrap())]);
                for v in graph.inputs() {
                    let input = &graph.value(v).name;
                    let given = reference.read(&format!("input.{input}")).unwrap().unwrap();
                    batch.insert(input.clone(), given.cast(graph.ty(v).dtype).unwrap());
                }
                let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
                let names: Vec<String> = (0..peers).map(|p| format!("p{p}")).collect();
                let plan = equal_compute(&graph, &names, 1, Schedule::default()).unwrap();
                let backends: Vec<_> = names.iter().map(|_| open("cpu").unwrap()).collect();
                let training = Training { optimizer, learning_rate: rate(base), clip: None, seed: 1 };
                let programs = compile(&plan, &graph, &train).unwrap();
                let mut cluster = LocalRun::new(programs, &backends, training, |value| {
                    model.initial(value).map_err(|e| ExecError::State(e.to_string()))
                })
                .unwrap();
                for (step, theirs) in losses[rule].iter().enumerate() {
                    let ours = cluster.step(std::slice::from_ref(&batch)).unwrap().loss;
                    assert!(
                        (ours - theirs).abs() <= 1e-3 * theirs.abs() + 1e-5,
                        "{name} by {rule}, {peers} peers, step {step}: {ours}, PyTorch's {theirs}"
                    );
                }
            }
        }
    }
}
