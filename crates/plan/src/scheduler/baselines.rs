//! Cuts that ignore devices and links: the baselines that plans are compared with.

use std::collections::BTreeSet;

use fusionllm_graph::Graph;

use crate::error::PlanError;
use crate::plan::Plan;
use crate::schedule::Schedule;

/// Cuts a graph into one stage per peer, in the given order. Each stage has the same share of the floating-point
/// operations, as nearly as node boundaries allow. Peers for which nothing is left have no stage.
pub fn equal_compute(
    graph: &Graph,
    peers: &[String],
    micro_batches: u32,
    schedule: Schedule,
) -> Result<Plan, PlanError> {
    let weights: Vec<f64> = graph
        .nodes
        .iter()
        .map(|n| {
            let cost = n.op.cost(&graph.types(&n.inputs), &graph.types(&n.outputs));
            // Memory-bound operators take time too: a byte takes about as long as ten operations on today's
            // processors.
            cost.flops + 10.0 * cost.bytes
        })
        .collect();
    equal_shares(graph, &weights, peers, micro_batches, schedule, "equal-compute")
}

/// Cuts a graph into one stage per peer, in the given order. Each stage has the same number of operators, as nearly
/// as possible. Peers for which nothing is left have no stage.
pub fn equal_number(
    graph: &Graph,
    peers: &[String],
    micro_batches: u32,
    schedule: Schedule,
) -> Result<Plan, PlanError> {
    equal_shares(graph, &vec![1.0; graph.nodes.len()], peers, micro_batches, schedule, "equal-number")
}

fn equal_shares(
    graph: &Graph,
    weights: &[f64],
    peers: &[String],
    micro_batches: u32,
    schedule: Schedule,
    scheduler: &str,
) -> Result<Plan, PlanError> {
    if peers.is_empty() {
        return Err(PlanError::Plan("there are no peers".into()));
    }
    let total: f64 = weights.iter().sum();
    let share = total / peers.len() as f64;
    let mut before = 0.0;
    let mut stage_of: Vec<u32> = weights
        .iter()
        .map(|w| {
            let middle = before + w / 2.0;
            before += w;
            if share > 0.0 { ((middle / share) as u32).min(peers.len() as u32 - 1) } else { 0 }
        })
        .collect();
    for (first, last) in together(graph) {
        let stage = stage_of[first];
        stage_of[first..=last].fill(stage);
    }
    // A peer whose share no operator falls into has no stage.
    let peer_of_stage: Vec<u32> = stage_of.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
    let place = |peer: &u32| peer_of_stage.partition_point(|p| p < peer) as u32;
    let stage_of: Vec<u32> = stage_of.iter().map(place).collect();
    Ok(Plan::from_stages(graph, &stage_of, &peer_of_stage, peers.to_vec(), micro_batches, schedule, scheduler))
}

/// First and last nodes of ranges that must not be cut, ascending. All nodes that read or compute a buffer's content
/// stay in one stage. The nodes between them stay too, so that edges still lead forward.
fn together(graph: &Graph) -> Vec<(usize, usize)> {
    let readers = graph.consumers();
    let mut together: Vec<(usize, usize)> = graph
        .state_updates
        .iter()
        .filter_map(|u| {
            let touching = || readers[u.buffer.index()].iter().copied().chain(graph.producer(u.value));
            Some((touching().min()?.index(), touching().max()?.index()))
        })
        .collect();
    together.sort_unstable();
    together
}
