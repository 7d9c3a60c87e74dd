//! The gate for handshakes: the defence against strangers before they have proved a key. It is pure.
//!
//! A handshake costs memory and a signature, and anybody can ask for one. So few may be open at once, and only some
//! of them may come from one source. A newcomer takes the place of an old handshake, so strangers who begin
//! handshakes and never finish them lock nobody out.
//!
//! A sender can put any address on its packets. Above [`RETRY_ABOVE`] open handshakes, a newcomer must therefore
//! prove that it receives what is sent to its address (RFC 9000, section 8.1.2). That costs one round trip and no
//! memory here. It is not always asked: a peer that is dialled at several addresses at once proves only one of
//! them, and can fail if its packet to another address arrives first.
//!
//! A handshake that ends at once costs a signature, too. So each source, and all of them together, have an allowance of
//! handshakes that comes back with time. After a quiet time, a whole site may come at once. Once half of an allowance
//! is used, the rest is for newcomers who have proved their address. So nobody can use it up in another one's name.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Most handshakes at once.
pub(crate) const MAX_HANDSHAKES: usize = 256;
/// Most handshakes at once from one source. A site with many machines may have one public address.
pub(crate) const MAX_FROM_ONE_SOURCE: usize = 64;
/// With more open handshakes than this, newcomers must prove their address.
pub(crate) const RETRY_ABOVE: usize = 32;
/// A younger handshake than this keeps its place. A rightful peer needs a few round trips. If a newcomer's packet is
/// dropped, the newcomer repeats it after about a second.
pub(crate) const GRACE: Duration = Duration::from_secs(1);
/// Handshakes that one source may begin at once, and per second after that. One handshake costs over a millisecond of a
/// core.
const OF_ONE_SOURCE: Limit = Limit { burst: 256.0, per_second: 20.0 };
/// The same limit for all sources together.
const OF_ALL: Limit = Limit { burst: 512.0, per_second: 40.0 };

/// The source of a packet, as far as one machine can choose it freely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// An IPv4 address, or the first half of an IPv6 address: a site owns all addresses of its network.
    Ip(IpAddr),
    /// The relay. Anybody who may use it can do so under many keys.
    Relay,
}

impl Source {
    pub(crate) fn of(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            IpAddr::V6(ip) => Self::Ip(Ipv6Addr::from_bits(ip.to_bits() & (u128::MAX << 64)).into()),
            ip => Self::Ip(ip),
        }
    }
}

/// The decision about a newcomer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict<H> {
    /// Begin its handshake. If there is an old one, abort that.
    Begin(Option<H>),
    /// Ask it to prove its address.
    Retry,
    /// Drop its packet without an answer.
    Drop,
}

/// A limit on how many handshakes may begin.
#[derive(Debug, Clone, Copy)]
struct Limit {
    burst: f64,
    per_second: f64,
}

/// The used part of a [`Limit`].
#[derive(Debug, Clone, Copy)]
struct Used {
    handshakes: f64,
    at: Instant,
}

impl Limit {
    /// How many of its handshakes are used now. They are given back as time passes.
    fn used(self, used: Option<Used>, now: Instant) -> f64 {
        let Some(Used { handshakes, at }) = used else { return 0.0 };
        (handshakes - self.per_second * now.saturating_duration_since(at).as_secs_f64()).max(0.0)
    }

    /// Uses one more.
    fn add(self, used: Option<Used>, now: Instant) -> Used {
        Used { handshakes: self.used(used, now) + 1.0, at: now }
    }
}

/// The open handshakes, oldest first. `H` is the caller's handle to one.
#[derive(Debug)]
pub(crate) struct Gate<H> {
    open: Vec<Handshake<H>>,
    /// The used part of [`OF_ALL`].
    used: Option<Used>,
    /// The used part of [`OF_ONE_SOURCE`], by source. A source is forgotten once it has its whole allowance again. So
    /// there are at most as many sources as handshakes of [`OF_ALL`] are used, and those of the last second.
    used_by: HashMap<Source, Used>,
}

