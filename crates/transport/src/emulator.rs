//! Slow links on one machine: a forwarder of UDP datagrams between peers that do not know of it.
//!
//! For each pair of peers the emulator has two sockets. One stands for the second peer as the first
//! sees it, the other for the first as the second sees it:
//!
//! ```text
//!            ┌─ "b, as a sees it" ─▶ links from a to b ─▶ "a, as b sees it" ─┐
//!   peer a ◀─┤                                                               ├─▶ peer b
//!            └─ "b, as a sees it" ◀─ links from b to a ◀─ "a, as b sees it" ─┘
//! ```
//!
//! A datagram takes its pair's links one after the other; each sends at its rate what waits in its
//! bounded queue and delays it by its latency ([`Network`] is this part, free of sockets and
//! clocks). A link may belong to several pairs, as a home's uplink does. The peers must be
//! [pinned](crate::EndpointOptions::pinned), or they would find each other past the emulator.

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
use tracing::error;

use crate::batch::{Bunch, Reader};

pub use network::{Delivery, HEADERS, LinkId, LinkSpec, LinkStats, Network, RouteId};

/// A running emulator. It has a thread of its own, which ends when this is dropped. The links given
/// to its methods must be its own.
#[derive(Debug)]
pub struct Emulator {
    shared: Arc<Shared>,
    registry: Registry,
    bind: IpAddr,
    thread: Option<thread::JoinHandle<()>>,
}

/// What an emulator has done, and whether it did it on time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What every link has carried, in the order in which they were added.
    pub links: Vec<LinkStats>,
    /// Datagrams handed to the peers.
    pub delivered: u64,
    /// Those handed over more than [`LATE`] after they were due.
    pub late: u64,
    /// The longest delay of any beyond its due time.
    pub latest: Duration,
    /// Datagrams that the system refused to send.
    pub unsent: u64,
    /// Datagrams that the system threw away because the emulator or a peer did not fetch them in
    /// time. `None` where the system does not tell (other than Linux).
    pub overrun: Option<u64>,
    /// Datagrams from elsewhere than the peer that a socket is for; they are ignored.
    pub strangers: u64,
}

/// A datagram later than this counts as late.
pub const LATE: Duration = Duration::from_millis(1);

impl Report {
    /// Whether the links were as slow as they should be and not slower: nothing lost to this
    /// machine's own load, and at most one datagram in a hundred late.
    pub fn kept_up(&self) -> bool {
        self.unsent == 0 && self.overrun.unwrap_or(0) == 0 && self.late <= self.delivered / 100
    }
}

