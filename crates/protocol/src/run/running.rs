//! A run while one of its generations loads or trains.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::copies::{bandwidth, buddies};
use super::speed::SpeedChange;
use super::{Action, COPY_RATE, Formation, Order, Phase, Run, Running, Share};
use crate::notice::{IncidentKind, Notice, Open, one_line};
use crate::{
    EvalSchedule, FromPeer, GenerationAction, GenerationMachine, MemberId, Participant, RunSettings, Standing,
    StepRecord, ToPeer, TrainingProgress,
};
use fusionllm_events::Event;

/// A member that reports this many lost links within [`COMPLAINTS_S`] is rather at fault itself, or lies.
const MAX_COMPLAINTS: usize = 3;

/// Seconds for which a report of a lost link counts.
const COMPLAINTS_S: f64 = 600.0;

impl Run {
    /// Begins a generation.
    pub(super) fn assign(&mut self, formation: Formation) -> Vec<Action> {
        let restart = self.custody.restart(|m| self.roster.is_present(m));
        self.custody.rewind(restart.progress.step);
        let mut actions = Vec::new();
        let rewound = std::mem::replace(&mut self.rewound, true);
        if restart.progress.step < self.progress.step || !rewound {
            actions.push(Action::Rewind(restart.progress));
        }
        let step = restart.progress.step;
        for open in &mut self.incidents {
            open.goes_back(step, self.copies.since(step, open.heard()));
        }
        self.progress = restart.progress;
        self.evaluated = self.evaluated.min(step);
        let first_holders = restart.holders.values().filter_map(|holders| holders.first().copied());
        let donors = first_holders.filter(|m| !formation.members.contains(m)).collect();
        let settings = RunSettings {
            version: formation.version,
            start: restart.progress,
            micro_batches: formation.micro_batches,
            eval: self.options.settings.eval.map(|e| EvalSchedule { passes: formation.eval_passes, ..e }),
            passes_before: self.last_pass,
            ..self.options.settings
        };
        let participants = formation.members.iter().zip(&formation.expected);
        let participants = participants.map(|(m, expected)| Participant {
            member: *m,
            name: self.roster.display_name(*m).to_owned(),
            expected: expected.clone(),
        });
        let mut machine = GenerationMachine::new(settings, participants.collect());
        if self.evaluated < step {
            machine.evaluate_start();
        }
        let (mirrors, copied_s) =
            if self.options.copies { buddies(&self.atlas, &formation) } else { Default::default() };
        self.copies.plan(copied_s);
        self.awaited = None;
        actions.push(Action::Persist);
        actions.push(Action::Assign(Order {
            generation: self.generation,
            members: formation.members.clone(),
            restart,
            passes_before: self.last_pass,
            mirrors: mirrors.clone(),
        }));
        self.watch.restart(&formation.members, self.now);
        let planned = formation.members.iter().map(|m| (*m, self.atlas.slower(*m))).collect();
        self.speeds.begin(planned, !formation.predicted_compute_s.is_empty());
        self.begun = true;
        self.phase = Phase::Running(Box::new(Running {
            machine,
            mirrors: mirrors.into_iter().map(|m| (m.owner, m.buddy)).collect(),
            donors,
            ready: BTreeSet::new(),
            asked: BTreeMap::new(),
            step_s: formation.predicted_step_s,
            formation,
            drained: None,
        }));
        actions
    }

    /// Ends the generation. Its members stop, and keep their cuts.
    pub(super) fn disband(&mut self) -> Vec<Action> {
        let gathering = Phase::Gathering { short: false };
        let Phase::Running(running) = std::mem::replace(&mut self.phase, gathering) else { return Vec::new() };
        self.last_pass = running.machine.last_pass();
        self.last_members = running.formation.members;
        self.generation += 1;
        let mut actions: Vec<Action> = running.machine.saving().map(Action::AbandonCheckpoint).collect();
        // A silent member reads the message once it wakes.
        let regroup = ToPeer::Regroup { generation: self.generation };
        actions.extend(self.roster.connected().map(|m| Action::Send(m.id, regroup.clone())));
        actions
    }

