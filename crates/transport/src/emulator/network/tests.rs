use super::*;
use crate::emulator::link::NANOS_PER_SECOND;
use proptest::prelude::*;

const MBPS: u64 = 1_000_000 / 8;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A payload that has `bytes` with its headers.
fn datagram(bytes: u64) -> Vec<u8> {
    vec![0; (bytes - HEADER_BYTES) as usize]
}

fn link(rate: u64, latency: Duration) -> LinkSpec {
    LinkSpec::new("link", Some(rate), latency)
}

fn one(spec: LinkSpec) -> (Network, LinkId, RouteId) {
    let mut network = Network::new(1);
    let link = network.add_link(spec);
    let route = network.add_route(vec![link]);
    (network, link, route)
}

/// Everything that arrives by `now`, as (route, moment).
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
    // At 7 Mbps, 1000 bytes do not take a whole number of nanoseconds.
    for rate in [8 * MBPS, 80 * MBPS, 7 * MBPS, 10_000 * MBPS] {
        let (mut network, _, route) = one(LinkSpec { queue_bytes: u64::MAX, ..link(rate, ms(3)) });
        for _ in 0..1000 {
            network.send(ms(0), route, datagram(1000));
        }
        let out = arrivals(&mut network, Duration::from_secs(100));
        assert_eq!(out.len(), 1000);
        let all = Duration::from_nanos(1_000_000 * NANOS_PER_SECOND / rate);
        assert_eq!(out[999].1, all + ms(3), "{rate}");
        let stats = &network.stats(Duration::from_secs(100))[0];
        assert_eq!((stats.bytes, stats.busy), (1_000_000, all));
    }
}

#[test]
fn a_full_queue_drops_datagrams() {
    let spec = LinkSpec { queue_bytes: 3000, ..link(8 * MBPS, ms(0)) };
    let (mut network, _, route) = one(spec);
    for _ in 0..5 {
        network.send(ms(0), route, datagram(1000));
    }
    // One and a half datagrams are sent by now: 1500 bytes still wait.
    network.send(Duration::from_micros(1500), route, datagram(1000));
    network.send(Duration::from_micros(1500), route, datagram(1000));
    let out = arrivals(&mut network, ms(100));
    assert_eq!(out.iter().map(|(_, due)| *due).collect::<Vec<_>>(), [ms(1), ms(2), ms(3), ms(4)]);
    let stats = &network.stats(ms(100))[0];
    assert_eq!((stats.datagrams, stats.overflowed, stats.max_queued_bytes), (4, 3, 3000));
}

#[test]
fn an_idle_link_accepts_a_datagram_larger_than_its_queue() {
    let spec = LinkSpec { queue_bytes: 100, ..link(8 * MBPS, ms(0)) };
    let (mut network, _, route) = one(spec);
    network.send(ms(0), route, datagram(1000));
    assert_eq!(arrivals(&mut network, ms(1)).len(), 1);
}

