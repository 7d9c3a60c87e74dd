//! A relay server: it carries packets between peers that cannot reach each other.
//!
//! It needs one TCP port that all peers reach, and the UDP port of that number. Peers meet at the first, learn their
//! public addresses at the second, and try to connect directly. The packets that they send through the relay are
//! encrypted from peer to peer. The relay learns only who sends how much to whom.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use data_encoding::BASE32_NOPAD;
use iroh_relay::server::{Access, AccessControl, ClientRequest, QuicConfig, RelayConfig, Server, ServerConfig};

use crate::discovery;
use crate::key::{InvalidRelayUrl, PeerKey, RelayUrl};
use crate::options::Allowed;
use crate::ticket::Secret;

/// The options of a relay server.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    /// The TCP and UDP address to listen on; port 0 picks a free one.
    pub listen: SocketAddr,
    /// Only peers that know this secret may use the relay. It travels unencrypted in the first request. Somebody who
    /// reads it there can use the relay, but cannot join a run. The UDP port needs no secret, because it only tells
    /// callers their address.
    pub secret: Secret,
    /// The keys that may use the relay.
    pub allowed: Allowed,
}

/// A relay server could not be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot run a relay at {listen}: {reason}")]
pub struct RelayError {
    listen: SocketAddr,
    reason: String,
}

/// A running relay server. Dropping it stops it.
#[derive(Debug)]
pub struct RelayServer {
    server: Server,
    addr: SocketAddr,
    token: String,
}

/// Starts a relay server on the current Tokio runtime.
///
/// # Errors
/// [`RelayError`] if the listening address is in use or does not belong to this machine.
pub async fn serve(options: RelayOptions) -> Result<RelayServer, RelayError> {
    let RelayOptions { mut listen, secret, allowed } = options;
    let asked = listen;
    let failed = |reason: String| RelayError { listen: asked, reason };
    let token = BASE32_NOPAD.encode(secret.as_bytes()).to_ascii_lowercase();
    if listen.port() == 0 {
        // TCP and UDP need the same number. The port is free for both unless another program takes it right now.
        let free = UdpSocket::bind(listen).and_then(|socket| socket.local_addr());
        listen = free.map_err(|error| failed(error.to_string()))?;
    }
    let mut relay = RelayConfig::new(listen);
    relay.access = Arc::new(Admission { secret, allowed });
    let mut quic = QuicConfig::new(listen);
    quic.server_config = Some(discovery::server_config(&token).map_err(|error| failed(error.to_string()))?);
    let mut config = ServerConfig::default();
    config.relay = Some(relay);
    config.quic = Some(quic);
    let server = Server::spawn(config).await.map_err(|error| failed(format!("{error:#}")))?;
    let addr = server.http_addr().ok_or_else(|| failed("it has no address".to_owned()))?;
    Ok(RelayServer { server, addr, token })
}

impl RelayServer {
    /// The TCP and UDP address on which it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The URL for peers that reach the relay at `host`, a name or an address with a port. It contains the secret.
    ///
    /// # Errors
    /// [`InvalidRelayUrl`] if `host` is neither.
    pub fn url(&self, host: &str) -> Result<RelayUrl, InvalidRelayUrl> {
        format!("http://{host}/?token={}", self.token).parse()
    }

    /// Closes all connections and stops.
    pub async fn close(self) {
        // The shutdown fails only if the server has already stopped.
        let _ = self.server.shutdown().await;
    }
}

/// Decides who may use the relay.
#[derive(Debug)]
struct Admission {
    secret: Secret,
    allowed: Allowed,
}

impl AccessControl for Admission {
    async fn on_connect(&self, request: &ClientRequest) -> Access {
        let shown = request.auth_token().and_then(|token| parse(&token));
        let key = PeerKey::from_bytes(*request.endpoint_id().as_bytes());
        match shown == Some(self.secret.clone()) && self.allowed.includes(&key) {
            true => Access::Allow,
            false => Access::Deny { reason: Some("this relay does not know the peer".to_owned()) },
        }
    }
}

/// The secret in a URL's token.
fn parse(token: &str) -> Option<Secret> {
    let bytes = BASE32_NOPAD.decode(token.to_ascii_uppercase().as_bytes()).ok()?;
    bytes.try_into().ok().map(Secret::from_bytes)
}
