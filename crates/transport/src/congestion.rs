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
//! The simulator of `fusionllm-plan` predicts transfers with the same constants. It cannot import this crate; a test
//! in `fusionllm-node` compares them.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iroh::endpoint::{Controller, ControllerFactory, ControllerMetrics, RttEstimator};
use noq_proto::congestion::{Cubic, CubicConfig};

/// Bytes that a new connection may have in flight before it has measured the path.
pub const INITIAL_WINDOW_BYTES: u64 = 128 << 10;

/// Bytes that a receiver buffers per lane. So they are the most that one lane can have in flight.
pub const RECEIVE_WINDOW_BYTES: u32 = 1_250_000;

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
        Box::new(BurstController { cubic, round_trip: None, lossy: false })
    }
}

#[derive(Debug, Clone)]
struct BurstController {
    cubic: Cubic,
    /// The latest estimate.
    round_trip: Option<Duration>,
    /// Whether packets were lost. A loss that proves spurious is taken back.
    lossy: bool,
}

impl Controller for BurstController {
    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, number: u64, app_limited: bool, rtt: &RttEstimator) {
        self.round_trip = Some(rtt.get());
        self.cubic.on_ack(now, sent, bytes, number, app_limited, rtt);
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
        self.cubic.window()
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
fn burst_rate(window: u64, round_trip: Duration) -> u64 {
    (PACING_GAIN * window as f64 / round_trip.min(MAX_SPREAD_TIME).as_secs_f64().max(1e-6)) as u64
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
        let mut controller = BurstController { cubic, round_trip, lossy: false };
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
