use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fusionllm_graph::ValueId;
use fusionllm_plan::{LearningRate, PeerId, Verdict, clip_factor};

use crate::{FromPeer, PassReport, ToPeer};

/// How often something happens between training steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Every {
    /// After every so many steps, and after the last.
    pub steps: u64,
    /// So many passes each time.
    pub passes: u64,
}

/// Where a run stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Position {
    /// Batches trained on.
    pub step: u64,
    /// Updates applied: as many, less the steps whose gradients were not finite.
    pub updates: u64,
}

/// What a run is to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// How many peers.
    pub peers: usize,
    /// Where it starts.
    pub start: Position,
    /// Steps in all, those before `start` included.
    pub steps: u64,
    /// Validation, if any.
    pub eval: Option<Every>,
    /// Steps between checkpoints, if any; one is taken at the end in any case where this is set.
    pub checkpoint: Option<u64>,
    /// The rate of each update.
    pub learning_rate: LearningRate,
    /// Largest global norm of the gradient.
    pub clip: Option<f64>,
    /// How many passes are issued ahead.
    pub window: u64,
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
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// Batches trained on, this one included.
    pub step: u64,
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
pub struct Evaluated {
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
    Evaluated(Evaluated),
    /// Expect snapshots of this step.
    BeginCheckpoint(u64),
    /// All peers' snapshots came: make the checkpoint whole, and tell [`Broker::committed`].
    Commit(Position),
    /// All is done.
    Finish(Position),
    /// The run cannot go on, for this reason.
    Fail(String),
}

#[derive(Debug)]
enum Item {
    Pass(PassKind),
    Snapshot(u64),
}

#[derive(Debug)]
struct Pass {
    number: u64,
    kind: PassKind,
    weights: Vec<f64>,
    targets: u64,
    reports: BTreeMap<(u32, u32), f64>,
    norms: BTreeMap<ValueId, f64>,
    voted: BTreeSet<PeerId>,
    verdict: Option<(Verdict, f64, f64)>,
    done: BTreeMap<PeerId, PassReport>,
}

/// How many steps in a row may be left out because they are not finite.
const MAX_SKIPPED: u32 = 20;

/// Conducts a run once its peers are assigned. Feed it events; carry out what it answers, in order.
#[derive(Debug)]
pub struct Broker {
    settings: Settings,
    names: Vec<String>,
    ready: BTreeSet<PeerId>,
    agenda: VecDeque<Item>,
    /// Training steps put on the agenda.
    planned: u64,
    passes: VecDeque<Pass>,
    issued: u64,
    position: Position,
    /// Steps over and the updates they left, until a checkpoint asks.
    updates_after: BTreeMap<u64, u64>,
    saving: Option<(u64, BTreeSet<PeerId>)>,
    last_saved: Option<u64>,
    eval_sums: Vec<f64>,
    eval_targets: u64,
    last_end: f64,
    skipped: u32,
    stopping: bool,
    over: bool,
}

impl Broker {
    /// A broker of peers with these names.
    pub fn new(settings: Settings, names: Vec<String>) -> Self {
        let start = settings.start;
        Self {
            settings,
            names,
            ready: BTreeSet::new(),
            agenda: VecDeque::new(),
            planned: start.step,
            passes: VecDeque::new(),
            issued: 0,
            position: start,
            updates_after: BTreeMap::from([(start.step, start.updates)]),
            saving: None,
            last_saved: None,
            eval_sums: Vec::new(),
            eval_targets: 0,
            last_end: 0.0,
            skipped: 0,
            stopping: false,
            over: false,
        }
    }

    /// Where the run stands.
    pub fn position(&self) -> Position {
        self.position
    }

    fn name(&self, peer: PeerId) -> &str {
        self.names.get(peer.0 as usize).map_or("?", String::as_str)
    }

    fn fail(&mut self, reason: String) -> Vec<Action> {
        if self.over {
            return Vec::new();
        }
        self.over = true;
        vec![Action::Broadcast(ToPeer::Stop { reason: reason.clone() }), Action::Fail(reason)]
    }

    /// A peer's connection is gone.
    pub fn lost(&mut self, peer: PeerId, reason: &str) -> Vec<Action> {
        let name = self.name(peer).to_string();
        self.fail(format!("peer {name:?} is gone: {reason}"))
    }

    /// Stops after the passes under way, with a checkpoint where the run takes any.
    pub fn interrupt(&mut self) -> Vec<Action> {
        self.stopping = true;
        self.agenda.clear();
        self.go_on()
    }

    /// The micro-batches' shares of a pass's loss, and how many targets count in it.
    pub fn weights(&mut self, pass: u64, weights: Vec<f64>, targets: u64) {
        if let Some(p) = self.passes.iter_mut().find(|p| p.number == pass) {
            p.weights = weights;
            p.targets = targets;
        }
    }

    /// The checkpoint was made whole (or why it could not be; the run goes on without it).
    pub fn committed(&mut self, step: u64) -> Vec<Action> {
        if self.saving.as_ref().is_some_and(|(s, _)| *s == step) {
            self.saving = None;
        }
        self.go_on()
    }

