//! The peers that need each value.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::ValueId;
use fusionllm_program::PeerId;

/// One use's parts of a parameter's gradient.
#[derive(Clone)]
pub(super) struct UseParts {
    pub(super) parameter: ValueId,
    /// The numbers of the parts, by turn.
    pub(super) by_turn: Vec<u32>,
}

/// The peers that need each value.
pub(super) struct Uses {
    /// By micro-batch of one period, and by value: the peers that receive it. For a constant, the peers that keep it.
    /// The peer that computes a value is not listed.
    pub(super) readers: Vec<BTreeMap<ValueId, BTreeSet<PeerId>>>,
    /// By value: the gradients that it is added to.
    pub(super) parts: BTreeMap<ValueId, Vec<UseParts>>,
    /// By value: the reports.
    pub(super) reports: BTreeMap<ValueId, Vec<u32>>,
}

impl Uses {
    /// The peers that receive a micro-batch's value.
    pub(super) fn readers(&self, value: ValueId, micro_batch: u32) -> impl Iterator<Item = PeerId> {
        let turn = &self.readers[micro_batch as usize % self.readers.len()];
        turn.get(&value).into_iter().flatten().copied()
    }

    /// The gradients (parameter and part) that a micro-batch's value is added to.
    pub(super) fn parts(&self, value: ValueId, micro_batch: u32) -> impl Iterator<Item = (ValueId, u32)> {
        let uses = self.parts.get(&value).into_iter().flatten();
        uses.map(move |of_use| (of_use.parameter, of_use.by_turn[micro_batch as usize % of_use.by_turn.len()]))
    }

    /// Whether a peer needs a value of any micro-batch.
    pub(super) fn reads(&self, value: ValueId, peer: PeerId) -> bool {
        self.readers.iter().any(|turn| turn.get(&value).is_some_and(|peers| peers.contains(&peer)))
    }
}
