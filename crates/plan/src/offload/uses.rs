//! When a Program needs the tensors that it could move.

use std::collections::{BTreeMap, HashMap};

use fusionllm_graph::{ValueId, ValueKind};

use crate::program::{Instruction, Movable, Program, Slot, storage};

/// Instructions, the first and the last, between which a tensor must be in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Span {
    pub(super) from: usize,
    pub(super) to: usize,
}

/// The spans of every tensor that can move, in order. None touches the next.
pub(super) fn uses(program: &Program, slots: usize) -> BTreeMap<Movable, Vec<Span>> {
    let mut uses = Uses { program, spans: BTreeMap::new(), made: HashMap::new(), lives: Vec::new() };
    for (at, i) in program.instructions.iter().enumerate() {
        uses.instruction(at, i, slots);
    }
    uses.add_views();
    for spans in uses.spans.values_mut() {
        join(spans, &program.instructions);
    }
    uses.spans
}

/// Joins spans that overlap or touch. What is freed is freed before anything moves.
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

struct Uses<'a> {
    program: &'a Program,
    spans: BTreeMap<Movable, Vec<Span>>,
    /// When the values present were made.
    made: HashMap<(ValueId, u32), usize>,
    /// Values of micro-batches that were made and freed. What is computed again lives twice.
    lives: Vec<(ValueId, u32, Span)>,
}

impl Uses<'_> {
    fn touch(&mut self, what: Movable, at: usize) {
        self.spans.entry(what).or_default().push(Span { from: at, to: at });
    }

    fn value(&mut self, v: ValueId, micro_batch: u32, at: usize) {
        match self.program.values.get(&v).map(|v| &v.kind) {
            Some(ValueKind::Parameter(_)) => self.touch(Movable::Parameter { parameter: v }, at),
            Some(ValueKind::Input | ValueKind::Result { .. }) => {
                self.made.entry((v, micro_batch)).or_insert(at);
                self.touch(Movable::Value { value: v, micro_batch }, at);
            }
            _ => {}
        }
    }

    fn reduction(&self, parameter: ValueId) -> Option<u32> {
        self.program.reductions.iter().position(|r| r.parameter == parameter).map(|r| r as u32)
    }

    fn instruction(&mut self, at: usize, i: &Instruction, slots: usize) {
        match *i {
            Instruction::Run { node, micro_batch } => {
                let Some(node) = self.program.nodes.get(&node) else { return };
                for v in node.inputs.iter().chain(&node.outputs) {
                    self.value(*v, micro_batch, at);
                }
            }
            Instruction::Receive { slot, .. } | Instruction::Send { slot, .. } => match slot {
                Slot::Value { value, micro_batch } => self.value(value, micro_batch, at),
                Slot::Part { parameter, part } => {
                    if let Some(reduction) = self.reduction(parameter) {
                        self.touch(Movable::Part { reduction, part }, at);
                    }
                }
                Slot::Parameter { parameter } => self.touch(Movable::Parameter { parameter }, at),
                Slot::Buffer { .. } => {}
            },
            Instruction::Free { value, micro_batch } => {
                self.value(value, micro_batch, at);
                if let Some(from) = self.made.remove(&(value, micro_batch)) {
                    self.lives.push((value, micro_batch, Span { from, to: at }));
                }
            }
            Instruction::Accumulate { reduction, part, value, micro_batch } => {
                self.value(value, micro_batch, at);
                self.touch(Movable::Part { reduction, part }, at);
            }
            Instruction::UpdateState { value, micro_batch, .. } | Instruction::Report { value, micro_batch, .. } => {
                self.value(value, micro_batch, at);
            }
            Instruction::Reduce { reduction } => {
                let parts = self.program.reductions.get(reduction as usize).map_or(0, |r| r.parts.len() as u32);
                (0..parts).for_each(|part| self.touch(Movable::Part { reduction, part }, at));
                self.touch(Movable::Gradient { reduction }, at);
            }
            Instruction::Update { reduction } => {
                let Some(r) = self.program.reductions.get(reduction as usize) else { return };
                self.touch(Movable::Parameter { parameter: r.parameter }, at);
                self.touch(Movable::Gradient { reduction }, at);
                (0..slots as u32).for_each(|slot| self.touch(Movable::Slot { reduction, slot }, at));
            }
            Instruction::Clip | Instruction::Offload { .. } | Instruction::Load { .. } => {}
        }
    }

    /// Moving a tensor frees no memory as long as another one shares its bytes. So it is needed while there is one.
    fn add_views(&mut self) {
        let storage = storage(self.program);
        let mut sharing: HashMap<(ValueId, u32), Vec<(ValueId, Span)>> = HashMap::new();
        for (v, micro_batch, life) in &self.lives {
            if let Some(of) = storage.get(v) {
                sharing.entry((of.root, *micro_batch)).or_default().push((*v, *life));
            }
        }
        for ((root, _), lives) in &sharing {
            if let Some(spans) = self.spans.get_mut(&Movable::Parameter { parameter: *root }) {
                spans.extend(lives.iter().map(|(_, life)| *life));
            }
        }
        self.spans.retain(|what, spans| {
            let Movable::Value { value, micro_batch } = *what else { return true };
            let Some(of) = storage.get(&value).filter(|of| !of.stays && of.own == of.of_root) else { return false };
            let others = sharing.get(&(of.root, micro_batch)).into_iter().flatten().filter(|(v, _)| *v != value);
            spans.extend(others.map(|(_, life)| *life));
            true
        });
    }
}
