//! Looks after each operator of a pass for numbers that are not finite, and keeps the first place that explains them.

use std::collections::{HashMap, HashSet};

use fusionllm_backend::Tensor;
use fusionllm_graph::{DType, HostTensor, Node, NodeId, Op, TensorType, ValueId, ValueKind};
use fusionllm_plan::{Cause, PeerId, Poison, PoisonPlace, Program, Slot};

use crate::ExecError;
use crate::state::{Held, Key, State};

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

    /// The same for a tensor that stays from pass to pass, wherever it is.
    fn of_state(state: &State, held: &Held, ty: &TensorType) -> Result<Self, ExecError> {
        match ty.dtype.is_float() {
            true => Ok(Self::of(&held.download(&*state.backend)?)),
            false => Ok(Self::Finite),
        }
    }
}

/// What an inspected pass has met so far. What its maps do not have is finite.
#[derive(Default)]
pub(crate) struct Inspector {
    /// By value and micro-batch.
    values: HashMap<(ValueId, u32), Level>,
    /// Parameters, buffers and constants.
    tensors: HashMap<ValueId, Level>,
    /// By reduction and part.
    parts: HashMap<(u32, u32), Level>,
    /// Means over no targets. They are 0 / 0, and their micro-batches have no share in the loss.
    without_targets: HashSet<(ValueId, u32)>,
    /// The surest place so far, and the first of those.
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
            let key = Key { name: value.name.clone(), slot: None };
            let Some(held) = state.held(&key) else { continue };
            let level = Level::of_state(state, held, &value.ty)?;
            inspector.tensors.insert(holding.value, level);
            let place = PoisonPlace::Kept { value: holding.value };
            match (&value.kind, level) {
                (_, Level::Finite) => {}
                // A model may keep a mask that is filled with infinities.
                (ValueKind::Buffer(_) | ValueKind::Constant, Level::Infinite) => inspector.find(Cause::Perhaps, place),
                _ => inspector.find(Cause::Arose, place),
            }
        }
        for (_, reduction) in program.owned() {
            let parameter = reduction.parameter;
            let value = &program.values[&parameter];
            for (_, slot) in state.slots(&value.name) {
                // A moment that has overflowed stops its parameter, and need not harm anything else.
                if Level::of_state(state, slot, &value.ty)? > Level::Finite {
                    inspector.find(Cause::Perhaps, PoisonPlace::OptimizerState { parameter });
                }
            }
        }
        Ok(inspector)
    }

    /// The surest place that was met. An infinity that may be meant counts only if something was spoilt.
    pub(crate) fn poison(&self) -> Option<Poison> {
        self.found.filter(|found| found.cause < Cause::Perhaps || self.spoilt)
    }

    fn find(&mut self, cause: Cause, place: PoisonPlace) {
        if self.found.is_none_or(|found| cause < found.cause) {
            self.found = Some(Poison { cause, place });
        }
    }

    /// Notes a result that is worse than all that it was computed from.
    fn compare(&mut self, operands: Level, result: Level, place: PoisonPlace) {
        if result > operands {
            self.find(if operands == Level::Finite { Cause::Arose } else { Cause::FromInfinity }, place);
        }
    }

    pub(crate) fn received(&mut self, slot: Slot, from: PeerId, reduction: Option<u32>, host: &HostTensor) {
        let level = Level::of(host);
        match slot {
            Slot::Value { value, micro_batch } => {
                self.values.insert((value, micro_batch), level);
            }
            Slot::Part { part, .. } => {
                self.parts.extend(reduction.map(|r| ((r, part), level)));
            }
            Slot::Parameter { parameter: v } | Slot::Buffer { buffer: v, .. } => {
                self.tensors.insert(v, level);
            }
        }
        let may_be_meant = level == Level::Infinite && matches!(slot, Slot::Value { .. } | Slot::Buffer { .. });
        let cause = match from {
            // The data is at fault.
            PeerId::BROKER => Cause::Arose,
            _ if may_be_meant => Cause::Perhaps,
            _ => Cause::Arrived,
        };
        if level > Level::Finite {
            self.find(cause, PoisonPlace::Message { slot, from });
        }
    }

    /// The worst number of these operands.
    pub(crate) fn operands(&self, operands: &[ValueId], micro_batch: u32) -> Level {
        let level = |v: &ValueId| self.values.get(&(*v, micro_batch)).or_else(|| self.tensors.get(v));
        operands.iter().filter_map(level).copied().max().unwrap_or_default()
    }

    /// Notes the results of a node.
    pub(crate) fn ran(&mut self, id: NodeId, node: &Node, micro_batch: u32, results: impl IntoIterator<Item = Level>) {
        let operands = self.operands(&node.inputs, micro_batch);
        let place = PoisonPlace::Node { node: id, micro_batch };
        for (value, result) in node.outputs.iter().zip(results) {
            self.values.insert((*value, micro_batch), result);
            match &node.op {
                Op::CrossEntropy(_) if (operands, result) == (Level::Finite, Level::Nan) => {
                    self.without_targets.insert((*value, micro_batch));
                }
                op if result == Level::Infinite && fills_masks(op) => self.find(Cause::Perhaps, place),
                _ => self.compare(operands, result, place),
            }
        }
    }

    /// Notes a part's sum after the gradient of one more micro-batch.
    pub(crate) fn accumulated(
        &mut self,
        part: (u32, u32),
        parameter: ValueId,
        (value, micro_batch): (ValueId, u32),
        sum: Level,
    ) {
        let before = self.parts.insert(part, sum).unwrap_or_default();
        let operands = before.max(self.operands(&[value], micro_batch));
        self.compare(operands, sum, PoisonPlace::Gradient { parameter });
    }

    /// Notes the sum of a gradient's parts.
    pub(crate) fn reduced(&mut self, reduction: u32, parts: u32, parameter: ValueId, sum: Level) {
        let levels = (0..parts).filter_map(|part| self.parts.get(&(reduction, part)));
        let operands = levels.copied().max().unwrap_or_default();
        self.compare(operands, sum, PoisonPlace::Gradient { parameter });
    }

    pub(crate) fn updated(&mut self, buffer: ValueId, (value, micro_batch): (ValueId, u32)) {
        let level = self.operands(&[value], micro_batch);
        self.tensors.insert(buffer, level);
    }

    pub(crate) fn reported(&mut self, value: ValueId, micro_batch: u32) {
        let level = self.operands(&[value], micro_batch);
        self.spoilt |= level > Level::Finite && !self.without_targets.contains(&(value, micro_batch));
    }

    /// Notes a gradient's squared norm. Nothing else explains the norm of finite numbers but their size.
    pub(crate) fn measured(&mut self, parameter: ValueId, squared_norm: f64) {
        if !squared_norm.is_finite() {
            self.spoilt = true;
            if self.found.is_none() {
                self.find(Cause::Arose, PoisonPlace::Gradient { parameter });
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
