//! The reason why no plan fits the devices' memory.

use fusionllm_graph::Graph;
use fusionllm_graph::units::bytes;
use fusionllm_program::PeerId;

use super::atoms::ModelChain;
use crate::cost::Cluster;
use crate::error::PlanError;
use crate::schedule::Schedule;
use crate::search::{MAX_CUT_POSITIONS, Problem, StageRange, equal_memory};

/// Names what is missing where: for one operator, for the parameters, or for a plan shared out by memory.
pub(super) fn misfit(
    forward: &Graph,
    cluster: &Cluster,
    model: &ModelChain,
    problem: &Problem,
    schedule: Schedule,
) -> PlanError {
    let units = &problem.machines.units;
    let name = |u: usize| cluster.name(PeerId(units[u].members[0]));
    let largest = (0..units.len()).max_by(|a, b| units[*a].memory.total_cmp(&units[*b].memory)).unwrap_or(0);
    let atoms = problem.chain.atoms;
    let (need, at) = (0..atoms)
        .map(|a| (problem.memory(largest, a, a + 1, 1), a))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .unwrap_or((0.0, 0));
    let have = units[largest].memory;
    if need > have {
        let node = model.atom_of.iter().rposition(|a| *a as usize == at).unwrap_or(0);
        return PlanError::Memory(format!(
            "operator {:?} alone needs {} with its parameters and activations, but the largest device, {}, has {}; use a smaller micro-batch, or a device with more memory",
            forward.nodes[node].name,
            bytes(need as u64),
            name(largest),
            bytes(have as u64)
        ));
    }
    let total: f64 = units.iter().map(|u| u.memory).sum();
    let state = problem.state_bytes();
    if state > total {
        return PlanError::Memory(format!(
            "parameters, gradients and optimizer state take {}, but {} {}: {} are missing; add devices, or use a smaller model",
            bytes(state as u64),
            match units.len() {
                1 => format!("{} has", name(0)),
                count => format!("all {count} devices together have"),
            },
            bytes(total as u64),
            bytes((state - total) as u64)
        ));
    }
    // A plan shared out by memory shows where memory is missing.
    let coarse = problem.with_cuts(&problem.cuts(MAX_CUT_POSITIONS));
    let plan = equal_memory(&coarse);
    let missing: Vec<String> = (0..plan.len())
        .filter_map(|s| {
            let StageRange { unit, lo, hi } = plan[s];
            let in_flight = coarse.in_flight(schedule, plan.len() - s);
            let needed = coarse.memory(unit as usize, lo as usize, hi as usize, in_flight);
            let missing = needed - units[unit as usize].memory;
            (missing > 0.0).then(|| format!("{} on {}", bytes(missing as u64), name(unit as usize)))
        })
        .collect();
    let missing = if missing.is_empty() { "memory on some device".into() } else { missing.join(", ") };
    PlanError::Memory(format!(
        "no cut fits the devices' memory: the cut in proportion to memory lacks {missing}; use smaller micro-batches, or add devices"
    ))
}
