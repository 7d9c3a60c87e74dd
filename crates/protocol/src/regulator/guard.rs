//! Detects codecs that do harm.

use std::collections::{BTreeMap, VecDeque};

use fusionllm_compress::{Codec, Element};
use fusionllm_program::PeerId;

use super::change::{CodecChangeReason, LinkEnds};
use crate::StepRecord;

/// The largest tolerated relative error. At 0.5, a quarter of a tensor's energy is lost, or noise of that energy is
/// added.
///
/// Quantisers are far below this limit: on normal numbers, int8 has 0.006 and int4 0.1. Top-k is above it if the
/// entries are so alike that the largest are not the important ones. Training then suffers long before the loss rises.
const MAX_RELATIVE_ERROR: f64 = 0.5;

/// Consecutive steps with a larger error after which a codec is harmful.
const ERROR_STEPS: u32 = 3;

/// The smoothed loss is the median of this many steps.
const SMOOTHING_STEPS: usize = 16;

/// A rise of the smoothed loss above its minimum, relative to that minimum. It must also exceed the usual deviation
/// of single losses.
const MIN_LOSS_RISE: f64 = 0.05;

/// Consecutive steps with such a rise after which the codecs are harmful.
const LOSS_RISE_STEPS: u32 = 8;

/// Steps for which a harmful codec, or a stronger one, stays forbidden on its link.
const HOLD_STEPS: u64 = 200;

/// Watches the codecs' relative errors and the loss.
#[derive(Debug, Default)]
pub(super) struct Guard {
    /// Consecutive steps with too large an error, by link.
    error_steps: BTreeMap<LinkEnds, u32>,
    losses: VecDeque<f64>,
    /// The lowest smoothed loss.
    least: Option<f64>,
    /// Consecutive steps with a risen loss.
    risen_steps: u32,
    /// The strongest permitted codec of a link, and until which step.
    held: BTreeMap<LinkEnds, (Codec, u64)>,
}

impl Guard {
    /// Finds the links whose codecs do harm. A rising loss does not show which link causes it, so it counts for all
    /// links.
    pub(super) fn step(
        &mut self,
        record: &StepRecord,
        codecs: &BTreeMap<LinkEnds, Codec>,
    ) -> BTreeMap<LinkEnds, CodecChangeReason> {
        let lossy: Vec<LinkEnds> = codecs.iter().filter(|(_, c)| **c != Codec::None).map(|(link, _)| *link).collect();
        if !record.applied {
            return lossy.into_iter().map(|link| (link, CodecChangeReason::NotFinite)).collect();
        }
        if let Some((least, now)) = self.rise(record.loss) {
            return lossy.into_iter().map(|link| (link, CodecChangeReason::Loss { least, now })).collect();
        }
        let mut harmful = BTreeMap::new();
        for (from, report) in (0..).map(PeerId).zip(&record.peers) {
            for error in report.errors.iter().filter(|e| lossy.contains(&(from, e.to))) {
                let link = (from, error.to);
                let steps = self.error_steps.entry(link).or_default();
                *steps = if error.relative_error > MAX_RELATIVE_ERROR { *steps + 1 } else { 0 };
                if *steps == ERROR_STEPS {
                    harmful.insert(link, CodecChangeReason::Error(error.relative_error));
                }
            }
        }
        harmful
    }

    /// The lowest and the present smoothed loss, once the loss has risen for long. Then the comparison restarts.
    fn rise(&mut self, loss: f64) -> Option<(f64, f64)> {
        self.losses.push_back(loss);
        if self.losses.len() > SMOOTHING_STEPS {
            self.losses.pop_front();
        }
        let mut sorted: Vec<f64> = self.losses.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let now = *sorted.get(SMOOTHING_STEPS / 2).filter(|_| sorted.len() == SMOOTHING_STEPS)?;
        let spread = sorted.iter().map(|l| (l - now).abs()).sum::<f64>() / SMOOTHING_STEPS as f64;
        let least = self.least.map_or(now, |least| least.min(now));
        self.least = Some(least);
        self.risen_steps = if now - least > spread.max(MIN_LOSS_RISE * least.abs()) { self.risen_steps + 1 } else { 0 };
        (self.risen_steps == LOSS_RISE_STEPS).then(|| {
            self.losses.clear();
            (self.least, self.risen_steps) = (None, 0);
            (least, now)
        })
    }

    /// Forbids codecs stronger than this on a link for [`HOLD_STEPS`].
    pub(super) fn hold(&mut self, link: LinkEnds, codec: Codec, step: u64) {
        self.held.insert(link, (codec, step + HOLD_STEPS));
    }

    /// The chosen codec of a link, or the strongest permitted one.
    pub(super) fn limit(&self, link: LinkEnds, chosen: Codec, step: u64) -> Codec {
        // How strong a codec is does not depend on the numbers.
        let ratio = |codec: &Codec| codec.ratio(1 << 20, Element::F32);
        let held = self.held.get(&link).filter(|(codec, until)| step < *until && ratio(&chosen) > ratio(codec));
        held.map_or(chosen, |(codec, _)| *codec)
    }

    /// Forgets the counted errors, which belong to the old codecs. Call it when codecs have changed.
    pub(super) fn codecs_changed(&mut self) {
        self.error_steps.clear();
    }
}
