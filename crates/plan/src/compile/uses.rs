//! Who needs each value.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::ValueId;

use crate::program::PeerId;

/// Who waits for each value.
pub(super) struct Uses {
    /// By micro-batch, until turns repeat, and value: the peers it is sent to, or, for a constant, that keep it. Its maker is not among them.
    pub(super) readers: Vec<BTreeMap<ValueId, BTreeSet<PeerId>>>,
    /// The gradients (reduction and part) it belongs to: for each, a part for every turn of its stage.
    pub(super) parts: BTreeMap<ValueId, Vec<(u32, u32)>>,
    /// The reports it is.
    pub(super) reports: BTreeMap<ValueId, Vec<u32>>,
}

impl Uses {
    /// Whom a micro-batch's value is sent to.
    pub(super) fn readers(&self, value: ValueId, micro_batch: u32) -> impl Iterator<Item = PeerId> {
        let turn = &self.readers[micro_batch as usize % self.readers.len()];
        turn.get(&value).into_iter().flatten().copied()
    }

    /// The gradients (reduction and part) that a micro-batch's value is added to, where its stage has so many turns.
    pub(super) fn parts(&self, value: ValueId, micro_batch: u32, turns: usize) -> impl Iterator<Item = (u32, u32)> {
        let parts = self.parts.get(&value).map_or(&[][..], Vec::as_slice);
        parts.chunks(turns).map(move |of_use| of_use[micro_batch as usize % turns])
    }

    /// Whether a peer waits for a value of any micro-batch.
    pub(super) fn reads(&self, value: ValueId, peer: PeerId) -> bool {
        self.readers.iter().any(|turn| turn.get(&value).is_some_and(|peers| peers.contains(&peer)))
    }
}
