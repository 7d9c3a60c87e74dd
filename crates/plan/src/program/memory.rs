//! The bytes that a peer holds while it runs a Program.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};

use fusionllm_graph::{Node, NodeId, Op, Phase, Value, ValueId, ValueKind};

use super::{Instruction, Movable, Program, Slot};
use crate::graph_facts::shares_storage;

/// The tensors of a pass, in bytes: values of micro-batches, sums of gradients, copies for messages, and what is loaded.
/// Tensors that stay in memory from pass to pass are not among them. A reshaped, permuted or expanded tensor shares the
/// bytes of its operand.
///
/// The Program may be a stranger's. Sums stop at the largest number, and nothing is allocated for what is not there.
pub(crate) struct Memory<'a> {
    program: &'a Program,
    live: u64,
    values: HashMap<ValueId, Bytes>,
    /// By value and micro-batch: how many of the values present share its bytes. Those that stay from pass to pass are
    /// always among them, so they are never freed through a view.
    shares: HashMap<(ValueId, u32), u32>,
    /// Sums that have begun, by reduction and part.
    sums: HashSet<(u32, u32)>,
}

/// The bytes of a value.
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    pub(crate) own: u64,
    /// The value whose bytes these are, if it is a view.
    pub(crate) root: ValueId,
    pub(crate) of_root: u64,
    /// Whether the root stays from pass to pass.
    pub(crate) stays: bool,
}

/// The bytes of a Program's values.
pub(crate) fn storage(program: &Program) -> HashMap<ValueId, Bytes> {
    let held: HashSet<ValueId> = program.holdings.iter().map(|h| h.value).collect();
    let bytes = |(v, value): (&ValueId, &Value)| {
        let own = value.ty.bytes() as u64;
        (*v, Bytes { own, root: *v, of_root: own, stays: held.contains(v) })
    };
    let mut values: HashMap<ValueId, Bytes> = program.values.iter().map(bytes).collect();
    for node in program.nodes.values().filter(|node| shares_storage(&node.op)) {
        let ([input], [output]) = (&node.inputs[..], &node.outputs[..]) else { continue };
        let (Some(of), Some(view)) = (values.get(input).copied(), values.get_mut(output)) else { continue };
        // An expanded tensor repeats its elements. No view of them has another shape.
        if !matches!(node.op, Op::Reshape(_)) || of.own <= of.of_root {
            *view = Bytes { own: view.own, ..of };
        }
    }
    values
}

impl<'a> Memory<'a> {
    pub(crate) fn new(program: &'a Program) -> Self {
        Self { program, live: 0, values: storage(program), shares: HashMap::new(), sums: HashSet::new() }
    }

    /// Bytes held now.
    pub(crate) fn live(&self) -> u64 {
        self.live
    }

    /// Counts the instruction at this place. Returns the most bytes held while it runs.
    pub(crate) fn step(&mut self, at: usize) -> u64 {
        let Some(instruction) = self.program.instructions.get(at) else { return self.live };
        match *instruction {
            Instruction::Receive { slot, .. } => {
                let bytes = self.bytes(slot.value());
                match slot {
                    Slot::Value { value, micro_batch } => self.put(value, micro_batch),
                    Slot::Part { .. } => self.add(bytes),
                    Slot::Parameter { .. } | Slot::Buffer { .. } => {}
                }
                self.live.saturating_add(bytes)
            }
            Instruction::Send { slot, .. } => {
                let bytes = self.bytes(slot.value());
                let most = self.live.saturating_add(bytes);
                if let Slot::Part { .. } = slot {
                    self.remove(bytes);
                }
                most
            }
            Instruction::Run { node, micro_batch } => self.run(at, node, micro_batch),
            Instruction::Free { value, micro_batch } => {
                self.free(value, micro_batch);
                self.live
            }
            Instruction::Accumulate { reduction, part, value, micro_batch } => {
                if !self.sums.insert((reduction, part)) {
                    return self.live;
                }
                let bytes = self.of_parameter(reduction);
                self.add(bytes);
                // The first term is moved, not added.
                let moved = self.program.instructions.get(at + 1) == Some(&Instruction::Free { value, micro_batch });
                self.live - if moved { bytes } else { 0 }
            }
            Instruction::Reduce { reduction } => {
                let parts = self.program.reductions.get(reduction as usize).map_or(0, |r| r.parts.len());
                let most = self.live;
                self.remove(self.of_parameter(reduction).saturating_mul(parts.saturating_sub(1) as u64));
                most
            }
            Instruction::Update { reduction } => {
                let most = self.live;
                self.remove(self.of_parameter(reduction));
                most
            }
            // A copy is made for the medium, as for a message.
            Instruction::Offload { what, .. } => {
                let bytes = self.program.movable_bytes(what);
                let most = self.live.saturating_add(bytes);
                match what {
                    Movable::Value { value, micro_batch } => self.free(value, micro_batch),
                    _ => self.remove(bytes),
                }
                most
            }
            Instruction::Load { what, .. } => {
                let bytes = self.program.movable_bytes(what);
                match what {
                    Movable::Value { value, micro_batch } => self.put(value, micro_batch),
                    _ => self.add(bytes),
                }
                self.live.saturating_add(bytes)
            }
            Instruction::UpdateState { .. } | Instruction::Report { .. } | Instruction::Clip => self.live,
        }
    }

