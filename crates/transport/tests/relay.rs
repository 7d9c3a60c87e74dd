//! Peers that know each other only by a relay, on loopback.

#![cfg(feature = "relay")]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use fusionllm_transport::relay::{RelayOptions, RelayServer, serve};
use fusionllm_transport::{
    Allowed, ConnectError, Endpoint, EndpointOptions, Lane, NoRelay, PathKind, PeerAddr, Relay, RelayUrl, Secret,
};

async fn relay() -> (RelayServer, RelayUrl) {
    let listen = (Ipv4Addr::LOCALHOST, 0).into();
    let options = RelayOptions { listen, secret: Secret::from_bytes([7; 16]), allowed: Allowed::Any };
    let relay = serve(options).await.unwrap();
    let url = relay.url(&relay.addr().to_string()).unwrap();
    (relay, url)
}

async fn endpoint(ip: impl Into<IpAddr>, relay: &RelayUrl) -> Endpoint {
    let listen = Some((ip.into(), 0).into());
    Endpoint::bind(EndpointOptions { listen, relay: Relay::At(relay.clone()), ..EndpointOptions::new() }).await.unwrap()
}

/// Two endpoints of these addresses meet at a relay and exchange a frame. Waits until their path is `expected`.
async fn meet(one: impl Into<IpAddr>, other: impl Into<IpAddr>, expected: PathKind) {
    let (relay, url) = relay().await;
    let (caller, callee) = (endpoint(one, &url).await, endpoint(other, &url).await);
    let addr = PeerAddr { addrs: vec![], ..callee.addr() };
    assert_eq!(addr.relay.as_ref(), Some(&url));
    let (connecting, accepted) = tokio::join!(caller.connect(&addr), callee.accept());
    let ((to_callee, _from_callee), (to_caller, mut from_caller)) = (connecting.unwrap(), accepted.unwrap());

    to_callee.send(Lane::Tensors, b"header", &["payload".into()]).await.unwrap();
    let frame = from_caller.tensors.next().await.unwrap().unwrap();
    assert_eq!(frame.read(7).await.unwrap(), "payload");

    let patience = match expected {
        PathKind::Direct => Duration::from_secs(60),
        PathKind::Relayed => Duration::from_millis(300),
    };
    for connection in [&to_callee, &to_caller] {
        assert_eq!(connection.settled(patience).await, expected);
        assert_eq!(connection.remote_addr().is_some(), expected == PathKind::Direct);
    }
    assert_eq!(caller.online(Duration::from_secs(10)).await, Ok(()));
    assert_eq!(caller.translated(), [], "loopback has no router");
    caller.close("done").await;
    callee.close("done").await;
    relay.close().await;
}

#[tokio::test]
async fn a_connection_through_a_relay_becomes_direct() {
    meet(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST, PathKind::Direct).await;
}

/// Between an IPv4 and an IPv6 address there is no direct path.
#[tokio::test]
async fn a_connection_without_a_direct_path_stays_relayed() {
    meet(Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST, PathKind::Relayed).await;
}

#[tokio::test]
async fn a_peer_without_the_secret_cannot_use_the_relay() {
    let (relay, url) = relay().await;
    let callee = endpoint(Ipv4Addr::LOCALHOST, &url).await;
    let wrong: RelayUrl = format!("http://{}/?token=aaaaaaaaaaaaaaaaaaaaaaaaaa", relay.addr()).parse().unwrap();
    let connect_timeout = Duration::from_secs(2);
    let options = EndpointOptions { relay: Relay::At(wrong.clone()), connect_timeout, ..EndpointOptions::new() };
    let caller = Endpoint::bind(options).await.unwrap();
    assert!(matches!(caller.online(Duration::from_secs(10)).await, Err(NoRelay::Denied(_))));

    let addr = PeerAddr { addrs: vec![], relay: Some(wrong), ..callee.addr() };
    let error = caller.connect(&addr).await.unwrap_err();
    assert!(matches!(error, ConnectError::NoAnswer { .. } | ConnectError::Handshake(..)), "{error}");
}

#[tokio::test]
async fn a_relay_that_is_down_is_named() {
    let (relay, url) = relay().await;
    relay.close().await;
    let endpoint = endpoint(Ipv4Addr::LOCALHOST, &url).await;
    let error = endpoint.online(Duration::from_millis(500)).await.unwrap_err();
    assert!(error.to_string().starts_with(&format!("the relay {url} cannot be reached: ")), "{error}");
}

#[tokio::test]
async fn a_relay_of_the_peers_choice_is_not_used() {
    let (relay, url) = relay().await;
    let callee = endpoint(Ipv4Addr::LOCALHOST, &url).await;
    let caller = Endpoint::bind(EndpointOptions::new()).await.unwrap();
    let error = caller.connect(&PeerAddr { addrs: vec![], ..callee.addr() }).await.unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable(..)), "{error}");
    relay.close().await;
}
