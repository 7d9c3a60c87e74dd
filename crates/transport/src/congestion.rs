//! How fast a connection sends: CUBIC's window, let out in bursts.
//!
//! A training step sends a tensor, computes, and sends the next. Two habits of QUIC, meant for streams that never end, slow that down on long ways. A window grows no
//! further than what there is to send, and it is spread over a round trip: with 200 ms there and back, a tensor of 64 KB that fits a 50 Mbps line 20 times over would
//! take some 130 ms more. So connections begin with a window that the queue before a home line takes at once, and spread it over no more than [`SPREAD`]. Where that
//! loses packets, the window narrows as ever, and is spread over the round trip from then on: a tensor waits long for the last of its packets to be sent again.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iroh::endpoint::{Controller, ControllerFactory, ControllerMetrics, RttEstimator};
use noq_proto::congestion::{Cubic, CubicConfig};

/// Bytes that may be under way before a connection knows more of its path.
const INITIAL_WINDOW: u64 = 128 << 10;

/// A window is spread over a round trip, or this if that is shorter.
const SPREAD: Duration = Duration::from_millis(10);

/// Makes [`Bursts`].
#[derive(Debug)]
pub(crate) struct BurstsConfig;

impl ControllerFactory for BurstsConfig {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let mut cubic = CubicConfig::default();
        cubic.initial_window(INITIAL_WINDOW);
        Box::new(Bursts { cubic: Cubic::new(Arc::new(cubic), now, current_mtu), round_trip: None, lossy: false })
    }
}

#[derive(Debug, Clone)]
struct Bursts {
    cubic: Cubic,
    /// As last estimated.
    round_trip: Option<Duration>,
    /// Whether packets were lost, other than by mistake.
    lossy: bool,
}

impl Controller for Bursts {
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
        metrics.pacing_rate = self.round_trip.filter(|_| !self.lossy).map(|rtt| pace(self.window(), rtt));
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

/// Bytes a second: a quarter more than the window asks for, so that acknowledgements do not hold it up (RFC 9002, section 7.7).
fn pace(window: u64, round_trip: Duration) -> u64 {
    (1.25 * window as f64 / round_trip.min(SPREAD).as_secs_f64().max(1e-6)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_spread_over_a_round_trip_unless_that_is_long() {
        assert_eq!(pace(100_000, Duration::from_millis(5)), 25_000_000);
        assert_eq!(pace(100_000, Duration::from_millis(10)), 12_500_000);
        assert_eq!(pace(100_000, Duration::from_millis(300)), 12_500_000);
        assert_eq!(pace(100_000, Duration::ZERO), 125_000_000_000);
    }

    #[test]
    fn losses_narrow_the_window() {
        let now = Instant::now();
        let mut bursts = Arc::new(BurstsConfig).build(now, 1_452);
        assert_eq!(bursts.window(), INITIAL_WINDOW);
        assert_eq!(bursts.metrics().pacing_rate, None, "not before a round trip is known");
        let sent = now + Duration::from_millis(1);
        bursts.on_congestion_event(sent, sent, false, false, 1_452, 7);
        assert_eq!(bursts.window(), INITIAL_WINDOW * 7 / 10);
    }
}
