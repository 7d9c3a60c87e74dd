//! Shared uplink: the share of an uplink's bandwidth that several connections reach together.
//!
//! Two homes have an emulated uplink of 8 Mbps and 20 ms each, or what the arguments say. 1, 2, 4 and 8 pairs of peers
//! send messages at the same time. To and fro, each side answers with a message, as stages of a pipeline do. One way,
//! all first peers send without a pause. Both ways, half of the pairs send the other way, as replicas do with their
//! gradients.
//!
//! "Of best" is the time in which the messages could have crossed over the time that they took. It counts an idle
//! uplink as lost even if nothing waits for it, as when all pairs happen to send in the same direction. "Used" counts
//! only the time in which a message waits: the time that the messages need over the time in which any was on its way.
//!
//! ```console
//! $ cargo bench -p fusionllm-transport --bench shared_uplink [-- BYTES [MBPS [MILLISECONDS]]]
//! ```

use std::error::Error;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fusionllm_transport::emulator::{Emulator, HEADER_BYTES, LinkSpec};
use fusionllm_transport::{Connection, Endpoint, EndpointOptions, Lane, Lanes};

type Failure = Box<dyn Error + Send + Sync>;

/// Messages of each side to and fro. One way, a pair sends twice as many.
const MESSAGES: usize = 20;
/// Bytes of QUIC's largest datagram.
const PACKET: u64 = 1_452;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Pattern {
    ToAndFro,
    OneWay,
    BothWays,
}

/// An uplink.
#[derive(Debug, Clone, Copy)]
struct Line {
    /// Bytes per second.
    rate: u64,
    latency: Duration,
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1).filter(|a| a != "--bench");
    let mut number = |default: u32| match arguments.next() {
        Some(text) => text.parse::<u32>().map_err(|_| format!("{text:?} is no number below 2^32")),
        None => Ok(default),
    };
    let (bytes, mbps) = (u64::from(number(65_536)?), u64::from(number(8)?));
    let line = Line { rate: mbps * 1_000_000 / 8, latency: Duration::from_millis(u64::from(number(20)?)) };
    println!(
        "messages of {bytes} bytes, uplinks of {mbps} Mbps and {:?}\npattern     pairs  a message  at best  of best  used  datagrams lost",
        line.latency,
    );
    for (pattern, name) in
        [(Pattern::ToAndFro, "to and fro"), (Pattern::OneWay, "one way"), (Pattern::BothWays, "both ways")]
    {
        for pairs in [1, 2, 4, 8] {
            let Exchange { took, used, lost } = exchange(pattern, pairs, bytes, line).await?;
            let [took, best] = [took, at_best(pattern, pairs, bytes, line)].map(|all| all.as_secs_f64());
            let [each, best_each] = [took, best].map(|all| 1e3 * all / (2 * MESSAGES) as f64);
            let of_best = best / took;
            println!("{name:10}  {pairs:5}  {each:6.0} ms  {best_each:4.0} ms  {of_best:7.2}  {used:4.2}  {lost:14}");
        }
    }
    Ok(())
}

/// The time that one message takes of an uplink.
fn sending(bytes: u64, rate: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 * (1.0 + HEADER_BYTES as f64 / PACKET as f64) / rate as f64)
}

/// The time of all messages on an uplink that loses no packet and is never idle.
fn at_best(pattern: Pattern, pairs: u64, bytes: u64, Line { rate, latency }: Line) -> Duration {
    let sending = sending(bytes, rate);
    let messages = 2 * MESSAGES as u32;
    match pattern {
        // Half of the pairs send in one direction, the others in the other.
        Pattern::ToAndFro => (sending * pairs as u32 / 2).max(sending + 2 * latency) * messages,
        Pattern::OneWay => sending * pairs as u32 * messages + 2 * latency,
        Pattern::BothWays => sending * pairs.div_ceil(2) as u32 * messages + 2 * latency,
    }
}

/// The result of one exchange, in which all pairs sent all their messages.
struct Exchange {
    took: Duration,
    /// The share of the uplinks that was used while messages waited.
    used: f64,
    /// Datagrams that a full queue dropped.
    lost: u64,
}

async fn exchange(pattern: Pattern, pairs: u64, bytes: u64, line: Line) -> Result<Exchange, Failure> {
    let emulator = Emulator::start(Ipv4Addr::LOCALHOST.into(), 0)?;
    let link = |name| emulator.add_link(LinkSpec::new(name, Some(line.rate), line.latency));
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
    let talks = ends.into_iter().enumerate().map(|(pair, (one, other, calling, called))| {
        // The caller sends first.
        let there = pattern != Pattern::BothWays || pair % 2 == 0;
        tokio::spawn(async move {
            let (first, second) = (talk(calling, pattern, there, bytes), talk(called, pattern, !there, bytes));
            let (one_did, other_did) = tokio::try_join!(first, second)?;
            // An endpoint must stay open until both sides are done.
            drop((one, other));
            Ok::<_, Failure>([(one_did.sent, other_did.received), (other_did.sent, one_did.received)])
        })
    });
    let mut ways = [const { Vec::new() }; 2];
    for talk in talks.collect::<Vec<_>>() {
        for (way, (sent, received)) in ways.iter_mut().zip(talk.await??) {
            way.extend(sent.into_iter().zip(received));
        }
    }
    let took = start.elapsed();
    let messages = ways.iter().map(Vec::len).sum::<usize>();
    let waited = ways.map(|way| busy(way, line)).iter().sum::<Duration>();
    let used = sending(bytes, line.rate).as_secs_f64() * messages as f64 / waited.as_secs_f64();
    let lost = emulator.report().links.iter().map(|link| link.overflowed).sum();
    Ok(Exchange { took, used, lost })
}

/// The time in which any of these messages waited for the uplink. The last bits take the latency to arrive.
fn busy(mut messages: Vec<(Instant, Instant)>, Line { latency, .. }: Line) -> Duration {
    messages.sort();
    let (mut sum, mut until) = (Duration::ZERO, None::<Instant>);
    for (sent, received) in messages {
        let left = received - 2 * latency;
        let since = until.map_or(sent, |until| until.max(sent));
        sum += left.saturating_duration_since(since);
        until = until.max(Some(left));
    }
    sum
}

/// The times of one side of a pair.
struct Talked {
    sent: Vec<Instant>,
    received: Vec<Instant>,
    /// The connection stays open until the other side is done, too.
    _open: (Connection, Lanes),
}

async fn talk(
    (connection, mut lanes): (Connection, Lanes),
    pattern: Pattern,
    first: bool,
    bytes: u64,
) -> Result<Talked, Failure> {
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    let payload = [Bytes::from(vec![0; bytes as usize])];
    for i in 0..2 * MESSAGES {
        if (pattern != Pattern::ToAndFro || i % 2 == 0) == first {
            sent.push(Instant::now());
            connection.send(Lane::Tensors, b"", &payload).await?;
        } else {
            lanes.tensors.next().await?.ok_or("the other side is gone")?.read(bytes).await?;
            received.push(Instant::now());
        }
    }
    Ok(Talked { sent, received, _open: (connection, lanes) })
}
