//! What a run keeps on the broker's disk: its directory, and its checkpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use fusionllm_graph::HostTensor;
use fusionllm_plan::{Optimizer, PeerId, Plan};
use fusionllm_protocol::{PassReport, Position, StepRecord};
use fusionllm_transport::Ticket;

use crate::NodeError;
use crate::config::Job;
use crate::data::Dataset;
use crate::model::Model;
use crate::run_dir::{LinkSummary, PeerSummary, RunDir, StepMetrics, Summary};

/// Where a run leaves what it did, and where it goes on from.
pub struct Store {
    run: RunDir,
    steps: Vec<Step>,
    /// The metrics of a step that a validation is to follow.
    pending: Option<StepMetrics>,
    started: Instant,
}

pub(crate) struct Resumed;

impl Resumed {
    pub(crate) fn position(&self) -> Position {
        Position::default()
    }

    pub(crate) fn read(&self, _name: &str, _slot: Option<&str>) -> Result<HostTensor, NodeError> {
        Err(NodeError::State(String::new()))
    }
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

impl Store {
    /// A new run in `directory` (or a fresh one under `runs/`).
    pub fn create(directory: Option<&Path>, job: &Job) -> Result<Self, NodeError> {
        let toml = job.to_toml().map_err(|e| NodeError::Input(e.to_string()))?;
        let run = RunDir::create(directory, &toml).map_err(|e| NodeError::Disk(e.to_string()))?;
        Ok(Self { run, steps: Vec::new(), pending: None, started: Instant::now() })
    }

    /// The run's directory.
    pub fn directory(&self) -> &Path {
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
    pub(crate) fn resumed(&self) -> Option<&Resumed> {
        None
    }

    /// Whether the run takes checkpoints.
    pub(crate) fn saves(&self) -> bool {
        false
    }

    pub(crate) fn check_data(&self, _data: &Dataset) -> Result<(), NodeError> {
        Ok(())
    }

    pub(crate) fn expects(&self, _step: u64) -> bool {
        false
    }

    pub(crate) fn save(&mut self, _name: &str, _slot: Option<&str>, _tensor: &HostTensor) -> Result<(), NodeError> {
        Ok(())
    }

    pub(crate) fn begin_checkpoint(
        &mut self,
        _step: u64,
        _model: &Model,
        _optimizer: Optimizer,
    ) -> Result<(), NodeError> {
        Ok(())
    }

    pub(crate) fn commit(&mut self, _position: Position, _data: &Dataset) -> Result<(), NodeError> {
        Ok(())
    }

    pub(crate) fn plan(&self, plan: &Plan) -> Result<(), NodeError> {
        Ok(self.run.write_plan(&plan.to_json()?)?)
    }

    /// A step is over; its line waits if a validation is to follow.
    pub(crate) fn step(&mut self, record: &StepRecord, targets_per_s: f64, validated: bool) -> Result<(), NodeError> {
        self.flush()?;
        let metrics = StepMetrics {
            step: record.step,
            loss: finite(record.loss),
            step_s: record.step_s,
            tokens_per_s: targets_per_s,
            bytes_sent: record.bytes_sent,
            lr: record.lr,
            grad_norm: finite(record.grad_norm),
            skipped: !record.applied,
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
        position: Position,
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
        let name = |p: PeerId| peers.get(p.0 as usize).map_or_else(|| "broker".into(), |p| p.name.clone());
        let in_steps: f64 = self.steps.iter().map(|s| s.step_s).sum();
        let summary = Summary {
            steps: position.step,
            loss_first: self.steps.first().and_then(|s| finite(s.loss)),
            loss_last: self.steps.last().and_then(|s| finite(s.loss)),
            median_step_s: median(steady.iter().map(|s| s.step_s).collect()),
            predicted_step_s: None,
            bytes_sent_per_step: Some(links.values().sum::<u64>() / count),
            training_overhead_ratio: finite(in_steps / self.started.elapsed().as_secs_f64()),
            scheduler: plan.scheduler.clone(),
            compression: "none".into(),
            peers: peers
                .iter()
                .enumerate()
                .map(|(i, p)| PeerSummary {
                    name: p.name.clone(),
                    backend: p.backend.clone(),
                    operators: p.operators as u64,
                    compute_s: median(steady.iter().filter_map(|s| s.peers.get(i)).map(|r| r.compute_s).collect()),
                    peak_memory_bytes: self.steps.iter().filter_map(|s| s.peers.get(i)).map(|r| r.peak_bytes).max(),
                    predicted_memory_bytes: None,
                })
                .collect(),
            links: links
                .into_iter()
                .map(|((from, to), bytes)| LinkSummary {
                    from: name(from),
                    to: name(to),
                    codec: "none".into(),
                    ratio: Some(1.0),
                    bytes_per_step: Some(bytes / count),
                    measured_bytes_per_s: None,
                })
                .collect(),
        };
        self.run.write_summary(&summary)?;
        Ok(summary)
    }
}
