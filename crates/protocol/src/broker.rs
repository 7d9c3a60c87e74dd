use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fusionllm_graph::ValueId;
use fusionllm_plan::{LearningRate, LinkCodec, PeerId, Verdict, clip_factor, share_of_loss};

use crate::{ExpectedReports, FromPeer, PassReport, ToPeer};

/// How often something happens between training steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalSchedule {
    /// After every so many steps, and after the last.
    pub steps: u64,
    /// So many passes each time.
    pub passes: u64,
}

/// Where a run stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrainingProgress {
    /// Batches trained on.
    pub step: u64,
    /// Updates applied: as many, less the steps whose gradients were not finite.
    pub updates: u64,
}

/// What a run is to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunSettings {
    /// Version of the plan it starts with.
    pub version: u32,
    /// Where it starts.
    pub start: TrainingProgress,
    /// Steps in all, those before `start` included.
    pub steps: u64,
    /// Micro-batches a pass.
    pub micro_batches: u32,
    /// Validation, if any.
    pub eval: Option<EvalSchedule>,
    /// Steps between checkpoints, if any; one is taken at the end in any case where this is set.
    pub checkpoint: Option<u64>,
    /// The rate of each update.
    pub learning_rate: LearningRate,
    /// Largest global norm of the gradient.
    pub clip: Option<f64>,
    /// How many passes are issued ahead, at least 1.
    pub window: u64,
}

/// A peer, as far as the broker's decisions go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Participant {
    /// For people.
    pub name: String,
    /// What it owes.
    pub duties: ExpectedReports,
}

/// What a pass is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassKind {
    /// Step number `step`, from 0.
    Train {
        /// Batches trained on before it.
        step: u64,
    },
    /// Pass `index` of the validation after `step` steps.
    Eval {
        /// Batches trained on.
        step: u64,
        /// Which of its passes.
        index: u64,
    },
}

/// A step that is over.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepRecord {
    /// Batches trained on, this one included.
    pub step: u64,
    /// Version of the plan that it ran by.
    pub version: u32,
    /// The batch's loss.
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Whether it was applied: not if loss or gradient were not finite.
    pub applied: bool,
    /// Seconds since the step before ended (or since the start), validation left out.
    pub step_s: f64,
    /// Bytes of tensors sent between peers.
    pub bytes_sent: u64,
    /// What each peer's pass took, by peer.
    pub peers: Vec<PassReport>,
}

/// A validation that is over.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalRecord {
    /// Batches trained on.
    pub step: u64,
    /// Sums over all targets of each report, by the program's order of reports: the loss as a mean over targets, others as sums divided by the targets.
    pub means: Vec<f64>,
}

/// What the broker's driver is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Tell a peer.
    Send(PeerId, ToPeer),
    /// Tell every peer.
    Broadcast(ToPeer),
    /// Stream the inputs of a pass to the peers that read them, and tell [`Broker::weights`].
    Feed(u64, PassKind),
    /// A step is over.
    Step(StepRecord),
    /// A validation is over.
    Evaluated(EvalRecord),
    /// Expect snapshots of this step.
    BeginCheckpoint(u64),
    /// All peers' snapshots came: make the checkpoint whole, and tell [`Broker::committed`].
    Commit(TrainingProgress),
    /// All is done.
    Finish(TrainingProgress),
    /// The run cannot go on, for this reason.
    Fail(String),
}

/// Other codecs for a run under way.
#[derive(Debug, Clone, PartialEq)]
pub struct AppliedCodecs {
    /// The version of the plan that has them.
    pub version: u32,
    /// The first step that runs by it, from 1.
    pub step: u64,
    /// What the driver is to do.
    pub actions: Vec<Action>,
}

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Item {
    Pass(PassKind),
    Snapshot(u64),
}

#[derive(Debug)]
struct Pass {
    number: u64,
    version: u32,
    kind: PassKind,
    weights: Vec<f64>,
    targets: u64,
    /// By report and micro-batch.
    reports: BTreeMap<(u32, u32), f64>,
    norms: BTreeMap<ValueId, f64>,
    voted: BTreeSet<PeerId>,
    judged: Option<Judged>,
    done: BTreeMap<PeerId, PassReport>,
}

impl Pass {
    fn trains(&self) -> bool {
        matches!(self.kind, PassKind::Train { .. })
    }
}

#[derive(Debug, Clone, Copy)]
struct Judged {
    verdict: Verdict,
    loss: f64,
    grad_norm: f64,
}

