//! One pass: the execution of a Program's script.

use std::collections::HashMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::Instant;

use fusionllm_backend::Tensor;
use fusionllm_graph::{CounterRng, HostTensor};
use fusionllm_program::{Address, Instruction, Medium, PeerId, Poison, Program, TensorKey, Verdict};

use crate::inspect::{Inspector, Level};
use crate::pace::Pace;
use crate::script::{Compute, Script, Step, Variable, invalid};
use crate::state::{Held, State, bytes};
use crate::{Communicator, EncodeOptions, ExecError, Stored, message_seed};

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
    /// The place where a number was first not finite, if the pass was inspected: see
    /// [`Executor::set_inspect`](crate::Executor::set_inspect).
    pub poison: Option<Poison>,
}

/// The key of counter-based operators: a function of (seed, step, micro-batch). `step` counts updates, so a resumed
/// run draws the same numbers.
pub fn rng_key(seed: u64, step: u64, micro_batch: u32) -> i64 {
    let block = CounterRng::new(seed).block(step, u64::from(micro_batch));
    (u64::from(block[0]) | u64::from(block[1]) << 32) as i64
}

/// A pass in flight.
pub(crate) struct PassRun<'a> {
    state: &'a mut State,
    program: &'a Program,
    script: &'a Script,
    seed: u64,
    pass: u64,
    step: u64,
    /// The tensors that do not stay from pass to pass.
    variables: HashMap<Variable, Tensor>,
    /// The tensors among them that are not in memory.
    away: HashMap<Address, Arc<dyn Stored>>,
    verdict: Option<Verdict>,
    /// The inspector, only in a pass that is inspected.
    inspector: Option<Inspector>,
    stats: PassStats,
    live_bytes: u64,
    pace: Pace,
}

impl<'a> PassRun<'a> {
    pub(crate) fn new(
        state: &'a mut State,
        program: &'a Program,
        script: &'a Script,
        (seed, pass, step): (u64, u64, u64),
        slowdown: f64,
    ) -> Self {
        Self {
            live_bytes: state.bytes(),
            state,
            program,
            script,
            seed,
            pass,
            step,
            variables: HashMap::new(),
            away: HashMap::new(),
            verdict: None,
            inspector: None,
            stats: PassStats::default(),
            pace: Pace::new(slowdown),
        }
    }

    /// Looks after each instruction for numbers that are not finite. Each must be a segment of its own.
    pub(crate) fn inspect(&mut self) -> Result<(), ExecError> {
        self.inspector = Some(Inspector::new(self.state, self.program)?);
        Ok(())
    }

    /// Carries out the script. A step that is not applied leaves all that stays from pass to pass as it was.
    pub(crate) fn run(mut self, communicator: &mut dyn Communicator) -> Result<PassStats, ExecError> {
        let started = Instant::now();
        let script = self.script;
        let buffers = self.buffers()?;
        for step in &script.steps {
            match step {
                Step::Alone(index) => {
                    self.pace.sleep_debt();
                    self.instruction(&self.program.instructions[*index], communicator)?;
                    self.count(self.live_bytes);
                    self.pace.count_work();
                    communicator.instruction_done(*index)?;
                }
                Step::Compute(compute) => {
                    self.compute(compute, communicator)?;
                    self.count(self.live_bytes);
                    self.look(compute)?;
                }
            }
        }
        if self.verdict.is_some_and(|verdict| !verdict.apply) {
            buffers.into_iter().for_each(|(key, held)| self.state.put_back(key, held));
        }
        self.pace.sleep_debt();
        let poison = self.inspector.as_ref().and_then(Inspector::surest);
        let total_s = started.elapsed().as_secs_f64();
        Ok(PassStats { poison, total_s, compute_s: total_s - self.stats.wait_s, ..self.stats })
    }

    /// The content of the buffers that the pass changes. It is shared and not copied.
    fn buffers(&self) -> Result<Vec<(TensorKey, Held)>, ExecError> {
        let mut buffers = Vec::with_capacity(self.script.buffers.len());
        for value in &self.script.buffers {
            let key = self.key(Address::Held { value: *value })?;
            buffers.extend(self.state.held(&key).cloned().map(|held| (key, held)));
        }
        Ok(buffers)
    }

    fn count(&mut self, bytes: u64) {
        self.stats.peak_bytes = self.stats.peak_bytes.max(bytes);
    }

