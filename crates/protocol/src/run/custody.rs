//! The record of which member has which tensor at which cut.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use fusionllm_program::TensorKey;

use crate::{MemberId, TrainingProgress};

/// The tensors of a cut that one member owns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The member that owns the tensors.
    pub owner: MemberId,
    /// The tensors.
    pub tensors: Arc<BTreeSet<TensorKey>>,
    /// The member that keeps a copy, if another one can.
    pub buddy: Option<MemberId>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Cut {
    /// The number of updates before the cut, once its step is complete.
    updates: Option<u64>,
    /// Each share, with the members that confirmed that they have it.
    shares: Vec<(Share, BTreeSet<MemberId>)>,
}

/// A state from which a run can start again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restart {
    /// The state that it starts from.
    pub progress: TrainingProgress,
    /// The members that have the tensors of that state. A tensor that is not here comes from the broker: from the
    /// checkpoint of that step, or, at the run's start, from where the run started.
    pub holders: BTreeMap<TensorKey, Vec<MemberId>>,
}

/// The cuts of a run, as far as members have confirmed them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Custody {
    cuts: BTreeMap<u64, Cut>,
    /// The state on the broker's disk: the newest checkpoint, or else the run's start.
    on_disk: TrainingProgress,
    /// The cut that is being copied to buddies. A newer one waits until this one is copied, or void.
    copying: Option<u64>,
    /// The newest step at which a cut was ever taken.
    newest: u64,
}

impl Custody {
    /// The custody of a run that starts here.
    pub fn new(start: TrainingProgress) -> Self {
        Self { cuts: BTreeMap::new(), on_disk: start, copying: None, newest: start.step }
    }

    /// The state on the broker's disk: the newest checkpoint, or else the run's start.
    pub fn on_disk(&self) -> TrainingProgress {
        self.on_disk
    }

    /// The same custody for a broker that has this state, and no other.
    pub(crate) fn on_another_disk(mut self, on_disk: TrainingProgress) -> Self {
        self.on_disk = on_disk;
        self
    }

    /// The newest step at which a cut was ever taken.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// Begins a cut. It replaces a cut of the same step, which was taken before the run went back.
    pub fn begin(&mut self, step: u64, shares: Vec<Share>) {
        let shares = shares.into_iter().map(|share| (share, BTreeSet::new())).collect();
        self.cuts.insert(step, Cut { updates: None, shares });
        self.newest = self.newest.max(step);
        if self.is_copied() {
            self.copying = Some(step);
        }
    }

    /// A step is complete.
    pub fn settle(&mut self, progress: TrainingProgress) {
        if let Some(cut) = self.cuts.get_mut(&progress.step) {
            cut.updates = Some(progress.updates);
        }
    }

    /// Notes that a member has the share of `owner`. Returns whether the member can have been asked to keep it.
    pub fn keep(&mut self, step: u64, owner: MemberId, by: MemberId) -> bool {
        let Some(cut) = self.cuts.get_mut(&step) else { return step <= self.newest };
        let share = cut.shares.iter_mut().find(|(s, _)| s.owner == owner && (by == owner || s.buddy == Some(by)));
        match share {
            Some((_, holders)) => holders.insert(by),
            None => false,
        }
    }

    /// Notes that the checkpoint of a step is complete.
    pub fn saved(&mut self, progress: TrainingProgress) {
        if progress.step >= self.on_disk.step {
            self.on_disk = progress;
        }
    }

    /// Notes that a member is gone, and its copies with it.
    pub fn lose(&mut self, member: MemberId) {
        for (_, holders) in self.cuts.values_mut().flat_map(|cut| &mut cut.shares) {
            holders.remove(&member);
        }
    }

    /// A generation begins from a cut. Later cuts are void, because they will be taken again. No share of an earlier
    /// generation is copied any further, because the new generation has other shares.
    pub fn rewind(&mut self, step: u64) {
        self.cuts.split_off(&(step + 1));
        self.copying = None;
    }

