//! The instructions of one peer.

use foldhash::{HashSet, HashSetExt};
use fusionllm_graph::{NodeId, StateUpdate, ValueId, ValueKind};
use fusionllm_program::{Address, Instruction, PassKind, PeerId};

use super::compiler::{Compiler, Pass};
use super::uses::Uses;
use crate::plan::Stage;

/// Writes one peer's instructions.
pub(super) struct Emitter<'a> {
    c: &'a Compiler<'a>,
    peer: PeerId,
    uses: &'a Uses,
    /// Values at hand, by micro-batch. A changing buffer is at hand once it has the content that this micro-batch must
    /// read.
    present: HashSet<(ValueId, u32)>,
    /// The gradient parts (parameter and part) that are complete, of those that are sent.
    complete: HashSet<(ValueId, u32)>,
    pub(super) out: Vec<Instruction>,
}

impl<'a> Emitter<'a> {
    pub(super) fn new(c: &'a Compiler<'a>, peer: PeerId, uses: &'a Uses) -> Self {
        Self { c, peer, uses, present: HashSet::new(), complete: HashSet::new(), out: Vec::new() }
    }

    pub(super) fn pass(&mut self, pass: &Pass, micro_batch: u32) {
        for n in &pass.nodes {
            self.run(*n, micro_batch);
            for u in pass.updates.get(n).into_iter().flatten() {
                self.update(*u, micro_batch);
            }
        }
    }

    /// Runs one of this peer's own nodes, and sends its results to the peers that need them.
    fn run(&mut self, node: NodeId, micro_batch: u32) {
        self.apply(node, micro_batch);
        let turns = self.c.stage(node).peers.len();
        for &value in &self.c.graph.node(node).outputs {
            for to in self.uses.readers(value, micro_batch) {
                self.out.push(Instruction::Send { tensor: Address::Value { value, micro_batch }, to });
            }
            for (parameter, part) in self.uses.parts(value, micro_batch) {
                self.out.push(Instruction::Accumulate { parameter, part, value, micro_batch });
                if micro_batch as usize + turns >= self.c.plan.micro_batches as usize {
                    self.send_part(parameter, part);
                }
            }
            for &report in self.uses.reports.get(&value).into_iter().flatten() {
                self.out.push(Instruction::Report { report, value, micro_batch });
            }
        }
    }

    /// Sends a complete part to the owner, while the rest of the step still runs. Parts that are sent as one wait for
    /// the last of them.
    fn send_part(&mut self, parameter: ValueId, part: u32) {
        let reduction = &self.c.reductions[&parameter];
        let (joined, to) = (reduction.joined(part), reduction.owner);
        self.complete.insert((parameter, part));
        if to == self.peer || !joined.clone().all(|p| self.complete.contains(&(parameter, p))) {
            return;
        }
        self.out.extend(joined.clone().skip(1).map(|part| Instruction::Join { parameter, part }));
        self.out.push(Instruction::Send { tensor: Address::Part { parameter, part: joined.start }, to });
    }

    fn apply(&mut self, node: NodeId, micro_batch: u32) {
        let n = self.c.graph.node(node);
        for v in &n.inputs {
            self.ensure(*v, micro_batch);
        }
        self.out.push(Instruction::Run { node, micro_batch });
        self.present.extend(n.outputs.iter().map(|v| (*v, micro_batch)));
    }

    /// Makes a value available, by receiving it or by running a cheap node again.
    fn ensure(&mut self, v: ValueId, micro_batch: u32) {
        if self.present.contains(&(v, micro_batch)) {
            return;
        }
        match self.c.graph.producer(v) {
            Some(n) => match self.c.stage(n).peer(micro_batch) {
                home if home != self.peer && self.c.cheap[n.index()] => self.apply(n, micro_batch),
                home => self.receive(v, micro_batch, home),
            },
            None if self.c.graph.value(v).kind == ValueKind::Input => self.receive(v, micro_batch, PeerId::BROKER),
            None => self.ensure_state(v, micro_batch),
        }
    }

    fn receive(&mut self, value: ValueId, micro_batch: u32, from: PeerId) {
        self.present.insert((value, micro_batch));
        self.out.push(Instruction::Receive { tensor: Address::Value { value, micro_batch }, from });
    }

    /// Receives a changing buffer, if another peer ran the previous micro-batch.
    fn ensure_state(&mut self, buffer: ValueId, micro_batch: u32) {
        let (Some(stage), Some(before)) = (self.changes_in(buffer), micro_batch.checked_sub(1)) else { return };
        let from = stage.peer(before);
        if from != self.peer && self.present.insert((buffer, micro_batch)) {
            self.out.push(Instruction::Receive { tensor: Address::BufferAfter { buffer, micro_batch: before }, from });
        }
    }

    /// Changes a buffer, and sends its content to the peer that runs the next micro-batch.
    fn update(&mut self, StateUpdate { buffer, value }: StateUpdate, micro_batch: u32) {
        self.ensure_state(buffer, micro_batch);
        self.out.push(Instruction::UpdateState { buffer, value, micro_batch });
        let Some(stage) = self.changes_in(buffer) else { return };
        let readers = match micro_batch + 1 {
            next if next < self.c.plan.micro_batches => vec![stage.peer(next)],
            _ => self.c.holders[&buffer].clone(),
        };
        for to in readers.into_iter().filter(|p| *p != self.peer) {
            self.out.push(Instruction::Send { tensor: Address::BufferAfter { buffer, micro_batch }, to });
        }
    }

    fn changes_in(&self, buffer: ValueId) -> Option<&'a Stage> {
        self.c.changing.get(&buffer).map(|s| &self.c.plan.stages[*s as usize])
    }

    /// Writes the instructions after the last micro-batch. All copies of a buffer get the same content. In training,
    /// owners reduce gradients, clip and apply them, and send the new values to the other holders.
    pub(super) fn finish_pass(&mut self, kind: PassKind) {
        let (c, peer, out) = (self.c, self.peer, &mut self.out);
        let last = c.plan.micro_batches - 1;
        for (&buffer, &stage) in &c.changing {
            let from = c.plan.stages[stage as usize].peer(last);
            if from != peer && c.holders[&buffer].contains(&peer) {
                out.push(Instruction::Receive { tensor: Address::BufferAfter { buffer, micro_batch: last }, from });
            }
        }
        if !kind.trains() {
            return;
        }
        let owned = || c.reductions.iter().filter(|(_, r)| r.owner == peer).map(|(parameter, r)| (*parameter, r));
        for (parameter, r) in owned() {
            let from = r.terms().map(|(_, part)| (part, r.parts[part as usize].peer));
            for (part, from) in from.filter(|(_, from)| *from != peer) {
                out.push(Instruction::Receive { tensor: Address::Part { parameter, part }, from });
            }
            out.push(Instruction::Reduce { parameter });
        }
        out.push(Instruction::Clip);
        for (parameter, _) in owned() {
            out.push(Instruction::Update { parameter });
            for &to in &c.holders[&parameter][1..] {
                out.push(Instruction::Send { tensor: Address::Held { value: parameter }, to });
            }
        }
        for (&value, r) in c.reductions.iter().filter(|(parameter, _)| c.holders[parameter][1..].contains(&peer)) {
            out.push(Instruction::Receive { tensor: Address::Held { value }, from: r.owner });
        }
    }
}
