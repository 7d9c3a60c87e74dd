use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use fusionllm_backend::{Backend, Tensor};
use fusionllm_compress::Codec;
use fusionllm_graph::ops::{Binary, SquaredNorm};
use fusionllm_graph::{CounterRng, DType, HostTensor, TensorType, ValueId, ValueKind};
use fusionllm_plan::{Instruction, Optimizer, PeerId, Program, Slot, Verdict};

use crate::pace::Pace;
use crate::{EncodeOptions, ExecError, message_seed};

/// The world outside a peer. One pass is one run of a Program; passes are numbered so that no message is taken for another's.
pub trait Communicator {
    /// Waits for a message.
    fn receive(&mut self, pass: u64, slot: Slot, from: PeerId) -> Result<HostTensor, ExecError>;

    /// Hands over a message; never waits for the network, nor for the codec.
    fn send(
        &mut self,
        pass: u64,
        slot: Slot,
        to: PeerId,
        tensor: HostTensor,
        coding: EncodeOptions,
    ) -> Result<(), ExecError>;

    /// Tells the broker a scalar.
    fn report(&mut self, pass: u64, report: u32, micro_batch: u32, value: f64) -> Result<(), ExecError>;

    /// Tells the broker the squared norms of the owned gradients, in graph order, and waits for its verdict.
    fn verdict(&mut self, pass: u64, squared_norms: Vec<(ValueId, f64)>) -> Result<Verdict, ExecError>;

    /// Learns that instruction `at` was carried out.
    fn instruction_done(&mut self, _at: usize) -> Result<(), ExecError> {
        Ok(())
    }
}

/// What a pass took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PassStats {
    /// Seconds of all but waiting, what [`Executor::set_slowdown`] adds to them included.
    pub compute_s: f64,
    /// Seconds waiting for messages and for the verdict.
    pub wait_s: f64,
    /// Seconds in all.
    pub total_s: f64,
    /// Most bytes held at once: parameters, state, gradients and activations, views counted as copies.
    pub peak_bytes: u64,
}

/// A tensor as it was at one step.
#[derive(Debug, Clone)]
pub struct SnapshotTensor {
    /// The parameter's or buffer's name; for optimiser state with the slot's name behind it.
    pub name: String,
    /// The slot, for optimiser state.
    pub slot: Option<&'static str>,
    tensor: Tensor,
}

/// All that a peer owns, as it was at one step. Cheap to take; training goes on while it is read.
pub struct Snapshot {
    /// The tensors, by name.
    pub tensors: Vec<SnapshotTensor>,
    backend: Arc<dyn Backend>,
}

impl Snapshot {
    /// Copies a tensor to the host.
    pub fn download(&self, tensor: &SnapshotTensor) -> Result<HostTensor, ExecError> {
        Ok(self.backend.download(&tensor.tensor)?)
    }
}

/// The key that stands for (seed, step, micro-batch) in counter-based operators. The step counts updates, so that a resumed run draws the same.
pub fn rng_key(seed: u64, step: u64, micro_batch: u32) -> i64 {
    let block = CounterRng::new(seed).block(step, u64::from(micro_batch));
    (u64::from(block[0]) | u64::from(block[1]) << 32) as i64
}

/// A peer's state and the machine that runs its Programs.
pub struct Executor {
    backend: Arc<dyn Backend>,
    optimizer: Optimizer,
    seed: u64,
    slowdown: f64,
    /// Parameters, buffers and constants by name.
    state: BTreeMap<String, Tensor>,
    /// Optimiser state of owned parameters by name, one tensor per slot.
    slots: BTreeMap<String, Vec<Tensor>>,
}

impl Executor {
    /// An executor that holds nothing yet.
    pub fn new(backend: Arc<dyn Backend>, optimizer: Optimizer, seed: u64) -> Self {
        Self { backend, optimizer, seed, slowdown: 1.0, state: BTreeMap::new(), slots: BTreeMap::new() }
    }

    /// Stands for a machine on which all work takes `slowdown` times as long, at least 1: what is missing to so many times the
    /// CPU time that instructions took on the calling thread is waited out. So the backend must compute on that thread alone.
    pub fn set_slowdown(&mut self, slowdown: f64) {
        self.slowdown = slowdown;
    }

