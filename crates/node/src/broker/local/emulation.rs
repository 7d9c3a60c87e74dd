//! Emulates a testbed on this machine. Peers are processes that talk QUIC, and a forwarder delays their datagrams as
//! the testbed's links would.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use fusionllm_graph::units::rate;
use fusionllm_plan::{Cluster, Line, Link};
use fusionllm_program::PeerId;
use fusionllm_transport::emulator::{Emulator, LinkId, LinkSpec, LinkStats};

use crate::NodeError;

/// The emulated links between processes of this machine. They end when this is dropped.
pub(crate) struct Emulation {
    emulator: Emulator,
    cluster: Cluster,
    broker: SocketAddr,
    peers: Vec<SocketAddr>,
    links: BTreeMap<Line, LinkId>,
    /// The address at which the first peer reaches the second.
    addrs: BTreeMap<(PeerId, PeerId), SocketAddr>,
}

impl Emulation {
    /// Emulates the links of `cluster`. Device `i` listens at `peers[i]`, and the broker at `broker`.
    pub(crate) fn start(cluster: Cluster, broker: SocketAddr, peers: Vec<SocketAddr>) -> Result<Self, NodeError> {
        // No link of a testbed loses datagrams at random, so the seed has no effect.
        let emulator = Emulator::start(Ipv4Addr::LOCALHOST.into(), 0).map_err(NodeError::Emulation)?;
        Ok(Self { emulator, cluster, broker, peers, links: BTreeMap::new(), addrs: BTreeMap::new() })
    }

    /// The address at which `viewer` reaches `target`.
    pub(crate) fn address(&mut self, viewer: PeerId, target: PeerId) -> Result<SocketAddr, NodeError> {
        if !self.addrs.contains_key(&(viewer, target)) {
            let (there, back) = (self.way(viewer, target)?, self.way(target, viewer)?);
            let (a, b) = (self.listens(viewer)?, self.listens(target)?);
            let (b_for_a, a_for_b) = self.emulator.connect_peers(a, b, there, back).map_err(NodeError::Emulation)?;
            self.addrs.insert((viewer, target), b_for_a);
            self.addrs.insert((target, viewer), a_for_b);
        }
        Ok(self.addrs[&(viewer, target)])
    }

    /// The address at which the device named `viewer` reaches the one named `target`.
    pub(crate) fn address_by_name(&mut self, viewer: &str, target: &str) -> Result<SocketAddr, NodeError> {
        match self.cluster.find(viewer).zip(self.cluster.find(target)) {
            Some((viewer, target)) => self.address(viewer, target),
            None => Err(NodeError::State(format!("{viewer:?} or {target:?} is not a device of the testbed"))),
        }
    }

    /// Sentences about links that did not behave as declared.
    pub(crate) fn shortfalls(&self) -> Vec<String> {
        let report = self.emulator.report();
        let (delivered, late) = (report.delivered, report.late);
        let lost = report.unsent + report.socket_drops.unwrap_or(0);
        // A few datagrams are late whenever the machine is busy for a moment.
        let overall = (lost > delivered / 1000 || late > delivered / 20).then(|| {
            format!(
                "this machine did not keep up with the links: of {delivered} datagrams {late} were late, by up to {:.1} ms, and {lost} were lost to its own load; step times are not those of the testbed",
                1e3 * report.max_lateness.as_secs_f64()
            )
        });
        let stopped = report.failure.map(|e| format!("the links stopped: waiting for datagrams failed: {e}"));
        stopped.into_iter().chain(overall).chain(report.links.iter().filter_map(too_fast)).collect()
    }

    /// The lines that a message takes; none between two peers on the same machine.
    fn way(&mut self, from: PeerId, to: PeerId) -> Result<Vec<LinkId>, NodeError> {
        let route = self.cluster.route(from, to).ok_or_else(|| {
            let (from, to) = (self.cluster.name(from), self.cluster.name(to));
            NodeError::input_with_hint(
                format!("the testbed has no link from {from:?} to {to:?}, which the plan needs"),
                "add a [[link]] between them, or uplinks to their sites",
            )
        })?;
        Ok(route.lines().map(|(line, link)| self.link(line, link)).collect())
    }

