use std::fmt;
use std::str::FromStr;

use fusionllm_graph::{Graph, TrainGraph};
use fusionllm_program::Optimizer;

use crate::codecs::Compression;
use crate::error::PlanError;
use crate::schedule::Schedule;

/// A way to cut a model into stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Scheduler {
    /// The same number of operators for every device, in the order listed.
    EqualNumber,
    /// The same number of floating-point operations for every device, in the order listed.
    EqualCompute,
    /// OP-Fence: communities of bandwidth, their order, and dynamic programming over cuts. See [`crate::search`].
    #[default]
    OpFence,
    /// The best plan, for a few devices. See [`crate::search::exact`].
    Exact,
}

impl Scheduler {
    /// Every scheduler.
    pub const ALL: [Self; 4] = [Self::EqualNumber, Self::EqualCompute, Self::OpFence, Self::Exact];

    /// The name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::EqualNumber => "equal-number",
            Self::EqualCompute => "equal-compute",
            Self::OpFence => "op-fence",
            Self::Exact => "exact",
        }
    }

    /// Whether the scheduler needs the devices and their links.
    pub fn needs_cluster(self) -> bool {
        matches!(self, Self::OpFence | Self::Exact)
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scheduler {
    type Err = PlanError;

    fn from_str(s: &str) -> Result<Self, PlanError> {
        Self::ALL.into_iter().find(|k| k.name() == s).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|k| k.name()).collect();
            PlanError::Plan(format!("there is no scheduler {s:?}; use one of {}", known.join(", ")))
        })
    }
}

/// A model at one micro-batch size. If the size is to be chosen, a scheduler gets one workload for each.
#[derive(Debug, Clone, Copy)]
pub struct Workload<'a> {
    /// The graph to plan.
    pub forward: &'a Graph,
    /// The graph with its backward operators.
    pub train: &'a TrainGraph,
    /// Micro-batches per step at this size.
    pub micro_batches: u32,
}

/// The choices that are open to a scheduler.
#[derive(Debug, Clone)]
pub struct PlanOptions {
    /// How the model is cut.
    pub scheduler: Scheduler,
    /// How parameters are updated. It decides how much memory a parameter needs.
    pub optimizer: Optimizer,
    /// The schedules to choose from, the preferred first. The baselines take the first.
    pub schedules: Vec<Schedule>,
    /// Most peers that may share a stage.
    pub replicas: u32,
    /// How links get codecs.
    pub compression: Compression,
}