    /// The backend it runs on.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Sets a parameter, buffer or constant.
    pub fn load(&mut self, name: &str, tensor: &HostTensor) -> Result<(), ExecError> {
        let tensor = self.backend.upload(tensor)?;
        self.state.insert(name.into(), tensor);
        Ok(())
    }

    /// Sets a slot of a parameter's optimiser state.
    pub fn load_slot(&mut self, name: &str, slot: &str, tensor: &HostTensor) -> Result<(), ExecError> {
        let Some(index) = self.optimizer.slots().iter().position(|s| *s == slot) else {
            return Err(ExecError::State(format!("the optimiser has no state {slot:?} for {name:?}")));
        };
        let zeros = HostTensor::zeros(tensor.ty().clone());
        if !self.slots.contains_key(name) {
            let fresh = self.optimizer.slots().iter().map(|_| self.backend.upload(&zeros)).collect::<Result<_, _>>()?;
            self.slots.insert(name.into(), fresh);
        }
        if let Some(slots) = self.slots.get_mut(name) {
            slots[index] = self.backend.upload(tensor)?;
        }
        Ok(())
    }

    /// A parameter, buffer or constant as it is now.
    pub fn read(&self, name: &str) -> Result<HostTensor, ExecError> {
        match self.state.get(name) {
            Some(t) => Ok(self.backend.download(t)?),
            None => Err(ExecError::State(format!("there is no tensor {name:?} here"))),
        }
    }

    /// A slot of an owned parameter's optimiser state as it is now.
    pub fn read_slot(&self, name: &str, slot: &str) -> Result<HostTensor, ExecError> {
        let index = self.optimizer.slots().iter().position(|s| *s == slot);
        match index.and_then(|i| self.slots.get(name)?.get(i)) {
            Some(t) => Ok(self.backend.download(t)?),
            None => Err(ExecError::State(format!("there is no state {slot:?} of {name:?} here"))),
        }
    }

    /// Checks that all a program keeps is loaded with the right type, and makes the optimiser state of what it owns and trains.
    pub fn prepare(&mut self, program: &Program) -> Result<(), ExecError> {
        program.validate()?;
        for holding in &program.holdings {
            let value = &program.values[&holding.value];
            match self.state.get(&value.name) {
                None => return Err(ExecError::State(format!("{:?} was not loaded", value.name))),
                Some(t) if *t.ty() != value.ty => {
                    return Err(ExecError::State(format!(
                        "{:?} is {}, but {} was loaded",
                        value.name,
                        value.ty,
                        t.ty()
                    )));
                }
                Some(_) => {}
            }
        }
        for r in program.reductions.iter().filter(|r| r.owner == program.peer) {
            let value = &program.values[&r.parameter];
            if !self.slots.contains_key(&value.name) {
                let zeros = HostTensor::zeros(value.ty.clone());
                let fresh =
                    self.optimizer.slots().iter().map(|_| self.backend.upload(&zeros)).collect::<Result<_, _>>()?;
                self.slots.insert(value.name.clone(), fresh);
            }
        }
        Ok(())
    }

    /// All that `program`'s peer owns, as it is now.
    pub fn snapshot(&self, program: &Program) -> Snapshot {
        let mut tensors = Vec::new();
        for holding in program.holdings.iter().filter(|h| h.owner) {
            let value = &program.values[&holding.value];
            if value.kind == ValueKind::Constant {
                continue;
            }
            if let Some(tensor) = self.state.get(&value.name) {
                tensors.push(SnapshotTensor { name: value.name.clone(), slot: None, tensor: tensor.clone() });
            }
            for (slot, tensor) in self.optimizer.slots().iter().zip(self.slots.get(&value.name).into_iter().flatten()) {
                tensors.push(SnapshotTensor { name: value.name.clone(), slot: Some(slot), tensor: tensor.clone() });
            }
        }
        Snapshot { tensors, backend: self.backend.clone() }
    }

