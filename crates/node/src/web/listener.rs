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
        Ok(match at {
            Dashboard::Off => None,
            Dashboard::At(addr) => Some(Ok(Self::at(addr).await?)),
            Dashboard::Local => Some(Self::local().await),
        })
    }

    /// Opens the port that the user named.
    ///
    /// # Errors
    ///
    /// It cannot be listened at.
    pub(crate) async fn at(addr: SocketAddr) -> Result<Self, NodeError> {
        let opened = TcpListener::bind(addr).await.and_then(Self::new);
        opened.map_err(|source| NodeError::Dashboard { addr, source })
    }

    /// Opens a port on loopback. The error is a sentence.
    pub(crate) async fn local() -> Result<Self, String> {
        let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
        for port in PORTS {
            if let Ok(listening) = TcpListener::bind((host, port)).await.and_then(Self::new) {
                return Ok(listening);
            }
        }
        let any = TcpListener::bind((host, 0)).await.and_then(Self::new);
        any.map_err(|e| format!("there is no page, because no port of this machine can be listened at: {e}"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn runs_beside_each_other_have_ports_of_their_own() {
        let mut open = Vec::new();
        for _ in 0..25 {
            open.push(Listening::open(Dashboard::Local).await.unwrap().unwrap().unwrap());
        }
        let mut ports: Vec<u16> = open.iter().map(|listening| listening.addr.port()).collect();
        assert!(open.iter().all(|listening| listening.addr.ip().is_loopback() && listening.token.is_none()));
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 25);
    }

    #[tokio::test]
    async fn only_an_address_elsewhere_has_a_token() {
        let open = async |addr: &str| {
            Listening::open(Dashboard::At(addr.parse().unwrap())).await.unwrap().unwrap().unwrap().url()
        };
        assert!(!open("127.0.0.1:0").await.contains("token"));
        let url = open("0.0.0.0:0").await;
        // 128 bits in base32.
        assert_eq!(url.split_once("/?token=").unwrap().1.len(), 26, "{url}");
        assert_ne!(url, open("0.0.0.0:0").await);
    }
}
