use std::collections::BTreeMap;
use std::sync::Arc;

use fusionllm_backend::Backend;
use fusionllm_graph::HostTensor;
use fusionllm_program::{Optimizer, ParameterGroup, Program, TensorKey};

use crate::pass::PassRun;
use crate::script::Script;
use crate::state::State;
use crate::{Communicator, ExecError, PassStats, Snapshot, Storage};

/// Runs Programs on a backend, and keeps a peer's tensors between them.
pub struct Executor {
    state: State,
    seed: u64,
    slowdown: f64,
    inspect: bool,
}

impl Executor {
    /// An executor without tensors. `seed` is the seed of dropout and of codecs.
    pub fn new(backend: Arc<dyn Backend>, optimizer: Optimizer, seed: u64) -> Self {
        Self { state: State::new(backend, optimizer), seed, slowdown: 1.0, inspect: false }
    }

    /// Imitates a machine on which all work takes `slowdown` times as long; 1 or less changes nothing.
    ///
    /// The executor sleeps for the difference to that multiple of the calling thread's processor time. So the backend
    /// must compute on that thread alone.
    pub fn set_slowdown(&mut self, slowdown: f64) {
        self.slowdown = slowdown;
    }

    /// Whether passes from now on are inspected. After each operator, the executor then looks for numbers that are not
    /// finite, and [`PassStats::poison`] says where the first one came from. Results stay the same. Such a pass takes
    /// longer, because every result is copied to the host.
    pub fn set_inspect(&mut self, inspect: bool) {
        self.inspect = inspect;
    }

    /// Sets the parameters, by name, whose rate and decay are not the optimizer's, in programs that are prepared from
    /// now on.
    pub fn set_groups(&mut self, groups: BTreeMap<String, ParameterGroup>) {
        self.state.groups = groups;
    }

    /// The backend.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.state.backend
    }

    /// Sets the storage for tensors that programs offload to the disk. Without one, such programs fail.
    pub fn set_disk(&mut self, disk: Arc<dyn Storage>) {
        self.state.media.disk = Some(disk);
    }

    /// Keeps the tensors away that `program` has outside the device's memory between passes, from now on. Tensors that
    /// are loaded go there at once. Without this call, they are in memory until the program is prepared.
    ///
    /// # Errors
    ///
    /// The program is not valid, or the medium has no room.
    pub fn rest(&mut self, program: &Program) -> Result<(), ExecError> {
        self.state.rest(program)
    }

    /// Sets a parameter, buffer or constant, or one slot of a parameter's optimizer state. The parameter's other slots
    /// start at zero.
    ///
    /// # Errors
    ///
    /// The optimizer has no such slot, or the tensor's medium has no room.
    pub fn load(&mut self, key: impl Into<TensorKey>, tensor: &HostTensor) -> Result<(), ExecError> {
        self.state.load(key.into(), tensor)
    }

    /// The present content of a tensor that stays from pass to pass.
    ///
    /// # Errors
    ///
    /// This peer does not have it.
    pub fn read(&self, key: impl Into<TensorKey>) -> Result<HostTensor, ExecError> {
        self.state.read(&key.into())
    }

    /// Validates a program, checks that its parameters, buffers and constants are loaded with the right types, creates
    /// missing optimizer state as zeros, and has the backend prepare its segments.
    pub fn prepare(&mut self, program: &Program) -> Result<Script, ExecError> {
        self.state.prepare(program)?;
        Script::new(program, &self.state, false)
    }

    /// Prepares a program with each instruction as a segment of its own, to see what each one takes or computes.
    /// Results have the same bits if the backend runs segments operator by operator.
    pub fn prepare_each(&mut self, program: &Program) -> Result<Script, ExecError> {
        self.state.prepare(program)?;
        Script::new(program, &self.state, true)
    }

    /// The present tensors that `program`'s peer owns.
    pub fn snapshot(&self, program: &Program) -> Snapshot {
        self.state.snapshot(program)
    }

    /// Runs a program once, by the script that [`Self::prepare`] made of it. Codecs may have changed since. `step`
    /// counts the updates before it; counter-based operators draw from it.
    pub fn run(
        &mut self,
        program: &Program,
        script: &Script,
        pass: u64,
        step: u64,
        communicator: &mut dyn Communicator,
    ) -> Result<PassStats, ExecError> {
        if script.instructions != program.instructions.len() {
            return Err(ExecError::State("the script is another program's".into()));
        }
        let numbers = (self.seed, pass, step);
        if !self.inspect {
            return PassRun::new(&mut self.state, program, script, numbers, self.slowdown).run(communicator);
        }
        let script = self.prepare_each(program)?;
        let mut run = PassRun::new(&mut self.state, program, &script, numbers, self.slowdown);
        run.inspect()?;
        run.run(communicator)
    }
}