    /// Carries out a program once. `step` is the number of updates before it, which counter-based operators draw from.
    pub fn run(
        &mut self,
        program: &Program,
        pass: u64,
        step: u64,
        link: &mut dyn Communicator,
    ) -> Result<PassStats, ExecError> {
        let started = Instant::now();
        let mut run = Run {
            program,
            pass,
            step,
            values: HashMap::new(),
            parts: HashMap::new(),
            gradients: HashMap::new(),
            verdict: None,
            masks: HashMap::new(),
            stats: PassStats::default(),
            live_bytes: 0,
            pace: Pace::new(self.slowdown),
        };
        run.live_bytes = self.state.values().chain(self.slots.values().flatten()).map(bytes).sum();
        for (at, instruction) in program.instructions.iter().enumerate() {
            if seen(instruction) {
                run.pace.settle();
            }
            run.carry_out(self, at, instruction, link)?;
            run.stats.peak_bytes = run.stats.peak_bytes.max(run.live_bytes);
            run.pace.keep();
            link.instruction_done(at)?;
        }
        run.pace.settle();
        run.stats.total_s = started.elapsed().as_secs_f64();
        run.stats.compute_s = run.stats.total_s - run.stats.wait_s;
        Ok(run.stats)
    }
}

fn bytes(t: &Tensor) -> u64 {
    t.ty().bytes() as u64
}

/// One pass under way.
struct Run<'a> {
    program: &'a Program,
    pass: u64,
    step: u64,
    values: HashMap<(ValueId, u32), Tensor>,
    /// Sums over micro-batches, by (reduction, part).
    parts: HashMap<(u32, u32), Tensor>,
    /// Whole gradients, by reduction.
    gradients: HashMap<u32, Tensor>,
    verdict: Option<Verdict>,
    /// For [`Program::masks`], by value and micro-batch: who sent it, and a bit for each of its numbers that is not zero.
    masks: HashMap<(ValueId, u32), (PeerId, Vec<u8>)>,
    stats: PassStats,
    live_bytes: u64,
    pace: Pace,
}

