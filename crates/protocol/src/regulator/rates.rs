//! Whether links have changed.

use std::collections::{BTreeMap, VecDeque};

use fusionllm_plan::PeerId;

use super::Link;
use crate::StepRecord;

/// Steps whose median is a link's rate: what disturbs three of them does not count.
const STEPS: usize = 8;

/// By how much a rate must change.
const CHANGE: f64 = 1.25;

/// A step's messages that came in less time show only that a link is at least so fast, in seconds: processes are put off for as long.
const SHORTEST: f64 = 2e-3;

/// Compares links with what they were.
///
/// A message is whole when it is handed to the network, and its time runs from its first byte's arrival to its last's: neither latency nor a sender that has little to say makes a link look slow, but
/// what shares an uplink with it does. So rates are compared with those measured under the same codecs, not with what the plan takes the link to be.
#[derive(Debug, Default)]
pub(super) struct Rates {
    links: BTreeMap<Link, Watched>,
}

/// In bytes/s.
#[derive(Debug, Default)]
struct Watched {
    /// That of the first steps.
    before: Option<f64>,
    /// Those of the last ones.
    recent: VecDeque<f64>,
}

impl Watched {
    fn median(&self) -> Option<f64> {
        let mut rates: Vec<f64> = self.recent.iter().copied().collect();
        rates.sort_by(f64::total_cmp);
        (rates.len() == STEPS).then(|| rates[STEPS / 2])
    }

    fn put(&mut self, rate: f64) {
        self.recent.push_back(rate);
        if self.recent.len() > STEPS {
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

/// Whether a rate is another one.
pub(super) fn differ(before: f64, now: f64) -> bool {
    now > CHANGE * before || before > CHANGE * now
}

impl Rates {
    /// Once any rate has changed, those of all links that were measured long enough, before and now. Then it begins anew.
    pub(super) fn step(&mut self, record: &StepRecord) -> Option<BTreeMap<Link, (f64, f64)>> {
        for (to, report) in (0..).map(PeerId).zip(&record.peers) {
            for (from, bytes, seconds) in report.received.iter().filter(|r| r.1 > 0) {
                self.links.entry((*from, to)).or_default().put(*bytes as f64 / seconds.max(SHORTEST));
            }
        }
        let known = |(link, w): (&Link, &Watched)| Some((*link, (w.before?, w.median()?)));
        let rates: BTreeMap<Link, (f64, f64)> = self.links.iter().filter_map(known).collect();
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
    use crate::PassReport;

    /// A step in which peer 1 got messages from peer 0.
    fn step(bytes: u64, seconds: f64) -> StepRecord {
        let received = vec![(PeerId(0), bytes, seconds)];
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
    fn a_link_that_slows_down_is_found_once() {
        let mut rates = Rates::default();
        let halves = [[(100_000, 0.1); 20], [(100_000, 0.2); 20]].concat();
        // The median falls with the fifth slow step.
        assert_eq!(found(&mut rates, &halves), [(24, 1e6, 5e5)]);
        assert_eq!(found(&mut rates, &[(100_000, 0.1); 8]), [(3, 5e5, 1e6)], "and when it is back");
    }

    #[test]
    fn disturbances_change_nothing() {
        let mut rates = Rates::default();
        // By a fifth, for three steps in eight, or so fast that no clock tells.
        let noisy: Vec<_> =
            (0..100).map(|i| (100_000, if i % 8 < 3 { 1.0 } else { 0.1 + 0.02 * f64::from(i % 2) })).collect();
        assert_eq!(found(&mut rates, &noisy), []);
        let mut rates = Rates::default();
        let fast: Vec<_> = (0..100).map(|i| (100_000, 1e-3 / f64::from(1 + i % 7))).collect();
        assert_eq!(found(&mut rates, &fast), []);
    }

    #[test]
    fn a_link_that_carries_nothing_large_tells_nothing() {
        let mut rates = Rates::default();
        let silent = [[(100_000, 0.1); 20], [(0, 0.0); 20], [(100_000, 0.1); 20]].concat();
        assert_eq!(found(&mut rates, &silent), []);
    }
}
