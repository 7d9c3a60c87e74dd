//! The broker's driver: gathers peers, plans, streams, and carries out what the state machine says.

mod door;
mod incoming;
mod regulating;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use fusionllm_graph::{HostTensor, TensorType, ValueId, ValueKind};
use fusionllm_plan::{
    Cluster, Instruction, Optimizer, PeerId, Plan, Program, Simulation, Slot, compile, compile_forward,
};
use fusionllm_protocol::{
    Action, Assignment, Broker, BulkHeader, EvalRecord, EvalSchedule, ExpectedPeers, ExpectedReports, FromPeer,
    MAX_ASSIGNMENT_BYTES, Participant, PassKind, Regulator, RunSettings, TensorHeader, TrainingProgress, decode,
    encode,
};
use fusionllm_transport::{Connection, Endpoint, EndpointOptions, PeerAddr, Secret, SecretKey, Ticket};
use tokio::sync::mpsc;

use crate::NodeError;
use crate::checkpoint::Checkpoint;
use crate::config::{Choice, Family, Job, Network, Scheduler};
use crate::data::Dataset;
use crate::emulation::Emulation;
use crate::feeds::{Feeds, count_targets};
use crate::imported;
use crate::keeper::Kept;
use crate::local::{Children, LocalPeer};
use crate::model::{Model, models};
use crate::observer::{Event, Observer};
use crate::peer::{WINDOW, neighbours};
use crate::planning::{Planned, place, plan_blind, plan_for};
use crate::store::{PeerFacts, Store, check};
use crate::weights::Weights;
use crate::wire::{self, Outbox};
use door::{Door, Guest, take};
use incoming::{Incoming, accept, interrupts, receive_bulk, receive_control};
use regulating::{Regulating, recode};

/// How a run is conducted.
pub struct BrokerOptions {
    /// Who takes part.
    pub peers: Peers,
    /// Where to listen; `None` for every interface and a free port.
    pub listen: Option<SocketAddr>,
    /// A plan to carry out instead of making one. Peers join under the names it has for them; those that hold no stage are not waited for.
    pub plan: Option<Plan>,
    /// Where the run leaves its files; `None` for a fresh directory under `runs/`, or that of the run that is gone on with.
    pub directory: Option<PathBuf>,
    /// Where it goes on from.
    pub resume: Option<Checkpoint>,
}

/// Who takes part in a run.
#[derive(Debug, Clone)]
pub enum Peers {
    /// So many joiners, wherever they are.
    Joiners(usize),
    /// Processes that are started on this machine.
    Local(Vec<LocalPeer>),
    /// A process on this machine for each of a testbed's devices that the plan uses, with the testbed's links between them. Each computes with one
    /// thread.
    Emulated {
        /// Devices and links.
        testbed: Cluster,
        /// What devices compute with that do not say it.
        backend: String,
    },
}

impl Peers {
    /// How many there are at most.
    pub fn count(&self) -> usize {
        match self {
            Self::Joiners(count) => *count,
            Self::Local(peers) => peers.len(),
            Self::Emulated { testbed, .. } => testbed.devices().len(),
        }
    }
}

struct Peer {
    name: String,
    connection: Connection,
    outbox: Outbox,
    /// Inputs it reads: the value, the micro-batch, and the name, for training and for evaluation.
    feeds: [Vec<(ValueId, u32, String)>; 2],
    duties: ExpectedReports,
    train: Program,
    backend: String,
}

