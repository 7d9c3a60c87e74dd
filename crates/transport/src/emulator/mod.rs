//! Slow links on one machine: a forwarder of UDP datagrams between peers that do not notice it.
//!
//! The emulator opens two sockets for each pair of peers. The first peer sees one socket as the second peer, and the
//! second peer sees the other socket as the first:
//!
//! ```text
//!            ┌─ "b, as a sees it" ─▶ links from a to b ─▶ "a, as b sees it" ─┐
//!   peer a ◀─┤                                                               ├─▶ peer b
//!            └─ "b, as a sees it" ◀─ links from b to a ◀─ "a, as b sees it" ─┘
//! ```
//!
//! A datagram crosses its pair's links one after another. Each link sends its bounded queue at its rate and adds its
//! latency. [`Network`] is this part, without sockets and clocks. Pairs may share a link, as a home's uplink is
//! shared. The peers must be [pinned](crate::EndpointOptions::pinned), or they would bypass the emulator.

mod link;
mod network;

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use mio::net::UdpSocket;
use mio::{Events, Interest, Poll, Registry, Token, Waker};
use noq_udp::{Transmit, UdpSocketState};

use crate::batch::{BatchReader, SendBatch};

pub use link::{HEADER_BYTES, LinkSpec, LinkStats, MIN_QUEUE_BYTES, QUEUE_TIME};
pub use network::{Delivery, LinkId, Network, RouteId};

/// A running emulator. Dropping it ends its thread. Its methods take only links of the same emulator.
#[derive(Debug)]
pub struct Emulator {
    shared: Arc<Shared>,
    registry: Registry,
    bind: IpAddr,
    thread: Option<thread::JoinHandle<()>>,
}

/// An emulator's counters, and whether it was on time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EmulatorReport {
    /// The counters of every link, in the order of [`Emulator::add_link`].
    pub links: Vec<LinkStats>,
    /// Datagrams handed to the peers.
    pub delivered: u64,
    /// Datagrams delivered more than [`LATE_AFTER`] after they were due.
    pub late: u64,
    /// The longest delay of a datagram beyond its due time.
    pub max_lateness: Duration,
    /// Datagrams that the system refused to send.
    pub unsent: u64,
    /// Datagrams that the system dropped because the emulator or a peer read too slowly. `None` where the system does
    /// not report them (other than Linux).
    pub socket_drops: Option<u64>,
    /// Datagrams from other senders than the socket's peer. They are ignored.
    pub foreign: u64,
    /// The reason why nothing is forwarded any more, if so.
    pub failure: Option<String>,
}

/// Datagrams delivered later than this after their due time count as late.
pub const LATE_AFTER: Duration = Duration::from_millis(1);

impl EmulatorReport {
    /// Whether this machine was fast enough for the links: it dropped nothing, and at most 1 % was late.
    pub fn kept_up(&self) -> bool {
        self.unsent == 0 && self.socket_drops.unwrap_or(0) == 0 && self.late <= self.delivered / 100
    }
}

impl Emulator {
    /// Starts an emulator whose sockets use the address `bind`, usually 127.0.0.1. `seed` decides which datagrams
    /// lossy links drop.
    ///
    /// # Errors
    /// The system cannot start a thread or create an event queue.
    pub fn start(bind: IpAddr, seed: u64) -> io::Result<Self> {
        let poll = Poll::new()?;
        let registry = poll.registry().try_clone()?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                network: Network::new(seed),
                ports: Vec::new(),
                exits: Vec::new(),
                report: EmulatorReport::default(),
            }),
            stop: AtomicBool::new(false),
            waker: Waker::new(poll.registry(), WAKE_TOKEN)?,
            start: Instant::now(),
        });
        let forwarder = Forwarder { shared: shared.clone(), poll, readable: VecDeque::new() };
        let thread = thread::Builder::new().name("link emulator".to_owned()).spawn(|| forwarder.run())?;
        Ok(Self { shared, registry, bind, thread: Some(thread) })
    }

    /// Adds a link.
    pub fn add_link(&self, spec: LinkSpec) -> LinkId {
        self.shared.lock().network.add_link(spec)
    }

    /// Connects the peers that listen at `a` and `b`: datagrams from `a` to `b` cross `there`, the others `back`.
    /// Returns the address at which `a` reaches `b`, and the address at which `b` reaches `a`.
    ///
    /// # Errors
    /// The system cannot open two more sockets, for example at its limit of open files.
    pub fn connect_peers(
        &self,
        a: SocketAddr,
        b: SocketAddr,
        there: Vec<LinkId>,
        back: Vec<LinkId>,
    ) -> io::Result<(SocketAddr, SocketAddr)> {
        let (mut b_for_a, mut a_for_b) = (self.socket()?, self.socket()?);
        let addrs = (b_for_a.local_addr()?, a_for_b.local_addr()?);
        // The lock is held until the ports exist: datagrams may arrive as soon as the sockets are registered.
        let mut state = self.shared.lock();
        let (first, second) = (state.ports.len(), state.ports.len() + 1);
        let registry = &self.registry;
        registry.register(&mut b_for_a, Token(first), Interest::READABLE)?;
        registry.register(&mut a_for_b, Token(second), Interest::READABLE)?;
        for (socket, peer, links, exit) in [(b_for_a, a, there, second), (a_for_b, b, back, first)] {
            let route = state.network.add_route(links);
            state.exits.push(exit);
            let batching = UdpSocketState::new((&socket).into())?;
            let outgoing = SendBatch::default();
            state.ports.push(Port { socket, peer, route, backlog_since: None, batching, outgoing });
        }
        Ok(addrs)
    }

    /// Cuts a link. Datagrams on it are lost, and so are all that enter it.
    pub fn cut(&self, link: LinkId) {
        self.shared.lock().network.cut(self.shared.now(), link);
    }

    /// Mends a cut link. Its queue is empty.
    pub fn heal(&self, link: LinkId) {
        self.shared.lock().network.heal(self.shared.now(), link);
    }

    /// Sets the probability, from 0 to 1, with which a link drops each datagram.
    pub fn set_loss(&self, link: LinkId, probability: f64) {
        let now = self.shared.now();
        self.shared.lock().network.set_loss(now, link, probability);
    }

    /// The counters so far.
    pub fn report(&self) -> EmulatorReport {
        let mut state = self.shared.lock();
        let addrs = state.ports.iter().flat_map(|port| {
            let own = port.socket.local_addr().ok();
            own.into_iter().chain([port.peer])
        });
        let socket_drops = socket_drops(&addrs.collect::<Vec<_>>());
        EmulatorReport { links: state.network.stats(self.shared.now()), socket_drops, ..state.report.clone() }
    }

    fn socket(&self) -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind(SocketAddr::new(self.bind, 0))?;
        // The system may grant less. The usual 200 KiB overflow while a busy machine runs something else.
        let _ = socket2::SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER_BYTES);
        Ok(socket)
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        // A thread that cannot be woken is not joined. It ends with the process.
        if self.shared.waker.wake().is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

