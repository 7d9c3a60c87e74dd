//! An open connection to one peer: its lanes, its counters, and how it ended.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use iroh::endpoint::{ConnectionError, VarInt};

use crate::PeerKey;
use crate::frame::Violation;
use crate::lane::{Counters, Lane, LaneStats, Receiver, SendError, Sender};

/// A connection to a peer. Clones are handles to the same connection, usable from any task.
///
/// It ends when either side closes it, when nothing is heard from the peer for the idle timeout,
/// or when the last handle and the last [`Receiver`] are dropped.
#[derive(Clone)]
pub struct Connection {
    shared: Arc<Shared>,
    senders: Arc<[Sender; Lane::COUNT]>,
}

/// The receiving ends of a connection, one for each lane. Each may go to its own task.
#[derive(Debug)]
pub struct Lanes {
    /// Small, urgent messages.
    pub control: Receiver,
    /// Activations and gradients.
    pub tensors: Receiver,
    /// Parameters, data and checkpoints: large and in no hurry.
    pub bulk: Receiver,
}

/// What a connection has carried, and how it is now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Frames handed to QUIC, indexed by `Lane as usize`.
    pub sent: [LaneStats; Lane::COUNT],
    /// Frames read from QUIC, indexed by `Lane as usize`.
    pub received: [LaneStats; Lane::COUNT],
    /// Bytes of UDP payload sent: frames, retransmissions and QUIC's own.
    pub udp_sent: u64,
    /// Bytes of UDP payload received.
    pub udp_received: u64,
    /// Packets sent that QUIC holds to be lost.
    pub lost_packets: u64,
    /// Smoothed round-trip time of the path in use. Zero once the connection is gone.
    pub rtt: Duration,
}

/// A connection is gone: whose it was, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("lost peer {peer}: {reason}")]
pub struct Lost {
    /// The peer at the other end.
    pub peer: PeerKey,
    /// What ended the connection.
    pub reason: DisconnectReason,
}

/// What ended a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DisconnectReason {
    /// Nothing was heard from the peer for the idle timeout: it died or is cut off.
    TimedOut,
    /// The peer closed it, for the reason it gave (which may be empty).
    ClosedByPeer(String),
    /// This side closed it, for the reason it gave (which may be empty).
    ClosedHere(String),
    /// The peer does not let this side's key in.
    Refused,
    /// The peer does not know the connection any more, as after a restart.
    Reset,
    /// The peer broke the wire format.
    Violation(Violation),
    /// The peer says that this side broke the wire format.
    ViolationHere(String),
    /// QUIC failed.
    Failed(String),
}

impl fmt::Display for DisconnectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimedOut => f.write_str("it stopped answering"),
            Self::ClosedByPeer(reason) if reason.is_empty() => f.write_str("it closed the connection without a reason"),
            Self::ClosedByPeer(reason) => write!(f, "it closed the connection: {reason}"),
            Self::ClosedHere(reason) if reason.is_empty() => f.write_str("the connection was closed here"),
            Self::ClosedHere(reason) => write!(f, "the connection was closed here: {reason}"),
            Self::Refused => f.write_str("it does not let this peer's key in"),
            Self::Reset => f.write_str("it forgot the connection (restarted?)"),
            Self::Violation(violation) => write!(f, "it broke the wire format: {violation}"),
            Self::ViolationHere(reason) => {
                write!(f, "it says that this side broke the wire format: {reason}")
            }
            Self::Failed(reason) => write!(f, "QUIC failed: {reason}"),
        }
    }
}

impl Connection {
    pub(crate) fn new(shared: Arc<Shared>, senders: [Sender; Lane::COUNT]) -> Self {
        Self { shared, senders: Arc::new(senders) }
    }

    /// Whom this connection leads to, as proved in QUIC's handshake.
    pub fn peer(&self) -> PeerKey {
        self.shared.peer
    }

    /// Sends one frame on a lane and returns once QUIC has taken all of it, not when it arrived.
    ///
    /// The slices of `payload` follow each other on the wire and are not copied. Frames of one lane
    /// arrive whole and in the order in which their sends began; those waiting take turns first
    /// come, first served. A send dropped before its turn sends nothing; one dropped later is
    /// finished in the background, so that the lane stays readable.
    ///
    /// # Errors
    /// [`SendError::HeaderTooLong`] before anything is sent, [`SendError::Lost`], and
    /// [`SendError::Unread`] if the peer dropped that lane's [`Receiver`].
    pub async fn send(&self, lane: Lane, header: &[u8], payload: &[Bytes]) -> Result<(), SendError> {
        self.senders[lane as usize].send(&self.shared, header, payload).await
    }

    /// Says on every lane that nothing more will come, and returns once the peer's QUIC has
    /// everything that was sent. Its receivers then yield `None` at the end.
    ///
    /// # Errors
    /// [`SendError::Lost`] if the connection ends first. Sends after this fail with
    /// [`SendError::Finished`].
    pub async fn finish(&self) -> Result<(), SendError> {
        for sender in self.senders.iter() {
            sender.finish().await;
        }
        for sender in self.senders.iter() {
            sender.delivered(&self.shared).await?;
        }
        Ok(())
    }

    /// Closes the connection at once. What the peer has not read yet may be lost; the peer sees
    /// [`DisconnectReason::ClosedByPeer`] with the first few hundred bytes of `reason`.
    pub fn close(&self, reason: &str) {
        self.shared.close(DisconnectReason::ClosedHere(reason.to_owned()), CODE_CLOSED, reason);
    }

    /// Resolves when the connection is gone, with the reason.
    pub async fn closed(&self) -> Lost {
        let error = self.shared.quic.closed().await;
        self.shared.lost(error)
    }

