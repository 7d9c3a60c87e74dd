//! The broker's loop: carries out the actions of the protocol's state machine until the run is over.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use fusionllm_data::{Data, Dataset};
use fusionllm_events::Event;
use fusionllm_graph::{Advice, Precision};
use fusionllm_plan::Cluster;
use fusionllm_program::Address;
use fusionllm_protocol::{
    Action, Arrival, BatchId, EvalRecord, Farewell, FromPeer, Hello, Member, MemberId, Run, StepRecord, TensorHeader,
    ToPeer, TrainingProgress, decode, encode,
};
use fusionllm_transport::{Connection, Lanes, PeerAddr, Ticket};
use fusionllm_workbench::model::Origin;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::time::MissedTickBehavior;

use super::codec_updates::NewCodecs;
use super::entry::{Incoming, KnownKeys, Visitors, refuse, unix_s, usable};
use super::feeds::{Feeds, MicroBatches};
use super::generation::{Generation, PeerInput};
use super::links::Links;
use super::local::Emulation;
use super::observer::Observer;
use super::planner::{PlannerThread, Proposal, Request};
use super::records::{DiskNews, KeeperEvent, Store};
use super::shelves::Shelves;
use crate::NodeError;
use crate::machine::interrupts::Stop;
use crate::web::{Look, Site};

/// The time between two ticks of the state machine.
const TICK: Duration = Duration::from_millis(250);

/// Conducts a run from its first joiner to its end.
pub(super) struct Conductor<'a> {
    pub(super) run: Run,
    pub(super) links: Links,
    /// The generation that loads or trains.
    pub(super) current: Option<Generation>,
    pub(super) planner: PlannerThread,
    /// The last plan that was made. The state machine may use it or not.
    pub(super) proposal: Option<Box<Proposal>>,
    pub(super) data: Dataset,
    pub(super) feeds: Feeds,
    pub(super) origin: Arc<Origin>,
    pub(super) emulation: Option<Emulation>,
    /// Processes of this machine that still run; `None` if joiners come by themselves.
    pub(super) children: Option<usize>,
    pub(super) known: KnownKeys,
    pub(super) visitors: Visitors,
    /// The drawings of the run's page.
    pub(super) site: Arc<Site>,
    /// Places for owners who watch it.
    pub(super) owners: Arc<Semaphore>,
    /// The peers' first ticket. Others differ in their secret and limits.
    pub(super) ticket: Ticket,
    /// The tensors that never change, by member that keeps them.
    pub(super) shelves: Shelves,
    pub(super) store: &'a mut Store,
    pub(super) observer: &'a mut dyn Observer,
    pub(super) events: UnboundedSender<Incoming>,
    pub(super) clock: Instant,
}

