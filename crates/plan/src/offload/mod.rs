//! How peers need less memory than their share takes: the tensors that they offload, and those that they recompute.

mod choice;
mod recompute;
mod rewrite;
mod uses;

use std::collections::BTreeSet;

use fusionllm_graph::units;
use fusionllm_program::{Medium, OffloadedBytes, PeerId, Program};
use serde::{Deserialize, Serialize};

pub(crate) use choice::{Drafts, MEMORY_SHARES, Offloaded, most_waiting, offload};
pub(crate) use rewrite::rewrite;

/// The tensors that a peer keeps outside its device's memory while nothing uses them, and those that it computes again
/// instead of keeping them. Tensors are named as in the graph.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerOffload {
    /// The peer.
    pub peer: PeerId,
    /// The medium that the offloaded tensors go to.
    pub to: Medium,
    /// By slot of the optimizer: the owned parameters whose state in that slot is away until their update.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub optimizer: Vec<BTreeSet<String>>,
    /// The activations that backward computes again, in every micro-batch. They are freed after forward.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub recomputed: BTreeSet<String>,
    /// The activations that are away between forward and backward, in every micro-batch.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub activations: BTreeSet<String>,
    /// The parameters whose gradients are away between two sums, and until their update.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub gradients: BTreeSet<String>,
    /// The parameters that are away between two uses.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub parameters: BTreeSet<String>,
}

impl PeerOffload {
    /// Nothing is away.
    pub(crate) fn nothing(peer: PeerId, to: Medium) -> Self {
        let (optimizer, none) = (Vec::new(), BTreeSet::new());
        let [recomputed, activations, gradients, parameters] = [none.clone(), none.clone(), none.clone(), none];
        Self { peer, to, optimizer, recomputed, activations, gradients, parameters }
    }

    /// The names of all tensors.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        let sets = [&self.recomputed, &self.activations, &self.gradients, &self.parameters];
        self.optimizer.iter().chain(sets).flatten()
    }
}

/// A sentence for the user about how a peer needs less memory; `None` if it does nothing for it. `name` is the peer's
/// name.
pub(crate) fn sentence(name: &str, program: &Program) -> Option<String> {
    let on = |medium: Medium| {
        let OffloadedBytes { optimizer, gradients, activations, parameters } = program.offloaded_bytes(medium);
        let kinds = [
            (optimizer, "optimizer state"),
            (activations, "activations"),
            (gradients, "gradients"),
            (parameters, "parameters"),
        ];
        let there = kinds.into_iter().filter(|(bytes, _)| *bytes > 0);
        let there: Vec<String> = there.map(|(bytes, what)| format!("{} of {what}", units::bytes(bytes))).collect();
        let place = match medium {
            Medium::Host => "in the host's memory",
            Medium::Disk => "on disk",
        };
        (!there.is_empty()).then(|| format!("{} {place}", there.join(", ")))
    };
    let media: Vec<String> = [Medium::Host, Medium::Disk].into_iter().filter_map(on).collect();
    let offloads = (!media.is_empty()).then(|| format!("offloads {}", media.join("; ")));
    let again = program.recomputed_bytes();
    let recomputes =
        (again > 0).then(|| format!("computes {} of activations again in each micro-batch", units::bytes(again)));
    let does: Vec<String> = recomputes.into_iter().chain(offloads).collect();
    (!does.is_empty()).then(|| format!("{name} has too little memory for its share, and {}", does.join(", and ")))
}
