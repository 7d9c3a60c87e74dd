//! Links as queues and delays, without sockets or a clock.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

/// One direction of a line, or an uplink that several lines share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkSpec {
    /// What reports call it.
    pub name: String,
    /// Bytes per second, [`HEADERS`] included; `None` is without limit. Zero lets nothing through.
    pub rate: Option<u64>,
    /// Time from the last bit sent to the last bit received.
    pub latency: Duration,
    /// Bytes that may wait to be sent, the datagram being sent included. What finds the queue full
    /// is lost, as in a router. A datagram that finds it empty always fits.
    pub queue: u64,
}

impl LinkSpec {
    /// A link with the queue of a usual router: 100 ms of its rate, at least 64 KiB.
    pub fn new(name: impl Into<String>, rate: Option<u64>, latency: Duration) -> Self {
        let queue = rate.map_or(u64::MAX, |rate| (rate / 10).max(64 * 1024));
        Self { name: name.into(), rate, latency, queue }
    }
}

/// Bytes that an IPv4 and a UDP header add to each datagram on a line.
pub const HEADERS: u64 = 28;

/// What became of the datagrams that came to a link. Bytes include [`HEADERS`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// The link's name.
    pub name: String,
    /// Datagrams that came out at the far end.
    pub datagrams: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Datagrams lost because the queue was full.
    pub overflowed: u64,
    /// Datagrams lost by the link's loss rate.
    pub dropped: u64,
    /// Datagrams lost because the link was cut.
    pub cut_off: u64,
    /// Time spent sending those that came out.
    pub busy: Duration,
    /// Most bytes that ever waited at once.
    pub most_queued: u64,
    /// Bytes per second that were asked for.
    pub rate: Option<u64>,
    /// Bytes that came while more of them waited outside than whoever feeds the network could take in.
    pub pressed_bytes: u64,
    /// Time for which they did.
    pub pressed: Duration,
}

impl LinkStats {
    /// Bytes per second that came to the link while more waited outside; `None` until as many have come that it tells anything.
    pub fn pressed_rate(&self) -> Option<f64> {
        const TELLING: u64 = 1 << 20;
        (self.pressed_bytes >= TELLING).then(|| self.pressed_bytes as f64 / self.pressed.as_secs_f64().max(1e-9))
    }
}

/// A link of a [`Network`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(usize);

/// A sequence of links, of a [`Network`], that datagrams take one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteId(usize);

impl RouteId {
    /// Its place in the order in which the routes were added.
    pub fn index(self) -> usize {
        self.0
    }
}

/// Links, routes over them, and the datagrams under way. All times are since any fixed moment and
/// never go back; the same calls give the same deliveries.
#[derive(Debug)]
pub struct Network {
    links: Vec<Link>,
    routes: Vec<Vec<LinkId>>,
    under_way: BinaryHeap<Reverse<UnderWay>>,
    arrived: VecDeque<Delivery>,
    sent: u64,
    random: u64,
}

/// A datagram that has come out at the end of its route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// When it came out: at most the time given to [`Network::deliver`].
    pub due: Duration,
    /// The route it took.
    pub route: RouteId,
    /// Its payload.
    pub datagram: Vec<u8>,
}

impl Network {
    /// A network without links. `seed` decides which datagrams a lossy link loses.
    pub fn new(seed: u64) -> Self {
        Self {
            links: Vec::new(),
            routes: Vec::new(),
            under_way: BinaryHeap::new(),
            arrived: VecDeque::new(),
            sent: 0,
            random: seed,
        }
    }

    /// Adds a link.
    pub fn add_link(&mut self, spec: LinkSpec) -> LinkId {
        self.links.push(Link::new(spec));
        LinkId(self.links.len() - 1)
    }

    /// Adds a route over `links`, of which any may belong to other routes too. A route over no link
    /// delivers at once.
    pub fn add_route(&mut self, links: Vec<LinkId>) -> RouteId {
        self.routes.push(links);
        RouteId(self.routes.len() - 1)
    }

