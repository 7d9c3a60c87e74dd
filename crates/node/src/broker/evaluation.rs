//! Evaluations: the held-out samples in micro-batches, and how much each micro-batch counts.

use std::collections::BTreeMap;

use fusionllm_data::Dataset;
use fusionllm_graph::HostTensor;
use fusionllm_graph::batch::Weights;
use fusionllm_graph::units::counted;
use fusionllm_workspace::config::Job;

use super::feeds::{Feeds, MicroBatches};
use crate::NodeError;
use crate::model::Model;

/// The held-out samples of an evaluation, cut into micro-batches of one size.
///
/// The samples that are left after the last full micro-batch fill another one: it has all of them as often as they fit,
/// and their first group in the places that are still free. A last micro-batch of this group alone says how much too
/// much that is. The factors by which the micro-batches count then make every sample count once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeldOut {
    /// The number of samples. They are whole groups.
    samples: usize,
    /// Samples per micro-batch, which are whole groups.
    micro_batch: usize,
    /// The number of samples that stay together.
    group: usize,
}

/// One micro-batch of an evaluation.
#[derive(Debug, Clone, PartialEq)]
struct Portion {
    /// The numbers of its samples, in their order.
    samples: Vec<usize>,
    /// How much they count.
    factor: f64,
}

impl HeldOut {
    /// The samples of each evaluation of a job, out of `all` that are held out. If nobody knows how the model's loss
    /// follows from its samples, those that do not fill a micro-batch are left out.
    pub(super) fn of(job: &Job, all: usize, model: &Model) -> Self {
        let micro_batch = model.micro_batch.max(1);
        let wanted = Self::wanted(job, all);
        let left_out = if model.loss.is_unsure() { wanted % micro_batch } else { 0 };
        Self { samples: wanted - left_out, micro_batch, group: job.data.group().max(1) }
    }

    /// The number of samples that an evaluation should measure.
    fn wanted(job: &Job, all: usize) -> usize {
        let batches = job.eval.passes(all, job.train.batch) as usize;
        batches.saturating_mul(job.train.batch).min(all)
    }

    /// A sentence about the samples that are left out, if there are any.
    pub(super) fn note(&self, job: &Job, all: usize) -> Option<String> {
        let wanted = Self::wanted(job, all);
        let left_out = wanted - self.samples;
        (left_out > 0).then(|| {
            format!(
                "validation leaves out {} of {wanted} held-out ones, because they fill no micro-batch of {}, and samples \
                 may depend on each other in the loss",
                counted(left_out, "sample"),
                self.micro_batch
            )
        })
    }

    /// The passes of `count` micro-batches that an evaluation takes.
    pub(super) fn passes(&self, count: u32) -> u64 {
        self.portions().div_ceil(count.max(1) as usize) as u64
    }

    /// The samples that are left after the last full micro-batch: how many, how often they fit into a micro-batch, and
    /// how many places are free then.
    fn rest(&self) -> (usize, usize, usize) {
        let rest = self.samples % self.micro_batch;
        (rest, self.micro_batch.checked_div(rest).unwrap_or(0), self.micro_batch.checked_rem(rest).unwrap_or(0))
    }

    /// The number of micro-batches.
    fn portions(&self) -> usize {
        let (rest, _, free) = self.rest();
        self.samples / self.micro_batch + usize::from(rest > 0) + usize::from(free > 0)
    }

    /// The micro-batch of this number. Those after the last one do not count.
    fn portion(&self, number: usize) -> Portion {
        let Self { samples, micro_batch, group } = *self;
        let ((rest, times, free), full) = (self.rest(), samples / micro_batch);
        let first_left = samples - rest;
        let repeated = |from: usize, until: usize, places: usize| (from..until).cycle().take(places);
        let group_of = |first: usize, places: usize| repeated(first, first + group, places);
        let (samples, factor) = if number < full {
            ((number * micro_batch..(number + 1) * micro_batch).collect(), 1.0)
        } else if number == full && rest > 0 {
            let filled = repeated(first_left, samples, rest * times).chain(group_of(first_left, free));
            (filled.collect(), 1.0 / times as f64)
        } else if number == full + 1 && free > 0 {
            let too_much = free as f64 / (times * micro_batch) as f64;
            (group_of(first_left, micro_batch).collect(), -too_much)
        } else {
            (group_of(0, micro_batch).collect(), 0.0)
        };
        Portion { samples, factor }
    }
}

/// An evaluation. All of its micro-batches together are one batch.
pub(super) struct Evaluation {
    held_out: HeldOut,
    micro_batches: Vec<Weighed>,
    /// The number of targets; that of samples if the model does not tell which labels are targets.
    targets: f64,
}

/// A micro-batch of an evaluation, without its samples.
struct Weighed {
    /// The inputs that the loss of the whole evaluation needs.
    inputs: BTreeMap<String, HostTensor>,
    /// The share of its loss in that of the evaluation.
    weight: f64,
}

