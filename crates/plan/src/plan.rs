use std::collections::{BTreeMap, BTreeSet};

use foldhash::{HashSet, HashSetExt};
use fusionllm_compress::Codec;
use fusionllm_graph::{Graph, NodeId};
use fusionllm_program::PeerId;
use serde::{Deserialize, Serialize};

use crate::codecs::{Compression, LinkCodec};
use crate::error::PlanError;
use crate::offload::PeerOffload;
use crate::schedule::Schedule;

/// Version of the plan file.
pub const FORMAT_VERSION: u32 = 2;

/// A stage: some of a graph's forward nodes, and the peers that run them. Their backward operators belong to the same
/// stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// The peers that take turns, by index. They are replicas of each other: micro-batch `m` runs on peer `m %
    /// peers.len()` of this list. A peer may take several turns.
    ///
    /// A gradient is summed over the micro-batches of each turn. The sums are then added in the order of turns. So
    /// the number of turns decides the last digits of a gradient, but the peers do not. One peer that takes all turns
    /// gets the same bits as several replicas, but needs memory for a sum per turn.
    pub peers: Vec<u32>,
    /// The nodes, ascending.
    pub nodes: Vec<NodeId>,
}

impl Stage {
    /// The peer that runs a micro-batch. A stage without peers, which no [valid](Plan::validate) plan has, returns
    /// the broker.
    pub fn peer(&self, micro_batch: u32) -> PeerId {
        let turn = (micro_batch as usize).checked_rem(self.peers.len());
        turn.map_or(PeerId::BROKER, |t| PeerId(self.peers[t]))
    }

    /// The peers, each once, in the plan's order.
    pub fn replicas(&self) -> Vec<PeerId> {
        let mut seen = HashSet::new();
        self.peers.iter().map(|p| PeerId(*p)).filter(|p| seen.insert(*p)).collect()
    }
}

/// The assignment of operators to peers, with the schedule and the codecs. A forward edge leads to the same stage or a
/// later one. A peer may hold several stages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`FORMAT_VERSION`].
    pub fusionllm_plan: u32,
    /// The number of this plan in its run, from 1. Each change of codecs makes a new plan.
    #[serde(default = "first")]
    pub version: u32,
    /// [`Graph::digest`] of the forward graph that the plan is for.
    pub graph: String,
    /// Names of the peers. In a file, each may be an object with more about the peer.
    #[serde(deserialize_with = "names")]
    pub peers: Vec<String>,
    /// Stages in pipeline order.
    pub stages: Vec<Stage>,
    /// Micro-batches per step.
    pub micro_batches: u32,
    /// The order of forward and backward passes.
    pub schedule: Schedule,
    /// The scheduler that made the plan.
    pub scheduler: String,
    /// How the codecs were chosen.
    #[serde(default)]
    pub compression: Compression,
    /// The codecs of directed links, sorted by sender and receiver. A link without one sends tensors exactly.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub codecs: Vec<LinkCodec>,
    /// The tensors that peers offload or recompute, sorted by peer. Peers without an entry keep everything in memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub offload: Vec<PeerOffload>,
}

impl Plan {
    /// Checks that the plan can be carried out for `graph`.
    pub fn validate(&self, graph: &Graph) -> Result<(), PlanError> {
        let fail = |m: String| Err(PlanError::Plan(m));
        let digest = graph.digest();
        if self.graph != digest {
            return fail(format!(
                "it is for another model or micro-batch size (its graph is {}, this graph is {digest}); make a new plan",
                self.graph
            ));
        }
        if self.micro_batches == 0 || self.stages.is_empty() {
            return fail("it needs at least one stage and one micro-batch".into());
        }
        let mut names = HashSet::new();
        for (i, name) in self.peers.iter().enumerate() {
            let odd = |c: char| c.is_control() || c == '/' || c == '\\';
            if name.is_empty() || name.len() > 64 || name.contains(odd) || !names.insert(name) {
                return fail(format!(
                    "the name {name:?} of peer {i} is not valid; names are unique, have at most 64 bytes and no slashes"
                ));
            }
        }
        self.check_codecs()?;
        self.check_offload(graph)?;
        let stage_of = self.stage_of(graph)?;
        for id in graph.node_ids() {
            for v in &graph.node(id).inputs {
                if let Some(p) = graph.producer(*v)
                    && stage_of[p.index()] > stage_of[id.index()]
                {
                    return fail(format!(
                        "{:?} (stage {}) needs {:?} of the later stage {}",
                        graph.node(id).name,
                        stage_of[id.index()],
                        graph.value(*v).name,
                        stage_of[p.index()]
                    ));
                }
            }
        }
        Ok(())
    }

    /// The peers that hold a stage. A run does without the others.
    pub fn used(&self) -> BTreeSet<PeerId> {
        self.stages.iter().flat_map(|s| s.peers.iter().map(|p| PeerId(*p))).collect()
    }

    /// The same plan without idle peers. The remaining peers are renumbered.
    pub fn without_idle(mut self) -> Self {
        let used = self.used();
        let names: Option<Vec<String>> = used.iter().map(|p| self.peers.get(p.0 as usize).cloned()).collect();
        // `validate` reports a stage whose peer does not exist.
        let Some(names) = names else { return self };
        let number: BTreeMap<PeerId, u32> = used.iter().copied().zip(0..).collect();
        for p in self.stages.iter_mut().flat_map(|s| &mut s.peers) {
            *p = number[&PeerId(*p)];
        }
        self.codecs.retain(|l| used.contains(&l.from) && used.contains(&l.to));
        for l in &mut self.codecs {
            (l.from, l.to) = (PeerId(number[&l.from]), PeerId(number[&l.to]));
        }
        self.offload.retain(|o| used.contains(&o.peer));
        for o in &mut self.offload {
            o.peer = PeerId(number[&o.peer]);
        }
        self.peers = names;
        self
    }

