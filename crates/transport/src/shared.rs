//! A connection's state that its handles and receivers share, and how the connection ended.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use iroh::endpoint::{ConnectionError, VarInt};

use crate::frame::FormatError;
use crate::key::PeerKey;
use crate::lane::{Lane, LaneCounters};
use crate::silence::Silence;

/// A connection has ended: the peer, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("lost peer {peer}: {reason}")]
pub struct Disconnected {
    /// The peer at the other end.
    pub peer: PeerKey,
    /// The reason why the connection ended.
    pub reason: DisconnectReason,
}

/// The reason why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DisconnectReason {
    /// No packet came from the peer for the idle timeout: it died, or the network between failed.
    TimedOut,
    /// The peer closed it and gave this reason, which may be empty.
    ClosedByPeer(String),
    /// This side closed it and gave this reason, which may be empty.
    ClosedHere(String),
    /// The peer does not accept this side's key.
    Refused,
    /// The peer does not know the connection any more, for example after a restart.
    Reset,
    /// The peer broke the wire format.
    PeerBrokeFormat(FormatError),
    /// The peer reports that this side broke the wire format.
    BrokeFormatHere(String),
    /// QUIC failed.
    Failed(String),
}

impl fmt::Display for DisconnectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimedOut => f.write_str("it stopped answering"),
            Self::ClosedByPeer(reason) if reason.is_empty() => f.write_str("it closed the connection without a reason"),
            Self::ClosedByPeer(reason) => write!(f, "it closed the connection: {reason}"),
            Self::ClosedHere(reason) if reason.is_empty() => f.write_str("this side closed the connection"),
            Self::ClosedHere(reason) => write!(f, "this side closed the connection: {reason}"),
            Self::Refused => f.write_str("it does not accept this peer's key"),
            Self::Reset => f.write_str("it no longer knows the connection; it may have restarted"),
            Self::PeerBrokeFormat(error) => write!(f, "it broke the wire format: {error}"),
            Self::BrokeFormatHere(reason) => write!(f, "it reports that this side broke the wire format: {reason}"),
            Self::Failed(reason) => write!(f, "QUIC failed: {reason}"),
        }
    }
}

/// Application codes with which connections are closed; see the crate's documentation.
pub(crate) const CODE_CLOSED: VarInt = VarInt::from_u32(0);
pub(crate) const CODE_REFUSED: VarInt = VarInt::from_u32(1);
pub(crate) const CODE_BROKEN_FORMAT: VarInt = VarInt::from_u32(2);

/// The state that all handles and receivers of one connection share.
pub(crate) struct Shared {
    pub(crate) quic: iroh::endpoint::Connection,
    pub(crate) peer: PeerKey,
    pub(crate) sent: [LaneCounters; Lane::COUNT],
    pub(crate) received: [LaneCounters; Lane::COUNT],
    /// The reason why this side closed the connection. QUIC remembers only that it did.
    closed_here: OnceLock<DisconnectReason>,
    silence: Mutex<Silence>,
}

impl Shared {
    pub(crate) fn new(quic: iroh::endpoint::Connection) -> Arc<Self> {
        Arc::new(Self {
            peer: PeerKey::from_bytes(*quic.remote_id().as_bytes()),
            quic,
            sent: Default::default(),
            received: Default::default(),
            closed_here: OnceLock::new(),
            silence: Mutex::new(Silence::new(Instant::now())),
        })
    }

    /// Bytes that may be in flight to the peer.
    pub(crate) fn window(&self) -> u64 {
        let paths = self.quic.paths();
        let path = paths.iter().find(|path| path.is_selected()).or_else(|| paths.iter().next());
        path.map_or(0, |path| path.stats().cwnd)
    }

    /// Closes the connection in good order.
    pub(crate) fn close(&self, message: &str) {
        self.close_with(DisconnectReason::ClosedHere(message.to_owned()), CODE_CLOSED, message);
    }

    /// Closes the connection because the peer broke the wire format.
    pub(crate) fn close_broken(&self, error: FormatError) -> Disconnected {
        let message = error.to_string();
        self.close_with(DisconnectReason::PeerBrokeFormat(error), CODE_BROKEN_FORMAT, &message);
        self.disconnected(ConnectionError::LocallyClosed)
    }

