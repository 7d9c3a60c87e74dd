//! Real endpoints over emulated links. The only bounds on time hold on any machine, however busy: no transfer is
//! faster than its link. The tests print how close the links come.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fusionllm_transport::congestion::{MAX_WINDOW_BYTES, STREAM_WINDOW_BYTES};
use fusionllm_transport::emulator::{Emulator, EmulatorReport, LinkId, LinkSpec};
use fusionllm_transport::{Connection, DisconnectReason, Endpoint, EndpointOptions, Lane, Lanes, PeerAddr};

const MBPS: u64 = 1_000_000 / 8;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn emulator() -> Emulator {
    Emulator::start(Ipv4Addr::LOCALHOST.into(), 1).unwrap()
}

async fn endpoint(options: EndpointOptions) -> (Endpoint, SocketAddr) {
    let endpoint = Endpoint::bind(EndpointOptions { pinned: true, ..options }).await.unwrap();
    let addr = endpoint.addr().addrs[0];
    (endpoint, addr)
}

/// Two peers that are connected over one link in each direction.
struct LinkedPeers {
    emulator: Emulator,
    links: [LinkId; 2],
    _endpoints: [Endpoint; 2],
    to_b: Connection,
    _from_b: Lanes,
    from_a: Lanes,
}

impl LinkedPeers {
    async fn new(rate: u64, latency: Duration) -> Self {
        Self::with(rate, latency, EndpointOptions::new).await
    }

    async fn with(rate: u64, latency: Duration, options: impl Fn() -> EndpointOptions) -> Self {
        let emulator = emulator();
        let links = ["a to b", "b to a"].map(|name| emulator.add_link(LinkSpec::new(name, Some(rate), latency)));
        let (a, a_addr) = endpoint(options()).await;
        let (b, b_addr) = endpoint(options()).await;
        let (b_for_a, _) = emulator.connect_peers(a_addr, b_addr, vec![links[0]], vec![links[1]]).unwrap();
        let b_for_a = PeerAddr::new(b.key(), vec![b_for_a]);
        let (calling, called) = tokio::join!(a.connect(&b_for_a), b.accept());
        let (to_b, from_b) = calling.unwrap();
        let (_, from_a) = called.unwrap();
        Self { emulator, links, _endpoints: [a, b], to_b, _from_b: from_b, from_a }
    }

