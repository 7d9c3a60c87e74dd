//! The messages that codecs apply to.

use std::collections::BTreeMap;

use fusionllm_graph::TensorType;

use crate::cost::{Cluster, Line};
use crate::error::PlanError;
use crate::program::{Address, PeerId, Program, takes_codec};

/// Whether a codec may apply to a message. True for activations and their gradients; false for inputs, parameters,
/// their gradients and integers.
pub(crate) fn codable(tensor: Address, other_end: PeerId, ty: &TensorType, varies: bool) -> bool {
    matches!(tensor, Address::Value { .. }) && other_end != PeerId::BROKER && takes_codec(ty.dtype) && varies
}

/// The messages of one step that may be compressed, by link.
#[derive(Debug, Clone, PartialEq)]
pub struct Traffic {
    /// By sender and receiver: the bytes of each message without a codec.
    pub links: BTreeMap<(PeerId, PeerId), Vec<usize>>,
}

impl Traffic {
    /// The traffic of all peers' programs.
    pub fn new(programs: &[Program]) -> Self {
        let mut links: BTreeMap<(PeerId, PeerId), Vec<usize>> = BTreeMap::new();
        for p in programs {
            for (tensor, to) in p.sends() {
                if p.coded.contains(&tensor.value())
                    && let Some(v) = p.values.get(&tensor.value())
                {
                    links.entry((p.peer, to)).or_default().push(v.ty.bytes());
                }
            }
        }
        Self { links }
    }

    /// By link: seconds for which a step's messages keep the busiest line of the route busy, without compression. A
    /// line is busy with the messages of all pairs of peers that share it.
    pub(super) fn seconds(&self, cluster: &Cluster) -> Result<Vec<f64>, PlanError> {
        let mut lines: BTreeMap<Line, f64> = BTreeMap::new();
        let mut routes = Vec::with_capacity(self.links.len());
        for ((from, to), messages) in &self.links {
            let Some(route) = cluster.route(*from, *to) else {
                let (from, to) = (cluster.name(*from), cluster.name(*to));
                return Err(PlanError::Cluster(format!("no link leads from {from} to {to}")));
            };
            let bytes: f64 = messages.iter().map(|n| *n as f64).sum();
            for (line, link) in route.lines() {
                *lines.entry(line).or_default() += bytes / link.bandwidth;
            }
            routes.push(route);
        }
        Ok(routes.iter().map(|route| route.lines().map(|(line, _)| lines[&line]).fold(0.0, f64::max)).collect())
    }
}