    /// Puts a datagram on its way.
    pub fn send(&mut self, now: Duration, route: RouteId, datagram: Vec<u8>) {
        self.advance(now);
        self.sent += 1;
        self.enter(UnderWay { due: now, order: self.sent, hop: 0, crossing: Crossing::default(), route, datagram });
    }

    /// Says that in `since ..= now` more than the `bytes` sent on this route waited to be, so that its links could not be busier than this let them be.
    pub fn pressed(&mut self, since: Duration, now: Duration, route: RouteId, bytes: u64) {
        for link in &self.routes[route.0] {
            let link = &mut self.links[link.0];
            // Routes that share a link may press on it at once.
            let since = since.max(link.pressed_until);
            link.stats.pressed += now.saturating_sub(since);
            link.stats.pressed_bytes += bytes;
            link.pressed_until = now;
        }
    }

    /// When a datagram next comes off a link. Nothing can be delivered before.
    pub fn next_due(&self) -> Option<Duration> {
        let arrived = self.arrived.front().map(|delivery| delivery.due);
        arrived.or_else(|| self.under_way.peek().map(|Reverse(next)| next.due))
    }

    /// The next datagram that has arrived by `now`, in the order of arrival.
    pub fn deliver(&mut self, now: Duration) -> Option<Delivery> {
        self.advance(now);
        self.arrived.pop_front()
    }

    /// As [`Self::deliver`], and then what is on its last link and comes off it by `soon`. What has further to go stays where it is: it would come to a link that others share before those who are
    /// ahead of it.
    pub fn deliver_early(&mut self, now: Duration, soon: Duration) -> Option<Delivery> {
        self.advance(now);
        while self.arrived.is_empty() {
            let Reverse(next) = self.under_way.peek()?;
            if next.due > soon || next.hop + 1 < self.routes[next.route.0].len() {
                return None;
            }
            self.hop();
        }
        self.arrived.pop_front()
    }

    /// Cuts a link: all that is on it and all that comes to it is lost.
    pub fn cut(&mut self, now: Duration, link: LinkId) {
        self.advance(now);
        let link = &mut self.links[link.0];
        (link.cut, link.cuts) = (true, link.cuts + 1);
    }

    /// Mends a cut link. Its queue is empty.
    pub fn heal(&mut self, now: Duration, link: LinkId) {
        self.advance(now);
        let link = &mut self.links[link.0];
        if link.cut {
            (link.cut, link.free) = (false, now);
        }
    }

    /// Lets a link lose each datagram with this probability, from 0 to 1.
    pub fn set_loss(&mut self, now: Duration, link: LinkId, probability: f64) {
        self.advance(now);
        self.links[link.0].loss = probability;
    }

    /// What every link has carried by `now`, in the order in which they were added.
    pub fn stats(&mut self, now: Duration) -> Vec<LinkStats> {
        self.advance(now);
        self.links.iter().map(|link| link.stats.clone()).collect()
    }

    /// Lets all that comes off a link by `now` enter the next, in the order of these moments: what
    /// waits for a slow link must not reserve its place on a shared one.
    fn advance(&mut self, now: Duration) {
        while self.under_way.peek().is_some_and(|Reverse(next)| next.due <= now) {
            self.hop();
        }
    }

    /// Lets what comes off a link next enter the one behind it.
    fn hop(&mut self) {
        let Some(Reverse(mut datagram)) = self.under_way.pop() else { return };
        let link = self.routes[datagram.route.0][datagram.hop];
        if self.links[link.0].leave(&datagram.crossing) {
            datagram.hop += 1;
            self.enter(datagram);
        }
    }

    /// Enters the link at `datagram.hop` at the time `datagram.due`.
    fn enter(&mut self, mut datagram: UnderWay) {
        let Some(link) = self.routes[datagram.route.0].get(datagram.hop) else {
            self.arrived.push_back(Delivery { due: datagram.due, route: datagram.route, datagram: datagram.datagram });
            return;
        };
        let bytes = datagram.datagram.len() as u64 + HEADERS;
        let link = &mut self.links[link.0];
        if let Some(crossing) = link.enter(datagram.due, bytes, &mut self.random) {
            datagram.due = crossing.due;
            datagram.crossing = crossing;
            self.under_way.push(Reverse(datagram));
        }
    }
}

