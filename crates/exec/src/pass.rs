//! One pass: the execution of a Program's instructions.

use std::collections::HashMap;
use std::time::Instant;

use fusionllm_backend::Tensor;
use fusionllm_compress::Codec;
use fusionllm_graph::ops::{Binary, SquaredNorm};
use fusionllm_graph::{CounterRng, DType, HostTensor, NodeId, TensorType, ValueId, ValueKind};
use fusionllm_plan::{Instruction, PeerId, Poison, Program, Reduction, Slot, Verdict};

use crate::inspect::{Inspector, Level};
use crate::pace::Pace;
use crate::state::{State, bytes};
use crate::{Communicator, EncodeOptions, ExecError, message_seed};

/// The duration and the memory of one pass on one peer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PassStats {
    /// Seconds without waiting. Includes the sleep of [`Executor::set_slowdown`](crate::Executor::set_slowdown).
    pub compute_s: f64,
    /// Seconds of waiting for messages and for the verdict.
    pub wait_s: f64,
    /// Seconds in total.
    pub total_s: f64,
    /// Most bytes of tensors at once: parameters, state, gradients and activations. Views count as copies.
    pub peak_bytes: u64,
    /// Where a number was first not finite, if the pass was inspected: see
    /// [`Executor::set_inspect`](crate::Executor::set_inspect).
    pub poison: Option<Poison>,
}

/// The key of counter-based operators: a function of (seed, step, micro-batch). `step` counts updates, so a resumed
/// run draws the same numbers.
pub fn rng_key(seed: u64, step: u64, micro_batch: u32) -> i64 {
    let block = CounterRng::new(seed).block(step, u64::from(micro_batch));
    (u64::from(block[0]) | u64::from(block[1]) << 32) as i64
}

/// Which non-zero numbers a received tensor has: its sender, and one bit per number.
struct Mask {
    from: PeerId,
    bits: Vec<u8>,
}

impl Mask {
    fn new(from: PeerId, tensor: &HostTensor) -> Self {
        let (numbers, _) = tensor.bytes().as_chunks::<4>();
        let bit = |bits: u8, x: &[u8; 4]| bits << 1 | u8::from(f32::from_le_bytes(*x) != 0.0);
        Self { from, bits: numbers.chunks(8).map(|eight| eight.iter().rev().fold(0, bit)).collect() }
    }

    fn is_set(&self, i: usize) -> bool {
        self.bits.get(i / 8).is_some_and(|bits| bits >> (i % 8) & 1 == 1)
    }
}

/// A pass in flight.
pub(crate) struct PassRun<'a> {
    state: &'a mut State,
    program: &'a Program,
    seed: u64,
    pass: u64,
    step: u64,
    values: HashMap<(ValueId, u32), Tensor>,
    /// Sums over micro-batches, by (reduction, part).
    parts: HashMap<(u32, u32), Tensor>,
    /// Complete gradients, by reduction.
    gradients: HashMap<u32, Tensor>,
    verdict: Option<Verdict>,
    /// Masks of received values for [`Program::masks`], by value and micro-batch.
    masks: HashMap<(ValueId, u32), Mask>,
    /// Only in a pass that is inspected.
    inspector: Option<Inspector>,
    pub(crate) stats: PassStats,
    pub(crate) live_bytes: u64,
    pub(crate) pace: Pace,
}

impl<'a> PassRun<'a> {
    pub(crate) fn new(
        state: &'a mut State,
        program: &'a Program,
        seed: u64,
        pass: u64,
        step: u64,
        slowdown: f64,
    ) -> Self {
        Self {
            live_bytes: state.bytes(),
            state,
            program,
            seed,
            pass,
            step,
            values: HashMap::new(),
            parts: HashMap::new(),
            gradients: HashMap::new(),
            verdict: None,
            masks: HashMap::new(),
            inspector: None,
            stats: PassStats::default(),
            pace: Pace::new(slowdown),
        }
    }

    /// Looks after each instruction for numbers that are not finite.
    pub(crate) fn inspect(&mut self) -> Result<(), ExecError> {
        self.inspector = Some(Inspector::new(self.state, self.program)?);
        Ok(())
    }

    /// Where an inspected pass first had a number that is not finite.
    pub(crate) fn poison(&self) -> Option<Poison> {
        self.inspector.as_ref().and_then(Inspector::poison)
    }

