//! The broker's machine for a whole run: from the first joiner to the last step, over all generations.

mod action;
mod copies;
mod custody;
mod formation;
mod gathering;
mod running;
mod spares;
mod speed;
mod state;
mod status;
mod stopping;
mod watch;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use fusionllm_events::Event;
use fusionllm_plan::LinkCodec;
use fusionllm_program::{PeerId, Program};

use crate::notice::{IncidentKind, Notice, Open, one_line};
use crate::{
    Admission, AppliedCodecs, Atlas, Farewell, FromPeer, GenerationMachine, Hello, Identity, Member, MemberId, Roster,
    RunSettings, Standing, Survey, ToPeer, TrainingProgress,
};
pub use action::Action;
use copies::{COPY_RATE, CopyPace};
pub use custody::{Custody, Restart, Share};
pub use formation::{Formation, Mirroring, Order};
use speed::Speeds;
use state::Awaited;
pub use state::{Past, RunState};
use watch::{Change, SUSPECT_S, Watch};

/// The facts that a run needs before its first joiner.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// The settings of every generation. Each formation replaces the plan's version and micro-batches.
    pub settings: RunSettings,
    /// Whether plans need measured machines and links.
    pub measured: bool,
    /// Operators of the job's model, with which machines are measured besides operators in general.
    pub programs: Arc<[Program]>,
    /// Whether peers keep copies of each other's shares. Without them, a loss takes the run back to a checkpoint.
    pub copies: bool,
}

/// The identity, address and time of a joiner's arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The public key that its handshake has proved.
    pub identity: Identity,
    /// The address from which its packets come, if they come directly.
    pub from: Option<IpAddr>,
    /// The broker's time, in seconds since the Unix epoch.
    pub unix_s: u64,
}

/// The phase of the run.
#[derive(Debug)]
enum Phase {
    /// It waits for members. `short`: those who are there are not enough for the model.
    Gathering {
        short: bool,
    },
    /// Members are measured.
    Surveying(Survey),
    /// The driver makes a plan.
    Planning,
    /// A generation is loading or training.
    Running(Box<Running>),
    Over,
}

/// A generation.
#[derive(Debug)]
struct Running {
    machine: GenerationMachine,
    formation: Formation,
    /// The member that keeps a copy of each owner's share.
    mirrors: BTreeMap<MemberId, MemberId>,
    /// Members without a part whose copies the peers load. They are needed until all peers are ready.
    donors: BTreeSet<MemberId>,
    /// The peers whose messages about cuts belong to this generation.
    ready: BTreeSet<MemberId>,
    /// The time when the copy of each share was asked for, by cut and owner.
    asked: BTreeMap<(u64, MemberId), f64>,
    /// Seconds per step: predicted, or as measured since a member's speed changed.
    step_s: Option<f64>,
    /// The state with which the generation ended, once it is drained.
    drained: Option<TrainingProgress>,
}

/// The broker's side of a run. Pass it events with the time in seconds, and carry out the returned actions in order.
///
/// It trusts no member. One that breaks the protocol is put out, and the run goes on without it.
#[derive(Debug)]
pub struct Run {
    options: RunOptions,
    roster: Roster,
    atlas: Atlas,
    custody: Custody,
    watch: Watch,
    phase: Phase,
    /// The generation that runs, or the one that comes next.
    generation: u32,
    last_pass: u64,
    /// Whether a generation has begun.
    begun: bool,
    /// Progress after the last step that all peers of a generation completed.
    progress: TrainingProgress,
    /// Batches trained on before the last complete evaluation of the steps that count.
    evaluated: u64,
    /// Measures spares while a generation runs.
    scout: Option<Survey>,
    /// Members that came, or came back, since the last plan was made.
    newcomers: BTreeSet<MemberId>,
    /// Whether the driver makes a plan to see whether spares help.
    weighing: bool,
    leaving: BTreeSet<MemberId>,
    /// Whether the user wants the run to stop.
    stopping: bool,
    /// Checkpoints of which all tensors have arrived, and which the disk has not confirmed.
    committing: usize,
    copies: CopyPace,
    speeds: Speeds,
    /// Interruptions that are not over.
    incidents: Vec<Open>,
    /// The members of the generation that ended last.
    last_members: Vec<MemberId>,
    awaited: Option<Awaited>,
    /// The time when a member was lost last.
    lost_at: f64,
    /// Whether the driver's records end with [`Self::progress`].
    rewound: bool,
    /// The times when each member lately said that it cannot reach another one. They count where its word is all that
    /// is known.
    complaints: BTreeMap<MemberId, VecDeque<f64>>,
    /// The members whose disks were nearly full.
    low_disks: BTreeSet<MemberId>,
    /// The time of the last event.
    now: f64,
}

