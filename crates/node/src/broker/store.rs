//! What a run keeps on the broker's disk: its directory, and its checkpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use fusionllm_compress::Codec;
use fusionllm_graph::HostTensor;
use fusionllm_plan::{Optimizer, PeerId, PeerLoad, Plan};
use fusionllm_protocol::{CodecSpectrum, PassReport, StepRecord, TrainingProgress};
use fusionllm_transport::Ticket;

use super::keeper::{Inbox, Keeper, KeeperEvent, SavedTypes, Seal};
use crate::NodeError;
use crate::config::{Family, Job};
use crate::data::{Data, Dataset};
use crate::files::checkpoint::{Checkpoint, Checkpoints, Part, State};
use crate::files::run_dir::{LinkSummary, PeerSummary, RunDir, Spectrum, StepMetrics, Summary};
use crate::model::Model;
use crate::model::export::config_json;

/// The run directory, its checkpoints, and the figures of the steps so far.
pub(super) struct Store {
    run: RunDir,
    keeper: Keeper,
    resumed: Option<Checkpoint>,
    steps: Vec<Step>,
    /// The metrics of a step that a validation follows.
    pending: Option<StepMetrics>,
    /// Sentences about codecs, by the step that they are reported with.
    codecs: BTreeMap<u64, Vec<String>>,
    started: Instant,
}

/// A step's figures that the summary needs.
struct Step {
    loss: f64,
    step_s: f64,
    peers: Vec<PassReport>,
}

/// A peer's figures in the summary that its passes do not report.
pub(super) struct PeerFacts {
    pub(super) name: String,
    pub(super) backend: String,
    pub(super) operators: usize,
    pub(super) predicted: Option<PeerLoad>,
    /// Bytes of the tensors it sends to each peer in a training step, before any codec.
    pub(super) sends: BTreeMap<PeerId, u64>,
}

/// The name of a link's codec, as the job file writes it.
fn codec_name(plan: &Plan, from: PeerId, to: PeerId) -> &'static str {
    match plan.codec(from, to) {
        Codec::TopK(_) => plan.compression.name.name(),
        codec => codec.name(),
    }
}

fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// The run directory that a checkpoint stands in.
pub(super) fn run_of(checkpoint: &Path) -> Option<&Path> {
    let checkpoints = checkpoint.parent()?;
    (checkpoints.file_name()? == "checkpoints").then(|| checkpoints.parent())?
}

/// Names and types of a checkpoint's tensors.
fn saved_tensors(model: &Model, optimizer: Optimizer) -> SavedTypes {
    let graph = &model.forward;
    let named = |v| (graph.value(v).name.clone(), graph.ty(v).clone());
    let slots = model.train.gradients.iter().flat_map(|g| {
        let (name, ty) = named(g.parameter);
        optimizer.slots().iter().map(move |slot| (format!("{name}.{slot}"), ty.clone()))
    });
    let optimizer = slots.collect();
    SavedTypes { model: graph.parameters().chain(graph.buffers()).map(named).collect(), optimizer }
}

/// Refuses to resume from a checkpoint of another model or other data, or one after the job's last step.
pub(super) fn check(checkpoint: &Checkpoint, job: &Job, data: &Dataset, model: &Model) -> Result<(), NodeError> {
    let expected = saved_tensors(model, job.train.optimizer.update_rule());
    checkpoint.check(Part::Model, &expected.model)?;
    checkpoint.check(Part::Optimizer, &expected.optimizer)?;
    let (state, path) = (checkpoint.state(), checkpoint.path().display());
    if state.data != data.digest() {
        return Err(NodeError::input_with_hint(
            format!("{path}: the data have changed since; a run goes on with the batches it would have drawn"),
            "restore the files, or start a new run from its weights with model.weights",
        ));
    }
    if state.seed != job.train.seed {
        return Err(NodeError::input_with_hint(
            format!("{path}: the run's seed was {}, not {}", state.seed, job.train.seed),
            "leave train.seed as it was",
        ));
    }
    if state.step >= job.train.steps {
        return Err(NodeError::input_with_hint(
            format!("{path}: {} steps are done already, and the job asks for {}", state.step, job.train.steps),
            "ask for more with --steps",
        ));
    }
    Ok(())
}

impl Store {
    /// Opens a run. A new one goes to `directory`, or to a fresh directory under `runs/`. A resumed one continues in
    /// the checkpoint's run directory, unless `directory` asks for a new run.
    pub(super) fn open(
        directory: Option<&Path>,
        resumed: Option<Checkpoint>,
        job: &Job,
        on_event: impl Fn(KeeperEvent) + Send + 'static,
    ) -> Result<Self, NodeError> {
        let toml = job.to_toml()?;
        let run = match (directory, &resumed, resumed.as_ref().and_then(|c| run_of(c.path()))) {
            (None, Some(checkpoint), Some(run)) => {
                let run = RunDir::resume(run, checkpoint.state().step)?;
                run.write_job(&toml)?;
                run
            }
            _ => RunDir::create(directory, &toml)?,
        };
        let keeper = Keeper::start(Checkpoints::new(run.checkpoints()), on_event)?;
        Ok(Self {
            run,
            keeper,
            resumed,
            steps: Vec::new(),
            pending: None,
            codecs: BTreeMap::new(),
            started: Instant::now(),
        })
    }

