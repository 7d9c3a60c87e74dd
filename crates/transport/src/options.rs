//! The options of an endpoint, and the keys whose connections it accepts.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use crate::key::{PeerKey, RelayUrl, SecretKey};

/// The options of an [`Endpoint`](crate::Endpoint). [`EndpointOptions::new`] fits a real run.
#[derive(Debug, Clone)]
pub struct EndpointOptions {
    /// The endpoint's identity.
    pub secret_key: SecretKey,
    /// The UDP address to listen on; port 0 picks a free one. `None`: a free port on every interface, IPv4 and
    /// IPv6.
    pub listen: Option<SocketAddr>,
    /// The UDP ports over IPv4 and IPv6 if `listen` is `None`; 0 picks a free one.
    pub ports: [u16; 2],
    /// Addresses that lead to this endpoint but belong to no interface of this machine. A router that forwards a
    /// port has such an address. They come first in [`Endpoint::addr`](crate::Endpoint::addr).
    pub advertise: Vec<SocketAddr>,
    /// The keys whose connections are accepted. [`Endpoint::allow`](crate::Endpoint::allow) changes them later.
    pub allowed: Allowed,
    /// Interval of the packets that keep a quiet connection open.
    pub keep_alive: Duration,
    /// A peer that is silent for this long is lost. The shorter value of both sides applies.
    ///
    /// Detection can take `keep_alive` longer. For values under 5 s, a slow path can delay it up to 5 s.
    /// [`Connection::silent_for`](crate::Connection::silent_for) tells much earlier that something is wrong.
    pub idle_timeout: Duration,
    /// Limit for [`Endpoint::connect`](crate::Endpoint::connect), and for an arriving peer's handshake and lanes.
    pub connect_timeout: Duration,
    /// Whether to use only the addresses given to [`Endpoint::connect`](crate::Endpoint::connect), or from which a peer
    /// connects, and never to look for a better path. Such an endpoint listens on 127.0.0.1 if `listen` is `None`.
    /// `advertise` and `relay` are ignored.
    ///
    /// Emulated links need this. Otherwise peers on one machine would find each other and bypass the emulator.
    pub pinned: bool,
    /// The server that carries packets between peers that cannot reach each other.
    pub relay: Relay,
}

impl EndpointOptions {
    /// A new identity that listens on all interfaces and accepts any key. It gives a killed peer up after 30.75 s.
    ///
    /// Shorter timeouts end runs for no reason: a laptop that changes its Wi-Fi access point is silent for 2 to
    /// 10 s.
    pub fn new() -> Self {
        Self {
            secret_key: SecretKey::generate(),
            listen: None,
            ports: [0; 2],
            advertise: Vec::new(),
            allowed: Allowed::Any,
            keep_alive: Duration::from_millis(750),
            idle_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(10),
            pinned: false,
            relay: Relay::None,
        }
    }
}

impl Default for EndpointOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// The relay server that an endpoint uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Relay {
    /// No relay. Peers need an address at which they reach each other.
    #[default]
    None,
    /// The public relay servers of iroh's makers. The endpoint chooses the nearest one, which takes a moment:
    /// [`Endpoint::online`](crate::Endpoint::online) waits for it.
    Public,
    /// The relay server at this URL. Two peers behind routers first meet there and then try to connect directly.
    /// The relay sees only encrypted packets.
    At(RelayUrl),
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
    pub(crate) fn includes(&self, key: &PeerKey) -> bool {
        match self {
            Self::Any => true,
            Self::Only(keys) => keys.contains(key),
        }
    }
}