/// Conducts a run from the first joiner to the last step.
pub async fn conduct(
    job: &Job,
    options: BrokerOptions,
    observer: &mut dyn Observer,
) -> Result<TrainingProgress, NodeError> {
    let BrokerOptions { peers, listen, plan, directory, resume } = options;
    let (mut job, plan) = (job.clone(), plan.map(Plan::without_idle));
    // What was left to a planner is by now what it chose for the run, or for the plan that is given.
    if job.train.micro_batch.open {
        let of_run = resume.as_ref().map(|c| Network::at(c.path())).transpose();
        let of_run = of_run.map_err(|e| NodeError::Input(e.to_string()))?.map(|n| n.micro_batch);
        let of_plan = plan.as_ref().and_then(|p| job.train.batch.checked_div(p.micro_batches as usize));
        let divides = |size: &usize| *size > 0 && job.train.batch.is_multiple_of(*size);
        if let Some(size) = of_plan.or(of_run).filter(divides) {
            job.train.micro_batch = Choice::made(size);
        }
    }
    // Whatever the user got wrong shows before anybody is kept waiting, and before anything is written.
    let data = Dataset::open(&job.data, job.train.seed).map_err(|e| NodeError::Input(e.to_string()))?;
    let mut models = models(&job)?;
    let model = &models[0];
    if let Some(checkpoint) = &resume {
        check(checkpoint, &job, &data, model)?;
    }
    let feeds = Feeds::new(&model.forward, &data, model.micro_batch)?;
    let source = match &job.model.family {
        Family::Imported { file } => {
            let options = fusionllm_import::ImportOptions { batch_size: Some(model.micro_batch), ..Default::default() };
            Some(Mutex::new(imported::Model::open(file, options)?))
        }
        _ => None,
    };
    let weights = job.model.weights.as_deref().map(Weights::open).transpose()?;
    if let Some(weights) = &weights
        && resume.is_none()
    {
        let parameters = model.forward.parameters().map(|v| model.forward.value(v));
        weights.check(parameters.map(|v| (v.name.as_str(), &v.ty)))?;
    }
    let given = match plan {
        Some(plan) => {
            plan.validate(&model.forward)?;
            let count = peers.count();
            if plan.peers.len() != count && !matches!(peers, Peers::Emulated { .. }) {
                return Err(NodeError::Input(format!("the plan is for {} peers, not {count}", plan.peers.len())));
            }
            if plan.micro_batches != job.micro_batches() {
                return Err(NodeError::Input(format!(
                    "the plan is for {} micro-batches a step, the job has {}; plan anew",
                    plan.micro_batches,
                    job.micro_batches()
                )));
            }
            Some(Planned::new(&job, models.swap_remove(0), plan))
        }
        None => None,
    };
    let course = match (&peers, given) {
        (Peers::Joiners(count), given) if must_measure(&job, given.is_some(), *count) => {
            Course::Measure { count: *count, models, given }
        }
        (Peers::Emulated { testbed, .. }, Some(given)) => Course::Start(place(given, testbed)?.prepared()?),
        (Peers::Emulated { testbed, .. }, None) => Course::Start(plan_for(&job, models, testbed)?),
        (_, Some(given)) => Course::Start(given.prepared()?),
        // Who they are shows once they are there; it does not matter to the plan.
        (peers, None) => Course::Start(plan_blind(&job, models.swap_remove(0), peers.count())?.prepared()?),
    };
    if let Course::Start(planned) = &course {
        job = planned.job.clone();
    }
    let (events, incoming) = mpsc::unbounded_channel();
    let kept = {
        let events = events.clone();
        move |kept| drop(events.send(Incoming::Kept(kept)))
    };
    let mut store = Store::open(directory.as_deref(), resume, &job, kept)?;
    observer.event(Event::Opened { directory: store.directory() });
    let secret_key = SecretKey::generate();
    let pinned = matches!(peers, Peers::Emulated { .. });
    let endpoint = Endpoint::bind(EndpointOptions { secret_key, listen, pinned, ..EndpointOptions::new() }).await?;
    let ticket = Ticket { addr: endpoint.addr(), secret: Secret::generate() };
    let run = Preparation { job, data, feeds, source, weights, door: Door { endpoint: endpoint.clone(), ticket } };
    let result = run.conduct(&peers, course, &mut store, (events, incoming), observer).await;
    let reason = result.as_ref().err().map(NodeError::to_string).unwrap_or_default();
    endpoint.close(&reason).await;
    result
}

/// How a run comes to its plan.
enum Course {
    /// It has it.
    Start(Planned),
    /// Joiners measure their machines and links first: for the planner, which takes one of the models, or to suit the codecs of a given plan.
    Measure { count: usize, models: Vec<Model>, given: Option<Planned> },
}

/// Whether the plan, or its codecs, are made for machines of which joiners alone can tell. Those that are left to the default are spared it if there is nothing to share out.
fn must_measure(job: &Job, given: bool, count: usize) -> bool {
    let planner = match job.plan.scheduler {
        Some(Scheduler::EqualNumber | Scheduler::EqualCompute) => false,
        Some(Scheduler::OpFence | Scheduler::Exact) => true,
        None => count > 1 || job.train.micro_batch.open,
    };
    job.compression.needs_links() || (planner && !given)
}