    /// Adds an operator's results. An elementwise operator overwrites an operand of the same size if that is freed
    /// afterwards.
    fn run(&mut self, at: usize, node: NodeId, micro_batch: u32) -> u64 {
        let program = self.program;
        let Some(Node { op, inputs, outputs, .. }) = program.nodes.get(&node) else { return self.live };
        let before = self.live;
        for v in outputs {
            self.put(*v, micro_batch);
        }
        let [output] = &outputs[..] else { return self.live };
        if self.live == before || !elementwise(op) {
            return self.live;
        }
        let size = self.live - before;
        let frees = program.instructions[at + 1..].iter().map_while(|i| match *i {
            Instruction::Free { value, micro_batch: m } if m == micro_batch => Some(value),
            _ => None,
        });
        let mut given = frees.filter(|v| inputs.contains(v) && v != output);
        let in_place = given.any(|v| {
            let shares = |of: &Bytes| self.shares.get(&(of.root, micro_batch)) == Some(&1);
            self.values.get(&v).is_some_and(|of| of.of_root == size && !of.stays && shares(of))
        });
        if in_place { before } else { self.live }
    }

    fn put(&mut self, v: ValueId, micro_batch: u32) {
        let Some(Bytes { root, of_root, stays, .. }) = self.values.get(&v).copied() else { return };
        let shares = self.shares.entry((root, micro_batch)).or_insert(u32::from(stays));
        *shares = shares.saturating_add(1);
        if *shares == 1 {
            self.add(of_root);
        }
    }

    fn free(&mut self, v: ValueId, micro_batch: u32) {
        let Some(Bytes { root, of_root, .. }) = self.values.get(&v).copied() else { return };
        let Entry::Occupied(mut shares) = self.shares.entry((root, micro_batch)) else { return };
        if *shares.get() > 1 {
            *shares.get_mut() -= 1;
        } else {
            shares.remove();
            self.remove(of_root);
        }
    }

    fn bytes(&self, v: ValueId) -> u64 {
        self.values.get(&v).map_or(0, |of| of.own)
    }

    fn of_parameter(&self, reduction: u32) -> u64 {
        self.program.reductions.get(reduction as usize).map_or(0, |r| self.bytes(r.parameter))
    }

    fn add(&mut self, bytes: u64) {
        self.live = self.live.saturating_add(bytes);
    }

    fn remove(&mut self, bytes: u64) {
        self.live = self.live.saturating_sub(bytes);
    }
}

impl Program {
    /// The most bytes of tensors that one pass holds at once, beside those that stay from pass to pass. It is the
    /// simulator's count. What kernels take for themselves, and messages that wait, are not among it.
    pub fn peak_bytes(&self) -> u64 {
        let mut memory = Memory::new(self);
        let most = (0..self.instructions.len()).map(|at| memory.step(at)).max().unwrap_or(0);
        // An expanded tensor takes its full size as soon as a kernel needs its elements side by side.
        let results = self.values.values().filter(|v| matches!(v.kind, ValueKind::Result { .. }));
        results.map(|v| v.ty.bytes() as u64).fold(most, u64::max)
    }

    /// Bytes of the activations that backward reads and that are computed twice, of the micro-batch that has most.
    pub fn recomputed_bytes(&self) -> u64 {
        let storage = storage(self);
        let backward = self.nodes.values().filter(|node| node.phase != Phase::Forward).flat_map(|node| &node.inputs);
        let read: HashSet<ValueId> = backward.filter_map(|v| storage.get(v)).map(|of| of.root).collect();
        let mut ran = HashSet::new();
        let mut bytes: BTreeMap<u32, u64> = BTreeMap::new();
        for i in &self.instructions {
            if let Instruction::Run { node, micro_batch } = *i
                && !ran.insert((node, micro_batch))
            {
                let outputs = self.nodes.get(&node).map_or(&[][..], |node| &node.outputs);
                let own = outputs.iter().filter_map(|v| storage.get(v).filter(|of| of.root == *v && read.contains(v)));
                let sum = bytes.entry(micro_batch).or_default();
                *sum = own.fold(*sum, |sum, of| sum.saturating_add(of.own));
            }
        }
        bytes.into_values().max().unwrap_or(0)
    }
}

/// Whether backends run the operator in place.
fn elementwise(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::BinaryScalar(_)
            | Op::Gelu(_)
            | Op::GeluBackward(_)
            | Op::ThresholdBackward(_)
            | Op::Dropout(_)
            | Op::DropoutBackward(_)
    )
}