    fn link(&mut self, line: Line, link: Link) -> LinkId {
        let (emulator, cluster) = (&self.emulator, &self.cluster);
        *self.links.entry(line).or_insert_with(|| {
            let rate = link.bandwidth.is_finite().then_some(link.bandwidth as u64);
            let name = format!("the {}", cluster.line_name(line));
            emulator.add_link(LinkSpec::new(name, rate, Duration::from_secs_f64(link.latency)))
        })
    }

    fn listens(&self, peer: PeerId) -> Result<SocketAddr, NodeError> {
        match peer {
            PeerId::BROKER => Ok(self.broker),
            PeerId(p) => {
                self.peers.get(p as usize).copied().ok_or_else(|| NodeError::State(format!("there is no {peer}")))
            }
        }
    }
}

/// A sentence about a link that is declared faster than this machine can emulate.
fn too_fast(link: &LinkStats) -> Option<String> {
    let (asked, got) = (link.rate? as f64, link.backlog_rate()?);
    (got < 0.9 * asked).then(|| {
        format!(
            "{} is declared faster than this machine can emulate: {} of {} while peers had more to send",
            link.name,
            rate(got),
            rate(asked)
        )
    })
}

/// Free addresses for processes that start soon. If another process takes one before, the peer reports it and ends.
pub(crate) fn free_addresses(count: usize) -> Result<Vec<SocketAddr>, NodeError> {
    let sockets = (0..count).map(|_| UdpSocket::bind((own_loopback(), 0)));
    let addresses = sockets.collect::<io::Result<Vec<_>>>().and_then(|s| s.iter().map(UdpSocket::local_addr).collect());
    addresses.map_err(NodeError::Emulation)
}