    /// Runs a segment, or moves tensors to other variables.
    fn compute(&mut self, compute: &Compute, communicator: &mut dyn Communicator) -> Result<(), ExecError> {
        let Range { start: mut next, end } = compute.instructions;
        for variable in &compute.freed {
            self.take(*variable)?;
        }
        if compute.update && !self.verdict.ok_or_else(invalid)?.apply {
            for (variable, _) in compute
                .inputs
                .iter()
                .filter(|(variable, _)| matches!(variable, Variable::Tensor(Address::Gradient { .. })))
            {
                self.take(*variable)?;
            }
        } else {
            // A tensor that leaves its variable is held by the segment alone, so kernels can work in place.
            let tensor = |(variable, leaves): &(Variable, bool)| match leaves {
                true => self.take(*variable),
                false => self.get(*variable),
            };
            let inputs = compute.inputs.iter().map(tensor).collect::<Result<Vec<_>, _>>()?;
            self.count(self.live_bytes + compute.peak_bytes);
            let results = match &compute.prepared {
                None => compute.moves.iter().map(|i| inputs[*i].clone()).collect(),
                Some(prepared) => {
                    let mut failed = None;
                    let mut done = |node: usize| {
                        self.pace.count_work();
                        while failed.is_none() && next < compute.until[node] {
                            failed = communicator.instruction_done(next).err();
                            next += 1;
                        }
                        if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                    };
                    let results = self.state.backend.run_segment(prepared, inputs, &mut done);
                    failed.map_or(Ok(()), Err)?;
                    results?
                }
            };
            for (variable, tensor) in compute.outputs.iter().zip(results) {
                self.put(*variable, tensor)?;
            }
        }
        for index in next..end {
            communicator.instruction_done(index)?;
        }
        Ok(())
    }

    /// Carries out an instruction that reaches others.
    fn instruction(&mut self, instruction: &Instruction, communicator: &mut dyn Communicator) -> Result<(), ExecError> {
        match *instruction {
            Instruction::Receive { tensor, from } => self.receive(tensor, from, communicator),
            Instruction::Send { tensor, to } => self.send(tensor, to, communicator),
            Instruction::Report { report, value, micro_batch } => {
                let address = Address::Value { value, micro_batch };
                let tensor = self.get(Variable::Tensor(address))?;
                let number = self.numbers(&tensor)?.first().copied();
                let number = number.ok_or_else(|| ExecError::State("a reported tensor is empty".into()))?;
                if let Some(inspector) = &mut self.inspector {
                    inspector.sent(address, number);
                }
                communicator.report(self.pass, report, micro_batch, number)
            }
            Instruction::Clip => self.clip(communicator),
            Instruction::Offload { tensor, to } => self.offload(tensor, to),
            Instruction::Load { tensor, .. } => self.load(tensor),
            _ => Err(invalid()),
        }
    }

    fn receive(&mut self, tensor: Address, from: PeerId, communicator: &mut dyn Communicator) -> Result<(), ExecError> {
        let host = self.wait(|pass| communicator.receive(pass, tensor, from))?;
        if let Some(inspector) = &mut self.inspector {
            inspector.received(tensor, from, &host);
        }
        let received = self.state.backend.upload(&host)?;
        let place = tensor.place();
        // After a step that was not applied, a received parameter equals the copy that is here.
        if place.stays() && self.state.get(&self.key(place)?).is_none() {
            // Otherwise it takes the place of a copy that is not in memory.
            self.live_bytes += bytes(&received);
        }
        self.put(Variable::Tensor(place), received)
    }

    /// Moves a tensor out of the device's memory.
    fn offload(&mut self, address: Address, to: Medium) -> Result<(), ExecError> {
        if address.stays() {
            let freed = self.state.offload(&self.key(address)?, to)?;
            self.live_bytes = self.live_bytes.saturating_sub(freed);
            return Ok(());
        }
        let tensor = self.take(Variable::Tensor(address))?;
        let host = self.state.backend.download(&tensor)?;
        drop(tensor);
        self.away.insert(address, self.state.media.store(to, host)?);
        Ok(())
    }

    /// Moves a tensor back into the device's memory.
    fn load(&mut self, address: Address) -> Result<(), ExecError> {
        if address.stays() {
            self.live_bytes += self.state.fetch(&self.key(address)?)?;
            return Ok(());
        }
        let away = self.away.remove(&address).ok_or_else(invalid)?;
        let tensor = self.state.backend.upload(&away.load()?)?;
        self.put(Variable::Tensor(address), tensor)
    }