impl Emulator {
    /// Starts an emulator whose sockets are on `bind`, usually 127.0.0.1. `seed` decides which
    /// datagrams lossy links lose.
    ///
    /// # Errors
    /// Those of the system, if it has no thread or no event queue to give.
    pub fn start(bind: IpAddr, seed: u64) -> io::Result<Self> {
        let poll = Poll::new()?;
        let registry = poll.registry().try_clone()?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                network: Network::new(seed),
                ports: Vec::new(),
                exits: Vec::new(),
                report: Report::default(),
            }),
            stop: AtomicBool::new(false),
            waker: Waker::new(poll.registry(), WAKE)?,
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

    /// Joins the peers that listen at `a` and `b` over the links that lead from `a` to `b` and those
    /// that lead back. Yields the address at which `a` finds `b`, and that at which `b` finds `a`.
    ///
    /// # Errors
    /// Those of the system, as when there are too many open files: two are needed for each pair.
    pub fn join(
        &self,
        a: SocketAddr,
        b: SocketAddr,
        there: Vec<LinkId>,
        back: Vec<LinkId>,
    ) -> io::Result<(SocketAddr, SocketAddr)> {
        let (mut b_for_a, mut a_for_b) = (self.socket()?, self.socket()?);
        let addrs = (b_for_a.local_addr()?, a_for_b.local_addr()?);
        // Locked until the ports are in place, for datagrams may come as soon as they are known.
        let mut state = self.shared.lock();
        let (first, second) = (state.ports.len(), state.ports.len() + 1);
        let registry = &self.registry;
        registry.register(&mut b_for_a, Token(first), Interest::READABLE)?;
        registry.register(&mut a_for_b, Token(second), Interest::READABLE)?;
        for (socket, peer, links, exit) in [(b_for_a, a, there, second), (a_for_b, b, back, first)] {
            let route = state.network.add_route(links);
            state.exits.push(exit);
            let batches = UdpSocketState::new((&socket).into())?;
            state.ports.push(Port { socket, peer, route, pressed: None, state: batches, leaving: Bunch::default() });
        }
        Ok(addrs)
    }

    /// Cuts a link: all that is on it and all that comes to it is lost.
    pub fn cut(&self, link: LinkId) {
        self.shared.lock().network.cut(self.shared.now(), link);
    }

    /// Mends a cut link.
    pub fn heal(&self, link: LinkId) {
        self.shared.lock().network.heal(self.shared.now(), link);
    }

    /// Lets a link lose each datagram with this probability, from 0 to 1.
    pub fn set_loss(&self, link: LinkId, probability: f64) {
        let now = self.shared.now();
        self.shared.lock().network.set_loss(now, link, probability);
    }

    /// What has happened so far.
    pub fn report(&self) -> Report {
        let mut state = self.shared.lock();
        let addrs = state.ports.iter().flat_map(|port| {
            let own = port.socket.local_addr().ok();
            own.into_iter().chain([port.peer])
        });
        let overrun = overrun(&addrs.collect::<Vec<_>>());
        Report { links: state.network.stats(self.shared.now()), overrun, ..state.report.clone() }
    }

    fn socket(&self) -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind(SocketAddr::new(self.bind, 0))?;
        // The system may grant less; the usual 200 KiB overflow in the pause of a busy machine.
        let _ = socket2::SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER);
        Ok(socket)
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        // Without a wake-up the thread would not be joined, so it is left to the process's end.
        if self.shared.waker.wake().is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

const WAKE: Token = Token(usize::MAX);
const RECEIVE_BUFFER: usize = 4 << 20;

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
    /// The port through which what took a route leaves, in the order in which routes were added.
    exits: Vec<usize>,
    report: Report,
}

/// One peer as one other sees it.
#[derive(Debug)]
struct Port {
    socket: UdpSocket,
    /// The other, alone in using this socket.
    peer: SocketAddr,
    /// The way of what it sends here.
    route: RouteId,
    /// Since when there is more to read than was read, if there is.
    pressed: Option<Duration>,
    state: UdpSocketState,
    /// What goes to the peer next.
    leaving: Bunch,
}

/// The emulator's thread.
struct Forwarder {
    shared: Arc<Shared>,
    poll: Poll,
    /// Ports that may have more to read. They are told of once, when something comes.
    readable: VecDeque<usize>,
}

/// Datagrams read from one port before others get their turn.
const BATCH: usize = 32;
/// The event queue waits in steps of this; what is shorter is slept through.
const STEP: Duration = Duration::from_millis(1);
/// Longest sleep in which nothing is read. What is due within the next is delivered before it, so that datagrams are as often early as late and come in bunches, as they do from
/// real network cards: to wake for each would take time from those that compute on this machine.
const NAP: Duration = Duration::from_micros(250);

impl Forwarder {
    fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let mut reader = Reader::new();
        let mut due = None;
        loop {
            let gap = due.map(|due: Duration| due.saturating_sub(self.shared.now()));
            let timeout = match gap {
                _ if !self.readable.is_empty() => Some(Duration::ZERO),
                Some(gap) if gap < STEP => Some(Duration::ZERO),
                Some(gap) => Some(Duration::from_millis(gap.as_millis() as u64)),
                None => None,
            };
            match self.poll.poll(&mut events, timeout) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    error!(%error, "the link emulator stopped: waiting for datagrams failed");
                    return;
                }
            }
            if self.shared.stop.load(Relaxed) {
                return;
            }
            let ports = events.iter().map(|event| event.token()).filter(|token| *token != WAKE);
            self.readable.extend(ports.map(|Token(port)| port));
            if let Some(gap) = gap
                && self.readable.is_empty()
                && gap > Duration::ZERO
                && gap < STEP
            {
                thread::sleep(gap.min(NAP));
            }
            due = self.pass(&mut reader);
        }
    }

    /// Reads what has come and sends what is due. Yields when the next is due.
    fn pass(&mut self, reader: &mut Reader) -> Option<Duration> {
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
        let mut leaving = Vec::new();
        loop {
            let now = self.shared.now();
            let Some(delivery) = state.network.deliver_early(now, now + NAP) else { break };
            leaving.extend(state.write(&delivery, &self.shared));
        }
        for exit in leaving {
            state.ports[exit].flush(&mut state.report);
        }
        state.network.next_due()
    }
}

