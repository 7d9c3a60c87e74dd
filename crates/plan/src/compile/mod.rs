//! From Plans to Programs: what each peer runs, keeps, sends and receives, and in which order.

mod assemble;
mod compiler;
mod emit;
mod node_stages;
mod patterns;
mod tasks;
mod uses;

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::{Graph, Op, TrainGraph, ValueId};
use fusionllm_program::{Address, PeerId, Program};

use assemble::programs;
use compiler::Compiler;
pub use node_stages::NodeStages;

use crate::error::PlanError;
use crate::plan::Plan;

/// Compiles the Programs of a training step, one per peer of the plan.
pub fn compile(plan: &Plan, forward: &Graph, train: &TrainGraph) -> Result<Vec<Program>, PlanError> {
    plan.validate(forward)?;
    let targets = train
        .gradients
        .iter()
        .flat_map(|g| g.contributions.iter().copied())
        .chain(train.graph.state_updates.iter().map(|u| u.value))
        .chain([train.loss]);
    let live = train.graph.ancestors(targets);
    let node_stages = NodeStages::of_training(plan, forward, train)?;
    let mut compiler = Compiler::new(plan, &train.graph, live, node_stages, vec![("loss".into(), train.loss)])?;
    compiler.reduce(train)?;
    let mut programs = programs(&compiler);
    if plan.compression.compressor.shares_masks() {
        share_masks(&mut programs, train);
    }
    Ok(programs)
}

/// Compiles the Programs of a forward pass over an evaluation graph, one per peer of the plan. The Programs report
/// the named outputs.
pub fn compile_forward(
    plan: &Plan,
    forward: &Graph,
    eval: &Graph,
    reports: &[&str],
) -> Result<Vec<Program>, PlanError> {
    plan.validate(forward)?;
    let reports = reports
        .iter()
        .map(|name| match eval.outputs.get(*name) {
            Some(v) => Ok((name.to_string(), *v)),
            None => Err(PlanError::Plan(format!("the graph has no output {name:?}"))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    let live = eval.ancestors(reports.iter().map(|(_, v)| *v));
    let node_stages = NodeStages::of_evaluation(plan, forward, eval)?;
    Ok(programs(&Compiler::new(plan, eval, live, node_stages, reports)?))
}

/// See [`Program::masks`].
fn share_masks(programs: &mut [Program], train: &TrainGraph) {
    let mut shared = Vec::new();
    for program in programs.iter() {
        let coded = |(tensor, end): (Address, PeerId)| program.may_be_coded(tensor).then_some((tensor.value(), end));
        let received: BTreeSet<(ValueId, PeerId)> = program.receives().filter_map(coded).collect();
        let sent: BTreeSet<(ValueId, PeerId)> = program.sends().filter_map(coded).collect();
        let of = gradients(train, &received.iter().map(|(value, _)| *value).collect());
        for (gradient, to) in sent {
            let values = of.get(&bare(&train.graph, gradient)).into_iter().flatten();
            let values: BTreeSet<ValueId> = values.copied().filter(|v| received.contains(&(*v, to))).collect();
            if !values.is_empty() {
                shared.push((gradient, [program.peer, to], values));
            }
        }
    }
    for (gradient, [from, to], values) in shared {
        for (peer, other) in [(from, to), (to, from)] {
            let program = programs.iter_mut().find(|p| p.peer == peer);
            program.into_iter().for_each(|p| drop(p.masks.insert((gradient, other), values.clone())));
        }
    }
}

/// A gradient before it gets the shape or the type of its value. It is often sent so.
fn bare(graph: &Graph, mut gradient: ValueId) -> ValueId {
    while let Some(node) = graph.producer(gradient).map(|n| graph.node(n))
        && matches!(node.op, Op::Reshape(_) | Op::Cast(_))
    {
        gradient = node.inputs[0];
    }
    gradient
}

/// By bare gradient: the received values that it is a gradient of.
fn gradients(train: &TrainGraph, received: &BTreeSet<ValueId>) -> BTreeMap<ValueId, BTreeSet<ValueId>> {
    let graph = &train.graph;
    // If the value was reshaped, the received one is what it is a view of.
    let came = |mut v: ValueId| {
        while !received.contains(&v) {
            let node = graph.node(graph.producer(v)?);
            v = *node.inputs.first().filter(|_| matches!(node.op, Op::Reshape(_)))?;
        }
        Some(v)
    };
    let mut of: BTreeMap<ValueId, BTreeSet<ValueId>> = BTreeMap::new();
    for (gradient, values) in &train.gradient_of {
        of.entry(bare(graph, *gradient)).or_default().extend(values.iter().filter_map(|v| came(*v)));
    }
    of
}