/// A checkpoint under way.
#[derive(Debug)]
struct Saving {
    step: u64,
    /// The updates applied up to that step, once it is over.
    updates: Option<u64>,
    /// Those whose snapshots have not all come.
    waiting: BTreeSet<PeerId>,
    /// Whether the driver was asked to make it whole.
    committing: bool,
}

/// How many steps in a row may be left out because they are not finite.
const MAX_SKIPPED: u32 = 20;

/// More bytes than a peer sends to another in a pass, so that sums of what peers say stay far from overflow.
const MAX_SENT: u64 = 1 << 44;

/// Conducts a run once its peers are assigned. Feed it events; carry out what it answers, in order.
///
/// Peers are not trusted: whatever one sends that is not its turn or its business ends the run with an error that names it.
#[derive(Debug)]
pub struct Broker {
    settings: RunSettings,
    /// Version of the plan that passes are issued by.
    version: u32,
    peers: Vec<Participant>,
    ready: BTreeSet<PeerId>,
    /// What is issued next; `None` at the end.
    next: Option<Item>,
    /// Passes under way, in the order in which all peers go through them.
    passes: VecDeque<Pass>,
    issued: u64,
    /// Batches trained on once all passes under way are over.
    trained: u64,
    /// Updates decided.
    updates: u64,
    position: TrainingProgress,
    saving: Option<Saving>,
    /// The step of the last snapshot that was asked for.
    snapshot: Option<u64>,
    /// Sums over the validation under way, by report.
    eval_sums: BTreeMap<u32, f64>,
    eval_targets: u64,
    last_end: f64,
    skipped: u32,
    stopping: bool,
    over: bool,
}

/// What a peer did wrong ends the run; it completes "broke the protocol: it …".
type Outcome = Result<Vec<Action>, &'static str>;

impl Broker {
    /// A broker of these peers, in the order of their numbers.
    pub fn new(settings: RunSettings, peers: Vec<Participant>) -> Self {
        let TrainingProgress { step, updates } = settings.start;
        Self {
            settings,
            version: settings.version,
            peers,
            ready: BTreeSet::new(),
            next: (step < settings.steps).then_some(Item::Pass(PassKind::Train { step })),
            passes: VecDeque::new(),
            issued: 0,
            trained: step,
            updates,
            position: settings.start,
            saving: None,
            snapshot: None,
            eval_sums: BTreeMap::new(),
            eval_targets: 0,
            last_end: 0.0,
            skipped: 0,
            stopping: false,
            over: false,
        }
    }

    /// Where the run stands: after the last step that all peers ended.
    pub fn position(&self) -> TrainingProgress {
        self.position
    }

    /// A peer's connection is gone.
    pub fn lost(&mut self, peer: PeerId, reason: &str) -> Vec<Action> {
        let reason = format!("peer {:?} is gone: {}", self.name(peer), plain(reason));
        self.fail(reason)
    }

    /// Stops after the passes under way, with a checkpoint where the run takes any; at once if nothing has begun.
    pub fn interrupt(&mut self) -> Vec<Action> {
        if self.over {
            return Vec::new();
        }
        self.stopping = true;
        let unsaved = self.trained > self.settings.start.step && self.snapshot != Some(self.trained);
        self.next = (self.settings.checkpoint.is_some() && unsaved).then_some(Item::Snapshot(self.trained));
        if self.started() { self.go_on() } else { self.finish() }
    }

    /// Gives links other codecs from the next pass on that no peer has been told of: the plan's next version. Links that are not named have none.
    /// `None` if there will be no more steps.
    pub fn set_codecs(&mut self, codecs: &[LinkCodec]) -> Option<AppliedCodecs> {
        if self.over || self.stopping || self.trained >= self.settings.steps {
            return None;
        }
        self.version += 1;
        let version = self.version;
        let tell = |peer| {
            let codecs = codecs.iter().filter(|l| l.from == peer).map(|l| (l.to, l.codec)).collect();
            Action::Send(peer, ToPeer::SetCodecs { version, codecs })
        };
        let actions = (0..self.peers.len() as u32).map(PeerId).map(tell).collect();
        Some(AppliedCodecs { version, step: self.trained + 1, actions })
    }

    /// The micro-batches' shares of a pass's loss, and how many targets count in it.
    pub fn weights(&mut self, pass: u64, weights: Vec<f64>, targets: u64) {
        if let Some(p) = self.passes.iter_mut().find(|p| p.number == pass) {
            p.weights = weights;
            p.targets = targets;
        }
    }

