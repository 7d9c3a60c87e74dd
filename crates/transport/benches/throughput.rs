//! Two endpoints on loopback: throughput of large frames and round-trip time of a small frame. The benches whose
//! names end in `raw_quic` do the same with bare streams of iroh in its default settings.
//!
//! `cargo bench -p fusionllm-transport`
//!
//! With `--results FILE` after `--`, both take turns instead, and the figures go to a file as JSON.

#![allow(clippy::unwrap_used)]

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use divan::Bencher;
use divan::counter::BytesCount;
use fusionllm_transport::emulator::{Emulator, LinkSpec};
use fusionllm_transport::{Connection, Endpoint, EndpointOptions, Lane, Lanes};
use iroh::endpoint::{RecvStream, SendStream, presets};
use iroh::{EndpointAddr, RelayMode};
use tokio::runtime::Runtime;

fn main() {
    match std::env::args().skip_while(|a| a != "--results").nth(1) {
        Some(file) => std::fs::write(file, compare()).unwrap(),
        None => divan::main(),
    }
}

/// Times ours and raw QUIC in turns.
fn compare() -> String {
    const LENGTH: usize = 64 << 20;
    /// Round trips of one turn.
    const TRIPS: usize = 100;
    let runtime = Runtime::new().unwrap();
    let (_ends, to, mut from, back, mut lanes) = runtime.block_on(pair(EndpointOptions::new().pinned));
    let (_raw_ends, mut raw_to, mut raw_from, mut raw_back, mut raw_arriving) = runtime.block_on(raw_pair());
    let (large, small) = (Bytes::from(vec![1; LENGTH]), Bytes::from(vec![1; 1024]));
    let [mut ours, mut raw, mut our_trips, mut raw_trips] = [const { Vec::new() }; 4];
    for _ in 0..20 {
        let started = Instant::now();
        runtime.block_on(async {
            let receiving = async { lanes.tensors.next().await.unwrap().unwrap().read(LENGTH as u64).await.unwrap() };
            let payload = [large.clone()];
            let (sent, _received) = tokio::join!(to.send(Lane::Tensors, b"", &payload), receiving);
            sent.unwrap();
        });
        ours.push(started.elapsed().as_secs_f64());
        let started = Instant::now();
        runtime.block_on(async {
            let mut received = vec![0; LENGTH];
            let (sent, arrived) =
                tokio::join!(raw_to.write_chunk(large.clone()), raw_arriving.read_exact(&mut received));
            sent.unwrap();
            arrived.unwrap();
        });
        raw.push(started.elapsed().as_secs_f64());
        let started = Instant::now();
        runtime.block_on(async {
            for _ in 0..TRIPS {
                to.send(Lane::Control, b"", std::slice::from_ref(&small)).await.unwrap();
                let there = lanes.control.next().await.unwrap().unwrap().read(1024).await.unwrap();
                back.send(Lane::Control, b"", &[there]).await.unwrap();
                from.control.next().await.unwrap().unwrap().read(1024).await.unwrap();
            }
        });
        our_trips.push(started.elapsed().as_secs_f64() / TRIPS as f64);
        let (started, mut payload) = (Instant::now(), [1; 1024]);
        runtime.block_on(async {
            for _ in 0..TRIPS {
                raw_to.write_all(&payload).await.unwrap();
                raw_arriving.read_exact(&mut payload).await.unwrap();
                raw_back.write_all(&payload).await.unwrap();
                raw_from.read_exact(&mut payload).await.unwrap();
            }
        });
        raw_trips.push(started.elapsed().as_secs_f64() / TRIPS as f64);
    }
    // The first turn opens the windows of both.
    ours.remove(0);
    raw.remove(0);
    let rows = [row("64 MiB", &ours, &raw), row("a round trip of 1 KiB", &our_trips, &raw_trips)];
    format!("{{\"rows\": [{}]}}", rows.join(", "))
}