    pub(super) fn take_running(&mut self, from: MemberId, message: FromPeer) -> Result<Vec<Action>, String> {
        let generation = self.generation;
        let Some(peer) = self.peer(from) else { return Ok(Vec::new()) };
        let Phase::Running(running) = &mut self.phase else { return Ok(Vec::new()) };
        match message {
            FromPeer::Ready { generation: of } if of != generation => Ok(Vec::new()),
            FromPeer::Ready { .. } => {
                let actions = running.machine.message(peer, message, self.now)?;
                running.ready.insert(from);
                let started = running.machine.is_started();
                let mut actions = self.follow(actions);
                if started {
                    actions.extend(self.started());
                }
                Ok(actions)
            }
            // A message about cuts from a peer that is not ready yet belongs to an earlier generation.
            FromPeer::Kept { .. } | FromPeer::Mirrored { .. } if !running.ready.contains(&from) => Ok(Vec::new()),
            FromPeer::Kept { step } => self.kept(step, from, from),
            FromPeer::Mirrored { step, of } => self.kept(step, of, from),
            FromPeer::LinkLost { generation: of, .. } | FromPeer::Failed { generation: of, .. } if of != generation => {
                Ok(Vec::new())
            }
            FromPeer::LinkLost { member, .. } if member == from => Err("lost its link to itself".into()),
            FromPeer::LinkLost { member, reason, .. } => Ok(self.link_lost(from, member, &reason)),
            FromPeer::Failed { reason, .. } => Ok(self.failed(from, &reason)),
            message => {
                let actions = running.machine.message(peer, message, self.now)?;
                Ok(self.follow(actions))
            }
        }
    }

    /// All peers of the generation are ready.
    fn started(&mut self) -> Vec<Action> {
        let incidents = std::mem::take(&mut self.incidents).into_iter().map(|open| open.over(self.now)).collect();
        self.copies.complete(self.progress.step, self.now);
        self.copies.restart(self.now);
        let mut actions = vec![Action::Notice(Notice::Started { generation: self.generation, incidents })];
        for leaver in std::mem::take(&mut self.leaving) {
            // Leavers with a share asked to leave while the generation was loading.
            let used = self.peers().contains(&leaver);
            actions.extend(if used { self.leave(leaver) } else { self.dismiss(leaver) });
        }
        if self.stopping {
            // A peer was lost while the run stopped, so those who are left save the run.
            actions.extend(self.interrupt(self.now));
            return actions;
        }
        actions.extend(self.scout());
        actions
    }

    /// A member confirms that it has a share of a cut.
    fn kept(&mut self, step: u64, owner: MemberId, by: MemberId) -> Result<Vec<Action>, String> {
        if self.has_nothing(owner) {
            return Ok(Vec::new());
        }
        if !self.custody.keep(step, owner, by) {
            return Err("confirmed a copy that nobody requested".into());
        }
        if let Phase::Running(running) = &self.phase
            && let Some(asked) = running.asked.get(&(step, owner)).filter(|_| by != owner)
        {
            self.copies.share_copied(self.now - asked);
        }
        let mut actions = self.copy();
        if self.custody.is_copied() && self.copies.copying {
            self.copies.copied();
            actions.extend(self.release());
        }
        actions.extend(self.move_on());
        Ok(actions)
    }

    /// Whether a peer of the generation owns no tensor: no cut has a share of it.
    fn has_nothing(&self, owner: MemberId) -> bool {
        let Phase::Running(r) = &self.phase else { return false };
        r.formation.members.iter().zip(&r.formation.shares).any(|(m, share)| *m == owner && share.is_empty())
    }

    /// Tells members to forget the cuts that nobody needs any more.
    fn release(&mut self) -> Vec<Action> {
        let before = self.custody.release();
        self.copies.forget_before(before, self.custody.on_disk().step);
        let releases = self.roster.connected().map(|m| Action::Send(m.id, ToPeer::Release { before }));
        [Action::Persist].into_iter().chain(releases).collect()
    }

    /// Asks for the copies that are missing.
    fn copy(&mut self) -> Vec<Action> {
        let Phase::Running(running) = &mut self.phase else { return Vec::new() };
        let mut actions = Vec::new();
        if let Some((step, shares)) = self.custody.uncopied() {
            for share in shares {
                let Some(buddy) = share.buddy else { continue };
                let Entry::Vacant(asked) = running.asked.entry((step, share.owner)) else { continue };
                asked.insert(self.now);
                let place = |m: MemberId| running.formation.members.iter().position(|x| *x == m);
                let places = place(share.owner).zip(place(buddy));
                let rate = places.and_then(|(from, to)| bandwidth(&self.atlas, &running.formation, from, to));
                let rate = rate.map(|rate| COPY_RATE * rate);
                actions.push(Action::Send(buddy, ToPeer::Mirror { step, of: share.owner, bytes_per_s: rate }));
            }
        }
        actions
    }