#[test]
fn unlimited_links_only_delay_and_links_of_rate_zero_drop_everything() {
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
fn routes_share_an_uplink() {
    let mut network = Network::new(1);
    let uplink = network.add_link(LinkSpec {
        name: "uplink".into(),
        rate: Some(8 * MBPS),
        latency: ms(10),
        queue_bytes: u64::MAX,
    });
    let fast = network.add_link(link(800 * MBPS, ms(1)));
    let faster = network.add_link(link(8000 * MBPS, ms(0)));
    let (a, b) = (network.add_route(vec![uplink, fast]), network.add_route(vec![uplink, faster]));
    for _ in 0..50 {
        network.send(ms(0), a, datagram(1000));
        network.send(ms(0), b, datagram(1000));
    }
    let out = arrivals(&mut network, Duration::from_secs(1));
    // 100 datagrams of 1 ms each, alternating; the last takes 1 us more on its own link.
    assert_eq!(out.len(), 100);
    assert_eq!(out.iter().filter(|(route, _)| *route == a).count(), 50);
    let last_of_b = ms(110) + Duration::from_micros(1);
    assert!(out.contains(&(b, last_of_b)), "{:?}", &out[95..]);
    assert_eq!(network.stats(ms(1000))[0].bytes, 100_000);
}

/// Computing a datagram's whole route when it is sent would reserve the idle shared uplink for a datagram that still
/// waits for a slow link.
#[test]
fn waiting_for_a_slow_link_does_not_reserve_a_shared_one() {
    let mut network = Network::new(1);
    let slow = network.add_link(link(MBPS / 10, ms(0)));
    let shared = network.add_link(link(80 * MBPS, ms(0)));
    let (long, short) = (network.add_route(vec![slow, shared]), network.add_route(vec![shared]));
    // 80 ms each on the slow link.
    network.send(ms(0), long, datagram(1000));
    network.send(ms(0), long, datagram(1000));
    network.send(ms(1), short, datagram(1000));
    let out = arrivals(&mut network, ms(500));
    let hop = Duration::from_micros(100);
    assert_eq!(out, [(short, ms(1) + hop), (long, ms(80) + hop), (long, ms(160) + hop)]);
}

#[test]
fn early_deliveries_overtake_nobody_on_a_shared_link() {
    let mut network = Network::new(1);
    let [first, shared] = [ms(2), ms(0)].map(|latency| network.add_link(link(8 * MBPS, latency)));
    let far = network.add_route(vec![first, shared]);
    let near = network.add_route(vec![shared]);
    // 1 ms per datagram and link.
    network.send(ms(0), far, datagram(1000));
    assert_eq!(network.deliver_early(ms(1), ms(9)), None, "another link comes before");
    network.send(ms(1), near, datagram(1000));
    let early = std::iter::from_fn(|| network.deliver_early(ms(1), ms(9)));
    assert_eq!(early.map(|d| (d.route, d.due)).collect::<Vec<_>>(), [(near, ms(2))]);
    assert_eq!(network.deliver_early(ms(2), ms(9)), None, "it is still on the first link");
    assert_eq!(network.deliver_early(ms(3), ms(4)).map(|d| d.due), Some(ms(4)), "the last link of two");
}

#[test]
fn a_cut_link_loses_everything_until_it_heals() {
    let (mut network, link, route) = one(link(8 * MBPS, ms(10)));
    for _ in 0..4 {
        network.send(ms(0), route, datagram(1000));
    }
    // Two have arrived, one is in flight, one is being sent.
    assert_eq!(arrivals(&mut network, ms(12)).len(), 2);
    network.cut(ms(12), link);
    network.send(ms(13), route, datagram(1000));
    network.heal(ms(14), link);
    network.send(ms(15), route, datagram(1000));
    assert_eq!(arrivals(&mut network, ms(100)), [(route, ms(26))]);
    let stats = &network.stats(ms(100))[0];
    assert_eq!((stats.datagrams, stats.cut_off), (3, 3));
}

/// 2 MB entered in the 2 s in which one of two routes, or both, had a backlog.
#[test]
fn a_backlog_shows_the_rate_at_which_a_link_was_fed() {
    let mut network = Network::new(1);
    let shared = network.add_link(link(80 * MBPS, ms(0)));
    let own = network.add_link(link(8 * MBPS, ms(0)));
    let (a, b) = (network.add_route(vec![shared]), network.add_route(vec![own, shared]));
    network.add_backlog(ms(0), ms(1000), a, 500_000);
    assert_eq!(network.stats(ms(1000))[0].backlog_rate(), None, "the sample is too small");
    network.add_backlog(ms(500), ms(1500), b, 1_000_000);
    network.add_backlog(ms(1500), ms(2000), a, 500_000);
    let stats = network.stats(ms(2000));
    assert_eq!((stats[0].backlog_rate(), stats[0].rate), (Some(1e6), Some(10_000_000)));
    assert_eq!((stats[1].backlog, stats[1].backlog_bytes), (ms(1000), 1_000_000));
}

#[test]
fn drops_follow_the_seed_and_the_probability() {
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
    /// For any traffic: no datagram appears or vanishes, each route keeps its order, and no link exceeds its rate.
    #[test]
    fn traffic_obeys_the_links(
        traffic in proptest::collection::vec((0u64..3000, 0usize..3, 30u64..1500), 1..200),
        rate in 1u64..200,
        queue in 1500u64..20_000,
    ) {
        let mut network = Network::new(5);
        let shared = network.add_link(LinkSpec {
            queue_bytes: queue,
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
        // An idle link accepts even a datagram larger than its queue.
        prop_assert!(stats[0].max_queued_bytes <= queue.max(1484 + 28));
        for route in routes {
            let of_route = out.iter().filter(|delivery| delivery.route == route);
            let numbers: Vec<u32> = of_route
                .map(|d| u32::from_le_bytes(*d.datagram.first_chunk().unwrap()))
                .collect();
            prop_assert!(numbers.is_sorted());
        }
        // On the first route, `due` is the end of sending on the shared link plus 3 ms.
        let only_shared: Vec<_> = out.iter().filter(|d| d.route == routes[0]).collect();
        for pair in only_shared.windows(2) {
            let bytes = pair[1].datagram.len() as u64 + HEADER_BYTES;
            let apart = (pair[1].due - pair[0].due).as_nanos() as u64;
            prop_assert!(apart + 1 >= bytes * NANOS_PER_SECOND / (rate * MBPS / 10));
        }
    }
}
