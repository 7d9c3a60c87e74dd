//! One emulated link: a queue, a rate and a latency.

use std::time::Duration;

/// Bytes that an IPv4 and a UDP header add to each datagram on a link.
pub const HEADER_BYTES: u64 = 28;

/// The time that the full queue of a usual router takes to send.
pub const QUEUE_TIME: Duration = Duration::from_millis(100);

/// The queue of a slow router, in bytes.
pub const MIN_QUEUE_BYTES: u64 = 64 << 10;

/// One direction of a link, or an uplink that several links share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkSpec {
    /// The name in reports.
    pub name: String,
    /// Bytes per second, [`HEADER_BYTES`] included; `None` is unlimited. A link of rate zero drops everything.
    pub rate: Option<u64>,
    /// Time from sending the last bit to receiving it.
    pub latency: Duration,
    /// Most bytes in the queue, the datagram being sent included. A full queue drops new datagrams, as a router
    /// does. An empty queue accepts a datagram of any size.
    pub queue_bytes: u64,
}

impl LinkSpec {
    /// A link with the queue of a usual router: [`QUEUE_TIME`] of its rate, at least [`MIN_QUEUE_BYTES`].
    pub fn new(name: impl Into<String>, rate: Option<u64>, latency: Duration) -> Self {
        let queue_bytes = rate.map_or(u64::MAX, |rate| {
            let queue = u128::from(rate) * QUEUE_TIME.as_millis() / 1000;
            (queue as u64).max(MIN_QUEUE_BYTES)
        });
        Self { name: name.into(), rate, latency, queue_bytes }
    }
}

/// Counters of one link. Bytes include [`HEADER_BYTES`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// The link's name.
    pub name: String,
    /// Datagrams that crossed the link.
    pub datagrams: u64,
    /// The bytes of these datagrams.
    pub bytes: u64,
    /// Datagrams dropped by a full queue.
    pub overflowed: u64,
    /// Datagrams dropped at random, by the link's loss probability.
    pub dropped: u64,
    /// Datagrams lost because the link was cut.
    pub cut_off: u64,
    /// Time spent sending the datagrams that crossed.
    pub busy: Duration,
    /// Most bytes that were in the queue at once.
    pub max_queued_bytes: u64,
    /// The declared rate in bytes per second.
    pub rate: Option<u64>,
    /// Bytes that entered during [`Self::backlog`].
    pub backlog_bytes: u64,
    /// Time during which the peers had sent more than the emulator could read.
    pub backlog: Duration,
}

impl LinkStats {
    /// Bytes per second that entered the link while the emulator had a backlog; `None` for too small a sample.
    pub fn backlog_rate(&self) -> Option<f64> {
        const MIN_RATE_SAMPLE_BYTES: u64 = 1 << 20;
        let rate = self.backlog_bytes as f64 / self.backlog.as_secs_f64().max(1e-9);
        (self.backlog_bytes >= MIN_RATE_SAMPLE_BYTES).then_some(rate)
    }
}

/// One datagram's crossing of one link.
#[derive(Debug, Default)]
pub(super) struct Crossing {
    /// The time when the datagram leaves the link.
    pub(super) due: Duration,
    bytes: u64,
    /// The time to send the datagram.
    sending: Duration,
    /// How often the link had been cut when the datagram entered.
    cuts: u64,
}

/// A link and the state of its queue.
#[derive(Debug)]
pub(super) struct Link {
    spec: LinkSpec,
    /// The time when everything that has entered is sent.
    free: Duration,
    /// The fraction of a nanosecond by which `free` is too early, times the rate.
    remainder: u64,
    loss: f64,
    is_cut: bool,
    cuts: u64,
    /// The end of the backlog counted so far.
    backlog_until: Duration,
    stats: LinkStats,
}

impl Link {
    pub(super) fn new(spec: LinkSpec) -> Self {
        let stats = LinkStats { name: spec.name.clone(), rate: spec.rate, ..LinkStats::default() };
        let zero = Duration::ZERO;
        Self { spec, free: zero, remainder: 0, loss: 0.0, is_cut: false, cuts: 0, backlog_until: zero, stats }
    }

    /// Counts the bytes that entered during a backlog. Routes that share the link may report overlapping times.
    pub(super) fn add_backlog(&mut self, since: Duration, now: Duration, bytes: u64) {
        let since = since.max(self.backlog_until);
        self.stats.backlog += now.saturating_sub(since);
        self.stats.backlog_bytes += bytes;
        self.backlog_until = now;
    }

    pub(super) fn cut(&mut self) {
        (self.is_cut, self.cuts) = (true, self.cuts + 1);
    }

    pub(super) fn heal(&mut self, now: Duration) {
        if self.is_cut {
            (self.is_cut, self.free) = (false, now);
        }
    }

    pub(super) fn set_loss(&mut self, probability: f64) {
        self.loss = probability;
    }

    pub(super) fn stats(&self) -> &LinkStats {
        &self.stats
    }

    /// Puts a datagram on the link. If it returns `None`, the datagram is lost, and counted.
    pub(super) fn enter(&mut self, now: Duration, bytes: u64, random: &mut u64) -> Option<Crossing> {
        if self.is_cut {
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
            let queued = unsent_bytes(self.free - now, rate) + bytes;
            if rate == 0 || (queued > self.spec.queue_bytes && queued > bytes) {
                self.stats.overflowed += 1;
                return None;
            }
            self.stats.max_queued_bytes = self.stats.max_queued_bytes.max(queued);
            let work = bytes * NANOS_PER_SECOND + self.remainder;
            self.remainder = work % rate;
            crossing.sending = Duration::from_nanos(work / rate);
            self.free += crossing.sending;
            crossing.due = self.free + self.spec.latency;
        }
        Some(crossing)
    }

    /// Takes a datagram off the link. Returns whether it survived.
    pub(super) fn leave(&mut self, crossing: &Crossing) -> bool {
        let survived = crossing.cuts == self.cuts;
        if survived {
            self.stats.datagrams += 1;
            self.stats.bytes += crossing.bytes;
            self.stats.busy += crossing.sending;
        } else {
            self.stats.cut_off += 1;
        }
        survived
    }
}

pub(super) const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// Bytes that a link of this rate sends in this time, rounded up.
fn unsent_bytes(time: Duration, rate: u64) -> u64 {
    let bytes = (time.as_nanos() * u128::from(rate)).div_ceil(u128::from(NANOS_PER_SECOND));
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
