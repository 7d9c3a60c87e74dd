//! One UDP port and one identity, and all connections over them.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use iroh::endpoint::{
    BindOpts, ConnectError as QuicConnectError, ConnectWithOptsError, ConnectingError, ConnectionError, IdleTimeout,
    NetReportConfig, PortmapperConfig, QuicTransportConfig, TransportErrorCode, VarInt, presets,
};
use iroh::{EndpointAddr, RelayMode, TransportAddr};
use n0_watcher::Watcher;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::MissedTickBehavior;

use crate::accepting::{Accepting, MAX_WAITING};
use crate::congestion::{BurstControllerFactory, MAX_WINDOW_BYTES, STREAM_WINDOW_BYTES};
use crate::connection::{Connection, Lanes};
use crate::discovery;
use crate::frame::ALPN;
use crate::key::{PeerAddr, PeerKey, RelayUrl};
use crate::lane::ALL_STREAMS;
use crate::obstacle::obstacle_to;
use crate::opening::open;
use crate::options::{Allowed, EndpointOptions, Relay};
use crate::pinned::Pinned;
use crate::shared::{DisconnectReason, Disconnected, OpenConnections, disconnect_reason};

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
        /// The obstacle for packets of this machine, with advice: [`obstacle_to`].
        obstacle: Option<String>,
    },
    /// The machines at all addresses of the peer say that nobody listens there. See
    /// [`nobody_listens`](crate::nobody_listens).
    #[error("cannot connect to {0}: nobody listens there")]
    NobodyListens(PeerAddr),
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
    /// Advice to the user about this error, if there is any.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Version(_) => Some("use the same version of fusionllm on both machines"),
            _ => None,
        }
    }
}

/// An endpoint has no connection to its relay.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoRelay {
    /// The relay does not let this endpoint in: the secret in its URL is wrong.
    #[error("the relay {0} does not let this machine in")]
    Denied(String),
    /// The relay cannot be reached.
    #[error("the relay {relay} cannot be reached: {reason}")]
    Unreachable {
        /// The relay, without its secret.
        relay: String,
        /// The outcome of the last attempt.
        reason: String,
    },
}

impl NoRelay {
    /// Advice to the user about this error.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Denied(_) => "use the whole URL that `fusionllm relay` printed, with its token",
            Self::Unreachable { .. } => {
                "check that the relay runs, and that no firewall blocks its port for TCP and UDP between it and this machine"
            }
        }
    }
}

