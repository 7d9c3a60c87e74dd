//! The thread that writes checkpoints, so that no step waits for a disk.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use bytes::Bytes;
use fusionllm_graph::{HostTensor, TensorType};
use fusionllm_program::TensorKey;
use fusionllm_protocol::TrainingProgress;
use fusionllm_workspace::checkpoint::{CheckpointError, CheckpointWriter, Checkpoints, Part, State};
use fusionllm_workspace::run_dir::best_checkpoint;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::NodeError;

/// The most pieces of tensors that wait for the disk. Each peer may have one more on its way. Others stay on the
/// network.
const MAX_WAITING_PIECES: usize = 8;

/// A report of the thread.
pub(crate) enum KeeperEvent {
    /// The checkpoint is whole, and older ones are pruned.
    Committed(TrainingProgress),
    /// The checkpoint is not written: the disk failed, or a snapshot is not as announced.
    Failed(TrainingProgress, NodeError),
}

/// A piece of a tensor of a peer's snapshot.
pub(crate) struct SavedPiece {
    pub(crate) step: u64,
    pub(crate) key: TensorKey,
    /// The type of the whole tensor.
    pub(crate) ty: TensorType,
    /// The place of the first byte in it.
    pub(crate) start: u64,
    pub(crate) bytes: Bytes,
}

/// The data that complete a checkpoint once all its tensors have come.
pub(crate) struct Seal {
    pub(crate) state: State,
    /// Small files beside the tensors.
    pub(crate) extra: Vec<(&'static str, Vec<u8>)>,
    /// The number of checkpoints that stay.
    pub(crate) keep: usize,
    /// Whether the one with the lowest validation loss stays, too.
    pub(crate) keep_best: bool,
}

/// Names and types of a checkpoint's tensors.
pub(crate) struct Saved {
    /// Parameters and buffers, which peers send.
    pub(crate) model: Vec<(String, TensorType)>,
    /// Optimizer state, which peers send.
    pub(crate) optimizer: Vec<(String, TensorType)>,
    /// The rest of the model's state.
    pub(crate) kept: BTreeMap<String, HostTensor>,
}

enum Command {
    Begin { step: u64, tensors: Saved },
    Put(SavedPiece, OwnedSemaphorePermit),
    Commit(Seal),
    Abandon(u64),
    Stop,
}

/// A handle on the thread. When dropped, it waits for the thread, which leaves no half-written checkpoint.
pub(crate) struct Keeper {
    inbox: Inbox,
    thread: Option<JoinHandle<()>>,
}

/// The entry for tensors on their way to the thread.
#[derive(Clone)]
pub(crate) struct Inbox {
    commands: mpsc::UnboundedSender<Command>,
    free_places: Arc<Semaphore>,
}

impl Inbox {
    /// Hands over a piece once fewer than [`MAX_WAITING_PIECES`] wait.
    pub(crate) async fn put(&self, piece: SavedPiece) {
        // The semaphore is never closed, and the thread outlives the run.
        if let Ok(permit) = self.free_places.clone().acquire_owned().await {
            let _ = self.commands.send(Command::Put(piece, permit));
        }
    }
}

impl Keeper {
    /// Starts the thread, which reports to `on_event`.
    pub(crate) fn start(
        checkpoints: Checkpoints,
        on_event: impl Fn(KeeperEvent) + Send + 'static,
    ) -> Result<Self, NodeError> {
        let (commands, mut given) = mpsc::unbounded_channel();
        let work = move || {
            let mut checkpoint_thread = CheckpointThread { checkpoints, writing: BTreeMap::new() };
            while let Some(command) = given.blocking_recv().filter(|c| !matches!(c, Command::Stop)) {
                if let Some(event) = checkpoint_thread.carry_out(command) {
                    on_event(event);
                }
            }
        };
        let thread = std::thread::Builder::new().name("checkpoints".into()).spawn(work);
        let thread = thread.map_err(|e| NodeError::State(format!("no thread for checkpoints: {e}")))?;
        let inbox = Inbox { commands, free_places: Arc::new(Semaphore::new(MAX_WAITING_PIECES)) };
        Ok(Self { inbox, thread: Some(thread) })
    }