/// A loopback address from which no other process, nor the emulator, is given ports, where the system has several.
fn own_loopback() -> Ipv4Addr {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    if cfg!(target_os = "linux") { Ipv4Addr::new(127, 128 | a, b, c) } else { Ipv4Addr::LOCALHOST }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use fusionllm_graph::ops::SgdStep;
    use fusionllm_graph::{Advice, DType, autodiff};
    use fusionllm_models::Gpt2Config;
    use fusionllm_plan::{
        Device, DirectLink, Place, Rates, Schedule, SimulateOptions, Site, Transfer, compile, equal_compute, simulate,
    };
    use fusionllm_program::{Address, Optimizer};
    use fusionllm_transport::emulator::{Network, RouteId};

    use super::*;

    const A: PeerId = PeerId(0);
    const B: PeerId = PeerId(1);
    const C: PeerId = PeerId(2);

    /// a and b are at home behind an uplink, c is alone, and the broker runs with a.
    fn emulation() -> Emulation {
        let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 0.0 };
        let link = |bandwidth| Link { latency: 0.0, bandwidth };
        let device = |name: &str, site| Device { site, ..Device::new(name, rates, 1 << 30) };
        let home = Site { name: "home".into(), inside: Some(link(1e8)), uplink: Some(link(1e6)), downlink: None };
        let line = |from, to| DirectLink { from, to, link: link(1e7) };
        let lines = vec![line(Place::Site(0), Place::Device(2)), line(Place::Device(2), Place::Site(0))];
        let devices = vec![device("a", Some(0)), device("b", Some(0)), device("c", None)];
        let cluster = Cluster::new(devices, vec![home], lines, None).unwrap();
        let addrs = free_addresses(4).unwrap();
        Emulation::start(cluster, addrs[3], addrs[..3].to_vec()).unwrap()
    }

    #[test]
    fn traffic_shares_cards_uplinks_and_declared_links() {
        let mut e = emulation();
        let (ac, bc, ca) = (e.way(A, C).unwrap(), e.way(B, C).unwrap(), e.way(C, A).unwrap());
        assert_eq!((ac.len(), bc.len(), ca.len()), (4, 4, 4));
        assert_ne!(ac[0], bc[0], "each has a network card");
        assert_eq!(ac[1..], bc[1..], "the uplink, the link from the site to c, and c's card");
        assert!(ca.iter().all(|line| !ac.contains(line)), "directions do not disturb each other");
        let ab = e.way(A, B).unwrap();
        assert_eq!((ab.len(), ab[0]), (3, ac[0]), "inside, a's card is the same");
    }

    #[test]
    fn the_broker_uses_the_links_of_its_device() {
        let mut e = emulation();
        assert!(e.way(PeerId::BROKER, A).unwrap().is_empty());
        assert_eq!(e.way(PeerId::BROKER, C).unwrap(), e.way(A, C).unwrap());
        let there = e.address(PeerId::BROKER, C).unwrap();
        assert_eq!(e.address(PeerId::BROKER, C).unwrap(), there, "joined once");
        assert_ne!(e.address(C, PeerId::BROKER).unwrap(), there);
    }

    /// The packets from one device to another.
    struct Pair {
        route: RouteId,
        /// The time from which each may be sent, its message and its bytes.
        waiting: VecDeque<(Duration, usize, usize)>,
        /// The messages of those that have not arrived.
        in_flight: VecDeque<usize>,
    }

    impl Pair {
        /// Sends the next packet if it may be sent. A window limits what is in flight.
        fn send(&mut self, network: &mut Network, now: Duration) -> bool {
            let next = self.waiting.front().filter(|(since, ..)| *since <= now && self.in_flight.len() < 32);
            let Some(&(_, message, bytes)) = next else { return false };
            self.waiting.pop_front();
            self.in_flight.push_back(message);
            network.send(now, self.route, vec![0; bytes]);
            true
        }
    }

    /// When each message arrives in the emulator, if it is sent when it is in the simulator. Times begin at `start`.
    fn emulated(cluster: &Cluster, messages: &[Transfer], start: f64) -> Vec<f64> {
        const PAYLOAD: u64 = 1416;
        const HEADERS: usize = 36;
        let mut network = Network::new(0);
        let mut links = BTreeMap::new();
        let mut by_ends: BTreeMap<(PeerId, PeerId), Pair> = BTreeMap::new();
        for (i, m) in messages.iter().enumerate() {
            let pair = by_ends.entry((m.from, m.to)).or_insert_with(|| {
                let mut link = |(line, link): (Line, Link)| {
                    let (rate, latency) = (Some(link.bandwidth as u64), Duration::from_secs_f64(link.latency));
                    *links.entry(line).or_insert_with(|| network.add_link(LinkSpec::new("", rate, latency)))
                };
                let lines = cluster.route(m.from, m.to).unwrap().lines().map(&mut link).collect();
                Pair { route: network.add_route(lines), waiting: VecDeque::new(), in_flight: VecDeque::new() }
            });
            let since = Duration::from_secs_f64(m.sent - start);
            let sizes = (0..m.bytes).step_by(PAYLOAD as usize).map(|at| (m.bytes - at).min(PAYLOAD) as usize + HEADERS);
            pair.waiting.extend(sizes.map(|bytes| (since, i, bytes)));
        }
        let mut pairs: Vec<Pair> = by_ends.into_values().collect();
        pairs.sort_by_key(|pair| pair.route.index());
        let mut arrived = vec![0.0; messages.len()];
        let mut now = Duration::ZERO;
        loop {
            while let Some(delivery) = network.deliver(now) {
                let message = pairs[delivery.route.index()].in_flight.pop_front().unwrap();
                arrived[message] = start + delivery.due.as_secs_f64();
            }
            // Pairs take turns.
            while pairs.iter_mut().map(|pair| usize::from(pair.send(&mut network, now))).sum::<usize>() > 0 {}
            let waiting = pairs.iter().filter_map(|pair| pair.waiting.front()).map(|(since, ..)| *since);
            match waiting.filter(|since| *since > now).chain(network.next_due()).min() {
                Some(next) => now = next,
                None => break,
            }
        }
        assert!(network.stats(now).iter().all(|s| s.overflowed == 0));
        arrived
    }

    #[test]
    fn eight_devices_exchange_no_more_than_their_cards_carry() {
        let config =
            Gpt2Config { vocab_size: 512, n_positions: 16, n_embd: 64, n_layer: 8, n_head: 2, ..Gpt2Config::default() };
        let graph = config.build(1, 16, DType::F32).unwrap();
        let rates = Rates { matmul: 1e18, convolution: 1e18, memory: 1e18, overhead: 0.0 };
        let inside = Link { latency: 1e-5, bandwidth: 1e9 };
        let hall = Site { name: "hall".into(), inside: Some(inside), uplink: None, downlink: None };
        let device = |i| Device { site: Some(0), ..Device::new(format!("gpu-{i}"), rates, 1 << 30) };
        let cluster = Cluster::new((0..8).map(device).collect(), vec![hall], Vec::new(), None).unwrap();

        // Replicas compute in no time. They send their gradients to the owners, and the owners send new values.
        let names = cluster.devices().iter().map(|d| d.name.clone()).collect::<Vec<_>>();
        let mut plan = equal_compute(&graph, &names[..1], 8, Schedule::GPipe).unwrap();
        (plan.peers, plan.stages[0].peers) = (names, (0..8).collect());
        let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
        let programs = compile(&plan, &graph, &train).unwrap();
        let sgd = Optimizer::Sgd(SgdStep { momentum: 0.9, weight_decay: 0.0, nesterov: false });
        let options = SimulateOptions { record: true, ..SimulateOptions::new(sgd) };
        let simulation = simulate(&programs, &cluster, &options).unwrap();
        let mut messages = simulation.transfers.clone();
        messages.retain(|t| t.from != PeerId::BROKER);
        messages.sort_by(|a, b| a.sent.total_cmp(&b.sent));
        let is_part = |t: &&Transfer| matches!(t.tensor, Address::Part { .. });
        // Some replicas have all new values before others, and begin the next step.
        let earlier = messages.iter().filter(|t| !is_part(t)).map(|t| Transfer {
            sent: t.sent - simulation.step_s,
            arrived: t.arrived - simulation.step_s,
            ..*t
        });
        let messages: Vec<Transfer> = earlier.chain(messages.iter().filter(is_part).copied()).collect();
        let arrived = emulated(&cluster, &messages, messages[0].sent);

        for parts in [false, true] {
            let of_kind = || messages.iter().zip(&arrived).filter(|(t, _)| is_part(t) == parts);
            let start = of_kind().map(|(t, _)| t.sent).fold(f64::INFINITY, f64::min);
            let [simulated, emulated] = [
                of_kind().map(|(t, _)| t.arrived).fold(f64::NEG_INFINITY, f64::max) - start,
                of_kind().map(|(_, arrived)| *arrived).fold(f64::NEG_INFINITY, f64::max) - start,
            ];
            let ends = |(t, _): (&Transfer, &f64)| [(t.from, t.bytes), (t.to, t.bytes)];
            let of_card = |peer, end: usize| {
                of_kind().map(|m| ends(m)[end]).filter(|e| e.0 == PeerId(peer)).map(|e| e.1).sum::<u64>()
            };
            let cards = (0..8).flat_map(|p| [of_card(p, 0), of_card(p, 1)]);
            let busiest = cards.max().unwrap() as f64 / inside.bandwidth;
            assert!(simulated >= busiest && emulated >= busiest, "{simulated} {emulated} {busiest}");
            let error = simulated / emulated - 1.0;
            assert!(error.abs() < 0.05, "{simulated} s simulated, {emulated} s emulated, {busiest} s at least");
        }
    }

    #[test]
    fn a_link_that_is_too_fast_is_named_with_its_measured_rate() {
        let link = LinkStats {
            name: "the link a -> c".into(),
            rate: Some(1_250_000_000),
            backlog_bytes: 100_000_000,
            backlog: Duration::from_millis(400),
            ..LinkStats::default()
        };
        insta::assert_snapshot!(too_fast(&link).unwrap(), @"the link a -> c is declared faster than this machine can emulate: 2 Gbps of 10 Gbps while peers had more to send");
        assert_eq!(too_fast(&LinkStats { rate: Some(250_000_000), ..link.clone() }), None, "it got what was asked");
        assert_eq!(too_fast(&LinkStats { backlog_bytes: 1000, ..link.clone() }), None, "nobody had more for it");
        assert_eq!(too_fast(&LinkStats { rate: None, ..link }), None);
    }

    #[test]
    fn a_missing_link_is_named() {
        let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 0.0 };
        let devices = ["a", "b"].map(|n| Device::new(n, rates, 1)).to_vec();
        let cluster = Cluster::new(devices, vec![], vec![], None).unwrap();
        let addrs = free_addresses(3).unwrap();
        let error = Emulation::start(cluster, addrs[2], addrs[..2].to_vec()).unwrap().address(A, B).unwrap_err();
        insta::assert_snapshot!(error.report(), @r#"
        the testbed has no link from "a" to "b", which the plan needs
        hint: add a [[link]] between them, or uplinks to their sites
        "#);
    }
}
