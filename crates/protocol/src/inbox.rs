use std::collections::{BTreeMap, HashSet};

use fusionllm_graph::TensorType;
use fusionllm_plan::{PeerId, Program, Slot};

use crate::TensorHeader;

/// What a frame that fits no Program is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{from} sent {slot:?} of pass {pass}: {reason}")]
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
///
/// Whether a pass trains or evaluates is known to whoever sends for it before it may be known here, so a header says it. What a liar sends is never read, and is to be
/// dropped when the pass is over: no peer can fill more than the window.
#[derive(Debug)]
pub struct Inbox {
    /// What may come in an evaluation and in training.
    expected: [BTreeMap<Slot, Expected>; 2],
    /// The oldest pass not yet over.
    oldest: u64,
    /// How many passes may be under way.
    window: u64,
    /// What came, of passes not yet over.
    seen: HashSet<(u64, bool, Slot)>,
}

#[derive(Debug)]
struct Expected {
    from: PeerId,
    ty: TensorType,
    /// The least and most bytes of its coded form, if it may come so.
    coded: Option<(u64, u64)>,
}

fn expected(program: &Program) -> BTreeMap<Slot, Expected> {
    let incoming = program.incoming().into_iter();
    incoming.map(|(slot, (from, ty))| (slot, Expected { from, ty, coded: program.coded_bytes(slot) })).collect()
}

impl Inbox {
    /// For a peer with these programs, of whose passes at most `window` are under way.
    pub fn new(train: &Program, eval: &Program, window: u64) -> Self {
        Self { expected: [expected(eval), expected(train)], oldest: 1, window, seen: HashSet::new() }
    }

    /// The type of the tensor that a frame carries, if it may come now from this sender with so many bytes. What is coded has no more bytes than the tensor and a few.
    pub fn admit(&mut self, from: PeerId, header: &TensorHeader, payload: u64) -> Result<TensorType, Violation> {
        let TensorHeader { pass, train, slot, coded } = *header;
        let fail = |reason| Err(Violation { from, slot, pass, reason });
        if pass < self.oldest || pass - self.oldest >= self.window {
            return fail("that pass is not under way");
        }
        let expected = match self.expected[usize::from(train)].get(&slot) {
            Some(expected) if expected.from == from => expected,
            _ => return fail("no program here waits for that from this peer"),
        };
        let exact = expected.ty.bytes() as u64;
        let (least, most) = match expected.coded {
            Some(bounds) if coded => bounds,
            None if coded => return fail("it must not be coded"),
            _ => (exact, exact),
        };
        if !(least..=most).contains(&payload) {
            return fail("it has the wrong size");
        }
        if !self.seen.insert((pass, train, slot)) {
            return fail("it came already");
        }
        Ok(expected.ty.clone())
    }

    /// All passes up to this one are over.
    pub fn done(&mut self, pass: u64) {
        self.oldest = self.oldest.max(pass.saturating_add(1));
        self.seen.retain(|(pass, _, _)| *pass >= self.oldest);
    }
}
