//! Plan files, and the errors for plans that cannot be carried out.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use fusionllm_graph::{Builder, DType, Graph, Init, NodeId, ValueId};
use fusionllm_plan::{
    Plan, PlanError, Schedule, Workload, compile, compile_forward, equal_compute, equal_number, idle_note,
};

fn chain() -> Graph {
    let mut b = Builder::new("chain");
    let x = b.input("x", DType::F32, [2, 3]).unwrap();
    let w = b.parameter("w", DType::F32, [3, 3], Init::Constant(0.5)).unwrap();
    let y = b.scope("first", |b| b.linear(x, w, None)).unwrap();
    let loss = b.scope("second", |b| b.sum(y, &[0, 1], false)).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

fn cut(graph: &Graph) -> Plan {
    Plan::from_stages(graph, &[0, 1], &[1, 0], names(2), 4, Schedule::GPipe, "by hand")
}

fn refusal(graph: &Graph, change: impl FnOnce(&mut Plan)) -> String {
    let mut plan = cut(graph);
    change(&mut plan);
    let error = plan.validate(graph).unwrap_err();
    assert_eq!(compile(&plan, graph, &train_graph(graph)), Err(error.clone()));
    error.to_string().replace(&graph.digest(), "DIGEST")
}

#[test]
fn the_file_is_read_as_it_was_written() {
    let graph = chain();
    let plan = cut(&graph);
    let text = plan.to_json().unwrap();
    insta::assert_snapshot!(text.replace(&graph.digest(), "DIGEST"), @r#"
    {
      "fusionllm_plan": 2,
      "version": 1,
      "graph": "DIGEST",
      "peers": [
        "p0",
        "p1"
      ],
      "stages": [
        {
          "peers": [
            1
          ],
          "nodes": [
            0
          ]
        },
        {
          "peers": [
            0
          ],
          "nodes": [
            1
          ]
        }
      ],
      "micro_batches": 4,
      "schedule": "gpipe",
      "scheduler": "by hand",
      "compression": {
        "name": "none",
        "ratio": 1.0,
        "loss_budget": "0.5 %",
        "guard": false,
        "stochastic_rounding": false,
        "spectral_watch": 0
      }
    }
    "#);
    assert_eq!(Plan::from_json(&text), Ok(plan));
}

#[test]
fn another_version_is_refused_whatever_its_fields() {
    let error = |text: &str| Plan::from_json(text).unwrap_err().to_string();
    insta::assert_snapshot!(error(r#"{"fusionllm_plan": 0, "cuts": [3]}"#), @"plan file: it has version 0, but this program reads version 2; make a new plan");
    insta::assert_snapshot!(error(r#"{"fusionllm_plan": 2, "graph": "g"}"#), @"plan file: missing field `peers` at line 1 column 35");
    insta::assert_snapshot!(error("[train]\nsteps = 3"), @"plan file: not a FusionLLM plan: expected ident at line 1 column 4");
}

#[test]
fn a_plan_that_does_not_fit_says_why() {
    let graph = chain();
    insta::assert_snapshot!(refusal(&graph, |p| p.graph = "0123".into()), @"plan: it is for another model or micro-batch size (its graph is 0123, this graph is DIGEST); make a new plan");
    insta::assert_snapshot!(refusal(&graph, |p| p.micro_batches = 0), @"plan: it needs at least one stage and one micro-batch");
    insta::assert_snapshot!(refusal(&graph, |p| p.stages[1].peers[0] = 2), @"plan: stage 1 names peer 2, but there are 2 peers");
    insta::assert_snapshot!(refusal(&graph, |p| p.stages[1].peers.clear()), @"plan: stage 1 has no peer");
    insta::assert_snapshot!(refusal(&graph, |p| p.stages[1].peers = vec![0, 1, 0, 1, 0]), @"plan: stage 1 has 4 micro-batches for 5 turns; use more micro-batches");
    insta::assert_snapshot!(refusal(&graph, |p| p.peers[1] = "p0".into()), @r#"plan: the name "p0" of peer 1 is not valid; names are unique, have at most 64 bytes and no slashes"#);
    insta::assert_snapshot!(refusal(&graph, |p| p.peers[0] = "../x".into()), @r#"plan: the name "../x" of peer 0 is not valid; names are unique, have at most 64 bytes and no slashes"#);
    insta::assert_snapshot!(refusal(&graph, |p| p.stages.swap(0, 1)), @r#"plan: "second.sum" (stage 0) needs "first.linear" of the later stage 1"#);
    insta::assert_snapshot!(refusal(&graph, |p| p.stages[1].nodes.clear()), @r#"plan: "second.sum" is in no stage"#);
    insta::assert_snapshot!(refusal(&graph, |p| p.stages[1].nodes.push(NodeId(0))), @"plan: node #0 is in two stages");
    insta::assert_snapshot!(refusal(&graph, |p| p.stages[1].nodes.push(NodeId(9))), @"plan: stage 1 names node #9, which does not exist");
}

#[test]
fn idle_peers_are_removed() {
    let graph = chain();
    let mut plan = Plan { peers: names(5), ..cut(&graph) };
    plan.stages[0].peers = vec![3, 1, 3];
    plan.stages[1].peers = vec![4];
    let used = plan.clone().without_idle();
    assert_eq!(used.peers, ["p1", "p3", "p4"]);
    assert_eq!((&used.stages[0].peers, &used.stages[1].peers), (&vec![1, 0, 1], &vec![2]));
    assert_eq!(used.stages[0].nodes, plan.stages[0].nodes);
    assert_eq!(used.clone().without_idle(), used);
    // An invalid plan stays invalid.
    plan.stages[1].peers = vec![5];
    assert_eq!(plan.clone().without_idle(), plan);
}

fn compiled(graph: &Graph) -> String {
    let error = compile(&one_peer(graph, 2), graph, &train_graph(graph)).unwrap_err();
    assert!(matches!(error, PlanError::Plan(_)));
    error.to_string()
}

#[test]
fn compile_errors_say_why() {
    let graph = chain();
    let eval = graph.evaluation().unwrap();
    let plan = cut(&graph);
    insta::assert_snapshot!(compile_forward(&plan, &graph, &eval, &["lost"]).unwrap_err(), @r#"plan: the graph has no output "lost""#);
    let huge = Plan { micro_batches: u32::MAX, ..plan.clone() };
    insta::assert_snapshot!(compile(&huge, &graph, &train_graph(&graph)).unwrap_err(), @"plan: 4294967295 micro-batches of this graph run 25769803770 operators per step, but at most 67108864 are possible");
    let mut other = train_graph(&graph);
    other.graph.nodes[0].name = "another".into();
    insta::assert_snapshot!(compile(&plan, &graph, &other).unwrap_err(), @"plan: the training graph is for another graph");
}

/// A graph with one buffer, which `f` reads and changes.
fn stateful(f: impl FnOnce(&mut Builder, ValueId, ValueId) -> ValueId) -> Graph {
    let mut b = Builder::new("stateful");
    let x = b.input("x", DType::F32, [3]).unwrap();
    let w = b.parameter("w", DType::F32, [3], Init::Constant(0.5)).unwrap();
    let buffer = b.buffer("seen", DType::F32, [3], Init::Constant(0.0)).unwrap();
    let y = b.scope("first", |b| b.mul(x, w)).unwrap();
    let y = f(&mut b, y, buffer);
    let loss = b.scope("last", |b| b.sum(y, &[0], false)).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

/// Regression: the gradient was computed from the buffer's content after it changed, or after a later micro-batch.
#[test]
fn a_gradient_that_needs_a_changed_buffer_is_refused() {
    let graph = stateful(|b, y, buffer| {
        b.update_buffer(buffer, y).unwrap();
        b.scope("scale", |b| b.mul(y, buffer)).unwrap()
    });
    insta::assert_snapshot!(compiled(&graph), @r#"plan: "scale.mul.grad.mul" needs the old content of buffer "seen" for its gradient, but forward changes it"#);
}

/// Regression: such an update was left out without an error.
#[test]
fn a_buffer_without_a_computed_content_is_refused() {
    let graph = stateful(|b, y, buffer| {
        let x = b.graph().find("x").unwrap();
        b.update_buffer(buffer, x).unwrap();
        y
    });
    insta::assert_snapshot!(compiled(&graph), @r#"plan: no operator computes the new content of buffer "seen""#);
}

#[test]
fn a_buffer_that_changes_stays_in_one_stage() {
    let graph = stateful(|b, y, buffer| {
        let sum = b.scope("count", |b| b.add(y, buffer)).unwrap();
        b.update_buffer(buffer, sum).unwrap();
        y
    });
    let split = plan_by(&graph, 2, Schedule::GPipe, |name| u32::from(!name.starts_with("first")));
    assert_eq!(compile(&split, &graph, &train_graph(&graph)).map(|p| p.len()), Ok(2));
    let graph = stateful(|b, y, buffer| {
        b.update_buffer(buffer, y).unwrap();
        b.scope("later", |b| b.add(y, buffer)).unwrap()
    });
    let split = plan_by(&graph, 2, Schedule::GPipe, |name| u32::from(!name.starts_with("first")));
    insta::assert_snapshot!(compile(&split, &graph, &train_graph(&graph)).unwrap_err(), @r#"plan: forward changes buffer "seen", so all nodes that read or write it must be in one stage"#);
    // A cut by equal shares keeps the buffer's nodes together.
    let shares = fusionllm_plan::equal_compute(&graph, &names(4), 2, Schedule::GPipe).unwrap();
    assert_eq!(compile(&shares, &graph, &train_graph(&graph)).map(|p| p.len()), Ok(4));
}

#[test]
fn a_parameter_that_is_the_loss_is_refused() {
    let mut b = Builder::new("bare");
    let x = b.input("x", DType::F32, []).unwrap();
    let w = b.parameter("w", DType::F32, [], Init::Constant(0.5)).unwrap();
    let loss = b.add(x, w).unwrap();
    b.output("loss", loss).unwrap();
    insta::assert_snapshot!(compiled(&b.finish().unwrap()), @r#"plan: parameter "w" is itself a term of the loss, so no operator computes its gradient; multiply it by one"#);
}

/// Regression: a model of a few operators with 40 peers got 40 stages, many of them without an operator, and no message
/// said so.
#[test]
fn peers_without_an_operator_get_no_stage() {
    let (graph, train) = (chain(), train_graph(&chain()));
    let workload = Workload { forward: &graph, train: &train, micro_batches: 4 };
    let count = graph.nodes.len();
    for cut in [equal_number, equal_compute] {
        let plan = cut(&graph, &names(40), 4, Schedule::GPipe).unwrap();
        plan.validate(&graph).unwrap();
        assert!(plan.stages.len() <= count && plan.stages.iter().all(|stage| !stage.nodes.is_empty()), "{plan:?}");
        let note = idle_note(&plan, workload).unwrap();
        let (used, idle) = (plan.stages.len(), 40 - plan.stages.len());
        assert!(
            note.starts_with(&format!("{idle} of 40 peers have nothing to do: the model's {count} operators")),
            "{note}"
        );
        assert!(note.ends_with(&format!("; {used} peers would do as well")), "{note}");
        let plan = plan.without_idle();
        assert_eq!((plan.peers.len(), idle_note(&plan, workload)), (used, None));
    }
}
