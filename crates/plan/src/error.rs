use std::borrow::Cow;

use fusionllm_graph::Advice;
use fusionllm_program::ProgramError;

/// The reason why a plan cannot be made or carried out.
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
    /// The devices or links form no valid cluster, or the cluster cannot carry out the plan.
    #[error("cluster: {0}")]
    Cluster(String),
    /// A program breaks its own rules. A peer refuses to run it.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A rule of compression needs the rates of the links, and nothing is known of them.
    #[error("the compression {compression} chooses codecs by each link's rate, but no link is known")]
    UnknownLinks {
        /// The rule's name.
        compression: &'static str,
    },
    /// A scheduler needs the devices and links, and nothing is known of them.
    #[error("the scheduler {scheduler} needs the devices and their links, but none are known")]
    UnknownDevices {
        /// The scheduler's name.
        scheduler: &'static str,
    },
}

impl Advice for PlanError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::UnknownLinks { .. } => {
                Some("describe the links in a file for --testbed, or use one codec for all links, such as int8".into())
            }
            Self::UnknownDevices { .. } => Some("describe them in a file for --testbed, or use equal-compute".into()),
            _ => None,
        }
    }
}
