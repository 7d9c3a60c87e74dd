//! The state machine that conducts one generation of a run.

mod action;
mod expected;
mod pass;
mod program_outline;
mod settings;
mod steps;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fusionllm_events::Event;
use fusionllm_plan::LinkCodec;
use fusionllm_program::{PassKind, PeerId};

use crate::{ComputeCommand, FromPeer, Notice, PassReport, ToPeer, TrainingProgress};
pub use action::{BatchId, EvalRecord, GenerationAction, StepRecord};
pub use expected::ExpectedReports;
use expected::ReportKey;
use pass::{Pass, plausible};
pub use settings::{AppliedCodecs, EvalSchedule, Participant, RunSettings};
use steps::{Findings, MAX_SKIPPED_STEPS};

/// The pass or snapshot that the broker issues next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Item {
    Pass(BatchId),
    Snapshot { step: u64, save: bool },
}

/// The reason why no more passes are issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Halt {
    /// The user stops the run.
    Stop,
    /// Another generation follows.
    Drain,
}

/// A checkpoint in progress.
#[derive(Debug)]
struct Saving {
    step: u64,
    /// The updates applied up to that step, once it is complete.
    updates: Option<u64>,
    /// Peers whose snapshots have not completely arrived.
    waiting: BTreeSet<PeerId>,
    /// Whether the driver was asked to complete it.
    committing: bool,
}

/// Whether people have been told of checkpoints that were left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeftOut {
    /// None was.
    Nothing,
    /// The checkpoint of this step was, which nobody knows yet.
    Untold(u64),
    /// They know it.
    Told,
}

/// Conducts a generation once its peers are assigned. Pass it events, and carry out the returned actions in order.
///
/// It does not trust peers. An unexpected message is an error, whose text completes "broke the protocol: it …".
#[derive(Debug)]
pub struct GenerationMachine {
    settings: RunSettings,
    /// Version of the plan for the next pass.
    version: u32,
    peers: Vec<Participant>,
    ready: BTreeSet<PeerId>,
    /// The item that is issued next; `None` after the last.
    next: Option<Item>,
    /// Passes in flight. All peers go through them in this order.
    passes: VecDeque<Pass>,
    issued: u64,
    /// Batches trained on once all passes in flight are complete.
    trained: u64,
    /// Updates that verdicts have applied.
    updates: u64,
    /// Progress after the last step that all peers completed.
    progress: TrainingProgress,
    /// The checkpoints in progress, in the order of their steps.
    saving: VecDeque<Saving>,
    /// The step of a checkpoint that was left out, until people know it. They are told once.
    left_out: LeftOut,
    /// Whether a cut is wanted at the next opportunity.
    cut_wanted: bool,
    /// The step of the last requested snapshot, and of the last one that was for a checkpoint.
    snapshot: Option<u64>,
    saved: Option<u64>,
    /// Weighted sums over the evaluation in progress, by report.
    eval_sums: BTreeMap<u32, f64>,
    last_end: f64,
    /// Steps that were skipped since the last one that was applied.
    skipped: u32,
    /// Whether the next training pass is inspected, because the last step with a verdict was skipped.
    inspect: bool,
    /// A skipped step whose batch is to be looked at again: see [`Pass::look`].
    look: Option<u64>,
    findings: Findings,
    halt: Option<Halt>,
    over: bool,
}

/// The error completes "broke the protocol: it …".
type Outcome = Result<Vec<GenerationAction>, &'static str>;

