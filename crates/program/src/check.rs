//! Validation of a Program that came over the network.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use foldhash::{HashSet, HashSetExt};
use fusionllm_compress::Codec;
use fusionllm_graph::{DType, TensorType, Value, ValueId, ValueKind};

use crate::ProgramError;
use crate::optimizer::MAX_SLOTS;
use crate::{Access, Address, GradientPart, Instruction, Medium, PeerId, Program, takes_codec};

/// Most parts of a gradient times those of a bracket: the time to check them grows with it.
const MAX_BRACKETED: u64 = 1 << 28;

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
    pub fn validate(&self) -> Result<(), ProgramError> {
        let parts = [Self::check_values, Self::check_nodes, Self::check_coded];
        parts.iter().try_for_each(|check| check(self)).map_err(ProgramError)?;
        let mut walk = Walk::new(self).map_err(ProgramError)?;
        for (at, i) in self.instructions.iter().enumerate() {
            walk.step(i).map_err(|reason| ProgramError(format!("instruction {at}, `{}`: {reason}", self.show(i))))?;
        }
        walk.end().map_err(ProgramError)
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
                ValueKind::Parameter(_) | ValueKind::Frozen(_) => {
                    want(ty.dtype.is_float(), || format!("parameter {name:?} is {ty}, but parameters are floats"))?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_coded(&self) -> Check {
        for v in &self.coded {
            let value = self.values.get(v).filter(|v| matches!(v.kind, ValueKind::Result { .. }));
            want(value.is_some_and(|v| takes_codec(&v.ty)), || {
                format!("{} has a codec, but is not a large f32 or bf16 result of an operator", self.name(*v))
            })?;
        }
        for ((gradient, _), of) in &self.masks {
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
    /// The part is summed here over `added` micro-batches. The next is `next` or later.
    Sum { added: u32, next: u32 },
    /// The part is received from the peer that sums it.
    Received,
    /// The part is sent to the owner, or added to the gradient.
    Taken,
}

/// The state of an executor, without the numbers.
struct Walk<'a> {
    program: &'a Program,
    /// The number of optimizer slots that the program names.
    slots: usize,
    /// The values that stay here, and whether this peer owns them.
    held: BTreeMap<ValueId, bool>,
    /// The values of micro-batches and the gradients that are there.
    present: HashSet<Address>,
    seen: HashSet<Instruction>,
    awaited: HashSet<Address>,
    /// By parameter: its parts.
    parts: BTreeMap<ValueId, Vec<Part>>,
    /// The parameters that were updated.
    updated: BTreeSet<ValueId>,
    /// The tensors that are not in memory, and where they are instead.
    away: BTreeMap<Address, Medium>,
}

impl<'a> Walk<'a> {
    fn new(program: &'a Program) -> Result<Self, String> {
        let kind = |v: ValueId| program.values.get(&v).map(|v| &v.kind);
        let mut held = BTreeMap::new();
        for h in &program.holdings {
            let keeps = match kind(h.value) {
                Some(ValueKind::Parameter(_) | ValueKind::Buffer(_)) => true,
                Some(ValueKind::Frozen(_) | ValueKind::Constant) => !h.owner,
                _ => false,
            };
            want(keeps && held.insert(h.value, h.owner).is_none(), || {
                format!("it cannot keep {}", program.name(h.value))
            })?;
        }
        for (parameter, r) in &program.reductions {
            let ty = |v: ValueId| program.values.get(&v).map(|v| &v.ty);
            let fits = matches!(kind(*parameter), Some(ValueKind::Parameter(_)))
                && !r.parts.is_empty()
                && r.bracket > 0
                && r.parts.len() % r.bracket as usize == 0
                && r.parts.len() as u64 * u64::from(r.bracket) <= MAX_BRACKETED
                && r.parts.iter().all(|p| ty(p.value) == ty(*parameter) && p.micro_batches > 0);
            want(fits, || format!("the gradient parts of {} do not fit it", program.name(*parameter)))?;
            let owner = held.get(parameter) == Some(&true);
            want(owner == (r.owner == program.peer), || {
                format!("the owner of {} is not consistent", program.name(*parameter))
            })?;
        }
        let slots = program.resting().into_keys().filter_map(|tensor| match tensor {
            Address::OptimizerState { slot, .. } => Some(slot as usize + 1),
            _ => None,
        });
        let slots = slots.max().unwrap_or(0);
        want(slots <= MAX_SLOTS, || "no optimizer has as much state for a parameter as it offloads")?;
        let open = |parts: &Vec<GradientPart>| vec![Part::Sum { added: 0, next: 0 }; parts.len()];
        Ok(Self {
            program,
            slots,
            held,
            present: HashSet::new(),
            seen: HashSet::new(),
            awaited: HashSet::new(),
            parts: program.reductions.iter().map(|(parameter, r)| (*parameter, open(&r.parts))).collect(),
            updated: BTreeSet::new(),
            away: program.resting(),
        })
    }

    fn step(&mut self, i: &Instruction) -> Check {
        let may_repeat = matches!(
            i,
            // A value that was freed may be computed again.
            Instruction::Run { .. } | Instruction::Free { .. } | Instruction::Offload { .. } | Instruction::Load { .. }
        );
        want(may_repeat || self.seen.insert(*i), || "it is repeated")?;
        if let Some(m) = i.micro_batch() {
            want(m < self.program.micro_batches, || "its micro-batch does not exist")?;
        }
        self.allowed(i)?;
        let (program, slots) = (self.program, self.slots);
        let mut checked = Ok(());
        i.effects(program, slots, |tensor, access| {
            if checked.is_ok() {
                checked = self.access(tensor, access);
            }
        });
        checked
    }

    /// Checks what the instruction names, and its order among others of its kind. Whether its tensors are there is left
    /// to [`Self::access`].
    fn allowed(&mut self, i: &Instruction) -> Check {
        match *i {
            Instruction::Receive { tensor, from } => self.may_receive(tensor, from),
            Instruction::Send { tensor, to } => self.may_send(tensor, to),
            Instruction::Run { node, .. } => want(self.program.nodes.contains_key(&node), || "the node does not exist"),
            Instruction::Accumulate { parameter, part, value, micro_batch } => {
                self.value(value)?;
                let (of, state) = self.part(parameter, part)?;
                want((of.peer, of.value) == (self.program.peer, value), || "it is not this peer's part")?;
                let Part::Sum { added, next } = state else { return Err("the part is complete".into()) };
                want(micro_batch >= next, || "micro-batches must be added once, in order")?;
                self.set_part(parameter, part, Part::Sum { added: added + 1, next: micro_batch + 1 });
                Ok(())
            }
            Instruction::UpdateState { buffer, value, .. } => {
                let (old, new) = (self.value(buffer)?, self.value(value)?);
                let fits = matches!(old.kind, ValueKind::Buffer(_)) && old.ty == new.ty;
                want(fits && self.held.contains_key(&buffer), || "the value does not fit a buffer that is kept here")
            }
            Instruction::Report { report, value, .. } => {
                let Value { kind, ty, .. } = self.value(value)?;
                let made = matches!(kind, ValueKind::Result { .. }) && ty.numel() == 1;
                want(made, || "it is not a scalar that an operator makes")?;
                want((report as usize) < self.program.reports.len(), || "there is no such report")
            }
            Instruction::Join { parameter, part } => {
                want(self.part(parameter, part)?.0.peer == self.program.peer, || "it is not this peer's part")?;
                let joined = self.joined(parameter, part);
                want(joined.start != part, || "the part stays alone")?;
                self.complete(parameter, joined.start)?;
                let mut earlier = joined.start + 1..part;
                want(earlier.all(|p| self.is_taken(parameter, p)), || "parts must be added in their order")
            }
            Instruction::Reduce { parameter } => {
                want(!self.seen.contains(&Instruction::Clip), || "it comes after the verdict")?;
                self.owns(parameter)
            }
            Instruction::Update { parameter } => {
                want(self.seen.contains(&Instruction::Clip), || "it comes before the verdict")?;
                self.owns(parameter)?;
                self.updated.insert(parameter);
                Ok(())
            }
            Instruction::Offload { tensor, .. } => self.may_move(tensor),
            // `seen` already refuses a second verdict.
            Instruction::Free { .. } | Instruction::Clip | Instruction::Load { .. } => Ok(()),
        }
    }

    /// Uses a tensor, which must be where the use needs it.
    fn access(&mut self, tensor: Address, access: Access) -> Check {
        let name = |what| format!("{} {what}", self.program.name(tensor.value()));
        match access {
            Access::Offload(to) => return want(self.away.insert(tensor, to).is_none(), || "it is away already"),
            Access::Load(from) => return want(self.away.remove(&tensor) == Some(from), || "it is not there"),
            // The new content takes the place of one that is away.
            Access::Replace => {
                self.away.remove(&tensor);
                return Ok(());
            }
            _ => want(!self.away.contains_key(&tensor), || "a tensor that it needs is not in memory")?,
        }
        match (tensor, access) {
            (Address::Part { parameter, part }, Access::Make) => {
                self.set_part(parameter, part, Part::Received);
                Ok(())
            }
            (Address::Part { parameter, part }, Access::Take) => self.take(parameter, part),
            // `allowed` has added it.
            (Address::Part { .. }, _) => Ok(()),
            (Address::Held { value }, _) => want(self.held.contains_key(&value), || name("is not present")),
            // An executor makes optimizer state that is missing.
            (Address::OptimizerState { .. }, _) => Ok(()),
            (_, Access::Make) => want(self.present.insert(tensor), || name("is present already")),
            (_, Access::Take | Access::Free) => want(self.present.remove(&tensor), || name("is not present")),
            _ => want(self.present.contains(&tensor), || name("is not present")),
        }
    }

    fn may_receive(&mut self, tensor: Address, from: PeerId) -> Check {
        want(from != self.program.peer, || "it comes from this peer itself")?;
        want(self.awaited.insert(tensor), || "it is received twice")?;
        match tensor {
            Address::Value { value, .. } => match self.value(value)?.kind {
                ValueKind::Input => want(from == PeerId::BROKER, || "an input must come from the broker"),
                ValueKind::Result { .. } => want(from != PeerId::BROKER, || "a result must come from a peer"),
                _ => Err("it does not differ between micro-batches".into()),
            },
            Address::Part { parameter, part } => {
                let (of, _) = self.part(parameter, part)?;
                let first = self.joined(parameter, part).start == part;
                want(of.peer == from && first, || "it is not for this peer")?;
                self.owns(parameter)
            }
            Address::Held { value } => {
                let copy = matches!(self.value(value)?.kind, ValueKind::Parameter(_));
                let copy = copy && self.held.get(&value) == Some(&false);
                want(copy && from != PeerId::BROKER, || "this peer keeps no copy of it")
            }
            Address::BufferAfter { buffer, .. } => want(
                self.keeps_buffer(buffer)? && from != PeerId::BROKER,
                || "this peer does not keep the buffer, or a peer does not send it",
            ),
            Address::Gradient { .. } | Address::OptimizerState { .. } => Err("no message carries it".into()),
        }
    }

    fn may_send(&self, tensor: Address, to: PeerId) -> Check {
        want(to != self.program.peer && to != PeerId::BROKER, || "it must go to another peer")?;
        match tensor {
            Address::Value { .. } => Ok(()),
            Address::Part { parameter, part } => {
                let ours = self.part(parameter, part)?.0.peer == self.program.peer;
                let owner = self.program.reductions.get(&parameter).map(|r| r.owner);
                want(ours && owner == Some(to), || "the part is not this peer's, or the receiver does not own it")?;
                let joined = self.joined(parameter, part);
                let mut others = joined.clone().skip(1);
                let whole = joined.start == part && others.all(|p| self.is_taken(parameter, p));
                want(whole, || "the parts that are sent as one are not added")
            }
            Address::Held { value } => want(self.updated.contains(&value), || "it is not updated yet"),
            Address::BufferAfter { buffer, .. } => {
                want(self.keeps_buffer(buffer)?, || "this peer does not keep the buffer")
            }
            Address::Gradient { .. } | Address::OptimizerState { .. } => Err("no message carries it".into()),
        }
    }

    /// Whether there is a tensor to move.
    fn may_move(&self, tensor: Address) -> Check {
        let exists = match tensor {
            Address::Value { .. } | Address::Gradient { .. } => self.present.contains(&tensor),
            Address::Part { parameter, part } => {
                matches!(self.part(parameter, part)?.1, Part::Sum { added: 1.., .. } | Part::Received)
            }
            Address::Held { value } => {
                matches!(self.value(value)?.kind, ValueKind::Parameter(_) | ValueKind::Frozen(_))
                    && self.held.contains_key(&value)
            }
            Address::OptimizerState { parameter, .. } => self.owns(parameter).is_ok(),
            Address::BufferAfter { .. } => false,
        };
        want(exists, || "there is nothing to move")
    }

    /// Checks what must be done at the end.
    fn end(&self) -> Check {
        want(self.away == self.program.resting(), || "what was moved is not back where it was at the beginning")?;
        if let Some(Address::Value { value, micro_batch }) = self.present.iter().min() {
            return Err(format!("{} of micro-batch {micro_batch} is never freed", self.program.name(*value)));
        }
        for ((parameter, r), parts) in self.program.reductions.iter().zip(self.parts.values()) {
            let mut ours = r.parts.iter().zip(parts).filter(|(p, _)| p.peer == self.program.peer);
            let left = ours.any(|(_, state)| *state != Part::Taken);
            let applied = r.owner != self.program.peer || self.updated.contains(parameter);
            want(!left && applied, || format!("the gradient of {} is not applied", self.program.name(*parameter)))?;
        }
        Ok(())
    }

    fn value(&self, v: ValueId) -> Result<&'a Value, String> {
        self.program.values.get(&v).ok_or_else(|| format!("{v} does not exist"))
    }

    fn keeps_buffer(&self, v: ValueId) -> Result<bool, String> {
        Ok(matches!(self.value(v)?.kind, ValueKind::Buffer(_)) && self.held.contains_key(&v))
    }

    fn owns(&self, parameter: ValueId) -> Check {
        let r = self.program.reductions.get(&parameter).ok_or("it has no gradient here")?;
        want(r.owner == self.program.peer, || "this peer does not own it")
    }

    fn part(&self, parameter: ValueId, part: u32) -> Result<(&'a GradientPart, Part), String> {
        let of = self.program.reductions.get(&parameter).and_then(|r| r.parts.get(part as usize));
        let state = self.parts.get(&parameter).and_then(|parts| parts.get(part as usize)).copied();
        of.zip(state).ok_or_else(|| "there is no such part".into())
    }

    fn set_part(&mut self, parameter: ValueId, part: u32, to: Part) {
        if let Some(state) = self.parts.get_mut(&parameter).and_then(|parts| parts.get_mut(part as usize)) {
            *state = to;
        }
    }

    /// See [`Reduction::joined`](crate::Reduction::joined).
    fn joined(&self, parameter: ValueId, part: u32) -> Range<u32> {
        self.program.reductions.get(&parameter).map_or(part..part + 1, |r| r.joined(part))
    }

    fn is_taken(&self, parameter: ValueId, part: u32) -> bool {
        self.part(parameter, part).is_ok_and(|(_, state)| state == Part::Taken)
    }

    /// Uses up a part, which must be complete.
    fn take(&mut self, parameter: ValueId, part: u32) -> Check {
        self.complete(parameter, part)?;
        self.set_part(parameter, part, Part::Taken);
        Ok(())
    }

    fn complete(&self, parameter: ValueId, part: u32) -> Check {
        let (GradientPart { peer, micro_batches, .. }, state) = self.part(parameter, part)?;
        let ours = *peer == self.program.peer;
        let whole = match state {
            Part::Sum { added, .. } => ours && added == *micro_batches,
            Part::Received => !ours,
            Part::Taken => false,
        };
        want(whole, || format!("part {part} is not complete"))
    }
}
