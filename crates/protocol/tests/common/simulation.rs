//! A broker and peers in one thread. A seed decides the order in which messages arrive.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fusionllm_compress::{Codec, TopK};
use fusionllm_plan::LinkCodec;
use fusionllm_program::{Address, Cause, Instruction, LearningRate, PassKind, PeerId, Poison, Program, Verdict};
use fusionllm_protocol::{
    AppliedCodecs, BatchId, ComputeCommand, EvalRecord, EvalSchedule, ExpectedReports, FromPeer, GenerationAction,
    GenerationMachine, MemberId, Notice, Participant, PassReport, RunSettings, SentBytes, StepRecord, ToPeer,
    TrainingProgress,
};

use super::{ChoiceRng, programs};

/// A disturbance of a run.
#[derive(Debug, Clone)]
pub(crate) enum Disturbance {
    Interrupt,
    /// The links get new codecs.
    SetCodecs,
    /// A peer sends this message unexpectedly.
    Lie(u32, Box<FromPeer>),
}

#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) peers: usize,
    pub(crate) settings: RunSettings,
    /// Steps whose loss or gradient is not finite, by the number of batches before them.
    pub(crate) broken: BTreeSet<u64>,
    /// The disturbances, each after this many events.
    pub(crate) disturbances: Vec<(usize, Disturbance)>,
    pub(crate) seed: u64,
}

impl Default for Scenario {
    fn default() -> Self {
        let settings = RunSettings {
            version: 1,
            start: TrainingProgress::default(),
            steps: 5,
            micro_batches: 2,
            eval: Some(EvalSchedule { steps: 2, passes: 2 }),
            checkpoint: Some(2),
            checkpoints_under_way: 2,
            learning_rate: LearningRate { base: 1.0, warmup: 3, cosine_until: Some(9), min: 0.1 },
            clip: Some(1.0),
            window: 3,
            passes_before: 0,
        };
        Self { peers: 3, settings, broken: BTreeSet::new(), disturbances: Vec::new(), seed: 0 }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum End {
    Finished(TrainingProgress),
    Failed(String),
}

/// The broker's actions.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    pub(crate) steps: Vec<StepRecord>,
    pub(crate) evaluated: Vec<EvalRecord>,
    pub(crate) commits: Vec<TrainingProgress>,
    pub(crate) cuts: Vec<u64>,
    pub(crate) notices: Vec<Notice>,
    /// Versions of the plan after the first, each with its first step.
    pub(crate) codec_versions: Vec<(u32, u64)>,
    pub(crate) events: usize,
    pub(crate) end: Option<End>,
}

pub(crate) fn share(micro_batches: u32, m: u32) -> f64 {
    f64::from(m + 1) / f64::from(micro_batches * (micro_batches + 1) / 2)
}

/// The loss that a micro-batch reports.
pub(crate) fn loss(step: u64, m: u32) -> f64 {
    step as f64 + 0.25 * f64::from(m)
}

/// The weight of a micro-batch's sums in an evaluation. It may be negative.
pub(crate) fn weight_of_sum(m: u32) -> f64 {
    0.1 - 0.3 * f64::from(m % 2)
}

pub(crate) fn run(scenario: &Scenario) -> Trace {
    let programs = programs(scenario.peers, scenario.settings.micro_batches);
    let participants = (0..)
        .map(MemberId)
        .zip(&programs)
        .map(|(member, (train, eval))| Participant {
            member,
            name: format!("p{}", member.0),
            expected: ExpectedReports::new(train, eval),
        })
        .collect();
    let mut s = Simulation {
        scenario,
        machine: GenerationMachine::new(scenario.settings, participants),
        peers: programs.iter().map(|(train, eval)| Peer::new(train.clone(), eval, scenario)).collect(),
        issued: 0,
        completed: 0,
        saving: VecDeque::new(),
        committing: VecDeque::new(),
        clock: 0.0,
        trace: Trace::default(),
    };
    s.run();
    s.trace
}

struct Simulation<'a> {
    scenario: &'a Scenario,
    machine: GenerationMachine,
    peers: Vec<Peer<'a>>,
    /// Passes issued, and passes that every peer has completed.
    issued: u64,
    completed: u64,
    saving: VecDeque<u64>,
    committing: VecDeque<u64>,
    clock: f64,
    trace: Trace,
}

