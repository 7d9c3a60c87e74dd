//! One UDP port and one identity, and all connections over them.

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

use crate::congestion::{BurstControllerFactory, RECEIVE_WINDOW_BYTES};
use crate::connection::{Connection, Lanes};
use crate::frame::{ALPN, FormatError, PRELUDE_BYTES, parse_prelude, prelude};
use crate::key::{PeerAddr, PeerKey, SecretKey};
use crate::lane::Lane;
use crate::pinned::Pinned;
use crate::shared::{CODE_REFUSED, DisconnectReason, Disconnected, OpenConnections, Shared, disconnect_reason};
use crate::stream::{Receiver, Sender};

/// How an [`Endpoint`] behaves. [`EndpointOptions::new`] fits a real run.
#[derive(Debug, Clone)]
pub struct EndpointOptions {
    /// The endpoint's identity.
    pub secret_key: SecretKey,
    /// The UDP address to listen on; port 0 picks a free one. `None`: a free port on every interface, IPv4 and
    /// IPv6.
    pub listen: Option<SocketAddr>,
    /// The keys whose connections are accepted. [`Endpoint::allow`] changes them later.
    pub allowed: Allowed,
    /// Interval of the packets that keep a quiet connection open.
    pub keep_alive: Duration,
    /// A peer that is silent for this long is lost. The shorter value of both sides applies.
    ///
    /// Detection can take `keep_alive` longer. On a path so slow that three retransmission timeouts exceed this
    /// value, it takes those three timeouts.
    pub idle_timeout: Duration,
    /// Limit for [`Endpoint::connect`], and for an arriving peer's handshake.
    pub connect_timeout: Duration,
    /// Use only the addresses given to [`Endpoint::connect`], or from which a peer connects, and never look for a
    /// better path. Listens on 127.0.0.1 if `listen` is `None`.
    ///
    /// Emulated links need this. Otherwise peers on one machine would find each other and bypass the emulator.
    pub pinned: bool,
}

impl EndpointOptions {
    /// A new identity that listens on all interfaces and accepts any key. It notices a killed peer within 4.25 s.
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

/// The keys whose connections an endpoint accepts. Others are closed before any of their bytes is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allowed {
    /// Any key. The caller must authenticate the peer by its messages.
    Any,
    /// These keys.
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

/// A connection could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The key is not an Ed25519 public key.
    #[error("cannot connect to {0}: that is not a valid public key")]
    InvalidKey(PeerKey),
    /// The peer's address list is empty, or the peer is this endpoint itself.
    #[error("cannot connect to {0}: {1}")]
    Unreachable(PeerAddr, &'static str),
    /// No answer came in time.
    #[error("cannot connect to {addr}: no answer within {after:?}")]
    NoAnswer {
        /// The peer and all addresses that were tried.
        addr: PeerAddr,
        /// The time spent.
        after: Duration,
    },
    /// The peer does not accept this endpoint's key, or not yet.
    #[error("cannot connect to {0}: it does not accept this peer's key")]
    Refused(PeerKey),
    /// The peer runs an incompatible version.
    #[error("cannot connect to {0}: it does not speak {alpn}", alpn = ALPN.escape_ascii())]
    Version(PeerKey),
    /// The connection broke during its handshake.
    #[error("cannot connect: {0}")]
    Disconnected(Disconnected),
    /// This endpoint is closed.
    #[error("cannot connect to {0}: this endpoint is closed")]
    Closed(PeerKey),
    /// QUIC's handshake failed, for example because another peer has the address.
    #[error("cannot connect to {0}: {1}")]
    Handshake(PeerAddr, String),
}

impl ConnectError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Version(_) => Some("use the same version of fusionllm on both machines"),
            Self::NoAnswer { .. } => Some("check that it still runs and that no firewall blocks UDP"),
            _ => None,
        }
    }
}