    /// Links have at most one codec each, are sorted, and have valid ratios.
    fn check_codecs(&self) -> Result<(), PlanError> {
        let fail = |l: &LinkCodec, m: &str| Err(PlanError::Plan(format!("the codec from {} to {} {m}", l.from, l.to)));
        let peers = self.peers.len() as u32;
        for (i, l) in self.codecs.iter().enumerate() {
            if l.from.0 >= peers || l.to.0 >= peers || l.from == l.to {
                return fail(l, "is not for a link of this plan");
            }
            if i > 0 && (self.codecs[i - 1].from, self.codecs[i - 1].to) >= (l.from, l.to) {
                return fail(l, "is out of order, or repeated");
            }
            if matches!(l.codec, Codec::TopK(top) if !(top.ratio >= 1.0 && top.ratio.is_finite())) {
                return fail(l, "has a ratio below 1");
            }
        }
        Ok(())
    }

    /// Each peer has at most one entry, and all names are the graph's.
    fn check_offload(&self, graph: &Graph) -> Result<(), PlanError> {
        let fail = |m: String| Err(PlanError::Plan(m));
        let peers = self.peers.len() as u32;
        if !self.offload.iter().all(|o| o.peer.0 < peers) || !self.offload.is_sorted_by(|a, b| a.peer < b.peer) {
            return fail("what peers offload is not sorted by peer, or names a peer that does not exist".into());
        }
        let known: HashSet<&String> = graph.values.iter().map(|v| &v.name).collect();
        match self.offload.iter().flat_map(PeerOffload::names).find(|name| !known.contains(name)) {
            Some(name) => fail(format!("it offloads {name:?}, which the graph does not have")),
            None => Ok(()),
        }
    }

    /// The codec of a link.
    pub fn codec(&self, from: PeerId, to: PeerId) -> Codec {
        let at = self.codecs.iter().find(|l| (l.from, l.to) == (from, to));
        at.map_or(Codec::None, |l| l.codec)
    }

    /// The stage of every forward node.
    pub fn stage_of(&self, graph: &Graph) -> Result<Vec<u32>, PlanError> {
        let mut stage_of = vec![None; graph.nodes.len()];
        for (s, stage) in self.stages.iter().enumerate() {
            let fail = |m: String| Err(PlanError::Plan(format!("stage {s} {m}")));
            if let Some(p) = stage.peers.iter().find(|p| **p as usize >= self.peers.len()) {
                return fail(format!("names peer {p}, but there are {} peers", self.peers.len()));
            }
            match stage.peers.len() {
                0 => return fail("has no peer".into()),
                n if n > self.micro_batches as usize => {
                    return fail(format!(
                        "has {} micro-batches for {n} turns; use more micro-batches",
                        self.micro_batches
                    ));
                }
                _ => {}
            }
            for n in &stage.nodes {
                match stage_of.get_mut(n.index()) {
                    Some(slot @ None) => *slot = Some(s as u32),
                    Some(Some(_)) => return Err(PlanError::Plan(format!("node {n} is in two stages"))),
                    None => return Err(PlanError::Plan(format!("stage {s} names node {n}, which does not exist"))),
                }
            }
        }
        stage_of
            .into_iter()
            .enumerate()
            .map(|(n, s)| s.ok_or_else(|| PlanError::Plan(format!("{:?} is in no stage", graph.nodes[n].name))))
            .collect()
    }

    /// A plan with one peer per stage, from the stage of every node and the peer of every stage.
    pub fn from_stages(
        graph: &Graph,
        stage_of: &[u32],
        peer_of_stage: &[u32],
        peers: Vec<String>,
        micro_batches: u32,
        schedule: Schedule,
        scheduler: &str,
    ) -> Self {
        let mut stages: Vec<Stage> =
            peer_of_stage.iter().map(|&peer| Stage { peers: vec![peer], nodes: Vec::new() }).collect();
        for (n, &s) in stage_of.iter().enumerate() {
            if let Some(stage) = stages.get_mut(s as usize) {
                stage.nodes.push(NodeId(n as u32));
            }
        }
        Self {
            fusionllm_plan: FORMAT_VERSION,
            version: first(),
            graph: graph.digest(),
            peers,
            stages,
            micro_batches,
            schedule,
            scheduler: scheduler.into(),
            compression: Compression::default(),
            codecs: Vec::new(),
            offload: Vec::new(),
        }
    }

    /// The plan file's text.
    pub fn to_json(&self) -> Result<String, PlanError> {
        serde_json::to_string_pretty(self).map_err(|e| PlanError::File(e.to_string()))
    }

    /// Reads a plan file. Call [`Self::validate`] with the graph before use.
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        // The version is read alone first: other fields may differ between versions.
        #[derive(Deserialize)]
        struct Version {
            fusionllm_plan: u32,
        }
        let version: Version =
            serde_json::from_str(text).map_err(|e| PlanError::File(format!("not a FusionLLM plan: {e}")))?;
        if version.fusionllm_plan != FORMAT_VERSION {
            return Err(PlanError::File(format!(
                "it has version {}, but this program reads version {FORMAT_VERSION}; make a new plan",
                version.fusionllm_plan
            )));
        }
        serde_json::from_str(text).map_err(|e| PlanError::File(e.to_string()))
    }
}

fn first() -> u32 {
    1
}

fn names<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Peer {
        Name(String),
        Described { name: String },
    }
    let peers: Vec<Peer> = Deserialize::deserialize(deserializer)?;
    Ok(peers
        .into_iter()
        .map(|p| match p {
            Peer::Name(name) | Peer::Described { name } => name,
        })
        .collect())
}
