//! Strangers before QUIC's handshake, and hostile peers after it.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::UdpSocket;
use std::time::Duration;

use fusionllm_transport::{
    ALPN, Allowed, ConnectError, Connection, DisconnectReason, Endpoint, EndpointOptions, FormatError, Lane, Lanes,
    PeerAddr, PeerKey, ReceiveError,
};
use iroh::endpoint::{ApplicationClose, Connection as QuicConnection, ConnectionError, SendStream, presets};
use iroh::{EndpointAddr, TransportAddr};

fn local() -> EndpointOptions {
    EndpointOptions { listen: Some(([127, 0, 0, 1], 0).into()), ..EndpointOptions::new() }
}

async fn raw(alpn: &[u8]) -> iroh::Endpoint {
    iroh::Endpoint::builder(presets::Minimal)
        .alpns(vec![alpn.to_vec()])
        .clear_ip_transports()
        .bind_addr("127.0.0.1:0")
        .unwrap()
        .bind()
        .await
        .unwrap()
}

fn address(victim: &Endpoint) -> EndpointAddr {
    let id = iroh::PublicKey::from_bytes(victim.key().as_bytes()).unwrap();
    EndpointAddr::from_parts(id, victim.addr().addrs.into_iter().map(TransportAddr::Ip))
}

async fn call(hostile: &iroh::Endpoint, victim: &Endpoint) -> QuicConnection {
    hostile.connect(address(victim), ALPN).await.unwrap()
}

async fn stream(connection: &QuicConnection, bytes: &[u8]) -> SendStream {
    let mut stream = connection.open_uni().await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream
}

/// The reason with which the victim closes the connection of a peer that broke the format.
async fn complaint(connection: &QuicConnection) -> String {
    match connection.closed().await {
        ConnectionError::ApplicationClosed(close) => {
            assert_eq!(u64::from(close.error_code), 2);
            String::from_utf8(close.reason.to_vec()).unwrap()
        }
        other => panic!("{other}"),
    }
}

/// Opens a valid connection and returns its three streams, on which the caller breaks the format.
async fn open_valid(
    hostile: &iroh::Endpoint,
    victim: &Endpoint,
) -> (QuicConnection, [SendStream; 3], Connection, Lanes) {
    let quic = call(hostile, victim).await;
    let streams = open_lanes(&quic).await;
    let (connection, lanes) = victim.accept().await.unwrap();
    (quic, streams, connection, lanes)
}

/// Opens all streams, and returns the first of each lane.
async fn open_lanes(quic: &QuicConnection) -> [SendStream; 3] {
    let mut first = Vec::new();
    for lane in Lane::ALL {
        first.push(stream(quic, &[b"FLLM\x02", &[lane as u8, 0][..]].concat()).await);
        for number in 1..lane.streams() {
            stream(quic, &[b"FLLM\x02", &[lane as u8, number as u8][..]].concat()).await;
        }
    }
    first.try_into().unwrap()
}

/// Waits until the condition holds.
async fn until(holds: impl Fn() -> bool) {
    let mut looks = tokio::time::interval(Duration::from_millis(5));
    while !holds() {
        looks.tick().await;
    }
}

/// A rightful peer connects to the victim. Returns what each side has of the connection.
async fn connects(rightful: &Endpoint, victim: &Endpoint) -> [(Connection, Lanes); 2] {
    let addr = victim.addr();
    let accepting = async {
        loop {
            let accepted = victim.accept().await.unwrap();
            if accepted.0.peer() == rightful.key() {
                return accepted;
            }
        }
    };
    let (connecting, accepted) = tokio::join!(rightful.connect(&addr), accepting);
    [connecting.unwrap(), accepted]
}

