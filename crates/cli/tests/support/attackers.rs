//! Strangers on this machine that attack a broker. They know its address and its key, which are in every ticket, and
//! no secret.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use fusionllm_protocol::{FromPeer, Hello, VERSION, encode};
use fusionllm_transport::{ALPN, Lane, Ticket, WIRE_VERSION};
use iroh::endpoint::{Connection, SendStream, presets};
use iroh::{Endpoint, EndpointAddr, PublicKey, TransportAddr};
use tokio::runtime::Runtime;

/// An attack of strangers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attack {
    /// They connect, say hello without the ticket's secret, are refused, and come again.
    Strangers,
    /// They begin handshakes under the addresses of others, and read no answer.
    Forged,
    /// They connect, and send one byte of a message now and then.
    Slow,
}

impl Attack {
    pub(crate) const ALL: [Self; 3] = [Self::Strangers, Self::Forged, Self::Slow];
}

/// Connections under one key. The broker takes 8.
const PER_KEY: usize = 8;

/// Keys of strangers.
const KEYS: usize = 8;

/// First datagrams of connections that are sent again and again.
const DATAGRAMS: usize = 200;

/// Addresses that they are sent from.
const SENDERS: usize = 99;

/// The longest that a stranger waits for an answer before it connects again.
const HASTE: Duration = Duration::from_millis(250);

/// The longest that it waits for anything else.
const PATIENCE: Duration = Duration::from_secs(15);

/// Attackers that are ready. They count what they have done.
pub(crate) struct Attackers {
    attack: Attack,
    runtime: Runtime,
    broker: EndpointAddr,
    endpoints: Vec<Endpoint>,
    datagrams: Vec<Vec<u8>>,
    done: AtomicU64,
}

