//! The files that a run keeps on the broker's disk: its directory, and its checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use fusionllm_data::{Data, Dataset, DiskError};
use fusionllm_events::{Event, IncidentSummary, Spectrum, StepMetrics, Timed};
use fusionllm_plan::Plan;
use fusionllm_program::Optimizer;
use fusionllm_protocol::{Atlas, CodecSpectrum, RunState, StepRecord, TrainingProgress};
use fusionllm_transport::Ticket;
use fusionllm_workbench::model::Model;
use fusionllm_workbench::model::export::published_config;
use fusionllm_workspace::checkpoint::{Checkpoint, Checkpoints, Part, State};
use fusionllm_workspace::config::Job;
use fusionllm_workspace::run_dir::{RunDir, Summary, read_events, read_metrics, written_in};

use super::figures::{Figures, PeerFacts, finite};
use super::keeper::{Inbox, Keeper, KeeperEvent, Saved, Seal};
use super::ledger::{DiskNews, Ledger};
use super::resume::{Identity, Left, Subject, over, run_of, write_atlas};
use crate::NodeError;
use crate::web::SharedBoard;

/// The run directory, its checkpoints, and the figures of the steps so far.
pub(crate) struct Store {
    /// Notes about promises that the file system of the run does not keep.
    notes: Vec<String>,
    ledger: Ledger,
    keeper: Keeper,
    resumed: Option<Arc<Checkpoint>>,
    /// The last checkpoint of this run.
    committed: Option<TrainingProgress>,
    /// The reason why the last checkpoint could not be written.
    unsaved: Option<NodeError>,
    figures: Figures,
    /// The content of the run's page.
    board: SharedBoard,
    /// The metrics of a step that a validation follows.
    pending: Option<StepMetrics>,
    /// Sentences about codecs, by the step that they are reported with.
    codecs: BTreeMap<u64, Vec<String>>,
    /// The digest of the parameters that are not trained.
    frozen: Option<String>,
    /// The run's subject, if another broker may go on with it.
    subject: Option<Subject>,
    /// Whether the run's state could not be written the last time, and the error if people do not know it yet.
    unnoted: (bool, Option<NodeError>),
    /// Whether a generation has begun.
    begun: bool,
}

/// The tensors of a checkpoint.
fn saved_tensors(model: &Model, optimizer: Optimizer) -> Saved {
    let graph = &model.forward;
    let named = |v| (graph.value(v).name.clone(), graph.ty(v).clone());
    let slots = model.train.gradients.iter().flat_map(|g| {
        let (name, ty) = named(g.parameter);
        optimizer.slots().iter().map(move |slot| (format!("{name}.{slot}"), ty.clone()))
    });
    let optimizer = slots.collect();
    let model_types = graph.parameters().chain(graph.buffers()).map(named).collect();
    Saved { model: model_types, optimizer, kept: model.kept.clone() }
}

/// The number of checkpoints that may be on their way to the disk at once. Until then, each takes room on the peers'
/// disks, so those of a large model are few: one that is streamed, and one that waits.
pub(crate) fn checkpoints_under_way(model: &Model, optimizer: Optimizer) -> usize {
    const ROOM: usize = 256 << 20;
    let Saved { model, optimizer, .. } = saved_tensors(model, optimizer);
    let bytes: usize = model.iter().chain(&optimizer).map(|(_, ty)| ty.bytes()).sum();
    // Each is an open file of every peer, too.
    (ROOM / bytes.max(1)).clamp(2, 64)
}