    /// The checkpoint was made whole (or given up; the run goes on without it).
    pub fn committed(&mut self, step: u64) -> Vec<Action> {
        self.saving.take_if(|s| s.step == step && s.committing);
        self.go_on()
    }

    /// A message from a peer, at a time in seconds.
    pub fn message(&mut self, from: PeerId, message: FromPeer, now: f64) -> Vec<Action> {
        if self.over {
            return Vec::new();
        }
        let outcome = match message {
            FromPeer::Hello(_) => Err("said hello twice"),
            FromPeer::Machine(_) | FromPeer::Links(_) | FromPeer::ProbingStopped => {
                Err("was not asked to measure anything")
            }
            FromPeer::Ready => self.peer_ready(from, now),
            FromPeer::Report { pass, report, micro_batch, value } => {
                self.report(from, pass, (report, micro_batch), value)
            }
            FromPeer::Norms { pass, squared_norms } => self.norms(from, pass, squared_norms),
            FromPeer::PassDone { pass, report } => self.pass_done(from, pass, report, now),
            FromPeer::PeerLost { peer, .. } if peer == from || peer.0 as usize >= self.peers.len() => {
                Err("reported the loss of a peer that is none")
            }
            FromPeer::PeerLost { peer, reason } => {
                let reason = format!("{} (seen by {:?})", plain(&reason), self.name(from));
                Ok(self.lost(peer, &reason))
            }
            FromPeer::Failed { reason } => {
                let reason = format!("peer {:?} failed: {}", self.name(from), plain(&reason));
                Ok(self.fail(reason))
            }
        };
        outcome.unwrap_or_else(|what| self.protest(from, what))
    }

    /// The last tensor of a peer's snapshot came.
    pub fn saved(&mut self, from: PeerId, step: u64) -> Vec<Action> {
        let saving = self.saving.as_mut().filter(|s| s.step == step);
        if !saving.is_some_and(|s| s.waiting.remove(&from)) {
            return self.protest(from, "ended a snapshot that was not asked for");
        }
        self.try_commit().into_iter().collect()
    }

    fn name(&self, peer: PeerId) -> &str {
        self.peers.get(peer.0 as usize).map_or("?", |p| p.name.as_str())
    }

    fn started(&self) -> bool {
        self.ready.len() == self.peers.len()
    }

    fn protest(&mut self, from: PeerId, what: &str) -> Vec<Action> {
        let reason = format!("peer {:?} broke the protocol: it {what}", self.name(from));
        self.fail(reason)
    }

    fn fail(&mut self, reason: String) -> Vec<Action> {
        if self.over {
            return Vec::new();
        }
        self.over = true;
        vec![Action::Broadcast(ToPeer::Stop { reason: reason.clone() }), Action::Fail(reason)]
    }

    fn finish(&mut self) -> Vec<Action> {
        self.over = true;
        vec![Action::Broadcast(ToPeer::Stop { reason: String::new() }), Action::Finish(self.position)]
    }

    fn peer_ready(&mut self, from: PeerId, now: f64) -> Outcome {
        if !self.ready.insert(from) {
            return Err("said twice that it is ready");
        }
        self.last_end = now;
        Ok(self.go_on())
    }

