//! The broker's loop: carries out the actions of the protocol's state machine until the run is over.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fusionllm_plan::{Instruction, PASSES_IN_FLIGHT, PeerId, Plan, Program, Simulation};
use fusionllm_protocol::{
    Action, Broker, EvalRecord, EvalSchedule, FromPeer, Participant, RunSettings, StepRecord, TrainingProgress,
};
use tokio::sync::mpsc;

use super::codec_updates::{CodecAdvisor, apply};
use super::feeds::Feeds;
use super::incoming::Incoming;
use super::keeper::KeeperEvent;
use super::observer::{Event, Observer};
use super::peer::Peer;
use super::store::{PeerFacts, Store};
use crate::NodeError;
use crate::config::Job;
use crate::data::Dataset;
use crate::files::weights::Weights;
use crate::model::Model;
use crate::model::imported::ImportedModel;

/// How long a peer may take to hang up after its run is over.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

/// Everything that a run needs once its plan is made.
pub(super) struct Conductor {
    pub(super) job: Job,
    pub(super) data: Dataset,
    pub(super) model: Model,
    pub(super) feeds: Feeds,
    /// The archive that an imported model starts from.
    pub(super) source: Option<Mutex<ImportedModel>>,
    /// The weights that a model starts from.
    pub(super) weights: Option<Weights>,
    pub(super) predicted: Option<Simulation>,
}

impl Conductor {
    /// Runs the job over the assigned peers, and returns where it ended.
    pub(super) async fn run(
        &self,
        mut plan: Plan,
        peers: Vec<Peer>,
        advisor: CodecAdvisor,
        store: &mut Store,
        observer: &mut dyn Observer,
        incoming: &mut mpsc::UnboundedReceiver<Incoming>,
    ) -> Result<TrainingProgress, NodeError> {
        let participants =
            peers.iter().map(|p| Participant { name: p.name.clone(), expected: p.expected.clone() }).collect();
        let mut broker = Broker::new(self.settings(&plan, store), participants);
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
                Some(Incoming::CodecUpdate(update)) => apply(update, &mut broker, &mut plan, store, observer)?,
                Some(Incoming::SavedAll(from, step)) => broker.snapshot_saved(from, step),
                Some(Incoming::Keeper(KeeperEvent::Committed(step))) => {
                    observer.event(Event::Saved { step });
                    broker.checkpoint_committed(step)
                }
                Some(Incoming::Keeper(KeeperEvent::Unasked(from))) => {
                    broker.peer_lost(from, "it sent a snapshot that nobody requested")
                }
                Some(Incoming::Keeper(KeeperEvent::Failed(e))) => return Err(e),
                Some(Incoming::Lost(peer, reason)) => broker.peer_lost(peer, &reason),
                Some(Incoming::Child(reason)) => {
                    // If it had connected, its lost connection ends the run, and names the peer.
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
            advisor.observe(&actions);
            if let Some(position) = self.carry_out(actions, &mut broker, &plan, &peers, store, observer)? {
                // The endpoint stays open until every peer has read that the run is over.
                for peer in &peers {
                    let _ = tokio::time::timeout(GOODBYE_TIMEOUT, peer.connection.closed()).await;
                }
                return Ok(position);
            }
        }
    }

    fn settings(&self, plan: &Plan, store: &Store) -> RunSettings {
        let (job, eval_passes) = (&self.job, self.eval_passes());
        RunSettings {
            version: plan.version,
            start: store.start(),
            steps: job.train.steps,
            micro_batches: plan.micro_batches,
            eval: (eval_passes > 0).then_some(EvalSchedule { steps: job.eval.every, passes: eval_passes }),
            checkpoint: Some(job.checkpoint.every),
            learning_rate: job.train.optimizer.learning_rate(),
            clip: job.train.optimizer.clip_norm(),
            window: PASSES_IN_FLIGHT as u64,
        }
    }

    /// Carries out what the state machine asks for. Returns the final position once the run is over.
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
                Action::Feed(pass, id) => self.feed(pass, id, broker, plan, peers)?,
                Action::Step(record) => self.step_done(&record, plan, store, observer)?,
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
                Action::Commit(position) => store.commit(position, &self.job, &self.data, &self.model)?,
                Action::Finish(position) => {
                    let predicted_step_s = self.predicted.as_ref().map(|s| s.step_s);
                    let summary = store.summarise(plan, &self.facts(peers), predicted_step_s, position)?;
                    observer.event(Event::Finished { summary: &summary });
                    return Ok(Some(position));
                }
                Action::Fail(reason) => return Err(NodeError::Run(reason)),
            }
        }
        Ok(None)
    }

    fn step_done(
        &self,
        record: &StepRecord,
        plan: &Plan,
        store: &mut Store,
        observer: &mut dyn Observer,
    ) -> Result<(), NodeError> {
        let targets_per_s = self.targets_per_step() / record.step_s.max(1e-9);
        store.step(record, plan, targets_per_s, self.validated_after(record.step))?;
        observer.event(Event::Step { record, targets_per_s });
        Ok(())
    }

    /// What the summary says of each peer besides its passes.
    fn facts(&self, peers: &[Peer]) -> Vec<PeerFacts> {
        let loads = self.predicted.as_ref().map(|s| &s.peers[..]).unwrap_or_default();
        let facts = |(i, p): (usize, &Peer)| PeerFacts {
            name: p.name.clone(),
            backend: p.backend.clone(),
            operators: p.train.nodes.len(),
            predicted: loads.get(i).copied(),
            sends: sends(&p.train),
        };
        peers.iter().enumerate().map(facts).collect()
    }

    /// The outputs that a validation reports. An imported model may have no `correct`.
    pub(super) fn reports(&self) -> Vec<&'static str> {
        let has = |name: &&str| self.model.eval.outputs.contains_key(*name);
        ["loss", "correct"].into_iter().filter(has).collect()
    }

    /// Batches of one validation: `eval.batches`, or the whole held-out data if that is 0.
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

    /// Targets of a step, if none of its labels is ignored.
    fn targets_per_step(&self) -> f64 {
        let inputs = self.data.inputs(self.job.train.batch);
        let targets = inputs.iter().find(|(name, _)| self.feeds.targets.as_ref().is_some_and(|t| t.name == *name));
        targets.map_or(self.job.train.batch as f64, |(_, ty)| ty.numel() as f64)
    }
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
