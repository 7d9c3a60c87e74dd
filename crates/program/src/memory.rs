//! The bytes that a peer holds while it runs a Program.

use std::collections::BTreeMap;
use std::collections::hash_map::Entry;

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use fusionllm_graph::{Node, NodeId, Op, Phase, Value, ValueId, ValueKind};

use crate::{Access, Address, Instruction, Program};

/// The tensors of a pass, in bytes: values of micro-batches, sums of gradients, copies for messages, and loaded
/// tensors. Tensors that stay in memory from pass to pass are not among them. A reshaped, permuted or expanded tensor
/// shares the bytes of its operand.
///
/// The Program may be a stranger's. So sums stop at the largest number, and nothing is allocated for a tensor that it
/// does not have.
#[derive(Debug)]
pub struct Memory<'a> {
    program: &'a Program,
    live: u64,
    values: HashMap<ValueId, Bytes>,
    /// By value and micro-batch: how many of the values present share its bytes. Those that stay from pass to pass are
    /// always among them, so they are never freed through a view.
    shares: HashMap<(ValueId, u32), u32>,
    /// Sums that have begun.
    sums: HashSet<Address>,
}

/// The bytes of a value.
#[derive(Debug, Clone, Copy)]
pub struct Bytes {
    /// Those of a tensor of its type.
    pub own: u64,
    /// The value that owns these bytes, if this one is a view.
    pub root: ValueId,
    /// Those of the root.
    pub of_root: u64,
    /// Whether the root stays from pass to pass.
    pub stays: bool,
}

/// Whether the operator's result shares its operand's storage: a reshape, a permutation or an expansion.
pub fn shares_storage(op: &Op) -> bool {
    matches!(op, Op::Reshape(_) | Op::Permute(_) | Op::Expand(_))
}

/// The bytes of a Program's values.
pub fn storage(program: &Program) -> HashMap<ValueId, Bytes> {
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
    /// The memory before the first instruction.
    pub fn new(program: &'a Program) -> Self {
        Self { program, live: 0, values: storage(program), shares: HashMap::new(), sums: HashSet::new() }
    }

    /// Bytes held now.
    pub fn live(&self) -> u64 {
        self.live
    }

    /// Counts the instruction at this place. Returns the most bytes held while it runs.
    pub fn step(&mut self, at: usize) -> u64 {
        let program = self.program;
        let Some(i) = program.instructions.get(at) else { return self.live };
        let before = self.live;
        let mut most = before;
        i.effects(program, 0, |tensor, access| {
            match access {
                Access::Make | Access::Load(_) => self.put(tensor),
                Access::Add if self.sums.insert(tensor) => self.put(tensor),
                Access::Take | Access::Free | Access::Offload(_) => self.remove(tensor),
                Access::Read | Access::Add | Access::Change | Access::Replace => {}
            }
            most = most.max(self.live);
        });
        match *i {
            Instruction::Run { node, micro_batch } if self.in_place(at, node, micro_batch, self.live - before) => {
                before
            }
            // The operator before it may have overwritten the value.
            Instruction::Free { .. } => self.live,
            // The first term is moved, not added.
            Instruction::Accumulate { value, micro_batch, .. }
                if self.program.instructions.get(at + 1) == Some(&Instruction::Free { value, micro_batch }) =>
            {
                before
            }
            // A copy is made for the message or the medium.
            Instruction::Receive { tensor, .. }
            | Instruction::Send { tensor, .. }
            | Instruction::Offload { tensor, .. }
            | Instruction::Load { tensor, .. } => most.saturating_add(self.program.bytes(tensor)),
            _ => most,
        }
    }

    /// Whether the operator at this place overwrites an operand: one of the size of its result, which is freed
    /// afterwards. Elementwise operators do.
    fn in_place(&self, at: usize, node: NodeId, micro_batch: u32, size: u64) -> bool {
        let program = self.program;
        let Some(Node { op, inputs, outputs, .. }) = program.nodes.get(&node) else { return false };
        let [output] = &outputs[..] else { return false };
        if size == 0 || !elementwise(op) {
            return false;
        }
        let frees = program.instructions[at + 1..].iter().map_while(|i| match *i {
            Instruction::Free { value, micro_batch: m } if m == micro_batch => Some(value),
            _ => None,
        });
        let mut given = frees.filter(|v| inputs.contains(v) && v != output);
        given.any(|v| {
            let shares = |of: &Bytes| self.shares.get(&(of.root, micro_batch)) == Some(&1);
            self.values.get(&v).is_some_and(|of| of.of_root == size && !of.stays && shares(of))
        })
    }

    fn put(&mut self, tensor: Address) {
        let bytes = match tensor {
            Address::Value { value, micro_batch } => {
                let Some(Bytes { root, of_root, stays, .. }) = self.values.get(&value).copied() else { return };
                let shares = self.shares.entry((root, micro_batch)).or_insert(u32::from(stays));
                *shares = shares.saturating_add(1);
                if *shares == 1 { of_root } else { 0 }
            }
            _ => self.program.bytes(tensor),
        };
        self.live = self.live.saturating_add(bytes);
    }

    fn remove(&mut self, tensor: Address) {
        let bytes = match tensor {
            Address::Value { value, micro_batch } => {
                let Some(Bytes { root, of_root, .. }) = self.values.get(&value).copied() else { return };
                let Entry::Occupied(mut shares) = self.shares.entry((root, micro_batch)) else { return };
                match shares.get() {
                    2.. => {
                        *shares.get_mut() -= 1;
                        0
                    }
                    _ => {
                        shares.remove();
                        of_root
                    }
                }
            }
            _ => self.program.bytes(tensor),
        };
        self.live = self.live.saturating_sub(bytes);
    }
}

impl Program {
    /// The most bytes of tensors that one pass holds at once, beside those that stay from pass to pass. The simulator
    /// counts the same way. The count leaves out memory that kernels take for themselves, and messages that wait.
    pub fn peak_bytes(&self) -> u64 {
        let mut memory = Memory::new(self);
        let most = (0..self.instructions.len()).map(|at| memory.step(at)).max().unwrap_or(0);
        // An expanded tensor takes its full size as soon as a kernel needs its elements side by side.
        let results = self.values.values().filter(|v| matches!(v.kind, ValueKind::Result { .. }));
        results.map(|v| v.ty.bytes() as u64).fold(most, u64::max)
    }

    /// Bytes of the activations that backward reads and that are computed twice, of the micro-batch that has the most
    /// of them.
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
