//! What a run keeps on the broker's disk: its directory, and its checkpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use fusionllm_compress::Codec;
use fusionllm_graph::{HostTensor, TensorType};
use fusionllm_plan::{Optimizer, PeerId, PeerLoad, Plan};
use fusionllm_protocol::{PassReport, StepRecord, TrainingProgress};
use fusionllm_transport::Ticket;

use crate::NodeError;
use crate::checkpoint::{Checkpoint, Checkpoints, Part, State};
use crate::config::{Data, Family, Job};
use crate::data::Dataset;
use crate::export::config_json;
use crate::keeper::{Inbox, Keeper, Kept, Seal};
use crate::model::Model;
use crate::run_dir::{LinkSummary, PeerSummary, RunDir, Spectrum, StepMetrics, Summary};

/// Where a run leaves what it did, and where it goes on from.
pub(crate) struct Store {
    run: RunDir,
    keeper: Keeper,
    resumed: Option<Checkpoint>,
    steps: Vec<Step>,
    /// The metrics of a step that a validation is to follow.
    pending: Option<StepMetrics>,
    /// By step: what is to be said of codecs.
    codecs: BTreeMap<u64, Vec<String>>,
    started: Instant,
}

/// What the summary needs of a step.
struct Step {
    loss: f64,
    step_s: f64,
    peers: Vec<PassReport>,
}

/// What the summary says of a peer besides its passes.
pub(crate) struct PeerFacts {
    pub(crate) name: String,
    pub(crate) backend: String,
    pub(crate) operators: usize,
    pub(crate) predicted: Option<PeerLoad>,
    /// Bytes of the tensors it sends to each peer in a training step, before any codec.
    pub(crate) sends: BTreeMap<PeerId, u64>,
}

/// What users call that which a link's tensors go through.
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
pub(crate) fn run_of(checkpoint: &Path) -> Option<&Path> {
    let checkpoints = checkpoint.parent()?;
    (checkpoints.file_name()? == "checkpoints").then(|| checkpoints.parent())?
}

/// Names and types of what a checkpoint holds: parameters and buffers, and the optimiser's state of what is trained.
fn saved_tensors(model: &Model, optimizer: Optimizer) -> [Vec<(String, TensorType)>; 2] {
    let graph = &model.forward;
    let named = |v| (graph.value(v).name.clone(), graph.ty(v).clone());
    let state = graph.parameters().chain(graph.buffers()).map(named).collect();
    let slots = model.train.gradients.iter().flat_map(|g| {
        let (name, ty) = named(g.parameter);
        optimizer.slots().iter().map(move |slot| (format!("{name}.{slot}"), ty.clone()))
    });
    [state, slots.collect()]
}

/// Refuses to go on from a checkpoint of another model, of other data, or at the end of the run.
pub(crate) fn check(checkpoint: &Checkpoint, job: &Job, data: &Dataset, model: &Model) -> Result<(), NodeError> {
    let [parameters, slots] = saved_tensors(model, job.train.optimizer.update_rule());
    checkpoint.check(Part::Model, &parameters)?;
    checkpoint.check(Part::Optimizer, &slots)?;
    let (state, path) = (checkpoint.state(), checkpoint.path().display());
    if state.data != data.digest() {
        return Err(NodeError::Input(format!(
            "{path}: the data have changed since; a run goes on with the batches it would have drawn\n  hint: restore the files, or start a new run from its weights with model.weights"
        )));
    }
    if state.seed != job.train.seed {
        return Err(NodeError::Input(format!(
            "{path}: the run's seed was {}, not {}\n  hint: leave train.seed as it was",
            state.seed, job.train.seed
        )));
    }
    if state.step >= job.train.steps {
        return Err(NodeError::Input(format!(
            "{path}: {} steps are done already, and the job asks for {}\n  hint: ask for more with --steps",
            state.step, job.train.steps
        )));
    }
    Ok(())
}