/// One thing that may happen next.
#[derive(Clone, Copy)]
enum Event {
    /// The next message to a peer arrives.
    ToPeer(usize),
    /// A peer makes one step.
    Work(usize),
    /// A peer's next message arrives.
    FromPeer(usize),
    /// The last tensor of a peer's snapshot arrives.
    Saved(usize),
    /// The checkpoint is complete.
    Committed,
}

impl Simulation<'_> {
    fn run(&mut self) {
        let mut choices = ChoiceRng::new(self.scenario.seed);
        let mut disturbances: VecDeque<_> = self.scenario.disturbances.iter().cloned().collect();
        while self.trace.end.is_none() {
            if let Some((_, d)) = disturbances.pop_front_if(|(at, _)| *at <= self.trace.events) {
                let actions = match d {
                    Disturbance::Interrupt => self.machine.interrupt(),
                    Disturbance::SetCodecs => self.set_codecs(),
                    Disturbance::Lie(p, message) => self.message(p as usize, *message),
                };
                self.carry_out(actions);
                self.trace.events += 1;
                continue;
            }
            let mut possible = Vec::new();
            for (i, p) in self.peers.iter().enumerate() {
                possible.extend((!p.lane.is_empty()).then_some(Event::ToPeer(i)));
                possible.extend(p.can_work().then_some(Event::Work(i)));
                possible.extend((!p.out.is_empty()).then_some(Event::FromPeer(i)));
                possible.extend((!p.snapshots.is_empty()).then_some(Event::Saved(i)));
            }
            possible.extend((!self.committing.is_empty()).then_some(Event::Committed));
            assert!(!possible.is_empty(), "deadlock: {:?}", self.machine);
            let event = possible[choices.below(possible.len())];
            self.clock += 1.0;
            self.trace.events += 1;
            let actions = match event {
                Event::ToPeer(i) => {
                    self.peers[i].arrive();
                    Vec::new()
                }
                Event::Work(i) => {
                    self.peers[i].work();
                    Vec::new()
                }
                Event::FromPeer(i) => {
                    let message = self.peers[i].out.pop_front().unwrap();
                    if let FromPeer::PassDone { pass, .. } = message {
                        self.peers[i].acknowledged = pass;
                    }
                    self.completed = self.peers.iter().map(|p| p.acknowledged).min().unwrap();
                    self.message(i, message)
                }
                Event::Saved(i) => {
                    let step = self.peers[i].snapshots.pop_front().unwrap();
                    self.machine.snapshot_arrived(PeerId(i as u32), step).unwrap()
                }
                Event::Committed => {
                    let step = self.committing.pop_front().unwrap();
                    assert_eq!(self.saving.pop_front(), Some(step));
                    self.machine.checkpoint_committed(step)
                }
            };
            self.carry_out(actions);
        }
        if matches!(self.trace.end, Some(End::Failed(_))) {
            return;
        }
        // Late events have no effect.
        assert_eq!(self.machine.interrupt(), []);
        assert_eq!(self.machine.message(PeerId(0), FromPeer::Ready { generation: 1 }, self.clock), Ok(Vec::new()));
    }

    /// A message that breaks the protocol ends the run.
    fn message(&mut self, from: usize, message: FromPeer) -> Vec<GenerationAction> {
        let result = self.machine.message(PeerId(from as u32), message, self.clock);
        result.unwrap_or_else(|what| vec![GenerationAction::Fail(format!("p{from} {what}"))])
    }

    /// Gives every peer a new codec for its link to the next peer.
    fn set_codecs(&mut self) -> Vec<GenerationAction> {
        let ratio = 2.0 + self.trace.codec_versions.len() as f64;
        let peers = self.scenario.peers as u32;
        let codec = |p| LinkCodec {
            from: PeerId(p),
            to: PeerId((p + 1) % peers),
            codec: Codec::TopK(TopK { ratio, values: None }),
        };
        let codecs: Vec<LinkCodec> = (0..peers).filter(|_| peers > 1).map(codec).collect();
        let Some(AppliedCodecs { version, step, messages }) = self.machine.set_codecs(&codecs) else {
            return Vec::new();
        };
        self.trace.codec_versions.push((version, step));
        messages.into_iter().map(|(to, message)| GenerationAction::Send(to, message)).collect()
    }

    fn carry_out(&mut self, actions: Vec<GenerationAction>) {
        for action in actions {
            assert_eq!(self.trace.end, None, "{action:?} after the end");
            match action {
                GenerationAction::Send(to, message) => self.peers[to.0 as usize].lane.push_back(message),
                GenerationAction::Feed(pass, batch) => {
                    self.issued += 1;
                    assert_eq!(pass, self.issued);
                    assert!(self.issued - self.completed <= self.scenario.settings.window);
                    let m = self.scenario.settings.micro_batches;
                    if let BatchId::Train { step } = batch {
                        assert!(step < self.scenario.settings.steps);
                    }
                    let sums = (0..m).map(weight_of_sum).collect();
                    self.machine.set_weights(pass, (0..m).map(|i| share(m, i)).collect(), sums);
                }
                GenerationAction::Step(record) => self.trace.steps.push(record),
                GenerationAction::Evaluated(e) => self.trace.evaluated.push(e),
                GenerationAction::BeginCheckpoint(step) => {
                    self.saving.push_back(step);
                    assert!(self.saving.len() <= self.scenario.settings.checkpoints_under_way);
                }
                GenerationAction::Commit(position) => {
                    self.committing.push_back(position.step);
                    assert_eq!(self.saving.get(self.committing.len() - 1), Some(&position.step));
                    self.trace.commits.push(position);
                }
                GenerationAction::Finish(position) => {
                    assert_eq!(position, self.machine.progress());
                    self.trace.end = Some(End::Finished(position));
                }
                GenerationAction::Fail(reason) => self.trace.end = Some(End::Failed(reason)),
                GenerationAction::Cut(step) => self.trace.cuts.push(step),
                GenerationAction::Notice(notice) => self.trace.notices.push(notice),
                // The peers of a simulation leave nobody waiting, and say nothing that contradicts itself.
                GenerationAction::Drained(_) | GenerationAction::Expel(..) => unreachable!("{action:?}"),
            }
        }
    }
}