/// What a run has before its plan.
struct Preparation {
    job: Job,
    data: Dataset,
    feeds: Feeds,
    source: Option<Mutex<imported::Model>>,
    weights: Option<Weights>,
    door: Door,
}

impl Preparation {
    async fn conduct(
        self,
        peers: &Peers,
        course: Course,
        store: &mut Store,
        (events, mut incoming): (mpsc::UnboundedSender<Incoming>, mpsc::UnboundedReceiver<Incoming>),
        observer: &mut dyn Observer,
    ) -> Result<TrainingProgress, NodeError> {
        let Self { job, data, feeds, source, weights, door } = self;
        store.ticket(&door.ticket)?;
        let (known, cluster) = match &course {
            Course::Start(planned) => (Some(planned), planned.cluster.clone()),
            Course::Measure { given, .. } => (given.as_ref(), None),
        };
        let places = match (known, &course) {
            (Some(planned), _) if planned.named => ExpectedPeers::Named(planned.plan.peers.clone()),
            (_, Course::Start(planned)) => ExpectedPeers::Any(planned.plan.peers.len()),
            (_, Course::Measure { count, .. }) => ExpectedPeers::Any(*count),
        };
        observer.event(Event::Listening { ticket: &door.ticket, wanted: places.count() });
        let accepting = tokio::spawn(accept(door.endpoint.clone(), events.clone()));
        tokio::spawn(interrupts(events.clone()));
        let (mut emulation, local) = door.local(peers, cluster)?;
        let children = Children::start(&local, Some(store.directory()), {
            let events = events.clone();
            move |reason| drop(events.send(Incoming::Child(reason)))
        })?;
        let mut guests = door.gather(places, &mut incoming, observer).await?;
        accepting.abort();
        store.ticket_used()?;

        let mut planned = match course {
            Course::Start(planned) => {
                door.close(&guests);
                planned
            }
            Course::Measure { models, given, .. } => {
                observer.event(Event::Measuring);
                let (measured, cluster, notes) = door.survey(guests, &mut incoming).await?;
                guests = measured;
                let mut planned = match given {
                    Some(given) => place(given, &cluster)?.prepared()?,
                    None => plan_for(&job, models, &cluster)?,
                };
                planned.notes.extend(notes);
                planned
            }
        };
        if planned.named {
            guests = take(&planned.plan, guests).await;
        } else {
            planned.plan.peers = guests.iter().map(|(m, _, _)| m.name.clone()).collect();
        }
        store.job(&planned.job)?;
        store.plan(&planned.to_json()?)?;
        let Planned { job, model, plan, cluster, notes, predicted, .. } = planned;
        let predicted_step_s = predicted.as_ref().map(|p| p.step_s);
        observer.event(Event::Planned { plan: &plan, notes: &notes, predicted_step_s, model: &model, data: &data });
        let run = Conductor { job, data, model, feeds, source, weights, predicted };
        let peers = run.assign(&plan, guests, emulation.as_mut(), store, &events).await?;
        let programs = peers.iter().map(|p| p.train.clone()).collect();
        let regulator = Regulator::new(&plan, programs, cluster, run.job.train.optimizer.update_rule());
        let regulating = Regulating::start(regulator, events)?;
        let position = run.run(plan, peers, regulating, store, observer, &mut incoming).await;
        for reason in emulation.map(|e| e.shortfalls()).unwrap_or_default() {
            observer.event(Event::Shortfall { reason: &reason });
        }
        match &position {
            Ok(_) => children.finish().await,
            Err(_) => children.stop().await,
        }
        position
    }
}

struct Conductor {
    job: Job,
    data: Dataset,
    model: Model,
    feeds: Feeds,
    /// Where the weights of a model from elsewhere are.
    source: Option<Mutex<imported::Model>>,
    weights: Option<Weights>,
    predicted: Option<Simulation>,
}

