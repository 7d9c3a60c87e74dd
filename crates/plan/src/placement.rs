use fusionllm_graph::{Graph, NodeId, Phase};

use crate::{Plan, PlanError};

/// The stage of every node of a graph derived from the planned one (with its backward operators, or in its evaluation form).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// By node.
    pub stage_of: Vec<u32>,
}

impl Placement {
    /// Places each node where its origin is. `derived` is a training graph, whose first nodes are `forward`'s, or an evaluation graph.
    ///
    /// Additions of gradients from several users belong to one of them, but may be waited for by an earlier stage than another's: they sit at the earliest stage
    /// among their user's and their operands', so that gradients never travel towards later stages.
    pub fn new(plan: &Plan, forward: &Graph, derived: &Graph) -> Result<Self, PlanError> {
        let planned = plan.stage_of(forward)?;
        let mut stage_of: Vec<u32> = Vec::with_capacity(derived.nodes.len());
        for id in derived.node_ids() {
            let node = derived.node(id);
            let home = match node.origin {
                Some(NodeId(o)) => planned.get(o as usize).copied(),
                None if node.phase == Phase::Forward => planned.get(id.index()).copied(),
                None => Some(plan.stages.len() as u32 - 1),
            };
            let Some(mut stage) = home else {
                return Err(PlanError::Plan(format!("{:?} stems from no planned node", node.name)));
            };
            if node.phase != Phase::Forward {
                for v in &node.inputs {
                    if let Some(p) = derived.producer(*v).filter(|p| derived.node(*p).phase != Phase::Forward) {
                        stage = stage.min(stage_of[p.index()]);
                    }
                }
            }
            stage_of.push(stage);
        }
        Ok(Self { stage_of })
    }
}
