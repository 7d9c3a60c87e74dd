//! The rate at which a connection sends: CUBIC's window, sent in bursts.
//!
//! A training step sends a tensor, computes, and sends the next tensor. QUIC's defaults suit streams that never
//! pause, and two of them slow such steps down on links of high latency. First, the window only grows while there is
//! enough to send. Second, the sender spreads a window over a whole round trip. A tensor of 64 KB fits 20 times into
//! one round trip of 200 ms at 50 Mbps, and would still take some 130 ms longer.
//!
//! So a connection starts with a window that the queue of a home router absorbs, and spreads a window over at most
//! [`MAX_SPREAD_TIME`]. After a packet loss the window shrinks as usual, and is spread over the round trip again. A
//! tensor waits long for the retransmission of its last packets, so losses cost more than spreading.
//!
//! # Why not a limit by delay
//!
//! Connections that share an uplink and never pause use 0.88 to 0.98 of it (the bench `shared_uplink`). Connections
//! that send to and fro use 0.73 to 0.95. When others fall silent, a window still has the size of a share, and it grows
//! for seconds. A round trip also contains the queue of the way back. A controller that limits delay takes that queue
//! for its own, and holds a connection back that is alone on its way.
//!
//! # How much may be in flight
//!
//! A receiver buffers [`STREAM_WINDOW_BYTES`] for each stream, and so much may be in flight on any path. On paths that
//! hold more, such as 1 Gbps over 100 ms, the limit follows the path: it is [`WINDOW_GAIN`] times what the path has
//! delivered in one round trip, up to [`MAX_WINDOW_BYTES`]. That is more than the path holds, so that the limit grows
//! until the path is full, and little enough for its queue. CUBIC alone would grow until it loses packets.
//!
//! The simulator of `fusionllm-plan` predicts transfers with the same constants. It cannot import this crate; a test
//! in `fusionllm-node` compares them.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::lane::MAX_STREAMS;
use iroh::endpoint::{Controller, ControllerFactory, ControllerMetrics, RttEstimator};
use noq_proto::congestion::{Cubic, CubicConfig};

/// Bytes that a new connection may have in flight before it has measured the path.
pub const INITIAL_WINDOW_BYTES: u64 = 128 << 10;

/// Bytes that a receiver buffers per stream.
pub const STREAM_WINDOW_BYTES: u32 = 1_250_000;

/// The most bytes that one connection has in flight.
pub const MAX_WINDOW_BYTES: u64 = STREAM_WINDOW_BYTES as u64 * MAX_STREAMS as u64;

/// The limit of what is in flight, over what the path has delivered in one round trip.
pub const WINDOW_GAIN: f64 = 1.5;

/// A window is spread over one round trip, but at most over this time.
pub const MAX_SPREAD_TIME: Duration = Duration::from_millis(10);

/// Sending rate over window per spreading time. More than 1, so that late acknowledgements do not stall the sender
/// (RFC 9002, section 7.7).
pub const PACING_GAIN: f64 = 1.25;

/// Makes one [`BurstController`] per connection.
#[derive(Debug)]
pub(crate) struct BurstControllerFactory;

impl ControllerFactory for BurstControllerFactory {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let mut cubic = CubicConfig::default();
        cubic.initial_window(INITIAL_WINDOW_BYTES);
        let cubic = Cubic::new(Arc::new(cubic), now, current_mtu);
        Box::new(BurstController {
            cubic,
            limit: STREAM_WINDOW_BYTES.into(),
            round: Round::default(),
            round_trip: None,
            lossy: false,
        })
    }
}

#[derive(Debug, Clone)]
struct BurstController {
    cubic: Cubic,
    /// Most bytes in flight, whatever CUBIC allows.
    limit: u64,
    round: Round,
    /// The latest estimate.
    round_trip: Option<Duration>,
    /// Whether packets were lost. A loss that proves spurious is taken back.
    lossy: bool,
}