/// A measurement counts as a step of this many seconds, so that a stall is called one only after the time that a
/// measurement itself allows.
const SURVEY_STEP_S: f64 = 12.0;

/// A disk with fewer free bytes is nearly full.
const LOW_DISK_BYTES: u64 = 1 << 30;

impl Run {
    /// A run for the members of this roster.
    pub fn new(options: RunOptions, roster: Roster) -> Self {
        let start = options.settings.start;
        Self {
            options,
            roster,
            atlas: Atlas::default(),
            custody: Custody::new(start),
            watch: Watch::default(),
            phase: Phase::Gathering { short: false },
            generation: 1,
            last_pass: 0,
            begun: false,
            progress: start,
            evaluated: start.step,
            scout: None,
            newcomers: BTreeSet::new(),
            weighing: false,
            leaving: BTreeSet::new(),
            stopping: false,
            committing: 0,
            copies: CopyPace::default(),
            speeds: Speeds::default(),
            incidents: Vec::new(),
            last_members: Vec::new(),
            awaited: None,
            lost_at: f64::NEG_INFINITY,
            rewound: true,
            complaints: BTreeMap::new(),
            low_disks: BTreeSet::new(),
            now: 0.0,
        }
    }

    /// The members.
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Progress after the last step that all peers completed.
    pub fn progress(&self) -> TrainingProgress {
        self.progress
    }

    /// The members of the generation that runs, by their numbers as peers.
    pub fn peers(&self) -> &[MemberId] {
        match &self.phase {
            Phase::Running(r) => &r.formation.members,
            _ => &[],
        }
    }

    /// Whether a generation has begun.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Whether all peers of a generation train.
    pub fn is_training(&self) -> bool {
        matches!(&self.phase, Phase::Running(r) if r.machine.is_started())
    }

    /// The tickets and keys that decide who may come in.
    pub fn admission_mut(&mut self) -> &mut Admission {
        self.roster.admission_mut()
    }

    /// Admits a joiner, or returns the reason for refusing it.
    pub fn join(&mut self, arrival: Arrival, hello: Hello, now: f64) -> Result<(MemberId, Vec<Action>), String> {
        self.now = now;
        if matches!(self.phase, Phase::Over) {
            return Err("the run is over".into());
        }
        let (processor, backend) = (hello.processor, hello.backend.clone());
        let member = self.roster.join(arrival.identity, hello, arrival.unix_s)?;
        self.atlas.set_line(member, arrival.from);
        self.atlas.set_processor(member, processor, &backend);
        let mut actions = match self.roster.predecessor(member) {
            Some(old) => self.put_out(old, "another process has joined with its key", IncidentKind::Lost),
            // A member that comes back on a new connection has lost the old one, whether or not anybody noticed.
            None if self.is_needed(member) => {
                self.lose(member, "it lost its connection, and came back", Standing::Present, IncidentKind::Lost)
            }
            None => Vec::new(),
        };
        self.watch.joined(member, now);
        self.atlas.forget_failures(member);
        self.newcomers.insert(member);
        let present = self.roster.present().count();
        // Its ticket may have a limit on the number of machines, so the use of the ticket must be saved.
        actions.push(Action::Persist);
        if let Some(Member { name, backend, device, .. }) = self.roster.get(member).cloned() {
            let (wanted, spare) = (self.roster.wanted(), self.begun);
            actions.push(Action::event(Event::Joined { peer: name, backend, device, present, wanted, spare }));
        }
        actions.extend(self.advance());
        Ok((member, actions))
    }

