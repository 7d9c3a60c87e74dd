//! Connects a peer to its neighbours.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fusionllm_plan::PeerId;
use fusionllm_transport::{ConnectError, Connection, Endpoint, Lanes, PeerAddr};

use crate::NodeError;

/// How long peers may take to reach each other once they are assigned.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(120);

/// How long to wait before dialling again a peer that does not know this one yet.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Connections by peer.
type Connections = BTreeMap<PeerId, (Connection, Lanes)>;

/// Connects to all `neighbours`. Of two peers the one with the lower number dials.
pub(super) async fn connect(
    endpoint: &Endpoint,
    me: PeerId,
    addresses: &[(String, PeerAddr)],
    neighbours: &BTreeSet<PeerId>,
) -> Result<Connections, NodeError> {
    let dialling = dial(endpoint, addresses, neighbours.iter().copied().filter(|p| *p > me));
    let expected: BTreeSet<PeerId> = neighbours.iter().copied().filter(|p| *p < me).collect();
    let both = async { tokio::try_join!(dialling, answer(endpoint, addresses, &expected)) };
    match tokio::time::timeout(CONNECT_TIMEOUT, both).await {
        Ok(result) => {
            let (dialled, mut connections) = result?;
            connections.extend(dialled);
            Ok(connections)
        }
        Err(_) => Err(NodeError::Network(format!(
            "not all peers could reach each other within {} s; check that no firewall keeps UDP between them",
            CONNECT_TIMEOUT.as_secs()
        ))),
    }
}

async fn dial(
    endpoint: &Endpoint,
    addresses: &[(String, PeerAddr)],
    peers: impl Iterator<Item = PeerId>,
) -> Result<Connections, NodeError> {
    let mut dialled = Connections::new();
    for p in peers {
        let (_, addr) = &addresses[p.0 as usize];
        let connection = loop {
            match endpoint.connect(addr).await {
                Ok(connection) => break connection,
                // The peer has not read its assignment yet, so it does not know this one.
                Err(ConnectError::Refused(_)) => tokio::time::sleep(RETRY_DELAY).await,
                Err(e) => return Err(e.into()),
            }
        };
        dialled.insert(p, connection);
    }
    Ok(dialled)
}

async fn answer(
    endpoint: &Endpoint,
    addresses: &[(String, PeerAddr)],
    expected: &BTreeSet<PeerId>,
) -> Result<Connections, NodeError> {
    let mut answered = Connections::new();
    while answered.len() < expected.len() {
        let Some((connection, lanes)) = endpoint.accept().await else {
            return Err(NodeError::Network("the endpoint was closed".into()));
        };
        let key = connection.peer();
        let peer = addresses.iter().position(|(_, a)| a.key == key).map(|i| PeerId(i as u32));
        match peer.filter(|p| expected.contains(p)) {
            Some(p) => drop(answered.insert(p, (connection, lanes))),
            None => connection.close("there is nothing to exchange"),
        }
    }
    Ok(answered)
}
