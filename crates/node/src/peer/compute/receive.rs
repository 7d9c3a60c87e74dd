//! Puts arriving tensors into the mailbox of the generation that they belong to.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fusionllm_graph::HostTensor;
use fusionllm_program::PeerId;
use fusionllm_protocol::{Inbox, TensorHeader, decode};
use fusionllm_transport::{Frame, Receiver};

use super::codecs::Codecs;
use super::mailbox::Mailbox;
use super::recorder::Messages;
use crate::NodeError;
use crate::peer::progress::Progress;

/// The smallest payload whose arrival time is counted. A smaller one arrives in a few packets at once, and the clock
/// starts only when the first of them is there.
const MIN_RATE_SAMPLE_BYTES: usize = 8 << 10;

/// Large payloads that came from one peer in the pass in flight.
#[derive(Default)]
pub(crate) struct Arrived {
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

/// The arrivals, by sender.
pub(crate) type Throughput = Arc<Mutex<BTreeMap<PeerId, Arrived>>>;

/// The destination of a generation's arriving tensors.
#[derive(Clone)]
pub(crate) struct Arrivals {
    pub(crate) generation: u32,
    pub(crate) inbox: Arc<Mutex<Inbox>>,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) codecs: Codecs,
    pub(crate) throughput: Throughput,
    pub(crate) messages: Messages,
    pub(crate) progress: Arc<Progress>,
}

impl Arrivals {
    /// Takes one tensor. Its header is checked before its payload is allocated. An encoded tensor passes through the
    /// codec thread. A tensor of an earlier generation is skipped.
    pub(crate) async fn take(&self, frame: Frame<'_>, from: PeerId, name: &Arc<str>) -> Result<(), NodeError> {
        let header: TensorHeader = decode(frame.header()).map_err(NodeError::Protocol)?;
        let admitted = {
            let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
            inbox.admit(from, &header, frame.payload_len()).map_err(|e| NodeError::Protocol(e.to_string()))?
        };
        let Some(ty) = admitted else { return Ok(()) };
        let mut bytes = vec![0; frame.payload_len() as usize];
        let begun = Instant::now();
        frame.read_into_with(&mut bytes, || self.progress.bump()).await?;
        if from != PeerId::BROKER {
            self.messages.came(from, bytes.len() as u64, begun);
        }
        if bytes.len() >= MIN_RATE_SAMPLE_BYTES && from != PeerId::BROKER {
            let mut throughput = self.throughput.lock().unwrap_or_else(PoisonError::into_inner);
            let sum = throughput.entry(from).or_default();
            sum.bytes += bytes.len() as u64;
            sum.seconds += begun.elapsed().as_secs_f64();
        }
        if header.coded {
            self.codecs.receive(header, bytes, ty, from, name)?;
        } else {
            self.mailbox.put(header, HostTensor::from_bytes(ty, bytes)?);
        }
        Ok(())
    }

    /// Takes all tensors of a neighbour, until its connection ends. Returns why it ended.
    pub(crate) async fn take_all(&self, mut lane: Receiver, from: PeerId, name: &Arc<str>) -> NodeError {
        loop {
            let taken = match lane.next().await {
                Ok(Some(frame)) => self.take(frame, from, name).await,
                Ok(None) => Err(NodeError::Network("it stopped sending".into())),
                Err(e) => Err(e.into()),
            };
            if let Err(e) = taken {
                return e;
            }
        }
    }
}