#[tokio::test]
async fn the_reason_names_what_is_wrong_with_a_prelude() {
    let victim = Endpoint::bind(local()).await.unwrap();
    let hostile = raw(ALPN).await;
    for (bytes, expected) in [
        (&b"GET / HTTP/1.1"[..], "\"FLLM\""),
        (b"FLLM\x00\x00\x00", "wire version 0"),
        (b"FLLM\x01\x00\x00", "wire version 1"),
        (b"FLLM\x02\x09\x00", "lane 9"),
        (b"FLLM\x02\x01\x08", "number 8 of the tensors lane, which has 8 streams"),
    ] {
        let quic = call(&hostile, &victim).await;
        let _stream = stream(&quic, bytes).await;
        let complaint = complaint(&quic).await;
        assert!(complaint.contains(expected), "{complaint}");
    }

    let quic = call(&hostile, &victim).await;
    stream(&quic, b"FLL").await.finish().unwrap();
    assert!(complaint(&quic).await.contains("before it names its lane"));

    let quic = call(&hostile, &victim).await;
    let _streams = [stream(&quic, b"FLLM\x02\x01\x03").await, stream(&quic, b"FLLM\x02\x01\x03").await];
    assert!(complaint(&quic).await.contains("two streams for the same place in the tensors lane"));
}

#[tokio::test]
async fn a_block_on_no_stream_or_on_too_many_disconnects_the_peer() {
    let victim = Endpoint::bind(local()).await.unwrap();
    let hostile = raw(ALPN).await;
    for (lane, count) in [(Lane::Control, 2), (Lane::Tensors, 0), (Lane::Bulk, 9)] {
        let (quic, mut streams, _connection, mut lanes) = open_valid(&hostile, &victim).await;
        let frame = [&0u32.to_le_bytes()[..], &5u64.to_le_bytes(), &[count], b"hello"].concat();
        streams[lane as usize].write_all(&frame).await.unwrap();
        let receiver = match lane {
            Lane::Control => &mut lanes.control,
            Lane::Tensors => &mut lanes.tensors,
            Lane::Bulk => &mut lanes.bulk,
        };
        let error = receiver.next().await.unwrap().unwrap().read(5).await.unwrap_err();
        let ReceiveError::Disconnected(gone) = error else { panic!() };
        let expected = FormatError::Streams { lane, streams: count };
        assert_eq!(gone.reason, DisconnectReason::PeerBrokeFormat(expected));
        assert!(complaint(&quic).await.contains(&format!("said to lie on {count} streams")));
    }
}

#[tokio::test]
async fn an_oversized_header_disconnects_the_peer() {
    let victim = Endpoint::bind(local()).await.unwrap();
    let hostile = raw(ALPN).await;
    let (quic, mut streams, connection, mut lanes) = open_valid(&hostile, &victim).await;
    let announced = 65_537u32;
    let prefix = [&announced.to_le_bytes()[..], &0u64.to_le_bytes()].concat();
    streams[1].write_all(&prefix).await.unwrap();

    let ReceiveError::Disconnected(gone) = lanes.tensors.next().await.unwrap_err() else { panic!() };
    assert_eq!(gone.reason, DisconnectReason::PeerBrokeFormat(FormatError::HeaderTooLong(announced)));
    assert_eq!(gone.peer, PeerKey::from_bytes(*hostile.id().as_bytes()));
    assert_eq!(connection.closed().await, gone);
    assert!(complaint(&quic).await.contains("65537"));
}

#[tokio::test]
async fn a_stream_that_ends_within_a_frame_disconnects_the_peer() {
    let victim = Endpoint::bind(local()).await.unwrap();
    let hostile = raw(ALPN).await;
    let frame = [&3u32.to_le_bytes()[..], &10u64.to_le_bytes(), b"abc", b"\x0112345"].concat();
    for length in [1, 11, 12, 14, 15, 16, 21] {
        let (quic, mut streams, _connection, mut lanes) = open_valid(&hostile, &victim).await;
        streams[0].write_all(&frame[..length]).await.unwrap();
        streams[0].finish().unwrap();
        let error = async {
            match lanes.control.next().await? {
                None => panic!("{length} bytes are not a clean end"),
                Some(frame) => frame.read(10).await.map(drop),
            }
        };
        let ReceiveError::Disconnected(gone) = error.await.unwrap_err() else { panic!() };
        let truncated = FormatError::Truncated(Lane::Control);
        assert_eq!(gone.reason, DisconnectReason::PeerBrokeFormat(truncated), "{length}");
        assert!(complaint(&quic).await.contains("in the middle of a frame"));
    }
}

