//! Whether codecs do harm.

use std::collections::{BTreeMap, VecDeque};

use fusionllm_compress::Codec;
use fusionllm_plan::PeerId;

use super::{CodecChangeReason, Link};
use crate::StepRecord;

/// The largest relative error that is let pass. At this a quarter of a tensor's energy is lost, or as much noise as that is added. Quantisers are far below (on normal numbers
/// int8 0.006, int4 0.1); top-k is above it where entries are so alike that the largest are not what matters, and training then suffers long before the loss rises.
const WORST: f64 = 0.5;

/// Steps in a row that a link must be above it.
const IN_A_ROW: u32 = 3;

/// Steps whose median is the smoothed loss.
const SMOOTHED: usize = 16;

/// Steps in a row that the smoothed loss must be above its least by [`RISE`] of it, and by more than single losses differ.
const RISING: u32 = 8;
const RISE: f64 = 0.05;

/// Steps for which a link gets no stronger codec than the one it was given for its harm.
const HELD: u64 = 200;

/// Watches the relative errors of what is sent, and the loss.
#[derive(Debug, Default)]
pub(super) struct Guard {
    /// Steps in a row that a link was above the worst error.
    above: BTreeMap<Link, u32>,
    losses: VecDeque<f64>,
    /// The least that the smoothed loss was.
    least: Option<f64>,
    /// Steps in a row that it was risen.
    risen: u32,
    /// The strongest codecs that links may have, and until which step.
    held: BTreeMap<Link, (Codec, u64)>,
}

impl Guard {
    /// The links whose codecs do harm. A loss that suffers does not say from which: all are.
    pub(super) fn step(
        &mut self,
        record: &StepRecord,
        codecs: &BTreeMap<Link, Codec>,
    ) -> BTreeMap<Link, CodecChangeReason> {
        let lossy: Vec<Link> = codecs.iter().filter(|(_, c)| **c != Codec::None).map(|(link, _)| *link).collect();
        if !record.applied {
            return lossy.into_iter().map(|link| (link, CodecChangeReason::NotFinite)).collect();
        }
        if let Some((least, now)) = self.rise(record.loss) {
            return lossy.into_iter().map(|link| (link, CodecChangeReason::Loss { least, now })).collect();
        }
        let mut harmful = BTreeMap::new();
        for (from, report) in (0..).map(PeerId).zip(&record.peers) {
            for (to, error) in report.errors.iter().filter(|(to, _)| lossy.contains(&(from, *to))) {
                let above = self.above.entry((from, *to)).or_default();
                *above = if *error > WORST { *above + 1 } else { 0 };
                if *above == IN_A_ROW {
                    harmful.insert((from, *to), CodecChangeReason::Error(*error));
                }
            }
        }
        harmful
    }

    /// The smoothed loss's least and itself, once it has risen for long; then it begins anew.
    fn rise(&mut self, loss: f64) -> Option<(f64, f64)> {
        self.losses.push_back(loss);
        if self.losses.len() > SMOOTHED {
            self.losses.pop_front();
        }
        let mut sorted: Vec<f64> = self.losses.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let now = *sorted.get(SMOOTHED / 2).filter(|_| sorted.len() == SMOOTHED)?;
        let spread = sorted.iter().map(|l| (l - now).abs()).sum::<f64>() / SMOOTHED as f64;
        let least = self.least.map_or(now, |least| least.min(now));
        self.least = Some(least);
        self.risen = if now - least > spread.max(RISE * least.abs()) { self.risen + 1 } else { 0 };
        (self.risen == RISING).then(|| {
            self.losses.clear();
            (self.least, self.risen) = (None, 0);
            (least, now)
        })
    }

    /// A link gets no codec stronger than this for a while.
    pub(super) fn hold(&mut self, link: Link, codec: Codec, step: u64) {
        self.held.insert(link, (codec, step + HELD));
    }

    /// The codec chosen for a link, or the strongest that it may have.
    pub(super) fn limit(&self, link: Link, chosen: Codec, step: u64) -> Codec {
        const ELEMENTS: usize = 1 << 20;
        let held = self
            .held
            .get(&link)
            .filter(|(codec, until)| step < *until && chosen.ratio(ELEMENTS) > codec.ratio(ELEMENTS));
        held.map_or(chosen, |(codec, _)| *codec)
    }

    /// What was counted of errors is of codecs that are gone.
    pub(super) fn codecs_changed(&mut self) {
        self.above.clear();
    }
}