    /// The pass that a peer is in, if it is this one, and what it owes there. Each goes through the passes one after another.
    fn current(&mut self, from: PeerId, number: u64) -> Result<(&mut Pass, &ExpectedReports), &'static str> {
        let pass = self.passes.iter_mut().find(|p| !p.done.contains_key(&from)).filter(|p| p.number == number);
        pass.zip(self.peers.get(from.0 as usize).map(|p| &p.duties)).ok_or("spoke of a pass that it is not in")
    }

    fn report(&mut self, from: PeerId, number: u64, key: (u32, u32), value: f64) -> Outcome {
        let (pass, duties) = self.current(from, number)?;
        if !duties.reports(pass.trains()).contains(&key) {
            return Err("reported what it does not compute");
        }
        match pass.reports.insert(key, value) {
            None => Ok(Vec::new()),
            Some(_) => Err("reported the same twice"),
        }
    }

    fn norms(&mut self, from: PeerId, number: u64, squared_norms: Vec<(ValueId, f64)>) -> Outcome {
        let RunSettings { micro_batches, clip, learning_rate, .. } = self.settings;
        let (peers, update) = (self.peers.len(), self.updates + 1);
        let (pass, duties) = self.current(from, number)?;
        if !pass.trains() || !pass.voted.insert(from) {
            return Err("sent norms that nobody waits for");
        }
        if !duties.reported(pass.trains(), &pass.reports) {
            return Err("sent norms before its reports");
        }
        if !squared_norms.iter().map(|(p, _)| p).eq(duties.norms()) || squared_norms.iter().any(|(_, n)| *n < 0.0) {
            return Err("sent norms of other gradients than its own");
        }
        pass.norms.extend(squared_norms);
        if pass.voted.len() < peers {
            return Ok(Vec::new());
        }
        // By parameter, so in graph order: the sum does not depend on who sent first.
        let norms: Vec<f64> = pass.norms.values().copied().collect();
        let (grad_norm, factor) = clip_factor(&norms, clip);
        let term = |m: u32| {
            let known = pass.weights.get(m as usize).zip(pass.reports.get(&(0, m)));
            known.map_or(f64::NAN, |(w, l)| share_of_loss(*w, *l))
        };
        let loss: f64 = (0..micro_batches).map(term).sum();
        let apply = grad_norm.is_finite() && loss.is_finite();
        let verdict = Verdict { apply, update, lr: learning_rate.at(update), factor };
        pass.judged = Some(Judged { verdict, loss, grad_norm });
        self.updates += u64::from(apply);
        Ok(vec![Action::Broadcast(ToPeer::Verdict { pass: number, verdict })])
    }

    fn pass_done(&mut self, from: PeerId, number: u64, report: PassReport, now: f64) -> Outcome {
        let peers = self.peers.len();
        if !plausible(&report, peers as u32) {
            return Err("sent figures that cannot be");
        }
        let (pass, duties) = self.current(from, number)?;
        let owes = match pass.kind {
            PassKind::Train { .. } => pass.judged.is_none(),
            PassKind::Eval { .. } => !duties.reported(false, &pass.reports),
        };
        if owes {
            return Err("ended a pass before all was done");
        }
        pass.done.insert(from, report);
        let mut actions = Vec::new();
        while let Some(pass) = self.passes.pop_front_if(|p| p.done.len() == peers) {
            actions.extend(self.pass_over(pass, now));
        }
        actions.extend(self.try_commit());
        if self.skipped >= MAX_SKIPPED {
            let step = self.position.step;
            actions.extend(self.fail(format!(
                "{MAX_SKIPPED} steps in a row up to step {step} had a loss or gradient that is not finite; try a lower learning rate or clipping"
            )));
        }
        actions.extend(self.go_on());
        Ok(actions)
    }

    /// All peers are done with a pass, and with all before it.
    fn pass_over(&mut self, pass: Pass, now: f64) -> Option<Action> {
        let elapsed = now - self.last_end;
        self.last_end = now;
        match pass.kind {
            PassKind::Train { step } => {
                let Judged { verdict, loss, grad_norm } = pass.judged?;
                self.skipped = if verdict.apply { 0 } else { self.skipped + 1 };
                self.position =
                    TrainingProgress { step: step + 1, updates: self.position.updates + u64::from(verdict.apply) };
                if let Some(saving) = self.saving.as_mut().filter(|s| s.step == self.position.step) {
                    saving.updates = Some(self.position.updates);
                }
                Some(Action::Step(StepRecord {
                    step: step + 1,
                    version: pass.version,
                    loss,
                    grad_norm,
                    lr: verdict.lr,
                    applied: verdict.apply,
                    step_s: elapsed,
                    bytes_sent: pass
                        .done
                        .values()
                        .flat_map(|r| &r.sent)
                        .fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes)),
                    peers: pass.done.into_values().collect(),
                }))
            }
            PassKind::Eval { step, index } => {
                for ((report, m), value) in &pass.reports {
                    // The loss is a micro-batch's mean; others are sums already.
                    let weight = pass.weights.get(*m as usize).map_or(f64::NAN, |w| w * pass.targets as f64);
                    *self.eval_sums.entry(*report).or_default() +=
                        if *report == 0 { share_of_loss(weight, *value) } else { *value };
                }
                self.eval_targets += pass.targets;
                if index + 1 < self.settings.eval.map_or(0, |e| e.passes) {
                    return None;
                }
                let targets = std::mem::take(&mut self.eval_targets) as f64;
                let means = std::mem::take(&mut self.eval_sums).into_values().map(|s| s / targets).collect();
                Some(Action::Evaluated(EvalRecord { step, means }))
            }
        }
    }

    /// A checkpoint is whole once every snapshot came and the step's own end is known.
    fn try_commit(&mut self) -> Option<Action> {
        let saving = self.saving.as_mut().filter(|s| s.waiting.is_empty() && !s.committing)?;
        let updates = saving.updates?;
        saving.committing = true;
        Some(Action::Commit(TrainingProgress { step: saving.step, updates }))
    }

    /// What follows in an undisturbed run: after each step its validation, then its checkpoint.
    fn after(&self, item: Item) -> Option<Item> {
        let s = &self.settings;
        let (step, evaluated) = match item {
            Item::Pass(PassKind::Train { step }) => (step + 1, 0),
            Item::Pass(PassKind::Eval { step, index }) => (step, index + 1),
            Item::Snapshot(step) => (step, u64::MAX),
        };
        let due = |every: u64| step == s.steps || (every > 0 && step.is_multiple_of(every));
        if s.eval.is_some_and(|e| due(e.steps) && evaluated < e.passes) {
            return Some(Item::Pass(PassKind::Eval { step, index: evaluated }));
        }
        if s.checkpoint.is_some_and(due) && item != Item::Snapshot(step) {
            return Some(Item::Snapshot(step));
        }
        (step < s.steps).then_some(Item::Pass(PassKind::Train { step }))
    }

    /// Issues what is next, as far as the window allows.
    fn go_on(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.over || !self.started() {
            return actions;
        }
        while let Some(item) = self.next {
            match item {
                Item::Pass(kind) if (self.passes.len() as u64) < self.settings.window.max(1) => {
                    actions.extend(self.issue(kind));
                }
                // One checkpoint at a time.
                Item::Snapshot(step) if self.saving.is_none() => actions.extend(self.begin_snapshot(step)),
                _ => break,
            }
            self.next = if self.stopping { None } else { self.after(item) };
        }
        if self.next.is_none() && self.passes.is_empty() && self.saving.is_none() {
            actions.extend(self.finish());
        }
        actions
    }

    fn begin_snapshot(&mut self, step: u64) -> [Action; 2] {
        self.snapshot = Some(step);
        self.saving = Some(Saving {
            step,
            updates: (self.position.step == step).then_some(self.position.updates),
            waiting: (0..self.peers.len() as u32).map(PeerId).collect(),
            committing: false,
        });
        [Action::BeginCheckpoint(step), Action::Broadcast(ToPeer::Snapshot { step })]
    }

    fn issue(&mut self, kind: PassKind) -> [Action; 2] {
        self.issued += 1;
        let number = self.issued;
        self.passes.push_back(Pass {
            number,
            version: self.version,
            kind,
            weights: Vec::new(),
            targets: 0,
            reports: BTreeMap::new(),
            norms: BTreeMap::new(),
            voted: BTreeSet::new(),
            judged: None,
            done: BTreeMap::new(),
        });
        let (train, step) = match kind {
            PassKind::Train { step } => {
                self.trained = step + 1;
                (true, step)
            }
            PassKind::Eval { step, .. } => (false, step),
        };
        [
            Action::Broadcast(ToPeer::Run { pass: number, version: self.version, train, step }),
            Action::Feed(number, kind),
        ]
    }
}

/// Whether figures from a peer are ones that people and sums can work with.
fn plausible(report: &PassReport, peers: u32) -> bool {
    let PassReport { compute_s, wait_s, total_s, codec_s, sent, errors, spectra, received, .. } = report;
    let figure = |x: &f64| x.is_finite() && *x >= 0.0;
    [compute_s, wait_s, total_s, codec_s].into_iter().all(figure)
        && errors.iter().all(|(to, error)| to.0 < peers && figure(error))
        && errors.is_sorted_by(|a, b| a.0 < b.0)
        && spectra.iter().all(|(to, meant, received)| to.0 < peers && figure(meant) && figure(received))
        && spectra.is_sorted_by(|a, b| a.0 < b.0)
        && received.iter().all(|(from, bytes, s)| from.0 < peers && *bytes <= MAX_SENT && figure(s))
        && received.is_sorted_by(|a, b| a.0 < b.0)
        && sent.iter().all(|(to, bytes)| to.0 < peers && *bytes <= MAX_SENT)
        && sent.is_sorted_by(|a, b| a.0 < b.0)
}

/// A peer's words as they may stand in an error: one line of reasonable length.
fn plain(text: &str) -> String {
    text.chars().take(1000).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