impl Conductor {
    /// Compiles the plan and streams every peer its share.
    async fn assign(
        &self,
        plan: &Plan,
        members: Vec<Guest>,
        mut emulation: Option<&mut Emulation>,
        store: &Store,
        events: &mpsc::UnboundedSender<Incoming>,
    ) -> Result<Vec<Peer>, NodeError> {
        let train = compile(plan, &self.model.forward, &self.model.train)?;
        let eval = compile_forward(plan, &self.model.forward, &self.model.eval, &self.reports())?;
        let addresses: Vec<(String, Vec<u8>)> =
            members.iter().map(|(m, _, _)| (m.name.clone(), m.addr.clone())).collect();
        let optimizer = self.job.train.optimizer.update_rule();
        let mut peers = Vec::with_capacity(members.len());
        for (i, (((member, connection, lanes), train), eval)) in members.into_iter().zip(train).zip(eval).enumerate() {
            let peer = PeerId(i as u32);
            let mut addresses = addresses.clone();
            if let Some(emulation) = emulation.as_deref_mut() {
                for p in neighbours(&[&train, &eval]) {
                    let (name, addr) = &mut addresses[p.0 as usize];
                    let real: PeerAddr = decode(addr).map_err(|e| NodeError::Protocol(format!("{name:?}: {e}")))?;
                    let seen = PeerAddr { key: real.key, addrs: vec![emulation.address(peer, p)?] };
                    *addr = encode(&seen).map_err(NodeError::Protocol)?;
                }
            }
            let mut assignment = Assignment {
                peer,
                peers: addresses,
                seed: self.job.train.seed,
                optimizer,
                compression: plan.compression,
                train,
                eval,
                loads: BTreeSet::new(),
            };
            assignment.loads = self.loads(&assignment, store);
            let bytes = encode(&assignment).map_err(NodeError::Protocol)?;
            if bytes.len() as u64 > MAX_ASSIGNMENT_BYTES {
                return Err(NodeError::Input(format!(
                    "the program of {:?} is too long to send; use fewer micro-batches",
                    member.name
                )));
            }
            let outbox = Outbox::new(connection.clone());
            tokio::spawn(receive_control(lanes.control, peer, events.clone()));
            let saved = saved_types(&assignment.train, optimizer);
            tokio::spawn(receive_bulk(lanes.bulk, peer, saved, store.inbox(), events.clone()));
            let lost = |e: NodeError| match e {
                NodeError::Lost(cause) => {
                    NodeError::LostPeer { peer, name: member.name.clone(), reason: cause.to_string() }
                }
                e => e,
            };
            wire::send_bulk(&connection, &BulkHeader::Assign, vec![bytes.into()]).await.map_err(lost)?;
            for (name, slot) in &assignment.loads {
                let tensor = self.initial(name, slot.as_deref(), store)?;
                let header = BulkHeader::Load { name: name.clone(), slot: slot.clone() };
                wire::send_bulk(&connection, &header, vec![tensor.into_bytes().into()]).await.map_err(lost)?;
            }
            peers.push(Peer {
                name: member.name,
                connection,
                outbox,
                feeds: [feeds(&assignment.train), feeds(&assignment.eval)],
                duties: ExpectedReports::new(&assignment.train, &assignment.eval),
                train: assignment.train,
                backend: member.backend,
            });
        }
        Ok(peers)
    }

    /// What a peer cannot draw from the seed.
    fn loads(&self, assignment: &Assignment, store: &Store) -> BTreeSet<(String, Option<String>)> {
        let resumed = store.resumed().is_some();
        let mut loads = BTreeSet::new();
        for (name, value) in assignment.kept() {
            let given = match value.kind {
                ValueKind::Constant => true,
                ValueKind::Parameter(_) => resumed || self.source.is_some() || self.weights.is_some(),
                _ => resumed || self.source.is_some(),
            };
            if given {
                loads.insert((name.to_string(), None));
            }
        }
        for (_, r) in assignment.train.owned().filter(|_| resumed) {
            let name = &assignment.train.values[&r.parameter].name;
            loads.extend(assignment.optimizer.slots().iter().map(|s| (name.clone(), Some(s.to_string()))));
        }
        loads
    }

