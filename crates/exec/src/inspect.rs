//! Looks after each operator of a pass for numbers that are not finite, and keeps the first place that explains them.

use std::collections::HashMap;

use fusionllm_backend::Tensor;
use fusionllm_graph::{DType, HostTensor, Op, TensorType, ValueKind};
use fusionllm_program::{Access, Address, Cause, Instruction, PeerId, Poison, Program, TensorKey};

use crate::ExecError;
use crate::state::{Held, State};

/// The worst number of a tensor. Order matters: operators turn an infinity into NaN, but never back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    #[default]
    Finite,
    Infinite,
    Nan,
}

impl Level {
    pub(crate) fn of(host: &HostTensor) -> Self {
        fn worst(numbers: impl Iterator<Item = f64>) -> Level {
            let level = |x: f64| match x {
                x if x.is_finite() => Level::Finite,
                x if x.is_nan() => Level::Nan,
                _ => Level::Infinite,
            };
            numbers.map(level).max().unwrap_or_default()
        }
        match host.dtype() {
            DType::F32 => worst(host.bytes().as_chunks().0.iter().map(|x| f32::from_le_bytes(*x).into())),
            DType::F64 => worst(host.bytes().as_chunks().0.iter().map(|x| f64::from_le_bytes(*x))),
            DType::F16 | DType::BF16 => worst(host.to_f64().into_iter()),
            DType::I64 | DType::I32 | DType::Bool => Self::Finite,
        }
    }

    /// Copies the tensor to the host to look at it.
    pub(crate) fn on_device(state: &State, tensor: &Tensor) -> Result<Self, ExecError> {
        match tensor.ty().dtype.is_float() {
            true => Ok(Self::of(&state.backend.download(tensor)?)),
            false => Ok(Self::Finite),
        }
    }

    /// Looks at a tensor that stays from pass to pass, wherever it is.
    fn of_state(state: &State, held: &Held, ty: &TensorType) -> Result<Self, ExecError> {
        match ty.dtype.is_float() {
            true => Ok(Self::of(&held.download(&*state.backend)?)),
            false => Ok(Self::Finite),
        }
    }
}

/// The numbers that an inspected pass has met so far. A tensor without a level is finite.
#[derive(Default)]
pub(crate) struct Inspector {
    levels: HashMap<Address, Level>,
    /// The surest place so far. Of equally sure places, it is the first. There is one as soon as any number is not
    /// finite, so a peer that sends such a number can always say where it comes from.
    found: Option<Poison>,
    /// Whether a report or a gradient's norm was not finite.
    spoilt: bool,
}

impl Inspector {
    /// Looks at what the peer keeps.
    pub(crate) fn new(state: &State, program: &Program) -> Result<Self, ExecError> {
        let mut inspector = Self::default();
        for holding in &program.holdings {
            let value = &program.values[&holding.value];
            let Some(held) = state.held(&TensorKey::value(&value.name)) else { continue };
            let level = Level::of_state(state, held, &value.ty)?;
            let tensor = Address::Held { value: holding.value };
            inspector.levels.insert(tensor, level);
            match (&value.kind, level) {
                (_, Level::Finite) => {}
                // A model may keep a mask that is filled with infinities.
                (ValueKind::Buffer(_) | ValueKind::Constant, Level::Infinite) => {
                    inspector.find(Cause::Perhaps, tensor, None)
                }
                _ => inspector.find(Cause::Arose, tensor, None),
            }
        }
        for (parameter, _) in program.owned() {
            let value = &program.values[&parameter];
            for (slot, key) in (0..).zip(state.slots(&value.name)) {
                let Some(held) = state.held(&key) else { continue };
                // A moment that has overflowed stops its parameter, and need not harm anything else.
                if Level::of_state(state, held, &value.ty)? > Level::Finite {
                    inspector.find(Cause::Perhaps, Address::OptimizerState { parameter, slot }, None);
                }
            }
        }
        Ok(inspector)
    }

