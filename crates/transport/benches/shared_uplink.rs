//! Shared uplink: the share of an uplink's bandwidth that several connections reach together.
//!
//! Two homes have an emulated uplink of 8 Mbps and 20 ms each. 1, 2, 4 and 8 pairs of peers send messages to and fro
//! at the same time, as stages of a pipeline and replicas do.
//!
//! ```console
//! $ cargo bench -p fusionllm-transport --bench shared_uplink [-- BYTES]
//! ```

use std::error::Error;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fusionllm_transport::emulator::{Emulator, HEADER_BYTES, LinkSpec};
use fusionllm_transport::{Connection, Endpoint, EndpointOptions, Lane, Lanes};

type Failure = Box<dyn Error + Send + Sync>;

const RATE: u64 = 1_000_000;
const LATENCY: Duration = Duration::from_millis(20);
const MESSAGES: usize = 20;
/// Bytes of QUIC's largest datagram.
const PACKET: u64 = 1_452;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let bytes = std::env::args().skip(1).find(|a| a != "--bench").unwrap_or_else(|| "65536".into());
    let bytes = bytes.parse::<u32>().map_err(|_| format!("{bytes:?} is no number of bytes below 4 GiB"))?.into();
    println!("messages of {bytes} bytes\npairs  a message  at best  datagrams lost");
    for pairs in [1, 2, 4, 8] {
        let (took, lost) = exchange(pairs, bytes).await?;
        let each = took.as_secs_f64() / (2 * MESSAGES) as f64;
        println!("{pairs:5}  {:6.0} ms  {:4.0} ms  {lost:14}", 1e3 * each, 1e3 * at_best(pairs, bytes).as_secs_f64());
    }
    Ok(())
}

/// The seconds of one message on an uplink that loses no packet and is never idle.
fn at_best(pairs: u64, bytes: u64) -> Duration {
    let sending = Duration::from_secs_f64(bytes as f64 * (1.0 + HEADER_BYTES as f64 / PACKET as f64) / RATE as f64);
    // Half of the pairs send in one direction, the others in the other.
    (sending * pairs as u32 / 2).max(sending + 2 * LATENCY)
}

/// The time in which all pairs send all their messages, and the number of datagrams that a full queue dropped.
async fn exchange(pairs: u64, bytes: u64) -> Result<(Duration, u64), Failure> {
    let emulator = Emulator::start(Ipv4Addr::LOCALHOST.into(), 0)?;
    let link = |name| emulator.add_link(LinkSpec::new(name, Some(RATE), LATENCY));
    // Out of one home, into the other.
    let (there, back) = ([link("a, out"), link("b, in")], [link("b, out"), link("a, in")]);
    let options = || EndpointOptions { pinned: true, ..EndpointOptions::new() };
    let mut ends = Vec::new();
    for _ in 0..pairs {
        let (one, other) = (Endpoint::bind(options()).await?, Endpoint::bind(options()).await?);
        let [from, mut to] = [one.addr(), other.addr()];
        to.addrs = vec![emulator.connect_peers(from.addrs[0], to.addrs[0], there.to_vec(), back.to_vec())?.0];
        let (calling, called) = tokio::join!(one.connect(&to), other.accept());
        ends.push((one, other, calling?, called.ok_or("the endpoint is closed")?));
    }
    let start = Instant::now();
    let talks = ends.into_iter().map(|(one, other, calling, called)| {
        tokio::spawn(async move {
            let talked = tokio::try_join!(talk(calling, true, bytes), talk(called, false, bytes)).map(|_| ());
            // An endpoint must stay open until both sides are done.
            drop((one, other));
            talked
        })
    });
    for talk in talks.collect::<Vec<_>>() {
        talk.await??;
    }
    let took = start.elapsed();
    Ok((took, emulator.report().links.iter().map(|link| link.overflowed).sum()))
}

/// One side of a pair.
async fn talk(
    (connection, mut lanes): (Connection, Lanes),
    first: bool,
    bytes: u64,
) -> Result<(Connection, Lanes), Failure> {
    let payload = [Bytes::from(vec![0; bytes as usize])];
    for i in 0..2 * MESSAGES {
        if (i % 2 == 0) == first {
            connection.send(Lane::Tensors, b"", &payload).await?;
        } else {
            lanes.tensors.next().await?.ok_or("the other side is gone")?.read(bytes).await?;
        }
    }
    Ok((connection, lanes))
}
