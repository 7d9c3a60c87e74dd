//! How fast members compute, compared with what their plan expects of them.

use std::collections::{BTreeMap, VecDeque};

use crate::MemberId;

/// Least steps whose median counts, and least seconds that they take.
const WINDOW_STEPS: usize = 10;
const WINDOW_S: f64 = 10.0;

/// The first steps of a generation warm caches and allocators.
const WARM_UP: u32 = 3;

/// A change of less than this factor may pass by itself.
const CHANGE: f64 = 2.0;

/// A member's computing times in one generation.
#[derive(Debug, Default)]
struct Pace {
    warm: u32,
    /// The time when each of the last steps ended, and its seconds of computing over those expected.
    recent: VecDeque<(f64, f64)>,
    /// The median that was told last. At first, it is the ratio that the plan expects.
    told: Option<f64>,
}

/// A change of a member's speed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SpeedChange {
    pub(super) member: MemberId,
    /// The member's seconds of computing over those at the start of the run.
    pub(super) times: f64,
}

/// The speeds of a run's members. Times are in seconds.
#[derive(Debug, Default)]
pub(super) struct Speeds {
    /// The usual quotient of a member's seconds of computing and the predicted seconds. It is not 1, because
    /// predictions err.
    usual: BTreeMap<MemberId, f64>,
    /// How many times slower the present plan takes a member to be than it was at the start.
    planned: BTreeMap<MemberId, f64>,
    paces: BTreeMap<MemberId, Pace>,
    /// Seconds of the generation's last steps.
    steps: VecDeque<f64>,
}

impl Speeds {
    /// A generation begins, whose plan takes members to be this many times slower than at the start. Without
    /// predictions, the times of two plans cannot be compared.
    pub(super) fn begin(&mut self, planned: BTreeMap<MemberId, f64>, predicted: bool) {
        if !predicted {
            self.usual.clear();
        }
        self.planned = planned;
        self.paces.clear();
        self.steps.clear();
    }

    /// Notes the seconds of a step.
    pub(super) fn note_step(&mut self, step_s: f64) {
        self.steps.push_back(step_s);
        if self.steps.len() > WINDOW_STEPS {
            self.steps.pop_front();
        }
    }

    /// The median of the last steps' seconds.
    pub(super) fn step_s(&self) -> Option<f64> {
        (!self.steps.is_empty()).then(|| median(self.steps.iter().copied().collect()))
    }

    /// Notes a step's seconds of computing. `predicted` are those that the plan expects.
    pub(super) fn note(&mut self, member: MemberId, compute_s: f64, predicted: f64, now: f64) -> Option<SpeedChange> {
        let ratio = compute_s / predicted;
        let pace = self.paces.entry(member).or_default();
        pace.warm += 1;
        if pace.warm <= WARM_UP || !(ratio.is_finite() && ratio > 0.0) {
            return None;
        }
        pace.recent.push_back((now, ratio));
        let is_full = |recent: &VecDeque<(f64, f64)>| {
            recent.len() > WINDOW_STEPS && recent.front().is_some_and(|(then, _)| now - then >= WINDOW_S)
        };
        if !is_full(&pace.recent) {
            return None;
        }
        let median = median(pace.recent.iter().map(|(_, ratio)| *ratio).collect());
        while is_full(&pace.recent) {
            pace.recent.pop_front();
        }
        let usual = *self.usual.entry(member).or_insert(median);
        let told = pace.told.get_or_insert(usual);
        if median < *told * CHANGE && median > *told / CHANGE {
            return None;
        }
        *told = median;
        // Clears the window, so that the next one has none of these steps.
        pace.recent.clear();
        let planned = self.planned.get(&member).copied().unwrap_or(1.0);
        Some(SpeedChange { member, times: planned * median / usual })
    }
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(0);

    /// The changes while a member computes this long in each of many steps of 0.5 s.
    fn changes(speeds: &mut Speeds, now: &mut f64, compute_s: f64) -> Vec<f64> {
        let steps = (0..100).filter_map(|_| {
            *now += 0.5;
            speeds.note(A, compute_s, 0.1, *now)
        });
        steps.map(|c| (c.times * 100.0).round() / 100.0).collect()
    }

    #[test]
    fn a_change_is_told_once_whatever_the_prediction_was() {
        let (mut speeds, mut now) = (Speeds::default(), 0.0);
        assert_eq!(changes(&mut speeds, &mut now, 0.15), [0.0; 0]);
        assert_eq!(changes(&mut speeds, &mut now, 0.25), [0.0; 0], "it may pass");
        assert_eq!(changes(&mut speeds, &mut now, 0.6), [4.0]);
        assert_eq!(changes(&mut speeds, &mut now, 0.15), [1.0]);
    }

    #[test]
    fn one_slow_step_changes_nothing() {
        let (mut speeds, mut now) = (Speeds::default(), 0.0);
        for step in 0..500 {
            now += 0.5;
            let compute_s = if step % 7 == 0 { 2.0 } else { 0.1 };
            assert_eq!(speeds.note(A, compute_s, 0.1, now), None);
        }
    }

    #[test]
    fn a_plan_for_a_slow_member_expects_it_to_be_slow() {
        let (mut speeds, mut now) = (Speeds::default(), 0.0);
        changes(&mut speeds, &mut now, 0.1);
        assert_eq!(changes(&mut speeds, &mut now, 0.4), [4.0]);
        speeds.begin(BTreeMap::from([(A, 4.0)]), true);
        // The new plan predicts 0.1 s for a quarter of the work.
        assert_eq!(changes(&mut speeds, &mut now, 0.1), [0.0; 0]);
        assert_eq!(changes(&mut speeds, &mut now, 0.025), [1.0]);
    }
}
