//! Measures the links between two machines, in both directions. One connects and asks, the other answers.

use std::time::{Duration, Instant};

use bytes::Bytes;
use fusionllm_plan::Link;
use fusionllm_protocol::{MAX_PROBE_BYTES, PeerHello, Probe, decode, encode};
use fusionllm_transport::{Connection, Endpoint, Lane, Lanes, PathKind, PeerAddr};

use super::dial::dial;
use crate::NodeError;

/// Round trips per measurement; the shortest counts.
const ECHOES: usize = 8;

/// Bytes of the first load. Each further load is twice as large.
const FIRST: u64 = 16 << 10;

/// A load that takes this many round trips is no longer bound by how fast the sender dares to send.
const ROUND_TRIPS: f64 = 8.0;

/// If loads cannot grow, the rate is known once one load is less than this many times as fast as the one before.
const STEADY: f64 = 1.25;

/// The longest time for one measurement. A link that needs more is too slow to train over.
const LONGEST: Duration = Duration::from_secs(60);

/// The time in which two machines that met at a relay have to find a direct path. Learning the public addresses takes a
/// second, and each attempt to get through two routers takes a few round trips.
pub(crate) const SETTLING: Duration = Duration::from_secs(5);

/// The time in which the other machine has to learn this one's key.
const ACQUAINTANCE: Duration = Duration::from_secs(10);

/// Answers the probes on a connection whose other end has said [`PeerHello::Probe`].
pub(crate) async fn answer_probes(connection: &Connection, mut lanes: Lanes) -> Result<(), NodeError> {
    while let Some((asked, took)) = receive(&mut lanes).await? {
        match asked {
            Probe::Echo => send(connection, Probe::Echo, 0).await?,
            Probe::Load => send(connection, Probe::Elapsed(took), 0).await?,
            Probe::Request(bytes) if bytes <= MAX_PROBE_BYTES => send(connection, Probe::Load, bytes).await?,
            Probe::Request(_) | Probe::Elapsed(_) => {
                return Err(NodeError::Protocol(format!("a peer asked for {asked:?}")));
            }
        }
    }
    Ok(())
}

/// The links to a machine and back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Probed {
    pub(crate) there: Link,
    pub(crate) back: Link,
    /// Whether a relay carries the packets.
    pub(crate) relayed: bool,
}

/// Measures the links to a machine that [answers](answer_probes), and back.
pub(crate) async fn probe(endpoint: &Endpoint, to: &PeerAddr, patience: f64) -> Result<Probed, NodeError> {
    let (connection, mut lanes) = dial(endpoint, to, &PeerHello::Probe, ACQUAINTANCE).await?;
    let measured = probe_on(&connection, &mut lanes, patience).await;
    connection.close("");
    measured
}

/// Measures the links of a connection whose other end [answers](answer_probes). The latency of both is half of the
/// shortest round trip. The rate is that of the first load that takes `patience` seconds and several round trips.
///
/// A connection through a relay may soon become direct, so the measurement waits for that, but not for long.
pub(crate) async fn probe_on(connection: &Connection, lanes: &mut Lanes, patience: f64) -> Result<Probed, NodeError> {
    let measured = async {
        let mut path = connection.settled(SETTLING).await;
        tracing::info!(?path, at = ?connection.remote_addr(), "measuring the link to {}", connection.peer());
        let (mut there, mut back) = measure(connection, lanes, patience).await?;
        if path != connection.path() {
            path = connection.path();
            (there, back) = measure(connection, lanes, patience).await?;
        }
        Ok(Probed { there, back, relayed: path == PathKind::Relayed })
    };
    let measured = tokio::time::timeout(LONGEST, measured).await;
    measured.unwrap_or_else(|_| Err(NodeError::Network(format!("a link took longer than {LONGEST:?} to be measured"))))
}

