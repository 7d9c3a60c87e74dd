//! A peer's side of a run whose members change: the tensors that an assignment still lacks, the cuts that are here, and
//! the members to ask.

mod inbox;
mod role;

use std::collections::{BTreeMap, BTreeSet};

pub use inbox::{Inbox, UnexpectedTensor};
pub use role::{FollowerAction, Greeting, Role};

use fusionllm_program::TensorKey;

use crate::{FromPeer, MemberId, Source};

/// The number of the cut that has what never changes. It outlives all others.
pub const SHELF: u64 = u64::MAX;

/// Most requests of one member that wait for a cut.
const MAX_WAITING: usize = 4;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Idle,
    Loading,
    Running,
    /// Between [`FollowerAction::Stop`] and [`Follower::ended`].
    Ending,
}

#[derive(Debug)]
struct Request {
    from: MemberId,
    step: u64,
    keys: Vec<TensorKey>,
}

/// A peer between the broker's messages and its own work. It knows the keys of tensors, never their contents.
///
/// All tensors of a cut belong to one course of training. A generation that starts from an earlier step makes later
/// cuts void. The cut that it starts from holds the tensors that it loads, so copies of that step from several
/// generations complete each other.
#[derive(Debug, Default)]
pub struct Follower {
    /// The newest generation that the broker has named.
    newest: u32,
    /// The newest generation that was assigned.
    assigned: u32,
    /// The newest generation of a regrouping.
    regrouped: u32,
    /// Whether the present assignment is the first one of this connection to the broker.
    first: bool,
    phase: Phase,
    /// The part that waits until the previous generation has ended.
    next: Option<Role>,
    /// The part in the generation that began last.
    role: Option<Role>,
    /// The tensors that are still to be loaded, and where each comes from.
    missing: BTreeMap<TensorKey, MemberId>,
    unconnected: BTreeSet<MemberId>,
    cuts: BTreeMap<u64, BTreeSet<TensorKey>>,
    /// The newest cut that was taken in this generation.
    taken: Option<u64>,
    /// The cut that is being copied from each member.
    copying: BTreeMap<MemberId, u64>,
    waiting: BTreeMap<u64, Request>,
}

impl Follower {
    /// A peer without an assignment and without cuts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether an assignment of this generation replaces all that came before.
    pub fn is_new(&self, generation: u32) -> bool {
        generation >= self.newest && generation > self.assigned
    }

    /// Whether commands of the broker are for the generation that runs.
    ///
    /// An assignment arrives on another lane than commands, so it can overtake commands of the generation before. These
    /// end with the regrouping.
    pub fn takes_commands(&self) -> bool {
        self.is_running() && (self.first || self.regrouped >= self.assigned)
    }

    /// Whether the peer computes.
    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// The member that the peer waits for, unless it computes.
    pub fn waits_for(&self) -> Option<MemberId> {
        match self.phase {
            Phase::Idle => Some(MemberId::BROKER),
            Phase::Running | Phase::Ending => None,
            Phase::Loading => {
                let me = self.role.as_ref().map(|role| role.me);
                let mut others = self.missing.values().filter(|from| Some(**from) != me);
                others.next().or(self.unconnected.first()).copied()
            }
        }
    }

    /// An assignment has arrived. It is ignored unless [`Self::is_new`].
    pub fn assign(&mut self, role: Role) -> Vec<FollowerAction> {
        if !self.note_assignment(role.generation) {
            return Vec::new();
        }
        self.next = Some(role);
        let mut actions = self.halt();
        if self.phase == Phase::Idle {
            actions.extend(self.begin());
        }
        actions
    }

    /// An assignment has arrived that this peer cannot carry out.
    pub fn unfit(&mut self, generation: u32, reason: String) -> Vec<FollowerAction> {
        if !self.note_assignment(generation) {
            return Vec::new();
        }
        self.next = None;
        let mut actions = self.halt();
        actions.push(FollowerAction::Tell(FromPeer::Failed { generation, reason }));
        actions
    }

    /// The broker regroups.
    pub fn regroup(&mut self, generation: u32) -> Vec<FollowerAction> {
        self.regrouped = self.regrouped.max(generation);
        // The assignment may have overtaken this message.
        if generation <= self.newest {
            return Vec::new();
        }
        self.newest = generation;
        self.next = None;
        self.halt()
    }

