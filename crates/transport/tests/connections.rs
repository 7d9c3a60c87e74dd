//! Two endpoints on loopback, over real UDP.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use fusionllm_transport::{
    Allowed, ConnectError, Connection, DisconnectReason, Endpoint, EndpointOptions, Lane, Lanes, MAX_HEADER_BYTES,
    PathKind, PeerAddr, PeerKey, ReceiveError, SecretKey, SendError,
};

fn local() -> EndpointOptions {
    EndpointOptions { listen: Some(([127, 0, 0, 1], 0).into()), ..EndpointOptions::new() }
}

/// Two endpoints and their connection, as each side sees it.
struct Pair {
    caller: Endpoint,
    callee: Endpoint,
    to_callee: Connection,
    from_callee: Lanes,
    to_caller: Connection,
    from_caller: Lanes,
}

async fn pair_with(options: impl Fn() -> EndpointOptions) -> Pair {
    let caller = Endpoint::bind(options()).await.unwrap();
    let callee = Endpoint::bind(options()).await.unwrap();
    let addr = callee.addr();
    let (calling, called) = tokio::join!(caller.connect(&addr), callee.accept());
    let (to_callee, from_callee) = calling.unwrap();
    let (to_caller, from_caller) = called.unwrap();
    Pair { caller, callee, to_callee, from_callee, to_caller, from_caller }
}

async fn pair() -> Pair {
    pair_with(local).await
}

/// Bytes in which every slice differs from its neighbours.
fn pattern(length: usize) -> Bytes {
    (0..length).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect::<Vec<u8>>().into()
}

