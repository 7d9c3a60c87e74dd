//! Where the page of a run is served.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use fusionllm_transport::Secret;
use tokio::net::TcpListener;

use crate::NodeError;
use crate::relay::{guess, secret_text};

/// The ports that are tried first, so that people find the page where it was yesterday.
const PORTS: std::ops::RangeInclusive<u16> = 8800..=8819;

/// Where the page of a run is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dashboard {
    /// Nowhere.
    #[default]
    Off,
    /// On this machine alone, at port 8800 or another one that is free.
    Local,
    /// At this address. Other machines need a token, which is part of the address that people are told.
    At(SocketAddr),
}

impl fmt::Display for Dashboard {
    /// As the option `--dashboard` has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Local => SocketAddr::from((Ipv4Addr::LOCALHOST, *PORTS.start())).fmt(f),
            Self::At(addr) => addr.fmt(f),
        }
    }
}

/// A port that nobody is served at yet.
pub(crate) struct Listening {
    pub(super) socket: TcpListener,
    pub(super) addr: SocketAddr,
    /// The secret that a visitor has to know; `None` on loopback, where every visitor is on this machine.
    pub(super) token: Option<Secret>,
}

impl Listening {
    /// Opens the port. The inner error is a reason why there is no page; nobody asked for it, so the run goes on.
    ///
    /// # Errors
    ///
    /// The address that the user gave cannot be listened at.
    pub(crate) async fn open(at: Dashboard) -> Result<Option<Result<Self, String>>, NodeError> {
        let addr = match at {
            Dashboard::Off => return Ok(None),
            Dashboard::At(addr) => addr,
            Dashboard::Local => return Ok(Some(Self::local().await)),
        };
        let fail = |source| NodeError::Dashboard { addr, source };
        let socket = TcpListener::bind(addr).await.map_err(fail)?;
        Self::new(socket).map(Ok).map(Some).map_err(fail)
    }

    async fn local() -> Result<Self, String> {
        let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
        for port in PORTS {
            if let Ok(listening) = TcpListener::bind((host, port)).await.and_then(Self::new) {
                return Ok(listening);
            }
        }
        let any = TcpListener::bind((host, 0)).await.and_then(Self::new);
        any.map_err(|e| format!("this run has no page, because no port of this machine can be listened at: {e}"))
    }

    fn new(socket: TcpListener) -> std::io::Result<Self> {
        let addr = socket.local_addr()?;
        let token = (!addr.ip().to_canonical().is_loopback()).then(Secret::generate);
        Ok(Self { socket, addr, token })
    }

    /// The address that people open, with the token if one is needed.
    pub(crate) fn url(&self) -> String {
        let addr = SocketAddr::new(guess(self.addr.ip()), self.addr.port());
        match &self.token {
            Some(token) => format!("http://{addr}/?token={}", secret_text(token)),
            None => format!("http://{addr}/"),
        }
    }
}
