//! Chooses the links' codecs while a run is in progress.

mod change;
mod guard;
mod rates;

use std::collections::BTreeMap;

use fusionllm_compress::Codec;
use fusionllm_plan::{Cluster, Compression, LinkCodec, Plan, PlanError, Traffic};
use fusionllm_program::{Optimizer, Program};

use crate::StepRecord;
use change::LinkEnds;
pub use change::{CodecChange, CodecChangeReason, CodecUpdate};
use guard::Guard;
use rates::Rates;

/// Adapts the codecs to the measured steps.
///
/// If the compression follows the links and their rates change, it chooses all codecs anew. If a codec does harm, its
/// link gets the next milder one, or the user a warning.
///
/// Pass it every step. An update becomes the plan's next version. Steps of earlier versions are ignored.
#[derive(Debug)]
pub struct Regulator {
    compression: Compression,
    programs: Vec<Program>,
    traffic: Traffic,
    optimizer: Optimizer,
    version: u32,
    /// The codecs of all links that carry something compressible.
    codecs: BTreeMap<LinkEnds, Codec>,
    /// The planned cluster, if the codecs follow the links.
    cluster: Option<Cluster>,
    /// Measured rate over planned rate.
    factors: BTreeMap<LinkEnds, f64>,
    rates: Rates,
    guard: Guard,
}

impl Regulator {
    /// A regulator for this plan and its `programs`. The devices of `cluster` are the peers. Without a cluster, the
    /// codecs do not follow the links.
    pub fn new(plan: &Plan, programs: Vec<Program>, cluster: Option<Cluster>, optimizer: Optimizer) -> Self {
        let traffic = Traffic::new(&programs);
        Self {
            compression: plan.compression,
            optimizer,
            version: plan.version,
            codecs: traffic.links.keys().map(|&(from, to)| ((from, to), plan.codec(from, to))).collect(),
            cluster: cluster.filter(|_| plan.compression.needs_links()),
            factors: BTreeMap::new(),
            rates: Rates::default(),
            guard: Guard::default(),
            programs,
            traffic,
        }
    }

    /// Takes a completed step. Returns an update if codecs must change, or deserve a warning.
    ///
    /// # Errors
    ///
    /// The same as those of [`Compression::choose`].
    pub fn step(&mut self, record: &StepRecord) -> Result<Option<CodecUpdate>, PlanError> {
        if record.version != self.version {
            return Ok(None);
        }
        let mut reasons = BTreeMap::new();
        let mut next = self.codecs.clone();
        if let Some(cluster) = &self.cluster
            && let Some(rates) = self.rates.step(record)
        {
            for (link, (before, now)) in rates {
                *self.factors.entry(link).or_insert(1.0) *= now / before;
                if rates::differ(before, now) {
                    reasons.insert(link, CodecChangeReason::Rate { before, now });
                }
            }
            let cluster = cluster.rescaled(&self.factors)?;
            let chosen = self.compression.choose(&self.programs, Some(&cluster), self.optimizer)?;
            next.values_mut().for_each(|codec| *codec = Codec::None);
            next.extend(chosen.into_iter().map(|l| ((l.from, l.to), l.codec)));
        }
        let mut changes = Vec::new();
        for (link, reason) in self.guard.step(record, &self.codecs) {
            let before = self.codecs[&link];
            if self.compression.guard {
                let milder = self.traffic.less_lossy(link, before);
                self.guard.hold(link, milder, record.step);
                next.insert(link, milder);
                reasons.insert(link, reason);
            } else if reason != CodecChangeReason::NotFinite {
                changes.push(CodecChange { from: link.0, to: link.1, before, now: before, reason });
            }
        }
        for (&(from, to), now) in &mut next {
            let before = self.codecs[&(from, to)];
            *now = self.guard.limit((from, to), *now, record.step);
            if *now != before {
                let reason = reasons.get(&(from, to)).copied().unwrap_or(CodecChangeReason::OtherRates);
                changes.push(CodecChange { from, to, before, now: *now, reason });
            }
        }
        if changes.is_empty() {
            return Ok(None);
        }
        if next != self.codecs {
            self.version += 1;
            self.rates = Rates::default();
            self.guard.codecs_changed();
            self.codecs = next;
        }
        let codecs = self.codecs.iter().filter(|(_, c)| **c != Codec::None);
        let codecs = codecs.map(|(&(from, to), &codec)| LinkCodec { from, to, codec }).collect();
        Ok(Some(CodecUpdate { codecs, changes }))
    }
}
