//! Validation of a Program that came over the network.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use fusionllm_compress::Codec;
use fusionllm_graph::{DType, TensorType, Value, ValueId, ValueKind};

use super::{GradientPart, Instruction, Medium, Movable, PeerId, Program, Reduction, Slot, takes_codec};
use crate::error::PlanError;

type Check = Result<(), String>;

fn want<R: Into<String>>(condition: bool, reason: impl FnOnce() -> R) -> Check {
    if condition { Ok(()) } else { Err(reason().into()) }
}

impl Program {
    /// Checks everything that running the Program relies on, so that a program from a stranger can be trusted.
    ///
    /// It checks every reference, and every type by the operator's own rule. Each value exists when it is used, and is
    /// freed. No message is sent or expected twice. Each gradient is summed over all of this peer's
    /// micro-batches, in order, before it is applied.
    pub fn validate(&self) -> Result<(), PlanError> {
        let parts = [Self::check_values, Self::check_nodes, Self::check_coded];
        parts.iter().try_for_each(|check| check(self)).map_err(PlanError::Program)?;
        let mut walk = Walk::new(self).map_err(PlanError::Program)?;
        for (at, i) in self.instructions.iter().enumerate() {
            walk.step(i)
                .map_err(|reason| PlanError::Program(format!("instruction {at}, `{}`: {reason}", self.show(i))))?;
        }
        walk.end().map_err(PlanError::Program)
    }

