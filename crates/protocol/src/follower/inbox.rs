use std::collections::{BTreeMap, HashSet};

use fusionllm_graph::TensorType;
use fusionllm_program::{Address, PassKind, PeerId, PerPass, Program};

use crate::TensorHeader;

/// A frame that no Program expects.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{from} sent {tensor:?} of pass {pass}: {reason}")]
pub struct UnexpectedTensor {
    /// The sender.
    pub from: PeerId,
    /// The tensor in the frame's header.
    pub tensor: Address,
    /// The pass in the frame's header.
    pub pass: u64,
    /// The reason why the frame is refused.
    pub reason: &'static str,
}

/// Checks the header of every incoming tensor against the Programs before anything is allocated for it.
///
/// A sender may know a pass's kind before the receiver does, so the header contains it. Tensors with a wrong kind are
/// never read. The caller drops them when the pass is complete, so a hostile peer cannot fill more than the window.
#[derive(Debug)]
pub struct Inbox {
    expected: PerPass<BTreeMap<Address, Expected>>,
    /// The last pass of earlier generations.
    passes_before: u64,
    /// The oldest incomplete pass.
    oldest: u64,
    /// Most passes in flight.
    window: u64,
    /// The tensors of incomplete passes that have arrived.
    seen: HashSet<(u64, PassKind, Address)>,
}

#[derive(Debug)]
struct Expected {
    from: PeerId,
    ty: TensorType,
    /// The least and most bytes of the encoded form; `None` if the tensor must not be encoded.
    coded_bytes: Option<(u64, u64)>,
}

fn expected(program: &Program) -> BTreeMap<Address, Expected> {
    let incoming = program.incoming().into_iter();
    let expected = |(tensor, (from, ty))| (tensor, Expected { from, ty, coded_bytes: program.coded_bytes(tensor) });
    incoming.map(expected).collect()
}

impl Inbox {
    /// The inbox of a peer with these programs and at most `window` passes in flight. `passes_before` is the number of
    /// the last pass of earlier generations.
    pub fn new(train: &Program, eval: &Program, window: u64, passes_before: u64) -> Self {
        let expected = PerPass { train: expected(train), eval: expected(eval) };
        Self { expected, passes_before, oldest: passes_before.saturating_add(1), window, seen: HashSet::new() }
    }

    /// Returns the type of an incoming tensor if this sender may send it now with this many bytes of payload. `None`
    /// for a tensor of an earlier generation, which is to be skipped.
    ///
    /// An encoded payload is at most a few bytes longer than the tensor.
    pub fn admit(
        &mut self,
        from: PeerId,
        header: &TensorHeader,
        payload: u64,
    ) -> Result<Option<TensorType>, UnexpectedTensor> {
        let TensorHeader { pass, kind, tensor, coded } = *header;
        let fail = |reason| Err(UnexpectedTensor { from, tensor, pass, reason });
        if pass <= self.passes_before {
            return Ok(None);
        }
        if pass < self.oldest || pass - self.oldest >= self.window {
            return fail("that pass is not in flight");
        }
        let expected = match self.expected[kind].get(&tensor) {
            Some(expected) if expected.from == from => expected,
            _ => return fail("no program expects it from this peer"),
        };
        let exact = expected.ty.bytes() as u64;
        let (least, most) = match expected.coded_bytes {
            Some(bounds) if coded => bounds,
            None if coded => return fail("it must not be encoded"),
            _ => (exact, exact),
        };
        if !(least..=most).contains(&payload) {
            return fail("it has the wrong size");
        }
        if !self.seen.insert((pass, kind, tensor)) {
            return fail("it has already arrived");
        }
        Ok(Some(expected.ty.clone()))
    }

    /// Call when this pass and all before it are complete.
    pub fn passes_done(&mut self, pass: u64) {
        self.oldest = self.oldest.max(pass.saturating_add(1));
        self.seen.retain(|(pass, _, _)| *pass >= self.oldest);
    }
}