    /// A tensor a peer starts from.
    fn initial(&self, name: &str, slot: Option<&str>, store: &Store) -> Result<HostTensor, NodeError> {
        if let Some(constant) = self.model.train.graph.constants.get(name) {
            return Ok(constant.clone());
        }
        if let Some(tensor) = store.saved(name, slot)? {
            return Ok(tensor);
        }
        let value = self.model.forward.find(name);
        if let (Some(source), Some(v)) = (&self.source, value) {
            let value = self.model.forward.value(v);
            // Published weights have parameters alone.
            if self.weights.is_none() || !matches!(value.kind, ValueKind::Parameter(_)) {
                return source.lock().unwrap_or_else(PoisonError::into_inner).initial(value);
            }
        }
        match (&self.weights, value) {
            (Some(weights), Some(v)) => Ok(weights.parameter(name, self.model.forward.ty(v))?),
            _ => Err(NodeError::State(format!("{name:?} starts from nowhere"))),
        }
    }

    async fn run(
        &self,
        mut plan: Plan,
        peers: Vec<Peer>,
        regulating: Regulating,
        store: &mut Store,
        observer: &mut dyn Observer,
        incoming: &mut mpsc::UnboundedReceiver<Incoming>,
    ) -> Result<TrainingProgress, NodeError> {
        let job = &self.job;
        let eval_passes = self.eval_passes();
        let settings = RunSettings {
            version: plan.version,
            start: store.start(),
            steps: job.train.steps,
            micro_batches: plan.micro_batches,
            eval: (eval_passes > 0).then_some(EvalSchedule { steps: job.eval.every, passes: eval_passes }),
            checkpoint: Some(job.checkpoint.every),
            learning_rate: job.train.optimizer.learning_rate(),
            clip: (job.train.optimizer.clip > 0.0).then_some(job.train.optimizer.clip),
            window: WINDOW,
        };
        let participants =
            peers.iter().map(|p| Participant { name: p.name.clone(), duties: p.duties.clone() }).collect();
        let mut broker = Broker::new(settings, participants);
        let clock = Instant::now();
        let mut interrupted = false;
        let mut ready = 0;
        loop {
            let event = incoming.recv().await;
            let now = clock.elapsed().as_secs_f64();
            let actions = match event {
                Some(Incoming::Message(from, message)) => {
                    if message == FromPeer::Ready {
                        ready += 1;
                        if ready == peers.len() {
                            observer.event(Event::Started);
                        }
                    }
                    broker.message(from, message, now)
                }
                Some(Incoming::CodecUpdate(recoding)) => recode(recoding, &mut broker, &mut plan, store, observer)?,
                Some(Incoming::SavedAll(from, step)) => broker.saved(from, step),
                Some(Incoming::Kept(Kept::Committed(step))) => {
                    observer.event(Event::Saved { step });
                    broker.committed(step)
                }
                Some(Incoming::Kept(Kept::Unasked(from))) => {
                    broker.lost(from, "it sent a snapshot that was not asked for")
                }
                Some(Incoming::Kept(Kept::Failed(e))) => return Err(e),
                Some(Incoming::Lost(peer, reason)) => broker.lost(peer, &reason),
                Some(Incoming::Child(reason)) => {
                    // Its connection tells more, and names it, unless it never comes.
                    tracing::warn!("{reason}");
                    Vec::new()
                }
                Some(Incoming::Interrupt) if interrupted => {
                    return Err(NodeError::Stopped("interrupted twice; the last checkpoint is whole".into()));
                }
                Some(Incoming::Interrupt) => {
                    interrupted = true;
                    observer.event(Event::Stopping);
                    broker.interrupt()
                }
                Some(Incoming::Gone(_) | Incoming::Hello(..)) => Vec::new(),
                None => return Err(NodeError::State("the broker's endpoint closed".into())),
            };
            regulating.steps(&actions);
            if let Some(position) = self.carry_out(actions, &mut broker, &plan, &peers, store, observer)? {
                // Every peer hears that it may go before the endpoint closes.
                for peer in &peers {
                    let _ = tokio::time::timeout(std::time::Duration::from_secs(2), peer.connection.closed()).await;
                }
                return Ok(position);
            }
        }
    }