    /// The shares that are still to be copied to their buddies, and the cut.
    pub fn uncopied(&self) -> Option<(u64, impl Iterator<Item = &Share>)> {
        let step = self.copying?;
        let missing = |(share, holders): &&(Share, BTreeSet<MemberId>)| {
            share.buddy.is_some_and(|buddy| holders.contains(&share.owner) && !holders.contains(&buddy))
        };
        Some((step, self.cuts.get(&step)?.shares.iter().filter(missing).map(|(share, _)| share)))
    }

    /// Whether nothing is being copied.
    pub fn is_copied(&self) -> bool {
        self.copying.and_then(|step| self.cuts.get(&step)).is_none_or(copied)
    }

    /// The newest step from which no single loss of a member can take the run further back.
    fn durable(&self) -> u64 {
        let survives = |cut: &Cut| copied(cut) && cut.shares.iter().all(|(s, _)| s.buddy.is_some());
        let cut = self.cuts.iter().rev().find(|(_, cut)| survives(cut));
        cut.map_or(self.on_disk.step, |(step, _)| (*step).max(self.on_disk.step))
    }

    /// Drops the cuts that are not needed, whichever single member is lost. Returns the oldest step that is still
    /// needed.
    pub fn release(&mut self) -> u64 {
        let durable = self.durable();
        self.cuts = self.cuts.split_off(&durable);
        durable
    }

    /// The newest state of which `live` members, or the broker, have every tensor.
    pub fn restart(&self, live: impl Fn(MemberId) -> bool) -> Restart {
        for (&step, cut) in self.cuts.range(self.on_disk.step..).rev() {
            let Some(updates) = cut.updates else { continue };
            let mut holders = BTreeMap::new();
            for (share, all) in &cut.shares {
                // The owner comes first: its tensors may be needed where they are.
                let mut living: Vec<MemberId> = all.iter().copied().filter(|m| live(*m)).collect();
                living.sort_by_key(|m| *m != share.owner);
                holders.extend(share.tensors.iter().map(|key| (key.clone(), living.clone())));
            }
            if holders.values().all(|living| !living.is_empty()) {
                return Restart { progress: TrainingProgress { step, updates }, holders };
            }
        }
        Restart { progress: self.on_disk, holders: BTreeMap::new() }
    }
}