    /// Why the connection is gone, if it is.
    pub fn lost(&self) -> Option<Lost> {
        self.shared.quic.close_reason().map(|error| self.shared.lost(error))
    }

    /// Counters since the connection was opened.
    pub fn stats(&self) -> Stats {
        let quic = self.shared.quic.stats();
        let paths = self.shared.quic.paths();
        let path = paths.iter().find(|path| path.is_selected()).or_else(|| paths.iter().next());
        Stats {
            sent: Lane::ALL.map(|lane| self.shared.sent[lane as usize].read()),
            received: Lane::ALL.map(|lane| self.shared.received[lane as usize].read()),
            udp_sent: quic.udp_tx.bytes,
            udp_received: quic.udp_rx.bytes,
            lost_packets: quic.lost_packets,
            rtt: path.map_or(Duration::ZERO, |path| path.rtt()),
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection(to {})", self.shared.peer)
    }
}

pub(crate) const CODE_CLOSED: VarInt = VarInt::from_u32(0);
pub(crate) const CODE_REFUSED: VarInt = VarInt::from_u32(1);
pub(crate) const CODE_VIOLATION: VarInt = VarInt::from_u32(2);

/// What handles and receivers of one connection have in common.
pub(crate) struct Shared {
    pub(crate) quic: iroh::endpoint::Connection,
    pub(crate) peer: PeerKey,
    pub(crate) sent: [Counters; Lane::COUNT],
    pub(crate) received: [Counters; Lane::COUNT],
    /// QUIC only remembers that this side closed it; this is why.
    closed_here: OnceLock<DisconnectReason>,
}

impl Shared {
    pub(crate) fn new(quic: iroh::endpoint::Connection) -> Arc<Self> {
        Arc::new(Self {
            peer: PeerKey::from_bytes(*quic.remote_id().as_bytes()),
            quic,
            sent: Default::default(),
            received: Default::default(),
            closed_here: OnceLock::new(),
        })
    }

    pub(crate) fn close(&self, why: DisconnectReason, code: VarInt, reason: &str) {
        // The first to close wins, here as in QUIC.
        if self.quic.close_reason().is_none() && self.closed_here.set(why).is_ok() {
            let end = reason.floor_char_boundary(MAX_REASON);
            self.quic.close(code, &reason.as_bytes()[..end]);
        }
    }

    /// Closes the connection of a peer that broke the wire format.
    pub(crate) fn violated(&self, violation: Violation) -> Lost {
        let reason = violation.to_string();
        self.close(DisconnectReason::Violation(violation), CODE_VIOLATION, &reason);
        self.lost(ConnectionError::LocallyClosed)
    }

    pub(crate) fn lost(&self, error: ConnectionError) -> Lost {
        let reason = match error {
            ConnectionError::LocallyClosed => {
                let closed_here = self.closed_here.get().cloned();
                closed_here.unwrap_or_else(|| DisconnectReason::ClosedHere(String::new()))
            }
            error => disconnect_reason(error),
        };
        Lost { peer: self.peer, reason }
    }
}

pub(crate) fn disconnect_reason(error: ConnectionError) -> DisconnectReason {
    match error {
        ConnectionError::TimedOut => DisconnectReason::TimedOut,
        ConnectionError::Reset => DisconnectReason::Reset,
        ConnectionError::LocallyClosed => DisconnectReason::ClosedHere(String::new()),
        ConnectionError::ApplicationClosed(close) => {
            let reason = printable(&close.reason);
            match close.error_code {
                CODE_REFUSED => DisconnectReason::Refused,
                CODE_VIOLATION => DisconnectReason::ViolationHere(reason),
                _ => DisconnectReason::ClosedByPeer(reason),
            }
        }
        other => DisconnectReason::Failed(other.to_string()),
    }
}

/// QUIC fits a reason into one packet of at least 1200 bytes and cuts what is longer.
const MAX_REASON: usize = 512;

/// A reason is another's text and ends up on terminals.
fn printable(reason: &[u8]) -> String {
    let reason = String::from_utf8_lossy(&reason[..reason.len().min(MAX_REASON)]);
    reason.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The connections of an endpoint that may still be open, for closing them with a reason.
#[derive(Default)]
pub(crate) struct Registry(Mutex<Vec<std::sync::Weak<Shared>>>);

impl Registry {
    pub(crate) fn add(&self, shared: &Arc<Shared>) {
        let mut connections = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(Arc::downgrade(shared));
    }

    pub(crate) fn close(&self, reason: &str) {
        let connections = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for shared in connections.iter().filter_map(std::sync::Weak::upgrade) {
            shared.close(DisconnectReason::ClosedHere(reason.to_owned()), CODE_CLOSED, reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_reason_cannot_play_with_the_terminal() {
        assert_eq!(printable(b"disk\x1b[2J full\n"), "disk [2J full ");
        assert_eq!(printable(&[b'a'; 10_000]).len(), MAX_REASON);
        assert_eq!(printable(&[0xff, b'x']), "\u{fffd}x");
    }

    #[test]
    fn every_reason_reads_as_a_sentence() {
        let peer = PeerKey::from_bytes([0; 32]);
        let lost = |reason| Lost { peer, reason }.to_string();
        assert_eq!(lost(DisconnectReason::TimedOut), "lost peer aaaaaaaaaa: it stopped answering");
        assert_eq!(
            lost(DisconnectReason::ClosedByPeer("disk full".into())),
            "lost peer aaaaaaaaaa: it closed the connection: disk full"
        );
        assert_eq!(
            lost(DisconnectReason::Violation(Violation::Truncated(Lane::Bulk))),
            "lost peer aaaaaaaaaa: it broke the wire format: \
             the bulk lane ends in the middle of a frame"
        );
    }
}