impl Run<'_> {
    fn carry_out(
        &mut self,
        e: &mut Executor,
        at: usize,
        instruction: &Instruction,
        link: &mut dyn Communicator,
    ) -> Result<(), ExecError> {
        match *instruction {
            Instruction::Receive { slot, from } => {
                let host = self.wait(|pass| link.receive(pass, slot, from))?;
                if let Slot::Value { value, micro_batch } = slot
                    && self.program.masks.values().any(|of| of.contains(&value))
                {
                    let (numbers, _) = host.bytes().as_chunks::<4>();
                    let bit = |bits: u8, x: &[u8; 4]| bits << 1 | u8::from(f32::from_le_bytes(*x) != 0.0);
                    let mask = numbers.chunks(8).map(|eight| eight.iter().rev().fold(0, bit)).collect();
                    self.masks.insert((value, micro_batch), (from, mask));
                }
                let tensor = e.backend.upload(&host)?;
                match slot {
                    Slot::Value { value, micro_batch } => self.put(value, micro_batch, tensor),
                    Slot::Part { parameter, part } => {
                        let reduction = self.reduction_of(parameter)?;
                        self.live_bytes += bytes(&tensor);
                        self.parts.insert((reduction, part), tensor);
                    }
                    // A step that was not applied leaves every copy of a parameter as it was.
                    Slot::Parameter { parameter: v } | Slot::Buffer { buffer: v, .. } => {
                        e.state.insert(self.name(v)?.into(), tensor);
                    }
                }
            }
            Instruction::Run { node, micro_batch } => {
                let node = self.program.nodes.get(&node).ok_or_else(|| self.broken())?;
                let mut inputs = Vec::with_capacity(node.inputs.len());
                for (i, v) in node.inputs.iter().enumerate() {
                    let last = !node.inputs[i + 1..].contains(v) && self.freed_next(at, *v, micro_batch);
                    inputs.push(self.operand(e, *v, micro_batch, last)?);
                }
                let types: Vec<TensorType> = node.outputs.iter().map(|v| self.program.values[v].ty.clone()).collect();
                let results = e.backend.run(&node.op, inputs, &types)?;
                for (v, tensor) in node.outputs.iter().zip(results) {
                    self.put(*v, micro_batch, tensor);
                }
            }
            Instruction::Send { slot, to } => {
                let tensor = match slot {
                    Slot::Value { value, micro_batch } => self.operand(e, value, micro_batch, false)?,
                    Slot::Part { parameter, part } => {
                        let reduction = self.reduction_of(parameter)?;
                        let tensor = self.parts.remove(&(reduction, part)).ok_or_else(|| self.broken())?;
                        self.live_bytes = self.live_bytes.saturating_sub(bytes(&tensor));
                        tensor
                    }
                    Slot::Parameter { parameter: v } | Slot::Buffer { buffer: v, .. } => {
                        e.state.get(self.name(v)?).cloned().ok_or_else(|| self.broken())?
                    }
                };
                let coding =
                    EncodeOptions { codec: self.program.codec(slot, to), seed: message_seed(e.seed, self.step, slot) };
                let mut host = e.backend.download(&tensor)?;
                if let Codec::TopK(_) = coding.codec {
                    host = self.masked(host, slot, to)?;
                }
                link.send(self.pass, slot, to, host, coding)?;
            }
            Instruction::Free { value, micro_batch } => {
                if let Some(tensor) = self.values.remove(&(value, micro_batch)) {
                    self.live_bytes = self.live_bytes.saturating_sub(bytes(&tensor));
                }
            }
            Instruction::Accumulate { reduction, part, value, micro_batch } => {
                let last = self.freed_next(at, value, micro_batch);
                let value = self.operand(e, value, micro_batch, last)?;
                let sum = match self.parts.remove(&(reduction, part)) {
                    None => {
                        self.live_bytes += bytes(&value);
                        value
                    }
                    Some(sum) => Self::add(e, sum, value)?,
                };
                self.parts.insert((reduction, part), sum);
            }
            Instruction::UpdateState { buffer, value, micro_batch } => {
                let tensor = self.operand(e, value, micro_batch, false)?;
                e.state.insert(self.name(buffer)?.into(), tensor);
            }
            Instruction::Report { report, value, micro_batch } => {
                let tensor = self.operand(e, value, micro_batch, false)?;
                let scalar = scalar(e, &tensor)?;
                link.report(self.pass, report, micro_batch, scalar)?;
            }
            Instruction::Reduce { reduction } => {
                let count = self.program.reductions.get(reduction as usize).ok_or_else(|| self.broken())?.parts.len();
                let mut sum = self.parts.remove(&(reduction, 0)).ok_or_else(|| self.broken())?;
                for part in 1..count as u32 {
                    let next = self.parts.remove(&(reduction, part)).ok_or_else(|| self.broken())?;
                    self.live_bytes = self.live_bytes.saturating_sub(bytes(&next));
                    sum = Self::add(e, sum, next)?;
                }
                self.gradients.insert(reduction, sum);
            }
            Instruction::Clip => {
                let mut norms = Vec::new();
                for (i, r) in self.program.reductions.iter().enumerate() {
                    if let Some(gradient) = self.gradients.get(&(i as u32)).cloned() {
                        let ty = TensorType::new(DType::F64, []);
                        let norm = e.backend.run(&SquaredNorm.into(), vec![gradient], &[ty])?;
                        norms.push((r.parameter, scalar(e, &first(norm)?)?));
                    }
                }
                self.pace.settle();
                self.verdict = Some(self.wait(|pass| link.verdict(pass, norms))?);
            }
            Instruction::Update { reduction } => self.update(e, reduction)?,
        }
        Ok(())
    }

    fn update(&mut self, e: &mut Executor, reduction: u32) -> Result<(), ExecError> {
        let parameter = self.program.reductions.get(reduction as usize).ok_or_else(|| self.broken())?.parameter;
        let gradient = self.gradients.remove(&reduction).ok_or_else(|| self.broken())?;
        self.live_bytes = self.live_bytes.saturating_sub(bytes(&gradient));
        let verdict = self.verdict.ok_or_else(|| self.broken())?;
        if !verdict.apply {
            return Ok(());
        }
        let name = self.name(parameter)?.to_string();
        let hyper = e.optimizer.hyper(&verdict);
        let hyper = e.backend.upload(&HostTensor::from_f64([hyper.len()], &hyper)?)?;
        // Taken out of the state, so that their sole holder, the kernel, can update them in place.
        let held = e.state.remove(&name).ok_or_else(|| self.broken())?;
        let slots = e.slots.remove(&name).ok_or_else(|| self.broken())?;
        let types = vec![held.ty().clone(); 1 + slots.len()];
        let mut operands = vec![held, gradient];
        operands.extend(slots);
        operands.push(hyper);
        let mut results = e.backend.run(&e.optimizer.op(), operands, &types)?.into_iter();
        let updated = results.next().ok_or_else(|| self.broken())?;
        e.state.insert(name.clone(), updated);
        e.slots.insert(name, results.collect());
        Ok(())
    }

    /// Waits for what others do, which is no work.
    fn wait<T>(&mut self, for_them: impl FnOnce(u64) -> Result<T, ExecError>) -> Result<T, ExecError> {
        let waiting = Instant::now();
        let result = for_them(self.pass)?;
        self.stats.wait_s += waiting.elapsed().as_secs_f64();
        self.pace.resume();
        Ok(result)
    }

    /// A gradient without the entries that `to` left out of the values that it is a gradient of.
    fn masked(&self, gradient: HostTensor, slot: Slot, to: PeerId) -> Result<HostTensor, ExecError> {
        let (Slot::Value { micro_batch, .. }, Some(of)) = (slot, self.program.masks.get(&slot.value())) else {
            return Ok(gradient);
        };
        let came = of.iter().filter_map(|v| self.masks.get(&(*v, micro_batch)));
        let masks: Vec<&Vec<u8>> = came.filter(|(from, _)| *from == to).map(|(_, mask)| mask).collect();
        if masks.is_empty() {
            return Ok(gradient);
        }
        let ty = gradient.ty().clone();
        let mut data = gradient.into_bytes();
        for (i, number) in data.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let kept = |mask: &&Vec<u8>| mask.get(i / 8).is_some_and(|bits| bits >> (i % 8) & 1 == 1);
            if !masks.iter().any(kept) {
                *number = [0; 4];
            }
        }
        Ok(HostTensor::from_bytes(ty, data)?)
    }

    fn add(e: &Executor, a: Tensor, b: Tensor) -> Result<Tensor, ExecError> {
        let ty = a.ty().clone();
        first(e.backend.run(&Binary::Add.into(), vec![a, b], &[ty])?)
    }

    fn put(&mut self, value: ValueId, micro_batch: u32, tensor: Tensor) {
        self.live_bytes += bytes(&tensor);
        self.values.insert((value, micro_batch), tensor);
    }

    /// A value of a micro-batch, given up here if this is its `last` use.
    fn operand(&mut self, e: &Executor, v: ValueId, micro_batch: u32, last: bool) -> Result<Tensor, ExecError> {
        if last && let Some(tensor) = self.values.remove(&(v, micro_batch)) {
            self.live_bytes = self.live_bytes.saturating_sub(bytes(&tensor));
            return Ok(tensor);
        }
        if let Some(tensor) = self.values.get(&(v, micro_batch)) {
            return Ok(tensor.clone());
        }
        let value = self.program.values.get(&v).ok_or_else(|| self.broken())?;
        if value.kind == ValueKind::RngKey {
            let key = rng_key(e.seed, self.step, micro_batch);
            return Ok(e.backend.upload(&HostTensor::from_i64([], &[key])?)?);
        }
        e.state.get(&value.name).cloned().ok_or_else(|| ExecError::State(format!("{:?} is not here", value.name)))
    }

    /// Whether a value is given up right behind instruction `at`.
    fn freed_next(&self, at: usize, v: ValueId, micro_batch: u32) -> bool {
        self.program.instructions[at + 1..]
            .iter()
            .take_while(|i| matches!(i, Instruction::Free { .. }))
            .any(|i| *i == Instruction::Free { value: v, micro_batch })
    }

    fn name(&self, v: ValueId) -> Result<&str, ExecError> {
        self.program.values.get(&v).map(|v| v.name.as_str()).ok_or_else(|| self.broken())
    }

    fn reduction_of(&self, parameter: ValueId) -> Result<u32, ExecError> {
        self.program
            .reductions
            .iter()
            .position(|r| r.parameter == parameter)
            .map(|i| i as u32)
            .ok_or_else(|| self.broken())
    }

    /// What [`Program::validate`] rules out.
    fn broken(&self) -> ExecError {
        ExecError::State("the program names what is not there; it was not validated".into())
    }
}

/// Whether others see when an instruction begins.
fn seen(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::Receive { .. } | Instruction::Send { .. } | Instruction::Report { .. })
}

fn first(results: Vec<Tensor>) -> Result<Tensor, ExecError> {
    results.into_iter().next().ok_or_else(|| ExecError::State("a kernel gave no result".into()))
}

fn scalar(e: &Executor, tensor: &Tensor) -> Result<f64, ExecError> {
    e.backend.download(tensor)?.to_f64().first().copied().ok_or_else(|| ExecError::State("a report is empty".into()))
}
