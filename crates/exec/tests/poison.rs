//! An inspected pass names the operator that made a number that is not finite, on the peer that ran it.

mod common;

use std::collections::BTreeMap;

use common::*;
use fusionllm_exec::ExecError;
use fusionllm_exec::local::LocalRun;
use fusionllm_graph::ops::{Compare, Unary};
use fusionllm_graph::{
    Builder, DType, Graph, GraphError, HostTensor, Init, Node, Phase, TensorType, ValueId, ValueKind,
};
use fusionllm_models::AttentionImplementation::Eager;
use fusionllm_plan::{Plan, Schedule, compile};
use fusionllm_program::{Address, Cause, PeerId, Poison, Program};

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
                let numbers = vec![weight(&value.name); value.ty.numel()];
                Ok(HostTensor::from_f64(value.ty.shape.clone(), &numbers)?.cast(value.ty.dtype)?)
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
                let numbers = HostTensor::from_f64(ty.shape.clone(), &vec![*x; ty.numel()]).unwrap();
                let tensor = match ty.dtype.is_float() {
                    true => numbers.cast(ty.dtype).unwrap(),
                    false => HostTensor::zeros(ty.clone()),
                };
                batch.insert(name, tensor);
            }
            let dtype = graph.ty(graph.outputs["loss"]).dtype;
            batch.insert("loss_weight".into(), HostTensor::scalar(dtype, 1.0).unwrap());
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

/// 0 / 0 from the data of one micro-batch: a mean over a mask that holds nothing there.
#[test]
fn a_masked_mean_over_nothing_is_named_with_its_micro_batch() {
    let mut b = Builder::new("masked");
    let x = b.input("x", DType::F32, [4]).unwrap();
    let w = b.parameter("w", DType::F32, [4], Init::Constant(0.5)).unwrap();
    let y = b.mul(x, w).unwrap();
    let sum = b.sum(y, &[0], false).unwrap();
    let count = b.sum(x, &[0], false).unwrap();
    let loss = b.div(sum, count).unwrap();
    b.output("loss", loss).unwrap();
    let inspected = Inspected::step(&b.finish().unwrap(), 2, &[1.0, 0.0, 2.0]);
    assert_eq!(inspected.at(1), "Arose: div in forward of 1");
    // It gets an infinite gradient, and multiplies it by zero. That is less sure.
    assert_eq!(inspected.at(0), "FromInfinity: mul in backward of 1");
}

/// Regression: a loss over no targets was not found, whether it was the loss itself or only a part of it. So its peer
/// contradicted itself, and was put out.
#[test]
fn a_loss_over_no_targets_is_found() {
    for scaled in [false, true] {
        let mut b = Builder::new("targets");
        let x = b.input("x", DType::F32, [2, 4]).unwrap();
        let labels = b.input("labels", DType::I64, [2]).unwrap();
        let w = b.parameter("w", DType::F32, [4, 4], Init::Constant(0.5)).unwrap();
        let logits = b.linear(x, w, None).unwrap();
        // All labels are 0.
        let mut loss = b.cross_entropy(logits, labels, 0).unwrap();
        if scaled {
            loss = b.mul_scalar(loss, 0.5).unwrap();
        }
        b.output("loss", loss).unwrap();
        let inspected = Inspected::with(&b.finish().unwrap(), 1, &[1.0], |_| 0.5);
        assert_eq!(inspected.at(1), "Perhaps: cross_entropy_loss in forward of 0");
    }
}

/// Whatever makes a number not finite out of finite ones: every peer that sends such a loss or norm says where it comes
/// from, and one of them knows the operator.
#[test]
fn no_peer_sends_a_number_that_is_not_finite_without_a_reason() {
    let scaled = |b: &mut Builder, h, factor: f64| b.mul_scalar(h, factor);
    type Middle = fn(&mut Builder, ValueId) -> Result<ValueId, GraphError>;
    let middles: [(&str, Middle); 9] = [
        ("exp", |b, h| {
            let big = b.mul_scalar(h, 1e4)?;
            b.unary(Unary::Exp, big)
        }),
        ("rsqrt", |b, h| {
            let zero = b.sub(h, h)?;
            b.unary(Unary::Rsqrt, zero)
        }),
        ("log", |b, h| {
            let negative = b.unary(Unary::Neg, h)?;
            b.unary(Unary::Log, negative)
        }),
        ("mul", |b, h| {
            let big = b.mul_scalar(h, 1e30)?;
            b.mul(big, big)
        }),
        ("sum", |b, h| {
            let big = b.mul_scalar(h, 1.5e38)?;
            let sum = b.sum(big, &[1], true)?;
            b.mul(h, sum)
        }),
        // Too large for f16, and so infinite in it.
        ("_to_copy", |b, h| {
            let big = b.mul_scalar(h, 1e6)?;
            let half = b.cast(big, DType::F16)?;
            b.cast(half, DType::F32)
        }),
        // The mask hides all columns, so the softmax is 0 / 0.
        ("_softmax", |b, h| {
            let hidden = b.compare_scalar(Compare::Lt, h, 1e9)?;
            let minus = b.full(TensorType::new(DType::F32, []), f64::NEG_INFINITY)?;
            let masked = b.where_(hidden, minus, h)?;
            b.softmax(masked, 1)
        }),
        ("pow", |b, h| {
            let negative = b.unary(Unary::Neg, h)?;
            b.pow_scalar(negative, 0.5)
        }),
        ("div", |b, h| {
            let zero = b.sub(h, h)?;
            b.div(zero, zero)
        }),
    ];
    for (operator, middle) in middles {
        let graph = graph(|b, h| {
            let h = scaled(b, h, 1.0)?;
            middle(b, h)
        });
        for left in 1..graph.nodes.len() {
            let inspected = Inspected::step(&graph, left, &[1.0]);
            let named: Vec<String> = (0..2).map(|peer| inspected.at(peer)).collect();
            let made = |at: &String| at.contains(&format!(": {operator}")) && at.contains(" in forward of 0");
            assert!(named.iter().any(made), "{operator}, cut at {left}: {named:?}");
            // The right peer reports the loss, and each peer the norm of a weight. But no gradient comes back through
            // what a mask hides.
            let silent = inspected.found.iter().position(Option::is_none);
            assert!(silent.is_none() || (silent, operator) == (Some(0), "_softmax"), "cut at {left}: {named:?}");
        }
    }
}