/// Refuses to resume from a checkpoint of another model or other data, or one after the job's last step.
/// `frozen` is the digest of the parameters that are not trained.
pub(crate) fn check(
    checkpoint: &Checkpoint,
    job: &Job,
    data: &Dataset,
    model: &Model,
    frozen: Option<&str>,
) -> Result<(), NodeError> {
    let Saved { model: mut saved, optimizer, kept } = saved_tensors(model, job.train.optimizer.update_rule());
    // Earlier versions kept less of the state.
    let stored: BTreeSet<&str> = checkpoint.tensor_types(Part::Model).map(|(name, _)| name).collect();
    let kept: Vec<_> = kept.into_iter().filter(|(name, _)| stored.contains(name.as_str())).collect();
    saved.extend(kept.iter().map(|(name, tensor)| (name.clone(), tensor.ty().clone())));
    checkpoint.check(Part::Model, &saved)?;
    checkpoint.check(Part::Optimizer, &optimizer)?;
    let (state, path) = (checkpoint.state(), checkpoint.path().display());
    let weights = checkpoint.file(Part::Model);
    let weights = std::path::absolute(&weights).unwrap_or(weights);
    let start_anew = format!("restore the files, or start a new run with weights = {weights:?} in [model]");
    for (name, tensor) in kept {
        if checkpoint.read(Part::Model, &name)? != tensor {
            return Err(NodeError::input_with_hint(
                format!("{path}: `{name}` is another tensor now: model.file or model.weights has changed since"),
                start_anew,
            ));
        }
    }
    if state.frozen.as_deref() != frozen {
        return Err(NodeError::input_with_hint(
            format!("{path}: the weights that the run started from have changed since"),
            "restore the files of model.weights or model.file",
        ));
    }
    if state.data != data.digest() {
        return Err(NodeError::input_with_hint(
            format!("{path}: the data have changed since; a run goes on with the batches it would have drawn"),
            start_anew,
        ));
    }
    if state.seed != job.train.seed {
        return Err(NodeError::input_with_hint(
            format!("{path}: the run's seed was {}, not {}", state.seed, job.train.seed),
            "leave train.seed as it was",
        ));
    }
    if state.step >= job.train.stop {
        return Err(over(checkpoint.path(), state.step, &job.train));
    }
    Ok(())
}

impl Store {
    /// Opens a run. A new one goes to `directory`, or to a fresh directory under `runs/`. A resumed one continues in
    /// the checkpoint's run directory, unless `directory` asks for a new run. A run that a broker left goes on in its
    /// own directory. `subject` is given if another broker may go on with the run.
    pub(crate) fn open(
        directory: Option<&Path>,
        resumed: Option<Checkpoint>,
        left: Option<&Left>,
        subject: Option<Subject>,
        frozen: Option<String>,
        job: &Job,
        on_event: impl Fn(KeeperEvent) + Send + 'static,
    ) -> Result<Self, NodeError> {
        let toml = job.to_toml_in_run(Path::new(""))?;
        let of_checkpoint = resumed.as_ref().and_then(|c| Some((run_of(c.path())?, c.state().step)));
        // The steps after the newest cut are void, but nobody knows that cut before the peers are back.
        let continued = left.map(|left| (left.directory.as_path(), u64::MAX)).or(of_checkpoint);
        let mut run = match (directory, continued) {
            (None, Some((run, step))) => {
                let run = RunDir::resume(run, step)?;
                run.write_job(&toml)?;
                run
            }
            _ => RunDir::create(directory, &toml)?,
        };
        match &job.data {
            Data::Text(text) => run.keep_tokenizer(&text.tokenizer, None)?,
            Data::Chats(chats) => run.keep_tokenizer(&chats.tokenizer, chats.template.as_ref())?,
            Data::Cifar10(_) | Data::Tensors(_) => {}
        }
        let mut figures = Figures::new(resumed.as_ref().and_then(|c| c.state().loss_first));
        if let Some(left) = left {
            figures.take_over(left.loss_first, &left.incidents);
        }
        let board = SharedBoard::default();
        {
            let mut board = board.lock();
            board.directory = run.path().display().to_string();
            board.job = toml.as_str().into();
            board.take_over(read_metrics(run.path())?, read_events(run.path())?);
        }
        let keeper = Keeper::start(Checkpoints::new(run.checkpoints()), on_event)?;
        let notes = run.take_notes();
        Ok(Self {
            notes,
            ledger: Ledger::new(run),
            keeper,
            figures,
            board,
            resumed: resumed.map(Arc::new),
            committed: None,
            unsaved: None,
            pending: None,
            codecs: BTreeMap::new(),
            frozen,
            subject,
            unnoted: (false, None),
            begun: false,
        })
    }

    /// The notes for the user about the file system of the run. They are returned once.
    pub(crate) fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// The run's directory.
    pub(crate) fn directory(&self) -> &Path {
        self.ledger.run().path()
    }

