//! All peers of a plan in this process, one thread each: for tests, and for work without a network.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use fusionllm_backend::Backend;
use fusionllm_compress::Codec;
use fusionllm_graph::{HostTensor, Value, ValueId};
use fusionllm_program::{
    Address, Instruction, LearningRate, Optimizer, PeerId, Program, TensorKey, Verdict, clip_factor, share_of_loss,
};

use crate::{Coder, Communicator, EncodeOptions, ExecError, Executor, HostMemory, Message, PassStats, Script};

/// The settings with which a [`LocalRun`] trains.
#[derive(Debug, Clone, Copy)]
pub struct Training {
    /// The update rule.
    pub optimizer: Optimizer,
    /// The rate of each update.
    pub learning_rate: LearningRate,
    /// Maximum global norm of the gradient; `None` does not clip.
    pub clip: Option<f64>,
    /// Seed of dropout and codecs.
    pub seed: u64,
}

/// The result of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// The batch's loss: the weighted sum of the micro-batches' losses, in their order.
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: f64,
    /// The duration and memory of each peer.
    pub stats: Vec<PassStats>,
}

/// A run whose peers are threads.
pub struct LocalRun {
    executors: Vec<Executor>,
    programs: Vec<Program>,
    scripts: Vec<Script>,
    training: Training,
    updates: u64,
}

impl LocalRun {
    /// One peer per program, on the backend with the same index. `initial` gives the initial value of each parameter,
    /// buffer and constant.
    pub fn new(
        programs: Vec<Program>,
        backends: &[Arc<dyn Backend>],
        training: Training,
        mut initial: impl FnMut(&Value) -> Result<HostTensor, ExecError>,
    ) -> Result<Self, ExecError> {
        if backends.len() != programs.len() {
            return Err(ExecError::State(format!("{} programs, but {} backends", programs.len(), backends.len())));
        }
        let mut executors = Vec::with_capacity(programs.len());
        let mut scripts = Vec::with_capacity(programs.len());
        for (program, backend) in programs.iter().zip(backends) {
            let mut executor = Executor::new(backend.clone(), training.optimizer, training.seed);
            // All peers share this process, and its memory stands for their disks.
            executor.set_disk(Arc::new(HostMemory));
            for holding in &program.holdings {
                let value = &program.values[&holding.value];
                executor.load(&value.name, &initial(value)?)?;
            }
            scripts.push(executor.prepare(program)?);
            executors.push(executor);
        }
        Ok(Self { executors, programs, scripts, training, updates: 0 })
    }

    /// Whether steps from now on are inspected: see [`Executor::set_inspect`].
    pub fn set_inspect(&mut self, inspect: bool) {
        self.executors.iter_mut().for_each(|e| e.set_inspect(inspect));
    }

    /// Runs one training step. Each micro-batch maps the names of the graph's inputs to tensors, `loss_weight`
    /// included.
    pub fn step(&mut self, micro_batches: &[BTreeMap<String, HostTensor>]) -> Result<StepResult, ExecError> {
        // A peer without stages computes no norms.
        let voters = self.programs.iter().filter(|p| p.instructions.contains(&Instruction::Clip)).count();
        let board = Board::new(voters, &self.training, self.updates + 1);
        self.post_inputs(&board, micro_batches)?;
        let stats = self.run_peers(&board)?;
        let board = board.lock();
        let weight = |m: u32| -> f64 {
            micro_batches
                .get(m as usize)
                .and_then(|b| b.get("loss_weight"))
                .and_then(|w| w.to_f64().first().copied())
                .unwrap_or(0.0)
        };
        let loss = board.reports.iter().map(|((_, m), v)| share_of_loss(weight(*m), *v)).sum();
        if board.verdict.is_some_and(|v| v.apply) {
            self.updates += 1;
        }
        Ok(StepResult { loss, grad_norm: board.grad_norm, stats })
    }

    /// Posts the messages that a broker would send.
    fn post_inputs(&self, board: &Board, micro_batches: &[BTreeMap<String, HostTensor>]) -> Result<(), ExecError> {
        for program in &self.programs {
            for (message, (from, _)) in program.incoming() {
                if let Address::Value { value, micro_batch } = message
                    && from == PeerId::BROKER
                {
                    let name = &program.values[&value].name;
                    let tensor = micro_batches.get(micro_batch as usize).and_then(|m| m.get(name));
                    let tensor =
                        tensor.ok_or_else(|| ExecError::State(format!("micro-batch {micro_batch} has no {name:?}")))?;
                    board.lock().mail.insert((program.peer, message), Mail::Exact(tensor.clone()));
                }
            }
        }
        Ok(())
    }

