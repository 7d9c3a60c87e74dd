//! Two endpoints on loopback: throughput of large frames and round-trip time of a small frame.
//!
//! `cargo bench -p fusionllm-transport`

#![allow(clippy::unwrap_used)]

use std::net::Ipv4Addr;
use std::time::Duration;

use bytes::Bytes;
use divan::Bencher;
use divan::counter::BytesCount;
use fusionllm_transport::emulator::{Emulator, LinkSpec};
use fusionllm_transport::{Connection, Endpoint, EndpointOptions, Lane, Lanes};
use tokio::runtime::Runtime;

fn main() {
    divan::main();
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
