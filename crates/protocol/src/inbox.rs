use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::TensorType;
use fusionllm_plan::{PeerId, Program, Slot};

use crate::TensorHeader;

/// What a frame that fits no Program is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("peer {from:?} sent {slot:?} of pass {pass}: {reason}")]
pub struct Violation {
    /// Who sent it.
    pub from: PeerId,
    /// What it claims to be.
    pub slot: Slot,
    /// Of which pass.
    pub pass: u64,
    /// What is wrong.
    pub reason: &'static str,
}

/// Checks every incoming tensor's header against the Programs before anything is allocated for it.
#[derive(Debug)]
pub struct Inbox {
    /// What may come, from whom, with which type, per program.
    expected: Vec<BTreeMap<Slot, (PeerId, TensorType)>>,
    /// The oldest pass not yet over.
    oldest: u64,
    /// How many passes may be under way.
    window: u64,
    /// What came, of passes not yet over.
    seen: BTreeSet<(u64, Slot)>,
}

impl Inbox {
    /// For a peer with these programs, of whose passes at most `window` are under way.
    pub fn new(programs: &[&Program], window: u64) -> Self {
        Self { expected: programs.iter().map(|p| p.incoming()).collect(), oldest: 1, window, seen: BTreeSet::new() }
    }

    /// The type of the tensor that a frame carries, if it may come now from this sender with so many bytes.
    pub fn admit(&mut self, from: PeerId, header: &TensorHeader, payload: u64) -> Result<TensorType, Violation> {
        let TensorHeader { pass, slot } = *header;
        let fail = |reason| Err(Violation { from, slot, pass, reason });
        if pass < self.oldest || pass >= self.oldest.saturating_add(self.window) {
            return fail("that pass is not under way");
        }
        let candidates = self.expected.iter().filter_map(|e| e.get(&slot)).filter(|(sender, _)| *sender == from);
        let Some((_, ty)) = candidates.clone().find(|(_, ty)| ty.bytes() as u64 == payload) else {
            return match candidates.count() {
                0 => fail("no program here waits for that from this peer"),
                _ => fail("it has the wrong size"),
            };
        };
        let ty = ty.clone();
        if !self.seen.insert((pass, slot)) {
            return fail("it came already");
        }
        Ok(ty)
    }

    /// All passes up to this one are over.
    pub fn done(&mut self, pass: u64) {
        self.oldest = self.oldest.max(pass + 1);
        self.seen =
            self.seen.split_off(&(self.oldest, Slot::Value { value: fusionllm_graph::ValueId(0), micro_batch: 0 }));
    }
}
