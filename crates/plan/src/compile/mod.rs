//! From Plans to Programs: what each peer runs, keeps, sends and receives, and in which order.

mod assemble;
mod compiler;
mod emit;
mod node_stages;
mod tasks;
mod uses;

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::{Graph, Op, TrainGraph, ValueId};

use assemble::programs;
use compiler::Compiler;
pub use node_stages::NodeStages;

use crate::error::PlanError;
use crate::plan::Plan;
use crate::program::{Address, PeerId, Program};

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
    if plan.compression.shared_masks {
        programs.iter_mut().for_each(|p| p.masks = masks(p, train));
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
fn masks(program: &Program, train: &TrainGraph) -> BTreeMap<ValueId, BTreeSet<ValueId>> {
    let coded = |(tensor, _): (Address, PeerId)| program.may_be_coded(tensor).then_some(tensor.value());
    let received: BTreeSet<ValueId> = program.receives().filter_map(coded).collect();
    let sent: BTreeSet<ValueId> = program.sends().filter_map(coded).collect();
    let graph = &train.graph;
    // If the value was reshaped, the received one is what it is a view of.
    let came = |mut v: ValueId| {
        while !received.contains(&v) {
            let node = graph.node(graph.producer(v)?);
            v = *node.inputs.first().filter(|_| matches!(node.op, Op::Reshape(_)))?;
        }
        Some(v)
    };
    // A gradient is often sent before it gets the shape or the type of its value.
    let bare = |mut g: ValueId| {
        while let Some(node) = graph.producer(g).map(|n| graph.node(n))
            && matches!(node.op, Op::Reshape(_) | Op::Cast(_))
        {
            g = node.inputs[0];
        }
        g
    };
    let mut of: BTreeMap<ValueId, BTreeSet<ValueId>> = BTreeMap::new();
    for (gradient, values) in &train.gradient_of {
        of.entry(bare(*gradient)).or_default().extend(values.iter().filter_map(|v| came(*v)));
    }
    let masked = |g: ValueId| Some((g, of.get(&bare(g)).filter(|of| !of.is_empty())?.clone()));
    sent.into_iter().filter_map(masked).collect()
}
