/// Why a plan cannot be made or carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The plan does not fit its graph.
    #[error("plan: {0}")]
    Plan(String),
    /// No plan fits the devices' memory.
    #[error("memory: {0}")]
    Memory(String),
    /// A plan file cannot be read.
    #[error("plan file: {0}")]
    File(String),
    /// Devices or links that make no cluster, or not one that can carry out the plan.
    #[error("cluster: {0}")]
    Cluster(String),
    /// A program breaks its own rules, so that a peer refuses to run it.
    #[error("program: {0}")]
    Program(String),
}