    /// A message from a peer, at a time in seconds.
    pub fn message(&mut self, from: PeerId, message: FromPeer, now: f64) -> Vec<Action> {
        if self.over {
            return Vec::new();
        }
        match message {
            FromPeer::Hello(_) => self.protest(from, "said hello twice"),
            FromPeer::Ready => {
                self.ready.insert(from);
                if self.ready.len() < self.settings.peers {
                    return Vec::new();
                }
                self.last_end = now;
                self.go_on()
            }
            FromPeer::Failed { reason } => {
                let name = self.name(from).to_string();
                self.fail(format!("peer {name:?} failed: {reason}"))
            }
            FromPeer::Report { pass, report, micro_batch, value } => match self.pass(pass) {
                Some(p) if (report as usize) < 16 && (micro_batch as usize) < p.weights.len() => {
                    p.reports.insert((report, micro_batch), value);
                    Vec::new()
                }
                _ => self.protest(from, "reported on a pass that is not under way"),
            },
            FromPeer::Norms { pass, squared_norms } => self.norms(from, pass, squared_norms),
            FromPeer::PassDone { pass, report } => self.pass_done(from, pass, report, now),
            FromPeer::Lost { peer, reason } => {
                let by = self.name(from).to_string();
                self.lost(peer, &format!("{reason} (seen by {by:?})"))
            }
        }
    }

    /// The last tensor of a peer's snapshot came.
    pub fn saved(&mut self, from: PeerId, step: u64) -> Vec<Action> {
        match &mut self.saving {
            Some((s, waiting)) if *s == step => {
                waiting.remove(&from);
                self.try_commit()
            }
            _ => self.protest(from, "ended a snapshot that was not asked for"),
        }
    }

    fn protest(&mut self, from: PeerId, what: &str) -> Vec<Action> {
        let name = self.name(from).to_string();
        self.fail(format!("peer {name:?} broke the protocol: it {what}"))
    }

    fn pass(&mut self, number: u64) -> Option<&mut Pass> {
        self.passes.iter_mut().find(|p| p.number == number)
    }

    fn norms(&mut self, from: PeerId, number: u64, squared_norms: Vec<(ValueId, f64)>) -> Vec<Action> {
        let (peers, clip, rate) = (self.settings.peers, self.settings.clip, self.settings.learning_rate);
        let update = self.position.updates + 1;
        let Some(p) = self.pass(number) else {
            return self.protest(from, "sent norms of a pass that is not under way");
        };
        p.norms.extend(squared_norms);
        p.voted.insert(from);
        if p.voted.len() < peers {
            return Vec::new();
        }
        // By parameter, so in graph order: the sum does not depend on who sent first.
        let norms: Vec<f64> = p.norms.values().copied().collect();
        let (norm, factor) = clip_factor(&norms, clip);
        let loss: f64 =
            p.weights.iter().enumerate().map(|(m, w)| p.reports.get(&(0, m as u32)).map_or(f64::NAN, |l| l * w)).sum();
        let apply = norm.is_finite() && loss.is_finite();
        let verdict = Verdict { apply, update, lr: rate.at(update), factor };
        p.verdict = Some((verdict, loss, norm));
        if apply {
            self.position.updates += 1;
            self.skipped = 0;
        } else {
            self.skipped += 1;
        }
        vec![Action::Broadcast(ToPeer::Verdict { pass: number, verdict })]
    }

    fn pass_done(&mut self, from: PeerId, number: u64, report: PassReport, now: f64) -> Vec<Action> {
        let peers = self.settings.peers;
        let Some(p) = self.pass(number) else {
            return self.protest(from, "ended a pass that is not under way");
        };
        p.done.insert(from, report);
        let mut actions = Vec::new();
        while self.passes.front().is_some_and(|p| p.done.len() == peers) {
            if let Some(pass) = self.passes.pop_front() {
                actions.extend(self.over(pass, now));
            }
        }
        actions.extend(self.try_commit());
        if self.skipped >= MAX_SKIPPED {
            let step = self.position.step;
            actions.extend(self.fail(format!(
                "{MAX_SKIPPED} steps in a row up to step {step} had a loss or gradient that is not finite; try a lower learning rate or clipping"
            )));
        }
        actions.extend(self.go_on());
        actions
    }

