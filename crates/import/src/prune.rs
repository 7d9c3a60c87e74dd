//! Removes unused nodes from a graph.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::{Graph, GraphError, Node, NodeId, StateUpdate, ValueId, ValueKind};

/// The graph without the nodes that no output and no buffer depends on. Inputs, parameters and buffers stay.
pub(crate) fn pruned(graph: &Graph) -> Result<Graph, GraphError> {
    let updates = graph.state_updates.iter().map(|u| u.value);
    let wanted: Vec<ValueId> = graph.outputs.values().copied().chain(updates).collect();
    let live = graph.ancestors(wanted.iter().copied());
    let mut read = vec![false; graph.values.len()];
    let nodes = graph.nodes.iter().zip(&live).filter(|(_, live)| **live).map(|(n, _)| n);
    for v in nodes.clone().flat_map(|n| &n.inputs).chain(&wanted) {
        read[v.index()] = true;
    }
    let mut node_ids = vec![NodeId(0); graph.nodes.len()];
    for (new, old) in (0..graph.nodes.len()).filter(|n| live[*n]).enumerate() {
        node_ids[old] = NodeId(new as u32);
    }
    let mut value_ids = vec![ValueId(0); graph.values.len()];
    let mut values = Vec::new();
    for (i, value) in graph.values.iter().enumerate() {
        let mut value = value.clone();
        let keep = match &mut value.kind {
            ValueKind::Result { node, .. } => {
                let keep = live[node.index()];
                *node = node_ids[node.index()];
                keep
            }
            ValueKind::Constant | ValueKind::RngKey => read[i],
            _ => true,
        };
        if keep {
            value_ids[i] = ValueId(values.len() as u32);
            values.push(value);
        }
    }
    let renumbered = |ids: &[ValueId]| ids.iter().map(|v| value_ids[v.index()]).collect();
    let nodes = nodes
        .map(|n| Node {
            inputs: renumbered(&n.inputs),
            outputs: renumbered(&n.outputs),
            origin: n.origin.map(|o| node_ids[o.index()]),
            ..n.clone()
        })
        .collect();
    let named: BTreeSet<&str> = values.iter().map(|v| v.name.as_str()).collect();
    let constants: BTreeMap<_, _> = graph
        .constants
        .iter()
        .filter(|(n, _)| named.contains(n.as_str()))
        .map(|(n, t)| (n.clone(), t.clone()))
        .collect();
    let pruned = Graph {
        name: graph.name.clone(),
        nodes,
        outputs: graph.outputs.iter().map(|(n, v)| (n.clone(), value_ids[v.index()])).collect(),
        state_updates: graph
            .state_updates
            .iter()
            .map(|u| StateUpdate { buffer: value_ids[u.buffer.index()], value: value_ids[u.value.index()] })
            .collect(),
        metadata: graph.metadata.clone(),
        constants,
        values,
    };
    pruned.validate()?;
    Ok(pruned)
}
