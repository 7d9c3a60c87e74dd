//! Writes into a peer's Program the instructions that offload and recompute tensors.

use std::collections::BTreeMap;
use std::ops::Range;

use foldhash::{HashMap, HashMapExt, HashSet};
use fusionllm_graph::{ValueId, ValueKind};
use fusionllm_program::{Access, Address, Instruction, Program};

use super::PeerOffload;
use super::recompute::{Activations, recompute};
use super::uses::{Span, uses};

/// Writes the offloading that `offload` asks for into a Program that has none. Tensors that the Program does not have
/// are ignored.
pub(crate) fn rewrite(program: &mut Program, offload: &PeerOffload) {
    let made_twice = recompute(program, &offload.recomputed);
    reduce_early(program, offload);
    let activations = Activations::new(program);
    let (mut loads, mut offloads) = (BTreeMap::<usize, Vec<Address>>::new(), BTreeMap::<usize, Vec<Address>>::new());
    for (tensor, spans) in uses(program, offload.optimizer.len()) {
        if !chosen(program, offload, &made_twice, tensor) {
            continue;
        }
        for Gap { after, before } in gaps(program, &activations, tensor, &spans) {
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
}

/// The names of the activations that could be away between forward and backward, with the bytes of one micro-batch.
pub(super) fn activations(program: &Program) -> BTreeMap<String, u64> {
    let (mut found, activations) = (BTreeMap::new(), Activations::new(program));
    for (tensor, spans) in uses(program, 0) {
        if let Address::Value { value, .. } = tensor
            && !gaps(program, &activations, tensor, &spans).is_empty()
        {
            found.insert(program.name(value), program.bytes(tensor));
        }
    }
    found
}

/// The times in which each tensor that can move may be away, as ranges of instructions.
pub(super) fn all_gaps(
    program: &Program,
    activations: &Activations<'_>,
    slots: usize,
) -> impl Iterator<Item = (Address, Vec<Range<usize>>)> {
    uses(program, slots).into_iter().map(move |(tensor, spans)| {
        let range = |Gap { after, before }| {
            let start = after.map_or(0, |at: usize| at + 1);
            start..before.unwrap_or(program.instructions.len()).max(start)
        };
        (tensor, gaps(program, activations, tensor, &spans).into_iter().map(range).collect())
    })
}

fn chosen(program: &Program, offload: &PeerOffload, made_twice: &HashSet<ValueId>, tensor: Address) -> bool {
    let Some(value) = program.values.get(&tensor.value()) else { return false };
    match tensor {
        Address::Value { value: v, .. } => offload.activations.contains(&value.name) && !made_twice.contains(&v),
        Address::Part { .. } | Address::Gradient { .. } => offload.gradients.contains(&value.name),
        Address::Held { value: v } => {
            let held = program.holdings.iter().any(|h| h.value == v);
            let parameter = matches!(value.kind, ValueKind::Parameter(_) | ValueKind::Frozen(_));
            held && parameter && offload.parameters.contains(&value.name)
        }
        Address::OptimizerState { slot, .. } => {
            offload.optimizer.get(slot as usize).is_some_and(|names| names.contains(&value.name))
        }
        Address::BufferAfter { .. } => false,
    }
}

/// A time in which a tensor is away: the instructions after which it leaves and before which it returns. A tensor that
/// stays from pass to pass may also be away at the beginning or at the end of a pass.
struct Gap {
    after: Option<usize>,
    before: Option<usize>,
}

fn gaps(program: &Program, activations: &Activations<'_>, tensor: Address, spans: &[Span]) -> Vec<Gap> {
    let between = spans.windows(2).map(|pair| (pair[0].to, pair[1].from));
    let gap = |(after, before): (usize, usize)| Gap { after: Some(after), before: Some(before) };
    if let Some(micro_batch) = tensor.micro_batch() {
        let backward = |at: usize| activations.is_backward(micro_batch, at);
        return between.filter(|(after, before)| !backward(*after) && backward(*before)).map(gap).collect();
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
