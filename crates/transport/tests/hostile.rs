//! A hostile peer that has passed QUIC's handshake.

#![allow(clippy::unwrap_used, clippy::panic)]

use fusionllm_transport::{
    ALPN, ConnectError, Connection, DisconnectReason, Endpoint, EndpointOptions, FormatError, Lane, Lanes, PeerAddr,
    PeerKey, ReceiveError,
};
use iroh::endpoint::{Connection as QuicConnection, ConnectionError, SendStream, presets};
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

async fn call(hostile: &iroh::Endpoint, victim: &Endpoint) -> QuicConnection {
    let id = iroh::PublicKey::from_bytes(victim.key().as_bytes()).unwrap();
    let addrs = victim.addr().addrs.into_iter().map(TransportAddr::Ip);
    hostile.connect(EndpointAddr::from_parts(id, addrs), ALPN).await.unwrap()
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
    let streams = [
        stream(&quic, b"FLLM\x01\x00").await,
        stream(&quic, b"FLLM\x01\x01").await,
        stream(&quic, b"FLLM\x01\x02").await,
    ];
    let (connection, lanes) = victim.accept().await.unwrap();
    (quic, streams, connection, lanes)
}

#[tokio::test]
async fn the_reason_names_what_is_wrong_with_a_prelude() {
    let victim = Endpoint::bind(local()).await.unwrap();
    let hostile = raw(ALPN).await;
    for (bytes, expected) in [
        (&b"GET / HTTP/1.1"[..], "\"FLLM\""),
        (b"FLLM\x00\x00", "wire version 0"),
        (b"FLLM\x02\x00", "wire version 2"),
        (b"FLLM\x01\x09", "lane 9"),
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
    let _streams = [stream(&quic, b"FLLM\x01\x01").await, stream(&quic, b"FLLM\x01\x01").await];
    assert!(complaint(&quic).await.contains("two streams for the tensors lane"));
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
    let frame = [&3u32.to_le_bytes()[..], &10u64.to_le_bytes(), b"abc", b"12345"].concat();
    for length in [1, 11, 12, 14, 15, 20] {
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
    let newer = raw(b"fusionllm/2").await;
    let serving = newer.clone();
    let serving = tokio::spawn(async move {
        while let Some(incoming) = serving.accept().await {
            let _ = incoming.await;
        }
    });
    let key = PeerKey::from_bytes(*newer.id().as_bytes());
    let addrs = newer.addr().ip_addrs().copied().collect();
    let error = caller.connect(&PeerAddr { key, addrs }).await.unwrap_err();
    assert_eq!(error, ConnectError::Version(key));
    serving.abort();
}
