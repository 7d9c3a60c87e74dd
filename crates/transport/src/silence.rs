//! The time for which a peer has been silent. It is pure: the caller passes the counters and the time.

use std::time::{Duration, Instant};

use iroh::endpoint::FrameStats;

/// The longest silence that one look adds. A longer pause between two looks means that this process or its machine
/// slept. The peer may have sent packets all that time.
const MAX_STEP: Duration = Duration::from_secs(2);

/// Measures a peer's silence by a counter, because QUIC does not tell when a packet arrived.
///
/// The counter is the number of received frames. QUIC counts a frame after it has authenticated the packet, so nobody
/// else can make a dead peer look alive.
#[derive(Debug)]
pub(crate) struct Silence {
    received: FrameStats,
    lasts: Duration,
    looked: Instant,
}

impl Silence {
    pub(crate) fn new(now: Instant) -> Self {
        Self { received: FrameStats::default(), lasts: Duration::ZERO, looked: now }
    }

    /// The silence at `now`. Its error is the time between two looks.
    pub(crate) fn look(&mut self, received: FrameStats, now: Instant) -> Duration {
        let step = now.saturating_duration_since(self.looked);
        self.looked = self.looked.max(now);
        if received == self.received {
            self.lasts += step.min(MAX_STEP);
        } else {
            self.received = received;
            self.lasts = Duration::ZERO;
        }
        self.lasts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(pings: u64) -> FrameStats {
        let mut frames = FrameStats::default();
        frames.ping = pings;
        frames
    }

    #[test]
    fn silence_lasts_until_a_frame_arrives() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut silence = Silence::new(start);
        assert_eq!(silence.look(frames(1), at(100)), Duration::ZERO);
        assert_eq!(silence.look(frames(1), at(600)), Duration::from_millis(500));
        assert_eq!(silence.look(frames(1), at(1_100)), Duration::from_millis(1_000));
        assert_eq!(silence.look(frames(2), at(1_200)), Duration::ZERO);
        assert_eq!(silence.look(frames(2), at(1_300)), Duration::from_millis(100));
        assert_eq!(silence.look(frames(2), at(1_000)), Duration::from_millis(100), "time never runs backwards");
    }

    /// Regression: a process that was stopped for a minute gave up all its peers when it woke.
    #[test]
    fn time_asleep_is_no_silence_of_the_peer() {
        let start = Instant::now();
        let mut silence = Silence::new(start);
        assert_eq!(silence.look(frames(0), start + Duration::from_secs(60)), MAX_STEP);
    }
}