/// A datagram on a link, ordered by when it comes off it. Of those due at one moment, the one that
/// was sent first goes first.
#[derive(Debug)]
struct UnderWay {
    due: Duration,
    order: u64,
    /// Which link of its route it is on.
    hop: usize,
    crossing: Crossing,
    route: RouteId,
    datagram: Vec<u8>,
}

impl Ord for UnderWay {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.due, self.order).cmp(&(other.due, other.order))
    }
}

impl PartialOrd for UnderWay {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for UnderWay {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for UnderWay {}

/// One datagram's way over one link.
#[derive(Debug, Default)]
struct Crossing {
    /// When it comes off.
    due: Duration,
    bytes: u64,
    /// The time that sending it takes.
    sending: Duration,
    /// How often the link had been cut when the datagram entered it.
    cuts: u64,
}

#[derive(Debug)]
struct Link {
    spec: LinkSpec,
    /// When all that has entered so far is sent.
    free: Duration,
    /// What sending that took beyond whole nanoseconds, in nanoseconds over the rate.
    remainder: u64,
    loss: f64,
    cut: bool,
    cuts: u64,
    pressed_until: Duration,
    stats: LinkStats,
}

impl Link {
    fn new(spec: LinkSpec) -> Self {
        let stats = LinkStats { name: spec.name.clone(), rate: spec.rate, ..LinkStats::default() };
        let zero = Duration::ZERO;
        Self { spec, free: zero, remainder: 0, loss: 0.0, cut: false, cuts: 0, pressed_until: zero, stats }
    }

    /// `None`: the datagram is lost, which is counted.
    fn enter(&mut self, now: Duration, bytes: u64, random: &mut u64) -> Option<Crossing> {
        if self.cut {
            self.stats.cut_off += 1;
            return None;
        }
        if self.loss > 0.0 && uniform(random) < self.loss {
            self.stats.dropped += 1;
            return None;
        }
        let mut crossing = Crossing { due: now + self.spec.latency, bytes, sending: Duration::ZERO, cuts: self.cuts };
        if let Some(rate) = self.spec.rate {
            if self.free <= now {
                (self.free, self.remainder) = (now, 0);
            }
            let queued = waiting(self.free - now, rate) + bytes;
            if rate == 0 || (queued > self.spec.queue && queued > bytes) {
                self.stats.overflowed += 1;
                return None;
            }
            self.stats.most_queued = self.stats.most_queued.max(queued);
            let work = bytes * NANOS + self.remainder;
            self.remainder = work % rate;
            crossing.sending = Duration::from_nanos(work / rate);
            self.free += crossing.sending;
            crossing.due = self.free + self.spec.latency;
        }
        Some(crossing)
    }

    /// Whether a datagram comes off the link whole.
    fn leave(&mut self, crossing: &Crossing) -> bool {
        let whole = crossing.cuts == self.cuts;
        if whole {
            self.stats.datagrams += 1;
            self.stats.bytes += crossing.bytes;
            self.stats.busy += crossing.sending;
        } else {
            self.stats.cut_off += 1;
        }
        whole
    }
}

const NANOS: u64 = 1_000_000_000;

/// Bytes that a link of this rate has still to send if that takes it so long.
fn waiting(backlog: Duration, rate: u64) -> u64 {
    let bytes = (backlog.as_nanos() * u128::from(rate)).div_ceil(u128::from(NANOS));
    u64::try_from(bytes).unwrap_or(u64::MAX / 2)
}

/// The next number of `[0, 1)`, by SplitMix64 (Steele, Lea and Flood 2014).
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MBPS: u64 = 1_000_000 / 8;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A payload that takes `on_the_line` bytes with its headers.
    fn datagram(on_the_line: u64) -> Vec<u8> {
        vec![0; (on_the_line - HEADERS) as usize]
    }

    fn link(rate: u64, latency: Duration) -> LinkSpec {
        LinkSpec::new("line", Some(rate), latency)
    }

    fn one(spec: LinkSpec) -> (Network, LinkId, RouteId) {
        let mut network = Network::new(1);
        let link = network.add_link(spec);
        let route = network.add_route(vec![link]);
        (network, link, route)
    }