async fn measure(connection: &Connection, lanes: &mut Lanes, patience: f64) -> Result<(Link, Link), NodeError> {
    let mut shortest = f64::INFINITY;
    for _ in 0..ECHOES {
        let sent = Instant::now();
        send(connection, Probe::Echo, 0).await?;
        expect(lanes).await?;
        shortest = shortest.min(sent.elapsed().as_secs_f64());
    }
    let patience = patience.max(ROUND_TRIPS * shortest);
    let mut links = [Link { latency: shortest / 2.0, bandwidth: 0.0 }; 2];
    for (link, forth) in links.iter_mut().zip([true, false]) {
        let mut bytes = FIRST;
        loop {
            match forth {
                true => send(connection, Probe::Load, bytes).await?,
                false => send(connection, Probe::Request(bytes), 0).await?,
            }
            let took = match expect(lanes).await? {
                (Probe::Elapsed(took), _) if forth => took,
                (Probe::Load, took) if !forth => took,
                (other, _) => return Err(NodeError::Protocol(format!("a peer answered a measurement with {other:?}"))),
            };
            // A load that arrives in one piece takes less time than the clock shows.
            let before = std::mem::replace(&mut link.bandwidth, bytes as f64 / took.max(1e-6));
            if took >= patience || (bytes >= MAX_PROBE_BYTES && link.bandwidth < STEADY * before) {
                break;
            }
            bytes = (2 * bytes).min(MAX_PROBE_BYTES);
        }
    }
    Ok(links.into())
}

async fn send(connection: &Connection, probe: Probe, bytes: u64) -> Result<(), NodeError> {
    let header = encode(&probe).map_err(NodeError::Protocol)?;
    let payload = Bytes::from(vec![0; bytes as usize]);
    Ok(connection.send(Lane::Bulk, &header, &[payload]).await?)
}

/// The next probe, and the seconds that its payload took to arrive; `None` at the end.
async fn receive(lanes: &mut Lanes) -> Result<Option<(Probe, f64)>, NodeError> {
    let Some(frame) = lanes.bulk.next().await? else { return Ok(None) };
    let begun = Instant::now();
    let probe = decode(frame.header()).map_err(NodeError::Protocol)?;
    frame.read(MAX_PROBE_BYTES).await?;
    Ok(Some((probe, begun.elapsed().as_secs_f64())))
}

async fn expect(lanes: &mut Lanes) -> Result<(Probe, f64), NodeError> {
    receive(lanes).await?.ok_or_else(|| NodeError::Protocol("a peer left in the middle of a measurement".into()))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use fusionllm_transport::EndpointOptions;
    use fusionllm_transport::emulator::{Emulator, LinkSpec};

    use super::*;
    use crate::net;

    const MBPS: u64 = 125_000;

    /// The result of a measurement between two machines. The lines there and back have these rates in Mbps, and this
    /// latency in milliseconds.
    async fn measured(there: u64, back: u64, latency: u64) -> Probed {
        let bind = || Endpoint::bind(EndpointOptions { pinned: true, ..EndpointOptions::new() });
        let (a, b) = (bind().await.unwrap(), bind().await.unwrap());
        let emulator = Emulator::start(Ipv4Addr::LOCALHOST.into(), 1).unwrap();
        let link = |rate| emulator.add_link(LinkSpec::new("line", Some(rate * MBPS), Duration::from_millis(latency)));
        let (there, back) = (vec![link(there)], vec![link(back)]);
        let (b_for_a, _) = emulator.connect_peers(a.addr().addrs[0], b.addr().addrs[0], there, back).unwrap();
        let key = b.key();
        let answering = tokio::spawn(async move {
            let (connection, mut lanes) = b.accept().await.unwrap();
            assert_eq!(net::next_control(&mut lanes.control).await.unwrap(), Some(PeerHello::Probe));
            drop(answer_probes(&connection, lanes).await);
        });
        let to = PeerAddr::new(key, vec![b_for_a]);
        let probed = probe(&a, &to, 0.1).await.unwrap();
        answering.await.unwrap();
        assert!(!probed.relayed);
        probed
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_slow_link_is_told_from_a_fast_one() {
        let Probed { there, back, .. } = measured(1, 80, 5).await;
        // A measured link may be slower than it is, but not faster, except for what the emulator delivers early.
        assert!(there.latency >= 4.5e-3 && there.latency == back.latency, "{there:?}");
        assert!(there.bandwidth < 0.2e6 && back.bandwidth > 2.0 * there.bandwidth, "{there:?} {back:?}");
    }

    /// A window's worth of bytes takes a round trip of 200 ms, however fast the line is.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_fast_line_is_known_to_be_fast_however_long_it_is() {
        let Probed { there, back, .. } = measured(80, 80, 100).await;
        for link in [there, back] {
            assert!(link.latency >= 0.095 && link.bandwidth > 0.25 * 80e6 / 8.0, "{link:?}");
        }
    }
}