    /// The run's directory.
    pub(super) fn directory(&self) -> &Path {
        self.run.path()
    }

    pub(super) fn ticket(&self, ticket: &Ticket) -> Result<(), NodeError> {
        Ok(self.run.write_ticket(&ticket.to_string())?)
    }

    /// Removes the ticket once all joiners are there.
    pub(super) fn ticket_used(&self) -> Result<(), NodeError> {
        Ok(self.run.remove_ticket()?)
    }

    /// The checkpoint that this run resumes.
    pub(super) fn resumed(&self) -> Option<&Checkpoint> {
        self.resumed.as_ref()
    }

    /// The position at which this run starts.
    pub(super) fn start(&self) -> TrainingProgress {
        let state = self.resumed.as_ref().map(Checkpoint::state);
        state.map_or_else(TrainingProgress::default, |s| TrainingProgress { step: s.step, updates: s.updates })
    }

    /// A tensor of the resumed checkpoint, if the run resumes one.
    pub(super) fn saved(&self, name: &str, slot: Option<&str>) -> Result<Option<HostTensor>, NodeError> {
        let Some(checkpoint) = &self.resumed else { return Ok(None) };
        Ok(Some(match slot {
            None => checkpoint.read(Part::Model, name)?,
            Some(slot) => checkpoint.read(Part::Optimizer, &format!("{name}.{slot}"))?,
        }))
    }

    /// Where snapshot tensors go.
    pub(super) fn inbox(&self) -> Inbox {
        self.keeper.inbox()
    }

    /// Opens the checkpoint of a step, before its first tensor.
    pub(super) fn begin_checkpoint(&self, step: u64, model: &Model, optimizer: Optimizer) {
        self.keeper.begin(step, saved_tensors(model, optimizer));
    }

    /// Completes the checkpoint, after its last tensor.
    pub(super) fn commit(
        &self,
        position: TrainingProgress,
        job: &Job,
        data: &Dataset,
        model: &Model,
    ) -> Result<(), NodeError> {
        let mut extra = Vec::new();
        if let (Family::Gpt2(config), Data::Text(text)) = (&job.model.family, &job.data) {
            // With this file, `transformers` loads the checkpoint directory.
            let config = config_json(config, Some(text.tokenizer));
            extra.push(("config.json", format!("{config:#}").into_bytes()));
        }
        let job_file = job.to_toml()?;
        extra.push(("job.toml", job_file.into_bytes()));
        let state = State {
            step: position.step,
            updates: position.updates,
            samples: position.step * job.train.batch as u64,
            seed: job.train.seed,
            graph: model.forward.digest(),
            data: data.digest().to_owned(),
            loss_first: self.loss_first(),
        };
        self.keeper.commit(Seal { state, extra, keep: job.checkpoint.keep });
        Ok(())
    }

    fn loss_first(&self) -> Option<f64> {
        match &self.resumed {
            Some(checkpoint) => checkpoint.state().loss_first,
            None => self.steps.first().and_then(|s| finite(s.loss)),
        }
    }

    /// Writes the job with the planner's choices.
    pub(super) fn job(&self, job: &Job) -> Result<(), NodeError> {
        Ok(self.run.write_job(&job.to_toml()?)?)
    }

    /// Writes the plan file.
    pub(super) fn plan(&self, json: &str) -> Result<(), NodeError> {
        Ok(self.run.write_plan(json)?)
    }

    /// Reads what [`Self::plan`] wrote last.
    pub(super) fn plan_text(&self) -> Result<String, NodeError> {
        Ok(self.run.read_plan()?)
    }

    /// Notes sentences about codecs for the metrics of a coming step.
    pub(super) fn codecs(&mut self, step: u64, lines: Vec<String>) {
        self.codecs.entry(step).or_default().extend(lines);
    }