impl GenerationMachine {
    /// A machine that conducts these peers, indexed by their numbers.
    pub fn new(settings: RunSettings, peers: Vec<Participant>) -> Self {
        let TrainingProgress { step, updates } = settings.start;
        Self {
            settings,
            version: settings.version,
            peers,
            ready: BTreeSet::new(),
            next: match step < settings.steps {
                true => Some(Item::Pass(BatchId::Train { step })),
                // An earlier generation trained to the end, and lost a peer before its last checkpoint was complete.
                false => settings
                    .checkpoint
                    .filter(|_| settings.passes_before > 0)
                    .map(|_| Item::Snapshot { step, save: true }),
            },
            passes: VecDeque::new(),
            issued: settings.passes_before,
            trained: step,
            updates,
            progress: settings.start,
            saving: VecDeque::new(),
            left_out: LeftOut::Nothing,
            cut_wanted: false,
            snapshot: None,
            saved: None,
            eval_sums: BTreeMap::new(),
            last_end: 0.0,
            skipped: 0,
            inspect: false,
            look: None,
            findings: Findings::default(),
            halt: None,
            over: false,
        }
    }

    /// Begins with the evaluation after the start's step, if there is one. An earlier generation has ended before it was
    /// complete.
    pub fn evaluate_start(&mut self) {
        let Some(last) = self.settings.start.step.checked_sub(1) else { return };
        if let Some(first @ Item::Pass(BatchId::Eval { .. })) = self.after(Item::Pass(BatchId::Train { step: last })) {
            self.next = Some(first);
        }
    }

    /// Progress after the last step that all peers completed.
    pub fn progress(&self) -> TrainingProgress {
        self.progress
    }

    /// The number of the last pass that was issued.
    pub fn last_pass(&self) -> u64 {
        self.issued
    }

    /// Whether all peers are ready.
    pub fn is_started(&self) -> bool {
        self.ready.len() == self.peers.len()
    }

    /// The steps of the checkpoints in progress, in order.
    pub fn saving(&self) -> impl Iterator<Item = u64> {
        self.saving.iter().map(|s| s.step)
    }

    /// Stops the run after the passes in flight, with a checkpoint if the run takes checkpoints. Stops at once if not
    /// all peers are ready.
    pub fn interrupt(&mut self) -> Vec<GenerationAction> {
        if self.over {
            return Vec::new();
        }
        self.halt = Some(Halt::Stop);
        // A later generation may start from copies, and no checkpoint may have that state.
        let trained = self.trained > self.settings.start.step || self.settings.passes_before > 0;
        let unsaved = trained && self.saved != Some(self.trained);
        let save = self.settings.checkpoint.is_some();
        self.next = (save && unsaved).then_some(Item::Snapshot { step: self.trained, save });
        if self.is_started() { self.issue_next() } else { self.finish() }
    }

    /// Ends the generation after the passes in flight and their evaluation, with a cut: see
    /// [`GenerationAction::Drained`]. Call it only once all peers are ready.
    pub fn drain(&mut self) -> Vec<GenerationAction> {
        if self.over || self.halt.is_some() {
            return Vec::new();
        }
        self.halt = Some(Halt::Drain);
        if !matches!(self.next, Some(Item::Pass(BatchId::Eval { .. }) | Item::Snapshot { .. })) {
            self.next = self.last_cut();
        }
        self.issue_next()
    }

    /// The cut after the last issued step, unless it was taken.
    fn last_cut(&self) -> Option<Item> {
        let taken = self.trained == self.settings.start.step || self.snapshot == Some(self.trained);
        (!taken).then_some(Item::Snapshot { step: self.trained, save: false })
    }

    /// Asks for a cut at the next opportunity.
    pub fn want_cut(&mut self) {
        self.cut_wanted = true;
    }

    /// Changes the links' codecs from the next issued pass on, as the plan's next version. Links not in `codecs` send
    /// exactly. Returns `None` if there are no more steps.
    pub fn set_codecs(&mut self, codecs: &[LinkCodec]) -> Option<AppliedCodecs> {
        if self.over || self.halt.is_some() || self.trained >= self.settings.steps {
            return None;
        }
        self.version += 1;
        let version = self.version;
        let message = |(peer, participant): (u32, &Participant)| {
            let of_peer = codecs.iter().filter(|l| l.from == PeerId(peer));
            let codecs = of_peer.map(|l| (l.to, l.codec)).collect();
            (participant.member, ToPeer::Compute(ComputeCommand::SetCodecs { version, codecs }))
        };
        let messages = (0..).zip(&self.peers).map(message).collect();
        Some(AppliedCodecs { version, step: self.trained + 1, messages })
    }