const WAKE_TOKEN: Token = Token(usize::MAX);
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    stop: AtomicBool,
    waker: Waker,
    start: Instant,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

#[derive(Debug)]
struct State {
    network: Network,
    ports: Vec<Port>,
    /// The port at the end of each route, in the order of the routes.
    exits: Vec<usize>,
    report: EmulatorReport,
}

/// One peer as another peer sees it.
#[derive(Debug)]
struct Port {
    socket: UdpSocket,
    /// The only peer that uses this socket.
    peer: SocketAddr,
    /// The route of this peer's datagrams.
    route: RouteId,
    /// The time since which the socket has had more datagrams than were read; `None` if it has none.
    backlog_since: Option<Duration>,
    batching: UdpSocketState,
    /// Datagrams to this peer that the next flush sends.
    outgoing: SendBatch,
}

/// The emulator's thread.
struct Forwarder {
    shared: Arc<Shared>,
    poll: Poll,
    /// Ports that may have more to read. The system announces them only when something arrives.
    readable: VecDeque<usize>,
}

/// Most datagrams read from one port before the next port.
const MAX_READS_PER_PORT: usize = 32;
/// The resolution of the event queue's timeout. The thread sleeps through shorter waits.
const POLL_STEP: Duration = Duration::from_millis(1);
/// Longest sleep between reads. Datagrams due within the next sleep are delivered before it.
///
/// So datagrams are early as often as late, and they arrive in batches, as from real network cards. Waking for each
/// datagram would take processor time from the peers on this machine.
const MAX_SLEEP: Duration = Duration::from_micros(250);

impl Forwarder {
    fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let mut reader = BatchReader::new();
        let mut due = None;
        loop {
            let gap = due.map(|due: Duration| due.saturating_sub(self.shared.now()));
            let timeout = match gap {
                _ if !self.readable.is_empty() => Some(Duration::ZERO),
                Some(gap) if gap < POLL_STEP => Some(Duration::ZERO),
                Some(gap) => Some(Duration::from_millis(gap.as_millis() as u64)),
                None => None,
            };
            match self.poll.poll(&mut events, timeout) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    self.shared.lock().report.failure = Some(error.to_string());
                    return;
                }
            }
            if self.shared.stop.load(Relaxed) {
                return;
            }
            let ports = events.iter().map(|event| event.token()).filter(|token| *token != WAKE_TOKEN);
            self.readable.extend(ports.map(|Token(port)| port));
            if let Some(gap) = gap
                && self.readable.is_empty()
                && gap > Duration::ZERO
                && gap < POLL_STEP
            {
                thread::sleep(gap.min(MAX_SLEEP));
            }
            due = self.forward(&mut reader);
        }
    }

    /// Reads arrived datagrams and sends due ones. Returns when the next is due.
    fn forward(&mut self, reader: &mut BatchReader) -> Option<Duration> {
        let mut state = self.shared.lock();
        let state = &mut *state;
        for _ in 0..self.readable.len() {
            let Some(port) = self.readable.pop_front() else {
                break;
            };
            if state.read(port, &self.shared, reader) {
                self.readable.push_back(port);
            }
        }
        let mut exits = Vec::new();
        loop {
            let now = self.shared.now();
            let Some(delivery) = state.network.deliver_early(now, now + MAX_SLEEP) else { break };
            exits.extend(state.write(&delivery, &self.shared));
        }
        for exit in exits {
            state.ports[exit].flush(&mut state.report);
        }
        state.network.next_due()
    }
}

