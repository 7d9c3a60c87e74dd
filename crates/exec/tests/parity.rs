//! The same numbers as stock PyTorch and transformers, from the reference results beside the checkout.

mod common;

use std::collections::BTreeMap;

use common::*;
use fusionllm_exec::ExecError;
use fusionllm_exec::local::{LocalRun, Training};
use fusionllm_graph::{DType, Graph, HostTensor, TensorType};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{Plan, compile, equal_compute};
use fusionllm_program::TensorKey;
use safetensors::SafeTensors;

fn tensor(file: &SafeTensors<'_>, name: &str) -> HostTensor {
    let view = file.tensor(name).unwrap();
    let dtype = match view.dtype() {
        safetensors::Dtype::F32 => DType::F32,
        safetensors::Dtype::F64 => DType::F64,
        safetensors::Dtype::I64 => DType::I64,
        other => panic!("{other:?}"),
    };
    HostTensor::from_bytes(TensorType::new(dtype, view.shape()), view.data().to_vec()).unwrap()
}

struct Reference {
    graph: Graph,
    weights: Vec<u8>,
    results: Vec<u8>,
    losses: serde_json::Value,
}

impl Reference {
    fn load() -> Self {
        let config: Gpt2Config = serde_json::from_slice(&zoo("gpt2.config.json")).unwrap();
        Self {
            graph: config.build(2, 16, DType::F32).unwrap(),
            weights: zoo("gpt2.weights.safetensors"),
            results: zoo("gpt2.safetensors"),
            losses: serde_json::from_slice(&zoo("gpt2.train.json")).unwrap(),
        }
    }

    fn plan(&self, peers: usize) -> Plan {
        let names: Vec<String> = (0..peers).map(|p| format!("p{p}")).collect();
        equal_compute(&self.graph, &names, 1, Default::default()).unwrap()
    }

    fn local_run(&self, peers: usize, training: Training) -> LocalRun {
        let weights = SafeTensors::deserialize(&self.weights).unwrap();
        let programs = compile(&self.plan(peers), &self.graph, &train_graph(&self.graph)).unwrap();
        LocalRun::new(programs, &backends("cpu", peers), training, |v| -> Result<_, ExecError> {
            Ok(tensor(&weights, &v.name))
        })
        .unwrap()
    }

    fn batch(&self) -> Vec<BTreeMap<String, HostTensor>> {
        let results = SafeTensors::deserialize(&self.results).unwrap();
        vec![BTreeMap::from([
            ("input_ids".into(), tensor(&results, "input.x")),
            ("labels".into(), tensor(&results, "input.y")),
            ("loss_weight".into(), HostTensor::from_f32([], &[1.0]).unwrap()),
        ])]
    }
}

#[test]
fn gpt2_loss_and_gradients_are_pytorchs() {
    let reference = Reference::load();
    let results = SafeTensors::deserialize(&reference.results).unwrap();
    let loss = tensor(&results, "loss").to_f64()[0];
    for peers in [1, 3] {
        // With plain gradient descent the momentum buffer after one step is the gradient.
        let mut run = reference.local_run(peers, plain_sgd(0.0, 0.0, 0.0));
        let got = run.step(&reference.batch()).unwrap().loss;
        assert!((got - loss).abs() < 1e-5, "{peers} peers: loss {got}, PyTorch's {loss}");
        let mut checked = 0;
        for v in reference.graph.parameters() {
            let name = &reference.graph.value(v).name;
            let theirs = tensor(&results, &format!("grad.model.{name}")).to_f64();
            let ours = run.read(TensorKey::slot(name, "momentum_buffer")).unwrap().to_f64();
            let norm = theirs.iter().map(|x| x * x).sum::<f64>().sqrt();
            let error = theirs.iter().zip(&ours).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt() / norm;
            assert!(error < 1e-4, "{peers} peers: gradient of {name} is off by {error:e}");
            checked += 1;
        }
        assert_eq!(checked, 28);
    }
}

#[test]
fn twenty_steps_follow_pytorchs() {
    let reference = Reference::load();
    let mut adamw = adamw();
    adamw.learning_rate = fusionllm_program::LearningRate { base: 1e-3, warmup: 0, cosine_until: None, min: 0.0 };
    adamw.clip = None;
    for (name, training) in [("adamw", adamw), ("sgd", plain_sgd(0.05, 0.9, 5e-4))] {
        for peers in [1, 3] {
            let mut run = reference.local_run(peers, training);
            let batch = reference.batch();
            for (step, theirs) in reference.losses[name].as_array().unwrap().iter().enumerate() {
                let (ours, theirs) = (run.step(&batch).unwrap().loss, theirs.as_f64().unwrap());
                assert!(
                    (ours - theirs).abs() < 1e-3 * theirs + 1e-5,
                    "{name}, {peers} peers, step {step}: {ours}, PyTorch's {theirs}"
                );
            }
        }
    }
}