#[tokio::test]
async fn an_absurd_payload_length_costs_nothing() {
    let victim = Endpoint::bind(local()).await.unwrap();
    let hostile = raw(ALPN).await;
    let (_quic, mut streams, _connection, mut lanes) = open_valid(&hostile, &victim).await;
    let frame = [&1u32.to_le_bytes()[..], &u64::MAX.to_le_bytes(), b"h", &[0; 100]].concat();
    streams[2].write_all(&frame).await.unwrap();

    let frame = lanes.bulk.next().await.unwrap().unwrap();
    assert_eq!(frame.payload_len(), u64::MAX);
    // Even a caller that allows any length gets an error instead of an abort.
    let error = frame.read(u64::MAX).await.unwrap_err();
    assert_eq!(error, ReceiveError::NoMemory(u64::MAX));
}

#[tokio::test]
async fn a_reset_lane_is_truncated() {
    let victim = Endpoint::bind(local()).await.unwrap();
    let hostile = raw(ALPN).await;
    let (_quic, mut streams, _connection, mut lanes) = open_valid(&hostile, &victim).await;
    streams[1].reset(7u32.into()).unwrap();
    let ReceiveError::Disconnected(gone) = lanes.tensors.next().await.unwrap_err() else { panic!() };
    assert_eq!(gone.reason, DisconnectReason::PeerBrokeFormat(FormatError::Truncated(Lane::Tensors)));
}

#[tokio::test]
async fn the_error_names_a_peer_of_another_version() {
    let caller = Endpoint::bind(local()).await.unwrap();
    let newer = raw(b"fusionllm/3").await;
    let serving = newer.clone();
    let serving = tokio::spawn(async move {
        while let Some(incoming) = serving.accept().await {
            let _ = incoming.await;
        }
    });
    let key = PeerKey::from_bytes(*newer.id().as_bytes());
    let addrs = newer.addr().ip_addrs().copied().collect();
    let error = caller.connect(&PeerAddr::new(key, addrs)).await.unwrap_err();
    assert_eq!(error, ConnectError::Version(key));
    serving.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_refused_keys_locks_nobody_out_and_leaves_nothing() {
    // Only Linux gives a machine more than one loopback address. Elsewhere the flood comes from the peer's own.
    let listen = if cfg!(target_os = "linux") { [127, 0, 0, 2] } else { [127, 0, 0, 1] };
    let rightful = EndpointOptions { listen: Some((listen, 0).into()), ..local() };
    let rightful = Endpoint::bind(rightful).await.unwrap();
    let allowed = Allowed::Only(BTreeSet::from([rightful.key()]));
    let connect_timeout = Duration::from_secs(5);
    let victim = Endpoint::bind(EndpointOptions { allowed, connect_timeout, ..local() }).await.unwrap();
    let (hostile, target) = (raw(ALPN).await, address(&victim));
    let attempts = (0..300).map(|_| {
        let (hostile, target) = (hostile.clone(), target.clone());
        tokio::spawn(async move {
            match hostile.connect(target, ALPN).await {
                Ok(quic) => Some(quic.closed().await),
                Err(_) => None,
            }
        })
    });
    let attempts: Vec<_> = attempts.collect();
    let _connection = connects(&rightful, &victim).await;
    let mut refused = 0;
    for attempt in attempts {
        // Others failed during their handshake, because a newcomer took their place.
        let closed = attempt.await.unwrap();
        let key_refused = |close: &ApplicationClose| u64::from(close.error_code) == 1;
        refused += usize::from(matches!(closed, Some(ConnectionError::ApplicationClosed(c)) if key_refused(&c)));
    }
    assert!(refused > 0);
    until(|| victim.stats().handshakes == 0 && victim.stats().connections == 1).await;
}

/// Endpoints for 72 connections, 8 under each key. More are closed because of their key.
async fn many_keys() -> Vec<iroh::Endpoint> {
    let mut keys = Vec::new();
    for _ in 0..9 {
        keys.extend(vec![raw(ALPN).await; 8]);
    }
    keys
}

/// Connects and never opens a lane.
fn begin(hostile: iroh::Endpoint, victim: &Endpoint) -> tokio::task::JoinHandle<()> {
    let target = address(victim);
    tokio::spawn(async move {
        if let Ok(quic) = hostile.connect(target, ALPN).await {
            quic.closed().await;
        }
    })
}

/// Regression: strangers that begin and never finish filled all places until their deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_that_never_open_their_lanes_lock_nobody_out() {
    let patient = || EndpointOptions { connect_timeout: Duration::from_secs(60), ..local() };
    let victim = Endpoint::bind(patient()).await.unwrap();
    let strangers: Vec<_> = many_keys().await.into_iter().map(|hostile| begin(hostile, &victim)).collect();
    until(|| victim.stats().handshakes >= 64).await;
    let rightful = Endpoint::bind(patient()).await.unwrap();
    let _connection = connects(&rightful, &victim).await;
    drop(strangers);
}