    /// Everything that comes out by `now`, as (route, moment).
    fn arrivals(network: &mut Network, now: Duration) -> Vec<(RouteId, Duration)> {
        std::iter::from_fn(|| network.deliver(now)).map(|delivery| (delivery.route, delivery.due)).collect()
    }

    #[test]
    fn a_datagram_takes_its_sending_time_and_the_latency() {
        // 1000 bytes at 8 Mbps: 1 ms.
        let (mut network, _, route) = one(link(8 * MBPS, ms(20)));
        network.send(ms(5), route, datagram(1000));
        assert_eq!(network.next_due(), Some(ms(26)));
        assert_eq!(network.deliver(ms(26) - Duration::from_nanos(1)), None);
        let delivery = network.deliver(ms(30)).unwrap();
        assert_eq!((delivery.due, delivery.datagram.len()), (ms(26), 972));
        assert_eq!(network.next_due(), None);
    }

    #[test]
    fn a_busy_link_keeps_its_rate_to_the_nanosecond() {
        // 7 Mbps over 1000 bytes takes no whole number of nanoseconds.
        for rate in [8 * MBPS, 80 * MBPS, 7 * MBPS, 10_000 * MBPS] {
            let (mut network, _, route) = one(LinkSpec { queue: u64::MAX, ..link(rate, ms(3)) });
            for _ in 0..1000 {
                network.send(ms(0), route, datagram(1000));
            }
            let out = arrivals(&mut network, Duration::from_secs(100));
            assert_eq!(out.len(), 1000);
            let all = Duration::from_nanos(1_000_000 * NANOS / rate);
            assert_eq!(out[999].1, all + ms(3), "{rate}");
            let stats = &network.stats(Duration::from_secs(100))[0];
            assert_eq!((stats.bytes, stats.busy), (1_000_000, all));
        }
    }

    #[test]
    fn a_full_queue_loses_what_comes() {
        let spec = LinkSpec { queue: 3000, ..link(8 * MBPS, ms(0)) };
        let (mut network, _, route) = one(spec);
        for _ in 0..5 {
            network.send(ms(0), route, datagram(1000));
        }
        // One has been sent by now, and half of the next: 1500 bytes still wait.
        network.send(Duration::from_micros(1500), route, datagram(1000));
        network.send(Duration::from_micros(1500), route, datagram(1000));
        let out = arrivals(&mut network, ms(100));
        assert_eq!(out.iter().map(|(_, due)| *due).collect::<Vec<_>>(), [ms(1), ms(2), ms(3), ms(4)]);
        let stats = &network.stats(ms(100))[0];
        assert_eq!((stats.datagrams, stats.overflowed, stats.most_queued), (4, 3, 3000));
    }

    #[test]
    fn a_datagram_larger_than_the_queue_passes_an_idle_link() {
        let spec = LinkSpec { queue: 100, ..link(8 * MBPS, ms(0)) };
        let (mut network, _, route) = one(spec);
        network.send(ms(0), route, datagram(1000));
        assert_eq!(arrivals(&mut network, ms(1)).len(), 1);
    }

    #[test]
    fn links_without_rate_only_delay_and_rate_zero_lets_nothing_through() {
        let (mut network, _, route) = one(LinkSpec::new("free", None, ms(7)));
        for _ in 0..3 {
            network.send(ms(1), route, datagram(60_000));
        }
        let out = arrivals(&mut network, ms(8));
        assert!(out.len() == 3 && out.iter().all(|(_, due)| *due == ms(8)));

        let (mut network, _, route) = one(link(0, ms(0)));
        network.send(ms(1), route, datagram(100));
        assert_eq!(network.next_due(), None);
        assert_eq!(network.stats(ms(1))[0].overflowed, 1);

        let direct = network.add_route(vec![]);
        network.send(ms(2), direct, datagram(100));
        assert_eq!(arrivals(&mut network, ms(2)), [(direct, ms(2))]);
    }

