//! An open connection to one peer: its lanes and its counters.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use iroh::TransportAddr;
use iroh::endpoint::PathList;
use n0_future::StreamExt;

use crate::key::PeerKey;
use crate::lane::{Lane, LaneStats};
use crate::pinned::Pinned;
use crate::port::port_is_closed;
use crate::shared::{Disconnected, Shared};
use crate::stream::{Receiver, SendError, Sender};

/// A connection to a peer. Clones are handles to the same connection; any task may use them.
///
/// A connection ends when either side closes it, when the peer is silent for the idle timeout, or when the last
/// handle and the last [`Receiver`] are dropped.
#[derive(Clone)]
pub struct Connection {
    shared: Arc<Shared>,
    senders: Arc<[Sender; Lane::COUNT]>,
}

/// The receiving ends of a connection, one per lane. Each may move to its own task.
#[derive(Debug)]
pub struct Lanes {
    /// See [`Lane::Control`].
    pub control: Receiver,
    /// See [`Lane::Tensors`].
    pub tensors: Receiver,
    /// See [`Lane::Bulk`].
    pub bulk: Receiver,
}

/// A connection's counters since it was opened, and its present round-trip time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnectionStats {
    /// Frames handed to QUIC, indexed by `Lane as usize`.
    pub sent: [LaneStats; Lane::COUNT],
    /// Frames read from QUIC, indexed by `Lane as usize`.
    pub received: [LaneStats; Lane::COUNT],
    /// Bytes of UDP payload sent: frames, retransmissions and QUIC's own.
    pub udp_sent: u64,
    /// Bytes of UDP payload received.
    pub udp_received: u64,
    /// Sent packets that QUIC considers lost.
    pub lost_packets: u64,
    /// Smoothed round-trip time. Zero once the connection has ended.
    pub rtt: Duration,
    /// Bytes that may be in flight. Zero once the connection has ended.
    pub window: u64,
}

/// The way that packets take to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathKind {
    /// Packets go from machine to machine.
    Direct,
    /// Through a relay server.
    Relayed,
}

impl Connection {
    pub(crate) fn new(shared: Arc<Shared>, senders: [Sender; Lane::COUNT]) -> Self {
        Self { shared, senders: Arc::new(senders) }
    }

    /// The peer at the other end. QUIC's handshake has proved its key.
    pub fn peer(&self) -> PeerKey {
        self.shared.peer
    }

    /// Sends one frame on a lane. Returns when QUIC has accepted all of it, which is before it arrives.
    ///
    /// The slices of `payload` are sent one after another and are not copied. Frames of one lane arrive whole and
    /// in the order of their calls. Waiting sends are served first come, first served. Dropping the future before
    /// its turn sends nothing. Dropping it later completes the frame in the background, which keeps the lane
    /// readable.
    ///
    /// # Errors
    /// [`SendError::HeaderTooLong`] before anything is sent; [`SendError::Disconnected`]; and
    /// [`SendError::Unread`] if the peer dropped that lane's [`Receiver`].
    pub async fn send(&self, lane: Lane, header: &[u8], payload: &[Bytes]) -> Result<(), SendError> {
        self.senders[lane as usize].send(&self.shared, header, payload).await
    }

    /// Finishes every lane. Returns when the peer's QUIC has received everything. The peer's receivers yield
    /// `None` after the last frame.
    ///
    /// # Errors
    /// [`SendError::Disconnected`] if the connection ends first. Later sends fail with [`SendError::Finished`].
    pub async fn finish(&self) -> Result<(), SendError> {
        for sender in self.senders.iter() {
            sender.finish().await;
        }
        for sender in self.senders.iter() {
            sender.wait_delivered(&self.shared).await?;
        }
        Ok(())
    }

    /// Closes the connection at once. Frames that the peer has not read may be lost.
    ///
    /// The peer gets [`ClosedByPeer`](crate::DisconnectReason::ClosedByPeer) with the first 512 bytes of `reason`.
    pub fn close(&self, reason: &str) {
        self.shared.close(reason);
    }

    /// Waits until the connection has ended.
    pub async fn closed(&self) -> Disconnected {
        let error = self.shared.quic.closed().await;
        self.shared.disconnected(error)
    }

    /// The reason why the connection ended; `None` while it is open.
    pub fn disconnected(&self) -> Option<Disconnected> {
        self.shared.quic.close_reason().map(|error| self.shared.disconnected(error))
    }

    /// The time since the last packet from the peer arrived. It is cheap to call at any time.
    ///
    /// A live peer sends a packet at least every [`keep_alive`](crate::EndpointOptions::keep_alive). So a peer that
    /// has been silent for 3 s is probably in trouble, long before the idle timeout ends the connection. The value
    /// can be up to 0.5 s too small. Time in which this process or its machine slept does not count.
    pub fn silent_for(&self) -> Duration {
        self.shared.silent_for(Instant::now())
    }

    /// The way that packets take to the peer at present. A connection through a relay can become direct, and back.
    pub fn path(&self) -> PathKind {
        kind(&self.shared.quic.paths())
    }

    /// Waits until packets travel directly, but no longer than `patience`. Returns the way that they take then.
    pub async fn settled(&self, patience: Duration) -> PathKind {
        let direct = async {
            let mut changes = self.shared.quic.paths_stream();
            while let Some(paths) = changes.next().await {
                if kind(&paths) == PathKind::Direct {
                    return;
                }
            }
        };
        // If there is no direct path in time, the relayed one is the answer.
        let _ = tokio::time::timeout(patience, direct).await;
        self.path()
    }

    /// The address from which the peer's packets arrive at present; `None` through a relay.
    pub fn remote_addr(&self) -> Option<SocketAddr> {
        let paths = self.shared.quic.paths();
        let path = paths.iter().find(|path| path.is_selected()).or_else(|| paths.iter().next())?;
        match path.remote_addr() {
            TransportAddr::Ip(addr) => Some(SocketAddr::new(addr.ip().to_canonical(), addr.port())),
            TransportAddr::Custom(addr) => Pinned::socket_addr(addr).ok(),
            _ => None,
        }
    }

    /// Whether the peer's machine says that nobody listens where the peer's packets came from. Then the peer's process
    /// has ended. `false` after `patience` without an answer, which means nothing: firewalls and routers often say
    /// nothing, and a relay hides the address.
    pub async fn port_is_closed(&self, patience: Duration) -> bool {
        match self.remote_addr() {
            Some(addr) => port_is_closed(addr, patience).await,
            None => false,
        }
    }

    /// The counters.
    pub fn stats(&self) -> ConnectionStats {
        let quic = self.shared.quic.stats();
        let paths = self.shared.quic.paths();
        let path = paths.iter().find(|path| path.is_selected()).or_else(|| paths.iter().next());
        ConnectionStats {
            sent: Lane::ALL.map(|lane| self.shared.sent[lane as usize].read()),
            received: Lane::ALL.map(|lane| self.shared.received[lane as usize].read()),
            udp_sent: quic.udp_tx.bytes,
            udp_received: quic.udp_rx.bytes,
            lost_packets: quic.lost_packets,
            rtt: path.as_ref().map_or(Duration::ZERO, |path| path.rtt()),
            window: path.map_or(0, |path| path.stats().cwnd),
        }
    }
}

fn kind(paths: &PathList<'_>) -> PathKind {
    let path = paths.iter().find(|path| path.is_selected()).or_else(|| paths.iter().next());
    match path.is_some_and(|path| path.is_relay()) {
        true => PathKind::Relayed,
        false => PathKind::Direct,
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection(to {})", self.shared.peer)
    }
}