impl Attackers {
    pub(crate) fn new(attack: Attack, ticket: &str) -> Self {
        let addr = ticket.parse::<Ticket>().unwrap().addr;
        let port = addr.addrs.iter().find(|a| a.is_ipv4()).unwrap().port();
        let id = PublicKey::from_bytes(addr.key.as_bytes()).unwrap();
        let at = |addr: SocketAddr| EndpointAddr::from_parts(id, [TransportAddr::Ip(addr)]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (endpoints, datagrams) = runtime.block_on(async {
            let mut endpoints = Vec::new();
            for _ in 0..KEYS {
                endpoints.push(endpoint().await);
            }
            let forge = attack == Attack::Forged;
            let datagrams = if forge { first_datagrams(&endpoints[0], at).await } else { Vec::new() };
            (endpoints, datagrams)
        });
        let broker = at((Ipv4Addr::LOCALHOST, port).into());
        Self { attack, runtime, broker, endpoints, datagrams, done: AtomicU64::new(0) }
    }

    /// Connections tried, packets sent, or bytes sent, so far.
    pub(crate) fn done(&self) -> u64 {
        self.done.load(Relaxed)
    }

    /// Attacks until `stop`. `rate` is connections or packets per second, or the number of slow connections.
    pub(crate) fn run(&self, rate: f64, stop: &AtomicBool) {
        self.runtime.block_on(async {
            match self.attack {
                Attack::Strangers => self.connect_again_and_again(rate, stop).await,
                Attack::Forged => self.send_forged(rate, stop).await,
                Attack::Slow => self.send_slowly(rate as usize, stop).await,
            }
        });
    }

    /// Many strangers at once, each of which begins again as soon as it is refused or has waited for [`HASTE`], but no
    /// more than `rate` per second.
    async fn connect_again_and_again(&self, rate: f64, stop: &AtomicBool) {
        let (begun, tickets) = (Instant::now(), AtomicU64::new(0));
        let strangers = self.endpoints.iter().flat_map(|endpoint| [endpoint; PER_KEY]).map(async |endpoint| {
            while !stop.load(Relaxed) {
                let turn = tickets.fetch_add(1, Relaxed) as f64 / rate;
                tokio::time::sleep_until((begun + Duration::from_secs_f64(turn)).into()).await;
                let _ = tokio::time::timeout(HASTE, self.is_refused(endpoint)).await;
                self.done.fetch_add(1, Relaxed);
            }
        });
        join_all(strangers).await;
    }

    async fn is_refused(&self, endpoint: &Endpoint) -> Option<()> {
        let connection = endpoint.connect(self.broker.clone(), ALPN).await.ok()?;
        let mut lanes = open_lanes(&connection).await?;
        lanes[0].write_all(&hello()).await.ok()?;
        let mut streams = Vec::new();
        loop {
            let mut stream = connection.accept_uni().await.ok()?;
            let mut prelude = [0; 7];
            stream.read_exact(&mut prelude).await.ok()?;
            if prelude[5] == 0 {
                // The answer says that it is refused. It need not know why.
                stream.read_exact(&mut [0; 13]).await.ok()?;
                connection.close(0u32.into(), b"");
                return Some(());
            }
            streams.push(stream);
        }
    }

    /// Linux lets a process send from any address of this machine, and gives it more than sixteen million.
    async fn send_forged(&self, rate: f64, stop: &AtomicBool) {
        let senders: Vec<UdpSocket> = (0..SENDERS as u8).map(sender).collect();
        let to: Vec<SocketAddr> = self.broker.ip_addrs().copied().collect();
        let (begun, mut sent) = (Instant::now(), 0u64);
        let mut looks = tokio::time::interval(Duration::from_millis(5));
        while !stop.load(Relaxed) {
            looks.tick().await;
            while (sent as f64) < rate * begun.elapsed().as_secs_f64() {
                let datagram = &self.datagrams[sent as usize % DATAGRAMS];
                // `DATAGRAMS` and `SENDERS` have no common factor, so all pairs come.
                let _ = senders[sent as usize % SENDERS].send_to(datagram, to[0]);
                sent += 1;
            }
            self.done.fetch_max(sent, Relaxed);
        }
    }

    async fn send_slowly(&self, connections: usize, stop: &AtomicBool) {
        let places = self.endpoints.iter().cycle().take(connections.min(KEYS * PER_KEY));
        join_all(places.map(async |endpoint| {
            while !stop.load(Relaxed) {
                if self.drips(endpoint, stop).await.is_none() {
                    // The broker has closed the connection.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }))
        .await;
    }

    /// Sends a hello byte by byte, until the broker has had enough.
    async fn drips(&self, endpoint: &Endpoint, stop: &AtomicBool) -> Option<()> {
        let connected = tokio::time::timeout(PATIENCE, endpoint.connect(self.broker.clone(), ALPN)).await;
        let connection = connected.ok()?.ok()?;
        let mut lanes = open_lanes(&connection).await?;
        let mut now_and_then = tokio::time::interval(Duration::from_millis(200));
        for byte in hello() {
            now_and_then.tick().await;
            if stop.load(Relaxed) {
                break;
            }
            lanes[0].write_all(&[byte]).await.ok()?;
            self.done.fetch_add(1, Relaxed);
        }
        Some(())
    }
}

async fn endpoint() -> Endpoint {
    let builder = Endpoint::builder(presets::Minimal).alpns(vec![ALPN.to_vec()]).clear_ip_transports();
    builder.bind_addr((Ipv4Addr::LOCALHOST, 0)).unwrap().bind().await.unwrap()
}

/// Opens all streams, and returns the first of each lane.
async fn open_lanes(connection: &Connection) -> Option<[SendStream; 3]> {
    let mut first = Vec::new();
    for lane in Lane::ALL {
        for number in 0..lane.streams() {
            let mut stream = connection.open_uni().await.ok()?;
            stream.write_all(&[b'F', b'L', b'L', b'M', WIRE_VERSION, lane as u8, number as u8]).await.ok()?;
            if number == 0 {
                first.push(stream);
            }
        }
    }
    first.try_into().ok()
}

/// A frame with the hello of a joiner that has no ticket.
fn hello() -> Vec<u8> {
    let message = encode(&FromPeer::Hello(Hello {
        version: VERSION,
        secret: [0; 16],
        process: 1,
        name: "stranger".into(),
        backend: "cpu".into(),
        device: "cpu".into(),
        slow_bf16: false,
        processor: None,
        addr: Vec::new(),
    }));
    let message = message.unwrap();
    // A payload's block begins with the number of its streams.
    [&0u32.to_le_bytes()[..], &(message.len() as u64).to_le_bytes(), &[1], &message].concat()
}

/// The first datagrams of connections to the broker, each of another connection. They go to a socket that never
/// answers.
async fn first_datagrams(endpoint: &Endpoint, at: impl Fn(SocketAddr) -> EndpointAddr) -> Vec<Vec<u8>> {
    let sink = tokio::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let sink_at = at(sink.local_addr().unwrap());
    // Iroh can drop the first datagram of many, so it dials until all have come.
    let dialling = (0..DATAGRAMS).map(|_| {
        let (endpoint, sink_at) = (endpoint.clone(), sink_at.clone());
        tokio::spawn(async move { while endpoint.connect(sink_at.clone(), ALPN).await.is_err() {} })
    });
    let dialling: Vec<_> = dialling.collect();
    let (mut datagrams, mut buffer) = (BTreeMap::new(), [0; 2000]);
    while datagrams.len() < DATAGRAMS {
        let (length, _) = sink.recv_from(&mut buffer).await.unwrap();
        // RFC 9000, section 17.2: the destination's connection ID stands behind its length, in byte 5.
        let id = buffer[6..6 + usize::from(buffer[5])].to_vec();
        datagrams.entry(id).or_insert_with(|| buffer[..length].to_vec());
    }
    dialling.iter().for_each(|dial| dial.abort());
    datagrams.into_values().collect()
}

/// A socket with an address of its own, where the system gives this machine more than one.
fn sender(i: u8) -> UdpSocket {
    let own = Ipv4Addr::new(127, 77, i, 1);
    UdpSocket::bind((own, 0)).or_else(|_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))).unwrap()
}

/// Runs all of them at once on this thread.
async fn join_all(futures: impl Iterator<Item = impl Future<Output = ()>>) {
    let mut running: Vec<_> = futures.map(Box::pin).collect();
    std::future::poll_fn(|cx| {
        running.retain_mut(|future| future.as_mut().poll(cx).is_pending());
        if running.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}