    /// Executes the instruction at `index`.
    pub(crate) fn execute(
        &mut self,
        index: usize,
        instruction: &Instruction,
        communicator: &mut dyn Communicator,
    ) -> Result<(), ExecError> {
        match *instruction {
            Instruction::Receive { slot, from } => self.receive(slot, from, communicator),
            Instruction::Run { node, micro_batch } => self.run_node(index, node, micro_batch),
            Instruction::Send { slot, to } => self.send(slot, to, communicator),
            Instruction::Free { value, micro_batch } => {
                if let Some(tensor) = self.values.remove(&(value, micro_batch)) {
                    self.live_bytes = self.live_bytes.saturating_sub(bytes(&tensor));
                }
                Ok(())
            }
            Instruction::Accumulate { reduction, part, value, micro_batch } => {
                self.accumulate(index, (reduction, part), value, micro_batch)
            }
            Instruction::UpdateState { buffer, value, micro_batch } => {
                let tensor = self.operand(value, micro_batch, false)?;
                if let Some(inspector) = &mut self.inspector {
                    inspector.updated(buffer, (value, micro_batch));
                }
                self.set_tensor(buffer, tensor)
            }
            Instruction::Report { report, value, micro_batch } => {
                let tensor = self.operand(value, micro_batch, false)?;
                if let Some(inspector) = &mut self.inspector {
                    inspector.reported(value, micro_batch);
                }
                communicator.report(self.pass, report, micro_batch, self.scalar(&tensor)?)
            }
            Instruction::Reduce { reduction } => self.reduce(reduction),
            Instruction::Clip => self.clip(communicator),
            Instruction::Update { reduction } => self.update(reduction),
        }
    }

    fn receive(&mut self, slot: Slot, from: PeerId, communicator: &mut dyn Communicator) -> Result<(), ExecError> {
        let host = self.wait(|pass| communicator.receive(pass, slot, from))?;
        if let Slot::Value { value, micro_batch } = slot
            && self.program.masks.values().any(|of| of.contains(&value))
        {
            self.masks.insert((value, micro_batch), Mask::new(from, &host));
        }
        if let Some(inspector) = &mut self.inspector {
            let reduction = self.program.reductions.iter().position(|r| r.parameter == slot.value());
            inspector.received(slot, from, reduction.map(|i| i as u32), &host);
        }
        let tensor = self.state.backend.upload(&host)?;
        match slot {
            Slot::Value { value, micro_batch } => self.put(value, micro_batch, tensor),
            Slot::Part { parameter, part } => {
                let reduction = self.reduction_of(parameter)?;
                self.live_bytes += bytes(&tensor);
                self.parts.insert((reduction, part), tensor);
            }
            // After a step that was not applied, this equals the present copy.
            Slot::Parameter { parameter: v } | Slot::Buffer { buffer: v, .. } => self.set_tensor(v, tensor)?,
        }
        Ok(())
    }

    fn send(&mut self, slot: Slot, to: PeerId, communicator: &mut dyn Communicator) -> Result<(), ExecError> {
        let tensor = match slot {
            Slot::Value { value, micro_batch } => self.operand(value, micro_batch, false)?,
            Slot::Part { parameter, part } => {
                let reduction = self.reduction_of(parameter)?;
                let tensor = self.parts.remove(&(reduction, part)).ok_or_else(invalid)?;
                self.live_bytes = self.live_bytes.saturating_sub(bytes(&tensor));
                tensor
            }
            Slot::Parameter { parameter: v } | Slot::Buffer { buffer: v, .. } => {
                self.state.tensors.get(self.name(v)?).cloned().ok_or_else(invalid)?
            }
        };
        let seed = message_seed(self.seed, self.step, slot);
        let options = EncodeOptions { codec: self.program.codec(slot, to), seed };
        let mut host = self.state.backend.download(&tensor)?;
        if let Codec::TopK(_) = options.codec {
            host = self.masked(host, slot, to)?;
        }
        communicator.send(self.pass, slot, to, host, options)
    }

    fn run_node(&mut self, index: usize, id: NodeId, micro_batch: u32) -> Result<(), ExecError> {
        let node = self.program.nodes.get(&id).ok_or_else(invalid)?;
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for (i, v) in node.inputs.iter().enumerate() {
            let last = !node.inputs[i + 1..].contains(v) && self.freed_next(index, *v, micro_batch);
            inputs.push(self.operand(*v, micro_batch, last)?);
        }
        let types: Vec<TensorType> = node.outputs.iter().map(|v| self.program.values[v].ty.clone()).collect();
        let results = self.state.backend.run(&node.op, inputs, &types)?;
        if let Some(inspector) = &mut self.inspector {
            let levels: Result<Vec<Level>, _> = results.iter().map(|t| Level::on_device(self.state, t)).collect();
            inspector.ran(id, node, micro_batch, levels?);
        }
        for (v, tensor) in node.outputs.iter().zip(results) {
            self.put(*v, micro_batch, tensor);
        }
        Ok(())
    }