    /// Notes that the connection to the broker has ended. From now on, only messages of its next connection count.
    pub fn disconnected(&mut self) -> Vec<FollowerAction> {
        (self.newest, self.assigned, self.regrouped, self.first) = (0, 0, 0, false);
        self.next = None;
        self.halt()
    }

    /// A tensor is loaded.
    pub fn loaded(&mut self, generation: u32, key: &TensorKey) -> Vec<FollowerAction> {
        if !self.is_live(generation) {
            return Vec::new();
        }
        self.missing.remove(key);
        self.start_if_complete()
    }

    /// A tensor that never changes is kept for later generations.
    pub fn shelved(&mut self, key: &TensorKey) {
        self.cuts.entry(SHELF).or_default().insert(key.clone());
    }

    /// A neighbour is connected.
    pub fn connected(&mut self, generation: u32, member: MemberId) -> Vec<FollowerAction> {
        if !self.is_live(generation) {
            return Vec::new();
        }
        self.unconnected.remove(&member);
        self.start_if_complete()
    }

    /// A neighbour has had more than enough time to connect.
    pub fn overdue(&mut self, generation: u32, member: MemberId, reason: String) -> Vec<FollowerAction> {
        match self.is_live(generation) && self.unconnected.contains(&member) {
            true => self.lost(generation, member, reason),
            false => Vec::new(),
        }
    }

    /// A member cannot be reached, does not have what the broker said, or its connection has ended.
    pub fn lost(&mut self, generation: u32, member: MemberId, reason: String) -> Vec<FollowerAction> {
        self.end(generation, FromPeer::LinkLost { generation, member, reason })
    }

    /// This peer cannot go on with the generation, for a reason that is no other member's.
    pub fn failed(&mut self, generation: u32, reason: String) -> Vec<FollowerAction> {
        self.end(generation, FromPeer::Failed { generation, reason })
    }

    /// Nothing of a generation runs any more. If nobody stopped it, `failure` says why.
    pub fn ended(&mut self, generation: u32, failure: Option<String>) -> Vec<FollowerAction> {
        if self.role.as_ref().is_none_or(|role| role.generation != generation) {
            return Vec::new();
        }
        let mut actions = Vec::new();
        if self.is_live(generation) {
            let reason = failure.unwrap_or_else(|| "it stopped computing".into());
            actions = self.failed(generation, reason);
        }
        self.phase = Phase::Idle;
        actions.extend(self.begin());
        actions
    }

    /// The peer has taken a cut of its share.
    pub fn cut_taken(&mut self, generation: u32, step: u64) -> Vec<FollowerAction> {
        let Some(role) = self.role.as_ref().filter(|role| role.generation == generation) else { return Vec::new() };
        self.cuts.entry(step).or_default().extend(role.share.iter().cloned());
        self.taken = Some(step);
        let mut actions = vec![FollowerAction::Tell(FromPeer::Kept { step })];
        actions.extend(self.serve_waiting(step));
        actions
    }

    /// The broker asks for a copy of a member's share of a cut. Only tensors that are not here are fetched.
    pub fn mirror(&mut self, step: u64, of: MemberId, bytes_per_s: Option<f64>) -> Vec<FollowerAction> {
        if !self.takes_commands() {
            return Vec::new();
        }
        let Some(share) = self.role.as_ref().and_then(|role| role.mirrors.get(&of)) else { return Vec::new() };
        let here = self.cuts.get(&step);
        let missing = share.iter().filter(|key| here.is_none_or(|cut| !cut.contains(*key)));
        let keys: Vec<TensorKey> = missing.cloned().collect();
        self.copying.insert(of, step);
        match keys.is_empty() {
            true => self.copied_share(step, of),
            false => vec![FollowerAction::Copy { of, step, keys, bytes_per_s }],
        }
    }

    /// Whether a copy is still wanted. Ask before its tensors are kept.
    pub fn wants_copy(&self, generation: u32, step: u64, of: MemberId) -> bool {
        self.is_live(generation) && self.copying.get(&of) == Some(&step)
    }

    /// A copy is complete.
    pub fn copied(&mut self, generation: u32, step: u64, of: MemberId) -> Vec<FollowerAction> {
        match self.wants_copy(generation, step, of) {
            true => self.copied_share(step, of),
            false => Vec::new(),
        }
    }

