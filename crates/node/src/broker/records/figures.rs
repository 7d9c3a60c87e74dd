//! The figures of a run that its summary needs. They are bounded, however long the run is.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use fusionllm_events::IncidentSummary;
use fusionllm_graph::units::counted;
use fusionllm_plan::{Activity, PeerLoad, Plan};
use fusionllm_program::PeerId;
use fusionllm_protocol::{PassReport, PassSpan, ReceivedMessage, StepRecord, TrainingProgress};
use fusionllm_workspace::run_dir::{LinkSummary, PeerSummary, PeerTrace, StepTrace, Summary};

use crate::NodeError;

/// The last steps whose durations count for the median.
const MAX_STEPS: usize = 10_000;

/// The last steps that tell how long a step takes at present.
const RECENT_STEPS: usize = 20;

/// The last steps whose reports are kept.
const MAX_REPORTS: usize = 256;

/// Incidents in the summary. A run with more has other worries.
const MAX_INCIDENTS: usize = 1000;

/// A run whose last steps were all skipped has failed, if they are at least this many. The model may then hold numbers
/// that are not finite.
const LAST_SKIPPED: u64 = 10;

/// The first steps of a generation warm caches and allocators.
const WARM_UP: u64 = 2;

/// Figures of the steps so far.
pub(crate) struct Figures {
    started: Instant,
    loss_first: Option<f64>,
    /// The step, loss and seconds of each of the last steps.
    steps: VecDeque<(u64, f64, f64)>,
    /// Steps whose update was applied, and steps that were skipped. Those that were done again count each time.
    applied: u64,
    skipped: u64,
    /// Steps that were skipped since the last one that was applied.
    last_skipped: u64,
    /// The last message about a number that is not finite: the peer that made it, and advice.
    poison: Option<(String, String)>,
    /// Seconds of all steps that count.
    in_steps_s: f64,
    /// Seconds until the first step began.
    start_s: Option<f64>,
    incidents: Vec<IncidentSummary>,
    generation: OfGeneration,
}

/// Figures of the present generation, whose peers have the numbers of its plan.
#[derive(Default)]
struct OfGeneration {
    steps: u64,
    /// The peers' reports of the last steps after the first ones.
    reports: VecDeque<Vec<PassReport>>,
    /// Bytes that each link carried in all steps.
    sent: BTreeMap<(PeerId, PeerId), u64>,
    /// The activities and arrivals of each peer in the last step.
    last: Option<LastStep>,
    /// Most bytes allocated by each peer.
    peaks: BTreeMap<usize, u64>,
}

/// The last step, as the peers report it.
struct LastStep {
    step: u64,
    step_s: f64,
    peers: Vec<(Vec<PassSpan>, Vec<ReceivedMessage>)>,
}

/// The figures of a peer that the summary has and that its passes do not report.
pub(crate) struct PeerFacts {
    pub(crate) name: String,
    pub(crate) backend: String,
    pub(crate) device: String,
    pub(crate) operators: usize,
    pub(crate) predicted: Option<PeerLoad>,
    /// Seconds that a message from the broker is on its way, where that is known.
    pub(crate) latency_s: f64,
    /// Bytes of the tensors it sends to each peer in a training step, before any codec.
    pub(crate) sends: BTreeMap<PeerId, u64>,
}

