//! Reverse-mode differentiation as a transformation of the graph, as in JAX.
//!
//! The result is the same graph with backward nodes after the forward nodes. A backward node is a plain node: it is
//! placed, costed and scheduled like any other.

use std::collections::BTreeMap;

use crate::ops::{Binary, Cast};
use crate::rules::Backward;
use crate::{Builder, Graph, GraphError, Op, ParameterGradient, Phase, TensorType, TrainGraph, ValueId, ValueKind};

/// Adds to `graph` the operators that compute the gradient of `loss_weight · loss` with respect to every parameter.
///
/// Forward nodes and values keep their ids. The gradients of a value that several nodes read are added in a chain of
/// nodes, from the last reader to the first. So the graph fixes the order of additions, wherever its parts run.
/// Gradients of 16 bits are added in f32.
pub fn differentiate(graph: &Graph, loss: ValueId) -> Result<TrainGraph, GraphError> {
    let ty = graph.ty(loss).clone();
    if !ty.dtype.is_float() || ty.numel() != 1 {
        return Err(GraphError::Structure {
            graph: graph.name.clone(),
            reason: format!("the loss {:?} must be a single float, but is {ty}", graph.value(loss).name),
        });
    }
    let forward = graph.nodes.len();
    let wants = depends_on_parameters(graph);
    let live = graph.ancestors([loss]);
    let mut b = Builder::extend(graph.clone());
    let loss_weight = b.input("loss_weight", ty.dtype, [])?;
    // The terms of each value's gradient, from its last reader to its first.
    let mut grads: Vec<Vec<ValueId>> = vec![Vec::new(); graph.values.len()];
    let mut gradient_of: BTreeMap<ValueId, Vec<ValueId>> = BTreeMap::new();
    grads[loss.index()].push(loss_weight);

    for id in graph.node_ids().rev().filter(|n| live[n.index()]) {
        let node = graph.node(id);
        let wanted: Vec<bool> = node.inputs.iter().map(|v| wants[v.index()]).collect();
        if !wanted.contains(&true) || node.outputs.iter().all(|v| grads[v.index()].is_empty()) {
            continue;
        }
        let mut incoming = Vec::with_capacity(node.outputs.len());
        for v in &node.outputs {
            b.tag(Phase::InputGrad, Some(id));
            incoming.push(accumulate(&mut b, &grads[v.index()], graph.ty(*v), |sum| {
                gradient_of.entry(sum).or_default().push(*v);
            })?);
        }
        b.tag(Phase::InputGrad, Some(id));
        let outgoing = b.scope(format!("{}.grad", node.name), |b| {
            let inputs = node.inputs.iter().map(|v| cast_again(b, *v)).collect::<Result<Vec<_>, _>>()?;
            node.op.backward(&mut Backward {
                b,
                inputs: &inputs,
                outputs: &node.outputs,
                grads: &incoming,
                wanted: &wanted,
                op: node.op.name(),
                node_name: &node.name,
                node: id,
            })
        })?;
        for ((v, grad), wanted) in node.inputs.iter().zip(outgoing).zip(wanted) {
            if let Some(grad) = grad.filter(|_| wanted) {
                grads[v.index()].push(grad);
                gradient_of.entry(grad).or_default().push(*v);
            }
        }
    }

    let gradients: Vec<ParameterGradient> = graph
        .parameters()
        .filter(|p| !grads[p.index()].is_empty())
        .map(|p| ParameterGradient { parameter: p, contributions: grads[p.index()].clone() })
        .collect();
    let mut graph = b.finish()?;
    tag_weight_gradients(&mut graph, forward, &wants);
    Ok(TrainGraph { graph, loss, loss_weight, gradients, gradient_of })
}