    /// The broker does not need the cuts before this one.
    pub fn release(&mut self, before: u64) -> Vec<FollowerAction> {
        self.copying.retain(|_, step| *step >= before);
        self.forget(|step| step < before)
    }

    /// A member asks for tensors of a cut. Without an action, the request waits. The caller gives each request a number
    /// of its own, and calls [`Self::request_over`] when it has waited long enough or its sender has gone.
    pub fn request(&mut self, request: u64, from: MemberId, step: u64, keys: Vec<TensorKey>) -> Vec<FollowerAction> {
        if self.has(step, &keys) {
            return vec![FollowerAction::Serve(request)];
        }
        let waiting = self.waiting.values().filter(|r| r.from == from).count();
        if waiting >= MAX_WAITING || !self.will_have(step, &keys) {
            return vec![FollowerAction::Refuse(request)];
        }
        self.waiting.insert(request, Request { from, step, keys });
        Vec::new()
    }

    /// A request need not be answered any more, or waits no longer.
    pub fn request_over(&mut self, request: u64) -> Vec<FollowerAction> {
        self.waiting.remove(&request).map(|_| FollowerAction::Refuse(request)).into_iter().collect()
    }

    /// A member wants to exchange tensors of a generation.
    pub fn greeted(&self, from: MemberId, generation: u32) -> Greeting {
        if self.next.as_ref().is_some_and(|next| next.generation == generation) {
            return Greeting::Keep;
        }
        match self.is_live(generation) && self.unconnected.contains(&from) {
            true => Greeting::Use,
            false if self.is_new(generation) => Greeting::Keep,
            false => Greeting::Close,
        }
    }

    fn is_live(&self, generation: u32) -> bool {
        matches!(self.phase, Phase::Loading | Phase::Running)
            && self.role.as_ref().is_some_and(|role| role.generation == generation)
    }

    fn note_assignment(&mut self, generation: u32) -> bool {
        if !self.is_new(generation) {
            return false;
        }
        self.first = self.assigned == 0;
        (self.newest, self.assigned) = (generation, generation);
        true
    }

    /// Stops the generation that runs. Requests for later cuts are refused, because these may never come.
    fn halt(&mut self) -> Vec<FollowerAction> {
        if !matches!(self.phase, Phase::Loading | Phase::Running) {
            return Vec::new();
        }
        self.phase = Phase::Ending;
        self.missing.clear();
        self.unconnected.clear();
        self.copying.clear();
        let refused = std::mem::take(&mut self.waiting).into_keys().map(FollowerAction::Refuse);
        [FollowerAction::Stop].into_iter().chain(refused).collect()
    }

    /// Stops a generation and says why. Only its first end is reported.
    fn end(&mut self, generation: u32, message: FromPeer) -> Vec<FollowerAction> {
        if !self.is_live(generation) {
            return Vec::new();
        }
        let mut actions = self.halt();
        actions.push(FollowerAction::Tell(message));
        actions
    }

    /// Begins the part that waits, if there is one.
    fn begin(&mut self) -> Vec<FollowerAction> {
        let Some(role) = self.next.take() else { return Vec::new() };
        let (generation, step) = (role.generation, role.start);
        let mut actions = self.forget(|cut| cut > step);
        self.taken = None;
        let mut drawn = Vec::new();
        // By cut: what is here, and what others have.
        let mut own: BTreeMap<u64, Vec<TensorKey>> = BTreeMap::new();
        let mut fetched: BTreeMap<(MemberId, u64), Vec<TensorKey>> = BTreeMap::new();
        let mut missing = BTreeMap::new();
        for (key, source) in &role.sources {
            let from = match *source {
                // Optimizer state starts as zeros.
                Source::Seed if key.slot.is_some() => continue,
                Source::Seed => {
                    drawn.push(key.clone());
                    role.me
                }
                Source::Broker => MemberId::BROKER,
                Source::Member(member) | Source::Shelf(member) => {
                    let cut = if matches!(source, Source::Shelf(_)) { SHELF } else { step };
                    match member == role.me {
                        true => own.entry(cut).or_default().push(key.clone()),
                        false => fetched.entry((member, cut)).or_default().push(key.clone()),
                    }
                    member
                }
            };
            missing.insert(key.clone(), from);
        }
        let lacks = |(cut, key): &(u64, &TensorKey)| !self.has(*cut, std::slice::from_ref(*key));
        if let Some((cut, key)) = own.iter().flat_map(|(cut, keys)| keys.iter().map(|key| (*cut, key))).find(lacks) {
            let when = if cut == SHELF { String::new() } else { format!(" after step {cut}") };
            let reason = format!("this peer has no copy of {key}{when}");
            actions.push(FollowerAction::Tell(FromPeer::Failed { generation, reason }));
            return actions;
        }
        (self.phase, self.missing, self.unconnected) = (Phase::Loading, missing, role.neighbours.clone());
        actions.push(FollowerAction::Begin { generation });
        if !drawn.is_empty() {
            actions.push(FollowerAction::Draw { keys: drawn });
        }
        actions.extend(own.into_iter().map(|(step, keys)| FollowerAction::Take { step, keys }));
        actions.extend(fetched.into_iter().map(|((from, step), keys)| FollowerAction::Fetch { from, step, keys }));
        if !role.neighbours.is_empty() {
            actions.push(FollowerAction::Connect { with: role.neighbours.clone() });
        }
        self.role = Some(role);
        actions.extend(self.start_if_complete());
        actions
    }

