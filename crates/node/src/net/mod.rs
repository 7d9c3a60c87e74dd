//! Messages on connections, and the queue of messages that go out.

pub(crate) mod dial;
pub(crate) mod probe;
pub(crate) mod reach;
pub(crate) mod traffic;

use std::collections::BTreeSet;

use bytes::Bytes;
use fusionllm_graph::HostTensor;
use fusionllm_program::{PeerId, Program};
use fusionllm_protocol::{BulkHeader, MAX_CONTROL_BYTES, TensorHeader, decode, encode};
use fusionllm_transport::{Connection, Lane, Receiver};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::NodeError;

/// The most bytes of a tensor in one frame of the bulk lane. A broker holds one piece for each peer.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Longest text of another machine that is shown, in bytes.
const MAX_TEXT_BYTES: usize = 512;

/// A text from another machine as it may stand on a terminal and in a log: bounded, and without characters that control
/// either.
pub(crate) fn printable(text: &str) -> String {
    let turns_text = |c| matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let text = &text[..text.floor_char_boundary(MAX_TEXT_BYTES)];
    text.chars().map(|c| if c.is_control() || turns_text(c) { ' ' } else { c }).collect()
}

/// Sends a control message.
pub(crate) async fn send_control<T: Serialize>(to: &Connection, message: &T) -> Result<(), NodeError> {
    let payload = encode(message).map_err(NodeError::Protocol)?;
    Ok(to.send(Lane::Control, &[], &[payload.into()]).await?)
}

/// Waits for the next control message; `None` at the end of the lane.
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

/// The queue of frames for one connection. Adding a frame never waits, and tasks send them in order.
#[derive(Clone)]
pub(crate) struct Outbox {
    urgent: UnboundedSender<Vec<u8>>,
    tensors: UnboundedSender<(Vec<u8>, Bytes)>,
}

impl Outbox {
    /// Starts the tasks that send.
    pub(crate) fn new(connection: Connection) -> Self {
        let (urgent, mut messages) = unbounded_channel::<Vec<u8>>();
        let (tensors, mut frames) = unbounded_channel::<(Vec<u8>, Bytes)>();
        let to = connection.clone();
        tokio::spawn(async move {
            while let Some(message) = messages.recv().await {
                // The receiving tasks report a lost connection.
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

    /// Queues a control message.
    pub(crate) fn control<T: Serialize>(&self, message: &T) -> Result<(), NodeError> {
        // The task ends with the connection, which the receiving tasks report.
        let _ = self.urgent.send(encode(message).map_err(NodeError::Protocol)?);
        Ok(())
    }

    /// Queues a tensor.
    pub(crate) fn tensor(&self, header: &TensorHeader, tensor: HostTensor) -> Result<(), NodeError> {
        self.frame(header, tensor.into_bytes())
    }

    /// Queues the payload of a tensor.
    pub(crate) fn frame(&self, header: &TensorHeader, payload: Vec<u8>) -> Result<(), NodeError> {
        let _ = self.tensors.send((encode(header).map_err(NodeError::Protocol)?, payload.into()));
        Ok(())
    }
}

/// The peers that these programs exchange tensors with.
pub(crate) fn neighbours(programs: &[&Program]) -> BTreeSet<PeerId> {
    let others = programs.iter().flat_map(|p| p.receives().chain(p.sends())).map(|(_, other)| other);
    others.filter(|other| *other != PeerId::BROKER).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_from_elsewhere_cannot_control_the_terminal() {
        assert_eq!(printable("disk\x1b[2J\nfull"), "disk [2J full");
        assert_eq!(printable("a\u{202e}b"), "a b");
        assert_eq!(printable(&"ä".repeat(400)).len(), MAX_TEXT_BYTES);
    }
}