#[derive(Debug)]
struct Handshake<H> {
    handle: H,
    source: Source,
    /// Whether the peer has proved that it has its address.
    proved: bool,
    since: Instant,
}

impl<H> Gate<H> {
    pub(crate) fn new() -> Self {
        Self { open: Vec::new(), used: None, used_by: HashMap::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// Decides about a newcomer. After `Begin`, the caller calls [`Gate::enter`].
    pub(crate) fn ask(&mut self, source: Source, proved: bool, now: Instant) -> Verdict<H> {
        let of_all = OF_ALL.used(self.used, now) / OF_ALL.burst;
        let of_source = OF_ONE_SOURCE.used(self.used_by.get(&source).copied(), now) / OF_ONE_SOURCE.burst;
        let used = of_all.max(of_source);
        if !proved && (self.open.len() >= RETRY_ABOVE || used > 0.5) {
            return Verdict::Retry;
        }
        if used >= 1.0 {
            return Verdict::Drop;
        }
        let young = |handshake: &Handshake<H>| now.saturating_duration_since(handshake.since) < GRACE;
        let victim = if self.count(source) >= MAX_FROM_ONE_SOURCE {
            self.oldest(|handshake| handshake.source == source)
        } else if self.open.len() >= MAX_HANDSHAKES {
            // Most floods end here, before anything is counted.
            if self.open.first().is_some_and(young) {
                return Verdict::Drop;
            }
            self.oldest(|handshake| !handshake.proved).or_else(|| {
                let busiest = self.open.iter().map(|handshake| self.count(handshake.source)).max();
                self.oldest(|handshake| Some(self.count(handshake.source)) == busiest)
            })
        } else {
            return Verdict::Begin(None);
        };
        match victim {
            Some(i) if !young(&self.open[i]) => Verdict::Begin(Some(self.open.remove(i).handle)),
            _ => Verdict::Drop,
        }
    }

    /// A handshake begins.
    pub(crate) fn enter(&mut self, handle: H, source: Source, proved: bool, now: Instant) {
        self.open.push(Handshake { handle, source, proved, since: now });
        self.used = Some(OF_ALL.add(self.used, now));
        let of_source = OF_ONE_SOURCE.add(self.used_by.get(&source).copied(), now);
        if self.used_by.len() >= 2 * OF_ALL.burst as usize {
            self.used_by.retain(|_, used| OF_ONE_SOURCE.used(Some(*used), now) > 0.0);
        }
        self.used_by.insert(source, of_source);
    }

    /// The handshakes whose handle fits have ended.
    pub(crate) fn leave(&mut self, ended: impl Fn(&H) -> bool) {
        self.open.retain(|handshake| !ended(&handshake.handle));
    }

    fn count(&self, source: Source) -> usize {
        self.open.iter().filter(|handshake| handshake.source == source).count()
    }

    fn oldest(&self, fits: impl Fn(&Handshake<H>) -> bool) -> Option<usize> {
        self.open.iter().position(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(i: usize) -> Source {
        Source::of(IpAddr::from([10, 0, (i >> 8) as u8, i as u8]))
    }

    /// A gate with these handshakes, all begun at `now`. Handles count from 0.
    fn gate(now: Instant, handshakes: impl IntoIterator<Item = (usize, bool)>) -> Gate<usize> {
        let mut gate = Gate::new();
        for (handle, (from, proved)) in handshakes.into_iter().enumerate() {
            gate.enter(handle, source(from), proved, now);
        }
        gate
    }

    #[test]
    fn a_quiet_gate_asks_for_nothing() {
        let now = Instant::now();
        let mut gate = gate(now, (0..RETRY_ABOVE - 1).map(|i| (i, false)));
        assert_eq!(gate.ask(source(9), false, now), Verdict::Begin(None));
    }

    #[test]
    fn spoofed_addresses_never_take_more_than_their_share() {
        let now = Instant::now();
        let mut gate = gate(now, (0..RETRY_ABOVE).map(|i| (i, false)));
        assert_eq!(gate.ask(source(999), false, now), Verdict::Retry);
        assert_eq!(gate.ask(source(999), true, now), Verdict::Begin(None));
    }

    #[test]
    fn one_source_displaces_only_itself() {
        let start = Instant::now();
        let mut gate = gate(start, [(7, true)].into_iter().chain([(1, true); MAX_FROM_ONE_SOURCE]));
        assert_eq!(gate.ask(source(1), true, start), Verdict::Drop, "all of them are young");
        assert_eq!(gate.ask(source(7), true, start), Verdict::Begin(None));
        let later = start + GRACE;
        assert_eq!(gate.ask(source(1), true, later), Verdict::Begin(Some(1)));
        gate.enter(99, source(1), true, later);
        assert_eq!(gate.ask(source(1), true, later), Verdict::Begin(Some(2)));
    }

    #[test]
    fn a_full_gate_gives_up_unproved_handshakes_and_then_those_of_the_busiest_source() {
        let start = Instant::now();
        let later = start + GRACE;
        let others = (0..MAX_HANDSHAKES - 4).map(|i| (i, true));
        let mut full = gate(start, others.clone().chain([(1000, false), (2000, true), (2000, true), (2000, true)]));
        assert_eq!(full.len(), MAX_HANDSHAKES);
        assert_eq!(full.ask(source(5000), true, start), Verdict::Drop, "all of them are young");
        let unproved = MAX_HANDSHAKES - 4;
        assert_eq!(full.ask(source(5000), true, later), Verdict::Begin(Some(unproved)));
        full.enter(5000, source(5000), true, later);
        assert_eq!(full.ask(source(5001), true, later), Verdict::Begin(Some(unproved + 1)));
    }

    #[test]
    fn a_handshake_that_ended_frees_its_place() {
        let now = Instant::now();
        let mut gate = gate(now, [(1, true); MAX_FROM_ONE_SOURCE]);
        gate.leave(|handle| *handle == 3);
        assert_eq!(gate.len(), MAX_FROM_ONE_SOURCE - 1);
        assert_eq!(gate.ask(source(1), true, now), Verdict::Begin(None));
    }

    /// How many of `count` handshakes, one every `interval`, may begin if each ends at once.
    fn begun(gate: &mut Gate<usize>, source: Source, count: usize, interval: Duration, from: Instant) -> usize {
        let times = (0..count).map(|i| from + interval * i as u32);
        let begins = times.filter(|now| {
            let begins = gate.ask(source, true, *now) == Verdict::Begin(None);
            if begins {
                gate.enter(0, source, true, *now);
                gate.leave(|_| true);
            }
            begins
        });
        begins.count()
    }

    #[test]
    fn a_source_that_comes_again_and_again_has_to_wait() {
        let (start, millisecond) = (Instant::now(), Duration::from_millis(1));
        let mut gate = Gate::new();
        // After the first 256 handshakes, 20 may begin in each of 10 s.
        let flood = begun(&mut gate, source(1), 10_000, millisecond, start);
        assert!((455..=457).contains(&flood), "{flood}");
        let now = start + 10_000 * millisecond;
        assert_eq!(gate.ask(source(1), false, now), Verdict::Retry, "its address may be another one's");
        assert_eq!(begun(&mut gate, source(2), 100, millisecond, now), 100, "others come in");
        // Strangers at many addresses use up what is left for all, and leave 40 in a second.
        let many: usize = (3..2000).map(|i| begun(&mut gate, source(i), 5, millisecond, now)).sum();
        assert!(many < 512 && gate.used_by.len() <= 1024, "{many}");
        let later = now + Duration::from_secs(60);
        assert_eq!(begun(&mut gate, source(1), 100, millisecond, later), 100, "after a quiet time");
    }

    #[test]
    fn a_source_is_an_ipv4_address_or_an_ipv6_network() {
        let of = |text: &str| Source::of(text.parse().unwrap());
        assert_eq!(of("192.0.2.1"), of("::ffff:192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
    }
}
