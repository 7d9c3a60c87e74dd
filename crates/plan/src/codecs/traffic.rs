//! The messages that codecs apply to.

use std::collections::BTreeMap;

use fusionllm_compress::{Codec, Element};
use fusionllm_graph::TensorType;
use fusionllm_program::{PeerId, Program, element, encoded_bytes};

use crate::cost::{Cluster, Line};
use crate::error::PlanError;

/// The messages of one step that may be compressed, by link.
#[derive(Debug, Clone, PartialEq)]
pub struct Traffic {
    /// By sender and receiver: the type of each message's tensor.
    pub links: BTreeMap<(PeerId, PeerId), Vec<TensorType>>,
}

impl Traffic {
    /// The traffic of all peers' programs.
    pub fn new(programs: &[Program]) -> Self {
        let mut links: BTreeMap<(PeerId, PeerId), Vec<TensorType>> = BTreeMap::new();
        for p in programs {
            for (tensor, to) in p.sends() {
                if p.may_be_coded(tensor)
                    && let Some(v) = p.values.get(&tensor.value())
                {
                    links.entry((p.peer, to)).or_default().push(v.ty.clone());
                }
            }
        }
        Self { links }
    }

    /// Whether a codec makes any tensor of the link from one peer to another smaller.
    pub(super) fn saves(&self, link: (PeerId, PeerId), codec: &Codec) -> bool {
        let types = self.links.get(&link).map_or(&[][..], |types| types);
        types.iter().any(|ty| encoded_bytes(codec, ty).is_some())
    }

    /// The next less lossy codec that makes any tensor of a link smaller: see [`Codec::less_lossy`].
    pub fn less_lossy(&self, link: (PeerId, PeerId), codec: Codec) -> Codec {
        let mut milder = codec.less_lossy();
        while milder != Codec::None && !self.saves(link, &milder) {
            milder = milder.less_lossy();
        }
        milder
    }

    /// The widest numbers of all messages.
    pub(super) fn widest(&self) -> Option<Element> {
        self.links.values().flatten().filter_map(|ty| element(ty.dtype)).max()
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
            let bytes: f64 = messages.iter().map(|ty| ty.bytes() as f64).sum();
            for (line, link) in route.lines() {
                *lines.entry(line).or_default() += bytes / link.bandwidth;
            }
            routes.push(route);
        }
        Ok(routes.iter().map(|route| route.lines().map(|(line, _)| lines[&line]).fold(0.0, f64::max)).collect())
    }
}