    /// The surest place that was met. A number that may be meant counts only if something was spoilt.
    pub(crate) fn surest(&self) -> Option<Poison> {
        self.found.filter(|found| found.cause < Cause::Perhaps || self.spoilt)
    }

    fn find(&mut self, cause: Cause, tensor: Address, from: Option<PeerId>) {
        if self.found.is_none_or(|found| cause < found.cause) {
            self.found = Some(Poison { cause, tensor, from });
        }
    }

    pub(crate) fn received(&mut self, tensor: Address, from: PeerId, host: &HostTensor) {
        let level = Level::of(host);
        self.levels.insert(tensor.place(), level);
        let may_be_meant = level == Level::Infinite && tensor.micro_batch().is_some();
        let cause = match from {
            // The data is at fault.
            PeerId::BROKER => Cause::Arose,
            _ if may_be_meant => Cause::Perhaps,
            _ => Cause::Arrived,
        };
        if level > Level::Finite {
            self.find(cause, tensor, Some(from));
        }
    }

    fn level(&self, tensor: Address) -> Level {
        self.levels.get(&tensor).copied().unwrap_or_default()
    }

    /// Notes the tensors that an instruction has made or added to. `look` finds the worst number of each. If a result
    /// is worse than all operands, its place is remembered.
    pub(crate) fn computed(
        &mut self,
        program: &Program,
        instruction: &Instruction,
        look: impl Fn(Address) -> Result<Level, ExecError>,
    ) -> Result<(), ExecError> {
        let mut operands = Level::Finite;
        let mut looked = Ok(());
        instruction.effects(program, 0, |tensor, access| match access {
            Access::Read | Access::Take => operands = operands.max(self.level(tensor)),
            Access::Make | Access::Add => {
                let result = look(tensor).unwrap_or_else(|error| {
                    looked = Err(error);
                    Level::Finite
                });
                let before = self.levels.insert(tensor, result).unwrap_or_default();
                let operands = if access == Access::Add { operands.max(before) } else { operands };
                self.compare(program, tensor, operands, result);
            }
            Access::Replace => {
                self.levels.insert(tensor, operands);
            }
            Access::Change | Access::Free | Access::Offload(_) | Access::Load(_) => {}
        });
        looked
    }

    fn compare(&mut self, program: &Program, tensor: Address, operands: Level, result: Level) {
        // A sum of gradients is reported as its parameter's gradient.
        let place = match tensor {
            Address::Part { parameter, .. } => Address::Gradient { parameter },
            _ => tensor,
        };
        let maker = match program.values.get(&tensor.value()).map(|v| &v.kind) {
            Some(ValueKind::Result { node, .. }) => program.nodes.get(node).map(|node| &node.op),
            _ => None,
        };
        match maker {
            // The mean over no targets is 0 / 0, and its micro-batch may have no share in the loss.
            Some(Op::CrossEntropy(_)) if (operands, result) == (Level::Finite, Level::Nan) => {
                self.find(Cause::Perhaps, place, None);
            }
            Some(op) if result == Level::Infinite && fills_masks(op) => self.find(Cause::Perhaps, place, None),
            _ if result > operands => {
                let cause = if operands == Level::Finite { Cause::Arose } else { Cause::FromInfinity };
                self.find(cause, place, None);
            }
            _ => {}
        }
    }

    /// Notes a number that the broker gets: a reported one, or a gradient's squared norm. If the tensor's numbers are
    /// finite, only their size can have made it infinite.
    pub(crate) fn sent(&mut self, tensor: Address, number: f64) {
        if !number.is_finite() {
            self.spoilt = true;
            if self.level(tensor) == Level::Finite {
                self.find(Cause::Arose, tensor, None);
            }
        }
    }
}

/// Whether an operator's result may be infinite on purpose.
fn fills_masks(op: &Op) -> bool {
    match op {
        Op::Full(_) | Op::ConstantPad(_) => true,
        Op::BinaryScalar(op) => op.scalar.is_infinite(),
        _ => false,
    }
}