    /// Call when a member's connection has ended.
    pub fn gone(&mut self, member: MemberId, reason: &str, now: f64) -> Vec<Action> {
        self.now = now;
        let standing = if self.leaving.contains(&member) { Standing::Out } else { Standing::Away };
        let actions = self.lose(member, reason, standing, IncidentKind::Lost);
        self.watch.forget(member);
        actions
    }

    /// Call when a member's machine says that its process has ended.
    pub fn ended(&mut self, member: MemberId, reason: &str, now: f64) -> Vec<Action> {
        self.roster.note_end(member);
        self.gone(member, reason, now)
    }

    /// Puts a member out that broke the protocol, failed or stalled.
    pub fn expel(&mut self, member: MemberId, reason: &str, now: f64) -> Vec<Action> {
        self.now = now;
        self.put_out(member, reason, IncidentKind::Expelled)
    }

    /// Call for each message from a member.
    pub fn message(&mut self, from: MemberId, message: FromPeer, now: f64) -> Vec<Action> {
        self.now = now;
        let Some(standing) = self.roster.get(from).map(|m| m.standing) else { return Vec::new() };
        match standing {
            _ if matches!(self.phase, Phase::Over) => return Vec::new(),
            Standing::Away => return Vec::new(),
            // The member has woken, and does not know yet that it was put out.
            Standing::Out => {
                let reason = "its place was given up while it did not answer; start `join` again to come back".into();
                let stop = ToPeer::Stop(Farewell::PutOut { reason });
                return vec![Action::Send(from, stop), Action::Dismiss(from)];
            }
            Standing::Present | Standing::Silent => {}
        }
        let mut actions = Vec::new();
        if self.watch.heard(from, now) {
            let peer = self.roster.display_name(from).to_owned();
            actions.push(Action::event(Event::Answers { peer }));
        }
        if standing == Standing::Silent {
            self.roster.set(from, Standing::Present);
            self.newcomers.insert(from);
            actions.extend(self.advance());
        }
        match self.take(from, message) {
            Ok(more) => actions.extend(more),
            Err(what) => actions.extend(self.expel(from, &format!("it broke the protocol: it {what}"), now)),
        }
        actions
    }

    /// Tells that the disk of a member is nearly full: once, because the member may say anything at any time.
    fn look_at_disk(&mut self, member: MemberId, free: Option<u64>) -> Option<Action> {
        let free_bytes = free.filter(|free| *free < LOW_DISK_BYTES)?;
        let is_new = self.low_disks.insert(member);
        let peer = self.roster.display_name(member).to_owned();
        is_new.then(|| Action::event(Event::DiskLow { peer, free_bytes }))
    }

    /// The error completes "broke the protocol: it …".
    fn take(&mut self, from: MemberId, message: FromPeer) -> Result<Vec<Action>, String> {
        match message {
            FromPeer::Hello(_) => Err("said hello twice".into()),
            FromPeer::Ask(_) => Err("asked what only the run's owner may ask".into()),
            FromPeer::Heartbeat(heartbeat) => {
                self.watch.heartbeat(from, heartbeat, self.now);
                Ok(self.look_at_disk(from, heartbeat.disk_free).into_iter().collect())
            }
            FromPeer::Machine(_) | FromPeer::Links { .. } => self.measured(from, message),
            // The driver knows who keeps what never changes.
            FromPeer::Shelved { .. } => Ok(Vec::new()),
            FromPeer::Leaving => Ok(self.leave(from)),
            message => self.take_running(from, message),
        }
    }

    /// Passes time. Call it a few times a second.
    pub fn tick(&mut self, now: f64) -> Vec<Action> {
        self.now = now;
        if matches!(self.phase, Phase::Over) || self.watch.tick(now) {
            return Vec::new();
        }
        let mut actions = Vec::new();
        for change in self.watch.changes(now) {
            match change {
                Change::Silent(member) if self.roster.is_present(member) => {
                    actions.push(Action::Notice(Notice::Silent { member, seconds: SUSPECT_S }));
                }
                Change::Gone(member, silence) if self.roster.is_present(member) => {
                    let reason = format!("it has not answered for {silence:.0} s");
                    actions.extend(self.lose(member, &reason, Standing::Silent, IncidentKind::Silent));
                }
                _ => {}
            }
        }
        actions.extend(self.check_stall());
        if matches!(self.phase, Phase::Gathering { .. }) {
            actions.extend(self.advance());
        }
        actions.extend(self.give_up_saving());
        actions
    }