    /// Begins the next generation once the last cut of a drained generation is with all its owners.
    fn move_on(&mut self) -> Vec<Action> {
        let Phase::Running(running) = &self.phase else { return Vec::new() };
        let Some(progress) = running.drained else { return Vec::new() };
        let restart = self.custody.restart(|m| self.roster.is_present(m));
        if restart.progress != progress {
            return Vec::new();
        }
        // A leaver is not planned for. It stays as a donor until the next generation has what it owns.
        let mut actions = self.disband();
        actions.extend(self.advance());
        actions
    }

    fn link_lost(&mut self, from: MemberId, to: MemberId, reason: &str) -> Vec<Action> {
        if !self.is_needed(to) {
            return Vec::new();
        }
        // Without measurements, nothing else is known about the machine, so its neighbour's word counts. A donor has no
        // part in the plan that could be moved.
        if !self.options.measured || !self.peers().contains(&to) {
            if self.complains_often(from) {
                let reason = format!("it reported {MAX_COMPLAINTS} lost links to members that answer");
                return self.put_out(from, &reason, IncidentKind::Expelled);
            }
            let reason = format!("{:?} cannot reach it: {reason}", self.roster.display_name(from));
            return self.lose(to, &reason, Standing::Silent, IncidentKind::Link);
        }
        self.atlas.cut_off(from, to);
        let step = self.progress.step;
        let open = Open::begin(IncidentKind::Link, to, step, self.now, self.now);
        self.incidents.push(open);
        let [from, to] = [from, to].map(|member| self.roster.display_name(member).to_owned());
        let mut actions = vec![Action::event(Event::LinkLost { from, to, reason: one_line(reason) })];
        actions.extend(self.disband());
        actions.extend(self.advance());
        actions
    }

    /// Notes that a member cannot reach another one. Returns whether it says so too often to be believed.
    fn complains_often(&mut self, from: MemberId) -> bool {
        let times = self.complaints.entry(from).or_default();
        times.retain(|at| self.now - at < COMPLAINTS_S);
        times.push_back(self.now);
        times.len() >= MAX_COMPLAINTS
    }

    fn failed(&mut self, from: MemberId, reason: &str) -> Vec<Action> {
        let name = self.roster.display_name(from);
        let failure = format!("peer {name:?} failed: {}", one_line(reason));
        self.expel_or_fail(from, &format!("it failed: {reason}"), failure)
    }

    /// A peer sends numbers that are not finite without a reason.
    fn contradicts(&mut self, member: MemberId, reason: &str) -> Vec<Action> {
        let name = self.roster.display_name(member);
        let failure = format!("no other peer is left than {name:?}, and {reason}");
        self.expel_or_fail(member, reason, failure)
    }

    /// Puts a member out, or fails the run if no other member is left: another one could not do better with the same work.
    /// Then the member reads the reason while it is still a member.
    fn expel_or_fail(&mut self, member: MemberId, reason: &str, failure: String) -> Vec<Action> {
        let alone = self.roster.present().all(|m| m.id == member);
        match alone {
            true => self.end(Action::Fail(failure)),
            false => self.expel(member, reason, self.now),
        }
    }

    /// Call when the last tensor of a member's snapshot has arrived.
    pub fn snapshot_arrived(&mut self, from: MemberId, step: u64, now: f64) -> Vec<Action> {
        self.now = now;
        let peer = self.peer(from);
        let (Some(peer), Phase::Running(running)) = (peer, &mut self.phase) else { return Vec::new() };
        if !running.ready.contains(&from) {
            return Vec::new();
        }
        match running.machine.snapshot_arrived(peer, step) {
            Ok(actions) => self.follow(actions),
            Err(what) => self.expel(from, &format!("it broke the protocol: it {what}"), now),
        }
    }

    /// Call when the checkpoint is complete, or has failed. The run continues in both cases.
    pub fn checkpoint_committed(&mut self, progress: TrainingProgress, complete: bool, now: f64) -> Vec<Action> {
        self.now = now;
        self.committing = self.committing.saturating_sub(1);
        let mut actions = Vec::new();
        if complete {
            self.custody.saved(progress);
            actions.extend(self.release());
        }
        if let Phase::Running(running) = &mut self.phase {
            let more = running.machine.checkpoint_committed(progress.step);
            actions.extend(self.follow(more));
        }
        actions.extend(self.give_up_saving());
        actions
    }

