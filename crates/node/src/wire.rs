//! Messages on connections, and what stands between the computing thread and the network.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use fusionllm_graph::HostTensor;
use fusionllm_plan::{PeerId, Verdict};
use fusionllm_protocol::{BulkHeader, MAX_CONTROL_BYTES, TensorHeader, decode, encode};
use fusionllm_transport::{Connection, Lane, Receiver};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::NodeError;

/// Sends a control message.
pub(crate) async fn send_control<T: Serialize>(to: &Connection, message: &T) -> Result<(), NodeError> {
    let payload = encode(message).map_err(NodeError::Protocol)?;
    Ok(to.send(Lane::Control, &[], &[payload.into()]).await?)
}

/// Waits for the next control message; `None` if there will be no more.
pub(crate) async fn next_control<T: DeserializeOwned>(lane: &mut Receiver) -> Result<Option<T>, NodeError> {
    match lane.next().await? {
        None => Ok(None),
        Some(frame) => {
            let bytes = frame.read(MAX_CONTROL_BYTES).await?;
            decode(&bytes).map(Some).map_err(|e| NodeError::Protocol(format!("a control message: {e}")))
        }
    }
}

/// Sends a frame on the bulk lane.
pub(crate) async fn send_bulk(to: &Connection, header: &BulkHeader, payload: Vec<Bytes>) -> Result<(), NodeError> {
    let header = encode(header).map_err(NodeError::Protocol)?;
    Ok(to.send(Lane::Bulk, &header, &payload).await?)
}

/// Frames on their way to one connection. Putting one in never waits; a task sends them in order.
#[derive(Clone)]
pub(crate) struct Outbox {
    urgent: UnboundedSender<Vec<u8>>,
    tensors: UnboundedSender<(Vec<u8>, Bytes)>,
}

impl Outbox {
    /// Spawns the tasks that send.
    pub(crate) fn new(connection: Connection) -> Self {
        let (urgent, mut messages) = unbounded_channel::<Vec<u8>>();
        let (tensors, mut frames) = unbounded_channel::<(Vec<u8>, Bytes)>();
        let to = connection.clone();
        tokio::spawn(async move {
            while let Some(message) = messages.recv().await {
                // A connection that is gone shows at its receivers.
                if to.send(Lane::Control, &[], &[message.into()]).await.is_err() {
                    return;
                }
            }
        });
        tokio::spawn(async move {
            while let Some((header, payload)) = frames.recv().await {
                if connection.send(Lane::Tensors, &header, &[payload]).await.is_err() {
                    return;
                }
            }
        });
        Self { urgent, tensors }
    }

    /// Puts in a control message.
    pub(crate) fn control<T: Serialize>(&self, message: &T) -> Result<(), NodeError> {
        // The task ends with the connection, whose loss is told elsewhere.
        let _ = self.urgent.send(encode(message).map_err(NodeError::Protocol)?);
        Ok(())
    }

    /// Puts in a tensor.
    pub(crate) fn tensor(&self, header: &TensorHeader, tensor: HostTensor) -> Result<(), NodeError> {
        self.frame(header, tensor.into_bytes())
    }

    /// Puts in a tensor's payload.
    pub(crate) fn frame(&self, header: &TensorHeader, payload: Vec<u8>) -> Result<(), NodeError> {
        let _ = self.tensors.send((encode(header).map_err(NodeError::Protocol)?, payload.into()));
        Ok(())
    }
}

/// What has come for the computing thread.
#[derive(Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tensors: HashMap<TensorHeader, HostTensor>,
    /// The last pass that is over.
    done: u64,
    verdicts: HashMap<u64, Verdict>,
    lost: Option<(PeerId, String)>,
    failed: Option<String>,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, f: impl FnOnce(&mut State)) {
        f(&mut self.lock());
        self.changed.notify_all();
    }

    /// A tensor came.
    pub(crate) fn put(&self, header: TensorHeader, tensor: HostTensor) {
        self.change(|s| {
            if header.pass > s.done {
                s.tensors.insert(header, tensor);
            }
        });
    }

    /// A pass is over: what came for it and was not read goes.
    pub(crate) fn done(&self, pass: u64) {
        self.change(|s| {
            s.done = pass;
            s.tensors.retain(|header, _| header.pass > pass);
        });
    }

    /// A verdict came.
    pub(crate) fn judge(&self, pass: u64, verdict: Verdict) {
        self.change(|s| {
            s.verdicts.insert(pass, verdict);
        });
    }

    /// A connection is gone; the first one lost is the one to name.
    pub(crate) fn lose(&self, peer: PeerId, reason: String) {
        self.change(|s| {
            s.lost.get_or_insert((peer, reason.clone()));
            s.failed.get_or_insert(reason);
        });
    }

    /// Nothing more will come, for this reason.
    pub(crate) fn fail(&self, reason: String) {
        self.change(|s| {
            s.failed.get_or_insert(reason);
        });
    }

    /// The connection that was lost, if any was.
    pub(crate) fn lost(&self) -> Option<(PeerId, String)> {
        self.lock().lost.clone()
    }

    /// Waits for a tensor.
    pub(crate) fn take(&self, header: &TensorHeader) -> Result<HostTensor, String> {
        self.wait(|s| s.tensors.remove(header))
    }

    /// Waits for a verdict.
    pub(crate) fn verdict(&self, pass: u64) -> Result<Verdict, String> {
        self.wait(|s| s.verdicts.remove(&pass))
    }

    fn wait<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T>) -> Result<T, String> {
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            if let Some(reason) = &state.failed {
                return Err(reason.clone());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
