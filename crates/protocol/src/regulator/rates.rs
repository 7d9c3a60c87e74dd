//! Detects changes of the links' rates.

use std::collections::{BTreeMap, VecDeque};

use fusionllm_program::PeerId;

use super::change::LinkEnds;
use crate::StepRecord;

/// A link's rate is the median of this many steps, so disturbances of up to three of them do not count.
const MEDIAN_STEPS: usize = 8;

/// A rate has changed if it differs by this factor.
const CHANGE_FACTOR: f64 = 1.25;

/// Messages that took fewer seconds only show a lower bound of the rate, because the scheduler suspends processes for
/// as long.
const MIN_MEASURED_S: f64 = 2e-3;

/// Compares the links' rates with earlier ones.
///
/// A message is complete when it is handed to the network, and its time runs from the arrival of its first byte to its
/// last. So neither latency nor a sender with little to send makes a link appear slow, but traffic on a shared uplink
/// does. Therefore rates are compared with measurements under the same codecs, and not with the planned rates.
#[derive(Debug, Default)]
pub(super) struct Rates {
    links: BTreeMap<LinkEnds, LinkRates>,
}

/// The rates of one link, in bytes per second.
#[derive(Debug, Default)]
struct LinkRates {
    /// The median of the first steps.
    before: Option<f64>,
    /// The latest steps.
    recent: VecDeque<f64>,
}

impl LinkRates {
    fn median(&self) -> Option<f64> {
        let mut rates: Vec<f64> = self.recent.iter().copied().collect();
        rates.sort_by(f64::total_cmp);
        (rates.len() == MEDIAN_STEPS).then(|| rates[MEDIAN_STEPS / 2])
    }

    fn add(&mut self, rate: f64) {
        self.recent.push_back(rate);
        if self.recent.len() > MEDIAN_STEPS {
            self.recent.pop_front();
        }
        if self.before.is_none() {
            self.before = self.median();
            if self.before.is_some() {
                self.recent.clear();
            }
        }
    }
}

/// Whether a rate has changed.
pub(super) fn differ(before: f64, now: f64) -> bool {
    now > CHANGE_FACTOR * before || before > CHANGE_FACTOR * now
}

impl Rates {
    /// Once any rate has changed: the rates before and now of all links with enough measurements. Then the comparison
    /// restarts.
    pub(super) fn step(&mut self, record: &StepRecord) -> Option<BTreeMap<LinkEnds, (f64, f64)>> {
        for (to, report) in (0..).map(PeerId).zip(&record.peers) {
            for r in report.received.iter().filter(|r| r.bytes > 0) {
                self.links.entry((r.from, to)).or_default().add(r.bytes as f64 / r.seconds.max(MIN_MEASURED_S));
            }
        }
        let known = |(link, w): (&LinkEnds, &LinkRates)| Some((*link, (w.before?, w.median()?)));
        let rates: BTreeMap<LinkEnds, (f64, f64)> = self.links.iter().filter_map(known).collect();
        let changed = rates.values().any(|(before, now)| differ(*before, *now));
        changed.then(|| {
            self.links.clear();
            rates
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PassReport, ReceivedBytes};

    /// A step in which peer 1 received messages from peer 0.
    fn step(bytes: u64, seconds: f64) -> StepRecord {
        let received = vec![ReceivedBytes { from: PeerId(0), bytes, seconds }];
        let peers = vec![PassReport::default(), PassReport { received, ..PassReport::default() }];
        StepRecord { peers, ..StepRecord::default() }
    }

    fn found(rates: &mut Rates, steps: &[(u64, f64)]) -> Vec<(usize, f64, f64)> {
        let seen = |(i, s): (usize, &(u64, f64))| {
            let (before, now) = rates.step(&step(s.0, s.1))?[&(PeerId(0), PeerId(1))];
            Some((i, before, now))
        };
        steps.iter().enumerate().filter_map(seen).collect()
    }

    #[test]
    fn a_changed_rate_is_detected_once() {
        let mut rates = Rates::default();
        let halves = [[(100_000, 0.1); 20], [(100_000, 0.2); 20]].concat();
        // The median falls with the fifth slow step.
        assert_eq!(found(&mut rates, &halves), [(24, 1e6, 5e5)]);
        assert_eq!(found(&mut rates, &[(100_000, 0.1); 8]), [(3, 5e5, 1e6)], "and again when it recovers");
    }

    #[test]
    fn short_disturbances_are_ignored() {
        let mut rates = Rates::default();
        // Changes by a fifth, changes in three of eight steps, and messages too fast to measure.
        let noisy: Vec<_> =
            (0..100).map(|i| (100_000, if i % 8 < 3 { 1.0 } else { 0.1 + 0.02 * f64::from(i % 2) })).collect();
        assert_eq!(found(&mut rates, &noisy), []);
        let mut rates = Rates::default();
        let fast: Vec<_> = (0..100).map(|i| (100_000, 1e-3 / f64::from(1 + i % 7))).collect();
        assert_eq!(found(&mut rates, &fast), []);
    }

    #[test]
    fn a_link_without_large_messages_is_ignored() {
        let mut rates = Rates::default();
        let silent = [[(100_000, 0.1); 20], [(0, 0.0); 20], [(100_000, 0.1); 20]].concat();
        assert_eq!(found(&mut rates, &silent), []);
    }
}