/// By value, whether it is a parameter or a float computed from one.
fn depends_on_parameters(graph: &Graph) -> Vec<bool> {
    let mut depends: Vec<bool> = graph.values.iter().map(|v| matches!(v.kind, ValueKind::Parameter(_))).collect();
    for node in &graph.nodes {
        if node.inputs.iter().any(|v| depends[v.index()]) {
            for v in &node.outputs {
                depends[v.index()] = graph.ty(*v).dtype.is_float();
            }
        }
    }
    depends
}

/// A forward value as backward reads it. A cast of a tensor that stays is made again, because the tensor is there
/// anyway. The cast itself would be kept for every micro-batch in flight.
fn cast_again(b: &mut Builder, v: ValueId) -> Result<ValueId, GraphError> {
    let Some(node) = b.graph().producer(v).map(|n| b.graph().node(n)) else { return Ok(v) };
    let stays = |v: &ValueId| match b.graph().value(*v).kind {
        ValueKind::Parameter(_) | ValueKind::Frozen(_) | ValueKind::Buffer(_) | ValueKind::Constant => true,
        ValueKind::Input | ValueKind::RngKey | ValueKind::Result { .. } => false,
    };
    match node.op {
        Op::Cast(cast) if node.inputs.iter().all(stays) => {
            let inputs = node.inputs.clone();
            b.op(cast, &inputs)
        }
        _ => Ok(v),
    }
}

/// Adds up the terms of a gradient in a chain. Each addition has the origin of the node that its second term comes
/// from. `on_sum` is called with each partial sum.
fn accumulate(
    b: &mut Builder,
    terms: &[ValueId],
    ty: &TensorType,
    mut on_sum: impl FnMut(ValueId),
) -> Result<Option<ValueId>, GraphError> {
    let Some((&first, rest)) = terms.split_first() else {
        return Ok(None);
    };
    let summed = ty.dtype.accumulator();
    let widens = summed != ty.dtype && !rest.is_empty();
    let mut sum = first;
    for (i, &c) in terms.iter().enumerate() {
        // The loss weight has no producer. Its addition keeps the tag of the node that uses the sum.
        if let Some(user) = b.graph().producer(c).filter(|_| i > 0 || widens) {
            b.tag(Phase::InputGrad, b.graph().node(user).origin);
        }
        let term = if widens { b.op(Cast { dtype: summed }, &[c])? } else { c };
        if i == 0 {
            sum = term;
        } else {
            sum = b.op(Binary::Add, &[sum, term])?;
            on_sum(sum);
        }
    }
    if widens {
        sum = b.op(Cast { dtype: ty.dtype }, &[sum])?;
        on_sum(sum);
    }
    // The loss weight is a scalar, but the loss may have shape [1].
    b.reshape(sum, ty.shape.clone()).map(Some)
}

/// Tags the backward nodes whose results only weight gradients need.
///
/// Each reader of such a node is a weight-gradient node of the same forward node, or belongs to a forward node that
/// depends on nothing but parameters and constants, such as a view of a weight.
fn tag_weight_gradients(graph: &mut Graph, forward: usize, wants: &[bool]) {
    // Forward nodes that read no activation.
    let mut weight_only = vec![true; forward];
    for n in 0..forward {
        weight_only[n] = graph.nodes[n].inputs.iter().all(|v| match graph.value(*v).kind {
            ValueKind::Input | ValueKind::RngKey => false,
            ValueKind::Result { node, .. } => weight_only[node.index()],
            _ => true,
        }) && graph.nodes[n].outputs.iter().any(|v| wants[v.index()]);
    }
    let consumers = graph.consumers();
    for n in (forward..graph.nodes.len()).rev() {
        let node = &graph.nodes[n];
        let weight = node.outputs.iter().flat_map(|v| &consumers[v.index()]).all(|user| {
            let user = graph.node(*user);
            let of_weights = user.origin.is_some_and(|o| weight_only[o.index()]);
            of_weights || (user.origin == node.origin && user.phase == Phase::WeightGrad)
        });
        if weight {
            graph.nodes[n].phase = Phase::WeightGrad;
        }
    }
}
