//! When a Program needs the tensors that it could move.

use std::collections::BTreeMap;

use foldhash::{HashMap, HashMapExt, HashSet};
use fusionllm_graph::ValueId;
use fusionllm_program::{Access, Address, Bytes, Instruction, Program, storage};

/// Instructions, the first and the last, between which a tensor must be in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Span {
    pub(super) from: usize,
    pub(super) to: usize,
}

/// The spans of every tensor that can move and `is_wanted`, in order. None touches the next.
pub(super) fn uses(
    program: &Program,
    slots: usize,
    is_wanted: impl Fn(Address) -> bool,
) -> BTreeMap<Address, Vec<Span>> {
    let storage = storage(program);
    let wants =
        |v: ValueId| is_wanted(Address::Held { value: v }) || is_wanted(Address::Value { value: v, micro_batch: 0 });
    let roots = storage.iter().filter(|(v, of)| wants(**v) || wants(of.root)).map(|(_, of)| of.root).collect();
    let (spans, made, lives) = (BTreeMap::new(), HashMap::new(), Vec::new());
    let mut uses = Uses { storage, is_wanted, roots, spans, made, lives };
    for (at, i) in program.instructions.iter().enumerate() {
        i.effects(program, slots, |tensor, access| uses.tensor(tensor, access, at));
    }
    uses.add_views();
    for spans in uses.spans.values_mut() {
        join(spans, &program.instructions);
    }
    uses.spans
}

/// Joins spans that overlap or touch. A span reaches over the `Free` instructions behind it, because they come before
/// any tensor moves.
fn join(spans: &mut Vec<Span>, instructions: &[Instruction]) {
    let frees = |i: &&Instruction| matches!(i, Instruction::Free { .. });
    spans.sort_unstable();
    let mut joined: Vec<Span> = Vec::with_capacity(spans.len());
    for Span { from, to } in spans.drain(..) {
        let to = to + instructions[to + 1..].iter().take_while(frees).count();
        match joined.last_mut() {
            Some(last) if from <= last.to + 1 => last.to = last.to.max(to),
            _ => joined.push(Span { from, to }),
        }
    }
    *spans = joined;
}

struct Uses<W> {
    storage: HashMap<ValueId, Bytes>,
    is_wanted: W,
    /// The values whose bytes wanted tensors have.
    roots: HashSet<ValueId>,
    spans: BTreeMap<Address, Vec<Span>>,
    /// When the values present were made.
    made: HashMap<(ValueId, u32), usize>,
    /// The times in which values of micro-batches with the bytes of wanted ones were there, each made and freed. A value
    /// that is computed again has two.
    lives: Vec<(ValueId, u32, Span)>,
}

impl<W: Fn(Address) -> bool> Uses<W> {
    fn tensor(&mut self, tensor: Address, access: Access, at: usize) {
        if (self.is_wanted)(tensor) {
            self.spans.entry(tensor).or_default().push(Span { from: at, to: at });
        }
        if let Address::Value { value, micro_batch } = tensor
            && self.storage.get(&value).is_some_and(|of| self.roots.contains(&of.root))
        {
            let from = *self.made.entry((value, micro_batch)).or_insert(at);
            if access == Access::Free {
                self.made.remove(&(value, micro_batch));
                self.lives.push((value, micro_batch, Span { from, to: at }));
            }
        }
    }

    /// Lengthens the spans of tensors that views share. Moving such a tensor frees no memory while a view of it is
    /// there, so it counts as needed for so long.
    fn add_views(&mut self) {
        let storage = &self.storage;
        let mut sharing: HashMap<(ValueId, u32), Vec<(ValueId, Span)>> = HashMap::new();
        for (v, micro_batch, life) in &self.lives {
            if let Some(of) = storage.get(v) {
                sharing.entry((of.root, *micro_batch)).or_default().push((*v, *life));
            }
        }
        for ((root, _), lives) in &sharing {
            if let Some(spans) = self.spans.get_mut(&Address::Held { value: *root }) {
                spans.extend(lives.iter().map(|(_, life)| *life));
            }
        }
        self.spans.retain(|tensor, spans| {
            let Address::Value { value, micro_batch } = *tensor else { return true };
            let Some(of) = storage.get(&value).filter(|of| !of.stays && of.own == of.of_root) else { return false };
            let others = sharing.get(&(of.root, micro_batch)).into_iter().flatten().filter(|(v, _)| *v != value);
            spans.extend(others.map(|(_, life)| *life));
            true
        });
    }
}
