//! Writes into a peer's Program the instructions that offload and recompute tensors.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use foldhash::{HashMap, HashMapExt, HashSet};
use fusionllm_graph::{ValueId, ValueKind};
use fusionllm_program::{Access, Address, Instruction, Program};

use super::PeerOffload;
use super::recompute::{Activations, Backward, recompute};
use super::uses::{Span, uses};

/// Writes the offloading that `offload` asks for into a Program that has none. Tensors that the Program does not have
/// are ignored.
pub(crate) fn rewrite(program: &mut Program, offload: &PeerOffload) {
    let activations = (!offload.recomputed.is_empty()).then(|| Activations::new(program));
    *program = rewritten(program, activations.as_ref(), offload);
}

/// See [`rewrite`]. `activations` are the Program's, if any of them are computed again.
pub(super) fn rewritten(program: &Program, activations: Option<&Activations<'_>>, offload: &PeerOffload) -> Program {
    let mut program = program.clone();
    let again = activations.filter(|_| !offload.recomputed.is_empty());
    let made_twice = again.map(|activations| recompute(&mut program, activations, &offload.recomputed));
    reduce_early(&mut program, offload);
    let backward = Backward::new(&program);
    let chosen = Chosen::new(&program, offload, &made_twice.unwrap_or_default());
    let (mut loads, mut offloads) = (BTreeMap::<usize, Vec<Address>>::new(), BTreeMap::<usize, Vec<Address>>::new());
    for (tensor, spans) in uses(&program, offload.optimizer.len(), |tensor| chosen.has(tensor)) {
        for Gap { after, before } in gaps(&program, &backward, tensor, &spans) {
            if let Some(at) = after {
                offloads.entry(at).or_default().push(tensor);
            }
            if let Some(at) = before {
                loads.entry(at).or_default().push(tensor);
            }
        }
    }
    let instructions = std::mem::take(&mut program.instructions);
    for (at, i) in instructions.into_iter().enumerate() {
        let load = |tensor: &Address| Instruction::Load { tensor: *tensor, from: offload.to };
        program.instructions.extend(loads.get(&at).into_iter().flatten().map(load));
        program.instructions.push(i);
        let offload = |tensor: &Address| Instruction::Offload { tensor: *tensor, to: offload.to };
        program.instructions.extend(offloads.get(&at).into_iter().flatten().map(offload));
    }
    program
}

/// The names of the activations that could be away between forward and backward, with the bytes of one micro-batch.
pub(super) fn activations(program: &Program) -> BTreeMap<String, u64> {
    let (mut found, backward) = (BTreeMap::new(), Backward::new(program));
    for (tensor, spans) in uses(program, 0, |tensor| matches!(tensor, Address::Value { .. })) {
        if let Address::Value { value, .. } = tensor
            && !gaps(program, &backward, tensor, &spans).is_empty()
        {
            found.insert(program.name(value), program.bytes(tensor));
        }
    }
    found
}

/// The times in which each tensor that can move may be away, as ranges of instructions.
pub(super) fn all_gaps(
    program: &Program,
    backward: &Backward,
    slots: usize,
) -> impl Iterator<Item = (Address, Vec<Range<usize>>)> {
    uses(program, slots, |_| true).into_iter().map(move |(tensor, spans)| {
        let range = |Gap { after, before }| {
            let start = after.map_or(0, |at: usize| at + 1);
            start..before.unwrap_or(program.instructions.len()).max(start)
        };
        (tensor, gaps(program, backward, tensor, &spans).into_iter().map(range).collect())
    })
}

/// The tensors that move, by the values that name them.
struct Chosen {
    activations: HashSet<ValueId>,
    gradients: HashSet<ValueId>,
    parameters: HashSet<ValueId>,
    /// By slot.
    optimizer: Vec<HashSet<ValueId>>,
}