    /// All peers are done with a pass, and with all before it.
    fn over(&mut self, pass: Pass, now: f64) -> Option<Action> {
        let elapsed = now - self.last_end;
        self.last_end = now;
        match pass.kind {
            PassKind::Train { step } => {
                let (verdict, loss, grad_norm) = pass.verdict?;
                self.position.step = step + 1;
                self.updates_after.insert(step + 1, self.position.updates);
                Some(Action::Step(StepRecord {
                    step: step + 1,
                    loss,
                    grad_norm,
                    lr: verdict.lr,
                    applied: verdict.apply,
                    step_s: elapsed,
                    bytes_sent: pass.done.values().flat_map(|r| &r.sent).map(|(_, bytes)| bytes).sum(),
                    peers: pass.done.into_values().collect(),
                }))
            }
            PassKind::Eval { step, index } => {
                let reports = pass.reports.keys().map(|(r, _)| *r as usize + 1).max().unwrap_or(0);
                self.eval_sums.resize(self.eval_sums.len().max(reports), 0.0);
                for ((report, m), value) in &pass.reports {
                    // The loss is a micro-batch's mean; others are sums already.
                    let weight = if *report == 0 { pass.weights[*m as usize] * pass.targets as f64 } else { 1.0 };
                    self.eval_sums[*report as usize] += value * weight;
                }
                self.eval_targets += pass.targets;
                if index + 1 < self.settings.eval.map_or(0, |e| e.passes) {
                    return None;
                }
                let targets = std::mem::take(&mut self.eval_targets) as f64;
                let means = std::mem::take(&mut self.eval_sums).into_iter().map(|s| s / targets).collect();
                Some(Action::Evaluated(Evaluated { step, means }))
            }
        }
    }

    /// A checkpoint is whole once every snapshot came and the step's own end is known.
    fn try_commit(&mut self) -> Vec<Action> {
        match &self.saving {
            Some((step, waiting)) if waiting.is_empty() && Some(*step) != self.last_saved => {
                match self.updates_after.get(step) {
                    Some(&updates) => {
                        let position = Position { step: *step, updates };
                        self.last_saved = Some(position.step);
                        self.updates_after = self.updates_after.split_off(&position.step);
                        vec![Action::Commit(position)]
                    }
                    None => Vec::new(),
                }
            }
            _ => Vec::new(),
        }
    }

    fn refill(&mut self) {
        let s = self.settings;
        let due = |every: u64, step: u64| every > 0 && step.is_multiple_of(every);
        if self.planned < s.steps && !self.stopping {
            self.agenda.push_back(Item::Pass(PassKind::Train { step: self.planned }));
            self.planned += 1;
            let last = self.planned == s.steps;
            if let Some(eval) = s.eval.filter(|e| due(e.steps, self.planned) || last) {
                let step = self.planned;
                self.agenda.extend((0..eval.passes).map(|index| Item::Pass(PassKind::Eval { step, index })));
            }
            if let Some(every) = s.checkpoint
                && (due(every, self.planned) || last)
            {
                self.agenda.push_back(Item::Snapshot(self.planned));
            }
        }
    }

    /// The last training step whose pass was issued or planned without being dropped.
    fn last_issued(&self) -> u64 {
        self.passes
            .iter()
            .filter_map(|p| match p.kind {
                PassKind::Train { step } => Some(step + 1),
                PassKind::Eval { .. } => None,
            })
            .max()
            .unwrap_or(self.position.step)
    }

    /// Issues what is next, as far as the window allows.
    fn go_on(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.over || self.ready.len() < self.settings.peers {
            return actions;
        }
        loop {
            if self.agenda.is_empty() {
                self.refill();
            }
            match self.agenda.front() {
                Some(Item::Pass(_)) if self.passes.len() as u64 >= self.settings.window => break,
                Some(Item::Snapshot(_)) if self.saving.is_some() => break,
                Some(Item::Snapshot(_)) => {
                    if let Some(Item::Snapshot(step)) = self.agenda.pop_front() {
                        actions.extend(self.begin_snapshot(step));
                    }
                }
                Some(Item::Pass(_)) => {
                    if let Some(Item::Pass(kind)) = self.agenda.pop_front() {
                        actions.extend(self.issue(kind));
                    }
                }
                None => {
                    let here = self.last_issued();
                    let saved = self.saving.as_ref().map(|(s, _)| *s).or(self.last_saved);
                    let fresh = here > self.settings.start.step && saved != Some(here);
                    if self.stopping && self.settings.checkpoint.is_some() && fresh {
                        if self.saving.is_some() {
                            break;
                        }
                        actions.extend(self.begin_snapshot(here));
                    } else if self.passes.is_empty() && self.saving.is_none() {
                        self.over = true;
                        actions.push(Action::Broadcast(ToPeer::Stop { reason: String::new() }));
                        actions.push(Action::Finish(self.position));
                        break;
                    } else {
                        break;
                    }
                }
            }
        }
        actions
    }

    fn begin_snapshot(&mut self, step: u64) -> Vec<Action> {
        self.saving = Some((step, (0..self.settings.peers as u32).map(PeerId).collect()));
        vec![Action::BeginCheckpoint(step), Action::Broadcast(ToPeer::Snapshot { step })]
    }

    fn issue(&mut self, kind: PassKind) -> Vec<Action> {
        self.issued += 1;
        let number = self.issued;
        self.passes.push_back(Pass {
            number,
            kind,
            weights: Vec::new(),
            targets: 0,
            reports: BTreeMap::new(),
            norms: BTreeMap::new(),
            voted: BTreeSet::new(),
            verdict: None,
            done: BTreeMap::new(),
        });
        let (train, step) = match kind {
            PassKind::Train { step } => (true, step),
            PassKind::Eval { step, .. } => (false, step),
        };
        vec![Action::Broadcast(ToPeer::Run { pass: number, train, step }), Action::Feed(number, kind)]
    }
}
