//! Everything that reaches the broker's loop. A task of its own reads each source.

use std::collections::BTreeMap;
use std::time::Duration;

use fusionllm_graph::{HostTensor, TensorType};
use fusionllm_plan::PeerId;
use fusionllm_protocol::{BulkHeader, CodecUpdate, FromPeer, Hello, decode};
use fusionllm_transport::{Connection, Endpoint, Lanes, Receiver};
use tokio::sync::mpsc;

use super::keeper::{Inbox, KeeperEvent, SavedTensor};
use crate::NodeError;
use crate::net;

/// How long a new connection may take to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// An event for the broker's loop.
pub(super) enum Incoming {
    /// A connection, by number, said hello.
    Hello(u64, Connection, Box<Lanes>, Hello),
    /// A connection closed.
    Gone(u64),
    /// A peer sent a control message.
    Message(PeerId, FromPeer),
    /// A peer sent all tensors of its snapshot of a step.
    SavedAll(PeerId, u64),
    /// The checkpoint thread reports.
    Keeper(KeeperEvent),
    /// The regulator changes codecs, or warns.
    CodecUpdate(CodecUpdate),
    /// A peer is lost, for this reason.
    Lost(PeerId, String),
    /// A process of this machine ended badly.
    Child(String),
    /// The user or the system asks to stop.
    Interrupt,
}

/// Reports Ctrl-C and SIGTERM.
pub(super) async fn interrupts(events: mpsc::UnboundedSender<Incoming>) {
    #[cfg(unix)]
    let mut terminate = match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
        Ok(signal) => signal,
        Err(_) => return,
    };
    loop {
        #[cfg(unix)]
        tokio::select! {
            result = tokio::signal::ctrl_c() => if result.is_err() { return },
            _ = terminate.recv() => {}
        }
        #[cfg(not(unix))]
        if tokio::signal::ctrl_c().await.is_err() {
            return;
        }
        if events.send(Incoming::Interrupt).is_err() {
            return;
        }
    }
}

/// Accepts connections, and reports each that says hello in time.
pub(super) async fn accept(endpoint: Endpoint, events: mpsc::UnboundedSender<Incoming>) {
    let mut number = 0;
    while let Some((connection, mut lanes)) = endpoint.accept().await {
        number += 1;
        let events = events.clone();
        tokio::spawn(async move {
            let hello = tokio::time::timeout(HELLO_TIMEOUT, net::next_control(&mut lanes.control)).await;
            match hello {
                Ok(Ok(Some(FromPeer::Hello(hello)))) => {
                    let gone = connection.clone();
                    let _ = events.send(Incoming::Hello(number, connection, Box::new(lanes), hello));
                    gone.closed().await;
                    let _ = events.send(Incoming::Gone(number));
                }
                _ => connection.close("say hello first"),
            }
        });
    }
}

/// Reports a peer's control messages until its connection ends.
pub(super) async fn receive_control(mut lane: Receiver, from: PeerId, events: mpsc::UnboundedSender<Incoming>) {
    loop {
        let event = match net::next_control::<FromPeer>(&mut lane).await {
            Ok(Some(message)) => Incoming::Message(from, message),
            Ok(None) => Incoming::Lost(from, "it left".into()),
            Err(e) => Incoming::Lost(from, e.one_line()),
        };
        let over = matches!(event, Incoming::Lost(..));
        if events.send(event).is_err() || over {
            return;
        }
    }
}

/// Hands a peer's snapshots to the checkpoint thread. `types` are those of the tensors that the peer owns.
pub(super) async fn receive_bulk(
    mut lane: Receiver,
    from: PeerId,
    types: BTreeMap<(String, Option<String>), TensorType>,
    keeper: Inbox,
    events: mpsc::UnboundedSender<Incoming>,
) {
    let result: Result<(), NodeError> = async {
        while let Some(frame) = lane.next().await? {
            match decode(frame.header()).map_err(NodeError::Protocol)? {
                BulkHeader::Saved { step, name, slot, ty } => {
                    if types.get(&(name.clone(), slot.clone())) != Some(&ty) {
                        return Err(NodeError::Protocol(format!(
                            "its snapshot holds {name:?} of type {ty}, which it does not own"
                        )));
                    }
                    let mut bytes = vec![0; ty.bytes()];
                    frame.read_into(&mut bytes).await?;
                    let tensor = HostTensor::from_bytes(ty, bytes)?;
                    keeper.put(SavedTensor { from, step, name, slot, tensor }).await;
                }
                BulkHeader::SavedAll { step } => {
                    let _ = events.send(Incoming::SavedAll(from, step));
                }
                other => return Err(NodeError::Protocol(format!("a peer cannot send {other:?}"))),
            }
        }
        Ok(())
    }
    .await;
    // The control lane reports a lost connection.
    if let Err(e) = result
        && !matches!(e, NodeError::Lost(_))
    {
        let _ = events.send(Incoming::Lost(from, e.one_line()));
    }
}