    /// Adds a micro-batch's gradient to its part's sum.
    fn accumulate(
        &mut self,
        index: usize,
        part: (u32, u32),
        value: ValueId,
        micro_batch: u32,
    ) -> Result<(), ExecError> {
        let last = self.freed_next(index, value, micro_batch);
        let term = self.operand(value, micro_batch, last)?;
        let sum = match self.parts.remove(&part) {
            None => {
                self.live_bytes += bytes(&term);
                term
            }
            Some(sum) => self.add(sum, term)?,
        };
        if let Some(inspector) = &mut self.inspector {
            let parameter = self.program.reductions.get(part.0 as usize).ok_or_else(invalid)?.parameter;
            let level = Level::on_device(self.state, &sum)?;
            inspector.accumulated(part, parameter, (value, micro_batch), level);
        }
        self.parts.insert(part, sum);
        Ok(())
    }

    /// Adds a parameter's parts in their order.
    fn reduce(&mut self, reduction: u32) -> Result<(), ExecError> {
        let Reduction { parameter, ref parts, .. } =
            *self.program.reductions.get(reduction as usize).ok_or_else(invalid)?;
        let count = parts.len() as u32;
        let mut sum = self.parts.remove(&(reduction, 0)).ok_or_else(invalid)?;
        for part in 1..count {
            let next = self.parts.remove(&(reduction, part)).ok_or_else(invalid)?;
            self.live_bytes = self.live_bytes.saturating_sub(bytes(&next));
            sum = self.add(sum, next)?;
        }
        if let Some(inspector) = &mut self.inspector {
            inspector.reduced(reduction, count, parameter, Level::on_device(self.state, &sum)?);
        }
        self.gradients.insert(reduction, sum);
        Ok(())
    }

    /// Sends the norms of the owned gradients and waits for the verdict.
    fn clip(&mut self, communicator: &mut dyn Communicator) -> Result<(), ExecError> {
        let mut norms = Vec::new();
        for (i, r) in self.program.reductions.iter().enumerate() {
            if let Some(gradient) = self.gradients.get(&(i as u32)).cloned() {
                let ty = TensorType::new(DType::F64, []);
                let norm = self.state.backend.run(&SquaredNorm.into(), vec![gradient], &[ty])?;
                let norm = self.scalar(&first(norm)?)?;
                if let Some(inspector) = &mut self.inspector {
                    inspector.measured(r.parameter, norm);
                }
                norms.push((r.parameter, norm));
            }
        }
        self.pace.sleep_debt();
        self.verdict = Some(self.wait(|pass| communicator.verdict(pass, norms))?);
        Ok(())
    }

    /// Applies the optimizer to one owned parameter, unless the verdict skips the step.
    fn update(&mut self, reduction: u32) -> Result<(), ExecError> {
        let parameter = self.program.reductions.get(reduction as usize).ok_or_else(invalid)?.parameter;
        let gradient = self.gradients.remove(&reduction).ok_or_else(invalid)?;
        self.live_bytes = self.live_bytes.saturating_sub(bytes(&gradient));
        let verdict = self.verdict.ok_or_else(invalid)?;
        if !verdict.apply {
            return Ok(());
        }
        let name = self.name(parameter)?.to_string();
        let hyper = self.state.optimizer.hyper(&verdict);
        let hyper = self.state.backend.upload(&HostTensor::from_f64([hyper.len()], &hyper)?)?;
        // Removed from the state, so that the kernel holds the only references and can update in place.
        let parameter = self.state.tensors.remove(&name).ok_or_else(invalid)?;
        let slots = self.state.slots.remove(&name).ok_or_else(invalid)?;
        let types = vec![parameter.ty().clone(); 1 + slots.len()];
        let mut operands = vec![parameter, gradient];
        operands.extend(slots);
        operands.push(hyper);
        let op = self.state.optimizer.op();
        let mut results = self.state.backend.run(&op, operands, &types)?.into_iter();
        let updated = results.next().ok_or_else(invalid)?;
        self.state.tensors.insert(name.clone(), updated);
        self.state.slots.insert(name, results.collect());
        Ok(())
    }

