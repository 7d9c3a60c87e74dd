//! The time when each member was last heard, and the progress that it had made.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Heartbeat, MemberId};

/// Seconds of silence after which a member is said to be silent. Heartbeats come every second.
pub(super) const SUSPECT_S: f64 = 3.0;

/// Seconds of silence after which a run goes on without a member.
pub(super) const GONE_S: f64 = 5.0;

/// Seconds without progress after which a member is stalled, unless ten predicted steps take longer.
const STALLED_S: f64 = 30.0;

/// A longer time between two ticks means that the broker itself stood still.
const LONGEST_TICK_S: f64 = 1.0;

#[derive(Debug)]
struct Seen {
    heard: f64,
    progress: u64,
    /// The time when its progress last grew, or when its generation began.
    moved: f64,
    waits_for: Option<MemberId>,
    /// Whether its silence was reported.
    reported: bool,
}

/// The broker's knowledge of its members' liveness. Times are in seconds.
#[derive(Debug, Default)]
pub(super) struct Watch {
    seen: BTreeMap<MemberId, Seen>,
    ticked: f64,
}

/// A change of a member's liveness.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Change {
    /// Silent for [`SUSPECT_S`].
    Silent(MemberId),
    /// Silent for this many seconds, at least [`GONE_S`], while others answer.
    Gone(MemberId, f64),
}

impl Watch {
    pub(super) fn joined(&mut self, member: MemberId, now: f64) {
        let seen = Seen { heard: now, progress: 0, moved: now, waits_for: None, reported: false };
        self.seen.insert(member, seen);
    }

    pub(super) fn forget(&mut self, member: MemberId) {
        self.seen.remove(&member);
    }

    /// Notes a message. Returns whether the member's silence had been reported.
    pub(super) fn heard(&mut self, member: MemberId, now: f64) -> bool {
        let all_were_silent = self.seen.values().all(|seen| now - seen.heard >= SUSPECT_S);
        if all_were_silent {
            // The broker itself was cut off. So the other members get as much time to answer as if it had not been.
            self.seen.iter_mut().filter(|(m, _)| **m != member).for_each(|(_, seen)| {
                seen.moved += now - seen.heard;
                seen.heard = now;
            });
        }
        self.seen.get_mut(&member).is_some_and(|seen| {
            let silence = now - seen.heard;
            if silence >= SUSPECT_S {
                // The member may have slept, so it gets as much time to move as it had before.
                seen.moved += silence;
            }
            seen.heard = now;
            std::mem::take(&mut seen.reported)
        })
    }

    pub(super) fn heartbeat(&mut self, member: MemberId, heartbeat: Heartbeat, now: f64) {
        if let Some(seen) = self.seen.get_mut(&member) {
            if heartbeat.progress > seen.progress {
                seen.moved = now;
            }
            (seen.progress, seen.waits_for) = (heartbeat.progress, heartbeat.waits_for);
        }
    }

    /// Gives members a fresh start, because a generation begins.
    pub(super) fn restart(&mut self, members: &[MemberId], now: f64) {
        for member in members {
            if let Some(seen) = self.seen.get_mut(member) {
                seen.moved = now;
            }
        }
    }

    /// The time when a member was last heard.
    pub(super) fn last_heard(&self, member: MemberId) -> Option<f64> {
        self.seen.get(&member).map(|seen| seen.heard)
    }

    /// Whether none of these members was heard for [`SUSPECT_S`]. Then it is rather the broker that is cut off.
    pub(super) fn all_silent(&self, members: &[MemberId], now: f64) -> bool {
        self.silent_for(members, SUSPECT_S, now)
    }

    /// Whether none of these members was heard for this many seconds.
    pub(super) fn silent_for(&self, members: &[MemberId], seconds: f64, now: f64) -> bool {
        members.iter().all(|m| self.seen.get(m).is_none_or(|seen| now - seen.heard >= seconds))
    }

    /// Passes time. Returns whether the broker itself stood still; then nobody is blamed for its silence.
    pub(super) fn tick(&mut self, now: f64) -> bool {
        let gap = now - self.ticked;
        self.ticked = now;
        if gap <= LONGEST_TICK_S {
            return false;
        }
        for seen in self.seen.values_mut() {
            seen.heard += gap;
            seen.moved += gap;
        }
        true
    }

    /// The changes since the last call. While everybody is silent, it is rather the broker that is cut off, and nobody
    /// is gone.
    pub(super) fn changes(&mut self, now: f64) -> Vec<Change> {
        let others_answer = |member: MemberId, seen: &BTreeMap<MemberId, Seen>| {
            seen.iter().any(|(m, s)| *m != member && now - s.heard < SUSPECT_S / 2.0)
        };
        let mut changes = Vec::new();
        let gone: BTreeSet<MemberId> = self
            .seen
            .iter()
            .filter(|(m, s)| now - s.heard >= GONE_S && others_answer(**m, &self.seen))
            .map(|s| *s.0)
            .collect();
        for (member, seen) in &mut self.seen {
            let silence = now - seen.heard;
            if silence >= SUSPECT_S && !std::mem::replace(&mut seen.reported, true) {
                changes.push(Change::Silent(*member));
            } else if silence < SUSPECT_S {
                seen.reported = false;
            }
            if gone.contains(member) {
                changes.push(Change::Gone(*member, silence));
            }
        }
        changes
    }