/// A peer that sends the messages that its programs require.
struct Peer<'a> {
    train: Program,
    eval: &'a Program,
    scenario: &'a Scenario,
    /// Messages from the broker, in flight.
    lane: VecDeque<ToPeer>,
    /// Commands that have arrived. Verdicts overtake them.
    commands: VecDeque<ToPeer>,
    verdicts: BTreeMap<u64, Verdict>,
    /// Messages still to be sent in the current pass, before and after its verdict.
    to_send: VecDeque<FromPeer>,
    awaited: Option<u64>,
    /// Messages to the broker, in flight.
    out: VecDeque<FromPeer>,
    snapshots: VecDeque<u64>,
    passes: u64,
    acknowledged: u64,
    trained: u64,
    updates: u64,
}

impl<'a> Peer<'a> {
    fn new(train: Program, eval: &'a Program, scenario: &'a Scenario) -> Self {
        let TrainingProgress { step, updates } = scenario.settings.start;
        Self {
            train,
            eval,
            scenario,
            lane: VecDeque::new(),
            commands: VecDeque::new(),
            verdicts: BTreeMap::new(),
            to_send: VecDeque::new(),
            awaited: None,
            out: VecDeque::from([FromPeer::Ready { generation: 1 }]),
            snapshots: VecDeque::new(),
            passes: 0,
            acknowledged: 0,
            trained: step,
            updates,
        }
    }

    fn arrive(&mut self) {
        match self.lane.pop_front().unwrap() {
            ToPeer::Verdict { pass, verdict } => {
                assert_eq!(self.verdicts.insert(pass, verdict), None, "one verdict a pass");
            }
            command => self.commands.push_back(command),
        }
    }