/// A line of the results: medians, and the median, least and largest ratio of the turns.
fn row(what: &str, ours: &[f64], raw: &[f64]) -> String {
    let sorted = |mut figures: Vec<f64>| {
        figures.sort_by(f64::total_cmp);
        figures
    };
    let middle = |figures: &[f64]| sorted(figures.to_vec())[figures.len() / 2];
    let ratios = sorted(ours.iter().zip(raw).map(|(a, b)| a / b).collect());
    let (ours, raw, ratio) = (middle(ours), middle(raw), middle(&ratios));
    println!("{what}: {ours:.6} s, raw QUIC {raw:.6} s, ratio {ratio:.3}");
    let ends = [ratios[0], ratios[ratios.len() - 1]];
    format!(
        "{{\"what\": \"{what}\", \"ours_s\": {ours}, \"raw_s\": {raw}, \"ratio\": [{ratio}, {}, {}]}}",
        ends[0], ends[1]
    )
}

#[divan::bench(args = [false, true], sample_count = 10, sample_size = 1)]
fn send_64_mib(bencher: Bencher<'_, '_>, pinned: bool) {
    const LENGTH: usize = 64 << 20;
    let runtime = Runtime::new().unwrap();
    let (_ends, to, _from, _back, mut lanes) = runtime.block_on(pair(pinned));
    let payload = [Bytes::from(vec![1; LENGTH])];
    bencher.counter(BytesCount::new(LENGTH)).bench_local(|| {
        runtime.block_on(async {
            let receiving = async {
                let frame = lanes.tensors.next().await.unwrap().unwrap();
                frame.read(LENGTH as u64).await.unwrap()
            };
            let (sent, received) = tokio::join!(to.send(Lane::Tensors, b"", &payload), receiving);
            sent.unwrap();
            received
        })
    });
}

#[divan::bench(args = [false, true], sample_count = 100, sample_size = 20)]
fn round_trip_1_kib(bencher: Bencher<'_, '_>, pinned: bool) {
    let runtime = Runtime::new().unwrap();
    let (_ends, to, mut from, back, mut lanes) = runtime.block_on(pair(pinned));
    let echo = runtime.spawn(async move {
        while let Some(frame) = lanes.control.next().await.unwrap() {
            let payload = frame.read(1024).await.unwrap();
            back.send(Lane::Control, b"", &[payload]).await.unwrap();
        }
        back
    });
    let payload = [Bytes::from(vec![1; 1024])];
    bencher.bench_local(|| {
        runtime.block_on(async {
            to.send(Lane::Control, b"", &payload).await.unwrap();
            let frame = from.control.next().await.unwrap().unwrap();
            frame.read(1024).await.unwrap()
        })
    });
    runtime.block_on(async {
        to.finish().await.unwrap();
        echo.await.unwrap();
    });
}

#[divan::bench(sample_count = 10, sample_size = 1)]
fn send_64_mib_raw_quic(bencher: Bencher<'_, '_>) {
    const LENGTH: usize = 64 << 20;
    let runtime = Runtime::new().unwrap();
    let (_ends, mut to, _from, _back, mut arriving) = runtime.block_on(raw_pair());
    let payload = Bytes::from(vec![1; LENGTH]);
    bencher.counter(BytesCount::new(LENGTH)).bench_local(|| {
        runtime.block_on(async {
            let receiving = async {
                let mut received = Vec::with_capacity(LENGTH);
                while received.len() < LENGTH {
                    let chunk = arriving.read_chunk(LENGTH - received.len()).await.unwrap().unwrap();
                    received.extend_from_slice(&chunk);
                }
                received
            };
            let (sent, received) = tokio::join!(to.write_chunk(payload.clone()), receiving);
            sent.unwrap();
            received
        })
    });
}

#[divan::bench(sample_count = 100, sample_size = 20)]
fn round_trip_1_kib_raw_quic(bencher: Bencher<'_, '_>) {
    let runtime = Runtime::new().unwrap();
    let (_ends, mut to, mut from, mut back, mut arriving) = runtime.block_on(raw_pair());
    let echo = runtime.spawn(async move {
        let mut payload = [0; 1024];
        while arriving.read_exact(&mut payload).await.is_ok() {
            back.write_all(&payload).await.unwrap();
        }
    });
    let mut payload = [1; 1024];
    bencher.bench_local(|| {
        runtime.block_on(async {
            to.write_all(&payload).await.unwrap();
            from.read_exact(&mut payload).await.unwrap();
        })
    });
    echo.abort();
}