    fn start_if_complete(&mut self) -> Vec<FollowerAction> {
        let complete = self.phase == Phase::Loading && self.missing.is_empty() && self.unconnected.is_empty();
        match &self.role {
            Some(role) if complete => {
                self.phase = Phase::Running;
                let generation = role.generation;
                let shelf = self.cuts.get(&SHELF).filter(|_| !role.shelved.is_empty());
                let kept = shelf.is_some_and(|shelf| role.shelved.is_subset(shelf));
                let told = kept.then_some(FollowerAction::Tell(FromPeer::Shelved { generation }));
                told.into_iter().chain([FollowerAction::Start { generation }]).collect()
            }
            _ => Vec::new(),
        }
    }

    fn copied_share(&mut self, step: u64, of: MemberId) -> Vec<FollowerAction> {
        self.copying.remove(&of);
        let share = self.role.as_ref().and_then(|role| role.mirrors.get(&of));
        self.cuts.entry(step).or_default().extend(share.into_iter().flatten().cloned());
        let mut actions = vec![FollowerAction::Tell(FromPeer::Mirrored { step, of })];
        actions.extend(self.serve_waiting(step));
        actions
    }

    fn has(&self, step: u64, keys: &[TensorKey]) -> bool {
        let cut = self.cuts.get(&step);
        keys.iter().all(|key| cut.is_some_and(|cut| cut.contains(key)))
    }

    /// Whether the generation that runs can still take a cut with these tensors.
    fn will_have(&self, step: u64, keys: &[TensorKey]) -> bool {
        let Some(role) = self.role.as_ref().filter(|role| self.is_live(role.generation)) else { return false };
        let cut = self.cuts.get(&step);
        let comes = |key: &TensorKey| role.share.contains(key) || cut.is_some_and(|cut| cut.contains(key));
        step >= role.start && self.taken.is_none_or(|taken| taken < step) && keys.iter().all(comes)
    }

    /// Answers the requests that waited for a cut.
    fn serve_waiting(&mut self, step: u64) -> Vec<FollowerAction> {
        let of_cut = self.waiting.iter().filter(|(_, r)| r.step == step);
        let served: Vec<u64> = of_cut.filter(|(_, r)| self.has(step, &r.keys)).map(|(id, _)| *id).collect();
        for id in &served {
            self.waiting.remove(id);
        }
        served.into_iter().map(FollowerAction::Serve).collect()
    }

    fn forget(&mut self, void: impl Fn(u64) -> bool) -> Vec<FollowerAction> {
        let void = |step: u64| step != SHELF && void(step);
        let steps: Vec<u64> = self.cuts.keys().copied().filter(|step| void(*step)).collect();
        self.cuts.retain(|step, _| !void(*step));
        let refused: Vec<u64> = self.waiting.iter().filter(|(_, r)| void(r.step)).map(|(id, _)| *id).collect();
        for id in &refused {
            self.waiting.remove(id);
        }
        let forget = steps.into_iter().map(|step| FollowerAction::Forget { step });
        forget.chain(refused.into_iter().map(FollowerAction::Refuse)).collect()
    }
}