impl Controller for BurstController {
    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, number: u64, app_limited: bool, rtt: &RttEstimator) {
        self.round_trip = Some(rtt.get());
        if let Some(delivered) = self.round.acknowledged(now, sent, bytes, rtt.min()) {
            self.limit = self.limit.max((WINDOW_GAIN * delivered) as u64).min(MAX_WINDOW_BYTES);
        }
        // CUBIC grows no further than the limit, since a loss would otherwise shrink a window that nobody used.
        let limited = app_limited || self.cubic.window() >= self.limit;
        self.cubic.on_ack(now, sent, bytes, number, limited, rtt);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        persistent: bool,
        is_ecn: bool,
        lost_bytes: u64,
        largest_lost: u64,
    ) {
        self.lossy = true;
        self.cubic.on_congestion_event(now, sent, persistent, is_ecn, lost_bytes, largest_lost);
    }

    fn on_spurious_congestion_event(&mut self) {
        self.lossy = false;
        self.cubic.on_spurious_congestion_event();
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.cubic.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        self.cubic.window().min(self.limit)
    }

    fn metrics(&self) -> ControllerMetrics {
        let mut metrics = self.cubic.metrics();
        metrics.pacing_rate = self.round_trip.filter(|_| !self.lossy).map(|rtt| burst_rate(self.window(), rtt));
        metrics
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        self.cubic.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// The sending rate of a lossless connection, in bytes per second.
///
/// A window that has grown beyond one stream's is spread over the round trip. That is still faster than the path, and
/// a burst of so many bytes would overflow its queue.
fn burst_rate(window: u64, round_trip: Duration) -> u64 {
    let spread = if window > STREAM_WINDOW_BYTES.into() { round_trip } else { round_trip.min(MAX_SPREAD_TIME) };
    (PACING_GAIN * window as f64 / spread.as_secs_f64().max(1e-6)) as u64
}

/// Counts what the path delivers in a round trip.
#[derive(Debug, Clone, Default)]
struct Round {
    /// When its first packet was acknowledged, and when that was sent.
    began: Option<(Instant, Instant)>,
    /// When the latest packet was acknowledged.
    latest: Option<Instant>,
    /// Bytes acknowledged since it began.
    bytes: u64,
}

impl Round {
    /// A packet was acknowledged at `now`. If that ends a round: the bytes that the path delivers in `round_trip`, which
    /// is a round trip without queues.
    ///
    /// A round lasts at least [`MAX_SPREAD_TIME`], so that the jitter of acknowledgements counts little on short paths.
    /// Acknowledgements may come in a burst after a delay. So a round takes no less time than its packets were sent in.
    fn acknowledged(&mut self, now: Instant, sent: Instant, bytes: u64, round_trip: Duration) -> Option<f64> {
        let pause = self.latest.replace(now).is_some_and(|latest| now.duration_since(latest) > round_trip);
        let (acknowledged_first, sent_first) = match self.began {
            Some(began) if !pause => began,
            // Time in which there was nothing to send says nothing of the path.
            _ => {
                (self.began, self.bytes) = (Some((now, sent)), 0);
                return None;
            }
        };
        self.bytes += bytes;
        let took = now.duration_since(acknowledged_first).max(sent.saturating_duration_since(sent_first));
        if took < round_trip.max(MAX_SPREAD_TIME) {
            return None;
        }
        let delivered = self.bytes as f64 * round_trip.as_secs_f64() / took.as_secs_f64();
        (self.began, self.bytes) = (Some((now, sent)), 0);
        Some(delivered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_spread_over_a_round_trip_of_at_most_ten_milliseconds() {
        assert_eq!(burst_rate(100_000, Duration::from_millis(5)), 25_000_000);
        assert_eq!(burst_rate(100_000, Duration::from_millis(10)), 12_500_000);
        assert_eq!(burst_rate(100_000, Duration::from_millis(300)), 12_500_000);
        assert_eq!(burst_rate(100_000, Duration::ZERO), 125_000_000_000);
        assert_eq!(burst_rate(2_500_000, Duration::from_millis(100)), 31_250_000, "more than one stream's window");
    }

    /// The packets of a sender that always has `window` bytes in flight on a path, by their times of leaving and of
    /// acknowledgement, for `seconds`.
    fn delivered(rate: f64, round_trip: f64, seconds: f64, window: impl Fn(f64) -> u64) -> (f64, usize) {
        const PACKET: f64 = 1000.0;
        let (start, at) = (Instant::now(), |s: f64| Duration::from_secs_f64(s));
        let (mut round, mut most, mut rounds) = (Round::default(), 0.0f64, 0);
        let (mut in_flight, mut free) = (std::collections::VecDeque::new(), 0.0f64);
        let mut now = 0.0f64;
        while now < seconds {
            while (in_flight.len() as f64) * PACKET < window(most) as f64 {
                free = free.max(now) + PACKET / rate;
                in_flight.push_back((now, free + round_trip));
            }
            let Some((sent, acknowledged)) = in_flight.pop_front() else { break };
            now = acknowledged;
            let ended = round.acknowledged(start + at(now), start + at(sent), PACKET as u64, at(round_trip));
            rounds += usize::from(ended.is_some());
            most = most.max(ended.unwrap_or(0.0));
        }
        (most, rounds)
    }

    #[test]
    fn the_window_grows_to_what_a_long_path_holds_and_stays_small_on_short_ones() {
        let limit = |most: f64| u64::from(STREAM_WINDOW_BYTES).max((WINDOW_GAIN * most) as u64);
        let (most, _) = delivered(50e6, 0.1, 3.0, limit);
        assert!((4.9e6..5.3e6).contains(&most), "400 Mbps over 100 ms hold 5 MB: {most}");
        let (most, rounds) = delivered(7.5e6, 0.004, 3.0, limit);
        assert!((2e4..4e4).contains(&most) && rounds > 100, "60 Mbps over 4 ms hold 30 kB: {most}");
    }

    #[test]
    fn acknowledgements_that_come_at_once_after_a_delay_do_not_raise_the_limit() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let mut round = Round::default();
        assert_eq!(round.acknowledged(start + ms(100), start, 1000, ms(100)), None);
        // Packets that were sent over 200 ms are acknowledged together.
        let mut ends = (1..=200).map(|i| round.acknowledged(start + ms(199), start + ms(i), 10_000, ms(100)));
        let (first, rest): (Vec<_>, Vec<_>) = (ends.by_ref().take(99).collect(), ends.collect());
        assert!(first.iter().all(Option::is_none));
        assert_eq!(rest[0], Some(1_000_000.0));
        // What comes after a pause begins a new round.
        assert_eq!(round.acknowledged(start + ms(900), start + ms(800), 10_000, ms(100)), None);
    }

    #[test]
    fn losses_shrink_the_window() {
        let now = Instant::now();
        let mut controller = Arc::new(BurstControllerFactory).build(now, 1_452);
        assert_eq!(controller.window(), INITIAL_WINDOW_BYTES);
        assert_eq!(controller.metrics().pacing_rate, None, "no round trip is known yet");
        let sent = now + Duration::from_millis(1);
        controller.on_congestion_event(sent, sent, false, false, 1_452, 7);
        assert_eq!(controller.window(), INITIAL_WINDOW_BYTES * 7 / 10);
    }

    #[test]
    fn bursts_end_with_a_loss_and_resume_if_it_was_none() {
        let now = Instant::now();
        let mut cubic = CubicConfig::default();
        cubic.initial_window(INITIAL_WINDOW_BYTES);
        let cubic = Cubic::new(Arc::new(cubic), now, 1_452);
        let round_trip = Some(Duration::from_millis(80));
        let limit = STREAM_WINDOW_BYTES.into();
        let mut controller = BurstController { cubic, limit, round: Round::default(), round_trip, lossy: false };
        let burst = Some(burst_rate(INITIAL_WINDOW_BYTES, MAX_SPREAD_TIME));
        assert_eq!(controller.metrics().pacing_rate, burst);
        let sent = now + Duration::from_millis(1);
        controller.on_congestion_event(sent, sent, false, false, 1_452, 7);
        assert_eq!(controller.metrics().pacing_rate, None, "QUIC spreads the window over the round trip");
        controller.on_spurious_congestion_event();
        assert_eq!(controller.window(), INITIAL_WINDOW_BYTES);
        assert_eq!(controller.metrics().pacing_rate, burst);
    }
}
