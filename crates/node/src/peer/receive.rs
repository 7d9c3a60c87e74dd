//! The tasks that read a peer's connections.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Instant;

use fusionllm_graph::HostTensor;
use fusionllm_plan::PeerId;
use fusionllm_protocol::{Inbox, TensorHeader, ToPeer, decode};
use fusionllm_transport::{DisconnectReason, Receiver};

use super::codecs::Codecs;
use super::mailbox::Mailbox;
use crate::NodeError;
use crate::net;

/// The smallest payload whose arrival time is counted. A smaller one arrives in a few packets at once, and the clock
/// starts only when the first of them is there.
const MIN_RATE_SAMPLE_BYTES: usize = 8 << 10;

/// Large payloads that came from one peer in the pass in flight.
#[derive(Default)]
pub(super) struct Arrived {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
}

/// By sender.
pub(super) type Throughput = Arc<Mutex<BTreeMap<PeerId, Arrived>>>;

/// Where arriving tensors go.
#[derive(Clone)]
pub(super) struct Arrivals {
    pub(super) inbox: Arc<Mutex<Inbox>>,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) codecs: Codecs,
    pub(super) throughput: Throughput,
    pub(super) commands: mpsc::Sender<ToPeer>,
}

/// Puts a peer's tensors into the mailbox. Each header is checked before its payload is allocated. Encoded tensors pass
/// through the codec thread.
pub(super) async fn receive_tensors(mut lane: Receiver, from: PeerId, name: String, arrivals: Arrivals) {
    let Arrivals { inbox, mailbox, codecs, throughput, commands } = arrivals;
    let sender: Arc<str> = name.as_str().into();
    let result: Result<(), NodeError> = async {
        while let Some(frame) = lane.next().await? {
            let header: TensorHeader = decode(frame.header()).map_err(NodeError::Protocol)?;
            let ty = {
                let mut inbox = inbox.lock().unwrap_or_else(PoisonError::into_inner);
                inbox.admit(from, &header, frame.payload_len()).map_err(|v| NodeError::Protocol(v.to_string()))?
            };
            let mut bytes = vec![0; frame.payload_len() as usize];
            let begun = Instant::now();
            frame.read_into(&mut bytes).await?;
            if bytes.len() >= MIN_RATE_SAMPLE_BYTES && from != PeerId::BROKER {
                let mut throughput = throughput.lock().unwrap_or_else(PoisonError::into_inner);
                let sum = throughput.entry(from).or_default();
                sum.bytes += bytes.len() as u64;
                sum.seconds += begun.elapsed().as_secs_f64();
            }
            if header.coded {
                codecs.receive(header, bytes, ty, &sender)?;
            } else {
                mailbox.put(header, HostTensor::from_bytes(ty, bytes)?);
            }
        }
        Ok(())
    }
    .await;
    let reason = match result {
        // A peer that was stopped before this one closes its connection without a reason.
        Ok(()) => return,
        Err(NodeError::Lost(DisconnectReason::ClosedByPeer(reason))) if reason.is_empty() => return,
        Err(NodeError::Lost(cause)) => {
            mailbox.lose(from, cause.to_string());
            format!("lost {name}: {cause}")
        }
        Err(e) => {
            mailbox.fail(format!("{name}: {e}"));
            format!("{name}: {e}")
        }
    };
    // The computing thread may wait for a command rather than for a tensor. It may also have ended.
    let _ = commands.send(ToPeer::Stop { reason });
}

/// Passes the broker's commands to the computing thread, and its verdicts to the mailbox.
pub(super) async fn receive_commands(mut lane: Receiver, mailbox: Arc<Mailbox>, commands: mpsc::Sender<ToPeer>) {
    loop {
        match net::next_control::<ToPeer>(&mut lane).await {
            Ok(Some(ToPeer::Verdict { pass, verdict })) => mailbox.judge(pass, verdict),
            Ok(Some(message)) => {
                if let ToPeer::Stop { reason } = &message
                    && !reason.is_empty()
                {
                    mailbox.fail(format!("the broker stopped the run: {reason}"));
                }
                if commands.send(message).is_err() {
                    return;
                }
            }
            Ok(None) => return,
            Err(e) => {
                match &e {
                    NodeError::Lost(cause) => mailbox.lose(PeerId::BROKER, cause.to_string()),
                    e => mailbox.fail(format!("the broker: {e}")),
                }
                let _ = commands.send(ToPeer::Stop { reason: e.one_line() });
                return;
            }
        }
    }
}
