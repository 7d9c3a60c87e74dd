//! Evaluations: the held-out samples in micro-batches, and how much each micro-batch counts.

use std::collections::BTreeMap;

use fusionllm_data::Dataset;
use fusionllm_graph::HostTensor;
use fusionllm_graph::batch::Weights;
use fusionllm_workbench::model::Model;
use fusionllm_workspace::config::Job;

use super::feeds::{Feeds, MicroBatches};
use crate::NodeError;

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
                "validation leaves out {left_out} of {wanted} held-out samples: they fill no micro-batch of {}, and \
                 samples may depend on each other in the loss",
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
    use std::fs;
    use std::path::Path;

    use fusionllm_backend::interpret;
    use fusionllm_data::write_tensors;
    use fusionllm_graph::{ValueId, ValueKind};
    use fusionllm_program::share_of_loss;

    use super::*;
    use fusionllm_workbench::model::Origin;

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

    /// The means that the reports of an evaluation add up to: the loss and, where the model has it, the accuracy.
    fn validation(job: &str, dir: &Path, batch: usize, micro_batch: usize) -> Vec<f64> {
        let sizes =
            [format!("train.batch={batch}"), format!("train.micro_batch={micro_batch}"), "eval.batches=0".into()];
        let job = Job::parse("job.toml", job, dir, &sizes).unwrap();
        let data = Dataset::open(&job.data, 1).unwrap();
        let model = Model::build(&job, micro_batch).unwrap();
        let feeds = Feeds::new(&model, &data).unwrap();
        let held_out = HeldOut::of(&job, data.eval_samples(), &model);
        assert_eq!(held_out.note(&job, data.eval_samples()), None);
        let evaluation = Evaluation::new(held_out, batch / micro_batch, &feeds, &data, &model).unwrap();
        let (origin, _) = Origin::open(&job, &model, true).unwrap();

        let (backend, graph, count) =
            (fusionllm_backend::open("cpu").unwrap(), &model.eval, (batch / micro_batch) as u32);
        let reports: Vec<ValueId> = model.reports().iter().map(|name| graph.outputs[*name]).collect();
        let mut means = vec![0.0; reports.len()];
        for index in 0..held_out.passes(count) {
            let MicroBatches { tensors, weights, sums } = evaluation.pass(index, count, &feeds, &data, &model).unwrap();
            for (m, inputs) in tensors.iter().enumerate() {
                let source = |(i, value): (usize, &fusionllm_graph::Value)| {
                    let tensor = match &value.kind {
                        ValueKind::Input => inputs[&value.name].clone(),
                        ValueKind::Constant => graph.constants[&value.name].clone(),
                        ValueKind::Parameter(init) | ValueKind::Frozen(init) | ValueKind::Buffer(init) => {
                            match origin.read(value).unwrap() {
                                Some(tensor) => tensor,
                                None => init.draw(1, &value.name, &value.ty).unwrap(),
                            }
                        }
                        ValueKind::RngKey | ValueKind::Result { .. } => return None,
                    };
                    Some((ValueId(i as u32), backend.upload(&tensor).unwrap()))
                };
                let sources = graph.values.iter().enumerate().filter_map(source).collect();
                let reported = interpret(&*backend, graph, sources, &reports).unwrap();
                for (r, value) in reported.iter().enumerate() {
                    let weight = if r == 0 { weights[m] } else { sums[m] };
                    means[r] += share_of_loss(weight, backend.download(value).unwrap().to_f64()[0]);
                }
            }
        }
        means
    }

    /// A job and the number of its held-out samples. The whole in one micro-batch is what PyTorch computes.
    fn every_cut_is_the_whole(job: &str, dir: &Path, samples: usize, cuts: &[(usize, usize)]) {
        let whole = validation(job, dir, samples, samples);
        assert!(whole[0] > 0.1 && whole.iter().all(|mean| mean.is_finite()), "{whole:?}");
        for (batch, micro_batch) in cuts {
            let cut = validation(job, dir, *batch, *micro_batch);
            let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-6 * b.abs().max(1.0);
            assert!(
                cut.len() == whole.len() && cut.iter().zip(&whole).all(near),
                "{cut:?} for {whole:?} at {batch}/{micro_batch}"
            );
        }
    }

    const CUTS: [(usize, usize); 6] = [(2, 2), (4, 1), (6, 3), (8, 8), (10, 5), (16, 16)];
    const GPT2: &str = "[model]\nfamily = \"gpt2\"\nn_layer = 1\nn_embd = 8\nn_head = 2\nvocab_size = 256\nn_positions = 4\n\
                        initializer_range = 0.5\n";

    /// Regression: the first rows of tensors counted twice where the last batch was not full.
    #[test]
    fn all_kinds_of_data_are_measured_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        // 22 targets in six samples, of which the last is not full.
        let letters: Vec<u8> = (0..60u8).map(|i| b'a' + (usize::from(i) * 7 % 26) as u8).collect();
        fs::write(path("train.txt"), &letters).unwrap();
        fs::write(path("test.txt"), &letters[..23]).unwrap();
        let text = "[data]\nfiles = [\"train.txt\"]\nvalidation = [\"test.txt\"]\ncontext = 4\n";
        every_cut_is_the_whole(&format!("{GPT2}{text}"), dir.path(), 6, &CUTS);

        let image = |i: usize| {
            let pixels = (0..3072).map(move |p| ((p * 31 + i * 977) * 2_654_435_761 % 251) as u8);
            [(i % 10) as u8].into_iter().chain(pixels)
        };
        fs::write(path("train.bin"), (0..2).flat_map(image).collect::<Vec<u8>>()).unwrap();
        fs::write(path("test.bin"), (2..9).flat_map(image).collect::<Vec<u8>>()).unwrap();
        let images =
            "[model]\nfamily = \"resnet\"\nwidth = 4\n[data]\ntrain = [\"train.bin\"]\ntest = [\"test.bin\"]\n";
        every_cut_is_the_whole(images, dir.path(), 7, &CUTS);
    }

    /// A job for `loaded.pt2` of the zoo, whose held-out rows have these labels.
    fn imported(dir: &Path, labels: &[i64], more: &str) -> String {
        let zoo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo");
        let count = labels.len();
        let x: Vec<f32> = (0..count * 6).map(|i| (i * 2_654_435_761 % 1009) as f32 / 504.0 - 1.0).collect();
        let x = HostTensor::from_f32([count, 6], &x).unwrap();
        let y = HostTensor::from_i64([count], labels).unwrap();
        write_tensors(&dir.join("rows.safetensors"), &BTreeMap::from([("x", x), ("y", y)])).unwrap();
        let files = "files = [\"rows.safetensors\"]\nvalidation = [\"rows.safetensors\"]";
        let data = format!("[data]\nkind = \"tensors\"\n{files}\n{more}\n");
        format!(
            "{data}[model]\nfile = {:?}\nweights = {:?}\n",
            zoo.join("loaded.pt2"),
            zoo.join("loaded.weights.safetensors")
        )
    }

    /// Regression: the first rows counted twice where the last batch was not full. The loss is a mean that classes weigh,
    /// so its divisor depends on all samples.
    #[test]
    fn a_weighted_mean_over_tensors_is_that_of_all_rows() {
        let dir = tempfile::tempdir().unwrap();
        let labels = [0, 1, 2, 0, 2, -100, 1, 1, 0];
        let cuts = [(2, 2), (4, 2), (6, 3), (8, 8), (10, 5), (16, 16)];
        every_cut_is_the_whole(&imported(dir.path(), &labels, ""), dir.path(), 9, &cuts);
        let grouped = imported(dir.path(), &labels, "group = 3");
        every_cut_is_the_whole(&grouped, dir.path(), 9, &[(6, 6), (12, 6), (12, 12), (15, 15)]);
    }

    /// A mean over nothing is no number, and no 0 either.
    #[test]
    fn without_targets_there_is_no_validation() {
        let dir = tempfile::tempdir().unwrap();
        let rows = |number: i64| HostTensor::from_i64([3, 16], &[number; 48]).unwrap();
        let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo/shifted.pt2");
        let files = "files = [\"rows.safetensors\"]\nvalidation = [\"rows.safetensors\"]";
        let job = format!("[model]\nfile = {archive:?}\n[data]\nkind = \"tensors\"\n{files}\n");
        for (label, is_number) in [(3, true), (-100, false)] {
            let tensors = BTreeMap::from([("x", rows(1)), ("y", rows(label))]);
            write_tensors(&dir.path().join("rows.safetensors"), &tensors).unwrap();
            let means = validation(&job, dir.path(), 4, 2);
            assert_eq!(means[0].is_finite(), is_number, "{means:?}");
        }
    }

    #[test]
    fn without_held_out_samples_nothing_is_evaluated() {
        let dir = tempfile::tempdir().unwrap();
        let job = imported(dir.path(), &[0, 1, 2], "").replace("validation", "#");
        assert_eq!(validation(&job, dir.path(), 2, 2), [0.0]);
    }
}
