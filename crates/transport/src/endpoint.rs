//! This machine's end of all its connections.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use iroh::endpoint::{
    ConnectError as QuicConnectError, ConnectWithOptsError, ConnectingError, ConnectionError, IdleTimeout,
    NetReportConfig, PortmapperConfig, QuicTransportConfig, ReadError, ReadExactError, RecvStream, VarInt, WriteError,
    presets,
};
use iroh::{EndpointAddr, RelayMode, TransportAddr};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tracing::debug;

use crate::congestion::BurstsConfig;
use crate::connection::{CODE_REFUSED, Connection, DisconnectReason, Lanes, Lost, Registry, Shared, disconnect_reason};
use crate::frame::{ALPN, PRELUDE, Violation, parse_prelude, prelude};
use crate::key::{PeerAddr, PeerKey, SecretKey};
use crate::lane::{Lane, Receiver, Sender};
use crate::pinned::Pinned;

/// How an [`Endpoint`] behaves. [`EndpointOptions::new`] gives what a real run wants.
#[derive(Debug, Clone)]
pub struct EndpointOptions {
    /// Who this endpoint is.
    pub secret_key: SecretKey,
    /// The UDP address to listen on; port 0 picks a free one. `None`: a free port on every
    /// interface, IPv4 and IPv6.
    pub listen: Option<SocketAddr>,
    /// Whom to let in. [`Endpoint::allow`] changes it later.
    pub allowed: Allowed,
    /// A quiet connection is poked this often.
    pub keep_alive: Duration,
    /// A peer from which nothing came for this long is lost. Seen from its last sign of life, it
    /// may take `keep_alive` longer, and three retransmission timeouts on a path so slow that
    /// these are longer than this. The shorter of both sides' holds.
    pub idle_timeout: Duration,
    /// How long [`Endpoint::connect`] and an arriving peer may take to come to an open connection.
    pub connect_timeout: Duration,
    /// Talk only to the addresses given to [`Endpoint::connect`], or that a peer connects from,
    /// and never look for a better path. For links that are emulated: otherwise peers on one
    /// machine would find each other past the emulator. Listens on 127.0.0.1 where `listen` is
    /// `None`.
    pub pinned: bool,
}

impl EndpointOptions {
    /// A fresh identity, listening everywhere, letting anyone in; a killed peer is noticed
    /// within 4.25 s.
    pub fn new() -> Self {
        Self {
            secret_key: SecretKey::generate(),
            listen: None,
            allowed: Allowed::Any,
            keep_alive: Duration::from_millis(750),
            idle_timeout: Duration::from_millis(3500),
            connect_timeout: Duration::from_secs(10),
            pinned: false,
        }
    }
}

impl Default for EndpointOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// Whose connections are accepted. The others are closed before a byte of theirs is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allowed {
    /// Anyone's: what they send must prove them welcome.
    Any,
    /// Those of these keys.
    Only(BTreeSet<PeerKey>),
}

impl Allowed {
    fn includes(&self, key: &PeerKey) -> bool {
        match self {
            Self::Any => true,
            Self::Only(keys) => keys.contains(key),
        }
    }
}

/// An endpoint could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {listen}: {reason}")]
pub struct BindError {
    listen: String,
    reason: String,
}

/// A connection could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The key is no Ed25519 public key.
    #[error("cannot connect to {0}: that is not a valid public key")]
    InvalidKey(PeerKey),
    /// The peer's address list is empty, or the peer is this endpoint itself.
    #[error("cannot connect to {0}: {1}")]
    NoWay(PeerAddr, &'static str),
    /// Nobody answered in time.
    #[error("cannot connect to {addr}: no answer within {after:?}")]
    NoAnswer {
        /// Whom, and where all it was tried.
        addr: PeerAddr,
        /// The time spent.
        after: Duration,
    },
    /// The peer does not (or not yet) let this endpoint's key in.
    #[error("cannot connect to {0}: it does not let this peer's key in")]
    Refused(PeerKey),
    /// The peer runs an incompatible version.
    #[error(
        "cannot connect to {0}: it does not speak {alpn}; use the same version of fusionllm \
         on both machines",
        alpn = ALPN.escape_ascii()
    )]
    Version(PeerKey),
    /// The connection broke while it was being made.
    #[error("cannot connect: {0}")]
    Lost(Lost),
    /// This endpoint is closed.
    #[error("cannot connect to {0}: this endpoint is closed")]
    Closed(PeerKey),
    /// QUIC's handshake failed, for example because someone else answers at the address.
    #[error("cannot connect to {0}: {1}")]
    Handshake(PeerAddr, String),
}

