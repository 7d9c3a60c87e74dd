//! Gradients of random graphs under random plans, compared with those of one peer.

mod common;
// The random graphs and cuts of the plan crate's tests.
#[path = "../../plan/tests/common/mod.rs"]
mod plans;

use std::collections::BTreeMap;

use fusionllm_exec::local::{LocalRun, StepResult};
use fusionllm_graph::{CounterRng, Graph, HostTensor, ValueKind};
use fusionllm_plan::{Plan, Schedule};
use fusionllm_program::TensorKey;
use plans::{ChoiceRng, one_peer, random_graph, random_plan, replicate};

/// The state after one step.
struct Outcome {
    step: StepResult,
    gradients: BTreeMap<String, HostTensor>,
    buffers: BTreeMap<String, HostTensor>,
}

/// Runs one step of plain gradient descent, whose momentum buffers are then the gradients.
fn outcome(graph: &Graph, plan: &Plan) -> Outcome {
    let training = common::plain_sgd(0.1, 0.9, 0.0);
    let backends = common::backends("cpu", plan.peers.len());
    let programs = fusionllm_plan::compile(plan, graph, &plans::train_graph(graph)).unwrap();
    let initial = |value: &fusionllm_graph::Value| match value.kind {
        ValueKind::Constant => Ok(graph.constants[&value.name].clone()),
        _ => common::initial(training.seed)(value),
    };
    let mut run = LocalRun::new(programs, &backends, training, initial).unwrap();
    let step = run.step(&inputs(graph, plan.micro_batches)).unwrap();
    let train = plans::train_graph(graph);
    let name = |v| graph.value(v).name.clone();
    let of = train.gradients.iter().map(|g| name(g.parameter));
    let gradients = of.map(|n| (n.clone(), run.read(TensorKey::slot(&n, "momentum_buffer")).unwrap())).collect();
    let buffers = graph.buffers().map(name).map(|n| (n.clone(), run.read(&n).unwrap())).collect();
    Outcome { step, gradients, buffers }
}

/// Micro-batches of different weights.
fn inputs(graph: &Graph, micro_batches: u32) -> Vec<BTreeMap<String, HostTensor>> {
    let rng = CounterRng::new(9);
    let find = |name: &str| graph.ty(graph.find(name).unwrap());
    let (x, labels) = (find("x"), find("labels"));
    let total: u32 = (1..=micro_batches).sum();
    let micro_batch = |m: u32| {
        let draw = |n: usize, stream: u64| (0..n as u64).map(move |i| f64::from(rng.uniform(i, stream)));
        let values: Vec<f64> = draw(x.numel(), u64::from(2 * m)).map(|u| 2.0 * u - 1.0).collect();
        let classes: Vec<i64> = draw(labels.numel(), u64::from(2 * m + 1)).map(|u| (u * 6.0) as i64).collect();
        BTreeMap::from([
            ("x".to_string(), HostTensor::from_f64(x.shape.clone(), &values).unwrap().cast(x.dtype).unwrap()),
            ("labels".to_string(), HostTensor::from_i64(labels.shape.clone(), &classes).unwrap()),
            ("loss_weight".to_string(), HostTensor::scalar(x.dtype, f64::from(m + 1) / f64::from(total)).unwrap()),
        ])
    };
    (0..micro_batches).map(micro_batch).collect()
}

/// Uneven cuts, stages in any order, several stages or none on a peer, every schedule: the bits are the same.
#[test]
fn any_cut_gives_the_same_gradients() {
    for seed in 0..90 {
        let mut choices = ChoiceRng::new(seed);
        let graph = random_graph(1 + choices.below(14), &mut choices);
        let micro_batches = 1 + choices.below(4) as u32;
        let expected = outcome(&graph, &one_peer(&graph, micro_batches));
        assert!(
            expected.step.grad_norm > 0.0 && expected.step.grad_norm.is_finite(),
            "seed {seed}: {:?}",
            expected.step
        );
        let schedule = Schedule::ALL[seed as usize % Schedule::ALL.len()];
        let plan = random_plan(&graph, 1 + choices.below(6), micro_batches, schedule, &mut choices);
        let got = outcome(&graph, &plan);
        assert_eq!((got.step.loss, got.step.grad_norm), (expected.step.loss, expected.step.grad_norm), "seed {seed}");
        assert_eq!((got.gradients, got.buffers), (expected.gradients, expected.buffers), "seed {seed}");
    }
}

/// Replicated stages give the same loss and buffers. The gradients differ only by the rounding of reordered sums.
#[test]
fn gradients_of_replicas_agree() {
    for seed in 200..290 {
        let mut choices = ChoiceRng::new(seed);
        let graph = random_graph(1 + choices.below(14), &mut choices);
        let micro_batches = 2 + choices.below(5) as u32;
        let schedule = Schedule::ALL[seed as usize % Schedule::ALL.len()];
        let mut plan = random_plan(&graph, 2 + choices.below(5), micro_batches, schedule, &mut choices);
        replicate(&mut plan, &mut choices);
        let expected = outcome(&graph, &one_peer(&graph, micro_batches));
        let got = outcome(&graph, &plan);
        assert_eq!((got.step.loss, &got.buffers), (expected.step.loss, &expected.buffers), "seed {seed}");
        for (name, expected) in &expected.gradients {
            let (a, b) = (got.gradients[name].to_f64(), expected.to_f64());
            let size = b.iter().fold(1e-6f64, |m, x| m.max(x.abs()));
            for (a, b) in a.iter().zip(&b) {
                assert!((a - b).abs() < 1e-5 * size, "seed {seed}, {name}: {a} for {b}");
            }
        }
    }
}