    /// The member that holds the others up, if nothing has moved for too long: the end of the chain of members that
    /// wait for each other. Silence is no stall.
    /// `step_s` is the expected time of a step. Returns the member and its seconds without progress.
    pub(super) fn stalled(&self, members: &[MemberId], step_s: f64, now: f64) -> Option<(MemberId, f64)> {
        let patience = STALLED_S.max(10.0 * step_s);
        let stuck =
            |m: MemberId| self.seen.get(&m).filter(|seen| now - seen.moved >= patience && now - seen.heard < SUSPECT_S);
        let mut at = members.iter().copied().find(|m| stuck(*m).is_some())?;
        let mut visited = BTreeSet::new();
        // A member that waits for one that moves is not to blame. Nor is a member that waits for the broker.
        while let Some(next) = stuck(at)?.waits_for.filter(|_| visited.insert(at)) {
            at = next;
        }
        stuck(at).map(|seen| (at, now - seen.moved))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(m: u32) -> MemberId {
        MemberId(m)
    }

    fn watch(count: u32) -> Watch {
        let mut watch = Watch::default();
        for m in 0..count {
            watch.joined(id(m), 0.0);
        }
        watch
    }

    fn at(progress: u64, waits_for: Option<MemberId>) -> Heartbeat {
        Heartbeat { generation: 1, progress, waits_for, disk_free: None }
    }

    #[test]
    fn silence_is_reported_once_and_then_ends_patience() {
        let mut watch = watch(2);
        watch.heard(id(1), 2.0);
        watch.heard(id(1), 3.0);
        assert_eq!(watch.changes(3.0), [Change::Silent(id(0))]);
        watch.heard(id(1), 4.0);
        assert_eq!(watch.changes(4.0), []);
        watch.heard(id(1), 5.0);
        assert_eq!(watch.changes(5.0), [Change::Gone(id(0), 5.0)]);
        assert!(watch.heard(id(0), 5.5));
        assert_eq!(watch.changes(5.5), []);
    }

    #[test]
    fn after_a_silence_of_all_everybody_has_time_to_answer() {
        let mut watch = watch(2);
        watch.changes(20.0);
        assert!(watch.heard(id(0), 20.0));
        assert_eq!(watch.changes(22.0), []);
        watch.heard(id(0), 22.5);
        watch.heard(id(0), 25.0);
        assert_eq!(watch.changes(25.0), [Change::Silent(id(1)), Change::Gone(id(1), 5.0)]);
    }

    #[test]
    fn if_all_are_silent_nobody_is_gone() {
        let mut watch = watch(3);
        assert_eq!(watch.changes(20.0), [0, 1, 2].map(|m| Change::Silent(id(m))));
    }

    #[test]
    fn a_broker_that_stood_still_blames_nobody() {
        let mut watch = watch(2);
        for tick in 0..10 {
            assert!(!watch.tick(f64::from(tick) * 0.5));
        }
        watch.heard(id(0), 4.5);
        watch.heard(id(1), 4.0);
        assert!(watch.tick(64.5));
        assert_eq!(watch.changes(64.6), []);
    }

    #[test]
    fn the_root_of_the_waiting_is_named() {
        let mut watch = watch(3);
        let members = [id(0), id(1), id(2)];
        for m in 0..3 {
            watch.heartbeat(id(m), at(7, (m > 0).then(|| id(m - 1))), 10.0);
        }
        let alive = |watch: &mut Watch, now: f64| (0..3).for_each(|m| assert!(!watch.heard(id(m), now)));
        for now in 0..=80 {
            alive(&mut watch, f64::from(now));
        }
        assert_eq!(watch.stalled(&members, 0.1, 39.0), None);
        assert_eq!(watch.stalled(&members, 0.1, 40.0), Some((id(0), 30.0)));
        assert_eq!(watch.stalled(&members, 5.0, 40.0), None, "ten steps of five seconds");
        watch.heartbeat(id(0), at(8, None), 41.0);
        assert_eq!(watch.stalled(&members, 0.1, 45.0), None, "who is waited for moves");
        // A circle of members that wait for each other has such an end, too: some member lies, or the programs are
        // wrong.
        watch.heartbeat(id(0), at(8, Some(id(2))), 42.0);
        assert!(watch.stalled(&members, 0.1, 80.0).is_some());
        watch.heartbeat(id(0), at(8, Some(MemberId::BROKER)), 43.0);
        assert_eq!(watch.stalled(&members, 0.1, 80.0), None, "the broker is late itself");
    }
}