    pub(crate) fn tickets(&self, peers: &Ticket, owner: &Ticket) -> Result<(), NodeError> {
        Ok(self.ledger.run().write_tickets(&peers.to_string(), &owner.to_string())?)
    }

    /// Removes the tickets once the run is over.
    pub(crate) fn remove_tickets(&self) -> Result<(), NodeError> {
        Ok(self.ledger.run().remove_tickets()?)
    }

    /// The content of the run's page.
    pub(crate) fn board(&self) -> &SharedBoard {
        &self.board
    }

    /// Notes the address of the run's page, so that other commands find it.
    pub(crate) fn write_dashboard(&self, url: &str) -> Result<(), NodeError> {
        Ok(self.ledger.run().write_dashboard(url)?)
    }

    /// Removes the address once nobody is served there.
    pub(crate) fn remove_dashboard(&self) -> Result<(), NodeError> {
        Ok(self.ledger.run().remove_dashboard()?)
    }

    /// The figures of the steps so far.
    pub(crate) fn figures(&self) -> &Figures {
        &self.figures
    }

    /// The step of the last checkpoint that is whole.
    pub(crate) fn safe_step(&self) -> Option<u64> {
        self.committed.map(|c| c.step).or_else(|| self.resumed.as_ref().map(|c| c.state().step))
    }

    /// The broker's identity. Joiners of a run that goes on know it already.
    pub(crate) fn identity(&self) -> Result<Identity, NodeError> {
        match self.subject {
            Some(_) => Identity::of(self.ledger.run()),
            None => Ok(Identity::generate()),
        }
    }

    /// Notes the identity, so that the ticket stays valid when the broker is started again.
    pub(crate) fn keep_identity(&self, identity: &Identity) -> Result<(), NodeError> {
        match self.subject {
            Some(_) => Ok(self.ledger.run().write_identity(&identity.to_bytes())?),
            None => Ok(()),
        }
    }

    /// Writes the run's state. A full disk does not end the run, but without the state, a run whose broker is killed
    /// has to go back to a checkpoint.
    pub(crate) fn persist(&mut self, wanted: usize, run: RunState) -> Result<(), NodeError> {
        let Some(subject) = self.subject.clone() else { return Ok(()) };
        let left = Left::new(subject, wanted, self.figures.loss_first(), self.figures.incidents().to_vec(), run);
        let written = self.ledger.run().write_state(&left.to_bytes()?);
        self.noted(written.map_err(NodeError::from));
        Ok(())
    }

    fn noted(&mut self, written: Result<(), NodeError>) {
        match written {
            Ok(()) => self.unnoted = (false, None),
            Err(_) if self.unnoted.0 => {}
            Err(error) => self.unnoted = (true, Some(error)),
        }
    }

    /// The reason why the run's state cannot be written. It is returned once.
    pub(crate) fn take_unnoted(&mut self) -> Option<NodeError> {
        self.unnoted.1.take()
    }

    /// Writes the measurements of machines and links. A full disk does not end the run here either.
    pub(crate) fn persist_atlas(&mut self, atlas: &Atlas) {
        if self.subject.is_some() {
            let written = write_atlas(self.ledger.run(), atlas);
            self.noted(written);
        }
    }

    /// Removes a run that ends before it began, so that nobody takes it for one that can go on.
    pub(crate) fn discard_unbegun(&self) {
        if !self.begun {
            self.ledger.run().discard();
        }
    }

    /// The run has ended in good order, and its peers are gone.
    pub(crate) fn forget_state(&self) -> Result<(), NodeError> {
        Ok(self.ledger.run().remove_state()?)
    }

    /// The position at which this run starts.
    pub(crate) fn start(&self) -> TrainingProgress {
        let state = self.resumed.as_ref().map(|c| c.state());
        state.map_or_else(TrainingProgress::default, |s| TrainingProgress { step: s.step, updates: s.updates })
    }

    /// The checkpoint of a step, if there is one.
    pub(crate) fn checkpoint(&self, step: u64) -> Result<Option<Arc<Checkpoint>>, NodeError> {
        if let Some(resumed) = self.resumed.as_ref().filter(|c| c.state().step == step) {
            return Ok(Some(resumed.clone()));
        }
        match self.committed.filter(|c| c.step == step) {
            Some(_) => {
                Ok(Some(Arc::new(Checkpoint::open(&self.ledger.run().checkpoints().join(format!("step-{step}")))?)))
            }
            None => Ok(None),
        }
    }