/// This machine's end of all its connections: one UDP port and one identity. Clones are handles to
/// the same endpoint. Call [`Endpoint::close`] before the last one is dropped, or the peers only
/// notice when they time out.
#[derive(Clone)]
pub struct Endpoint(Arc<Inner>);

struct Inner {
    quic: iroh::Endpoint,
    key: PeerKey,
    /// The only address, if no others are to be looked for.
    pinned: Option<SocketAddr>,
    allowed: Arc<RwLock<Allowed>>,
    connections: Arc<Registry>,
    accepted: tokio::sync::Mutex<mpsc::Receiver<(Connection, Lanes)>>,
    accepting: AbortHandle,
    connect_timeout: Duration,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Endpoint {
    /// Opens an endpoint on the current Tokio runtime. It uses no relay, no discovery service and
    /// no name server, and asks no router for anything.
    ///
    /// # Errors
    /// [`BindError`] if the address to listen on is taken or is not this machine's.
    pub async fn bind(options: EndpointOptions) -> Result<Self, BindError> {
        let listen = match (options.listen, options.pinned) {
            (Some(listen), _) => Some(listen),
            (None, true) => Some((Ipv4Addr::LOCALHOST, 0).into()),
            (None, false) => None,
        };
        let failed = |reason: String| {
            let listen = listen.map_or_else(|| "any free port".to_owned(), |addr| addr.to_string());
            BindError { listen, reason }
        };

        let idle_timeout = IdleTimeout::try_from(options.idle_timeout)
            .map_err(|_| failed("the idle timeout is too long".to_owned()))?;
        let lanes = VarInt::from_u32(Lane::COUNT as u32);
        // The receiver's windows stay at their defaults: larger ones have broken connections ("too many gaps
        // in stream buffer").
        let transport = QuicTransportConfig::builder()
            .keep_alive_interval(options.keep_alive)
            .max_idle_timeout(Some(idle_timeout))
            .max_concurrent_uni_streams(lanes)
            .max_concurrent_bidi_streams(VarInt::from_u32(0))
            .datagram_receive_buffer_size(None)
            .congestion_controller_factory(Arc::new(BurstsConfig))
            .build();
        let mut builder = iroh::Endpoint::builder(presets::Minimal)
            .secret_key(options.secret_key.0.clone())
            .alpns(vec![ALPN.to_vec()])
            .transport_config(transport)
            .relay_mode(RelayMode::Disabled)
            .clear_address_lookup()
            .portmapper_config(PortmapperConfig::Disabled)
            .net_report_config(NetReportConfig::minimal());
        let mut pinned = None;
        if let Some(listen) = listen {
            builder = builder.clear_ip_transports();
            if options.pinned {
                let socket = Pinned::bind(listen).map_err(|e| failed(e.to_string()))?;
                pinned = Some(socket.local_addr().map_err(|e| failed(e.to_string()))?);
                builder = builder.add_custom_transport(Arc::new(socket));
            } else {
                builder = builder.bind_addr(listen).map_err(|e| failed(format!("{e:#}")))?;
            }
        }
        let quic = builder.bind().await.map_err(|e| failed(format!("{e:#}")))?;

        let allowed = Arc::new(RwLock::new(options.allowed));
        let connections = Arc::new(Registry::default());
        let (sender, accepted) = mpsc::channel(ACCEPT_QUEUE);
        let queue = AcceptQueue {
            allowed: allowed.clone(),
            connections: connections.clone(),
            timeout: options.connect_timeout,
        };
        let accepting = tokio::spawn(queue.keep(quic.clone(), sender)).abort_handle();
        Ok(Self(Arc::new(Inner {
            quic,
            key: options.secret_key.public(),
            pinned,
            allowed,
            connections,
            accepted: tokio::sync::Mutex::new(accepted),
            accepting,
            connect_timeout: options.connect_timeout,
        })))
    }

    /// Who this endpoint is.
    pub fn key(&self) -> PeerKey {
        self.0.key
    }

    /// Where peers may find this endpoint now: where it listens on every interface, the addresses
    /// of all of this machine's interfaces (loopback only if there is no other), sorted.
    pub fn addr(&self) -> PeerAddr {
        let addrs = match self.0.pinned {
            Some(addr) => vec![addr],
            None => {
                let mut addrs: Vec<SocketAddr> = self.0.quic.addr().ip_addrs().copied().collect();
                // A link-local address means nothing without the interface that it belongs to.
                addrs.retain(|addr| !matches!(addr, SocketAddr::V6(a) if a.ip().is_unicast_link_local()));
                addrs.sort_unstable();
                addrs
            }
        };
        PeerAddr { key: self.key(), addrs }
    }

    /// Replaces the list of those who are let in. Open connections stay.
    pub fn allow(&self, allowed: Allowed) {
        *self.0.allowed.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = allowed;
    }

    /// Connects to a peer, and returns once it has let this endpoint in. Several connections to one
    /// peer are independent of each other.
    ///
    /// # Errors
    /// See [`ConnectError`]. A peer that has not been told of this one yet says
    /// [`ConnectError::Refused`].
    pub async fn connect(&self, to: &PeerAddr) -> Result<(Connection, Lanes), ConnectError> {
        let id = iroh::PublicKey::from_bytes(to.key.as_bytes()).map_err(|_| ConnectError::InvalidKey(to.key))?;
        if to.addrs.is_empty() {
            return Err(ConnectError::NoWay(to.clone(), "it has no address"));
        }
        let pinned = self.0.pinned.is_some();
        let addrs = to.addrs.iter().map(|addr| match pinned {
            true => Pinned::address(*addr),
            false => TransportAddr::Ip(*addr),
        });
        let opening = async {
            let addr = EndpointAddr::from_parts(id, addrs);
            let quic = self.0.quic.connect(addr, ALPN).await;
            let quic = quic.map_err(|error| self.refusal(to, error))?;
            open(quic, &self.0.connections).await.map_err(|lost| match lost.reason {
                DisconnectReason::Refused => ConnectError::Refused(to.key),
                _ => ConnectError::Lost(lost),
            })
        };
        let after = self.0.connect_timeout;
        match tokio::time::timeout(after, opening).await {
            Ok(result) => result,
            Err(_) => Err(ConnectError::NoAnswer { addr: to.clone(), after }),
        }
    }

    /// The next connection that a peer made and that was let in. `None` once the endpoint is closed.
    /// Dropping the future loses no connection.
    pub async fn accept(&self) -> Option<(Connection, Lanes)> {
        self.0.accepted.lock().await.recv().await
    }

    /// Closes all connections, telling the peers `reason`, and stops listening. Returns once the
    /// peers have heard or, if some do not answer, after a few seconds.
    pub async fn close(&self, reason: &str) {
        self.0.connections.close(reason);
        self.0.quic.close().await;
    }

    fn refusal(&self, to: &PeerAddr, error: QuicConnectError) -> ConnectError {
        let text = format!("{error:#}");
        let error = match error {
            QuicConnectError::Connect { source, .. } => {
                return match source {
                    ConnectWithOptsError::SelfConnect { .. } => {
                        ConnectError::NoWay(to.clone(), "that is this very peer")
                    }
                    ConnectWithOptsError::EndpointClosed { .. } => ConnectError::Closed(to.key),
                    _ => ConnectError::Handshake(to.clone(), text),
                };
            }
            QuicConnectError::Connecting { source: ConnectingError::ConnectionError { source, .. }, .. } => source,
            QuicConnectError::Connection { source, .. } => source,
            _ => return ConnectError::Handshake(to.clone(), text),
        };
        match error {
            ConnectionError::TimedOut => ConnectError::NoAnswer { addr: to.clone(), after: self.0.connect_timeout },
            ConnectionError::ConnectionClosed(close) if u64::from(close.error_code) == NO_APPLICATION_PROTOCOL => {
                ConnectError::Version(to.key)
            }
            ConnectionError::LocallyClosed => ConnectError::Closed(to.key),
            error @ (ConnectionError::ApplicationClosed(_) | ConnectionError::Reset) => {
                match disconnect_reason(error) {
                    DisconnectReason::Refused => ConnectError::Refused(to.key),
                    reason => ConnectError::Lost(Lost { peer: to.key, reason }),
                }
            }
            _ => ConnectError::Handshake(to.clone(), text),
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({})", self.addr())
    }
}

/// TLS alert 120 (RFC 7301) as a QUIC error code (RFC 9001, section 4.8).
const NO_APPLICATION_PROTOCOL: u64 = 0x100 + 120;
/// Connections that wait for [`Endpoint::accept`].
const ACCEPT_QUEUE: usize = 16;
/// Peers in the middle of connecting; further ones wait.
const MAX_OPENING: usize = 64;

/// Lets peers in, several at once, so that a slow or silent one does not keep others out.
struct AcceptQueue {
    allowed: Arc<RwLock<Allowed>>,
    connections: Arc<Registry>,
    timeout: Duration,
}

impl AcceptQueue {
    async fn keep(self, quic: iroh::Endpoint, accepted: mpsc::Sender<(Connection, Lanes)>) {
        let queue = Arc::new(self);
        let mut opening = JoinSet::new();
        loop {
            tokio::select! {
                incoming = quic.accept(), if opening.len() < MAX_OPENING => {
                    let Some(incoming) = incoming else { return };
                    let (queue, accepted) = (queue.clone(), accepted.clone());
                    opening.spawn(async move {
                        match tokio::time::timeout(queue.timeout, queue.let_in(incoming)).await {
                            // It fails only when nobody will ever ask for the connection.
                            Ok(Ok(connection)) => { let _ = accepted.send(connection).await; }
                            Ok(Err(why)) => debug!(why, "did not let a peer in"),
                            Err(_) => debug!("a peer began to connect and fell silent"),
                        }
                    });
                }
                Some(_) = opening.join_next() => {}
            }
        }
    }

    async fn let_in(&self, incoming: iroh::endpoint::Incoming) -> Result<(Connection, Lanes), String> {
        let quic = incoming.await.map_err(|error| format!("{error:#}"))?;
        let peer = PeerKey::from_bytes(*quic.remote_id().as_bytes());
        let welcome = {
            let allowed = self.allowed.read().unwrap_or_else(|poisoned| poisoned.into_inner());
            allowed.includes(&peer)
        };
        if !welcome {
            quic.close(CODE_REFUSED, b"key not allowed");
            return Err(format!("{peer} is not among the allowed keys"));
        }
        open(quic, &self.connections).await.map_err(|lost| lost.to_string())
    }
}

/// Opens this side's lanes and waits for the other's. Both sides do the same, so that neither has a
/// connection before the other let it in.
async fn open(quic: iroh::endpoint::Connection, connections: &Registry) -> Result<(Connection, Lanes), Lost> {
    let shared = Shared::new(quic);
    connections.add(&shared);
    let [control, tensors, bulk] = Lane::ALL;
    let senders =
        [open_lane(&shared, control).await?, open_lane(&shared, tensors).await?, open_lane(&shared, bulk).await?];

    let mut streams: [Option<RecvStream>; Lane::COUNT] = [None, None, None];
    loop {
        streams = match streams {
            [Some(control), Some(tensors), Some(bulk)] => {
                let lanes = Lanes {
                    control: Receiver::new(Lane::Control, control, shared.clone()),
                    tensors: Receiver::new(Lane::Tensors, tensors, shared.clone()),
                    bulk: Receiver::new(Lane::Bulk, bulk, shared.clone()),
                };
                return Ok((Connection::new(shared, senders), lanes));
            }
            some_missing => some_missing,
        };
        let stream = shared.quic.accept_uni().await;
        let mut stream = stream.map_err(|error| shared.lost(error))?;
        let mut bytes = [0; PRELUDE];
        match stream.read_exact(&mut bytes).await {
            Ok(()) => {}
            Err(ReadExactError::ReadError(ReadError::ConnectionLost(error))) => {
                return Err(shared.lost(error));
            }
            Err(_) => return Err(shared.violated(Violation::NoPrelude)),
        }
        let lane = parse_prelude(bytes).map_err(|violation| shared.violated(violation))?;
        if streams[lane as usize].replace(stream).is_some() {
            return Err(shared.violated(Violation::LaneTwice(lane)));
        }
    }
}

async fn open_lane(shared: &Shared, lane: Lane) -> Result<Sender, Lost> {
    let stream = shared.quic.open_uni().await;
    let mut stream = stream.map_err(|error| shared.lost(error))?;
    // Neither can fail on a fresh stream but by the connection, which the next use of it reports.
    let _ = stream.set_priority(lane.priority());
    match stream.write_all(&prelude(lane)).await {
        Err(WriteError::ConnectionLost(error)) => Err(shared.lost(error)),
        _ => Ok(Sender::new(lane, stream)),
    }
}