    /// Gives the peer up because it has been silent for too long.
    fn time_out(&self) {
        self.close_with(DisconnectReason::TimedOut, CODE_CLOSED, "nothing arrived from this peer for too long");
    }

    /// The time since the last packet arrived from the peer.
    pub(crate) fn silent_for(&self, now: Instant) -> Duration {
        let received = self.quic.stats().frame_rx;
        self.silence.lock().unwrap_or_else(PoisonError::into_inner).look(received, now)
    }

    fn close_with(&self, reason: DisconnectReason, code: VarInt, message: &str) {
        // The first close wins, as in QUIC.
        if self.quic.close_reason().is_none() && self.closed_here.set(reason).is_ok() {
            let end = message.floor_char_boundary(MAX_REASON_BYTES);
            self.quic.close(code, &message.as_bytes()[..end]);
        }
    }

    pub(crate) fn disconnected(&self, error: ConnectionError) -> Disconnected {
        let reason = match error {
            ConnectionError::LocallyClosed => {
                let closed_here = self.closed_here.get().cloned();
                closed_here.unwrap_or_else(|| DisconnectReason::ClosedHere(String::new()))
            }
            error => disconnect_reason(error),
        };
        Disconnected { peer: self.peer, reason }
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
                CODE_BROKEN_FORMAT => DisconnectReason::BrokeFormatHere(reason),
                _ => DisconnectReason::ClosedByPeer(reason),
            }
        }
        other => DisconnectReason::Failed(other.to_string()),
    }
}

/// Longest close reason, in bytes. QUIC sends it in one packet of at least 1200 bytes and cuts the rest.
const MAX_REASON_BYTES: usize = 512;

/// A peer's reason as it may appear on a terminal: bounded, without control characters.
fn printable(reason: &[u8]) -> String {
    let reason = String::from_utf8_lossy(&reason[..reason.len().min(MAX_REASON_BYTES)]);
    reason.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The connections of an endpoint that may still be open, so that the endpoint can watch and close them.
#[derive(Default)]
pub(crate) struct OpenConnections(Mutex<Vec<Weak<Shared>>>);

impl OpenConnections {
    pub(crate) fn add(&self, shared: &Arc<Shared>) {
        let mut connections = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(Arc::downgrade(shared));
    }

    fn open(&self) -> Vec<Arc<Shared>> {
        let connections = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let alive = connections.iter().filter_map(Weak::upgrade);
        alive.filter(|shared| shared.quic.close_reason().is_none()).collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.open().len()
    }

    /// The number of connections that this peer has opened.
    pub(crate) fn arrived_from(&self, peer: &PeerKey) -> usize {
        self.open().iter().filter(|shared| shared.peer == *peer && shared.quic.side().is_server()).count()
    }

    /// Looks at all connections, and closes those whose peer has been silent for `patience`.
    ///
    /// QUIC's own idle timer can take minutes. It waits for three retransmission timeouts, and those follow the
    /// measured round trip. An acknowledgement that lay in the socket while this process was stopped counts as a
    /// round trip of that length.
    pub(crate) fn close_silent(&self, patience: Duration, now: Instant) {
        for shared in self.open() {
            if shared.silent_for(now) >= patience {
                shared.time_out();
            }
        }
    }

    pub(crate) fn close(&self, message: &str) {
        for shared in self.open() {
            shared.close(message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_reason_cannot_control_the_terminal() {
        assert_eq!(printable(b"disk\x1b[2J full\n"), "disk [2J full ");
        assert_eq!(printable(&[b'a'; 10_000]).len(), MAX_REASON_BYTES);
        assert_eq!(printable(&[0xff, b'x']), "\u{fffd}x");
    }

    #[test]
    fn reasons_read_as_sentences() {
        let peer = PeerKey::from_bytes([0; 32]);
        let text = |reason| Disconnected { peer, reason }.to_string();
        assert_eq!(text(DisconnectReason::TimedOut), "lost peer aaaaaaaaaa: it stopped answering");
        assert_eq!(
            text(DisconnectReason::ClosedByPeer("disk full".into())),
            "lost peer aaaaaaaaaa: it closed the connection: disk full"
        );
        assert_eq!(
            text(DisconnectReason::PeerBrokeFormat(FormatError::Truncated(Lane::Bulk))),
            "lost peer aaaaaaaaaa: it broke the wire format: the bulk lane ends in the middle of a frame"
        );
    }
}
