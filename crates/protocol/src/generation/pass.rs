//! A pass in flight, and the checks of a peer's report.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::ValueId;
use fusionllm_program::{PassKind, PeerId, Verdict, clip_factor, share_of_loss};

use super::expected::ReportKey;
use super::settings::RunSettings;
use super::{BatchId, ExpectedReports};
use crate::{MAX_SPANS, PassReport};

#[derive(Debug)]
pub(super) struct Pass {
    pub(super) number: u64,
    pub(super) version: u32,
    pub(super) batch: BatchId,
    /// Whether the peers look for numbers that are not finite.
    pub(super) inspect: bool,
    /// Whether it only looks at the batch of a skipped step again. It is inspected, nothing is updated, and no step is
    /// counted.
    pub(super) look: bool,
    /// Each micro-batch's share of the loss.
    pub(super) weights: Vec<f64>,
    /// The weights of the other reports' values, by micro-batch.
    pub(super) sums: Vec<f64>,
    pub(super) reports: BTreeMap<ReportKey, f64>,
    pub(super) norms: BTreeMap<ValueId, f64>,
    /// The peers whose norms have arrived.
    pub(super) voted: BTreeSet<PeerId>,
    pub(super) judgement: Option<Judgement>,
    pub(super) done: BTreeMap<PeerId, PassReport>,
}

/// The broker's decision on a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Judgement {
    pub(super) verdict: Verdict,
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
}

impl Pass {
    pub(super) fn new(number: u64, version: u32, batch: BatchId) -> Self {
        Self {
            number,
            version,
            batch,
            inspect: false,
            look: false,
            weights: Vec::new(),
            sums: Vec::new(),
            reports: BTreeMap::new(),
            norms: BTreeMap::new(),
            voted: BTreeSet::new(),
            judgement: None,
            done: BTreeMap::new(),
        }
    }

    /// Decides on a step of which all norms have arrived. `update` is the number of its update.
    pub(super) fn judge(&self, settings: &RunSettings, update: u64) -> Judgement {
        // The norms are added in the order of parameters, so the sum does not depend on the order of arrival.
        let norms: Vec<f64> = self.norms.values().copied().collect();
        let (grad_norm, factor) = clip_factor(&norms, settings.clip);
        let share = |m: u32| {
            let key = ReportKey { report: 0, micro_batch: m };
            let known = self.weights.get(m as usize).zip(self.reports.get(&key));
            known.map_or(f64::NAN, |(w, l)| share_of_loss(*w, *l))
        };
        let loss: f64 = (0..settings.micro_batches).map(share).sum();
        let apply = grad_norm.is_finite() && loss.is_finite() && !self.look;
        Judgement { verdict: Verdict { apply, update, lr: settings.learning_rate.at(update), factor }, loss, grad_norm }
    }

    /// Whether a peer has sent a norm or a loss that is not finite. A micro-batch without targets has no loss.
    pub(super) fn is_spoilt_by(&self, peer: &ExpectedReports) -> bool {
        let counts = |m: u32| self.weights.get(m as usize).is_some_and(|w| *w != 0.0);
        let losses = peer.reports(PassKind::Train).iter().filter(|key| key.report == 0 && counts(key.micro_batch));
        let mut norms = peer.norms().filter_map(|p| self.norms.get(p));
        let mut losses = losses.filter_map(|key| self.reports.get(key));
        norms.any(|n| !n.is_finite()) || losses.any(|l| !l.is_finite())
    }

    /// Adds this pass's reports to an evaluation's sums, by report.
    pub(super) fn add_reports(&self, sums: &mut BTreeMap<u32, f64>) {
        for (&ReportKey { report, micro_batch }, value) in &self.reports {
            // The loss is a micro-batch's mean; the other reports are sums over its samples.
            let weights = if report == 0 { &self.weights } else { &self.sums };
            let weight = weights.get(micro_batch as usize).copied().unwrap_or(f64::NAN);
            *sums.entry(report).or_default() += share_of_loss(weight, *value);
        }
    }
}

/// More bytes than any peer sends to another in a pass. Sums below this bound do not overflow.
const MAX_SENT_BYTES: u64 = 1 << 44;

/// Whether a report's numbers are possible: finite, not negative, about existing peers, in the order of peers.
pub(super) fn plausible(report: &PassReport, peers: u32) -> bool {
    let PassReport { compute_s, wait_s, total_s, codec_s, sent, errors, spectra, received, spans, arrivals, .. } =
        report;
    let number = |x: &f64| x.is_finite() && *x >= 0.0;
    [compute_s, wait_s, total_s, codec_s].into_iter().all(number)
        && errors.iter().all(|e| e.to.0 < peers && number(&e.relative_error))
        && errors.is_sorted_by(|a, b| a.to < b.to)
        && spectra.iter().all(|s| s.to.0 < peers && number(&s.exact) && number(&s.decoded))
        && spectra.is_sorted_by(|a, b| a.to < b.to)
        && received.iter().all(|r| r.from.0 < peers && r.bytes <= MAX_SENT_BYTES && number(&r.seconds))
        && received.is_sorted_by(|a, b| a.from < b.from)
        && sent.iter().all(|s| s.to.0 < peers && s.bytes <= MAX_SENT_BYTES)
        && sent.is_sorted_by(|a, b| a.to < b.to)
        && spans.len().max(arrivals.len()) <= MAX_SPANS
        && spans.iter().all(|s| s.start_us <= s.end_us)
        && spans.is_sorted_by_key(|s| s.start_us)
        && arrivals.iter().all(|a| a.from.0 < peers && a.bytes <= MAX_SENT_BYTES && a.start_us <= a.end_us)
}