    fn send(&mut self, address: Address, to: PeerId, communicator: &mut dyn Communicator) -> Result<(), ExecError> {
        let variable = Variable::Tensor(address.place());
        let tensor = match address {
            Address::Part { .. } => self.take(variable)?,
            _ => self.get(variable)?,
        };
        let seed = message_seed(self.seed, self.step, address);
        let options = EncodeOptions { codec: self.program.codec(address, to), seed };
        let host = self.state.backend.download(&tensor)?;
        communicator.send(self.pass, address, to, host, options)
    }

    /// Sends the norms of the owned gradients and waits for the verdict.
    fn clip(&mut self, communicator: &mut dyn Communicator) -> Result<(), ExecError> {
        let numbers = match self.script.norms.is_empty() {
            true => Vec::new(),
            false => {
                let norms = self.take(Variable::Norms)?;
                self.numbers(&norms)?
            }
        };
        let mut norms = Vec::with_capacity(numbers.len());
        for (parameter, norm) in self.script.norms.iter().copied().zip(numbers) {
            if let Some(inspector) = &mut self.inspector {
                inspector.sent(Address::Gradient { parameter }, norm);
            }
            norms.push((parameter, norm));
        }
        self.verdict = Some(self.wait(|pass| communicator.verdict(pass, norms))?);
        Ok(())
    }

    /// Shows the inspector what a segment of one instruction has computed.
    fn look(&mut self, compute: &Compute) -> Result<(), ExecError> {
        let Some(mut inspector) = self.inspector.take() else { return Ok(()) };
        for instruction in &self.program.instructions[compute.instructions.clone()] {
            inspector.computed(self.program, instruction, |tensor| {
                let made = self.variables.get(&Variable::Tensor(tensor)).ok_or_else(invalid)?;
                Level::on_device(self.state, made)
            })?;
        }
        self.inspector = Some(inspector);
        Ok(())
    }

    /// Waits for others. This time counts neither as computing nor as work to slow down.
    fn wait<T>(&mut self, waiting_for: impl FnOnce(u64) -> Result<T, ExecError>) -> Result<T, ExecError> {
        let started = Instant::now();
        let result = waiting_for(self.pass)?;
        self.stats.wait_s += started.elapsed().as_secs_f64();
        self.pace.restart();
        Ok(result)
    }

    /// The tensor in a variable. It stays there.
    fn get(&mut self, variable: Variable) -> Result<Tensor, ExecError> {
        if let Some(address) = variable.lasting() {
            let key = self.key(address)?;
            let tensor = self.state.get(&key).cloned();
            return tensor.ok_or_else(|| ExecError::State(format!("this peer has no tensor {key} in memory")));
        }
        let host = match variable {
            _ if let Some(tensor) = self.variables.get(&variable) => return Ok(tensor.clone()),
            Variable::Key(micro_batch) => HostTensor::from_i64([], &[rng_key(self.seed, self.step, micro_batch)])?,
            Variable::Hyper(rate) => {
                let verdict = self.verdict.ok_or_else(invalid)?;
                let hyper = self.state.optimizer.hyper(&verdict, rate.get());
                HostTensor::from_f64([hyper.len()], &hyper)?
            }
            _ => return Err(invalid()),
        };
        let tensor = self.state.backend.upload(&host)?;
        self.variables.insert(variable, tensor.clone());
        Ok(tensor)
    }

    /// The tensor in a variable, which is empty then.
    fn take(&mut self, variable: Variable) -> Result<Tensor, ExecError> {
        if let Some(address) = variable.lasting() {
            return self.state.take(&self.key(address)?).ok_or_else(invalid);
        }
        let tensor = self.variables.remove(&variable).ok_or_else(invalid)?;
        self.live_bytes = self.live_bytes.saturating_sub(bytes(&tensor));
        Ok(tensor)
    }

    fn put(&mut self, variable: Variable, tensor: Tensor) -> Result<(), ExecError> {
        if let Some(address) = variable.lasting() {
            self.state.put(self.key(address)?, tensor);
        } else {
            self.live_bytes += bytes(&tensor);
            self.variables.insert(variable, tensor);
        }
        Ok(())
    }

    fn key(&self, address: Address) -> Result<TensorKey, ExecError> {
        self.program.key(address, self.state.optimizer).ok_or_else(invalid)
    }

    fn numbers(&self, tensor: &Tensor) -> Result<Vec<f64>, ExecError> {
        Ok(self.state.backend.download(tensor)?.to_f64())
    }
}
