//! The plan file: a Plan with everything needed to simulate it.

use std::collections::BTreeMap;

use fusionllm_compress::Codec;
use fusionllm_graph::{Graph, NodeId, TrainGraph, autodiff};
use fusionllm_program::{Optimizer, Program};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::compile::compile;
use crate::cost::Cluster;
use crate::error::PlanError;
use crate::plan::Plan;
use crate::simulate::{SimulateOptions, Simulation, simulate};

/// A Plan, its cluster, and its graph without the contents of constants.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedPlan {
    /// The plan.
    pub plan: Plan,
    /// The cluster. Device `i` runs peer `i`.
    pub cluster: Cluster,
    /// The forward graph.
    pub graph: Graph,
    /// How parameters are updated.
    pub optimizer: Optimizer,
    /// How the plan was made.
    pub origin: Origin,
}

/// How much of a plan is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanDetail {
    /// The plan and its prediction.
    Summary,
    /// All that a plan file holds: also the cluster, the optimizer and the graph.
    Complete,
}

/// How a plan was made.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// The least step by the scheduler's cost formula, over all plans for this job and cluster, if computed. The
    /// simulated step may be below it: see [`crate::search::lower_bound`].
    pub lower_bound_step_s: Option<f64>,
    /// Seconds that planning took.
    pub solve_s: Option<f64>,
    /// Sentences of the scheduler, such as which devices it left out.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl SavedPlan {
    /// The plan's training Programs.
    ///
    /// # Errors
    ///
    /// The plan does not fit its graph.
    pub fn programs(&self) -> Result<Vec<Program>, PlanError> {
        let fail = |e: fusionllm_graph::GraphError| PlanError::Plan(e.to_string());
        let loss = self.graph.outputs.get("loss").copied();
        let loss = loss.ok_or_else(|| PlanError::Plan("the graph has no output named \"loss\"".into()))?;
        let train: TrainGraph = autodiff::differentiate(&self.graph, loss).map_err(fail)?;
        // The plan's digest covers the contents of constants, which the file leaves out.
        let plan = Plan { graph: self.graph.digest(), ..self.plan.clone() };
        compile(&plan, &self.graph, &train)
    }

    /// Simulates a step.
    ///
    /// # Errors
    ///
    /// The same as those of [`Self::programs`] and [`simulate`].
    pub fn simulate(&self, record: bool) -> Result<Simulation, PlanError> {
        simulate(&self.programs()?, &self.cluster, &SimulateOptions { optimizer: self.optimizer, record })
    }

    /// How much the predicted step exceeds the lower bound, as a share of the bound. It is 0 if the step is below the
    /// bound, which the cost formula allows: the simulator overlaps more work.
    pub fn gap(&self, simulation: &Simulation) -> Option<f64> {
        self.origin.lower_bound_step_s.map(|bound| (simulation.step_s / bound - 1.0).max(0.0))
    }

    /// The plan with its prediction, as `fusionllm plan --json` prints it.
    pub fn to_value(&self, simulation: &Simulation, detail: PlanDetail) -> Result<Value, PlanError> {
        let mut object = match value(&self.plan)? {
            Value::Object(object) => object,
            _ => Map::new(),
        };
        let mut operators = vec![0usize; self.plan.peers.len()];
        for stage in &self.plan.stages {
            for p in stage.replicas() {
                operators[p.0 as usize] += stage.nodes.len();
            }
        }
        let peers =
            self.cluster.devices().iter().zip(&simulation.peers).zip(operators).map(|((device, load), operators)| {
                json!({
                    "name": device.name, "backend": device.backend, "operators": operators,
                    "predicted_compute_s": load.compute_s, "predicted_wait_s": load.wait_s,
                    "predicted_memory_bytes": load.peak_bytes, "memory_bytes": device.memory,
                })
            });
        object.insert("peers".into(), peers.collect());
        let links = simulation.links.iter().map(|l| {
            // What codecs other than top-k save depends on the tensor.
            let (codec, ratio) = match self.plan.codec(l.from, l.to) {
                Codec::None => (Codec::None.name(), Some(1.0)),
                codec @ Codec::TopK(top) => (codec.name(), Some(top.ratio)),
                other => (other.name(), None),
            };
            json!({
                "from": self.cluster.name(l.from), "to": self.cluster.name(l.to), "codec": codec, "ratio": ratio,
                "predicted_bytes_per_step": l.bytes, "predicted_busy_s": l.busy_s,
                // Messages within one host have no limit.
                "predicted_bytes_per_s": self.cluster.link(l.from, l.to).map(|l| l.bandwidth).filter(|b| b.is_finite()),
            })
        });
        object.insert("links".into(), links.collect());
        let lines = simulation.lines.iter().map(|l| {
            json!({
                "line": self.cluster.line_name(l.line), "predicted_bytes_per_step": l.bytes,
                "predicted_busy_s": l.busy_s, "predicted_bytes_per_s": l.link.bandwidth,
            })
        });
        object.insert("lines".into(), lines.collect());
        let limit = simulation.limiting_line().map(|l| self.cluster.line_name(l.line));
        object.insert("limiting_line".into(), json!(limit));
        object.insert("predicted_step_s".into(), json!(simulation.step_s));
        object.insert("predicted_closed_form_s".into(), json!(simulation.closed_form_s));
        if let Value::Object(origin) = value(&self.origin)? {
            object.extend(origin);
        }
        object.insert("gap".into(), json!(self.gap(simulation)));
        if detail == PlanDetail::Complete {
            object.insert("cluster".into(), value(&self.cluster)?);
            object.insert("optimizer".into(), value(&self.optimizer)?);
            object.insert("model".into(), value(&self.graph)?);
        }
        Ok(Value::Object(object))
    }

    /// The plan file's text: one line for each part, and for each peer and link.
    pub fn to_json(&self, simulation: &Simulation) -> Result<String, PlanError> {
        let parts: BTreeMap<String, Value> =
            serde_json::from_value(self.to_value(simulation, PlanDetail::Complete)?).map_err(file)?;
        let line = |(name, part): (&String, &Value)| match part {
            Value::Array(items) if items.iter().any(Value::is_object) => {
                let items: Vec<String> = items.iter().map(|i| format!("  {i}")).collect();
                format!("{}: [\n{}\n]", json!(name), items.join(",\n"))
            }
            part => format!("{}: {part}", json!(name)),
        };
        Ok(format!("{{\n{}\n}}\n", parts.iter().map(line).collect::<Vec<_>>().join(",\n")))
    }

    /// Reads a plan file.
    ///
    /// # Errors
    ///
    /// It is not a plan file, has another version, holds a plan alone, or its parts do not match.
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        #[derive(Deserialize)]
        struct Rest {
            cluster: Option<Cluster>,
            optimizer: Option<Optimizer>,
            model: Option<Graph>,
            #[serde(flatten)]
            origin: Origin,
        }
        let plan = Plan::from_json(text)?;
        let rest: Rest = serde_json::from_str(text).map_err(file)?;
        let (Some(cluster), Some(optimizer), Some(graph)) = (rest.cluster, rest.optimizer, rest.model) else {
            return Err(PlanError::File("it holds a plan, but not the devices and the model it is for".into()));
        };
        graph.validate().map_err(|e| PlanError::File(e.to_string()))?;
        let names: Vec<&String> = cluster.devices().iter().map(|d| &d.name).collect();
        if !names.iter().copied().eq(&plan.peers) {
            return Err(PlanError::File("its devices are not its peers".into()));
        }
        let nodes = graph.nodes.len() as u32;
        let known = |n: &NodeId| n.0 < nodes;
        if !plan.stages.iter().flat_map(|s| &s.nodes).all(known) {
            return Err(PlanError::File("it places operators that its model does not have".into()));
        }
        Ok(Self { plan, cluster, graph, optimizer, origin: rest.origin })
    }
}

fn file(e: serde_json::Error) -> PlanError {
    PlanError::File(e.to_string())
}

fn value(part: &impl Serialize) -> Result<Value, PlanError> {
    serde_json::to_value(part).map_err(file)
}
