//! Which codecs links have while a run goes on.

mod guard;
mod rates;

use std::collections::BTreeMap;
use std::fmt;

use fusionllm_compress::Codec;
use fusionllm_plan::{Cluster, Compression, LinkCodec, Optimizer, PeerId, Plan, PlanError, Program, Traffic};

use crate::StepRecord;
use guard::Guard;
use rates::Rates;

type Link = (PeerId, PeerId);

/// Suits codecs to what steps tell of the links: where codecs follow the links' rates and these change, it chooses anew; where a codec does harm, it goes back to a milder one, or says so.
///
/// Feed it every step. What it asks for is the plan's next version; it looks at no step of an earlier one.
#[derive(Debug)]
pub struct Regulator {
    compression: Compression,
    programs: Vec<Program>,
    optimizer: Optimizer,
    version: u32,
    /// Of every link on which something may be compressed.
    codecs: BTreeMap<Link, Codec>,
    /// The links as they were planned with, where codecs follow them.
    cluster: Option<Cluster>,
    /// How many times as fast they turned out to be.
    factors: BTreeMap<Link, f64>,
    rates: Rates,
    guard: Guard,
}

/// Codecs for the plan's next version, or the same as before with something to be said of them.
#[derive(Debug, Clone, PartialEq)]
pub struct CodecUpdate {
    /// Of all links.
    pub codecs: Vec<LinkCodec>,
    /// What changes, by link.
    pub changes: Vec<CodecChange>,
}

impl CodecUpdate {
    /// Whether any codec is to change.
    pub fn changes_codecs(&self) -> bool {
        self.changes.iter().any(|c| c.before != c.now)
    }
}

/// What happens to a link's codec, and why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CodecChange {
    /// The sending peer.
    pub from: PeerId,
    /// The receiving peer.
    pub to: PeerId,
    /// The codec so far.
    pub before: Codec,
    /// The codec from now on; the same if this is but a warning.
    pub now: Codec,
    /// Why.
    pub reason: CodecChangeReason,
}

/// Why a link's codec changes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CodecChangeReason {
    /// The link has another rate, in bytes/s.
    Rate {
        /// When its codec was chosen.
        before: f64,
        /// By now.
        now: f64,
    },
    /// Other links have.
    OtherRates,
    /// The relative error of what it carries.
    Error(f64),
    /// The loss rises.
    Loss {
        /// The least it was.
        least: f64,
        /// What it is.
        now: f64,
    },
    /// Loss or gradient are not finite.
    NotFinite,
}

impl fmt::Display for CodecChangeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mbps = |bytes_per_s: f64| 8e-6 * bytes_per_s;
        match *self {
            Self::Rate { before, now } => {
                let verb = if now < before { "fell" } else { "rose" };
                write!(f, "its rate {verb} from {:.1} to {:.1} Mbps", mbps(before), mbps(now))
            }
            Self::OtherRates => f.write_str("the rates of other links changed"),
            Self::Error(error) => write!(f, "what arrives is off by {:.0} % of its norm", 100.0 * error),
            Self::Loss { least, now } => write!(f, "the loss rose from {least:.3} to {now:.3}"),
            Self::NotFinite => f.write_str("loss or gradient was not finite"),
        }
    }
}

impl Regulator {
    /// For a run of this plan and its `programs`. `cluster` has the peers as its devices; without one, codecs do not follow the links.
    pub fn new(plan: &Plan, programs: Vec<Program>, cluster: Option<Cluster>, optimizer: Optimizer) -> Self {
        let links = Traffic::new(&programs).links.into_keys();
        Self {
            compression: plan.compression,
            optimizer,
            version: plan.version,
            codecs: links.map(|(from, to)| ((from, to), plan.codec(from, to))).collect(),
            cluster: cluster.filter(|_| plan.compression.needs_links()),
            factors: BTreeMap::new(),
            rates: Rates::default(),
            guard: Guard::default(),
            programs,
        }
    }

    /// A step is over: what follows from it for the links' codecs, if anything.
    ///
    /// # Errors
    ///
    /// Codecs cannot be chosen; see [`Compression::choose`].
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
                self.guard.hold(link, before.less_lossy(), record.step);
                next.insert(link, before.less_lossy());
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