    /// A checkpoint is whole.
    pub(crate) fn committed(&mut self, progress: TrainingProgress) {
        (self.committed, self.unsaved) = (Some(progress), None);
    }

    /// A checkpoint could not be written. The run reports it at its end, unless a later one is whole.
    pub(crate) fn not_saved(&mut self, error: NodeError) {
        self.unsaved = Some(error);
    }

    /// Adds to an error of a run which of its results are safe, and how to go on.
    pub(crate) fn with_safe_step(&self, error: NodeError) -> NodeError {
        let resumed = self.resumed.as_ref().map(|c| c.state().step);
        let directory = self.ledger.run().path().to_string_lossy();
        // As a shell reads it. No path has a zero byte, which is all that cannot be quoted.
        let directory = shlex::try_quote(&directory).unwrap_or_default();
        let hint = match (self.committed.map(|c| c.step), resumed) {
            (Some(step), _) => format!("step {step} is safe; go on with --resume {directory}"),
            (None, Some(step)) => format!("the run is where it was: at step {step}; --resume goes on from there"),
            (None, None) => match error {
                NodeError::Suspended(_) => "no checkpoint was saved yet".to_owned(),
                error => return error,
            },
        };
        error.unfinished(hint)
    }

    pub(crate) fn poisoned(&mut self, what: String, advice: &str) {
        self.figures.poisoned(what, advice);
    }

    /// The error of a run of which no step was applied, or none of the last ones.
    pub(crate) fn ended_skipping(&self) -> Option<NodeError> {
        self.figures.ended_skipping()
    }

    /// Training goes back to a step: later lines of the metrics are void.
    pub(crate) fn rewind(&mut self, step: u64) -> Result<(), NodeError> {
        self.pending.take_if(|m| m.step > step);
        self.flush()?;
        self.figures.rewind(step);
        self.board.lock().rewind(step);
        self.ledger.rewind(step)
    }

    /// A generation begins: its peers' figures have nothing to do with earlier ones.
    pub(crate) fn begin_generation(&mut self) {
        self.begun = true;
        self.figures.begin_generation();
    }

    /// Notes an interruption of training for the summary.
    pub(crate) fn incident(&mut self, incident: IncidentSummary) {
        self.figures.incident(incident);
    }

    /// The entry for tensors of snapshots.
    pub(crate) fn inbox(&self) -> Inbox {
        self.keeper.inbox()
    }

    /// Opens the checkpoint of a step, before its first tensor.
    pub(crate) fn begin_checkpoint(&self, step: u64, model: &Model, optimizer: Optimizer) {
        self.keeper.begin(step, saved_tensors(model, optimizer));
    }

    /// Forgets the checkpoint of a step, which will not be complete.
    pub(crate) fn abandon_checkpoint(&self, step: u64) {
        self.keeper.abandon(step);
    }

    /// Completes the checkpoint, after its last tensor.
    pub(crate) fn commit(
        &self,
        position: TrainingProgress,
        job: &Job,
        data: &Dataset,
        model: &Model,
    ) -> Result<(), NodeError> {
        let mut extra = Vec::new();
        if let Some((tokenizer, _)) = job.data.written() {
            // With this file, `transformers` loads the checkpoint directory, if that has the whole model.
            let config = published_config(&job.model.family, Some(tokenizer)).filter(|_| self.frozen.is_none());
            extra.extend(config.map(|config| ("config.json", format!("{config:#}").into_bytes())));
        }
        // A checkpoint is at RUN/checkpoints/step-N.
        let job_file = written_in(self.directory(), &job.to_toml_in_run(Path::new("../.."))?);
        extra.push(("job.toml", job_file.into_bytes()));
        let state = State {
            step: position.step,
            updates: position.updates,
            samples: position.step * job.train.batch as u64,
            seed: job.train.seed,
            graph: model.forward.digest(),
            data: data.digest().to_owned(),
            frozen: self.frozen.clone(),
            loss_first: self.figures.loss_first(),
        };
        self.keeper.commit(Seal { state, extra, keep: job.checkpoint.keep, keep_best: job.checkpoint.keep_best });
        Ok(())
    }