    async fn send(&mut self, length: usize) -> Duration {
        let start = Instant::now();
        let payload = [Bytes::from(vec![7; length])];
        let receiving = async {
            let frame = self.from_a.tensors.next().await.unwrap().unwrap();
            frame.read(length as u64).await.unwrap()
        };
        let (sent, received) = tokio::join!(self.to_b.send(Lane::Tensors, b"", &payload), receiving);
        sent.unwrap();
        assert_eq!(received, payload[0]);
        start.elapsed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_runs_at_the_links_rate() {
    for (mbps, length) in [(8, 400_000), (80, 4_000_000)] {
        let mut peers = LinkedPeers::new(mbps * MBPS, ms(5)).await;
        let took = peers.send(length).await;
        let report = peers.emulator.report();
        let there = &report.links[0];

        // The whole payload crossed the link, at no more than the link's rate.
        assert!(there.bytes as usize > length, "{report:?}");
        let rate = there.bytes as f64 / there.busy.as_secs_f64();
        let declared = (mbps * MBPS) as f64;
        assert!((rate / declared - 1.0).abs() < 0.01, "{rate} for {declared}");
        assert!(took.as_secs_f64() >= 0.99 * length as f64 / declared, "{took:?}");
        let goodput = length as f64 * 8e-6 / took.as_secs_f64();
        println!("{mbps} Mbps: payload at {goodput:.2} Mbps, on the link {there:?}");
        println!("late {} of {}, latest by {:?}", report.late, report.delivered, report.max_lateness);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_fast_path_is_filled_by_several_streams() {
    let one_stream = u64::from(STREAM_WINDOW_BYTES);
    // Short paths hold little, so one stream will do for them.
    let mut near = LinkedPeers::new(200 * MBPS, ms(2)).await;
    near.send(8_000_000).await;
    let window = near.to_b.stats().window;
    assert!(window <= one_stream, "{window}");

    let mut far = LinkedPeers::new(200 * MBPS, ms(150)).await;
    let mut took = ms(0);
    for _ in 0..20 {
        took = far.send(12_000_000).await;
        if far.to_b.stats().window > 4 * one_stream {
            break;
        }
    }
    let window = far.to_b.stats().window;
    assert!((4 * one_stream..=MAX_WINDOW_BYTES).contains(&window), "200 Mbps over 300 ms hold 7.5 MB: {window}");
    println!("12 MB over 200 Mbps and 300 ms took {took:?}, and {window} B may be in flight");
}

#[tokio::test]
async fn the_round_trip_takes_both_latencies() {
    for latency in [ms(2), ms(20)] {
        let peers = LinkedPeers::new(80 * MBPS, latency).await;
        let rtt = peers.to_b.stats().rtt;
        println!("declared {:?}, measured {rtt:?}", 2 * latency);
        // The emulator delivers datagrams up to a quarter of a millisecond early.
        assert!(rtt >= 2 * latency - ms(1), "{rtt:?}");
    }
}

/// Peers on one machine exchange their addresses over the connection. Unpinned, they would open a path over loopback
/// and bypass the link.
#[tokio::test]
async fn peers_cannot_bypass_the_link() {
    let mut peers = LinkedPeers::new(800 * MBPS, ms(15)).await;
    for _ in 0..5 {
        peers.send(100_000).await;
    }
    let carried = peers.emulator.report().links[0].bytes;
    assert!(carried >= 500_000, "{carried}");
}

#[tokio::test]
async fn a_connection_survives_a_short_cut_and_ends_in_a_long_one() {
    // A busy machine may be silent for some time without a cut, too.
    let quick = || EndpointOptions { keep_alive: ms(50), idle_timeout: ms(3000), ..EndpointOptions::new() };
    let mut peers = LinkedPeers::with(80 * MBPS, ms(1), quick).await;
    peers.emulator.cut(peers.links[0]);
    // QUIC retransmits after a short cut.
    let payload = [Bytes::from_static(b"again")];
    peers.to_b.send(Lane::Control, b"", &payload).await.unwrap();
    peers.emulator.heal(peers.links[0]);
    let frame = peers.from_a.control.next().await.unwrap().unwrap();
    assert_eq!(frame.read(5).await.unwrap(), "again");

    peers.emulator.cut(peers.links[0]);
    peers.emulator.cut(peers.links[1]);
    assert_eq!(peers.to_b.closed().await.reason, DisconnectReason::TimedOut);
    assert!(peers.emulator.report().links[0].cut_off > 0);
}

/// QUIC doubles its waiting time with every lost packet. Unbounded, a connection would be dead for as long after a
/// cut as during it.
#[tokio::test]
async fn a_connection_resumes_after_a_cut_of_many_retransmissions() {
    let quick = || EndpointOptions { keep_alive: ms(20), ..EndpointOptions::new() };
    let mut peers = LinkedPeers::with(80 * MBPS, ms(1), quick).await;
    let links = peers.links;
    for link in links {
        peers.emulator.cut(link);
    }
    peers.to_b.send(Lane::Control, b"", &[Bytes::from_static(b"again")]).await.unwrap();
    let mut looks = tokio::time::interval(ms(20));
    while peers.emulator.report().links.iter().any(|link| link.cut_off < 40) {
        looks.tick().await;
    }
    for link in links {
        peers.emulator.heal(link);
    }
    let frame = peers.from_a.control.next().await.unwrap().unwrap();
    assert_eq!(frame.read(5).await.unwrap(), "again");
}

#[tokio::test]
async fn a_lossy_link_still_delivers_everything() {
    let mut peers = LinkedPeers::new(80 * MBPS, ms(1)).await;
    peers.emulator.set_loss(peers.links[0], 0.02);
    peers.send(300_000).await;
    let report = peers.emulator.report();
    assert!(report.links[0].dropped > 0, "{report:?}");
    assert!(peers.to_b.stats().lost_packets > 0);
}

/// Three peers, two of them behind one uplink.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pairs_share_an_uplink() {
    let emulator = emulator();
    let rate = 16 * MBPS;
    let uplink = emulator.add_link(LinkSpec::new("home", Some(rate), ms(2)));
    let free = emulator.add_link(LinkSpec::new("lab", None, ms(2)));
    let (lab, lab_addr) = endpoint(EndpointOptions::new()).await;
    let length = 200_000;
    let mut transfers = Vec::new();
    for _ in 0..2 {
        let (home, home_addr) = endpoint(EndpointOptions::new()).await;
        let (lab_for_home, _) = emulator.connect_peers(home_addr, lab_addr, vec![uplink, free], vec![free]).unwrap();
        let lab_for_home = PeerAddr::new(lab.key(), vec![lab_for_home]);
        let (calling, called) = tokio::join!(home.connect(&lab_for_home), lab.accept());
        transfers.push((home, calling.unwrap(), called.unwrap()));
    }
    let start = Instant::now();
    let transfers: Vec<_> = transfers
        .into_iter()
        .map(|(home, (to_lab, _from_lab), (_to_home, mut from_home))| {
            tokio::spawn(async move {
                let payload = [Bytes::from(vec![7; length])];
                let receiving = async {
                    let frame = from_home.bulk.next().await.unwrap().unwrap();
                    frame.read(length as u64).await.unwrap()
                };
                let (sent, received) = tokio::join!(to_lab.send(Lane::Bulk, b"", &payload), receiving);
                sent.unwrap();
                drop(home);
                received.len()
            })
        })
        .collect();
    for transfer in transfers {
        assert_eq!(transfer.await.unwrap(), length);
    }
    let took = start.elapsed().as_secs_f64();
    assert!(took >= 0.99 * 2.0 * length as f64 / rate as f64, "{took}");
    let carried = emulator.report().links[0].bytes as usize;
    assert!(carried > 2 * length, "{carried}");
}

#[test]
fn datagrams_of_other_senders_are_not_forwarded() {
    let emulator = emulator();
    let link = emulator.add_link(LinkSpec::new("link", None, Duration::ZERO));
    let [a, b, stranger] = [0; 3].map(|_| std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
    let addr = |socket: &std::net::UdpSocket| socket.local_addr().unwrap();
    let (b_for_a, a_for_b) = emulator.connect_peers(addr(&a), addr(&b), vec![link], vec![link]).unwrap();

    stranger.send_to(b"let me in", b_for_a).unwrap();
    a.send_to(b"hello", b_for_a).unwrap();
    let mut buffer = [0; 100];
    let (length, from) = b.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..length], from), (&b"hello"[..], a_for_b));
    b.send_to(b"hello yourself", a_for_b).unwrap();
    let (length, from) = a.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..length], from), (&b"hello yourself"[..], b_for_a));

    let report = emulator.report();
    assert_eq!((report.foreign, report.delivered), (1, 2));
    assert_eq!(report.links[0].bytes, (5 + 28) + (14 + 28));
}

#[test]
fn a_report_shows_whether_the_machine_kept_up() {
    let fine = EmulatorReport { delivered: 1000, late: 10, socket_drops: Some(0), ..EmulatorReport::default() };
    assert!(fine.kept_up());
    for bad in [
        EmulatorReport { late: 11, ..fine.clone() },
        EmulatorReport { unsent: 1, ..fine.clone() },
        EmulatorReport { socket_drops: Some(1), ..fine.clone() },
    ] {
        assert!(!bad.kept_up(), "{bad:?}");
    }
    assert!(EmulatorReport { socket_drops: None, ..fine }.kept_up());
}