    pub(crate) fn inbox(&self) -> Inbox {
        self.inbox.clone()
    }

    /// Opens the checkpoint of a step for the tensors to come.
    pub(crate) fn begin(&self, step: u64, tensors: Saved) {
        self.command(Command::Begin { step, tensors });
    }

    /// Completes the checkpoint after its last tensor.
    pub(crate) fn commit(&self, seal: Seal) {
        self.command(Command::Commit(seal));
    }

    /// Forgets the checkpoint of a step, which will not be complete.
    pub(crate) fn abandon(&self, step: u64) {
        self.command(Command::Abandon(step));
    }

    fn command(&self, command: Command) {
        // If the thread has ended, it reported the reason.
        let _ = self.inbox.commands.send(command);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.command(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The state that the thread itself keeps.
struct CheckpointThread {
    checkpoints: Checkpoints,
    /// The checkpoints being written, by step. If one cannot be complete, the run learns the reason at its end.
    writing: BTreeMap<u64, Result<CheckpointWriter, NodeError>>,
}

impl CheckpointThread {
    fn carry_out(&mut self, command: Command) -> Option<KeeperEvent> {
        match command {
            Command::Begin { step, tensors } => {
                let writer = self.begin(step, tensors);
                self.writing.insert(step, writer.map_err(NodeError::from));
                None
            }
            Command::Put(SavedPiece { step, key, ty, start, bytes }, _place) => {
                // A peer may still send tensors of a checkpoint that was abandoned.
                let writing = self.writing.get_mut(&step)?;
                let writer = writing.as_mut().ok()?;
                let (part, name) = match &key.slot {
                    None => (Part::Model, key.name.clone()),
                    Some(slot) => (Part::Optimizer, format!("{}.{slot}", key.name)),
                };
                let start = usize::try_from(start).unwrap_or(usize::MAX);
                let result = writer.put_piece(part, &name, &ty, start, &bytes);
                if let Err(e) = result {
                    *writing = Err(e.into());
                }
                None
            }
            Command::Commit(seal) => {
                let progress = TrainingProgress { step: seal.state.step, updates: seal.state.updates };
                Some(match self.commit(seal) {
                    Ok(()) => KeeperEvent::Committed(progress),
                    Err(e) => KeeperEvent::Failed(progress, e),
                })
            }
            Command::Abandon(step) => {
                self.writing.remove(&step);
                None
            }
            Command::Stop => None,
        }
    }

    /// A checkpoint with the tensors that no peer sends.
    fn begin(&self, step: u64, tensors: Saved) -> Result<CheckpointWriter, CheckpointError> {
        let Saved { mut model, optimizer, kept } = tensors;
        model.extend(kept.iter().map(|(name, tensor)| (name.clone(), tensor.ty().clone())));
        let mut writer = self.checkpoints.begin(step, &model, &optimizer)?;
        kept.iter().try_for_each(|(name, tensor)| writer.put(Part::Model, name, tensor))?;
        Ok(writer)
    }

    fn commit(&mut self, Seal { state, extra, keep, keep_best }: Seal) -> Result<(), NodeError> {
        let step = state.step;
        let writing = self.writing.remove(&step);
        let mut writer = writing.ok_or_else(|| NodeError::State("the checkpoint was not begun".into()))??;
        for (name, content) in extra {
            writer.put_extra(name, &content)?;
        }
        writer.commit(state)?;
        let run = self.checkpoints.directory().parent().filter(|_| keep_best);
        let best = run.map(best_checkpoint).transpose()?.flatten();
        self.checkpoints.prune(step, keep, best.map(|(step, _)| step))?;
        Ok(())
    }
}