    /// Writes the job with the planner's choices.
    pub(crate) fn job(&mut self, job: &Job) -> Result<(), NodeError> {
        let toml = job.to_toml_in_run(Path::new(""))?;
        self.board.lock().job = toml.as_str().into();
        self.ledger.replace_job(toml)
    }

    /// Writes the plan file.
    pub(crate) fn plan(&mut self, json: String) -> Result<(), NodeError> {
        self.board.lock().plan = json.as_str().into();
        self.ledger.replace_plan(json)
    }

    /// The change of the disk since the last call.
    pub(crate) fn take_news(&mut self) -> Option<DiskNews> {
        self.ledger.take_news()
    }

    /// The reason why steps are left out for TensorBoard. It is returned once.
    pub(crate) fn take_left_out(&mut self) -> Option<DiskError> {
        self.ledger.take_left_out()
    }

    /// Notes sentences about codecs for the metrics of a coming step.
    pub(crate) fn codecs(&mut self, step: u64, lines: Vec<String>) {
        self.codecs.entry(step).or_default().extend(lines);
    }

    /// Records a finished step, and returns its metrics. Their line waits for the validation if one follows.
    pub(crate) fn step(
        &mut self,
        record: &StepRecord,
        plan: &Plan,
        tokens_per_s: f64,
        validated: bool,
    ) -> Result<StepMetrics, NodeError> {
        self.flush()?;
        let name = |p: usize| plan.peers.get(p).cloned().unwrap_or_default();
        let spectra = record.peers.iter().enumerate().flat_map(|(from, report)| {
            let spectrum = move |s: &CodecSpectrum| Spectrum {
                from: name(from),
                to: name(s.to.0 as usize),
                before: s.exact,
                after: s.decoded,
            };
            report.spectra.iter().map(spectrum)
        });
        let metrics = StepMetrics {
            step: record.step,
            loss: finite(record.loss),
            step_s: record.step_s,
            tokens_per_s,
            bytes_sent: record.bytes_sent,
            lr: record.lr,
            grad_norm: finite(record.grad_norm),
            skipped: !record.applied,
            codecs: self.codecs.remove(&record.step).unwrap_or_default(),
            spectra: spectra.collect(),
            val_loss: None,
            val_accuracy: None,
        };
        self.figures.step(record);
        self.pending = Some(metrics.clone());
        if !validated {
            self.flush()?;
        }
        Ok(metrics)
    }

    /// Notes an event for the run's page, and for the events' file unless the metrics have it.
    pub(crate) fn tell(&mut self, event: Event) {
        let event = Timed::now(event);
        let kept = !event.event.is_metric() && self.ledger.tell(event.clone());
        self.board.lock().happened(event, kept);
    }

    pub(crate) fn evaluated(&mut self, step: u64, val_loss: f64, val_accuracy: Option<f64>) -> Result<(), NodeError> {
        if let Some(metrics) = self.pending.as_mut().filter(|m| m.step == step) {
            metrics.val_loss = finite(val_loss);
            metrics.val_accuracy = val_accuracy;
        }
        self.flush()
    }

    fn flush(&mut self) -> Result<(), NodeError> {
        match self.pending.take() {
            Some(metrics) => self.ledger.record(metrics),
            None => Ok(()),
        }
    }

    /// Writes the summary at the end of the run.
    ///
    /// # Errors
    ///
    /// The last checkpoint or the metrics could not be written.
    pub(crate) fn summarise(
        &mut self,
        plan: &Plan,
        peers: &[PeerFacts],
        predicted_step_s: Option<f64>,
        position: TrainingProgress,
        copies_s: f64,
    ) -> Result<Summary, NodeError> {
        self.flush()?;
        self.ledger.write()?;
        let mut summary = self.figures.summary(plan, peers, predicted_step_s, position);
        summary.overhead_s.insert("copies".into(), copies_s);
        if let Some(trace) = self.figures.last_step(peers) {
            self.ledger.run().write_last_step(&trace)?;
        }
        self.ledger.run().write_summary(&summary)?;
        match self.unsaved.take() {
            Some(error) => Err(error),
            None => Ok(summary),
        }
    }
}