impl Store {
    /// A new run in `directory` (or a fresh one under `runs/`), or one that goes on from a checkpoint: in its run's directory, or as a new run in
    /// `directory`. `kept` is told what becomes of its checkpoints.
    pub(crate) fn open(
        directory: Option<&Path>,
        resumed: Option<Checkpoint>,
        job: &Job,
        kept: impl Fn(Kept) + Send + 'static,
    ) -> Result<Self, NodeError> {
        let toml = job.to_toml().map_err(|e| NodeError::Input(e.to_string()))?;
        let run = match (directory, &resumed, resumed.as_ref().and_then(|c| run_of(c.path()))) {
            (None, Some(checkpoint), Some(run)) => {
                let run = RunDir::resume(run, checkpoint.state().step)?;
                run.write_job(&toml)?;
                run
            }
            _ => RunDir::create(directory, &toml)?,
        };
        let keeper = Keeper::start(Checkpoints::new(run.checkpoints()), kept)?;
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
    pub(crate) fn directory(&self) -> &Path {
        self.run.path()
    }

    pub(crate) fn ticket(&self, ticket: &Ticket) -> Result<(), NodeError> {
        Ok(self.run.write_ticket(&ticket.to_string())?)
    }

    /// All joiners are there; the ticket is of no more use.
    pub(crate) fn ticket_used(&self) -> Result<(), NodeError> {
        Ok(self.run.remove_ticket()?)
    }

    /// The checkpoint this run goes on from.
    pub(crate) fn resumed(&self) -> Option<&Checkpoint> {
        self.resumed.as_ref()
    }

    /// Where this run starts.
    pub(crate) fn start(&self) -> TrainingProgress {
        let state = self.resumed.as_ref().map(Checkpoint::state);
        state.map_or_else(TrainingProgress::default, |s| TrainingProgress { step: s.step, updates: s.updates })
    }

    /// A tensor to go on from.
    pub(crate) fn saved(&self, name: &str, slot: Option<&str>) -> Result<Option<HostTensor>, NodeError> {
        let Some(checkpoint) = &self.resumed else { return Ok(None) };
        Ok(Some(match slot {
            None => checkpoint.read(Part::Model, name)?,
            Some(slot) => checkpoint.read(Part::Optimizer, &format!("{name}.{slot}"))?,
        }))
    }

    /// Where tensors of snapshots go.
    pub(crate) fn inbox(&self) -> Inbox {
        self.keeper.inbox()
    }

    /// Tensors of a step's snapshots are to come.
    pub(crate) fn begin_checkpoint(&self, step: u64, model: &Model, optimizer: Optimizer) {
        self.keeper.begin(step, saved_tensors(model, optimizer));
    }

    /// All came.
    pub(crate) fn commit(
        &self,
        position: TrainingProgress,
        job: &Job,
        data: &Dataset,
        model: &Model,
    ) -> Result<(), NodeError> {
        let mut extra = Vec::new();
        if let (Family::Gpt2(config), Data::Text(text)) = (&job.model.family, &job.data) {
            // So that `transformers` loads a checkpoint as it stands.
            let config = config_json(config, Some(text.tokenizer));
            extra.push(("config.json", format!("{config:#}").into_bytes()));
        }
        let job_file = job.to_toml().map_err(|e| NodeError::Input(e.to_string()))?;
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

    /// The job, with what was chosen for it.
    pub(crate) fn job(&self, job: &Job) -> Result<(), NodeError> {
        Ok(self.run.write_job(&job.to_toml().map_err(|e| NodeError::Input(e.to_string()))?)?)
    }

    /// The text of the plan's file.
    pub(crate) fn plan(&self, json: &str) -> Result<(), NodeError> {
        Ok(self.run.write_plan(json)?)
    }

    /// What [`Self::plan`] wrote last.
    pub(crate) fn plan_text(&self) -> Result<String, NodeError> {
        Ok(self.run.read_plan()?)
    }

    /// Something is to be said of codecs with a step that is to come.
    pub(crate) fn codecs(&mut self, step: u64, lines: Vec<String>) {
        self.codecs.entry(step).or_default().extend(lines);
    }

    /// A step of this plan is over; its line waits if a validation is to follow.
    pub(crate) fn step(
        &mut self,
        record: &StepRecord,
        plan: &Plan,
        targets_per_s: f64,
        validated: bool,
    ) -> Result<(), NodeError> {
        self.flush()?;
        let name = |p: usize| plan.peers.get(p).cloned().unwrap_or_default();
        let spectra = record.peers.iter().enumerate().flat_map(|(from, report)| {
            let spectrum = move |(to, before, after): &(PeerId, f64, f64)| Spectrum {
                from: name(from),
                to: name(to.0 as usize),
                before: *before,
                after: *after,
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

    pub(crate) fn evaluated(&mut self, step: u64, val_loss: f64, val_accuracy: f64) -> Result<(), NodeError> {
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

    /// The run is over: writes its summary.
    pub(crate) fn summarise(
        &mut self,
        plan: &Plan,
        peers: &[PeerFacts],
        predicted_step_s: Option<f64>,
        position: TrainingProgress,
    ) -> Result<Summary, NodeError> {
        self.flush()?;
        // The first steps warm caches and allocators.
        let steady = if self.steps.len() > 4 { &self.steps[2..] } else { &self.steps[..] };
        let count = self.steps.len().max(1) as u64;
        let mut links: BTreeMap<(PeerId, PeerId), u64> = BTreeMap::new();
        for step in &self.steps {
            for (from, report) in step.peers.iter().enumerate() {
                for (to, bytes) in &report.sent {
                    *links.entry((PeerId(from as u32), *to)).or_default() += bytes;
                }
            }
        }
        // Sums over whole steps: a link is as fast as it was on average while it was busy.
        let mut arrivals: BTreeMap<(PeerId, PeerId), (u64, f64)> = BTreeMap::new();
        for step in steady {
            for (to, report) in step.peers.iter().enumerate() {
                for (from, bytes, seconds) in &report.received {
                    let (sum, time) = arrivals.entry((*from, PeerId(to as u32))).or_default();
                    *sum += bytes;
                    *time += seconds;
                }
            }
        }
        let name = |p: PeerId| peers.get(p.0 as usize).map_or_else(|| "broker".into(), |p| p.name.clone());
        let in_steps: f64 = self.steps.iter().map(|s| s.step_s).sum();
        let summary = Summary {
            steps: position.step,
            loss_first: self.loss_first(),
            loss_last: self.steps.last().and_then(|s| finite(s.loss)),
            median_step_s: median(steady.iter().map(|s| s.step_s).collect()),
            predicted_step_s,
            bytes_sent_per_step: Some(links.values().sum::<u64>() / count),
            training_overhead_ratio: finite(in_steps / self.started.elapsed().as_secs_f64()),
            scheduler: plan.scheduler.clone(),
            schedule: plan.schedule.name().into(),
            micro_batches: plan.micro_batches,
            compression: plan.compression.name.to_string(),
            peers: peers
                .iter()
                .enumerate()
                .map(|(i, p)| PeerSummary {
                    name: p.name.clone(),
                    backend: p.backend.clone(),
                    operators: p.operators as u64,
                    compute_s: median(steady.iter().filter_map(|s| s.peers.get(i)).map(|r| r.compute_s).collect()),
                    predicted_compute_s: p.predicted.map(|l| l.compute_s),
                    codec_s: median(steady.iter().filter_map(|s| s.peers.get(i)).map(|r| r.codec_s).collect()),
                    peak_memory_bytes: self.steps.iter().filter_map(|s| s.peers.get(i)).map(|r| r.peak_bytes).max(),
                    resident_memory_bytes: self
                        .steps
                        .last()
                        .and_then(|s| s.peers.get(i))
                        .map(|r| r.resident_bytes)
                        .filter(|b| *b > 0),
                    predicted_memory_bytes: p.predicted.map(|l| l.peak_bytes),
                })
                .collect(),
            links: links
                .into_iter()
                .map(|((from, to), bytes)| LinkSummary {
                    from: name(from),
                    to: name(to),
                    codec: codec_name(plan, from, to).into(),
                    ratio: peers
                        .get(from.0 as usize)
                        .and_then(|p| finite((p.sends.get(&to)? * count) as f64 / bytes as f64)),
                    relative_error: median(
                        steady
                            .iter()
                            .filter_map(|s| s.peers.get(from.0 as usize))
                            .flat_map(|r| r.errors.iter().filter(|e| e.0 == to).map(|e| e.1))
                            .collect(),
                    ),
                    bytes_per_step: Some(bytes / count),
                    measured_bytes_per_s: arrivals.get(&(from, to)).and_then(|(bytes, s)| finite(*bytes as f64 / s)),
                })
                .collect(),
        };
        self.run.write_summary(&summary)?;
        Ok(summary)
    }
}
