//! Writes what a peer does to need less memory into its Program.

use std::collections::{BTreeMap, HashMap, HashSet};

use fusionllm_graph::ValueId;

use super::PeerOffload;
use super::recompute::{Activations, recompute};
use super::uses::{Span, uses};
use crate::program::{Instruction, Movable, Program, Slot};

/// Writes what `offload` asks for into a Program that has none of it. What the Program does not have is left out.
pub(crate) fn rewrite(program: &mut Program, offload: &PeerOffload) {
    let made_twice = recompute(program, &offload.recomputed);
    reduce_early(program, offload);
    let activations = Activations::new(program);
    let (mut loads, mut offloads) = (BTreeMap::<usize, Vec<Movable>>::new(), BTreeMap::<usize, Vec<Movable>>::new());
    for (what, spans) in uses(program, offload.optimizer.len()) {
        if !chosen(program, offload, &made_twice, what) {
            continue;
        }
        for Gap { after, before } in gaps(program, &activations, what, &spans) {
            if let Some(at) = after {
                offloads.entry(at).or_default().push(what);
            }
            if let Some(at) = before {
                loads.entry(at).or_default().push(what);
            }
        }
    }
    let instructions = std::mem::take(&mut program.instructions);
    for (at, i) in instructions.into_iter().enumerate() {
        let load = |what: &Movable| Instruction::Load { what: *what, from: offload.to };
        program.instructions.extend(loads.get(&at).into_iter().flatten().map(load));
        program.instructions.push(i);
        let offload = |what: &Movable| Instruction::Offload { what: *what, to: offload.to };
        program.instructions.extend(offloads.get(&at).into_iter().flatten().map(offload));
    }
}

/// The names of the activations that could be away between forward and backward, with the bytes of one micro-batch.
pub(super) fn activations(program: &Program) -> BTreeMap<String, u64> {
    let (mut found, activations) = (BTreeMap::new(), Activations::new(program));
    for (what, spans) in uses(program, 0) {
        if let Movable::Value { value, .. } = what
            && !gaps(program, &activations, what, &spans).is_empty()
        {
            found.insert(program.name(value), program.movable_bytes(what));
        }
    }
    found
}

fn chosen(program: &Program, offload: &PeerOffload, made_twice: &HashSet<ValueId>, what: Movable) -> bool {
    let Some(value) = program.movable_value(what).and_then(|v| program.values.get(&v)) else { return false };
    match what {
        Movable::Value { value: v, .. } => offload.activations.contains(&value.name) && !made_twice.contains(&v),
        Movable::Part { .. } | Movable::Gradient { .. } => offload.gradients.contains(&value.name),
        Movable::Parameter { parameter } => {
            offload.parameters.contains(&value.name) && program.holdings.iter().any(|h| h.value == parameter)
        }
        Movable::Slot { slot, .. } => {
            offload.optimizer.get(slot as usize).is_some_and(|names| names.contains(&value.name))
        }
    }
}

/// A time in which a tensor is away: the instructions after which it leaves and before which it returns. What stays from
/// pass to pass is away at the beginning, or at the end.
struct Gap {
    after: Option<usize>,
    before: Option<usize>,
}

fn gaps(program: &Program, activations: &Activations<'_>, what: Movable, spans: &[Span]) -> Vec<Gap> {
    let instructions = &program.instructions;
    let between = spans.windows(2).map(|pair| (pair[0].to, pair[1].from));
    let gap = |(after, before): (usize, usize)| Gap { after: Some(after), before: Some(before) };
    match what {
        Movable::Value { micro_batch, .. } => {
            let backward = |at: usize| activations.is_backward(micro_batch, at);
            between.filter(|(after, before)| !backward(*after) && backward(*before)).map(gap).collect()
        }
        Movable::Part { .. } | Movable::Gradient { .. } => between.map(gap).collect(),
        Movable::Parameter { .. } | Movable::Slot { .. } => {
            let (Some(first), Some(last)) = (spans.first(), spans.last()) else { return Vec::new() };
            // What is overwritten need not return.
            let overwritten =
                |at: usize| matches!(instructions[at], Instruction::Receive { slot: Slot::Parameter { .. }, .. });
            let read = |at: usize| (!overwritten(at)).then_some(at);
            let between = between.map(|(after, before)| Gap { after: Some(after), before: read(before) });
            let ends = [Gap { after: None, before: read(first.from) }, Gap { after: Some(last.to), before: None }];
            between.chain(ends).collect()
        }
    }
}

/// Reduces each gradient that will be away, and all of whose parts are summed here, as soon as they are complete. It then
/// leaves once, and not twice.
fn reduce_early(program: &mut Program, offload: &PeerOffload) {
    let local: HashSet<u32> = program
        .owned()
        .filter(|(_, r)| r.parts.iter().all(|p| p.peer == program.peer))
        .filter(|(_, r)| offload.gradients.contains(&program.name(r.parameter)))
        .map(|(i, _)| i)
        .collect();
    let mut last = HashMap::new();
    for (at, i) in program.instructions.iter().enumerate() {
        if let Instruction::Accumulate { reduction, .. } = i {
            last.insert(*reduction, at);
        }
    }
    let mut instructions = Vec::with_capacity(program.instructions.len());
    let mut complete = Vec::new();
    for (at, i) in program.instructions.drain(..).enumerate() {
        // A sum may only take the place of a value that is freed.
        if !matches!(i, Instruction::Free { .. }) {
            instructions.append(&mut complete);
        }
        match i {
            Instruction::Reduce { reduction } if local.contains(&reduction) => continue,
            Instruction::Accumulate { reduction, .. }
                if local.contains(&reduction) && last.get(&reduction) == Some(&at) =>
            {
                complete.push(Instruction::Reduce { reduction });
            }
            _ => {}
        }
        instructions.push(i);
    }
    instructions.append(&mut complete);
    program.instructions = instructions;
}
