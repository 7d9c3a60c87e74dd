//! The facts about an imported model's loss that training needs.

use fusionllm_graph::ops::{Compare, CrossEntropy, Logical, View};
use fusionllm_graph::{Builder, Graph, GraphError, Node, Op, ValueKind};

/// The output with the number of targets that have the largest logit.
pub(crate) const CORRECT: &str = "correct";

/// If the loss is a single cross-entropy whose targets are known, adds the output `correct`: the number of targets with
/// the largest logit. Without known [`targets`], nobody could say how many targets that number is out of.
pub(crate) fn add_correct_output(b: &mut Builder) -> Result<(), GraphError> {
    let Some((_, ignored)) = targets(b.graph()) else { return Ok(()) };
    let Some(node) = only_cross_entropy(b.graph()) else { return Ok(()) };
    let (logits, target) = (node.inputs[0], node.inputs[1]);
    let dtype = b.ty(logits).dtype;
    let best = b.argmax(logits, 1)?;
    let mut hit = b.op(Compare::Eq, &[best, target])?;
    if ignored >= 0 {
        // The label that does not count is a class, too.
        let counts = b.compare_scalar(Compare::Ne, target, ignored as f64)?;
        hit = b.op(Logical::And, &[hit, counts])?;
    }
    let hit = b.cast(hit, dtype)?;
    let correct = b.sum(hit, &[0], false)?;
    b.output(CORRECT, correct)
}

/// The only cross-entropy that the loss depends on. Other outputs may have others.
fn only_cross_entropy(graph: &Graph) -> Option<&Node> {
    let live = graph.ancestors([*graph.outputs.get("loss")?]);
    let nodes = graph.nodes.iter().zip(live).filter(|(_, live)| *live).map(|(node, _)| node);
    let mut losses = nodes.filter(|n| matches!(n.op, Op::CrossEntropy(_)));
    losses.next().filter(|_| losses.next().is_none())
}

/// The input with the targets of the only cross-entropy, and its `ignore_index`. They are unknown if the loss reads a
/// part of the input. A language model that shifts its labels by itself does that.
pub(crate) fn targets(graph: &Graph) -> Option<(String, i64)> {
    let node = only_cross_entropy(graph)?;
    let Op::CrossEntropy(CrossEntropy { ignore_index, .. }) = node.op else { return None };
    let mut value = node.inputs[1];
    loop {
        match &graph.value(value).kind {
            ValueKind::Input => return Some((graph.value(value).name.clone(), ignore_index)),
            ValueKind::Result { node, .. } if graph.node(*node).op.view() == Some(View::Whole) => {
                value = graph.node(*node).inputs[0];
            }
            _ => return None,
        }
    }
}