#[tokio::test]
async fn frames_pass_on_every_lane_in_both_directions() {
    let mut pair = pair().await;
    assert_eq!(pair.to_callee.peer(), pair.callee.key());
    assert_eq!(pair.to_caller.peer(), pair.caller.key());

    for (connection, lanes) in [(&pair.to_callee, &mut pair.from_caller), (&pair.to_caller, &mut pair.from_callee)] {
        for (lane, receiver) in
            [(Lane::Bulk, &mut lanes.bulk), (Lane::Control, &mut lanes.control), (Lane::Tensors, &mut lanes.tensors)]
        {
            let header = lane.to_string();
            let slices = ["one ".into(), Bytes::new(), "payload".into()];
            connection.send(lane, header.as_bytes(), &slices).await.unwrap();
            connection.send(lane, b"", &[]).await.unwrap();

            let frame = receiver.next().await.unwrap().unwrap();
            assert_eq!(frame.header(), header.as_bytes());
            assert_eq!(frame.payload_len(), 11);
            assert_eq!(frame.read(11).await.unwrap(), "one payload");
            let frame = receiver.next().await.unwrap().unwrap();
            assert!(frame.header().is_empty());
            assert_eq!(frame.read(0).await.unwrap(), "");
        }
    }

    let (sent, received) = (pair.to_callee.stats(), pair.to_caller.stats());
    assert_eq!(sent.sent, received.received);
    assert_eq!(sent.received, received.sent);
    let control = sent.sent[Lane::Control as usize];
    assert_eq!((control.frames, control.payload_bytes), (2, 11));
    assert_eq!(control.total_bytes, 2 * 12 + "control".len() as u64 + 1 + 11, "prefixes, header, a block, payload");
    assert!(sent.udp_sent > control.total_bytes && sent.udp_received > control.total_bytes);
    assert!(sent.rtt > Duration::ZERO);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_megabytes_arrive_intact_while_other_lanes_are_used() {
    let mut pair = pair().await;
    let payload = pattern(50_000_000);
    let sending = tokio::spawn({
        let (to_callee, payload) = (pair.to_callee.clone(), payload.clone());
        async move {
            // Unequal slices, so that their borders fall anywhere within packets and chunks.
            let (a, rest) = (payload.slice(..1), payload.slice(1..));
            let (b, c) = (rest.slice(..7_654_321), rest.slice(7_654_321..));
            to_callee.send(Lane::Tensors, b"big", &[a, b, c]).await
        }
    });
    let frame = pair.from_caller.tensors.next().await.unwrap().unwrap();
    assert_eq!(frame.payload_len(), 50_000_000);

    // Nobody reads the big payload yet, so its lane is stuck. Other lanes are not.
    pair.to_callee.send(Lane::Control, b"quick", &[]).await.unwrap();
    let quick = pair.from_caller.control.next().await.unwrap().unwrap();
    assert_eq!(quick.header(), &b"quick"[..]);

    assert!(frame.read(50_000_000).await.unwrap() == payload);
    sending.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_of_many_tasks_stay_whole_and_in_order() {
    let mut pair = pair().await;
    let tasks: Vec<_> = (0..8u8)
        .map(|task| {
            let to_callee = pair.to_callee.clone();
            tokio::spawn(async move {
                for i in 0..50u8 {
                    let payload = Bytes::from(vec![task; 1 + usize::from(i) * 997]);
                    to_callee.send(Lane::Tensors, &[task, i], &[payload]).await.unwrap();
                }
            })
        })
        .collect();
    let mut next = [0u8; 8];
    for _ in 0..8 * 50 {
        let frame = pair.from_caller.tensors.next().await.unwrap().unwrap();
        let [task, i] = *frame.header().first_chunk::<2>().unwrap();
        assert_eq!(next[usize::from(task)], i);
        next[usize::from(task)] += 1;
        let mut payload = vec![0; 1 + usize::from(i) * 997];
        frame.read_into(&mut payload).await.unwrap();
        assert!(payload.iter().all(|byte| *byte == task));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

#[tokio::test]
async fn a_lane_continues_after_a_skipped_payload() {
    let mut pair = pair().await;
    let to_callee = pair.to_callee.clone();
    let sending = tokio::spawn(async move {
        for (header, length) in [(b"a", 3_000_000), (b"b", 100), (b"c", 5), (b"d", 4)] {
            to_callee.send(Lane::Bulk, header, &[pattern(length)]).await.unwrap();
        }
    });
    let bulk = &mut pair.from_caller.bulk;

    drop(bulk.next().await.unwrap().unwrap());
    let error = bulk.next().await.unwrap().unwrap().read(99).await.unwrap_err();
    let expected = ReceiveError::TooLong { lane: Lane::Bulk, announced: 100, allowed: 99 };
    assert_eq!(error, expected);
    let error = bulk.next().await.unwrap().unwrap().read_into(&mut [0; 4]).await.unwrap_err();
    assert_eq!(error, ReceiveError::Length { lane: Lane::Bulk, announced: 5, expected: 4 });
    assert_eq!(bulk.next().await.unwrap().unwrap().read(4).await.unwrap(), pattern(4));
    sending.await.unwrap();

    let received = pair.to_caller.stats().received[Lane::Bulk as usize];
    assert_eq!((received.frames, received.payload_bytes), (4, 3_000_109));
}

#[tokio::test]
async fn a_header_that_is_too_long_is_not_sent() {
    let mut pair = pair().await;
    let error = pair.to_callee.send(Lane::Control, &[0; MAX_HEADER_BYTES + 1], &[]).await.unwrap_err();
    assert_eq!(error, SendError::HeaderTooLong(MAX_HEADER_BYTES + 1));
    pair.to_callee.send(Lane::Control, &[7; MAX_HEADER_BYTES], &[]).await.unwrap();
    let frame = pair.from_caller.control.next().await.unwrap().unwrap();
    assert_eq!(frame.header(), &[7; MAX_HEADER_BYTES][..]);
}

/// Regression: a task that dropped a send halfway, as `select!` does, left half a frame on the lane. The peer then read
/// the next frame as the rest.
#[tokio::test]
async fn a_send_dropped_halfway_leaves_the_lane_readable() {
    let mut pair = pair().await;
    // The payload exceeds the peer's window, so the send has begun after one poll and cannot be complete.
    let payload = pattern(4_000_000);
    {
        let send = pair.to_callee.send(Lane::Tensors, b"dropped", std::slice::from_ref(&payload));
        tokio::pin!(send);
        tokio::select! {
            biased;
            _ = &mut send => panic!("4 MB do not fit the window"),
            () = std::future::ready(()) => {}
        }
    }
    let next = tokio::spawn({
        let to_callee = pair.to_callee.clone();
        async move { to_callee.send(Lane::Tensors, b"next", &[]).await }
    });
    let frame = pair.from_caller.tensors.next().await.unwrap().unwrap();
    assert_eq!(frame.header(), &b"dropped"[..]);
    assert!(frame.read(4_000_000).await.unwrap() == payload);
    let frame = pair.from_caller.tensors.next().await.unwrap().unwrap();
    assert_eq!(frame.header(), &b"next"[..]);
    next.await.unwrap().unwrap();
}

#[tokio::test]
async fn finishing_delivers_everything_and_ends_the_lanes() {
    let mut pair = pair().await;
    pair.to_callee.send(Lane::Bulk, b"last", &[pattern(1000)]).await.unwrap();
    pair.to_callee.finish().await.unwrap();
    let error = pair.to_callee.send(Lane::Bulk, b"more", &[]).await.unwrap_err();
    assert_eq!(error, SendError::Finished(Lane::Bulk));

    let frame = pair.from_caller.bulk.next().await.unwrap().unwrap();
    assert_eq!(frame.read(1000).await.unwrap(), pattern(1000));
    assert!(pair.from_caller.bulk.next().await.unwrap().is_none());
    assert!(pair.from_caller.control.next().await.unwrap().is_none());
    // The other direction stays open.
    pair.to_caller.send(Lane::Control, b"still here", &[]).await.unwrap();
    assert!(pair.from_callee.control.next().await.unwrap().is_some());
}

#[tokio::test]
async fn the_peer_gets_the_reason_for_closing() {
    let mut pair = pair().await;
    assert_eq!(pair.to_callee.disconnected(), None);
    pair.to_callee.close("disk full");

    let gone = pair.to_caller.closed().await;
    assert_eq!(gone.peer, pair.caller.key());
    assert_eq!(gone.reason, DisconnectReason::ClosedByPeer("disk full".into()));
    assert_eq!(pair.from_caller.bulk.next().await.unwrap_err(), gone.clone().into());
    let error = pair.to_caller.send(Lane::Control, b"", &[]).await.unwrap_err();
    assert_eq!(error, gone.into());

    let gone = pair.to_callee.closed().await;
    assert_eq!(gone.reason, DisconnectReason::ClosedHere("disk full".into()));
    assert_eq!(pair.to_callee.disconnected(), Some(gone));
}

#[tokio::test]
async fn every_peer_gets_the_reason_for_closing_an_endpoint() {
    let pair = pair().await;
    let other = Endpoint::bind(local()).await.unwrap();
    let callee_addr = pair.callee.addr();
    let (connecting, _accepted) = tokio::join!(other.connect(&callee_addr), pair.callee.accept());
    let (from_other, _lanes) = connecting.unwrap();

    pair.callee.close("run finished").await;
    for connection in [&pair.to_callee, &from_other] {
        let reason = connection.closed().await.reason;
        assert_eq!(reason, DisconnectReason::ClosedByPeer("run finished".into()));
    }
    assert!(pair.callee.accept().await.is_none());
    let error = pair.callee.connect(&pair.caller.addr()).await.unwrap_err();
    assert_eq!(error, ConnectError::Closed(pair.caller.key()));
}

#[tokio::test]
async fn a_key_is_refused_until_it_is_allowed() {
    let caller = Endpoint::bind(local()).await.unwrap();
    let stranger = SecretKey::generate().public();
    let allowed = Allowed::Only(BTreeSet::from([stranger]));
    let callee = Endpoint::bind(EndpointOptions { allowed, ..local() }).await.unwrap();
    let addr = callee.addr();

    let error = caller.connect(&addr).await.unwrap_err();
    assert_eq!(error, ConnectError::Refused(callee.key()));

    callee.allow(Allowed::Only(BTreeSet::from([stranger, caller.key()])));
    let (connecting, accepted) = tokio::join!(caller.connect(&addr), callee.accept());
    connecting.unwrap();
    // The accepted connection is the second attempt. The first never reached the queue.
    assert_eq!(accepted.unwrap().0.peer(), caller.key());
}

#[tokio::test]
async fn a_silent_peer_times_out() {
    let quick = || EndpointOptions {
        keep_alive: Duration::from_millis(100),
        // A busy machine may be silent for some time, too, while the connection begins.
        idle_timeout: Duration::from_secs(3),
        ..local()
    };
    let watcher = Endpoint::bind(quick()).await.unwrap();
    let addr = watcher.addr();
    // A runtime of the peer's own can die with everything in it, like a killed process.
    let doomed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let connecting = doomed.spawn(async move {
        let endpoint = Endpoint::bind(quick()).await.unwrap();
        let connection = endpoint.connect(&addr).await.unwrap();
        (endpoint, connection)
    });
    let (to_doomed, mut lanes) = watcher.accept().await.unwrap();
    let doomed_side = connecting.await.unwrap();
    doomed.shutdown_background();

    let gone = to_doomed.closed().await;
    assert_eq!(gone.reason, DisconnectReason::TimedOut);
    assert_eq!(gone.peer, doomed_side.0.key());
    assert_eq!(lanes.tensors.next().await.unwrap_err(), gone.into());
}

#[test]
fn the_default_timeout_survives_a_change_of_access_points() {
    // The timeout can take ten seconds, and until then keep-alive packets must arrive.
    let EndpointOptions { keep_alive, idle_timeout, .. } = EndpointOptions::new();
    assert!(Duration::from_secs(10) + 3 * keep_alive < idle_timeout);
}

#[tokio::test]
async fn a_silent_peer_is_seen_long_before_it_is_lost() {
    let quick = || EndpointOptions { keep_alive: Duration::from_millis(50), ..local() };
    let watcher = Endpoint::bind(quick()).await.unwrap();
    let addr = watcher.addr();
    let doomed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let connecting = doomed.spawn(async move {
        let endpoint = Endpoint::bind(quick()).await.unwrap();
        let connection = endpoint.connect(&addr).await.unwrap();
        (endpoint, connection)
    });
    let (to_doomed, _lanes) = watcher.accept().await.unwrap();
    let _doomed_side = connecting.await.unwrap();
    doomed.shutdown_background();

    let mut looks = tokio::time::interval(Duration::from_millis(50));
    while to_doomed.silent_for() < Duration::from_secs(1) {
        looks.tick().await;
    }
    assert_eq!(to_doomed.disconnected(), None);
}

#[tokio::test]
async fn errors_name_the_peer_that_cannot_be_reached() {
    let endpoint = Endpoint::bind(local()).await.unwrap();
    let nobody = PeerAddr::new(SecretKey::generate().public(), vec![]);
    let error = endpoint.connect(&nobody).await.unwrap_err();
    assert!(error.to_string().contains("has no address"), "{error}");

    let error = endpoint.connect(&endpoint.addr()).await.unwrap_err();
    assert!(error.to_string().contains("this peer itself"), "{error}");

    // No point of the curve has y = 2.
    let mut bytes = [0; 32];
    bytes[0] = 2;
    let invalid = PeerAddr::new(PeerKey::from_bytes(bytes), endpoint.addr().addrs);
    let error = endpoint.connect(&invalid).await.unwrap_err();
    assert_eq!(error, ConnectError::InvalidKey(invalid.key));

    // Another peer has the address.
    let other = Endpoint::bind(local()).await.unwrap();
    let mistaken = PeerAddr::new(nobody.key, other.addr().addrs);
    let error = endpoint.connect(&mistaken).await.unwrap_err();
    assert!(matches!(error, ConnectError::Handshake(..)), "{error}");

    let within = Duration::from_millis(200);
    let hasty = Endpoint::bind(EndpointOptions { connect_timeout: within, ..local() }).await.unwrap();
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let addr = PeerAddr::new(nobody.key, vec![silent.local_addr().unwrap()]);
    let error = hasty.connect(&addr).await.unwrap_err();
    assert_eq!(error, ConnectError::NoAnswer { addr, after: within, obstacle: None });
}

#[tokio::test]
async fn errors_name_an_address_in_use() {
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap();
    for pinned in [false, true] {
        let options = EndpointOptions { listen: Some(listen), pinned, ..EndpointOptions::new() };
        let error = Endpoint::bind(options).await.unwrap_err().to_string();
        assert!(error.contains(&listen.to_string()) && error.contains("in use"), "{error}");
    }
}

#[tokio::test]
async fn an_endpoint_on_all_interfaces_reports_usable_addresses() {
    let caller = Endpoint::bind(EndpointOptions::new()).await.unwrap();
    let callee = Endpoint::bind(EndpointOptions::new()).await.unwrap();
    let addr = callee.addr();
    assert!(!addr.addrs.is_empty());
    assert!(addr.addrs.iter().all(|a| !a.ip().is_unspecified() && a.port() != 0), "{addr}");
    let (connecting, accepted) = tokio::join!(caller.connect(&addr), callee.accept());
    connecting.unwrap();
    assert!(accepted.is_some());
}

#[tokio::test]
async fn advertised_addresses_come_first() {
    let forwarded: SocketAddr = "192.0.2.1:4433".parse().unwrap();
    let endpoint = Endpoint::bind(EndpointOptions { advertise: vec![forwarded], ..local() }).await.unwrap();
    let PeerAddr { addrs, relay, .. } = endpoint.addr();
    assert_eq!((addrs.len(), addrs[0], relay), (2, forwarded, None));
    assert!(addrs[1].ip().is_loopback());
    // The endpoint is reached although nothing answers at the first address.
    let caller = Endpoint::bind(local()).await.unwrap();
    let addr = endpoint.addr();
    let (connecting, accepted) = tokio::join!(caller.connect(&addr), endpoint.accept());
    assert_eq!(connecting.unwrap().0.path(), PathKind::Direct);
    assert!(accepted.is_some());
}

#[tokio::test]
async fn pinned_endpoints_connect_to_pinned_and_other_endpoints() {
    let pinned = || EndpointOptions { pinned: true, ..EndpointOptions::new() };
    let mut pair = pair_with(pinned).await;
    let payload = pattern(2_000_000);
    let receiving = async {
        let frame = pair.from_caller.bulk.next().await.unwrap().unwrap();
        frame.read(2_000_000).await.unwrap()
    };
    let slices = [payload.clone()];
    let sending = pair.to_callee.send(Lane::Bulk, b"", &slices);
    let (sent, received) = tokio::join!(sending, receiving);
    sent.unwrap();
    assert!(received == payload);

    let other = Endpoint::bind(local()).await.unwrap();
    let addr = other.addr();
    let (connecting, accepted) = tokio::join!(pair.caller.connect(&addr), other.accept());
    connecting.unwrap();
    assert_eq!(accepted.unwrap().0.peer(), pair.caller.key());
}
