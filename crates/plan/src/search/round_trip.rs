//! The limit that a round trip through the pipeline puts on the period of its micro-batches.

use crate::schedule::Schedule;

/// A schedule lets a stage have only so many micro-batches in flight, between forward and backward. Each of them
/// takes a round trip from the stage to the last and back. So one more micro-batch takes at least the round trip's
/// seconds over that number.
#[derive(Debug, Clone, Copy)]
pub(super) struct RoundTrip {
    schedule: Schedule,
    micro_batches: usize,
}

impl RoundTrip {
    pub(super) fn new(schedule: Schedule, micro_batches: u32) -> Self {
        Self { schedule, micro_batches: micro_batches as usize }
    }

    /// Micro-batches in flight at a stage. `machines` is the number of machines from this stage to the last.
    pub(super) fn in_flight(&self, machines: usize) -> usize {
        self.schedule.in_flight_limit(machines).min(self.micro_batches)
    }

    /// Seconds that one more micro-batch takes at least, for a round trip of `seconds`. Zero if all micro-batches may
    /// be in flight.
    pub(super) fn period(&self, seconds: f64, machines: usize) -> f64 {
        let in_flight = self.in_flight(machines);
        if in_flight < self.micro_batches { seconds / in_flight as f64 } else { 0.0 }
    }
}