impl State {
    /// Whether there may be more.
    fn read(&mut self, port: usize, shared: &Shared, reader: &mut Reader) -> bool {
        let Some(port) = self.ports.get_mut(port) else {
            return false;
        };
        let (mut bytes, mut count) = (0, 0);
        let mut more = true;
        while more && count < BATCH {
            if let Err(error) = reader.fetch(&port.state, (&port.socket).into()) {
                more = error.kind() != io::ErrorKind::WouldBlock;
                // Some systems report here that an earlier datagram found nobody.
                count += 1;
            }
            let now = shared.now();
            while let Some((from, datagram)) = reader.next() {
                count += 1;
                if from != port.peer {
                    self.report.strangers += 1;
                    continue;
                }
                bytes += datagram.len() as u64 + HEADERS;
                self.network.send(now, port.route, datagram.to_vec());
            }
        }
        let now = shared.now();
        if let Some(since) = port.pressed {
            self.network.pressed(since, now, port.route, bytes);
        }
        port.pressed = more.then_some(now);
        more
    }

    /// Yields the port that is to be flushed, if it was not to be before.
    fn write(&mut self, delivery: &Delivery, shared: &Shared) -> Option<usize> {
        let exit = *self.exits.get(delivery.route.index())?;
        let port = self.ports.get_mut(exit)?;
        if !port.leaving.takes(delivery.datagram.len(), port.state.max_gso_segments().get()) {
            port.flush(&mut self.report);
        }
        port.leaving.add(&delivery.datagram);
        let lateness = shared.now().saturating_sub(delivery.due);
        self.report.late += u64::from(lateness > LATE);
        self.report.latest = self.report.latest.max(lateness);
        (port.leaving.count == 1).then_some(exit)
    }
}

impl Port {
    /// Hands over what goes to the peer.
    fn flush(&mut self, report: &mut Report) {
        let Bunch { bytes, segment, count } = &self.leaving;
        if *count == 0 {
            return;
        }
        let (destination, segment_size) = (self.peer, Some(*segment));
        let transmit = Transmit { destination, ecn: None, contents: bytes, segment_size, src_ip: None };
        match self.state.try_send((&self.socket).into(), &transmit) {
            Ok(()) => report.delivered += *count as u64,
            Err(_) => report.unsent += *count as u64,
        }
        self.leaving.clear();
    }
}

/// How many datagrams the system has thrown away at these addresses since they were opened.
#[cfg(target_os = "linux")]
fn overrun(addrs: &[SocketAddr]) -> Option<u64> {
    let v4 = std::fs::read_to_string("/proc/self/net/udp").ok()?;
    // Missing where IPv6 is switched off.
    let v6 = std::fs::read_to_string("/proc/self/net/udp6").unwrap_or_default();
    Some(linux_drops(v4.lines().chain(v6.lines()), addrs))
}

#[cfg(not(target_os = "linux"))]
fn overrun(_: &[SocketAddr]) -> Option<u64> {
    None
}

/// Sums the last column ("drops") of `/proc/net/udp` over the sockets of these ports. Addresses are
/// not compared: a port that two sockets share is counted in full.
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
    fn a_socket_nobody_reads_shows_up_as_overrun() {
        let full = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let addr = full.local_addr().unwrap();
        let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let before = overrun(&[addr]).unwrap();
        for _ in 0..20_000 {
            sender.send_to(&[0; 1400], addr).unwrap();
        }
        assert!(overrun(&[addr]).unwrap() > before);
    }
}