    /// Carries out what the state machine says; the final position once all is done.
    fn carry_out(
        &self,
        actions: Vec<Action>,
        broker: &mut Broker,
        plan: &Plan,
        peers: &[Peer],
        store: &mut Store,
        observer: &mut dyn Observer,
    ) -> Result<Option<TrainingProgress>, NodeError> {
        for action in actions {
            match action {
                Action::Send(to, message) => {
                    if let Some(peer) = peers.get(to.0 as usize) {
                        peer.outbox.control(&message)?;
                    }
                }
                Action::Broadcast(message) => {
                    for peer in peers {
                        peer.outbox.control(&message)?;
                    }
                }
                Action::Feed(pass, kind) => self.feed(pass, kind, broker, plan, peers)?,
                Action::Step(record) => {
                    let targets = self.targets_per_step();
                    let targets_per_s = targets / record.step_s.max(1e-9);
                    store.step(&record, plan, targets_per_s, self.validated_after(record.step))?;
                    observer.event(Event::Step { record: &record, targets_per_s });
                }
                Action::Evaluated(EvalRecord { step, means }) => {
                    let val_loss = means.first().copied().unwrap_or(f64::NAN);
                    let val_accuracy = means.get(1).copied().unwrap_or(f64::NAN);
                    store.evaluated(step, val_loss, val_accuracy)?;
                    observer.event(Event::Evaluated { step, val_loss, val_accuracy });
                }
                Action::BeginCheckpoint(step) => {
                    store.begin_checkpoint(step, &self.model, self.job.train.optimizer.update_rule());
                    observer.event(Event::Saving { step });
                }
                Action::Commit(position) => {
                    store.commit(position, &self.job, &self.data, &self.model)?;
                }
                Action::Finish(position) => {
                    let predicted = self.predicted.as_ref();
                    let facts: Vec<_> = (0..)
                        .zip(peers)
                        .map(|(i, p): (usize, _)| PeerFacts {
                            name: p.name.clone(),
                            backend: p.backend.clone(),
                            operators: p.train.nodes.len(),
                            predicted: predicted.and_then(|s| s.peers.get(i).copied()),
                            sends: sends(&p.train),
                        })
                        .collect();
                    let summary = store.summarise(plan, &facts, predicted.map(|s| s.step_s), position)?;
                    observer.event(Event::Finished { summary: &summary });
                    return Ok(Some(position));
                }
                Action::Fail(reason) => return Err(NodeError::Run(reason)),
            }
        }
        Ok(None)
    }

