//! Facts about a graph's nodes that several modules need.

use fusionllm_graph::{Graph, ValueKind};
use fusionllm_program::shares_storage;

/// The most cheap nodes in a row. The compiler follows such a row once for each of its readers, and recursively. So a
/// longer row would cost time, memory and stack that grow faster than the graph.
const MAX_CHEAP_ROW: u8 = 64;

/// By node: whether a peer computes it again where it is needed, so that it is never sent. True for nodes that depend
/// on constants alone, and for reshapes, permutations and expansions, up to [`MAX_CHEAP_ROW`] in a row.
pub(crate) fn cheap(graph: &Graph) -> Vec<bool> {
    let mut constant = vec![false; graph.nodes.len()];
    let mut cheap = vec![false; graph.nodes.len()];
    // By cheap node: the length of the longest row of cheap nodes that ends with it.
    let mut row = vec![0u8; graph.nodes.len()];
    for (n, node) in graph.nodes.iter().enumerate() {
        constant[n] = node.inputs.iter().all(|v| match graph.producer(*v) {
            Some(p) => constant[p.index()],
            None => graph.value(*v).kind == ValueKind::Constant,
        });
        // A view of a parameter is sent: its reader keeps no copy of the parameter.
        let of_state = node.inputs.iter().any(|v| graph.value(*v).kind.init().is_some());
        let before = node.inputs.iter().filter_map(|v| graph.producer(*v)).map(|p| row[p.index()]).max().unwrap_or(0);
        cheap[n] = (constant[n] || (shares_storage(&node.op) && !of_state)) && before < MAX_CHEAP_ROW;
        row[n] = if cheap[n] { before + 1 } else { 0 };
    }
    cheap
}