    #[test]
    fn an_uplink_is_shared_by_all_routes_over_it() {
        let mut network = Network::new(1);
        let uplink = network.add_link(LinkSpec {
            name: "uplink".into(),
            rate: Some(8 * MBPS),
            latency: ms(10),
            queue: u64::MAX,
        });
        let fast = network.add_link(link(800 * MBPS, ms(1)));
        let faster = network.add_link(link(8000 * MBPS, ms(0)));
        let (a, b) = (network.add_route(vec![uplink, fast]), network.add_route(vec![uplink, faster]));
        for _ in 0..50 {
            network.send(ms(0), a, datagram(1000));
            network.send(ms(0), b, datagram(1000));
        }
        let out = arrivals(&mut network, Duration::from_secs(1));
        // 100 datagrams of 1 ms each, in turns; the last takes 1 us more on its own link.
        assert_eq!(out.len(), 100);
        assert_eq!(out.iter().filter(|(route, _)| *route == a).count(), 50);
        let last_of_b = ms(110) + Duration::from_micros(1);
        assert!(out.contains(&(b, last_of_b)), "{:?}", &out[95..]);
        assert_eq!(network.stats(ms(1000))[0].bytes, 100_000);
    }

    /// Computing a datagram's whole way when it sets out would let one that is still queued on
    /// a slow line hold the shared uplink after it, idle, against everyone else.
    #[test]
    fn what_waits_for_a_slow_line_does_not_hold_the_shared_one() {
        let mut network = Network::new(1);
        let slow = network.add_link(link(MBPS / 10, ms(0)));
        let shared = network.add_link(link(80 * MBPS, ms(0)));
        let (long, short) = (network.add_route(vec![slow, shared]), network.add_route(vec![shared]));
        // 80 ms each on the slow line.
        network.send(ms(0), long, datagram(1000));
        network.send(ms(0), long, datagram(1000));
        network.send(ms(1), short, datagram(1000));
        let out = arrivals(&mut network, ms(500));
        let hop = Duration::from_micros(100);
        assert_eq!(out, [(short, ms(1) + hop), (long, ms(80) + hop), (long, ms(160) + hop)]);
    }

    #[test]
    fn what_is_early_overtakes_nobody_on_a_shared_link() {
        let mut network = Network::new(1);
        let [first, shared] = [ms(2), ms(0)].map(|latency| network.add_link(link(8 * MBPS, latency)));
        let far = network.add_route(vec![first, shared]);
        let near = network.add_route(vec![shared]);
        // A millisecond each on a link.
        network.send(ms(0), far, datagram(1000));
        assert_eq!(network.deliver_early(ms(1), ms(9)), None, "it has a link before it");
        network.send(ms(1), near, datagram(1000));
        let early = std::iter::from_fn(|| network.deliver_early(ms(1), ms(9)));
        assert_eq!(early.map(|d| (d.route, d.due)).collect::<Vec<_>>(), [(near, ms(2))]);
        assert_eq!(network.deliver_early(ms(2), ms(9)), None, "it is still on the first");
        assert_eq!(network.deliver_early(ms(3), ms(4)).map(|d| d.due), Some(ms(4)), "the last link of two");
    }

    #[test]
    fn a_cut_loses_all_that_is_on_the_link_until_it_heals() {
        let (mut network, link, route) = one(link(8 * MBPS, ms(10)));
        for _ in 0..4 {
            network.send(ms(0), route, datagram(1000));
        }
        // The first two are through, one is under way, one is being sent.
        assert_eq!(arrivals(&mut network, ms(12)).len(), 2);
        network.cut(ms(12), link);
        network.send(ms(13), route, datagram(1000));
        network.heal(ms(14), link);
        network.send(ms(15), route, datagram(1000));
        assert_eq!(arrivals(&mut network, ms(100)), [(route, ms(26))]);
        let stats = &network.stats(ms(100))[0];
        assert_eq!((stats.datagrams, stats.cut_off), (3, 3));
    }