    fn add(&self, a: Tensor, b: Tensor) -> Result<Tensor, ExecError> {
        let ty = a.ty().clone();
        first(self.state.backend.run(&Binary::Add.into(), vec![a, b], &[ty])?)
    }

    /// Waits for others. This time counts neither as computing nor as work to slow down.
    fn wait<T>(&mut self, waiting_for: impl FnOnce(u64) -> Result<T, ExecError>) -> Result<T, ExecError> {
        let started = Instant::now();
        let result = waiting_for(self.pass)?;
        self.stats.wait_s += started.elapsed().as_secs_f64();
        self.pace.restart();
        Ok(result)
    }

    /// A gradient without the entries that `to` left out of the values that it is a gradient of.
    fn masked(&self, gradient: HostTensor, slot: Slot, to: PeerId) -> Result<HostTensor, ExecError> {
        let (Slot::Value { micro_batch, .. }, Some(of)) = (slot, self.program.masks.get(&slot.value())) else {
            return Ok(gradient);
        };
        let received = of.iter().filter_map(|v| self.masks.get(&(*v, micro_batch)));
        let masks: Vec<&Mask> = received.filter(|mask| mask.from == to).collect();
        if masks.is_empty() {
            return Ok(gradient);
        }
        let ty = gradient.ty().clone();
        let mut data = gradient.into_bytes();
        for (i, number) in data.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            if !masks.iter().any(|mask| mask.is_set(i)) {
                *number = [0; 4];
            }
        }
        Ok(HostTensor::from_bytes(ty, data)?)
    }

    fn put(&mut self, value: ValueId, micro_batch: u32, tensor: Tensor) {
        self.live_bytes += bytes(&tensor);
        self.values.insert((value, micro_batch), tensor);
    }

    fn set_tensor(&mut self, value: ValueId, tensor: Tensor) -> Result<(), ExecError> {
        let name = self.name(value)?.into();
        self.state.tensors.insert(name, tensor);
        Ok(())
    }

    /// A value of a micro-batch. At its `last` use the pass gives up its own reference, so that kernels can work in
    /// place.
    fn operand(&mut self, v: ValueId, micro_batch: u32, last: bool) -> Result<Tensor, ExecError> {
        if last && let Some(tensor) = self.values.remove(&(v, micro_batch)) {
            self.live_bytes = self.live_bytes.saturating_sub(bytes(&tensor));
            return Ok(tensor);
        }
        if let Some(tensor) = self.values.get(&(v, micro_batch)) {
            return Ok(tensor.clone());
        }
        let value = self.program.values.get(&v).ok_or_else(invalid)?;
        if value.kind == ValueKind::RngKey {
            let key = rng_key(self.seed, self.step, micro_batch);
            return Ok(self.state.backend.upload(&HostTensor::from_i64([], &[key])?)?);
        }
        let tensor = self.state.tensors.get(&value.name).cloned();
        tensor.ok_or_else(|| ExecError::State(format!("this peer has no tensor {:?}", value.name)))
    }

    /// Whether a value is freed directly after the instruction at `index`.
    fn freed_next(&self, index: usize, v: ValueId, micro_batch: u32) -> bool {
        self.program.instructions[index + 1..]
            .iter()
            .take_while(|i| matches!(i, Instruction::Free { .. }))
            .any(|i| *i == Instruction::Free { value: v, micro_batch })
    }

    fn name(&self, v: ValueId) -> Result<&'a str, ExecError> {
        let program = self.program;
        program.values.get(&v).map(|v| v.name.as_str()).ok_or_else(invalid)
    }

    fn reduction_of(&self, parameter: ValueId) -> Result<u32, ExecError> {
        let index = self.program.reductions.iter().position(|r| r.parameter == parameter);
        index.map(|i| i as u32).ok_or_else(invalid)
    }

    fn scalar(&self, tensor: &Tensor) -> Result<f64, ExecError> {
        let values = self.state.backend.download(tensor)?.to_f64();
        values.first().copied().ok_or_else(|| ExecError::State("a reported tensor is empty".into()))
    }
}

/// The error for what [`Program::validate`] rules out.
fn invalid() -> ExecError {
    ExecError::State("the program refers to something missing; it was not validated".into())
}

fn first(results: Vec<Tensor>) -> Result<Tensor, ExecError> {
    results.into_iter().next().ok_or_else(|| ExecError::State("a kernel returned no result".into()))
}