/// The emulator's own speed: an unlimited link.
#[divan::bench(sample_count = 10, sample_size = 1)]
fn send_16_mib_over_an_emulated_link(bencher: Bencher<'_, '_>) {
    const LENGTH: usize = 16 << 20;
    let runtime = Runtime::new().unwrap();
    let emulator = Emulator::start(Ipv4Addr::LOCALHOST.into(), 1).unwrap();
    let link = emulator.add_link(LinkSpec::new("free", None, Duration::ZERO));
    let (ends, to, mut lanes) = runtime.block_on(async {
        let options = || EndpointOptions { pinned: true, ..EndpointOptions::new() };
        let caller = Endpoint::bind(options()).await.unwrap();
        let callee = Endpoint::bind(options()).await.unwrap();
        let [from, mut addr] = [caller.addr(), callee.addr()];
        let joined = emulator.connect_peers(from.addrs[0], addr.addrs[0], vec![link], vec![link]);
        addr.addrs = vec![joined.unwrap().0];
        let (calling, called) = tokio::join!(caller.connect(&addr), callee.accept());
        let (to, from) = calling.unwrap();
        let (back, lanes) = called.unwrap();
        ((caller, callee, from, back), to, lanes)
    });
    let payload = [Bytes::from(vec![1; LENGTH])];
    bencher.counter(BytesCount::new(LENGTH)).bench_local(|| {
        runtime.block_on(async {
            let receiving = async {
                let frame = lanes.tensors.next().await.unwrap().unwrap();
                frame.read(LENGTH as u64).await.unwrap()
            };
            let (sent, received) = tokio::join!(to.send(Lane::Tensors, b"", &payload), receiving);
            sent.unwrap();
            received
        })
    });
    drop(ends);
}

async fn pair(pinned: bool) -> ([Endpoint; 2], Connection, Lanes, Connection, Lanes) {
    let options = || EndpointOptions { listen: Some(([127, 0, 0, 1], 0).into()), pinned, ..EndpointOptions::new() };
    let caller = Endpoint::bind(options()).await.unwrap();
    let callee = Endpoint::bind(options()).await.unwrap();
    let addr = callee.addr();
    let (calling, called) = tokio::join!(caller.connect(&addr), callee.accept());
    let (to_callee, from_callee) = calling.unwrap();
    let (to_caller, from_caller) = called.unwrap();
    ([caller, callee], to_callee, from_callee, to_caller, from_caller)
}

type RawEnds = ([iroh::Endpoint; 2], [iroh::endpoint::Connection; 2]);

/// Two endpoints, and a stream in each direction: its sending half at one and its receiving half at the other.
async fn raw_pair() -> (RawEnds, SendStream, RecvStream, SendStream, RecvStream) {
    let bind = || async {
        let builder = iroh::Endpoint::builder(presets::Minimal).alpns(vec![b"raw".to_vec()]);
        let builder = builder.relay_mode(RelayMode::Disabled).clear_ip_transports();
        builder.bind_addr((Ipv4Addr::LOCALHOST, 0)).unwrap().bind().await.unwrap()
    };
    let (caller, callee) = (bind().await, bind().await);
    let addr = EndpointAddr::new(callee.id()).with_ip_addr(callee.bound_sockets()[0]);
    let accepting = async { callee.accept().await.unwrap().await.unwrap() };
    let (calling, called) = tokio::join!(caller.connect(addr, b"raw"), accepting);
    let calling = calling.unwrap();
    let (mut to, mut back) = (calling.open_uni().await.unwrap(), called.open_uni().await.unwrap());
    // A peer learns of a stream by its first byte.
    to.write_all(&[0]).await.unwrap();
    back.write_all(&[0]).await.unwrap();
    let (mut from, mut arriving) = (calling.accept_uni().await.unwrap(), called.accept_uni().await.unwrap());
    from.read_exact(&mut [0]).await.unwrap();
    arriving.read_exact(&mut [0]).await.unwrap();
    (([caller, callee], [calling, called]), to, from, back, arriving)
}