/// The handshakes and connections that an endpoint has at present.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EndpointStats {
    /// Arriving peers that have not finished their handshake and opened their lanes.
    pub handshakes: usize,
    /// Connections with a proved key, in both directions, also those that only open their lanes.
    pub connections: usize,
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
    advertise: Vec<SocketAddr>,
    relay: Relay,
    allowed: Arc<RwLock<Allowed>>,
    connections: Arc<OpenConnections>,
    handshakes: Arc<AtomicUsize>,
    accepted: tokio::sync::Mutex<mpsc::Receiver<(Connection, Lanes)>>,
    /// Accepts peers and watches for silent ones.
    task: AbortHandle,
    connect_timeout: Duration,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Endpoint {
    /// Opens an endpoint on the current Tokio runtime. It uses no discovery service, no name server and no port
    /// mapping, and no relay unless [`EndpointOptions::relay`] names one.
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
            let port = || match options.ports[0] {
                0 => "any free port".to_owned(),
                port => format!("port {port}"),
            };
            let listen = listen.map_or_else(port, |addr| addr.to_string());
            BindError { listen, reason }
        };

        let transport = transport(&options).ok_or_else(|| failed("the idle timeout is too long".to_owned()))?;
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
        } else if options.ports != [0; 2] {
            let [v4, v6] = options.ports;
            // Some machines have no IPv6.
            let optional = BindOpts::default().set_is_required(false);
            let both = builder.clear_ip_transports().bind_addr((Ipv4Addr::UNSPECIFIED, v4));
            let both = both.and_then(|b| b.bind_addr_with_opts((Ipv6Addr::UNSPECIFIED, v6), optional));
            builder = both.map_err(|e| failed(format!("{e:#}")))?;
        }
        let (mut advertise, mut relay) = (Vec::new(), Relay::None);
        if pinned.is_none() {
            advertise = options.advertise;
            for addr in &advertise {
                builder = builder.external_addr(*addr);
            }
            relay = options.relay;
            let mode = match &relay {
                Relay::None => None,
                Relay::Public => Some(RelayMode::Default),
                Relay::At(url) => {
                    builder = builder.ca_tls_config(discovery::tls(url));
                    Some(RelayMode::Custom(discovery::relay_map(url)))
                }
            };
            if let Some(mode) = mode {
                // Iroh connects to a relay only after a probe has reached it.
                let mut probes = NetReportConfig::minimal();
                probes.https_probes = true;
                builder = builder.relay_mode(mode).net_report_config(probes);
            }
        }
        let quic = builder.bind().await.map_err(|e| failed(format!("{e:#}")))?;

        let allowed = Arc::new(RwLock::new(options.allowed));
        let connections = Arc::new(OpenConnections::default());
        let handshakes = Arc::new(AtomicUsize::new(0));
        let accepting = Accepting {
            allowed: allowed.clone(),
            connections: connections.clone(),
            handshakes: handshakes.clone(),
            timeout: options.connect_timeout,
        };
        let patience = options.idle_timeout.saturating_add(options.keep_alive).max(MIN_PATIENCE);
        let (watching, listening) = (connections.clone(), quic.clone());
        let (sender, accepted) = mpsc::channel(MAX_WAITING);
        let task = tokio::spawn(async move {
            tokio::select! {
                () = accepting.run(listening, sender) => {}
                () = watch(&watching, patience) => {}
            }
        });
        Ok(Self(Arc::new(Inner {
            quic,
            key: options.secret_key.public(),
            pinned,
            advertise,
            relay,
            allowed,
            connections,
            handshakes,
            accepted: tokio::sync::Mutex::new(accepted),
            task: task.abort_handle(),
            connect_timeout: options.connect_timeout,
        })))
    }

    /// The endpoint's identity.
    pub fn key(&self) -> PeerKey {
        self.0.key
    }

    /// The addresses at which peers can reach this endpoint: first [`EndpointOptions::advertise`], then its own,
    /// sorted.
    ///
    /// If it listens on all interfaces, its own are the interfaces' present addresses. Loopback is included only if
    /// there is no other.
    pub fn addr(&self) -> PeerAddr {
        let mut own = match self.0.pinned {
            Some(addr) => vec![addr],
            None => self.0.quic.addr().ip_addrs().copied().collect(),
        };
        // A link-local address is useless without its interface.
        own.retain(|addr| !matches!(addr, SocketAddr::V6(a) if a.ip().is_unicast_link_local()));
        own.retain(|addr| !self.0.advertise.contains(addr));
        own.sort_unstable();
        let mut addrs = self.0.advertise.clone();
        addrs.append(&mut own);
        PeerAddr { key: self.key(), addrs, relay: self.relay() }
    }

    /// The relay at which this endpoint can be met.
    fn relay(&self) -> Option<RelayUrl> {
        match &self.0.relay {
            Relay::None => None,
            Relay::At(url) => Some(url.clone()),
            Relay::Public => self.0.quic.addr().relay_urls().next().cloned().and_then(RelayUrl::from_iroh),
        }
    }

    /// The [addresses](Self::addr) at which others see this endpoint, but which belong to no interface of this machine,
    /// because a router translates them. Only a relay tells such addresses, a moment after [`Self::online`].
    pub fn translated(&self) -> Vec<SocketAddr> {
        let mut addrs = self.addr().addrs;
        addrs.retain(|addr| !self.0.advertise.contains(addr) && UdpSocket::bind((addr.ip(), 0)).is_err());
        addrs
    }

    /// Waits until the endpoint is connected to its relay, if it has one.
    ///
    /// # Errors
    /// [`NoRelay`] if the relay refuses the endpoint, or there is no connection after `patience`.
    pub async fn online(&self, patience: Duration) -> Result<(), NoRelay> {
        if self.0.relay == Relay::None || self.0.pinned.is_some() {
            return Ok(());
        }
        let mut watcher = self.0.quic.home_relay_status();
        let mut last = watcher.get();
        let name = self.relay().map_or_else(|| "of iroh's makers".to_owned(), |url| url.to_string());
        let waiting = async {
            loop {
                if last.iter().any(|relay| relay.is_connected()) {
                    return Ok(());
                }
                if last.iter().any(|relay| relay.auth_denied_reason().is_some()) {
                    return Err(NoRelay::Denied(name.clone()));
                }
                match watcher.updated().await {
                    Ok(status) => last = status,
                    // The endpoint is closed.
                    Err(_) => std::future::pending().await,
                }
            }
        };
        if let Ok(result) = tokio::time::timeout(patience, waiting).await {
            return result;
        }
        let error = last.iter().find_map(|relay| relay.last_error().map(|error| format!("{error:#}")));
        Err(NoRelay::Unreachable { relay: name, reason: error.unwrap_or_else(|| "no answer".to_owned()) })
    }

    /// The UDP ports over IPv4 and IPv6; 0 for one on which the endpoint does not listen.
    pub fn ports(&self) -> [u16; 2] {
        let bound = self.0.quic.bound_sockets();
        [true, false].map(|v4| bound.iter().find(|addr| addr.is_ipv4() == v4).map_or(0, SocketAddr::port))
    }

    /// The handshakes and connections that the endpoint has at present.
    pub fn stats(&self) -> EndpointStats {
        EndpointStats { handshakes: self.0.handshakes.load(Relaxed), connections: self.0.connections.count() }
    }

    /// Replaces the accepted keys. Open connections stay open.
    pub fn allow(&self, allowed: Allowed) {
        *self.0.allowed.write().unwrap_or_else(PoisonError::into_inner) = allowed;
    }

    /// Connects to a peer and returns once the peer has accepted. Connections to the same peer are independent.
    ///
    /// # Errors
    /// See [`ConnectError`]. A relay in `to` is used only if it is this endpoint's own. [`ConnectError::Refused`] can
    /// be temporary: the peer may not have learnt this endpoint's key yet.
    pub async fn connect(&self, to: &PeerAddr) -> Result<(Connection, Lanes), ConnectError> {
        let id = iroh::PublicKey::from_bytes(to.key.as_bytes()).map_err(|_| ConnectError::InvalidKey(to.key))?;
        // A relay of the peer's choice could be any server in this machine's network.
        let own = self.relay();
        let relay = to.relay.as_ref().filter(|url| own.as_ref() == Some(*url));
        if to.addrs.is_empty() && relay.is_none() {
            let why = if to.relay.is_some() { "its relay is not this peer's relay" } else { "it has no address" };
            return Err(ConnectError::Unreachable(to.clone(), why));
        }
        let pinned = self.0.pinned.is_some();
        let addrs = to.addrs.iter().map(|addr| match pinned {
            true => Pinned::address(*addr),
            false => TransportAddr::Ip(*addr),
        });
        let relay = relay.map(|url| TransportAddr::Relay(url.to_iroh()));
        let addr = EndpointAddr::from_parts(id, addrs.chain(relay));
        let opening = async {
            let mut attempts = 1;
            let quic = loop {
                match self.0.quic.connect(addr.clone(), ALPN).await {
                    Err(error) if attempts < MAX_ATTEMPTS && proved_another_address(&error) => attempts += 1,
                    result => break result.map_err(|error| self.refusal(to, error))?,
                }
            };
            open(quic, &self.0.connections).await.map_err(|gone| match gone.reason {
                DisconnectReason::Refused => ConnectError::Refused(to.key),
                _ => ConnectError::Disconnected(gone),
            })
        };
        let after = self.0.connect_timeout;
        match tokio::time::timeout(after, opening).await {
            Ok(result) => result,
            Err(_) => Err(self.silence(to)),
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

    fn silence(&self, to: &PeerAddr) -> ConnectError {
        ConnectError::NoAnswer { addr: to.clone(), after: self.0.connect_timeout, obstacle: obstacle_to(to) }
    }

    fn refusal(&self, to: &PeerAddr, error: QuicConnectError) -> ConnectError {
        let text = format!("{error:#}");
        if let QuicConnectError::Connect { source, .. } = &error {
            return match source {
                ConnectWithOptsError::SelfConnect { .. } => {
                    ConnectError::Unreachable(to.clone(), "that is this peer itself")
                }
                ConnectWithOptsError::EndpointClosed { .. } => ConnectError::Closed(to.key),
                _ => ConnectError::Handshake(to.clone(), text),
            };
        }
        match quic_error(&error) {
            Some(ConnectionError::TimedOut) => self.silence(to),
            Some(ConnectionError::ConnectionClosed(close))
                if u64::from(close.error_code) == NO_APPLICATION_PROTOCOL =>
            {
                ConnectError::Version(to.key)
            }
            Some(ConnectionError::LocallyClosed) => ConnectError::Closed(to.key),
            Some(error @ (ConnectionError::ApplicationClosed(_) | ConnectionError::Reset)) => {
                match disconnect_reason(error.clone()) {
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
/// QUIC's idle timer decides about timeouts below this, because it allows for slow paths.
const MIN_PATIENCE: Duration = Duration::from_secs(5);
/// The interval at which all connections are looked at. Each look costs a lock.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// Most attempts to connect if the peer rejects a proof of address.
const MAX_ATTEMPTS: usize = 4;

/// The configuration of QUIC. `None` if a duration is too long for it.
fn transport(options: &EndpointOptions) -> Option<QuicTransportConfig> {
    // Iroh gives up a path that is silent for 15 s, but never the last one. With that value, QUIC repeats a packet at
    // least once a second, however long a path is dead. So a connection resumes about a second after its path heals.
    let transport = QuicTransportConfig::builder()
        .keep_alive_interval(options.keep_alive)
        .max_idle_timeout(Some(IdleTimeout::try_from(options.idle_timeout).ok()?))
        .max_concurrent_uni_streams(VarInt::from_u32(ALL_STREAMS as u32))
        .max_concurrent_bidi_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None)
        // Larger receive windows broke connections ("too many gaps in stream buffer"). Fast lanes have more streams.
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES))
        .send_window(2 * MAX_WINDOW_BYTES)
        .congestion_controller_factory(Arc::new(BurstControllerFactory))
        .build();
    Some(transport)
}

/// Closes connections to peers that have been silent for `patience`. Never returns.
async fn watch(connections: &OpenConnections, patience: Duration) {
    let mut looks = tokio::time::interval(WATCH_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        connections.close_silent(patience, Instant::now());
    }
}

fn quic_error(error: &QuicConnectError) -> Option<&ConnectionError> {
    match error {
        QuicConnectError::Connecting { source: ConnectingError::ConnectionError { source, .. }, .. } => Some(source),
        QuicConnectError::Connection { source, .. } => Some(source),
        _ => None,
    }
}

/// Whether the peer asked for a proof of address, and the proof reached it from another address.
///
/// Iroh dials all addresses of a peer with the same packets, which may leave this machine from different addresses.
/// The next attempt can prove another one.
fn proved_another_address(error: &QuicConnectError) -> bool {
    matches!(quic_error(error), Some(ConnectionError::ConnectionClosed(close))
        if close.error_code == TransportErrorCode::INVALID_TOKEN)
}
