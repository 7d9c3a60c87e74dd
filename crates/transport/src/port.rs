//! The question to a machine whether anybody listens at one of its ports.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::key::PeerAddr;

/// Systems limit how many refusals they send in a second, so the question is repeated after this time.
const ASK_AGAIN: Duration = Duration::from_millis(250);

/// Whether the machine at this address says that nobody listens at its port. `false` after `patience` without an
/// answer, which means nothing: firewalls and routers often say nothing.
pub(crate) async fn port_is_closed(addr: SocketAddr, patience: Duration) -> bool {
    // The system passes an ICMP refusal on only to a socket that is connected to that address.
    let ask = async {
        let any = if addr.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = tokio::net::UdpSocket::bind(any).await?;
        socket.connect(addr).await?;
        loop {
            // QUIC ignores it, and never answers.
            socket.send(&[0]).await?;
            if let Ok(answer) = tokio::time::timeout(ASK_AGAIN, socket.recv(&mut [0])).await {
                return answer;
            }
        }
    };
    let answer = tokio::time::timeout(patience, ask).await;
    matches!(answer, Ok(Err(e)) if e.kind() == io::ErrorKind::ConnectionRefused)
}

/// Whether the machines at all addresses of a peer say that nobody listens there. Then its process has ended, or has
/// not begun. `false` if one of them says nothing for `patience`, or if a relay may lead to the peer.
pub async fn nobody_listens(peer: &PeerAddr, patience: Duration) -> bool {
    if peer.relay.is_some() || peer.addrs.is_empty() {
        return false;
    }
    let mut asking: tokio::task::JoinSet<bool> =
        peer.addrs.iter().map(|addr| port_is_closed(*addr, patience)).collect();
    while let Some(closed) = asking.join_next().await {
        if !matches!(closed, Ok(true)) {
            return false;
        }
    }
    true
}