#[tokio::test]
async fn a_stranger_that_never_opens_its_lanes_is_disconnected() {
    let victim = Endpoint::bind(EndpointOptions { connect_timeout: Duration::from_secs(1), ..local() }).await.unwrap();
    begin(raw(ALPN).await, &victim).await.unwrap();
    until(|| victim.stats().handshakes == 0 && victim.stats().connections == 0).await;
}

/// The first datagrams of connections to the victim, each of another connection.
async fn first_datagrams(victim: &Endpoint, count: usize) -> Vec<Vec<u8>> {
    let sink = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let hostile = raw(ALPN).await;
    let target = EndpointAddr::from_parts(address(victim).id, [TransportAddr::Ip(sink.local_addr().unwrap())]);
    let dialling = (0..count).map(|_| {
        let (hostile, target) = (hostile.clone(), target.clone());
        // Iroh can drop the first datagram of many, so it dials until all have come.
        tokio::spawn(async move { while hostile.connect(target.clone(), ALPN).await.is_err() {} })
    });
    let dialling: Vec<_> = dialling.collect();
    let (mut datagrams, mut buffer) = (BTreeMap::new(), [0; 2000]);
    while datagrams.len() < count {
        let (length, _) = sink.recv_from(&mut buffer).await.unwrap();
        // RFC 9000, section 17.2: the destination's connection ID stands behind its length, in byte 5.
        let id = buffer[6..6 + usize::from(buffer[5])].to_vec();
        datagrams.entry(id).or_insert_with(|| buffer[..length].to_vec());
    }
    for dial in dialling {
        dial.abort();
    }
    datagrams.into_values().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_with_forged_senders_lock_nobody_out() {
    let victim = Endpoint::bind(EndpointOptions { connect_timeout: Duration::from_secs(5), ..local() }).await.unwrap();
    let target = victim.addr().addrs[0];
    let mut senders = Vec::new();
    for datagram in first_datagrams(&victim, 100).await {
        // The sender never reads an answer, as if its address were somebody else's.
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.send_to(&datagram, target).unwrap();
        senders.push(sender);
    }
    until(|| victim.stats().handshakes >= 32).await;
    let rightful = Endpoint::bind(local()).await.unwrap();
    let _connection = connects(&rightful, &victim).await;
    // The others had to prove their address. The rightful peer's handshake may just have ended.
    assert!(victim.stats().handshakes <= 33, "{:?}", victim.stats());
    until(|| victim.stats().handshakes == 0 && victim.stats().connections == 1).await;
}

#[tokio::test]
async fn one_key_has_few_connections() {
    let victim = Endpoint::bind(local()).await.unwrap();
    let hostile = raw(ALPN).await;
    let mut open = Vec::new();
    for _ in 0..8 {
        open.push(open_valid(&hostile, &victim).await);
    }
    let ConnectionError::ApplicationClosed(close) = call(&hostile, &victim).await.closed().await else { panic!() };
    assert_eq!(close.reason, "this key has too many connections");
    // A closed connection makes room.
    open.pop().unwrap().2.close("");
    let _connection = open_valid(&hostile, &victim).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_nobody_takes_are_bounded() {
    let victim = Endpoint::bind(local()).await.unwrap();
    let mut open = Vec::new();
    for hostile in many_keys().await {
        let quic = call(&hostile, &victim).await;
        let streams = open_lanes(&quic).await;
        open.push((hostile, quic, streams));
    }
    until(|| victim.stats().handshakes == 0 && victim.stats().connections == 64).await;
    // The strangers are still there, and the next peer finds a place.
    let rightful = Endpoint::bind(local()).await.unwrap();
    victim.accept().await.unwrap();
    let _connection = connects(&rightful, &victim).await;
}
