//! The messages that codecs apply to.

use std::collections::BTreeMap;

use fusionllm_compress::{Codec, Element};
use fusionllm_graph::TensorType;

use crate::cost::{Cluster, UplinkId};
use crate::error::PlanError;
use crate::program::{PeerId, Program, element, encoded_bytes};

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

    /// By link: seconds for which a step's messages keep the slowest part of the route busy, without compression. A
    /// shared uplink is busy with the messages of all links that use it.
    pub(super) fn seconds(&self, cluster: &Cluster) -> Result<Vec<f64>, PlanError> {
        let bytes = |messages: &[TensorType]| messages.iter().map(|ty| ty.bytes() as f64).sum::<f64>();
        let mut shared: BTreeMap<UplinkId, f64> = BTreeMap::new();
        for ((from, to), messages) in &self.links {
            for (id, _) in cluster.uplinks(*from, *to) {
                *shared.entry(id).or_default() += bytes(messages);
            }
        }
        let times = self.links.iter().map(|((from, to), messages)| {
            let Some(link) = cluster.link(*from, *to) else {
                let (from, to) = (cluster.name(*from), cluster.name(*to));
                return Err(PlanError::Cluster(format!("no link leads from {from} to {to}")));
            };
            let uplinks = cluster.uplinks(*from, *to).map(|(id, l)| shared[&id] / l.bandwidth);
            Ok(uplinks.fold(bytes(messages) / link.bandwidth, f64::max))
        });
        times.collect()
    }
}