/// One UDP port and one identity, with all connections over them. Clones are handles to the same endpoint.
///
/// Call [`Endpoint::close`] before dropping the last handle. Otherwise peers notice only after their idle timeout.
#[derive(Clone)]
pub struct Endpoint(Arc<Inner>);

struct Inner {
    quic: iroh::Endpoint,
    key: PeerKey,
    /// The listening address, if the endpoint is pinned.
    pinned: Option<SocketAddr>,
    allowed: Arc<RwLock<Allowed>>,
    connections: Arc<OpenConnections>,
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
    /// Opens an endpoint on the current Tokio runtime. It uses no relay, no discovery service, no name server and no
    /// port mapping.
    ///
    /// # Errors
    /// [`BindError`] if the listening address is in use or does not belong to this machine.
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
        // Larger receive windows broke connections ("too many gaps in stream buffer").
        let transport = QuicTransportConfig::builder()
            .keep_alive_interval(options.keep_alive)
            .max_idle_timeout(Some(idle_timeout))
            .max_concurrent_uni_streams(lanes)
            .max_concurrent_bidi_streams(VarInt::from_u32(0))
            .datagram_receive_buffer_size(None)
            .stream_receive_window(VarInt::from_u32(RECEIVE_WINDOW_BYTES))
            .congestion_controller_factory(Arc::new(BurstControllerFactory))
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
        let connections = Arc::new(OpenConnections::default());
        let (sender, accepted) = mpsc::channel(MAX_ACCEPTED);
        let queue = AcceptQueue {
            allowed: allowed.clone(),
            connections: connections.clone(),
            timeout: options.connect_timeout,
        };
        let accepting = tokio::spawn(queue.run(quic.clone(), sender)).abort_handle();
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

    /// The endpoint's identity.
    pub fn key(&self) -> PeerKey {
        self.0.key
    }

    /// The addresses at which peers can reach this endpoint, sorted.
    ///
    /// If it listens on all interfaces, these are the interfaces' present addresses. Loopback is included only if
    /// there is no other.
    pub fn addr(&self) -> PeerAddr {
        let addrs = match self.0.pinned {
            Some(addr) => vec![addr],
            None => {
                let mut addrs: Vec<SocketAddr> = self.0.quic.addr().ip_addrs().copied().collect();
                // A link-local address is useless without its interface.
                addrs.retain(|addr| !matches!(addr, SocketAddr::V6(a) if a.ip().is_unicast_link_local()));
                addrs.sort_unstable();
                addrs
            }
        };
        PeerAddr { key: self.key(), addrs }
    }

    /// Replaces the accepted keys. Open connections stay open.
    pub fn allow(&self, allowed: Allowed) {
        *self.0.allowed.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = allowed;
    }

    /// Connects to a peer and returns once the peer has accepted. Connections to the same peer are independent.
    ///
    /// # Errors
    /// See [`ConnectError`]. [`ConnectError::Refused`] can be temporary: the peer may not have learnt this
    /// endpoint's key yet.
    pub async fn connect(&self, to: &PeerAddr) -> Result<(Connection, Lanes), ConnectError> {
        let id = iroh::PublicKey::from_bytes(to.key.as_bytes()).map_err(|_| ConnectError::InvalidKey(to.key))?;
        if to.addrs.is_empty() {
            return Err(ConnectError::Unreachable(to.clone(), "it has no address"));
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
            open(quic, &self.0.connections).await.map_err(|gone| match gone.reason {
                DisconnectReason::Refused => ConnectError::Refused(to.key),
                _ => ConnectError::Disconnected(gone),
            })
        };
        let after = self.0.connect_timeout;
        match tokio::time::timeout(after, opening).await {
            Ok(result) => result,
            Err(_) => Err(ConnectError::NoAnswer { addr: to.clone(), after }),
        }
    }

    /// The next connection that a peer opened with an accepted key. `None` once the endpoint is closed. Dropping
    /// the future loses no connection.
    pub async fn accept(&self) -> Option<(Connection, Lanes)> {
        self.0.accepted.lock().await.recv().await
    }