impl Evaluation {
    /// Weighs the micro-batches of the held-out samples. A batch has `per_batch` of them.
    ///
    /// # Errors
    ///
    /// The data can no longer be read.
    pub(super) fn new(
        held_out: HeldOut,
        per_batch: usize,
        feeds: &Feeds,
        data: &Dataset,
        model: &Model,
    ) -> Result<Self, NodeError> {
        let portions = (0..held_out.portions()).map(|number| held_out.portion(number));
        let (mut inputs, mut factors) = (Vec::new(), Vec::new());
        for Portion { samples, factor } in portions {
            let batch = data.held_out(&samples, |name| feeds.weighs(name, model))?;
            inputs.extend(feeds.cut(&batch, 1, model)?);
            factors.push(factor);
        }
        let Weights { weights, targets } = feeds.weigh(&mut inputs, &factors, per_batch, model)?;
        // A mean over no targets is no number.
        let scale = if targets == Some(0.0) { f64::NAN } else { 1.0 };
        let micro_batches = inputs.into_iter().zip(weights).map(|(mut inputs, weight)| {
            inputs.retain(|name, _| model.loss.fills_in(name));
            Weighed { inputs, weight: weight * scale }
        });
        let targets = targets.unwrap_or(held_out.samples as f64);
        Ok(Self { held_out, micro_batches: micro_batches.collect(), targets })
    }

    /// Whether there are samples to evaluate.
    pub(super) fn is_empty(&self) -> bool {
        self.micro_batches.is_empty()
    }

    /// The micro-batches of a pass, of which there are `count`.
    pub(super) fn pass(
        &self,
        index: u64,
        count: u32,
        feeds: &Feeds,
        data: &Dataset,
        model: &Model,
    ) -> Result<MicroBatches, NodeError> {
        let numbers: Vec<usize> = (0..count as usize).map(|m| index as usize * count as usize + m).collect();
        let portions: Vec<Portion> = numbers.iter().map(|number| self.held_out.portion(*number)).collect();
        let samples: Vec<usize> = portions.iter().flat_map(|portion| &portion.samples).copied().collect();
        let mut tensors = feeds.cut(&feeds.held_out(data, &samples)?, count, model)?;
        let mut weights = Vec::with_capacity(numbers.len());
        for (inputs, number) in tensors.iter_mut().zip(numbers) {
            let weighed = self.micro_batches.get(number);
            weights.push(weighed.map_or(0.0, |weighed| weighed.weight));
            // A micro-batch that does not count has to run, too.
            let filled_in = weighed.or(self.micro_batches.first()).map(|weighed| weighed.inputs.clone());
            inputs.extend(filled_in.unwrap_or_default());
        }
        let sums = portions.iter().map(|portion| portion.factor / self.targets).collect();
        Ok(MicroBatches { tensors, weights, sums })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_counts_once() {
        for (micro_batch, group) in [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 1), (12, 4), (16, 1)] {
            for samples in (0..40).map(|n| n * group) {
                let held_out = HeldOut { samples, micro_batch, group };
                let (mut counted, mut magnitude) = (BTreeMap::new(), 0.0);
                for number in 0..held_out.portions() + 2 {
                    let Portion { samples: numbers, factor } = held_out.portion(number);
                    assert_eq!(numbers.len(), micro_batch);
                    assert!(numbers.chunks(group).all(|g| g[0] % group == 0 && g.windows(2).all(|w| w[0] + 1 == w[1])));
                    for number in numbers {
                        *counted.entry(number).or_insert(0.0) += factor;
                        magnitude += factor.abs();
                    }
                }
                let once = |(n, c): (&usize, &f64)| (c - if *n < samples { 1.0 } else { 0.0 }).abs() < 1e-12;
                assert!(counted.iter().all(once), "{held_out:?}: {counted:?}");
                assert!(counted.len() >= samples);
                // What is subtracted is less than what stays, so rounding does not grow.
                assert!(magnitude <= 3.0 * samples as f64, "{held_out:?}: {magnitude}");
            }
        }
    }

    #[test]
    fn passes_have_room_for_all_micro_batches() {
        let passes = |samples, micro_batch, count| HeldOut { samples, micro_batch, group: 1 }.passes(count);
        assert_eq!(passes(0, 4, 2), 0);
        assert_eq!((passes(16, 4, 2), passes(16, 4, 4), passes(16, 4, 1)), (2, 1, 4));
        // One sample fills a micro-batch. Three leave one place of four free, which takes another micro-batch.
        assert_eq!((passes(17, 16, 1), passes(17, 4, 4)), (2, 2));
        assert_eq!((passes(15, 4, 4), passes(7, 4, 4), passes(3, 4, 1)), (2, 1, 2));
    }
}