impl State {
    /// Reads from a port. Returns whether more datagrams may be waiting there.
    fn read(&mut self, port: usize, shared: &Shared, reader: &mut BatchReader) -> bool {
        let Some(port) = self.ports.get_mut(port) else {
            return false;
        };
        let (mut bytes, mut count) = (0, 0);
        let mut more = true;
        while more && count < MAX_READS_PER_PORT {
            if let Err(error) = reader.fetch(&port.batching, (&port.socket).into()) {
                more = error.kind() != io::ErrorKind::WouldBlock;
                // Some systems report here that nobody received an earlier datagram.
                count += 1;
            }
            let now = shared.now();
            while let Some((from, datagram)) = reader.next() {
                count += 1;
                if from != port.peer {
                    self.report.foreign += 1;
                    continue;
                }
                bytes += datagram.len() as u64 + HEADER_BYTES;
                self.network.send(now, port.route, datagram.to_vec());
            }
        }
        let now = shared.now();
        if let Some(since) = port.backlog_since {
            self.network.add_backlog(since, now, port.route, bytes);
        }
        port.backlog_since = more.then_some(now);
        more
    }

    /// Adds a delivery to its port's batch. Returns the port if its batch was empty: the caller flushes it once.
    fn write(&mut self, delivery: &Delivery, shared: &Shared) -> Option<usize> {
        let exit = *self.exits.get(delivery.route.index())?;
        let port = self.ports.get_mut(exit)?;
        if !port.outgoing.accepts(delivery.datagram.len(), port.batching.max_gso_segments().get()) {
            port.flush(&mut self.report);
        }
        port.outgoing.add(&delivery.datagram);
        let lateness = shared.now().saturating_sub(delivery.due);
        self.report.late += u64::from(lateness > LATE_AFTER);
        self.report.max_lateness = self.report.max_lateness.max(lateness);
        (port.outgoing.count == 1).then_some(exit)
    }
}

impl Port {
    /// Sends the batch to the peer.
    fn flush(&mut self, report: &mut EmulatorReport) {
        let SendBatch { bytes, segment, count } = &self.outgoing;
        if *count == 0 {
            return;
        }
        let (destination, segment_size) = (self.peer, Some(*segment));
        let transmit = Transmit { destination, ecn: None, contents: bytes, segment_size, src_ip: None };
        match self.batching.try_send((&self.socket).into(), &transmit) {
            Ok(()) => report.delivered += *count as u64,
            Err(_) => report.unsent += *count as u64,
        }
        self.outgoing.clear();
    }
}

/// Datagrams that the system has dropped at these addresses since they were opened.
#[cfg(target_os = "linux")]
fn socket_drops(addrs: &[SocketAddr]) -> Option<u64> {
    let v4 = std::fs::read_to_string("/proc/self/net/udp").ok()?;
    // The file is missing where IPv6 is disabled.
    let v6 = std::fs::read_to_string("/proc/self/net/udp6").unwrap_or_default();
    Some(linux_drops(v4.lines().chain(v6.lines()), addrs))
}

#[cfg(not(target_os = "linux"))]
fn socket_drops(_: &[SocketAddr]) -> Option<u64> {
    None
}

/// Sums the last column ("drops") of `/proc/net/udp` over the sockets of these ports. Addresses are not compared: if
/// two sockets share a port, both count.
#[cfg(target_os = "linux")]
fn linux_drops<'a>(lines: impl Iterator<Item = &'a str>, addrs: &[SocketAddr]) -> u64 {
    let ports: std::collections::BTreeSet<u16> = addrs.iter().map(SocketAddr::port).collect();
    let drops = lines.filter_map(|line| {
        let local = line.split_whitespace().nth(1)?;
        let port = u16::from_str_radix(local.rsplit(':').next()?, 16).ok()?;
        let drops = line.split_whitespace().last()?.parse::<u64>().ok()?;
        ports.contains(&port).then_some(drops)
    });
    drops.sum()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn drops_are_read_from_the_systems_table() {
        let table = "\
   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  442: 0100007F:1F90 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 14357 2 0000000000000000 7
  443: 0100007F:1F91 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 14358 2 0000000000000000 5
  444: 00000000000000000000000001000000:1F92 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 14359 2 0000000000000000 2";
        let addr = |port| SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(linux_drops(table.lines(), &[addr(8080), addr(8082)]), 9);
        assert_eq!(linux_drops(table.lines(), &[addr(1)]), 0);
    }

    #[test]
    fn a_socket_that_nobody_reads_drops_datagrams() {
        let full = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let addr = full.local_addr().unwrap();
        let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let before = socket_drops(&[addr]).unwrap();
        for _ in 0..20_000 {
            sender.send_to(&[0; 1400], addr).unwrap();
        }
        assert!(socket_drops(&[addr]).unwrap() > before);
    }
}
