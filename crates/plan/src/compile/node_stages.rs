use fusionllm_graph::{Graph, NodeId, TrainGraph};

use crate::error::PlanError;
use crate::plan::Plan;

/// The stage of every node of a graph that was derived from the planned one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStages {
    /// The stage, by node.
    pub stage_of: Vec<u32>,
}

impl NodeStages {
    /// Places the nodes of a training graph. Forward nodes stay as planned. A backward node goes with its forward
    /// node.
    ///
    /// A sum of several users' gradients may be needed by an earlier stage than its own user's stage. So it goes to the
    /// earliest stage among those of its user and its operands. Gradients then never travel to later stages.
    pub fn of_training(plan: &Plan, forward: &Graph, train: &TrainGraph) -> Result<Self, PlanError> {
        let mut stage_of = plan.stage_of(forward)?;
        let graph = &train.graph;
        if !graph.nodes.starts_with(&forward.nodes) {
            return Err(PlanError::Plan("the training graph is for another graph".into()));
        }
        for id in graph.node_ids().skip(forward.nodes.len()) {
            let home = stage_of_origin(&stage_of[..forward.nodes.len()], graph, id)?;
            let gradients = graph.node(id).inputs.iter().filter_map(|v| graph.producer(*v));
            let earliest = gradients.filter(|p| p.index() >= forward.nodes.len()).map(|p| stage_of[p.index()]).min();
            stage_of.push(earliest.map_or(home, |e| e.min(home)));
        }
        Ok(Self { stage_of })
    }

    /// Places the nodes of an evaluation graph, each with the forward node that it stands for.
    pub fn of_evaluation(plan: &Plan, forward: &Graph, eval: &Graph) -> Result<Self, PlanError> {
        let planned = plan.stage_of(forward)?;
        let stage_of = eval.node_ids().map(|id| stage_of_origin(&planned, eval, id)).collect::<Result<_, _>>()?;
        Ok(Self { stage_of })
    }
}

fn stage_of_origin(planned: &[u32], graph: &Graph, id: NodeId) -> Result<u32, PlanError> {
    let node = graph.node(id);
    let stage = node.origin.and_then(|o| planned.get(o.index()));
    stage.copied().ok_or_else(|| PlanError::Plan(format!("{:?} comes from no planned node", node.name)))
}