    /// 2 MB in the 2 s in which either of two routes, or both, had more to send than was taken in.
    #[test]
    fn a_link_that_gets_less_than_it_could_carry_shows() {
        let mut network = Network::new(1);
        let shared = network.add_link(link(80 * MBPS, ms(0)));
        let own = network.add_link(link(8 * MBPS, ms(0)));
        let (a, b) = (network.add_route(vec![shared]), network.add_route(vec![own, shared]));
        network.pressed(ms(0), ms(1000), a, 500_000);
        assert_eq!(network.stats(ms(1000))[0].pressed_rate(), None, "too little to tell");
        network.pressed(ms(500), ms(1500), b, 1_000_000);
        network.pressed(ms(1500), ms(2000), a, 500_000);
        let stats = network.stats(ms(2000));
        assert_eq!((stats[0].pressed_rate(), stats[0].rate), (Some(1e6), Some(10_000_000)));
        assert_eq!((stats[1].pressed, stats[1].pressed_bytes), (ms(1000), 1_000_000));
    }

    #[test]
    fn losses_follow_the_seed_and_the_probability() {
        let lost = |seed| {
            let mut network = Network::new(seed);
            let link = network.add_link(LinkSpec::new("lossy", None, ms(0)));
            let route = network.add_route(vec![link]);
            network.set_loss(ms(0), link, 0.1);
            for i in 0..10_000 {
                network.send(ms(i), route, vec![]);
            }
            let out = arrivals(&mut network, ms(10_000));
            assert_eq!(out.len() as u64 + network.stats(ms(10_000))[0].dropped, 10_000);
            out
        };
        assert_eq!(lost(3), lost(3));
        assert_ne!(lost(3), lost(4));
        // Ten standard deviations: sqrt(10000 * 0.1 * 0.9) = 30.
        assert!(lost(3).len().abs_diff(9000) < 300);
    }

    proptest! {
        /// Whatever is sent when: nothing is made or forgotten, each route keeps its order, and no
        /// link ever carries more than its rate in any stretch of time.
        #[test]
        fn traffic_obeys_the_links(
            traffic in proptest::collection::vec((0u64..3000, 0usize..3, 30u64..1500), 1..200),
            rate in 1u64..200,
            queue in 1500u64..20_000,
        ) {
            let mut network = Network::new(5);
            let shared = network.add_link(LinkSpec {
                queue,
                ..link(rate * MBPS / 10, ms(3))
            });
            let own = network.add_link(link(MBPS, ms(1)));
            let routes = [vec![shared], vec![own, shared], vec![shared, own]];
            let routes = routes.map(|links| network.add_route(links));
            let mut now = Duration::ZERO;
            let mut out = Vec::new();
            for (i, (gap, route, length)) in traffic.iter().enumerate() {
                now += Duration::from_micros(*gap);
                let mut bytes = vec![0; *length as usize];
                bytes[..4].copy_from_slice(&(i as u32).to_le_bytes());
                network.send(now, routes[*route], bytes);
                out.extend(std::iter::from_fn(|| network.deliver(now)));
            }
            let end = now + Duration::from_secs(3600);
            out.extend(std::iter::from_fn(|| network.deliver(end)));

            prop_assert!(out.is_sorted_by_key(|delivery| delivery.due));
            let stats = network.stats(end);
            let lost: u64 = stats.iter().map(|s| s.overflowed).sum();
            prop_assert_eq!(out.len() as u64 + lost, traffic.len() as u64);
            // An idle link takes any datagram, be it larger than the queue.
            prop_assert!(stats[0].most_queued <= queue.max(1484 + 28));
            for route in routes {
                let of_route = out.iter().filter(|delivery| delivery.route == route);
                let numbers: Vec<u32> = of_route
                    .map(|d| u32::from_le_bytes(*d.datagram.first_chunk().unwrap()))
                    .collect();
                prop_assert!(numbers.is_sorted());
            }
            // On the first route `due` is when the shared link had sent it, and 3 ms.
            let only_shared: Vec<_> = out.iter().filter(|d| d.route == routes[0]).collect();
            for pair in only_shared.windows(2) {
                let bytes = pair[1].datagram.len() as u64 + HEADERS;
                let apart = (pair[1].due - pair[0].due).as_nanos() as u64;
                prop_assert!(apart + 1 >= bytes * NANOS / (rate * MBPS / 10));
            }
        }
    }
}