/// The gradient is finite, and the square of it is not.
#[test]
fn a_norm_that_overflows_is_named() {
    let mut b = Builder::new("large");
    let x = b.input("x", DType::F64, [4]).unwrap();
    let w = b.parameter("w", DType::F64, [4], Init::Constant(0.0)).unwrap();
    let y = b.mul(x, w).unwrap();
    let loss = b.sum(y, &[0], false).unwrap();
    b.output("loss", loss).unwrap();
    let graph = b.finish().unwrap();
    assert_eq!(Inspected::with(&graph, 1, &[1e200], |_| 0.0).at(0), "Arose: gradient of w");
    assert_eq!(Inspected::with(&graph, 1, &[1e100], |_| 0.0).found, [None, None]);
}

/// Two uses of a weight have finite gradients. Their owner adds them, and the other peer has none of the sum.
#[test]
fn a_sum_of_the_parts_of_a_gradient_that_overflows_is_named() {
    let mut b = Builder::new("parts");
    let x = b.input("x", DType::F32, [4]).unwrap();
    let w = b.parameter("w", DType::F32, [4], Init::Constant(0.0)).unwrap();
    let once = b.mul(x, w).unwrap();
    let twice = b.mul(x, w).unwrap();
    let sum = b.add(once, twice).unwrap();
    let loss = b.sum(sum, &[0], false).unwrap();
    b.output("loss", loss).unwrap();
    let graph = b.finish().unwrap();
    let inspected = Inspected::with(&graph, 1, &[3e38], |_| 0.0);
    assert_eq!([inspected.at(0), inspected.at(1)], ["Arose: gradient of w", "nothing"]);
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

/// A batch of NaN leaves the running statistics of batch norm as they were, so the next steps have the same bits as
/// without it.
#[test]
fn a_step_that_is_not_applied_leaves_the_buffers_as_they_were() {
    let graph = resnet(DType::F32);
    let plan = random_plan(&graph, 3, 2, &mut ChoiceRng::new(4));
    let plan = replicate(plan, &mut ChoiceRng::new(4));
    let mut sound = local_run(&graph, &plan, &backends("cpu", 3), adamw());
    let mut disturbed = local_run(&graph, &plan, &backends("cpu", 3), adamw());
    for step in 0..3 {
        let mut bad = batch(&graph, 2, 100 + step);
        for micro_batch in &mut bad {
            let image = micro_batch.get_mut("pixel_values").unwrap();
            let numbers = vec![f32::NAN; image.ty().numel()];
            *image = HostTensor::from_f32(image.ty().shape.clone(), &numbers).unwrap();
        }
        assert!(!disturbed.step(&bad).unwrap().grad_norm.is_finite());
        let good = batch(&graph, 2, step);
        assert_eq!(sound.step(&good).unwrap().loss, disturbed.step(&good).unwrap().loss);
        for v in graph.buffers().chain(graph.parameters()) {
            let name = graph.value(v).name.as_str();
            assert_eq!(sound.read(name).unwrap(), disturbed.read(name).unwrap(), "{name}");
        }
    }
    assert!(graph.state_updates.len() > 10);
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
        // The loss of the micro-batch without targets is reported, and counts only if the step was skipped.
        let perhaps = |poison: Poison| poison.cause == Cause::Perhaps;
        assert!(b.stats.iter().all(|s| s.poison.is_none_or(perhaps)), "{:?}", b.stats);
    }
    let last = graph.value(graph.parameters().last().unwrap()).name.clone();
    assert_eq!(plain.read(&last).unwrap(), inspected.read(&last).unwrap());
    assert_eq!(Cause::Arose.min(Cause::Perhaps), Cause::Arose, "the surest first");
}
