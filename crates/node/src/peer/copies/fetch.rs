//! Asks another member for tensors of a cut.

use std::collections::VecDeque;
use std::time::Duration;

use fusionllm_graph::{HostTensor, TensorType};
use fusionllm_program::TensorKey;
use fusionllm_protocol::{BulkHeader, PeerHello, decode};
use fusionllm_transport::{Connection, Lanes, PeerAddr};

use crate::NodeError;
use crate::net::dial::dial;
use crate::peer::shared::Shared;

/// The time in which the other member has to learn this one's key.
const ACQUAINTANCE: Duration = Duration::from_secs(60);

/// How often a connection that ends in the middle is opened again.
const MAX_REOPENED: usize = 3;

/// Tensors of a cut that another member has, asked for over a connection of their own.
pub(crate) struct Fetch {
    to: PeerAddr,
    step: u64,
    bytes_per_s: Option<f64>,
    /// The tensors that have not arrived yet.
    wanted: VecDeque<(TensorKey, TensorType)>,
    open: Option<(Connection, Lanes)>,
    reopened: usize,
}

impl Fetch {
    pub(crate) fn new(
        to: PeerAddr,
        step: u64,
        bytes_per_s: Option<f64>,
        wanted: impl IntoIterator<Item = (TensorKey, TensorType)>,
    ) -> Self {
        Self { to, step, bytes_per_s, wanted: wanted.into_iter().collect(), open: None, reopened: 0 }
    }

    /// The next tensor; `None` after the last one. After an error, it may be called again.
    pub(crate) async fn next(&mut self, shared: &Shared) -> Result<Option<(TensorKey, HostTensor)>, NodeError> {
        while let Some((_, ty)) = self.wanted.front().cloned() {
            match self.receive(shared, ty).await {
                Ok(tensor) => {
                    self.reopened = 0;
                    return Ok(self.wanted.pop_front().map(|(key, _)| (key, tensor)));
                }
                Err(e) => {
                    // Another attempt needs another connection.
                    self.open = None;
                    self.reopened += 1;
                    if !matches!(e, NodeError::Lost(_)) || self.reopened > MAX_REOPENED {
                        return Err(e);
                    }
                }
            }
        }
        if let Some((connection, _)) = self.open.take() {
            connection.close("");
        }
        Ok(None)
    }

    async fn receive(&mut self, shared: &Shared, ty: TensorType) -> Result<HostTensor, NodeError> {
        let (_, lanes) = match &mut self.open {
            Some(open) => open,
            closed => {
                let tensors = self.wanted.iter().map(|(key, _)| key.clone()).collect();
                let hello = PeerHello::Fetch { step: self.step, tensors, bytes_per_s: self.bytes_per_s };
                closed.insert(dial(&shared.endpoint, &self.to, &hello, ACQUAINTANCE).await?)
            }
        };
        let mut bytes = vec![0; ty.bytes()];
        let mut filled = 0;
        while filled < bytes.len() {
            let Some(frame) = lanes.bulk.next().await? else {
                return Err(NodeError::Protocol("it stopped in the middle of a tensor".into()));
            };
            match decode(frame.header()).map_err(NodeError::Protocol)? {
                BulkHeader::Copy => {}
                BulkHeader::NoCopy => {
                    return Err(NodeError::Network(format!("it has no copy of what it had after step {}", self.step)));
                }
                other => return Err(NodeError::Protocol(format!("it sent {other:?} in place of a copy"))),
            }
            let end = usize::try_from(frame.payload_len()).ok().and_then(|length| filled.checked_add(length));
            match end {
                Some(end) if end > filled && end <= bytes.len() => {
                    frame.read_into_with(&mut bytes[filled..end], || shared.progress.bump()).await?;
                    filled = end;
                }
                _ => return Err(NodeError::Protocol("it sent a piece of the wrong size".into())),
            }
        }
        Ok(HostTensor::from_bytes(ty, bytes)?)
    }
}