    fn check_values(&self) -> Check {
        want(self.peer != PeerId::BROKER, || "it is for the broker, which runs no program")?;
        want(self.micro_batches > 0, || "it has no micro-batches")?;
        let mut reports = BTreeSet::new();
        for name in &self.reports {
            want(reports.insert(name), || format!("two reports are named {name:?}"))?;
        }
        let mut names = BTreeSet::new();
        for value in self.values.values() {
            let (name, ty) = (&value.name, &value.ty);
            want(names.insert(name), || format!("two values are named {name:?}"))?;
            ty.check().map_err(|reason| format!("value {name:?}: {reason}"))?;
            match value.kind {
                ValueKind::RngKey => want(*ty == TensorType::new(DType::I64, []), || {
                    format!("random key {name:?} is {ty}, but must be an i64 scalar")
                })?,
                ValueKind::Parameter(_) => {
                    want(ty.dtype.is_float(), || format!("parameter {name:?} is {ty}, but only floats are trained"))?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_coded(&self) -> Check {
        for v in &self.coded {
            let value = self.values.get(v).filter(|v| matches!(v.kind, ValueKind::Result { .. }));
            want(value.is_some_and(|v| takes_codec(v.ty.dtype)), || {
                format!("{} has a codec, but is not an f32 or bf16 result of an operator", self.name(*v))
            })?;
        }
        for (gradient, of) in &self.masks {
            let numel = |v: ValueId| self.values.get(&v).filter(|_| self.coded.contains(&v)).map(|v| v.ty.numel());
            want(numel(*gradient).is_some() && of.iter().all(|v| numel(*v) == numel(*gradient)), || {
                format!("{} shares a mask, but not with tensors of its size that have a codec", self.name(*gradient))
            })?;
        }
        self.check_codecs(&self.codecs)
    }

    pub(crate) fn check_codecs(&self, codecs: &BTreeMap<PeerId, Codec>) -> Check {
        for (to, codec) in codecs {
            want(*to != self.peer && *to != PeerId::BROKER, || "a codec must be for a link to another peer")?;
            let sound = !matches!(codec, Codec::TopK(top) if !(top.ratio >= 1.0 && top.ratio.is_finite()));
            want(sound, || format!("the codec for {to} has a ratio below 1"))?;
        }
        Ok(())
    }

    fn check_nodes(&self) -> Check {
        let types = |ids: &[ValueId]| ids.iter().map(|v| self.values.get(v).map(|v| &v.ty)).collect::<Option<Vec<_>>>();
        for (id, node) in &self.nodes {
            let at = || format!("node {id} {:?} ({})", node.name, node.op.name());
            let (Some(inputs), Some(outputs)) = (types(&node.inputs), types(&node.outputs)) else {
                return Err(format!("{} names a value that does not exist", at()));
            };
            let made = node.op.infer(&inputs).map_err(|e| format!("{}: {e}", at()))?;
            want(made.iter().eq(outputs), || format!("{}: its results do not have the operator's result types", at()))?;
            for (index, v) in (0..).zip(&node.outputs) {
                let here = ValueKind::Result { node: *id, index };
                want(self.values[v].kind == here, || format!("{}: {v} does not name it as its producer", at()))?;
            }
        }
        Ok(())
    }
}

/// The state of a gradient's part.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    /// Summed here over `added` micro-batches. The next is `next` or later.
    Sum { added: u32, next: u32 },
    /// Received from the peer that sums it.
    Received,
    /// Sent to the owner, or added to the gradient.
    Taken,
}

/// The state of an owned gradient.
#[derive(Clone, Copy, PartialEq)]
enum Gradient {
    Open,
    Reduced,
    Applied,
}

/// The state of an executor, without the numbers.
struct Walk<'a> {
    program: &'a Program,
    /// The values that stay here, and whether this peer owns them.
    held: BTreeMap<ValueId, bool>,
    /// Index of each parameter's reduction.
    reductions: BTreeMap<ValueId, u32>,
    present: HashSet<(ValueId, u32)>,
    seen: HashSet<Instruction>,
    awaited: HashSet<Slot>,
    parts: Vec<Vec<Part>>,
    gradients: Vec<Gradient>,
    /// What is not in memory, and where it is instead.
    away: BTreeMap<Movable, Medium>,
}

impl<'a> Walk<'a> {
    fn new(program: &'a Program) -> Result<Self, String> {
        let kind = |v: ValueId| program.values.get(&v).map(|v| &v.kind);
        let mut held = BTreeMap::new();
        for h in &program.holdings {
            let keeps = match kind(h.value) {
                Some(ValueKind::Parameter(_) | ValueKind::Buffer(_)) => true,
                Some(ValueKind::Constant) => !h.owner,
                _ => false,
            };
            want(keeps && held.insert(h.value, h.owner).is_none(), || {
                format!("it cannot keep {}", program.name(h.value))
            })?;
        }
        let mut reductions = BTreeMap::new();
        for (i, r) in (0..).zip(&program.reductions) {
            let ty = |v: ValueId| program.values.get(&v).map(|v| &v.ty);
            let fits = matches!(kind(r.parameter), Some(ValueKind::Parameter(_)))
                && !r.parts.is_empty()
                && r.parts.iter().all(|p| ty(p.value) == ty(r.parameter) && p.micro_batches > 0)
                && reductions.insert(r.parameter, i).is_none();
            want(fits, || format!("the gradient parts of {} do not fit it", program.name(r.parameter)))?;
            let owner = held.get(&r.parameter) == Some(&true);
            want(owner == (r.owner == program.peer), || {
                format!("the owner of {} is not consistent", program.name(r.parameter))
            })?;
        }
        Ok(Self {
            program,
            away: program.resting(),
            held,
            reductions,
            present: HashSet::new(),
            seen: HashSet::new(),
            awaited: HashSet::new(),
            parts: program.reductions.iter().map(|r| vec![Part::Sum { added: 0, next: 0 }; r.parts.len()]).collect(),
            gradients: vec![Gradient::Open; program.reductions.len()],
        })
    }

    fn step(&mut self, i: &Instruction) -> Check {
        let may_repeat = matches!(
            i,
            // What was freed may be computed again.
            Instruction::Run { .. } | Instruction::Free { .. } | Instruction::Offload { .. } | Instruction::Load { .. }
        );
        want(may_repeat || self.seen.insert(*i), || "it is repeated")?;
        if let Some(m) = i.micro_batch() {
            want(m < self.program.micro_batches, || "its micro-batch does not exist")?;
        }
        match *i {
            Instruction::Receive { slot, from } => self.receive(slot, from),
            Instruction::Send { slot, to } => self.send(slot, to),
            Instruction::Run { node, micro_batch } => {
                let node = self.program.nodes.get(&node).ok_or("the node does not exist")?;
                for v in &node.inputs {
                    self.available(*v, micro_batch)?;
                }
                node.outputs.iter().try_for_each(|v| self.put(*v, micro_batch))
            }
            Instruction::Free { value, micro_batch } => {
                self.in_memory(Movable::Value { value, micro_batch })?;
                want(self.present.remove(&(value, micro_batch)), || "the value is not present")
            }
            Instruction::Accumulate { reduction, part, value, micro_batch } => {
                self.available(value, micro_batch)?;
                let me = self.program.peer;
                self.in_memory(Movable::Part { reduction, part })?;
                let (r, state) = self.part(reduction, part)?;
                let p = &r.parts[part as usize];
                want((p.peer, p.value) == (me, value), || "it is not this peer's part")?;
                match *state {
                    Part::Sum { added, next } if micro_batch >= next => {
                        *state = Part::Sum { added: added + 1, next: micro_batch + 1 };
                        Ok(())
                    }
                    _ => Err("micro-batches must be added once, in order".into()),
                }
            }
            Instruction::UpdateState { buffer, value, micro_batch } => {
                self.available(value, micro_batch)?;
                let (old, new) = (&self.value(buffer)?, &self.value(value)?);
                let fits = matches!(old.kind, ValueKind::Buffer(_)) && old.ty == new.ty;
                want(fits && self.held.contains_key(&buffer), || "the value does not fit a buffer that is kept here")
            }
            Instruction::Report { report, value, micro_batch } => {
                self.available(value, micro_batch)?;
                want(self.value(value)?.ty.numel() == 1, || "it is not a scalar")?;
                want((report as usize) < self.program.reports.len(), || "there is no such report")
            }
            Instruction::Reduce { reduction } => {
                want(!self.seen.contains(&Instruction::Clip), || "it comes after the verdict")?;
                self.advance(reduction, Gradient::Open, Gradient::Reduced)?;
                (0..self.parts[reduction as usize].len() as u32).try_for_each(|part| self.take(reduction, part))
            }
            // `seen` already refuses a second one.
            Instruction::Clip => Ok(()),
            Instruction::Update { reduction } => {
                want(self.seen.contains(&Instruction::Clip), || "it comes before the verdict")?;
                self.for_update(reduction)?;
                self.advance(reduction, Gradient::Reduced, Gradient::Applied)
            }
            Instruction::Offload { what, to } => {
                self.exists(what)?;
                want(self.away.insert(what, to).is_none(), || "it is away already")
            }
            Instruction::Load { what, from } => want(self.away.remove(&what) == Some(from), || "it is not there"),
        }
    }

    fn in_memory(&self, what: Movable) -> Check {
        want(!self.away.contains_key(&what), || "a tensor that it needs is not in memory")
    }

    /// Everything that an update changes must be in memory.
    fn for_update(&self, reduction: u32) -> Check {
        let parameter = self.program.reductions.get(reduction as usize).map(|r| r.parameter);
        let of = |what: &Movable| match *what {
            Movable::Gradient { reduction: r } | Movable::Slot { reduction: r, .. } => r == reduction,
            Movable::Parameter { parameter: p } => parameter == Some(p),
            Movable::Value { .. } | Movable::Part { .. } => false,
        };
        want(!self.away.keys().any(of), || "a tensor that it needs is not in memory")
    }

    /// Whether there is a tensor to move.
    fn exists(&mut self, what: Movable) -> Check {
        let exists = match what {
            Movable::Value { value, micro_batch } => self.present.contains(&(value, micro_batch)),
            Movable::Part { reduction, part } => {
                matches!(self.part(reduction, part)?.1, Part::Sum { added: 1.., .. } | Part::Received)
            }
            Movable::Gradient { reduction } => self.gradients.get(reduction as usize) == Some(&Gradient::Reduced),
            Movable::Parameter { parameter } => {
                let kind = &self.value(parameter)?.kind;
                matches!(kind, ValueKind::Parameter(_)) && self.held.contains_key(&parameter)
            }
            Movable::Slot { reduction, .. } => {
                let r = self.program.reductions.get(reduction as usize);
                r.is_some_and(|r| r.owner == self.program.peer)
            }
        };
        want(exists, || "there is nothing to move")
    }

    fn receive(&mut self, slot: Slot, from: PeerId) -> Check {
        want(from != self.program.peer, || "it comes from this peer itself")?;
        want(self.awaited.insert(slot), || "it is received twice")?;
        match slot {
            Slot::Value { value, micro_batch } => {
                match self.value(value)?.kind {
                    ValueKind::Input => want(from == PeerId::BROKER, || "an input must come from the broker")?,
                    ValueKind::Result { .. } => want(from != PeerId::BROKER, || "a result must come from a peer")?,
                    _ => return Err("it does not differ between micro-batches".into()),
                }
                self.put(value, micro_batch)
            }
            Slot::Part { parameter, part } => {
                let me = self.program.peer;
                let (r, state) = self.part(self.reduction(parameter)?, part)?;
                want(r.owner == me && r.parts[part as usize].peer == from, || "it is not for this peer")?;
                *state = Part::Received;
                Ok(())
            }
            Slot::Parameter { parameter } => {
                let kind = &self.value(parameter)?.kind;
                let copy = matches!(kind, ValueKind::Parameter(_)) && self.held.get(&parameter) == Some(&false);
                // The new value takes the place of one that is away.
                self.away.remove(&Movable::Parameter { parameter });
                want(copy && from != PeerId::BROKER, || "this peer keeps no copy of it")
            }
            Slot::Buffer { buffer, .. } => want(
                self.keeps_buffer(buffer)? && from != PeerId::BROKER,
                || "this peer does not keep the buffer, or a peer does not send it",
            ),
        }
    }

    fn send(&mut self, slot: Slot, to: PeerId) -> Check {
        want(to != self.program.peer && to != PeerId::BROKER, || "it must go to another peer")?;
        match slot {
            Slot::Value { value, micro_batch } => {
                self.in_memory(Movable::Value { value, micro_batch })?;
                want(self.present.contains(&(value, micro_batch)), || "the value is not present")
            }
            Slot::Part { parameter, part } => {
                let reduction = self.reduction(parameter)?;
                let (r, _) = self.part(reduction, part)?;
                let ours = r.parts[part as usize].peer == self.program.peer;
                want(ours && r.owner == to, || "the part is not this peer's, or the receiver does not own it")?;
                self.take(reduction, part)
            }
            Slot::Parameter { parameter } => {
                self.in_memory(Movable::Parameter { parameter })?;
                let reduction = self.reduction(parameter)?;
                want(self.gradients[reduction as usize] == Gradient::Applied, || "it is not updated yet")
            }
            Slot::Buffer { buffer, .. } => want(self.keeps_buffer(buffer)?, || "this peer does not keep the buffer"),
        }
    }

    /// What must be done at the end.
    fn end(&self) -> Check {
        want(self.away == self.program.resting(), || "what was moved is not back where it was at the beginning")?;
        if let Some((v, m)) = self.present.iter().min() {
            return Err(format!("{} of micro-batch {m} is never freed", self.program.name(*v)));
        }
        for ((r, parts), gradient) in self.program.reductions.iter().zip(&self.parts).zip(&self.gradients) {
            let mut ours = r.parts.iter().zip(parts).filter(|(p, _)| p.peer == self.program.peer);
            let left = ours.any(|(_, state)| *state != Part::Taken);
            let applied = r.owner != self.program.peer || *gradient == Gradient::Applied;
            want(!left && applied, || format!("the gradient of {} is not applied", self.program.name(r.parameter)))?;
        }
        Ok(())
    }

    fn value(&self, v: ValueId) -> Result<&'a Value, String> {
        self.program.values.get(&v).ok_or_else(|| format!("{v} does not exist"))
    }

    fn available(&self, v: ValueId, micro_batch: u32) -> Check {
        self.in_memory(Movable::Value { value: v, micro_batch })?;
        self.in_memory(Movable::Parameter { parameter: v })?;
        let there = self.present.contains(&(v, micro_batch))
            || self.held.contains_key(&v)
            || self.value(v)?.kind == ValueKind::RngKey;
        want(there, || format!("{} is not present", self.program.name(v)))
    }

    fn keeps_buffer(&self, v: ValueId) -> Result<bool, String> {
        Ok(matches!(self.value(v)?.kind, ValueKind::Buffer(_)) && self.held.contains_key(&v))
    }

    fn put(&mut self, v: ValueId, micro_batch: u32) -> Check {
        let program = self.program;
        want(self.present.insert((v, micro_batch)), || format!("{} is present already", program.name(v)))
    }

    fn reduction(&self, parameter: ValueId) -> Result<u32, String> {
        self.reductions.get(&parameter).copied().ok_or_else(|| "it has no gradient here".into())
    }

    fn part(&mut self, reduction: u32, part: u32) -> Result<(&'a Reduction, &mut Part), String> {
        let r = self.program.reductions.get(reduction as usize);
        let state = self.parts.get_mut(reduction as usize).and_then(|parts| parts.get_mut(part as usize));
        r.zip(state).ok_or_else(|| "there is no such part".into())
    }

    /// Uses up a part, which must be complete.
    fn take(&mut self, reduction: u32, part: u32) -> Check {
        let me = self.program.peer;
        let (r, state) = self.part(reduction, part)?;
        let GradientPart { peer, micro_batches, .. } = r.parts[part as usize];
        let whole = match *state {
            Part::Sum { added, .. } => peer == me && added == micro_batches,
            Part::Received => peer != me,
            Part::Taken => false,
        };
        want(whole, || format!("part {part} is not complete"))?;
        *state = Part::Taken;
        self.in_memory(Movable::Part { reduction, part })
    }

    fn advance(&mut self, reduction: u32, from: Gradient, to: Gradient) -> Check {
        let r = self.program.reductions.get(reduction as usize);
        want(r.is_some_and(|r| r.owner == self.program.peer), || "this peer does not own it")?;
        let state = &mut self.gradients[reduction as usize];
        want(*state == from, || "its gradient is in another state")?;
        *state = to;
        Ok(())
    }
}
