//! A thread that writes checkpoints, so that no step waits for a disk.

use std::sync::Arc;
use std::thread::JoinHandle;

use fusionllm_graph::{HostTensor, TensorType};
use fusionllm_plan::PeerId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::NodeError;
use crate::checkpoint::{CheckpointWriter, Checkpoints, Part, State};

/// Tensors that may wait for the disk; what more comes stays on the network.
const WAITING: usize = 4;

/// What the thread tells.
pub(crate) enum Kept {
    /// A checkpoint is whole, and those it makes superfluous are gone.
    Committed(u64),
    /// A peer sent a snapshot that nobody asked for.
    Unasked(PeerId),
    /// The disk failed, or a snapshot is not what it should be.
    Failed(NodeError),
}

/// A tensor of a peer's snapshot.
pub(crate) struct SavedTensor {
    pub(crate) from: PeerId,
    pub(crate) step: u64,
    pub(crate) name: String,
    pub(crate) slot: Option<String>,
    pub(crate) tensor: HostTensor,
}

/// A whole checkpoint's last word.
pub(crate) struct Seal {
    pub(crate) state: State,
    /// Small files beside the tensors.
    pub(crate) extra: Vec<(&'static str, Vec<u8>)>,
    /// How many checkpoints stay.
    pub(crate) keep: usize,
}

enum Command {
    Begin { step: u64, tensors: [Vec<(String, TensorType)>; 2] },
    Put(SavedTensor, OwnedSemaphorePermit),
    Commit(Seal),
    Stop,
}

/// The thread. Dropped, it finishes what it was given and leaves no half checkpoint behind.
pub(crate) struct Keeper {
    inbox: Inbox,
    thread: Option<JoinHandle<()>>,
}

/// Where tensors for it go in.
#[derive(Clone)]
pub(crate) struct Inbox {
    commands: mpsc::UnboundedSender<Command>,
    room: Arc<Semaphore>,
}

impl Inbox {
    /// Hands over a tensor, once there is room for it.
    pub(crate) async fn put(&self, tensor: SavedTensor) {
        // Neither side of this ends before the run does.
        if let Ok(permit) = self.room.clone().acquire_owned().await {
            let _ = self.commands.send(Command::Put(tensor, permit));
        }
    }
}

impl Keeper {
    pub(crate) fn start(checkpoints: Checkpoints, tell: impl Fn(Kept) + Send + 'static) -> Result<Self, NodeError> {
        let (commands, mut given) = mpsc::unbounded_channel();
        let work = move || {
            let mut desk = Desk { checkpoints, writing: None };
            while let Some(command) = given.blocking_recv().filter(|c| !matches!(c, Command::Stop)) {
                match desk.carry_out(command) {
                    Ok(None) => {}
                    Ok(Some(kept)) => tell(kept),
                    Err(e) => return tell(Kept::Failed(e)),
                }
            }
        };
        let thread = std::thread::Builder::new().name("checkpoints".into()).spawn(work);
        let thread = thread.map_err(|e| NodeError::State(format!("no thread for checkpoints: {e}")))?;
        let inbox = Inbox { commands, room: Arc::new(Semaphore::new(WAITING)) };
        Ok(Self { inbox, thread: Some(thread) })
    }

    pub(crate) fn inbox(&self) -> Inbox {
        self.inbox.clone()
    }

    /// Tensors of a step's snapshots are to come: names and types of the model's and of the optimiser's.
    pub(crate) fn begin(&self, step: u64, tensors: [Vec<(String, TensorType)>; 2]) {
        self.command(Command::Begin { step, tensors });
    }

    /// All came.
    pub(crate) fn commit(&self, seal: Seal) {
        self.command(Command::Commit(seal));
    }

    fn command(&self, command: Command) {
        // A thread that is gone has told why.
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

/// What the thread has before it.
struct Desk {
    checkpoints: Checkpoints,
    /// The checkpoint being written, and its step.
    writing: Option<(u64, CheckpointWriter)>,
}

impl Desk {
    fn carry_out(&mut self, command: Command) -> Result<Option<Kept>, NodeError> {
        match command {
            Command::Begin { step, tensors: [model, optimizer] } => {
                self.writing = Some((step, self.checkpoints.begin(step, &model, &optimizer)?));
                Ok(None)
            }
            Command::Put(SavedTensor { from, step, name, slot, tensor }, _room) => {
                let Some((_, writer)) = self.writing.as_mut().filter(|(s, _)| *s == step) else {
                    return Ok(Some(Kept::Unasked(from)));
                };
                match slot {
                    None => writer.put(Part::Model, &name, &tensor)?,
                    Some(slot) => writer.put(Part::Optimizer, &format!("{name}.{slot}"), &tensor)?,
                }
                Ok(None)
            }
            Command::Commit(Seal { state, extra, keep }) => {
                let Some((step, mut writer)) = self.writing.take() else { return Ok(None) };
                for (name, content) in extra {
                    writer.put_extra(name, &content)?;
                }
                writer.commit(state)?;
                self.checkpoints.prune(keep)?;
                Ok(Some(Kept::Committed(step)))
            }
            Command::Stop => Ok(None),
        }
    }
}