    /// What a validation reports: a model from elsewhere may have no classes.
    fn reports(&self) -> Vec<&'static str> {
        let has = |name: &&str| self.model.eval.outputs.contains_key(*name);
        ["loss", "correct"].into_iter().filter(has).collect()
    }

    /// Batches of a validation; as many as there are if the job says 0.
    fn eval_passes(&self) -> u64 {
        let held_out = self.data.eval_samples().div_ceil(self.job.train.batch) as u64;
        match self.job.eval {
            ref e if e.every == 0 => 0,
            ref e if e.batches == 0 => held_out,
            ref e => e.batches.min(held_out),
        }
    }

    /// Whether a validation follows a step.
    fn validated_after(&self, step: u64) -> bool {
        self.eval_passes() > 0 && (step.is_multiple_of(self.job.eval.every) || step == self.job.train.steps)
    }

    /// Targets that count in a step, as a batch without ignored labels has them.
    fn targets_per_step(&self) -> f64 {
        let inputs = self.data.inputs(self.job.train.batch);
        let targets = inputs.iter().find(|(name, _)| self.feeds.targets.as_ref().is_some_and(|(t, _)| t == name));
        targets.map_or(self.job.train.batch as f64, |(_, ty)| ty.numel() as f64)
    }

    /// Streams a pass's inputs to those who read them.
    fn feed(
        &self,
        pass: u64,
        kind: PassKind,
        broker: &mut Broker,
        plan: &Plan,
        peers: &[Peer],
    ) -> Result<(), NodeError> {
        let (batch_size, size) = (self.job.train.batch, self.model.micro_batch);
        let (batch, program) = match kind {
            PassKind::Train { step } => (self.data.train_batch(step * batch_size as u64, batch_size), 0),
            PassKind::Eval { index, .. } => (self.data.eval_batch(index as usize * batch_size, batch_size), 1),
        };
        let batch = batch.map_err(|e| NodeError::Input(e.to_string()))?;
        let total = match &self.feeds.targets {
            Some((name, ignored)) => {
                let tensor = batch.tensors.iter().find(|(n, _)| n == name);
                tensor.map_or(0, |(_, t)| count_targets(t, *ignored))
            }
            None => batch.targets,
        };
        let mut micro_batches: Vec<BTreeMap<&str, HostTensor>> = Vec::new();
        let mut weights = Vec::new();
        for m in 0..plan.micro_batches as usize {
            let mut tensors = BTreeMap::new();
            for (name, tensor) in &batch.tensors {
                let Some(input) = self.feeds.names.get(name.as_ref()) else { continue };
                tensors.insert(input.as_str(), rows(tensor, m * size, size)?);
            }
            let weight = match &self.feeds.targets {
                Some((name, ignored)) => {
                    let targets = self.feeds.names.get(name).and_then(|input| tensors.get(input.as_str()));
                    targets.map_or(0, |t| count_targets(t, *ignored)) as f64 / total.max(1) as f64
                }
                // Nobody knows which count: a mean of the micro-batches' means.
                None => 1.0 / f64::from(plan.micro_batches),
            };
            let dtype = self.model.train.graph.ty(self.model.train.loss_weight).dtype;
            tensors.insert("loss_weight", HostTensor::scalar(dtype, weight)?);
            weights.push(weight);
            micro_batches.push(tensors);
        }
        broker.weights(pass, weights, total);
        for peer in peers {
            for (value, micro_batch, name) in &peer.feeds[program] {
                let tensor = micro_batches.get(*micro_batch as usize).and_then(|t| t.get(name.as_str()));
                let ty = self.model.train.graph.find(name).map(|v| self.model.train.graph.ty(v));
                let tensor = match (tensor, ty) {
                    (Some(tensor), Some(ty)) => Some(tensor.cast(ty.dtype)?),
                    (tensor, _) => tensor.cloned(),
                };
                let tensor = tensor.ok_or_else(|| {
                    NodeError::Input(format!("the model reads {name:?}, which these data do not have"))
                })?;
                let slot = Slot::Value { value: *value, micro_batch: *micro_batch };
                peer.outbox.tensor(&TensorHeader { pass, train: program == 0, slot, coded: false }, tensor)?;
            }
        }
        Ok(())
    }
}

/// Rows `first ..` of a tensor's first dimension.
fn rows(tensor: &HostTensor, first: usize, count: usize) -> Result<HostTensor, NodeError> {
    let mut shape = tensor.shape().to_vec();
    let total = shape.first().copied().unwrap_or(1).max(1);
    let row = tensor.bytes().len() / total;
    if let Some(n) = shape.first_mut() {
        *n = count;
    }
    let bytes = tensor.bytes().get(first * row..(first + count) * row);
    let bytes = bytes.ok_or_else(|| NodeError::State("a batch is smaller than its micro-batches".into()))?;
    Ok(HostTensor::from_bytes(TensorType::new(tensor.dtype(), shape), bytes.to_vec())?)
}

/// Bytes of the tensors that a program sends to each peer, before any codec.
fn sends(program: &Program) -> BTreeMap<PeerId, u64> {
    let mut sends = BTreeMap::new();
    for i in &program.instructions {
        if let Instruction::Send { slot, to } = i
            && let Some(value) = program.values.get(&slot.value())
        {
            *sends.entry(*to).or_default() += value.ty.bytes() as u64;
        }
    }
    sends
}

/// The inputs that a program waits for from the broker.
fn feeds(program: &Program) -> Vec<(ValueId, u32, String)> {
    program
        .incoming()
        .into_iter()
        .filter_map(|(slot, (from, _))| match slot {
            Slot::Value { value, micro_batch } if from == PeerId::BROKER => {
                Some((value, micro_batch, program.values[&value].name.clone()))
            }
            _ => None,
        })
        .collect()
}

/// Names, slots and types of what a peer's snapshot holds.
fn saved_types(program: &Program, optimizer: Optimizer) -> BTreeMap<(String, Option<String>), TensorType> {
    let mut types = BTreeMap::new();
    for h in program.holdings.iter().filter(|h| h.owner) {
        let value = &program.values[&h.value];
        types.insert((value.name.clone(), None), value.ty.clone());
        for slot in optimizer.slots() {
            types.insert((value.name.clone(), Some(slot.to_string())), value.ty.clone());
        }
    }
    types
}