    fn can_work(&self) -> bool {
        match (self.to_send.front(), self.awaited) {
            (Some(FromPeer::PassDone { .. }), Some(pass)) => self.verdicts.contains_key(&pass),
            (Some(_), _) => true,
            (None, _) => !self.commands.is_empty(),
        }
    }

    fn work(&mut self) {
        if let Some(message) = self.to_send.pop_front() {
            if matches!(message, FromPeer::PassDone { .. })
                && let Some(pass) = self.awaited.take()
            {
                let verdict = self.verdicts.remove(&pass).unwrap();
                assert_eq!(verdict.update, self.updates + 1, "updates are counted one after another");
                assert_eq!(verdict.lr, self.scenario.settings.learning_rate.at(verdict.update));
                self.updates += u64::from(verdict.apply);
            }
            self.out.push_back(message);
            return;
        }
        match self.commands.pop_front().unwrap() {
            ToPeer::Compute(ComputeCommand::SetCodecs { version, codecs }) => {
                self.train.set_codecs(version, codecs).unwrap();
            }
            ToPeer::Compute(ComputeCommand::Run { pass, version, kind, step, inspect }) => {
                assert_eq!(version, self.train.version, "a pass uses only codecs that were sent");
                self.passes += 1;
                assert_eq!(pass, self.passes, "every peer runs every pass");
                // Another look at a skipped step comes after it, and is no step.
                let look = inspect && step < self.trained;
                assert!(look || step == self.trained);
                assert!(!look || (kind.trains() && self.scenario.broken.contains(&step)));
                self.begin(pass, kind, step, inspect);
                self.trained += u64::from(kind == PassKind::Train && !look);
            }
            ToPeer::Compute(ComputeCommand::Snapshot { step, save }) => {
                assert_eq!(step, self.trained, "a snapshot shows its step");
                self.snapshots.extend(save.then_some(step));
            }
            ToPeer::Stop(_) => {}
            other => unreachable!("{other:?}"),
        }
    }

    fn begin(&mut self, pass: u64, kind: PassKind, step: u64, inspect: bool) {
        let train = kind == PassKind::Train;
        let program = if train { &self.train } else { self.eval };
        let broken = train && self.scenario.broken.contains(&step);
        for i in &program.instructions {
            if let Instruction::Report { report, micro_batch, .. } = *i {
                // In odd steps the loss is not finite, in even steps a gradient.
                let value = if broken && step % 2 == 1 { f64::NAN } else { loss(step, micro_batch) };
                self.to_send.push_back(FromPeer::Report { pass, report, micro_batch, value });
            }
        }
        if train {
            let norm = if broken && step.is_multiple_of(2) { f64::INFINITY } else { 4.0 };
            let squared_norms = program.owned().map(|(parameter, _)| (parameter, norm)).collect();
            self.to_send.push_back(FromPeer::Norms { pass, squared_norms });
            self.awaited = Some(pass);
        }
        let next = PeerId((program.peer.0 + 1) % self.scenario.peers as u32);
        let sent = if next == program.peer { Vec::new() } else { vec![SentBytes { to: next, bytes: 8 }] };
        let poison = (inspect && broken).then(|| poison(program));
        let report = PassReport { sent, poison, ..PassReport::default() };
        self.to_send.push_back(FromPeer::PassDone { pass, report });
    }
}

/// The poison that a peer finds in a broken step. The first peer's first node makes the number, and the other peers
/// receive it.
fn poison(program: &Program) -> Poison {
    let received = program.incoming().into_iter().find(|(_, (from, _))| *from != PeerId::BROKER);
    match received {
        Some((tensor, (from, _))) if program.peer != PeerId(0) => {
            Poison { cause: Cause::Arrived, tensor, from: Some(from) }
        }
        _ => {
            let value = program.nodes.values().next().unwrap().outputs[0];
            Poison { cause: Cause::Arose, tensor: Address::Value { value, micro_batch: 0 }, from: None }
        }
    }
}
