use std::sync::Arc;
use std::time::Instant;

use fusionllm_backend::Backend;
use fusionllm_graph::HostTensor;
use fusionllm_plan::{Instruction, Optimizer, Program};

use crate::pass::PassRun;
use crate::state::State;
use crate::{Communicator, ExecError, PassStats, Snapshot};

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

    /// The backend.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.state.backend
    }

    /// Sets a parameter, buffer or constant.
    pub fn load(&mut self, name: &str, tensor: &HostTensor) -> Result<(), ExecError> {
        self.state.load(name, tensor)
    }

    /// Sets one slot of a parameter's optimizer state. The parameter's other slots start at zero.
    pub fn load_slot(&mut self, name: &str, slot: &str, tensor: &HostTensor) -> Result<(), ExecError> {
        self.state.load_slot(name, slot, tensor)
    }

    /// The present content of a parameter, buffer or constant.
    pub fn read(&self, name: &str) -> Result<HostTensor, ExecError> {
        self.state.read(name)
    }

    /// The present content of one slot of an owned parameter's optimizer state.
    pub fn read_slot(&self, name: &str, slot: &str) -> Result<HostTensor, ExecError> {
        self.state.read_slot(name, slot)
    }

    /// Validates a program, checks that its parameters, buffers and constants are loaded with the right types, and
    /// creates missing optimizer state as zeros. Call it once before the first [`Self::run`].
    pub fn prepare(&mut self, program: &Program) -> Result<(), ExecError> {
        self.state.prepare(program)
    }

    /// The present tensors that `program`'s peer owns.
    pub fn snapshot(&self, program: &Program) -> Snapshot {
        self.state.snapshot(program)
    }

    /// Runs a program once. `step` counts the updates before it; counter-based operators draw from it.
    pub fn run(
        &mut self,
        program: &Program,
        pass: u64,
        step: u64,
        communicator: &mut dyn Communicator,
    ) -> Result<PassStats, ExecError> {
        let started = Instant::now();
        let mut run = PassRun::new(&mut self.state, program, self.seed, pass, step, self.slowdown);
        if self.inspect {
            run.inspect()?;
        }
        for (index, instruction) in program.instructions.iter().enumerate() {
            if visible_to_others(instruction) {
                run.pace.sleep_debt();
            }
            run.execute(index, instruction, communicator)?;
            run.stats.peak_bytes = run.stats.peak_bytes.max(run.live_bytes);
            run.pace.count_work();
            communicator.instruction_done(index)?;
        }
        run.pace.sleep_debt();
        let mut stats = PassStats { poison: run.poison(), ..run.stats };
        stats.total_s = started.elapsed().as_secs_f64();
        stats.compute_s = stats.total_s - stats.wait_s;
        Ok(stats)
    }
}

/// Whether other processes can notice when an instruction begins.
fn visible_to_others(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::Receive { .. } | Instruction::Send { .. } | Instruction::Report { .. })
}