    /// Runs every peer's program on its own thread.
    fn run_peers(&mut self, board: &Board) -> Result<Vec<PassStats>, ExecError> {
        let step = self.updates;
        let results: Vec<_> = std::thread::scope(|scope| {
            let peers = self.executors.iter_mut().zip(self.programs.iter().zip(&self.scripts));
            let threads: Vec<_> = peers
                .map(|(executor, (program, script))| {
                    scope.spawn(move || {
                        let coder = Coder::new(&program.masks);
                        let mut communicator = BoardCommunicator { board, program, coder };
                        let result = executor.run(program, script, 0, step, &mut communicator);
                        if let Err(e) = &result {
                            let mut b = board.lock();
                            b.failed.get_or_insert_with(|| e.to_string());
                            board.changed.notify_all();
                        }
                        result
                    })
                })
                .collect();
            let panicked = |_| Err(ExecError::State("a peer panicked".into()));
            threads.into_iter().map(|t| t.join().unwrap_or_else(panicked)).collect()
        });
        let (ok, errors): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
        // Returns the first cause, rather than the error of a peer that waited for the failed one.
        let mut errors: Vec<ExecError> = errors.into_iter().filter_map(Result::err).collect();
        errors.sort_by_key(|e| matches!(e, ExecError::Communication(_)));
        match errors.into_iter().next() {
            Some(e) => Err(e),
            None => Ok(ok.into_iter().filter_map(Result::ok).collect()),
        }
    }

    /// The present content of a parameter or buffer, or of one slot of a parameter's optimizer state, from its owner.
    /// With plain gradient descent, the momentum buffer after one step is the gradient.
    pub fn read(&self, key: impl Into<TensorKey>) -> Result<HostTensor, ExecError> {
        let key = key.into();
        self.owner(&key.name)?.read(key)
    }

    fn owner(&self, name: &str) -> Result<&Executor, ExecError> {
        let owns = |p: &Program| p.holdings.iter().any(|h| h.owner && p.values[&h.value].name == name);
        self.executors
            .iter()
            .zip(&self.programs)
            .find_map(|(e, p)| owns(p).then_some(e))
            .ok_or_else(|| ExecError::State(format!("no peer owns {name:?}")))
    }
}

/// The peers' shared messages of one step.
struct Board {
    state: Mutex<BoardState>,
    changed: Condvar,
    voters: usize,
    clip: Option<f64>,
    lr: f64,
    update: u64,
}

/// A tensor, or its encoded form.
enum Mail {
    Exact(HostTensor),
    Coded(Vec<u8>),
}

#[derive(Default)]
struct BoardState {
    mail: HashMap<(PeerId, Address), Mail>,
    reports: BTreeMap<(u32, u32), f64>,
    norms: BTreeMap<ValueId, f64>,
    voted: usize,
    verdict: Option<Verdict>,
    grad_norm: f64,
    failed: Option<String>,
}

impl Board {
    fn new(voters: usize, training: &Training, update: u64) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            voters,
            clip: training.clip,
            lr: training.learning_rate.at(update),
            update,
        }
    }

    fn lock(&self) -> MutexGuard<'_, BoardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<T>(&self, mut ready: impl FnMut(&mut BoardState) -> Option<T>) -> Result<T, ExecError> {
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            if let Some(reason) = &state.failed {
                return Err(ExecError::Communication(format!("another peer failed: {reason}")));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct BoardCommunicator<'a> {
    board: &'a Board,
    program: &'a Program,
    coder: Coder,
}

impl Communicator for BoardCommunicator<'_> {
    fn receive(&mut self, pass: u64, tensor: Address, from: PeerId) -> Result<HostTensor, ExecError> {
        match self.board.wait(|b| b.mail.remove(&(self.program.peer, tensor)))? {
            Mail::Exact(content) => Ok(content),
            Mail::Coded(bytes) => {
                let value = self.program.values.get(&tensor.value());
                let value = value.ok_or_else(|| ExecError::State("a message has an unknown value".into()))?;
                self.coder.decode(Message { pass, peer: from, tensor }, &bytes, value.ty.clone())
            }
        }
    }

    fn send(
        &mut self,
        pass: u64,
        tensor: Address,
        to: PeerId,
        content: HostTensor,
        options: EncodeOptions,
    ) -> Result<(), ExecError> {
        let mail = if options.codec == Codec::None {
            Mail::Exact(content)
        } else {
            let mut bytes = Vec::new();
            self.coder.encode(Message { pass, peer: to, tensor }, &content, &options, &mut bytes)?;
            Mail::Coded(bytes)
        };
        self.board.lock().mail.insert((to, tensor), mail);
        self.board.changed.notify_all();
        Ok(())
    }

    fn report(&mut self, _pass: u64, report: u32, micro_batch: u32, value: f64) -> Result<(), ExecError> {
        self.board.lock().reports.insert((report, micro_batch), value);
        Ok(())
    }

    fn verdict(&mut self, _pass: u64, squared_norms: Vec<(ValueId, f64)>) -> Result<Verdict, ExecError> {
        {
            let mut b = self.board.lock();
            b.norms.extend(squared_norms);
            b.voted += 1;
            if b.voted == self.board.voters {
                let norms: Vec<f64> = b.norms.values().copied().collect();
                let (norm, factor) = clip_factor(&norms, self.board.clip);
                b.grad_norm = norm;
                b.verdict =
                    Some(Verdict { apply: norm.is_finite(), update: self.board.update, lr: self.board.lr, factor });
            }
        }
        self.board.changed.notify_all();
        self.board.wait(|b| b.verdict)
    }
}