    /// Takes note of the generation's actions, and turns them into the run's own and those that follow from them.
    pub(super) fn follow(&mut self, actions: Vec<GenerationAction>) -> Vec<Action> {
        let mut all = Vec::with_capacity(actions.len());
        for action in actions {
            match action {
                GenerationAction::Send(to, message) => all.push(Action::Send(to, message)),
                GenerationAction::Feed(pass, batch) => all.push(Action::Feed(pass, batch)),
                GenerationAction::Step(record) => {
                    // An inspected step takes longer, so it says nothing about speed. Only steps after a skipped one
                    // are inspected.
                    let mut slower = Vec::new();
                    if record.applied {
                        self.copies.note_step(record.step_s);
                        slower = self.note_speeds(&record);
                    }
                    all.push(Action::Step(record));
                    all.extend(self.step_over());
                    all.extend(slower);
                }
                GenerationAction::Evaluated(record) => {
                    self.evaluated = record.step;
                    all.push(Action::Evaluated(record));
                }
                GenerationAction::Cut(step) => self.begin_cut(step),
                GenerationAction::BeginCheckpoint(step) => all.push(Action::BeginCheckpoint(step)),
                GenerationAction::Commit(progress) => {
                    self.committing += 1;
                    all.push(Action::Commit(progress));
                }
                GenerationAction::Expel(member, reason) => all.extend(self.contradicts(member, &reason)),
                GenerationAction::Notice(notice) => all.push(Action::Notice(notice)),
                GenerationAction::Drained(progress) => {
                    if let Phase::Running(running) = &mut self.phase {
                        running.drained = Some(progress);
                    }
                    all.extend(self.move_on());
                }
                // After one of these two, the generation does nothing more.
                GenerationAction::Finish(progress) => return [all, self.end(Action::Finish(progress))].concat(),
                GenerationAction::Fail(reason) => return [all, self.end(Action::Fail(reason))].concat(),
            }
        }
        // Copies are considered only now, because the same actions may begin a cut.
        if let Phase::Running(running) = &mut self.phase
            && self.custody.is_copied()
            && self.now >= self.copies.next
            && !running.mirrors.is_empty()
        {
            running.machine.want_cut();
        }
        all
    }

    fn begin_cut(&mut self, step: u64) {
        let Phase::Running(running) = &mut self.phase else { return };
        let shares = running.formation.members.iter().zip(&running.formation.shares);
        let shares = shares.filter(|(_, tensors)| !tensors.is_empty()).map(|(&owner, tensors)| Share {
            owner,
            tensors: tensors.clone(),
            buddy: running.mirrors.get(&owner).copied(),
        });
        self.custody.begin(step, shares.collect());
        running.asked.retain(|(of, _), _| *of != step);
        self.copies.begin(self.now);
        if self.progress.step == step {
            self.custody.settle(self.progress);
        }
    }

    /// Compares each member's computing with what the plan expects. Asks for another plan if one's speed has changed.
    fn note_speeds(&mut self, record: &StepRecord) -> Vec<Action> {
        let Phase::Running(running) = &mut self.phase else { return Vec::new() };
        let predicted = &running.formation.predicted_compute_s;
        let figures = running.formation.members.iter().zip(&record.peers).enumerate();
        let changes = figures.filter_map(|(i, (member, report))| {
            // Without a prediction, a plan's times can only be compared with each other.
            let predicted = predicted.get(i).copied().unwrap_or(1.0);
            self.speeds.note(*member, report.compute_s, predicted, self.now)
        });
        let changes: Vec<SpeedChange> = changes.collect();
        self.speeds.note_step(record.step_s);
        if changes.is_empty() {
            return Vec::new();
        }
        // The prediction for this plan does not hold any more.
        running.step_s = running.step_s.and(self.speeds.step_s());
        let mut actions = Vec::new();
        for SpeedChange { member, times } in changes {
            self.atlas.set_slower(member, times);
            let peer = self.roster.display_name(member).to_owned();
            actions.push(Action::event(Event::Speed { peer, times }));
        }
        if self.options.measured {
            actions.extend(self.weigh());
        }
        actions
    }

    fn step_over(&mut self) -> Vec<Action> {
        let Phase::Running(running) = &mut self.phase else { return Vec::new() };
        self.progress = running.machine.progress();
        self.custody.settle(self.progress);
        self.copies.complete(self.progress.step, self.now);
        // The owners of the cut may have confirmed it before its step was complete.
        let mut actions = self.copy();
        actions.extend(self.move_on());
        actions
    }
}
