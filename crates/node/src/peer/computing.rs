//! The computing thread of one generation: loads the peer's tensors, and then runs its programs.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};

use fusionllm_exec::{Executor, Snapshot};
use fusionllm_graph::{Advice, HostTensor, TensorType};
use fusionllm_program::{Medium, TensorKey};
use fusionllm_protocol::{Assignment, ComputeCommand, SHELF};
use fusionllm_workbench::machine::memory;

use super::compute::{Loading, Mailbox, NetLink, ProgramRunner, Scratch};
use super::cuts::{Kept, Spool};
use super::events::Event;
use super::observer::JoinEvent;
use super::shared::Shared;
use crate::NodeError;

/// The parts of a generation that the computing thread works with.
pub(crate) struct Compute {
    pub(crate) assignment: Arc<Assignment>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) loads: tokio::sync::mpsc::Receiver<Loading>,
    pub(crate) commands: mpsc::Receiver<ComputeCommand>,
}

/// The share of this process's memory that tensors may take before freed memory must return to the system. Where the
/// allocator keeps what is freed, a step has used 1.4 times as much memory as it had tensors.
const AMPLE_SHARE: f64 = 0.7;

/// Whether the tensors of a generation leave no room for freed memory that the allocator keeps.
fn is_memory_short(assignment: &Assignment) -> bool {
    let program = &assignment.train;
    let slots = assignment.optimizer.slots().len();
    let needed = program.kept_bytes(slots).saturating_add(program.peak_bytes());
    let offloads = program.offloaded_bytes(Medium::Disk).total() > 0;
    offloads || memory::limit().is_some_and(|limit| needed as f64 > AMPLE_SHARE * limit as f64)
}

impl Compute {
    /// Starts the thread. Once it has ended and its tensors are freed, the loop gets [`Event::Ended`].
    pub(crate) fn start(self) -> Result<(), NodeError> {
        let (generation, shared) = (self.assignment.generation, self.shared.clone());
        let pool = shared.clone();
        // The programs run on one of the kernels' threads, which saves a hand-over at every kernel. If there is only
        // one thread, its processor time is that of the kernels.
        let span = tracing::info_span!("generation", number = generation, peer = self.assignment.peer.0);
        let work = move || pool.threads.install(move || span.in_scope(|| self.run()));
        let thread = std::thread::Builder::new().name("compute".into()).spawn(work);
        let thread = thread.map_err(|e| NodeError::State(format!("cannot start a thread: {e}")))?;
        tokio::task::spawn_blocking(move || {
            let failure = match thread.join() {
                Ok(result) => result.err().map(|e| e.one_line()),
                Err(_) => Some("the computing thread panicked; this is a bug, please report it".into()),
            };
            shared.send(Event::Ended { generation, failure });
        });
        Ok(())
    }

    fn run(self) -> Result<(), NodeError> {
        let Self { assignment, shared, mailbox, loads, commands } = self;
        let mut executor = Executor::new(shared.backend.clone(), assignment.optimizer, assignment.seed);
        executor.set_groups(assignment.groups.clone());
        executor.set_slowdown(shared.slowdown);
        if is_memory_short(&assignment) {
            let free = || memory::for_tensors().map(|free| free.saturating_add(memory::live_bytes()));
            let room = shared.memory.or_else(free).unwrap_or(0);
            shared.observer.tell(JoinEvent::MemoryShort { room });
        }
        // An evaluation moves no more bytes than a training step.
        if assignment.train.offloaded_bytes(Medium::Disk).total() > 0 {
            executor.set_disk(Arc::new(Scratch::new()?));
        }
        // This comes before anything is loaded, so that memory never holds all tensors.
        executor.rest(&assignment.train)?;
        let Some(link) = load(&mut executor, &assignment, &shared, &mailbox, loads)? else { return Ok(()) };
        let generation = assignment.generation;
        // The snapshot is written before training goes on. Otherwise the next update would need memory for a second
        // version of all tensors.
        let keep = |snapshot: Snapshot, step, save: bool| {
            let mut spool = Spool::new(shared.observer.clone());
            let tensors = snapshot.tensors.iter().map(|t| {
                shared.progress.bump();
                Ok((t.key.clone(), spool.keep(snapshot.download(t)?)))
            });
            let tensors = tensors.collect::<Result<Vec<_>, NodeError>>()?;
            shared.vault.keep(step, tensors.iter().cloned());
            shared.send(Event::CutTaken { generation, step, save: save.then_some(tensors) });
            Ok(())
        };
        let train = assignment.train.clone();
        ProgramRunner { executor, assignment, train, link }.work(&commands, keep)
    }
}

/// Keeps a tensor that never changes on the disk, for later generations. Returns whether it is there. Without room on the
/// disk, it is not kept: memory is for training.
fn shelve(shared: &Shared, spool: &mut Spool, key: &TensorKey, tensor: HostTensor) -> bool {
    if shared.vault.find(SHELF, [key]).is_some() {
        return true;
    }
    match spool.keep(tensor) {
        kept @ Kept::Disk(..) => {
            shared.vault.keep(SHELF, [(key.clone(), kept)]);
            true
        }
        Kept::Memory(_) => false,
    }
}

/// Loads tensors as they come, until all are there. Returns `None` if the generation is stopped before.
fn load(
    executor: &mut Executor,
    assignment: &Assignment,
    shared: &Shared,
    mailbox: &Mailbox,
    mut loads: tokio::sync::mpsc::Receiver<Loading>,
) -> Result<Option<NetLink>, NodeError> {
    let types: BTreeMap<TensorKey, &TensorType> = assignment.tensor_types();
    let wanted = assignment.shelved();
    let mut spool = Spool::new(shared.observer.clone());
    while mailbox.failure().is_none() {
        match loads.blocking_recv() {
            None => break,
            Some(Loading::Start(link)) => return Ok(Some(*link)),
            Some(Loading::Tensor(key, tensor)) => {
                if types.get(&key) != Some(&tensor.ty()) {
                    return Err(NodeError::State(format!("{key} came as {}, which is not its type", tensor.ty())));
                }
                executor.load(key.clone(), &tensor)?;
                shared.progress.bump();
                let shelved = wanted.contains(&key) && shelve(shared, &mut spool, &key, tensor);
                shared.send(Event::Loaded { generation: assignment.generation, key, shelved });
            }
        }
    }
    Ok(None)
}