fn copied(cut: &Cut) -> bool {
    let has_all = |(share, holders): &(Share, BTreeSet<MemberId>)| {
        holders.contains(&share.owner) && share.buddy.is_none_or(|buddy| holders.contains(&buddy))
    };
    cut.updates.is_some() && cut.shares.iter().all(has_all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(0);
    const B: MemberId = MemberId(1);
    const C: MemberId = MemberId(2);

    fn shares() -> Vec<Share> {
        let share = |owner: MemberId, buddy| Share {
            owner,
            tensors: Arc::new(BTreeSet::from([TensorKey::value(format!("w{}", owner.0))])),
            buddy: Some(buddy),
        };
        vec![share(A, B), share(B, C), share(C, A)]
    }

    fn at(step: u64) -> TrainingProgress {
        TrainingProgress { step, updates: step }
    }

    /// A cut that all owners have, and all their buddies.
    fn copied_cut(custody: &mut Custody, step: u64) {
        custody.begin(step, shares());
        custody.settle(at(step));
        for (owner, buddy) in [(A, B), (B, C), (C, A)] {
            assert!(custody.keep(step, owner, owner) && custody.keep(step, owner, buddy));
        }
    }

    fn step_without(custody: &Custody, lost: &[MemberId]) -> u64 {
        custody.restart(|m| !lost.contains(&m)).progress.step
    }

    #[test]
    fn a_loss_goes_back_to_the_newest_cut_with_all_tensors() {
        let mut custody = Custody::new(at(3));
        assert_eq!(step_without(&custody, &[A]), 3, "the start is always there");
        copied_cut(&mut custody, 5);
        custody.begin(7, shares());
        custody.settle(at(7));
        for m in [A, B, C] {
            assert_eq!(step_without(&custody, &[]), 5);
            custody.keep(7, m, m);
        }
        assert_eq!((step_without(&custody, &[]), step_without(&custody, &[B])), (7, 5));
        assert!(!custody.is_copied());
        assert_eq!(custody.uncopied().unwrap().1.count(), 3);
        // Only the copy of the lost member's share matters.
        custody.keep(7, B, C);
        assert_eq!((step_without(&custody, &[B]), step_without(&custody, &[A])), (7, 5));
        assert_eq!(step_without(&custody, &[A, B]), 3, "a share and its copy are gone");
        let holders = custody.restart(|m| m != B).holders;
        assert_eq!(holders[&TensorKey::value("w1")], [C]);
        assert_eq!(holders[&TensorKey::value("w0")], [A]);
    }

    #[test]
    fn a_cut_counts_only_once_its_step_is_complete_and_its_owners_have_it() {
        let mut custody = Custody::new(at(0));
        custody.begin(2, shares());
        for m in [A, B, C] {
            custody.keep(2, m, m);
        }
        assert_eq!(step_without(&custody, &[]), 0);
        custody.settle(at(2));
        assert_eq!(step_without(&custody, &[]), 2);
        custody.lose(B);
        assert_eq!(step_without(&custody, &[]), 0, "it came back without its copies");
    }

    #[test]
    fn old_cuts_are_released_once_a_newer_one_is_durable() {
        let mut custody = Custody::new(at(0));
        copied_cut(&mut custody, 2);
        assert_eq!(custody.release(), 2);
        custody.begin(4, shares());
        custody.settle(at(4));
        assert_eq!(custody.release(), 2, "the newer one has no copies yet");
        assert_eq!(step_without(&custody, &[A]), 2);
        copied_cut(&mut custody, 6);
        assert_eq!((custody.durable(), custody.release()), (6, 6));
        assert_eq!(step_without(&custody, &[A]), 6);
        custody.saved(at(8));
        assert_eq!((custody.release(), step_without(&custody, &[A, B, C])), (8, 8));
    }

    #[test]
    fn cuts_after_the_one_gone_back_to_are_void() {
        let mut custody = Custody::new(at(0));
        copied_cut(&mut custody, 2);
        custody.begin(4, shares());
        custody.keep(4, A, A);
        custody.rewind(2);
        custody.begin(4, shares());
        custody.settle(at(4));
        for m in [B, C] {
            custody.keep(4, m, m);
        }
        assert_eq!(step_without(&custody, &[]), 2, "what A had of step 4 belongs to another course of events");
    }

    #[test]
    fn nobody_can_confirm_what_it_was_not_asked_for() {
        let mut custody = Custody::new(at(0));
        copied_cut(&mut custody, 2);
        assert!(!custody.keep(2, A, C), "C keeps no copy of A");
        assert!(!custody.keep(2, A, A), "twice");
        assert!(!custody.keep(9, A, A), "no such cut yet");
        assert!(custody.keep(1, A, A), "an old cut was released meanwhile");
    }

    #[test]
    fn a_cut_is_copied_to_the_end_before_a_newer_one() {
        let mut custody = Custody::new(at(0));
        copied_cut(&mut custody, 2);
        custody.begin(4, shares());
        custody.settle(at(4));
        for m in [A, B, C] {
            custody.keep(4, m, m);
        }
        custody.begin(5, shares());
        assert_eq!(custody.uncopied().map(|(step, _)| step), Some(4));
        custody.rewind(2);
        assert!(custody.is_copied() && custody.uncopied().is_none(), "the cut is void");
        custody.begin(3, shares());
        assert_eq!(custody.uncopied().map(|(step, _)| step), Some(3));
    }
}