impl Conductor<'_> {
    /// Conducts the run, and returns where it ended.
    pub(super) async fn conduct(
        &mut self,
        incoming: &mut UnboundedReceiver<Incoming>,
    ) -> Result<TrainingProgress, NodeError> {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            let actions = tokio::select! {
                event = incoming.recv() => match event {
                    Some(event) => self.span().in_scope(|| self.handle(event))?,
                    None => return Err(NodeError::State("the broker's endpoint closed".into())),
                },
                _ = ticks.tick() => {
                    self.report_loading();
                    self.report_disk();
                    self.run.tick(self.now())
                }
            };
            if let Some(progress) = self.span().in_scope(|| self.carry_out(actions))? {
                // The endpoint stays open until every peer has read that the run is over.
                self.links.goodbye().await;
                return self.store.ended_skipping().map_or(Ok(progress), Err);
            }
        }
    }

    /// The span of the generation that loads or trains.
    fn span(&self) -> tracing::Span {
        let generation = self.current.as_ref();
        generation.map_or_else(tracing::Span::none, |g| tracing::info_span!("generation", number = g.number))
    }

    pub(super) fn now(&self) -> f64 {
        self.clock.elapsed().as_secs_f64()
    }

    fn handle(&mut self, event: Incoming) -> Result<Vec<Action>, NodeError> {
        let now = self.now();
        Ok(match event {
            Incoming::Hello(number, connection, lanes, hello) => self.admit(number, connection, *lanes, hello),
            Incoming::Asked(connection, lanes, request) => self.asked(connection, *lanes, request)?,
            Incoming::Visit(connection, lanes, version, secret) => {
                let ticket = self.run.roster().admission().look(&secret, unix_s());
                tokio::spawn(self.visitors.clone().receive(connection, *lanes, version, ticket));
                Vec::new()
            }
            Incoming::Message((member, number), message) if self.links.is_current(member, number) => {
                self.trace(member, &message);
                if let FromPeer::Shelved { generation } = message {
                    self.shelves.confirm(member, generation);
                }
                self.run.message(member, message, now)
            }
            Incoming::SavedAll((member, number), step) if self.links.is_current(member, number) => {
                self.run.snapshot_arrived(member, step, now)
            }
            Incoming::Gone((member, number), reason) if self.links.is_current(member, number) => {
                self.links.remove(member);
                self.run.gone(member, &reason, now)
            }
            Incoming::Ended((member, number), reason) if self.links.is_current(member, number) => {
                self.links.remove(member);
                self.run.ended(member, &reason, now)
            }
            Incoming::Broke((member, number), reason) if self.links.is_current(member, number) => {
                self.run.expel(member, &reason, now)
            }
            // This connection was replaced by a newer one of the same member.
            Incoming::Message(..)
            | Incoming::SavedAll(..)
            | Incoming::Gone(..)
            | Incoming::Ended(..)
            | Incoming::Broke(..) => Vec::new(),
            Incoming::Planned(Ok(proposal)) => {
                let formation = proposal.formation.clone();
                self.proposal = Some(proposal);
                self.run.planned(formation, now)
            }
            // The first plan depends on the user's settings, so the error says what to change.
            Incoming::Planned(Err(e)) if !self.run.has_begun() => return Err(e),
            Incoming::Planned(Err(e)) => self.run.not_planned(&e.one_line(), now),
            Incoming::NewCodecs(generation, news) => {
                self.change_codecs(generation, news)?;
                Vec::new()
            }
            Incoming::Keeper(KeeperEvent::Committed(progress)) => {
                self.store.committed(progress);
                self.tell(Event::Saved { step: progress.step });
                self.run.checkpoint_committed(progress, true, now)
            }
            Incoming::Keeper(KeeperEvent::Failed(progress, error)) => {
                let stop = self.current.as_ref().map_or(u64::MAX, |current| current.job.train.stop);
                let (step, goes_on) = (progress.step, progress.step < stop);
                self.tell(Event::NotSaved { step, reason: error.one_line(), goes_on });
                self.store.not_saved(error);
                self.run.checkpoint_committed(progress, false, now)
            }
            Incoming::LoadFailed(e) => return Err(e),
            Incoming::Look(answer) => {
                // Who asked may have gone.
                let _ = answer.send(self.look());
                Vec::new()
            }
            Incoming::Note(text) => {
                self.tell(Event::note(text));
                Vec::new()
            }
            Incoming::Child(reason) => self.child_ended(reason)?,
            Incoming::Interrupt(Stop::AtOnce) => return Err(NodeError::Stopped("interrupted twice".into())),
            Incoming::Interrupt(Stop::InGoodOrder) => {
                self.tell(Event::Stopping);
                self.run.interrupt(now)
            }
        })
    }

    /// Logs how far a member is in a generation and in a pass.
    fn trace(&self, member: MemberId, message: &FromPeer) {
        let peer = self.run.roster().display_name(member);
        let of_pass = |pass: u64| tracing::info_span!("pass", number = pass).entered();
        match message {
            FromPeer::Ready { .. } => tracing::info!(peer, "is ready"),
            FromPeer::Norms { pass, .. } => {
                let _span = of_pass(*pass);
                tracing::debug!(peer, "waits for the verdict");
            }
            FromPeer::PassDone { pass, report } => {
                let _span = of_pass(*pass);
                tracing::debug!(peer, compute_s = report.compute_s, wait_s = report.wait_s, "is done");
            }
            _ => {}
        }
    }

    /// Takes in a joiner, or a member that comes back.
    fn admit(&mut self, number: u64, connection: Connection, lanes: Lanes, mut hello: Hello) -> Vec<Action> {
        let key = connection.peer();
        let from = connection.remote_addr();
        let arrival = Arrival { identity: *key.as_bytes(), from: from.map(|addr| addr.ip()), unix_s: unix_s() };
        let addr = match decode::<PeerAddr>(&hello.addr) {
            Ok(addr) if addr.key == key => encode(&usable(addr, from)).map(|addr| hello.addr = addr),
            // The address must have the key of the connection, so that nobody can send others to somebody else.
            Ok(_) => Err("its address has another key than its connection".to_owned()),
            Err(e) => Err(format!("its address cannot be read: {e}")),
        };
        match addr.and_then(|()| self.run.join(arrival, hello, self.now())) {
            Ok((member, actions)) => {
                self.known.write().unwrap_or_else(PoisonError::into_inner).insert(key);
                self.links.add(member, number, connection, lanes, self.store.inbox(), &self.events);
                actions
            }
            Err(reason) => {
                self.tell(Event::TurnedAway { reason: reason.clone() });
                tokio::spawn(refuse(connection, lanes, reason));
                Vec::new()
            }
        }
    }

    /// Handles a process of this machine that has ended badly. Without any process, nobody is left to train.
    fn child_ended(&mut self, reason: String) -> Result<Vec<Action>, NodeError> {
        if !self.run.has_begun() {
            return Err(NodeError::Run(reason));
        }
        self.tell(Event::note(reason.clone()));
        self.children = self.children.map(|count| count.saturating_sub(1));
        match self.children {
            Some(0) => Err(NodeError::Run(format!("no peer is left: {reason}"))),
            _ => Ok(Vec::new()),
        }
    }

    /// Sends the peers of a generation their new codecs, if any change, and reports what the regulator found.
    fn change_codecs(&mut self, generation: u32, news: NewCodecs) -> Result<(), NodeError> {
        let Some(current) = self.current.as_mut().filter(|current| current.number == generation) else {
            return Ok(());
        };
        let NewCodecs { lines, plan } = news;
        let mut step = self.run.progress().step + 1;
        if let Some((plan, text)) = plan {
            // If only the last steps are in flight, nothing is left to change.
            let Some(applied) = self.run.set_codecs(&plan.codecs) else { return Ok(()) };
            self.store.plan(text)?;
            current.plan = plan;
            for (to, message) in applied.messages {
                self.links.send(to, &message)?;
            }
            step = applied.step;
        }
        self.tell(Event::Codecs { step, lines: lines.clone() });
        self.store.codecs(step, lines);
        Ok(())
    }

    /// Streams the inputs of a pass to the peers that read them, and gives the state machine the micro-batches'
    /// weights.
    fn feed(&mut self, pass: u64, id: BatchId) -> Result<(), NodeError> {
        let Some(generation) = &self.current else { return Ok(()) };
        let _span = tracing::info_span!("pass", number = pass, kind = ?id.kind(), step = id.step()).entered();
        tracing::debug!("is issued");
        let (count, model) = (generation.plan.micro_batches, &generation.model);
        let MicroBatches { tensors, weights, sums } = match id {
            BatchId::Train { step } => {
                self.feeds.training_pass(&self.data, step, generation.job.train.batch, count, model)?
            }
            BatchId::Eval { index, .. } => generation.evaluation.pass(index, count, &self.feeds, &self.data, model)?,
        };
        self.run.set_weights(pass, weights, sums);
        for peer in &generation.peers {
            let Some(link) = self.links.get(peer.member) else { continue };
            for PeerInput { value, micro_batch, name } in &peer.inputs[id.kind()] {
                let tensor = tensors
                    .get(*micro_batch as usize)
                    .and_then(|t| t.get(name))
                    .ok_or_else(|| NodeError::input(format!("the model reads {name:?}, which the data do not have")))?;
                let address = Address::Value { value: *value, micro_batch: *micro_batch };
                let header = TensorHeader { pass, kind: id.kind(), tensor: address, coded: false };
                link.outbox.tensor(&header, tensor.clone())?;
            }
        }
        Ok(())
    }

    fn report_loading(&mut self) {
        if let Some(current) = self.current.as_ref().filter(|_| !self.run.is_training()) {
            let (sent, total) = current.loading.progress();
            self.observer.loading(sent, total);
        }
    }

    fn report_disk(&mut self) {
        match self.store.take_news() {
            Some(DiskNews::Full(error)) => self.tell(Event::DiskFull { reason: error.one_line() }),
            Some(DiskNews::Written) => self.tell(Event::DiskWritten),
            None => {}
        }
        if let Some(error) = self.store.take_left_out() {
            self.tell(Event::note(format!("TensorBoard's files lack some steps: {}", error.one_line())));
        }
        if let Some(error) = self.store.take_unnoted() {
            let text = format!(
                "where the run stands cannot be written: {}; training goes on, but if this broker is killed, the run goes \
                 back to its last checkpoint",
                error.one_line()
            );
            self.tell(Event::note(text));
        }
    }

    /// Tells whoever watches what happens, and the run's directory.
    pub(super) fn tell(&mut self, event: Event) {
        self.observer.event(&event);
        self.store.tell(event);
    }

    /// Carries out the actions of the state machine. Returns the final progress once the run is over.
    fn carry_out(&mut self, actions: Vec<Action>) -> Result<Option<TrainingProgress>, NodeError> {
        for action in actions {
            match action {
                Action::Send(to, message) => self.links.send(to, &message)?,
                Action::Dismiss(member) => self.links.dismiss(member),
                Action::Feed(pass, id) => self.feed(pass, id)?,
                Action::Step(record) => self.step_done(&record)?,
                Action::Evaluated(EvalRecord { step, means }) => {
                    let val_loss = means.first().copied().unwrap_or(f64::NAN);
                    // The second report is `correct`, which not every model has.
                    let val_accuracy = means.get(1).copied().filter(|share| share.is_finite());
                    self.store.evaluated(step, val_loss, val_accuracy)?;
                    let val_loss = Some(val_loss).filter(|loss| loss.is_finite());
                    self.tell(Event::Evaluated { step, val_loss, val_accuracy });
                }
                Action::BeginCheckpoint(step) => {
                    if let Some(current) = &self.current {
                        let optimizer = current.job.train.optimizer.update_rule();
                        self.store.begin_checkpoint(step, &current.model, optimizer);
                        self.tell(Event::Saving { step });
                    }
                }
                Action::AbandonCheckpoint(step) => self.store.abandon_checkpoint(step),
                Action::Commit(progress) => {
                    if let Some(current) = &self.current {
                        self.store.commit(progress, &current.job, &self.data, &current.model)?;
                    }
                }
                Action::Plan { members, cluster, notes } => self.request_plan(members, cluster, notes),
                Action::Rewind(progress) => self.store.rewind(progress.step)?,
                Action::Persist => self.persist()?,
                Action::Assign(order) => {
                    self.store.persist_atlas(self.run.atlas());
                    let proposal = self.proposal.take();
                    let proposal = proposal.ok_or_else(|| NodeError::State("there is no plan to assign".into()))?;
                    self.announce(&proposal)?;
                    self.store.begin_generation();
                    self.begin(&order, *proposal)?;
                }
                Action::Notice(notice) => self.notice(&notice)?,
                Action::Finish(progress) => return self.finish(progress).map(Some),
                Action::Fail(reason) => return Err(NodeError::Run(reason)),
                Action::Suspend(reason) => return Err(NodeError::Suspended(reason)),
            }
        }
        Ok(None)
    }

    /// Writes where the run stands.
    pub(super) fn persist(&mut self) -> Result<(), NodeError> {
        self.store.persist(self.run.roster().wanted(), self.run.state())
    }

    fn request_plan(&mut self, members: Vec<MemberId>, cluster: Option<Cluster>, notes: Vec<String>) {
        let roster = self.run.roster();
        let members = members.into_iter().map(|m| (m, roster.display_name(m).to_owned())).collect();
        self.planner.request(Request { members, cluster, notes });
    }

    /// Writes a plan that will be carried out, and tells people.
    fn announce(&mut self, proposal: &Proposal) -> Result<(), NodeError> {
        let planned = &proposal.planned;
        self.store.job(&planned.job)?;
        self.store.plan(planned.to_json()?)?;
        let members = proposal.formation.members.iter().filter_map(|m| self.run.roster().get(*m));
        let precision = precision_note(planned.job.train.precision, members);
        let notes: Vec<String> = planned.notes.iter().cloned().chain(precision).collect();
        let (plan, graph) = (&planned.plan, &planned.model.forward);
        let parameters: usize = graph.parameters().map(|v| graph.ty(v).numel()).sum();
        let counts = self.feeds.targets_per_step(&self.data, planned.job.train.batch);
        let targets = match &planned.job.data {
            _ if counts.is_none() => "samples",
            Data::Text(_) | Data::Chats(_) => "tokens",
            Data::Cifar10(_) => "images",
            Data::Tensors(_) => "targets",
        };
        let event = Event::Planned {
            model: graph.name.clone(),
            parameters: parameters as u64,
            operators: graph.nodes.len() as u64,
            peers: plan.peers.clone(),
            stages: plan.stages.len() as u64,
            scheduler: plan.scheduler.clone(),
            schedule: plan.schedule.name().to_owned(),
            micro_batches: plan.micro_batches,
            targets: targets.to_owned(),
            notes,
            predicted_step_s: planned.predicted.as_ref().map(|p| p.step_s),
        };
        self.tell(event);
        self.observer.planned(&planned.model, &self.data);
        Ok(())
    }

    fn step_done(&mut self, record: &StepRecord) -> Result<(), NodeError> {
        let Some(current) = &self.current else { return Ok(()) };
        let batch = current.job.train.batch;
        let per_s = |count: f64| count / record.step_s.max(1e-9);
        let samples_per_s = per_s(batch as f64);
        let targets_per_s = self.feeds.targets_per_step(&self.data, batch).map(per_s);
        let validated = !current.evaluation.is_empty()
            && (record.step.is_multiple_of(current.job.eval.every) || record.step == current.job.train.stop);
        let per_s = targets_per_s.unwrap_or(samples_per_s);
        let metrics = self.store.step(record, &current.plan, per_s, validated)?;
        current.advisor.observe(record);
        self.tell(Event::Step(Box::new(metrics)));
        Ok(())
    }

    /// Tells all members that the run has failed.
    pub(super) fn stop_all(&mut self, reason: &str) {
        let stop = ToPeer::Stop(Farewell::Failed { reason: reason.to_owned() });
        for member in self.run.roster().connected() {
            // The run is over in any case.
            let _ = self.links.send(member.id, &stop);
        }
    }

    fn finish(&mut self, progress: TrainingProgress) -> Result<TrainingProgress, NodeError> {
        let Some(current) = &self.current else {
            return Err(NodeError::Suspended("no machine has come back since this broker was started".into()));
        };
        self.store.remove_tickets()?;
        let predicted_step_s = current.predicted.as_ref().map(|s| s.step_s);
        let (facts, copies_s) = (current.facts(), self.run.copies_s());
        let summary = self.store.summarise(&current.plan, &facts, predicted_step_s, progress, copies_s)?;
        self.tell(Event::Finished { steps: summary.steps });
        self.store.board().lock().look =
            Some(Arc::new(Look { status: self.status(&facts), summary: Some(summary.clone()), last_step: None }));
        self.observer.finished(&summary);
        Ok(progress)
    }
}

/// A sentence about the precision of a run, unless it is the precision that every other run has.
fn precision_note<'a>(precision: Precision, members: impl Iterator<Item = &'a Member>) -> Option<String> {
    if precision != Precision::Bf16 {
        return None;
    }
    let slow = members.filter(|m| m.slow_bf16).map(|m| format!("{} ({})", m.name, m.backend)).collect::<Vec<_>>();
    let slower = match &slow[..] {
        [] => String::new(),
        names => format!("; this takes longer than \"f32\" on {}, which converts its operands", names.join(", ")),
    };
    Some(format!("train.precision = \"bf16\": every peer computes products in bf16{slower}"))
}