    fn check_stall(&mut self) -> Vec<Action> {
        let (members, step_s): (Vec<MemberId>, f64) = match (&self.phase, &self.scout) {
            (Phase::Surveying(survey), _) | (_, Some(survey)) => (survey.waits_for().collect(), SURVEY_STEP_S),
            (Phase::Running(r), _) => (r.formation.members.clone(), r.formation.predicted_step_s.unwrap_or(0.0)),
            _ => return Vec::new(),
        };
        match self.watch.stalled(&members, step_s, self.now) {
            Some((member, seconds)) => {
                let reason = format!("it is connected, but has done nothing for {seconds:.0} s");
                self.expel(member, &reason, self.now)
            }
            None => Vec::new(),
        }
    }

    /// Changes the links' codecs from the next pass on: see [`GenerationMachine::set_codecs`].
    pub fn set_codecs(&mut self, codecs: &[LinkCodec]) -> Option<AppliedCodecs> {
        match &mut self.phase {
            Phase::Running(running) => running.machine.set_codecs(codecs),
            _ => None,
        }
    }

    /// Sets how much the micro-batches of a pass count: see [`GenerationMachine::set_weights`].
    pub fn set_weights(&mut self, pass: u64, weights: Vec<f64>, sums: Vec<f64>) {
        if let Phase::Running(running) = &mut self.phase {
            running.machine.set_weights(pass, weights, sums);
        }
    }

    /// Whether the generation cannot go on without a member.
    fn is_needed(&self, member: MemberId) -> bool {
        match &self.phase {
            Phase::Running(r) => {
                r.formation.members.contains(&member) || (!r.machine.is_started() && r.donors.contains(&member))
            }
            _ => false,
        }
    }

    /// The place of a member in the plan that runs.
    pub fn peer(&self, member: MemberId) -> Option<PeerId> {
        let place = self.peers().iter().position(|m| *m == member)?;
        Some(PeerId(place as u32))
    }

    /// A member cannot be used any more, or not now.
    fn lose(&mut self, member: MemberId, reason: &str, standing: Standing, kind: IncidentKind) -> Vec<Action> {
        let before = self.roster.get(member).map(|m| m.standing);
        self.roster.set(member, standing);
        if matches!(before, None | Some(Standing::Out)) || matches!(self.phase, Phase::Over) {
            return Vec::new();
        }
        self.newcomers.remove(&member);
        self.lost_at = self.now;
        self.await_return();
        let reason = one_line(reason);
        let used = self.is_needed(member);
        let step = self.progress.step;
        let mut actions = Vec::new();
        if before == Some(Standing::Present) || used {
            actions.push(Action::Notice(Notice::Lost { member, reason, used, step }));
            if self.begun && !self.stopping && self.roster.present().next().is_none() {
                let reason = "none is left; the run goes on once one comes back, or another one joins".to_owned();
                actions.push(Action::event(Event::Waiting { reason }));
            }
        }
        if let Some(scout) = &mut self.scout {
            scout.lose(member);
            actions.extend(self.survey_on());
        }
        match &mut self.phase {
            Phase::Surveying(survey) => {
                survey.lose(member);
                actions.extend(self.survey_on());
            }
            Phase::Running(_) if used => {
                let since = self.watch.last_heard(member).unwrap_or(self.now).min(self.now);
                let open = Open::begin(kind, member, step, since, self.now);
                self.incidents.push(open);
                actions.extend(self.disband());
                actions.extend(self.advance());
            }
            _ => {}
        }
        actions
    }

    /// Ends the run with this action.
    fn end(&mut self, last: Action) -> Vec<Action> {
        self.phase = Phase::Over;
        let farewell = match &last {
            Action::Fail(reason) => Farewell::Failed { reason: reason.clone() },
            _ => Farewell::Over { step: self.progress.step, steps: self.options.settings.steps },
        };
        let stop = ToPeer::Stop(farewell);
        let mut actions: Vec<Action> = self.roster.connected().map(|m| Action::Send(m.id, stop.clone())).collect();
        actions.push(last);
        actions
    }
}