pub(crate) fn finite(x: f64) -> Option<f64> {
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

impl Figures {
    /// Figures of a run that starts now. `loss_first` is the first loss of the run that it resumes.
    pub(crate) fn new(loss_first: Option<f64>) -> Self {
        Self {
            started: Instant::now(),
            loss_first,
            steps: VecDeque::new(),
            applied: 0,
            skipped: 0,
            last_skipped: 0,
            poison: None,
            in_steps_s: 0.0,
            start_s: None,
            incidents: Vec::new(),
            generation: OfGeneration::default(),
        }
    }

    /// Takes over the figures that another broker of this run had.
    pub(crate) fn take_over(&mut self, loss_first: Option<f64>, incidents: &[IncidentSummary]) {
        self.loss_first = loss_first.or(self.loss_first);
        self.incidents = incidents.to_vec();
    }

    pub(crate) fn loss_first(&self) -> Option<f64> {
        self.loss_first
    }

    /// The loss of the last step, and the median seconds of the last steps.
    pub(crate) fn last(&self) -> (Option<f64>, Option<f64>) {
        let loss = self.steps.back().and_then(|(_, loss, _)| finite(*loss));
        (loss, median(self.steps.iter().rev().take(RECENT_STEPS).map(|(_, _, s)| *s).collect()))
    }

    pub(crate) fn incidents(&self) -> &[IncidentSummary] {
        &self.incidents
    }

    pub(crate) fn begin_generation(&mut self) {
        self.generation = OfGeneration::default();
    }

    pub(crate) fn incident(&mut self, incident: IncidentSummary) {
        if self.incidents.len() < MAX_INCIDENTS {
            self.incidents.push(incident);
        }
    }

    pub(crate) fn step(&mut self, record: &StepRecord) {
        if self.loss_first.is_none() {
            self.loss_first = finite(record.loss);
        }
        self.in_steps_s += record.step_s;
        match record.applied {
            true => (self.applied, self.last_skipped) = (self.applied + 1, 0),
            false => (self.skipped, self.last_skipped) = (self.skipped + 1, self.last_skipped + 1),
        }
        self.start_s.get_or_insert(self.started.elapsed().as_secs_f64() - record.step_s);
        self.steps.push_back((record.step, record.loss, record.step_s));
        if self.steps.len() > MAX_STEPS {
            self.steps.pop_front();
        }
        let g = &mut self.generation;
        g.steps += 1;
        for (from, report) in record.peers.iter().enumerate() {
            for s in &report.sent {
                *g.sent.entry((PeerId(from as u32), s.to)).or_default() += s.bytes;
            }
            let peak = g.peaks.entry(from).or_default();
            *peak = (*peak).max(report.peak_bytes);
        }
        let mut reports = record.peers.clone();
        // Only those of the last step are kept, because they are long.
        let take = |r: &mut PassReport| (std::mem::take(&mut r.spans), std::mem::take(&mut r.arrivals));
        let peers = reports.iter_mut().map(take).collect();
        g.last = Some(LastStep { step: record.step, step_s: record.step_s, peers });
        g.reports.push_back(reports);
        // A short generation has no steps but its first ones.
        if g.steps == 2 * WARM_UP + 1 {
            g.reports.drain(..WARM_UP as usize);
        }
        if g.reports.len() > MAX_REPORTS {
            g.reports.pop_front();
        }
    }

    /// Training goes back, so the steps after this one do not count.
    pub(crate) fn rewind(&mut self, step: u64) {
        while let Some((_, _, step_s)) = self.steps.pop_back_if(|(s, ..)| *s > step) {
            self.in_steps_s -= step_s;
        }
    }

    pub(crate) fn poisoned(&mut self, what: String, advice: &str) {
        self.poison = Some((what, advice.to_owned()));
    }

    /// The error of a run of which no step was applied, or none of the last ones.
    pub(crate) fn ended_skipping(&self) -> Option<NodeError> {
        let which = match (self.applied, self.last_skipped) {
            (_, 0) => return None,
            (0, n) => {
                format!("no step was applied: the loss or a gradient was not finite in any of {}", counted(n, "step"))
            }
            (_, n) if n < LAST_SKIPPED => return None,
            (_, n) => {
                format!("the run ended without learning: the loss or a gradient was not finite in the last {n} steps")
            }
        };
        let (found, hint) = match &self.poison {
            Some((what, advice)) => (format!("; {what}"), advice.clone()),
            None => (String::new(), "look for what the model's loss cannot take in the data, such as log(0)".into()),
        };
        Some(NodeError::NothingApplied { message: which + &found, hint })
    }

    pub(crate) fn summary(
        &self,
        plan: &Plan,
        peers: &[PeerFacts],
        predicted_step_s: Option<f64>,
        position: TrainingProgress,
    ) -> Summary {
        let warm = if self.steps.len() > 4 { WARM_UP as usize } else { 0 };
        let sent: u64 = self.generation.sent.values().sum();
        Summary {
            steps: position.step,
            skipped_steps: self.skipped,
            skipped_because: self.poison.as_ref().map(|(what, advice)| format!("{what}; {advice}")),
            loss_first: self.loss_first,
            loss_last: self.steps.back().and_then(|(_, loss, _)| finite(*loss)),
            median_step_s: median(self.steps.iter().skip(warm).map(|(_, _, s)| *s).collect()),
            predicted_step_s,
            bytes_sent_per_step: Some(sent / self.generation.steps.max(1)),
            training_overhead_ratio: finite(self.in_steps_s / self.started.elapsed().as_secs_f64()),
            overhead_s: self.overhead(),
            scheduler: plan.scheduler.clone(),
            schedule: plan.schedule.name().into(),
            micro_batches: plan.micro_batches,
            compression: plan.compression.compressor.to_string(),
            peers: peers.iter().enumerate().map(|(i, p)| self.peer(i, p)).collect(),
            links: self.links(plan, peers),
            incidents: self.incidents.clone(),
        }
    }

    /// Seconds that were not spent in steps, by the cause that took them.
    fn overhead(&self) -> BTreeMap<String, f64> {
        let mut overhead: BTreeMap<String, f64> = self.start_s.map(|s| ("start".into(), s)).into_iter().collect();
        for i in &self.incidents {
            let seconds = i.detected_s + i.replanned_s + i.restored_s + i.lost_work_s;
            *overhead.entry(i.kind.clone()).or_default() += seconds;
        }
        overhead
    }

    /// A peer's figures, by its number in the plan.
    pub(crate) fn peer(&self, index: usize, facts: &PeerFacts) -> PeerSummary {
        let reports = &self.generation.reports;
        let figures = |figure: fn(&PassReport) -> f64| {
            median(reports.iter().filter_map(|peers| peers.get(index)).map(figure).collect())
        };
        let last = reports.back().and_then(|peers| peers.get(index));
        PeerSummary {
            name: facts.name.clone(),
            backend: facts.backend.clone(),
            device: facts.device.clone(),
            operators: facts.operators as u64,
            compute_s: figures(|r| r.compute_s),
            predicted_compute_s: facts.predicted.map(|l| l.compute_s),
            codec_s: figures(|r| r.codec_s),
            peak_memory_bytes: self.generation.peaks.get(&index).copied(),
            resident_memory_bytes: last.map(|r| r.resident_bytes).filter(|b| *b > 0),
            predicted_memory_bytes: facts.predicted.map(|l| l.peak_bytes),
        }
    }

    /// The activities of each peer in the last step.
    pub(crate) fn last_step(&self, peers: &[PeerFacts]) -> Option<StepTrace> {
        let LastStep { step, step_s, peers: reports } = self.generation.last.as_ref()?;
        let (step, step_s) = (*step, *step_s);
        let seconds = |us: u64| us as f64 * 1e-6;
        // A peer's clock at the moment when the broker sent the verdict, as far as the latency is known.
        let verdict = |spans: &[PassSpan], facts: &PeerFacts| {
            let end = spans.iter().rev().find(|s| s.activity == Activity::Verdict).map_or(0, |s| s.end_us);
            seconds(end) - facts.latency_s
        };
        let known = || peers.iter().zip(reports);
        let latest = known().map(|(facts, (spans, _))| verdict(spans, facts)).fold(f64::NEG_INFINITY, f64::max);
        let trace = |(facts, (spans, arrivals)): (&PeerFacts, &(Vec<PassSpan>, Vec<ReceivedMessage>))| {
            let late = latest - verdict(spans, facts);
            let at = |us| seconds(us) + late;
            PeerTrace {
                name: facts.name.clone(),
                spans: spans.iter().map(|s| (s.activity, s.micro_batch, at(s.start_us), at(s.end_us))).collect(),
                arrivals: arrivals.iter().map(|a| (a.from.0, a.bytes, at(a.start_us), at(a.end_us))).collect(),
            }
        };
        Some(StepTrace { step, step_s, peers: known().map(trace).collect() })
    }

    fn links(&self, plan: &Plan, peers: &[PeerFacts]) -> Vec<LinkSummary> {
        let count = self.generation.steps.max(1);
        // A link's rate is its bytes over the time that it was busy, summed over whole steps.
        let mut arrivals: BTreeMap<(PeerId, PeerId), Arrivals> = BTreeMap::new();
        for reports in &self.generation.reports {
            for (to, report) in reports.iter().enumerate() {
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
            let reports = self.generation.reports.iter().filter_map(|peers| peers.get(from.0 as usize));
            let errors = reports.flat_map(|r| r.errors.iter().filter(|e| e.to == to).map(|e| e.relative_error));
            LinkSummary {
                from: name(from),
                to: name(to),
                codec: plan.codec(from, to).name().into(),
                ratio: before.and_then(|before| finite(before as f64 / bytes as f64)),
                relative_error: median(errors.collect()),
                bytes_per_step: Some(bytes / count),
                measured_bytes_per_s: arrivals.get(&(from, to)).and_then(|a| finite(a.bytes as f64 / a.seconds)),
            }
        };
        self.generation.sent.iter().map(|(ends, bytes)| summary((*ends, *bytes))).collect()
    }
}

/// Payload of large messages, and the time that they took to arrive.
#[derive(Default)]
struct Arrivals {
    bytes: u64,
    seconds: f64,
}
