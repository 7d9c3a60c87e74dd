//! An inspected pass names the operator that made a number that is not finite, on the peer that ran it.

mod common;

use std::collections::BTreeMap;

use common::*;
use fusionllm_exec::ExecError;
use fusionllm_exec::local::LocalRun;
use fusionllm_graph::ops::Unary;
use fusionllm_graph::{Builder, DType, Graph, GraphError, HostTensor, Init, Node, Phase, ValueId, ValueKind};
use fusionllm_models::AttentionImplementation::Eager;
use fusionllm_plan::{Address, Cause, PeerId, Plan, Poison, Program, Schedule, compile};

/// `x` through a weight, `middle` and another weight, to a loss.
fn graph(middle: impl FnOnce(&mut Builder, ValueId) -> Result<ValueId, GraphError>) -> Graph {
    let mut b = Builder::new("small");
    let x = b.input("x", DType::F32, [2, 4]).unwrap();
    let labels = b.input("labels", DType::I64, [2]).unwrap();
    let w0 = b.parameter("w0", DType::F32, [4, 4], Init::Constant(0.5)).unwrap();
    let w1 = b.parameter("w1", DType::F32, [4, 4], Init::Constant(0.5)).unwrap();
    let h = b.linear(x, w0, None).unwrap();
    let y = middle(&mut b, h).unwrap();
    let logits = b.linear(y, w1, None).unwrap();
    let loss = b.cross_entropy(logits, labels, -100).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

/// One inspected step of two peers, of which the first has the first `left` nodes.
struct Inspected {
    programs: Vec<Program>,
    found: Vec<Option<Poison>>,
}

impl Inspected {
    /// `x` is the same number everywhere, for each micro-batch.
    fn step(graph: &Graph, left: usize, x: &[f64]) -> Self {
        Self::with(graph, left, x, |name| if name == "nan" { f64::NAN } else { 0.5 })
    }

    fn with(graph: &Graph, left: usize, x: &[f64], weight: impl Fn(&str) -> f64) -> Self {
        let stages: Vec<u32> = (0..graph.nodes.len()).map(|n| u32::from(n >= left)).collect();
        let (names, count) = (vec!["left".into(), "right".into()], x.len() as u32);
        let plan = Plan::from_stages(graph, &stages, &[0, 1], names, count, Schedule::OneFOneB, "test");
        let programs = compile(&plan, graph, &train_graph(graph)).unwrap();
        let initial = |value: &fusionllm_graph::Value| match value.kind {
            ValueKind::Parameter(_) => {
                let numbers = vec![weight(&value.name) as f32; value.ty.numel()];
                Ok(HostTensor::from_f32(value.ty.shape.clone(), &numbers)?)
            }
            _ => Err(ExecError::State(format!("{:?} has no value", value.name))),
        };
        let training = plain_sgd(0.1, 0.9, 0.0);
        let mut run = LocalRun::new(programs.clone(), &backends("cpu", 2), training, initial).unwrap();
        run.set_inspect(true);
        let batch = |x: &f64| -> BTreeMap<String, HostTensor> {
            let mut batch = BTreeMap::new();
            for v in graph.inputs() {
                let (name, ty) = (graph.value(v).name.clone(), graph.ty(v));
                let tensor = match ty.dtype {
                    DType::F32 => HostTensor::from_f32(ty.shape.clone(), &vec![*x as f32; ty.numel()]).unwrap(),
                    _ => HostTensor::zeros(ty.clone()),
                };
                batch.insert(name, tensor);
            }
            batch.insert("loss_weight".into(), HostTensor::from_f32([], &[1.0]).unwrap());
            batch
        };
        let batches: Vec<_> = x.iter().map(batch).collect();
        let found = run.step(&batches).unwrap().stats.into_iter().map(|s| s.poison).collect();
        Self { programs, found }
    }

    /// The place that a peer found, with how sure the peer is.
    fn at(&self, peer: usize) -> String {
        let Some(Poison { cause, tensor, from }) = self.found[peer] else { return "nothing".into() };
        let program = &self.programs[peer];
        let name = |v: ValueId| &program.values[&v].name;
        let place = match (tensor, from) {
            (tensor, Some(PeerId::BROKER)) => format!("input {}", name(tensor.value())),
            (_, Some(from)) => format!("message of {}", from.0),
            (Address::Value { micro_batch, .. }, None) => {
                let node = self.node(peer);
                let phase = if node.phase == Phase::Forward { "forward" } else { "backward" };
                format!("{} in {phase} of {micro_batch}", node.op.name())
            }
            (Address::Gradient { parameter }, None) => format!("gradient of {}", name(parameter)),
            (Address::Held { value }, None) => format!("kept {}", name(value)),
            (Address::OptimizerState { parameter, .. }, None) => format!("state of {}", name(parameter)),
            (tensor, None) => panic!("{tensor:?}"),
        };
        format!("{cause:?}: {place}")
    }

    /// The node that made the number which a peer found.
    fn node(&self, peer: usize) -> &Node {
        let program = &self.programs[peer];
        let ValueKind::Result { node, .. } = program.values[&self.found[peer].unwrap().tensor.value()].kind else {
            panic!("no node made it");
        };
        &program.nodes[&node]
    }
}

/// e^200 is infinite. The operator is named on whichever peer runs it, and the other peer reports the message that it
/// got.
#[test]
fn an_overflow_is_named_on_the_peer_that_runs_the_operator() {
    let graph = graph(|b, h| b.unary(Unary::Exp, h));
    let right = Inspected::step(&graph, 1, &[0.1, 100.0]);
    assert_eq!(right.at(1), "Arose: exp in forward of 1");
    assert_eq!(right.at(0), "Arrived: message of 1");
    let left = Inspected::step(&graph, 2, &[100.0, 0.1]);
    assert_eq!(left.at(0), "Arose: exp in forward of 0");
    assert_eq!(left.at(1), "FromInfinity: cross_entropy_loss in forward of 0");
    let fine = Inspected::step(&graph, 1, &[0.1, 0.2]);
    assert_eq!(fine.found, [None, None]);
}

#[test]
fn logarithms_and_quotients_of_zero_are_named() {
    let log = graph(|b, h| b.unary(Unary::Log, h));
    assert_eq!(Inspected::step(&log, 1, &[1.0, 1.0, 0.0]).at(1), "Arose: log in forward of 2");
    assert_eq!(Inspected::step(&log, 1, &[-1.0]).at(1), "Arose: log in forward of 0");
    let div = graph(|b, h| b.div(h, h));
    assert_eq!(Inspected::step(&div, 1, &[0.0]).at(1), "Arose: div in forward of 0");
}

/// The root of 0 is 0, and only its derivative is infinite.
#[test]
fn an_operator_of_backward_is_named() {
    let inspected = Inspected::step(&graph(|b, h| b.unary(Unary::Sqrt, h)), 1, &[0.0]);
    let at = inspected.at(1);
    assert!(at.starts_with("Arose: ") && at.ends_with(" in backward of 0"), "{at}");
    let origin = inspected.node(1).origin.unwrap();
    assert_eq!(inspected.programs[1].nodes[&origin].op.name(), "sqrt");
}

#[test]
fn parameters_and_inputs_are_named_rather_than_the_operators_that_read_them() {
    let graph = graph(|b, h| b.unary(Unary::Tanh, h));
    let weight = Inspected::with(&graph, 1, &[1.0], |name| if name == "w1" { f64::NAN } else { 0.5 });
    assert_eq!((weight.at(1), weight.at(0)), ("Arose: kept w1".into(), "Arrived: message of 1".into()));
    for x in [f64::NAN, f64::INFINITY] {
        assert_eq!(Inspected::step(&graph, 1, &[1.0, x]).at(0), "Arose: input x");
    }
}

/// Each micro-batch's gradient is finite, and so is the loss. Their sum is not.
#[test]
fn a_sum_over_micro_batches_that_overflows_is_named() {
    let mut b = Builder::new("sum");
    let x = b.input("x", DType::F32, [4]).unwrap();
    let w = b.parameter("w", DType::F32, [4], Init::Constant(0.0)).unwrap();
    let y = b.mul(x, w).unwrap();
    let loss = b.sum(y, &[0], false).unwrap();
    b.output("loss", loss).unwrap();
    let graph = b.finish().unwrap();
    assert_eq!(Inspected::with(&graph, 1, &[3e38, 3e38], |_| 0.0).at(0), "Arose: gradient of w");
    assert_eq!(Inspected::with(&graph, 1, &[1e38, 1e38], |_| 0.0).found, [None, None]);
}

/// Masks hold infinities and a micro-batch may have no target. Neither is a fault.
#[test]
fn inspected_steps_of_a_sound_model_find_nothing_and_have_the_same_bits() {
    let graph = gpt2(Eager, 0.1);
    let (micro_batches, mut choices) = (3, ChoiceRng::new(5));
    let plan = random_plan(&graph, 2, micro_batches, &mut choices);
    let mut plain = local_run(&graph, &plan, &backends("cpu", 2), adamw());
    let mut inspected = local_run(&graph, &plan, &backends("cpu", 2), adamw());
    inspected.set_inspect(true);
    for step in 0..4 {
        let mut batch = batch(&graph, micro_batches, step);
        let labels = batch[0]["labels"].ty().shape.clone();
        let ignored = vec![-100; labels.iter().product()];
        batch[0].insert("labels".into(), HostTensor::from_i64(labels, &ignored).unwrap());
        batch[0].insert("loss_weight".into(), HostTensor::from_f32([], &[0.0]).unwrap());
        let (a, b) = (plain.step(&batch).unwrap(), inspected.step(&batch).unwrap());
        assert!(a.loss.is_finite());
        assert_eq!((a.loss, a.grad_norm), (b.loss, b.grad_norm), "step {step}");
        assert!(b.stats.iter().all(|s| s.poison.is_none()), "{:?}", b.stats);
    }
    let last = graph.value(graph.parameters().last().unwrap()).name.clone();
    assert_eq!(plain.read(&last).unwrap(), inspected.read(&last).unwrap());
    assert_eq!(Cause::Arose.min(Cause::Perhaps), Cause::Arose, "the surest first");
}
