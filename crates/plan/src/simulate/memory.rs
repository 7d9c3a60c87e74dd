//! The bytes that a peer holds.

use std::collections::HashSet;

use fusionllm_graph::{Node, Op, ValueId};

use super::SimulateOptions;
use super::messages::value_type;
use crate::error::PlanError;
use crate::graph_facts::shares_storage;
use crate::program::Program;

/// Bytes held while a Program runs. A reshaped, permuted or expanded tensor shares the bytes of its operand.
pub(super) struct Memory {
    live: u64,
    /// By value number, less the first: its bytes, and the value whose bytes it shares.
    values: Vec<(u64, u32)>,
    first: u32,
    /// By value and micro-batch: how many of the values held share its bytes.
    shares: Vec<u16>,
    micro_batches: usize,
    /// Sums that have begun, by reduction and part.
    sums: HashSet<(u32, u32)>,
}

impl Memory {
    pub(super) fn new(program: &Program, options: &SimulateOptions) -> Result<Self, PlanError> {
        let first = program.values.keys().next().map_or(0, |v| v.0);
        let last = program.values.keys().next_back().map_or(0, |v| v.0);
        let mut values = vec![(0, 0); (last - first) as usize + 1];
        for (v, value) in &program.values {
            values[(v.0 - first) as usize] = (value.ty.bytes() as u64, v.0 - first);
        }
        for node in program.nodes.values() {
            let view = shares_storage(&node.op);
            if let (true, [input], [output]) = (view, &node.inputs[..], &node.outputs[..]) {
                let root = values[(input.0 - first) as usize].1;
                values[(output.0 - first) as usize].1 = root;
            }
        }
        let bytes = |v: ValueId| Ok::<u64, PlanError>(value_type(program, v)?.bytes() as u64);
        let mut live = 0;
        for h in &program.holdings {
            live += bytes(h.value)?;
        }
        for (_, r) in program.owned() {
            live += bytes(r.parameter)? * options.optimizer.slots().len() as u64;
        }
        let micro_batches = program.micro_batches as usize;
        let mut memory = Self {
            live,
            shares: vec![0; values.len() * micro_batches],
            values,
            first,
            micro_batches,
            sums: HashSet::new(),
        };
        // Tensors that stay from step to step are never freed through a view.
        for h in &program.holdings {
            let root = (h.value.0 - first) as usize;
            memory.shares[root * micro_batches..(root + 1) * micro_batches].fill(1);
        }
        Ok(memory)
    }

    /// Bytes held now.
    pub(super) fn live(&self) -> u64 {
        self.live
    }

    fn share(&mut self, v: ValueId, micro_batch: u32) -> Option<(&mut u16, u64)> {
        let root = self.values.get(v.0.checked_sub(self.first)? as usize)?.1 as usize;
        let bytes = self.values[root].0;
        let slot = self.shares.get_mut(root * self.micro_batches + micro_batch as usize)?;
        Some((slot, bytes))
    }

    pub(super) fn put(&mut self, v: ValueId, micro_batch: u32) {
        if let Some((shares, bytes)) = self.share(v, micro_batch) {
            *shares += 1;
            let fresh = *shares == 1;
            self.live += if fresh { bytes } else { 0 };
        }
    }

    pub(super) fn free(&mut self, v: ValueId, micro_batch: u32) {
        if let Some((shares, bytes)) = self.share(v, micro_batch)
            && *shares > 0
        {
            *shares -= 1;
            let gone = *shares == 0;
            self.live -= if gone { bytes } else { 0 };
        }
    }

    /// Adds an operator's results, and returns the bytes held while it runs. An elementwise operator overwrites an
    /// operand of the same size if that is freed afterwards.
    pub(super) fn run(&mut self, node: &Node, micro_batch: u32, frees: impl Iterator<Item = ValueId>) -> u64 {
        let Node { op, inputs, outputs, .. } = node;
        let before = self.live;
        for v in outputs {
            self.put(*v, micro_batch);
        }
        let [output] = &outputs[..] else { return self.live };
        if self.live == before || !elementwise(op) {
            return self.live;
        }
        let size = self.live - before;
        let mut given = frees.filter(|v| inputs.contains(v) && v != output);
        let in_place = given.any(|v| self.share(v, micro_batch).is_some_and(|(shares, b)| *shares == 1 && b == size));
        if in_place { before } else { self.live }
    }

    /// Adds a term to a sum; returns whether it is the first.
    pub(super) fn accumulate(&mut self, reduction: u32, part: u32, bytes: u64) -> bool {
        let first = self.sums.insert((reduction, part));
        self.live += if first { bytes } else { 0 };
        first
    }

    pub(super) fn add(&mut self, bytes: u64) {
        self.live += bytes;
    }

    pub(super) fn remove(&mut self, bytes: u64) {
        self.live = self.live.saturating_sub(bytes);
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
