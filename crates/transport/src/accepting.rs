//! Completes the handshakes of arriving peers, several at once, so that a slow peer does not block others.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use iroh::endpoint::{Incoming, IncomingAddr};
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::task::{AbortHandle, JoinSet};
use tracing::debug;

use crate::connection::{Connection, Lanes};
use crate::gate::{Gate, Source, Verdict};
use crate::key::PeerKey;
use crate::opening::open;
use crate::options::Allowed;
use crate::pinned::Pinned;
use crate::shared::{CODE_CLOSED, CODE_REFUSED, OpenConnections};

/// Most connections that wait for [`Endpoint::accept`](crate::Endpoint::accept). Further ones are closed.
pub(crate) const MAX_WAITING: usize = 64;
/// Most open connections that one key has opened. Further ones are closed.
///
/// A peer opens one for its run and one to measure the link. After a restart, the old ones stay until they time out.
const MAX_FROM_ONE_KEY: usize = 8;

/// The accepting side of an endpoint.
pub(crate) struct Accepting {
    pub(crate) allowed: Arc<RwLock<Allowed>>,
    pub(crate) connections: Arc<OpenConnections>,
    /// The handshakes in progress, for the endpoint's statistics.
    pub(crate) handshakes: Arc<AtomicUsize>,
    /// Limit for one handshake and the peer's lanes.
    pub(crate) timeout: Duration,
}

type Accepted = mpsc::Sender<(Connection, Lanes)>;

impl Accepting {
    /// Runs until the endpoint is closed.
    pub(crate) async fn run(self, quic: iroh::Endpoint, accepted: Accepted) {
        let this = Arc::new(self);
        let mut gate = Gate::new();
        let mut handshakes = JoinSet::new();
        loop {
            tokio::select! {
                // Every packet of a newcomer is answered or dropped at once. None waits in QUIC's own queue.
                incoming = quic.accept() => match incoming {
                    Some(incoming) => this.ask(incoming, &mut gate, &mut handshakes, &accepted),
                    None => return,
                },
                Some(ended) = handshakes.join_next_with_id() => {
                    let id = ended.map_or_else(|error| error.id(), |(id, ())| id);
                    gate.leave(|handle: &AbortHandle| handle.id() == id);
                }
            }
            this.handshakes.store(gate.len(), Relaxed);
        }
    }

    fn ask(
        self: &Arc<Self>,
        incoming: Incoming,
        gate: &mut Gate<AbortHandle>,
        handshakes: &mut JoinSet<()>,
        accepted: &Accepted,
    ) {
        let (source, proved, now) = (source(&incoming), incoming.remote_addr_validated(), Instant::now());
        match gate.ask(source, proved, now) {
            Verdict::Begin(old) => {
                if let Some(old) = old {
                    debug!("a newcomer takes the place of an old handshake");
                    old.abort();
                }
                let handle = handshakes.spawn(self.clone().handshake(incoming, accepted.clone()));
                gate.enter(handle, source, proved, now);
            }
            // A packet that cannot be answered with a retry is refused when it is dropped.
            Verdict::Retry => drop(incoming.retry()),
            Verdict::Drop => incoming.ignore(),
        }
    }

    /// One handshake. Dropping the future closes the connection.
    async fn handshake(self: Arc<Self>, incoming: Incoming, accepted: Accepted) {
        match tokio::time::timeout(self.timeout, self.accept(incoming)).await {
            Ok(Ok(connection)) => match accepted.try_send(connection) {
                Err(TrySendError::Full((connection, _))) => {
                    debug!(peer = %connection.peer(), "closed a connection: too many wait to be accepted");
                    connection.close("too many connections wait to be accepted");
                }
                // Sending also fails when the endpoint is gone.
                Ok(()) | Err(TrySendError::Closed(_)) => {}
            },
            Ok(Err(why)) => debug!(why, "refused a peer"),
            Err(_) => debug!("a peer began to connect and fell silent"),
        }
    }

    async fn accept(&self, incoming: Incoming) -> Result<(Connection, Lanes), String> {
        let quic = incoming.await.map_err(|error| format!("{error:#}"))?;
        let peer = PeerKey::from_bytes(*quic.remote_id().as_bytes());
        if !self.allowed.read().unwrap_or_else(PoisonError::into_inner).includes(&peer) {
            quic.close(CODE_REFUSED, b"key not allowed");
            return Err(format!("{peer} is not among the allowed keys"));
        }
        if self.connections.arrived_from(&peer) >= MAX_FROM_ONE_KEY {
            quic.close(CODE_CLOSED, b"this key has too many connections");
            return Err(format!("{peer} already has {MAX_FROM_ONE_KEY} connections"));
        }
        open(quic, &self.connections).await.map_err(|gone| gone.to_string())
    }
}

fn source(incoming: &Incoming) -> Source {
    match incoming.remote_addr() {
        IncomingAddr::Ip(addr) => Source::of(addr.ip()),
        IncomingAddr::Custom(addr) => Pinned::socket_addr(&addr).map_or(Source::Relay, |addr| Source::of(addr.ip())),
        _ => Source::Relay,
    }
}
