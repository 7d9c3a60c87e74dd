//! Real endpoints over emulated links. Bounds on time are only those that hold on any machine,
//! however busy: nothing is faster than its link. How close the links come is printed.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fusionllm_transport::emulator::{Emulator, LinkId, LinkSpec, Report};
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

/// Two peers and the link each way between them, connected over it.
struct Line {
    emulator: Emulator,
    links: [LinkId; 2],
    _endpoints: [Endpoint; 2],
    to_b: Connection,
    _from_b: Lanes,
    from_a: Lanes,
}

impl Line {
    async fn new(rate: u64, latency: Duration) -> Self {
        Self::with(rate, latency, EndpointOptions::new).await
    }

    async fn with(rate: u64, latency: Duration, options: impl Fn() -> EndpointOptions) -> Self {
        let emulator = emulator();
        let links = ["a to b", "b to a"].map(|name| emulator.add_link(LinkSpec::new(name, Some(rate), latency)));
        let (a, a_addr) = endpoint(options()).await;
        let (b, b_addr) = endpoint(options()).await;
        let (b_for_a, _) = emulator.join(a_addr, b_addr, vec![links[0]], vec![links[1]]).unwrap();
        let b_for_a = PeerAddr { key: b.key(), addrs: vec![b_for_a] };
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
        let mut line = Line::new(mbps * MBPS, ms(5)).await;
        let took = line.send(length).await;
        let report = line.emulator.report();
        let there = &report.links[0];

        // All of the payload went over the link, which sent it at its rate and no faster.
        assert!(there.bytes as usize > length, "{report:?}");
        let rate = there.bytes as f64 / there.busy.as_secs_f64();
        let declared = (mbps * MBPS) as f64;
        assert!((rate / declared - 1.0).abs() < 0.01, "{rate} for {declared}");
        assert!(took.as_secs_f64() >= 0.99 * length as f64 / declared, "{took:?}");
        let goodput = length as f64 * 8e-6 / took.as_secs_f64();
        println!("{mbps} Mbps: payload at {goodput:.2} Mbps, on the line {there:?}");
        println!("late {} of {}, latest {:?}", report.late, report.delivered, report.latest);
    }
}

#[tokio::test]
async fn the_round_trip_takes_both_latencies() {
    for latency in [ms(2), ms(20)] {
        let line = Line::new(80 * MBPS, latency).await;
        let rtt = line.to_b.stats().rtt;
        println!("declared {:?}, measured {rtt:?}", 2 * latency);
        // What is due within a quarter of a millisecond is delivered at once.
        assert!(rtt >= 2 * latency - ms(1), "{rtt:?}");
    }
}

/// Peers on one machine share their addresses over the connection and would open a path of their
/// own: the transfer would run at the speed of loopback and the link would see none of it.
#[tokio::test]
async fn peers_do_not_find_a_way_past_the_link() {
    let mut line = Line::new(800 * MBPS, ms(15)).await;
    for _ in 0..5 {
        line.send(100_000).await;
    }
    let carried = line.emulator.report().links[0].bytes;
    assert!(carried >= 500_000, "{carried}");
}

#[tokio::test]
async fn a_cut_link_loses_the_peer_and_a_healed_one_brings_it_back() {
    let quick = || EndpointOptions { keep_alive: ms(50), idle_timeout: ms(300), ..EndpointOptions::new() };
    let mut line = Line::with(80 * MBPS, ms(1), quick).await;
    line.emulator.cut(line.links[0]);
    // A short cut is survived: QUIC sends again what was lost.
    let payload = [Bytes::from_static(b"again")];
    line.to_b.send(Lane::Control, b"", &payload).await.unwrap();
    line.emulator.heal(line.links[0]);
    let frame = line.from_a.control.next().await.unwrap().unwrap();
    assert_eq!(frame.read(5).await.unwrap(), "again");

    line.emulator.cut(line.links[0]);
    line.emulator.cut(line.links[1]);
    assert_eq!(line.to_b.closed().await.reason, DisconnectReason::TimedOut);
    assert!(line.emulator.report().links[0].cut_off > 0);
}

#[tokio::test]
async fn a_lossy_link_still_delivers_all() {
    let mut line = Line::new(80 * MBPS, ms(1)).await;
    line.emulator.set_loss(line.links[0], 0.02);
    line.send(300_000).await;
    let report = line.emulator.report();
    assert!(report.links[0].dropped > 0, "{report:?}");
    assert!(line.to_b.stats().lost_packets > 0);
}

/// Three peers, two of them behind one uplink.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pairs_share_their_sites_uplink() {
    let emulator = emulator();
    let rate = 16 * MBPS;
    let uplink = emulator.add_link(LinkSpec::new("home", Some(rate), ms(2)));
    let free = emulator.add_link(LinkSpec::new("lab", None, ms(2)));
    let (lab, lab_addr) = endpoint(EndpointOptions::new()).await;
    let length = 200_000;
    let mut transfers = Vec::new();
    for _ in 0..2 {
        let (home, home_addr) = endpoint(EndpointOptions::new()).await;
        let (lab_for_home, _) = emulator.join(home_addr, lab_addr, vec![uplink, free], vec![free]).unwrap();
        let lab_for_home = PeerAddr { key: lab.key(), addrs: vec![lab_for_home] };
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
fn strangers_are_not_forwarded() {
    let emulator = emulator();
    let link = emulator.add_link(LinkSpec::new("line", None, Duration::ZERO));
    let [a, b, stranger] = [0; 3].map(|_| std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
    let addr = |socket: &std::net::UdpSocket| socket.local_addr().unwrap();
    let (b_for_a, a_for_b) = emulator.join(addr(&a), addr(&b), vec![link], vec![link]).unwrap();

    stranger.send_to(b"let me in", b_for_a).unwrap();
    a.send_to(b"hello", b_for_a).unwrap();
    let mut buffer = [0; 100];
    let (length, from) = b.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..length], from), (&b"hello"[..], a_for_b));
    b.send_to(b"hello yourself", a_for_b).unwrap();
    let (length, from) = a.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..length], from), (&b"hello yourself"[..], b_for_a));

    let report = emulator.report();
    assert_eq!((report.strangers, report.delivered), (1, 2));
    assert_eq!(report.links[0].bytes, (5 + 28) + (14 + 28));
}

#[test]
fn a_report_says_whether_the_machine_kept_up() {
    let fine = Report { delivered: 1000, late: 10, overrun: Some(0), ..Report::default() };
    assert!(fine.kept_up());
    for bad in [
        Report { late: 11, ..fine.clone() },
        Report { unsent: 1, ..fine.clone() },
        Report { overrun: Some(1), ..fine.clone() },
    ] {
        assert!(!bad.kept_up(), "{bad:?}");
    }
    assert!(Report { overrun: None, ..fine }.kept_up());
}