    /// Sets how much the micro-batches of a pass count. `weights` are their shares of the loss: that of the batch, or
    /// that of the whole evaluation. `sums` are the weights of the other reports of an evaluation, which are sums.
    pub fn set_weights(&mut self, pass: u64, weights: Vec<f64>, sums: Vec<f64>) {
        if let Some(p) = self.passes.iter_mut().find(|p| p.number == pass) {
            (p.weights, p.sums) = (weights, sums);
        }
    }

    /// Call when the checkpoint is complete, or has failed. The run continues in both cases.
    pub fn checkpoint_committed(&mut self, step: u64) -> Vec<GenerationAction> {
        self.saving.retain(|s| s.step != step || !s.committing);
        self.issue_next()
    }

    /// Call for each message of a pass, and for [`FromPeer::Ready`]. Messages of passes of earlier generations are
    /// skipped. `now` is a time in seconds.
    ///
    /// # Errors
    ///
    /// How the peer broke the protocol.
    pub fn message(
        &mut self,
        from: PeerId,
        message: FromPeer,
        now: f64,
    ) -> Result<Vec<GenerationAction>, &'static str> {
        if self.over {
            return Ok(Vec::new());
        }
        match message {
            FromPeer::Report { pass, .. } | FromPeer::Norms { pass, .. } | FromPeer::PassDone { pass, .. }
                if pass <= self.settings.passes_before =>
            {
                Ok(Vec::new())
            }
            FromPeer::Ready { .. } => self.peer_ready(from, now),
            FromPeer::Report { pass, report, micro_batch, value } => {
                self.report(from, pass, ReportKey { report, micro_batch }, value)
            }
            FromPeer::Norms { pass, squared_norms } => self.norms(from, pass, squared_norms),
            FromPeer::PassDone { pass, report } => self.pass_done(from, pass, report, now),
            _ => Err("sent a message that belongs to no pass"),
        }
    }

    /// Call when the last tensor of a peer's snapshot has arrived.
    ///
    /// # Errors
    ///
    /// Nobody requested it.
    pub fn snapshot_arrived(&mut self, from: PeerId, step: u64) -> Result<Vec<GenerationAction>, &'static str> {
        let saving = self.saving.iter_mut().find(|s| s.step == step);
        if !saving.is_some_and(|s| s.waiting.remove(&from)) {
            return Err("completed a snapshot that nobody requested");
        }
        Ok(self.commits())
    }

    fn broadcast(&self, message: ToPeer) -> impl Iterator<Item = GenerationAction> {
        self.peers.iter().map(move |p| GenerationAction::Send(p.member, message.clone()))
    }

    fn fail(&mut self, reason: String) -> Vec<GenerationAction> {
        self.over = true;
        vec![GenerationAction::Fail(reason)]
    }

    fn finish(&mut self) -> Vec<GenerationAction> {
        self.over = true;
        vec![GenerationAction::Finish(self.progress)]
    }

    fn peer_ready(&mut self, from: PeerId, now: f64) -> Outcome {
        if !self.ready.insert(from) {
            return Err("said twice that it is ready");
        }
        self.last_end = now;
        Ok(self.issue_next())
    }

    /// The pass with this number, if the peer is in it, and what the peer must send there. A peer goes through the
    /// passes one after another.
    fn current(&mut self, from: PeerId, number: u64) -> Result<(&mut Pass, &ExpectedReports), &'static str> {
        let pass = self.passes.iter_mut().find(|p| !p.done.contains_key(&from)).filter(|p| p.number == number);
        let expected = self.peers.get(from.0 as usize).map(|p| &p.expected);
        pass.zip(expected).ok_or("sent a message of a pass that it is not in")
    }

    fn report(&mut self, from: PeerId, number: u64, key: ReportKey, value: f64) -> Outcome {
        let (pass, expected) = self.current(from, number)?;
        if !expected.reports(pass.batch.kind()).contains(&key) {
            return Err("reported a value that it does not compute");
        }
        match pass.reports.insert(key, value) {
            None => Ok(Vec::new()),
            Some(_) => Err("reported the same value twice"),
        }
    }

    fn pass_done(&mut self, from: PeerId, number: u64, report: PassReport, now: f64) -> Outcome {
        let peers = self.peers.len();
        if !plausible(&report, peers as u32) {
            return Err("sent impossible numbers");
        }
        let (pass, expected) = self.current(from, number)?;
        if report.poison.is_some_and(|poison| !pass.inspect || !expected.outline().has(&poison)) {
            return Err("found what is not finite in a place that it does not have, or was not asked to look at");
        }
        let incomplete = match pass.batch.kind() {
            PassKind::Train => pass.judgement.is_none(),
            PassKind::Eval => !expected.all_reported(PassKind::Eval, &pass.reports),
        };
        if incomplete {
            return Err("ended a pass that was not complete");
        }
        pass.done.insert(from, report);
        let mut actions = Vec::new();
        while let Some(pass) = self.passes.pop_front_if(|p| p.done.len() == peers) {
            actions.extend(self.pass_over(pass, now));
        }
        if actions.iter().any(|action| matches!(action, GenerationAction::Expel(..))) {
            // Another generation follows.
            self.over = true;
            return Ok(actions);
        }
        actions.extend(self.commits());
        if self.skipped >= MAX_SKIPPED_STEPS {
            actions.extend(self.fail(self.diverged()));
        }
        actions.extend(self.issue_next());
        Ok(actions)
    }

    /// Completes a pass: all peers have completed it and all before it.
    fn pass_over(&mut self, pass: Pass, now: f64) -> Vec<GenerationAction> {
        let elapsed = now - self.last_end;
        self.last_end = now;
        match pass.batch {
            BatchId::Train { step } => self.step_over(pass, step + 1, elapsed),
            BatchId::Eval { step, index } => {
                pass.add_reports(&mut self.eval_sums);
                if index + 1 < self.settings.eval.map_or(0, |e| e.passes) {
                    return Vec::new();
                }
                let means = std::mem::take(&mut self.eval_sums).into_values().collect();
                vec![GenerationAction::Evaluated(EvalRecord { step, means })]
            }
        }
    }

    /// Completes each checkpoint of which every snapshot has arrived and whose step is complete, after those before it.
    fn commits(&mut self) -> Vec<GenerationAction> {
        let mut actions = Vec::new();
        for saving in &mut self.saving {
            let Some(updates) = saving.updates.filter(|_| saving.waiting.is_empty()) else { break };
            if !std::mem::replace(&mut saving.committing, true) {
                actions.push(GenerationAction::Commit(TrainingProgress { step: saving.step, updates }));
            }
        }
        actions
    }

    /// The item that follows `item` in an undisturbed generation: after each step its evaluation, then its checkpoint
    /// or cut.
    fn after(&mut self, item: Item) -> Option<Item> {
        let s = self.settings;
        let (step, evaluated) = match item {
            Item::Pass(BatchId::Train { step }) => (step + 1, 0),
            Item::Pass(BatchId::Eval { step, index }) => (step, index + 1),
            Item::Snapshot { step, .. } => (step, u64::MAX),
        };
        let due = |every: u64| step == s.steps || (every > 0 && step.is_multiple_of(every));
        if s.eval.is_some_and(|e| due(e.steps) && evaluated < e.passes) {
            return Some(Item::Pass(BatchId::Eval { step, index: evaluated }));
        }
        if !matches!(item, Item::Snapshot { .. }) {
            let due = s.checkpoint.is_some_and(due);
            // Training does not wait for slow checkpoints. Only the last one has to follow them.
            let save = due && (self.has_room_to_save() || step == s.steps);
            if due && !save && self.left_out == LeftOut::Nothing {
                self.left_out = LeftOut::Untold(step);
            }
            if save || self.cut_wanted {
                return Some(Item::Snapshot { step, save });
            }
        }
        match self.halt {
            None => (step < s.steps).then_some(Item::Pass(BatchId::Train { step })),
            Some(Halt::Drain) => self.last_cut(),
            Some(Halt::Stop) => None,
        }
    }

    fn has_room_to_save(&self) -> bool {
        self.saving.len() < self.settings.checkpoints_under_way.max(1)
    }

    /// Issues the next items, as far as the window allows.
    fn issue_next(&mut self) -> Vec<GenerationAction> {
        let mut actions = Vec::new();
        if self.over || !self.is_started() {
            return actions;
        }
        let window = self.settings.window.max(1);
        // What comes after a halt does not wait for an explanation.
        self.look.take_if(|_| self.halt.is_some());
        if (self.passes.len() as u64) < window
            && let Some(step) = self.look.take()
        {
            actions.extend(self.issue(BatchId::Train { step }, true));
        }
        while let Some(item) = self.next {
            match item {
                Item::Pass(batch) if (self.passes.len() as u64) < window => {
                    actions.extend(self.issue(batch, false));
                }
                Item::Snapshot { step, save } if !save || self.has_room_to_save() => {
                    actions.extend(self.begin_snapshot(step, save));
                }
                _ => break,
            }
            self.next = match self.halt {
                Some(Halt::Stop) => None,
                _ => self.after(item),
            };
            if let LeftOut::Untold(step) = self.left_out {
                self.left_out = LeftOut::Told;
                let event = Event::CheckpointLeftOut { step, under_way: self.saving.len() };
                actions.push(GenerationAction::Notice(Notice::Event(event)));
            }
        }
        if self.next.is_none() && self.passes.is_empty() {
            match self.halt {
                Some(Halt::Drain) if self.trained < self.settings.steps => {
                    self.over = true;
                    actions.push(GenerationAction::Drained(self.progress));
                }
                _ if self.saving.is_empty() => actions.extend(self.finish()),
                _ => {}
            }
        }
        actions
    }

    fn begin_snapshot(&mut self, step: u64, save: bool) -> Vec<GenerationAction> {
        (self.snapshot, self.cut_wanted) = (Some(step), false);
        let mut actions = vec![GenerationAction::Cut(step)];
        if save {
            self.saved = Some(step);
            self.saving.push_back(Saving {
                step,
                updates: (self.progress.step == step).then_some(self.progress.updates),
                waiting: (0..self.peers.len() as u32).map(PeerId).collect(),
                committing: false,
            });
            actions.push(GenerationAction::BeginCheckpoint(step));
        }
        actions.extend(self.broadcast(ToPeer::Compute(ComputeCommand::Snapshot { step, save })));
        actions
    }

    fn issue(&mut self, batch: BatchId, look: bool) -> Vec<GenerationAction> {
        self.issued += 1;
        let (pass, version, step) = (self.issued, self.version, batch.step());
        let trains = batch.kind() == PassKind::Train;
        let inspect = look || (trains && self.inspect);
        self.passes.push_back(Pass { inspect, look, ..Pass::new(pass, version, batch) });
        if trains && !look {
            self.trained = step + 1;
        }
        let run = ToPeer::Compute(ComputeCommand::Run { pass, version, kind: batch.kind(), step, inspect });
        self.broadcast(run).chain([GenerationAction::Feed(pass, batch)]).collect()
    }
}