    /// Closes all connections with `reason` and stops listening. Returns once the peers have acknowledged, or after
    /// a few seconds.
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
                        ConnectError::Unreachable(to.clone(), "that is this peer itself")
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
                    reason => ConnectError::Disconnected(Disconnected { peer: to.key, reason }),
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
/// Most connections that wait for [`Endpoint::accept`].
const MAX_ACCEPTED: usize = 16;
/// Most handshakes at once; further peers wait.
const MAX_HANDSHAKES: usize = 64;

/// Completes the handshakes of arriving peers, several at once, so that a slow peer does not block others.
struct AcceptQueue {
    allowed: Arc<RwLock<Allowed>>,
    connections: Arc<OpenConnections>,
    timeout: Duration,
}

impl AcceptQueue {
    async fn run(self, quic: iroh::Endpoint, accepted: mpsc::Sender<(Connection, Lanes)>) {
        let queue = Arc::new(self);
        let mut handshakes = JoinSet::new();
        loop {
            tokio::select! {
                incoming = quic.accept(), if handshakes.len() < MAX_HANDSHAKES => {
                    let Some(incoming) = incoming else { return };
                    let (queue, accepted) = (queue.clone(), accepted.clone());
                    handshakes.spawn(async move {
                        match tokio::time::timeout(queue.timeout, queue.accept(incoming)).await {
                            // Sending fails only when the endpoint is gone.
                            Ok(Ok(connection)) => { let _ = accepted.send(connection).await; }
                            Ok(Err(why)) => debug!(why, "refused a peer"),
                            Err(_) => debug!("a peer began to connect and fell silent"),
                        }
                    });
                }
                Some(_) = handshakes.join_next() => {}
            }
        }
    }

    async fn accept(&self, incoming: iroh::endpoint::Incoming) -> Result<(Connection, Lanes), String> {
        let quic = incoming.await.map_err(|error| format!("{error:#}"))?;
        let peer = PeerKey::from_bytes(*quic.remote_id().as_bytes());
        let allowed = {
            let allowed = self.allowed.read().unwrap_or_else(|poisoned| poisoned.into_inner());
            allowed.includes(&peer)
        };
        if !allowed {
            quic.close(CODE_REFUSED, b"key not allowed");
            return Err(format!("{peer} is not among the allowed keys"));
        }
        open(quic, &self.connections).await.map_err(|gone| gone.to_string())
    }
}

/// Opens this side's lanes and waits for the peer's. Both sides do the same, so neither has a connection before the
/// other has accepted it.
async fn open(
    quic: iroh::endpoint::Connection,
    connections: &OpenConnections,
) -> Result<(Connection, Lanes), Disconnected> {
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
        let mut stream = stream.map_err(|error| shared.disconnected(error))?;
        let mut bytes = [0; PRELUDE_BYTES];
        match stream.read_exact(&mut bytes).await {
            Ok(()) => {}
            Err(ReadExactError::ReadError(ReadError::ConnectionLost(error))) => {
                return Err(shared.disconnected(error));
            }
            Err(_) => return Err(shared.close_broken(FormatError::NoPrelude)),
        }
        let lane = parse_prelude(bytes).map_err(|error| shared.close_broken(error))?;
        if streams[lane as usize].replace(stream).is_some() {
            return Err(shared.close_broken(FormatError::DuplicateLane(lane)));
        }
    }
}

async fn open_lane(shared: &Shared, lane: Lane) -> Result<Sender, Disconnected> {
    let stream = shared.quic.open_uni().await;
    let mut stream = stream.map_err(|error| shared.disconnected(error))?;
    // On a new stream, both calls fail only if the connection is lost. The next use of it reports that.
    let _ = stream.set_priority(lane.priority());
    match stream.write_all(&prelude(lane)).await {
        Err(WriteError::ConnectionLost(error)) => Err(shared.disconnected(error)),
        _ => Ok(Sender::new(lane, stream)),
    }
}
