//! What training needs to know about the loss of an imported model.

use fusionllm_graph::ops::Compare;
use fusionllm_graph::{Builder, Graph, GraphError, Op, ValueKind};

/// If the loss is a single cross-entropy, adds the output `correct`: the number of targets with the largest logit.
pub(crate) fn add_correct_output(b: &mut Builder) -> Result<(), GraphError> {
    let mut losses = b.graph().nodes.iter().filter(|n| matches!(n.op, Op::CrossEntropy(_)));
    let (Some(node), None) = (losses.next(), losses.next()) else { return Ok(()) };
    let (logits, target) = (node.inputs[0], node.inputs[1]);
    if !b.graph().outputs.contains_key("loss") {
        return Ok(());
    }
    let dtype = b.ty(logits).dtype;
    let best = b.argmax(logits, 1)?;
    let hit = b.op(Compare::Eq, &[best, target])?;
    let hit = b.cast(hit, dtype)?;
    let correct = b.sum(hit, &[0], false)?;
    b.output("correct", correct)
}

/// The input with the targets of the only cross-entropy, and its `ignore_index`.
pub(crate) fn targets(graph: &Graph) -> Option<(String, i64)> {
    let mut losses = graph.nodes.iter().filter_map(|n| match &n.op {
        Op::CrossEntropy(op) => Some((n, op.ignore_index)),
        _ => None,
    });
    let (Some((node, ignore_index)), None) = (losses.next(), losses.next()) else { return None };
    let mut value = node.inputs[1];
    loop {
        match &graph.value(value).kind {
            ValueKind::Input => return Some((graph.value(value).name.clone(), ignore_index)),
            ValueKind::Result { node, .. } => match &graph.node(*node).op {
                Op::Reshape(_) | Op::Permute(_) => value = graph.node(*node).inputs[0],
                _ => return None,
            },
            _ => return None,
        }
    }
}