    /// Records a finished step. Its line waits for the validation if one follows.
    pub(super) fn step(
        &mut self,
        record: &StepRecord,
        plan: &Plan,
        targets_per_s: f64,
        validated: bool,
    ) -> Result<(), NodeError> {
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
            tokens_per_s: targets_per_s,
            bytes_sent: record.bytes_sent,
            lr: record.lr,
            grad_norm: finite(record.grad_norm),
            skipped: !record.applied,
            codecs: self.codecs.remove(&record.step).unwrap_or_default(),
            spectra: spectra.collect(),
            val_loss: None,
            val_accuracy: None,
        };
        self.steps.push(Step { loss: record.loss, step_s: record.step_s, peers: record.peers.clone() });
        self.pending = Some(metrics);
        if validated { Ok(()) } else { self.flush() }
    }

    pub(super) fn evaluated(&mut self, step: u64, val_loss: f64, val_accuracy: f64) -> Result<(), NodeError> {
        if let Some(metrics) = self.pending.as_mut().filter(|m| m.step == step) {
            metrics.val_loss = finite(val_loss);
            metrics.val_accuracy = finite(val_accuracy);
        }
        self.flush()
    }

    fn flush(&mut self) -> Result<(), NodeError> {
        match self.pending.take() {
            Some(metrics) => Ok(self.run.record(&metrics)?),
            None => Ok(()),
        }
    }

    /// Writes the summary at the end of the run.
    pub(super) fn summarise(
        &mut self,
        plan: &Plan,
        peers: &[PeerFacts],
        predicted_step_s: Option<f64>,
        position: TrainingProgress,
    ) -> Result<Summary, NodeError> {
        self.flush()?;
        // The first steps warm caches and allocators.
        let steady = if self.steps.len() > 4 { &self.steps[2..] } else { &self.steps[..] };
        let links = self.links(steady, plan, peers);
        let in_steps: f64 = self.steps.iter().map(|s| s.step_s).sum();
        let sent: u64 = self.sent().values().sum();
        let summary = Summary {
            steps: position.step,
            loss_first: self.loss_first(),
            loss_last: self.steps.last().and_then(|s| finite(s.loss)),
            median_step_s: median(steady.iter().map(|s| s.step_s).collect()),
            predicted_step_s,
            bytes_sent_per_step: Some(sent / self.steps.len().max(1) as u64),
            training_overhead_ratio: finite(in_steps / self.started.elapsed().as_secs_f64()),
            scheduler: plan.scheduler.clone(),
            schedule: plan.schedule.name().into(),
            micro_batches: plan.micro_batches,
            compression: plan.compression.name.to_string(),
            peers: peers.iter().enumerate().map(|(i, p)| self.peer(steady, i, p)).collect(),
            links,
        };
        self.run.write_summary(&summary)?;
        Ok(summary)
    }

    fn peer(&self, steady: &[Step], index: usize, facts: &PeerFacts) -> PeerSummary {
        let reports = |steps: &[Step], figure: fn(&PassReport) -> f64| {
            steps.iter().filter_map(|s| s.peers.get(index)).map(figure).collect::<Vec<_>>()
        };
        let last = self.steps.last().and_then(|s| s.peers.get(index));
        PeerSummary {
            name: facts.name.clone(),
            backend: facts.backend.clone(),
            operators: facts.operators as u64,
            compute_s: median(reports(steady, |r| r.compute_s)),
            predicted_compute_s: facts.predicted.map(|l| l.compute_s),
            codec_s: median(reports(steady, |r| r.codec_s)),
            peak_memory_bytes: self.steps.iter().filter_map(|s| s.peers.get(index)).map(|r| r.peak_bytes).max(),
            resident_memory_bytes: last.map(|r| r.resident_bytes).filter(|b| *b > 0),
            predicted_memory_bytes: facts.predicted.map(|l| l.peak_bytes),
        }
    }

    /// Bytes that each link carried in all steps.
    fn sent(&self) -> BTreeMap<(PeerId, PeerId), u64> {
        let mut sent = BTreeMap::new();
        for step in &self.steps {
            for (from, report) in step.peers.iter().enumerate() {
                for s in &report.sent {
                    *sent.entry((PeerId(from as u32), s.to)).or_default() += s.bytes;
                }
            }
        }
        sent
    }

    fn links(&self, steady: &[Step], plan: &Plan, peers: &[PeerFacts]) -> Vec<LinkSummary> {
        let count = self.steps.len().max(1) as u64;
        // A link's rate is its bytes over the time that it was busy, summed over whole steps.
        let mut arrivals: BTreeMap<(PeerId, PeerId), Arrivals> = BTreeMap::new();
        for step in steady {
            for (to, report) in step.peers.iter().enumerate() {
                for r in &report.received {
                    let sum = arrivals.entry((r.from, PeerId(to as u32))).or_default();
                    sum.bytes += r.bytes;
                    sum.seconds += r.seconds;
                }
            }
        }
        let facts = |p: PeerId| peers.get(p.0 as usize);
        let name = |p: PeerId| facts(p).map_or_else(|| "broker".into(), |p| p.name.clone());
        let summary = |((from, to), bytes): ((PeerId, PeerId), u64)| {
            let before = facts(from).and_then(|p| p.sends.get(&to)).map(|b| b * count);
            let reports = steady.iter().filter_map(|s| s.peers.get(from.0 as usize));
            let errors = reports.flat_map(|r| r.errors.iter().filter(|e| e.to == to).map(|e| e.relative_error));
            LinkSummary {
                from: name(from),
                to: name(to),
                codec: codec_name(plan, from, to).into(),
                ratio: before.and_then(|before| finite(before as f64 / bytes as f64)),
                relative_error: median(errors.collect()),
                bytes_per_step: Some(bytes / count),
                measured_bytes_per_s: arrivals.get(&(from, to)).and_then(|a| finite(a.bytes as f64 / a.seconds)),
            }
        };
        self.sent().into_iter().map(summary).collect()
    }
}

/// Payload of large messages, and the time that they took to arrive.
#[derive(Default)]
struct Arrivals {
    bytes: u64,
    seconds: f64,
}