impl Chosen {
    fn new(program: &Program, offload: &PeerOffload, made_twice: &HashSet<ValueId>) -> Self {
        let of = |names: &BTreeSet<String>| -> HashSet<ValueId> {
            let values = program.values.iter().filter(|(_, value)| names.contains(&value.name));
            values.map(|(v, _)| *v).collect()
        };
        let is_parameter = |v: &ValueId| {
            let kind = program.values.get(v).map(|value| &value.kind);
            matches!(kind, Some(ValueKind::Parameter(_) | ValueKind::Frozen(_)))
        };
        let (mut activations, named) = (of(&offload.activations), of(&offload.parameters));
        activations.retain(|v| !made_twice.contains(v));
        let held = program.holdings.iter().map(|h| h.value);
        let parameters = held.filter(|v| named.contains(v) && is_parameter(v)).collect();
        let optimizer = offload.optimizer.iter().map(of).collect();
        Self { activations, gradients: of(&offload.gradients), parameters, optimizer }
    }

    fn has(&self, tensor: Address) -> bool {
        let v = tensor.value();
        match tensor {
            Address::Value { .. } => self.activations.contains(&v),
            Address::Part { .. } | Address::Gradient { .. } => self.gradients.contains(&v),
            Address::Held { .. } => self.parameters.contains(&v),
            Address::OptimizerState { slot, .. } => self.optimizer.get(slot as usize).is_some_and(|of| of.contains(&v)),
            Address::BufferAfter { .. } => false,
        }
    }
}

/// A time in which a tensor is away: the instructions after which it leaves and before which it returns. A tensor that
/// stays from pass to pass may also be away at the beginning or at the end of a pass.
struct Gap {
    after: Option<usize>,
    before: Option<usize>,
}

fn gaps(program: &Program, backward: &Backward, tensor: Address, spans: &[Span]) -> Vec<Gap> {
    let between = spans.windows(2).map(|pair| (pair[0].to, pair[1].from));
    let gap = |(after, before): (usize, usize)| Gap { after: Some(after), before: Some(before) };
    if let Some(micro_batch) = tensor.micro_batch() {
        let is_backward = |at: usize| backward.has(micro_batch, at);
        return between.filter(|(after, before)| !is_backward(*after) && is_backward(*before)).map(gap).collect();
    }
    if !tensor.stays() {
        return between.map(gap).collect();
    }
    let (Some(first), Some(last)) = (spans.first(), spans.last()) else { return Vec::new() };
    // A tensor that is overwritten before it is read need not return.
    let overwritten = |at: usize| {
        let mut replaced = false;
        program.instructions[at].effects(program, 0, |t, access| replaced |= (t, access) == (tensor, Access::Replace));
        replaced
    };
    let read = |at: usize| (!overwritten(at)).then_some(at);
    let between = between.map(|(after, before)| Gap { after: Some(after), before: read(before) });
    let ends = [Gap { after: None, before: read(first.from) }, Gap { after: Some(last.to), before: None }];
    between.chain(ends).collect()
}

/// Reduces a gradient that will be away as soon as all its parts are complete, if this peer sums all of them. The
/// gradient then leaves once, and not twice.
fn reduce_early(program: &mut Program, offload: &PeerOffload) {
    let local: HashSet<ValueId> = program
        .owned()
        .filter(|(_, r)| r.parts.iter().all(|p| p.peer == program.peer))
        .map(|(parameter, _)| parameter)
        .filter(|parameter| offload.gradients.contains(&program.name(*parameter)))
        .collect();
    let mut last = HashMap::new();
    for (at, i) in program.instructions.iter().enumerate() {
        if let Instruction::Accumulate { parameter, .. } = i {
            last.insert(*parameter, at);
        }
    }
    let mut instructions = Vec::with_capacity(program.instructions.len());
    let mut complete = Vec::new();
    for (at, i) in program.instructions.drain(..).enumerate() {
        // `Reduce` stands behind the `Free` instructions, because a sum may only take the place of a value that is
        // freed.
        if !matches!(i, Instruction::Free { .. }) {
            instructions.append(&mut complete);
        }
        match i {
            Instruction::Reduce { parameter } if local.contains(&parameter) => continue,
            Instruction::Accumulate { parameter, .. }
                if local.contains(&parameter) && last.get(&parameter) == Some(&at) =>
            {
                complete.push(Instruction::Reduce { parameter });
            }
            _ => {}
        }
        instructions.push(i);
    }
    instructions.append(&mut complete);
    program.instructions = instructions;
}
