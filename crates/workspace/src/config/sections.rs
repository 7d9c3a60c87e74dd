//! The sections besides `[model]` and `[data]`.

use std::path::PathBuf;

use fusionllm_graph::Precision;
use fusionllm_graph::ops::{AdamwStep, SgdStep};
use fusionllm_plan::{Compression, Compressor, LossBudget, Schedule, Scheduler};
use fusionllm_program::{LearningRate, Optimizer};
use serde::{Serialize, Serializer};

use super::files::Files;
use super::quantity::SHARE;
use super::reader::{JobError, Section};
use super::{divisors, nearest_divisor};

/// A setting that the word `auto` gives to the planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice<T> {
    /// The value; while open, the default if nothing is known of the machines.
    pub value: T,
    /// Whether the planner may choose another value.
    pub open: bool,
}

impl<T> Choice<T> {
    /// A choice that is made.
    pub fn made(value: T) -> Self {
        Self { value, open: false }
    }
}

impl<T: Serialize> Serialize for Choice<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.open {
            true => serializer.serialize_str("auto"),
            false => self.value.serialize(serializer),
        }
    }
}

/// `[train]`: steps, batches and the update rule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Train {
    /// The length of the job, from which other defaults follow. Default 1000.
    pub steps: u64,
    /// The step at which the run stops, before or after `steps`. Default `steps`.
    pub stop: u64,
    /// Samples per step. Default 16.
    pub batch: usize,
    /// Samples that pass through the pipeline together. They divide `batch`. The default is the largest divisor up to
    /// an eighth of `batch`. Batch norm and dropout depend on it, so the planner chooses only if the job says `auto`.
    pub micro_batch: Choice<usize>,
    /// Whether the job names no micro-batch size.
    #[serde(skip)]
    pub default_micro_batch: bool,
    /// Decides the first parameters, the order of the data and dropout. Default 1.
    pub seed: u64,
    /// The order of forward and backward work, which changes no result. Default `auto`; without known machines that
    /// is `1f1b`.
    pub schedule: Choice<Schedule>,
    /// The type in which peers compute. Default f32.
    pub precision: Precision,
    /// The rule by which gradients change parameters.
    pub optimizer: OptimizerConfig,
}

/// `[train.optimizer]`, with PyTorch's semantics.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OptimizerConfig {
    /// The update rule with its own constants.
    #[serde(flatten)]
    pub rule: Rule,
    /// Highest learning rate. Default 3e-4 for AdamW, 0.1 for SGD.
    pub lr: f64,
    /// Decoupled for AdamW, part of the gradient for SGD. Default 0.1 and 5e-4. Biases, norms and embeddings have none,
    /// unless a group says so.
    pub weight_decay: f64,
    /// The largest global norm of the gradient; 0 for no limit. Default 1 for AdamW, 0 for SGD.
    pub clip: f64,
    /// Steps over which the learning rate rises from 0. Default 0.
    pub warmup: u64,
    /// How the learning rate falls afterwards. Default `none`.
    pub decay: Decay,
    /// The step at which the learning rate reaches `min_lr`. Default `train.steps`, so that a run that stops earlier or
    /// later keeps its rates.
    pub decay_steps: u64,
    /// The lowest learning rate after the warm-up. Default a tenth of `lr`.
    pub min_lr: f64,
    /// Parameters with a rate or a decay of their own. A parameter belongs to the first group that names it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroupConfig>,
}

/// `[[train.optimizer.groups]]`: parameters with a rate or a decay of their own.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ParameterGroupConfig {
    /// Names of parameters, in which `*` stands for any text.
    pub parameters: Vec<String>,
    /// Highest learning rate. It warms up and falls as that of the optimizer does. Default: that of the optimizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Weight decay of all these parameters. Default: that of the optimizer, and none for biases, norms and embeddings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

impl ParameterGroupConfig {
    fn read(section: &Section<'_>) -> Result<Self, JobError> {
        let hint = "write parameters = [\"bias\"], with names of parameters; `*` stands for any text";
        let parameters: Vec<String> =
            section.texts("parameters", hint)?.unwrap_or_default().into_iter().map(str::to_owned).collect();
        let group = Self {
            parameters,
            lr: section.number("lr", "above 0", |x| x > 0.0)?,
            weight_decay: section.number("weight_decay", "at least 0", |x| x >= 0.0)?,
        };
        section.finish()?;
        if group.parameters.is_empty() {
            return Err(section.error("parameters", "a group of `train.optimizer.groups` names no parameters", hint));
        }
        if group.lr.is_none() && group.weight_decay.is_none() {
            let message = "a group of `train.optimizer.groups` says nothing about its parameters";
            return Err(section.error("parameters", message, "write lr or weight_decay beside it"));
        }
        Ok(group)
    }
}

/// An update rule with its constants.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Rule {
    /// Adam with decoupled weight decay.
    Adamw {
        /// Decay of the running mean and of the running square. Default 0.9, 0.95.
        betas: [f64; 2],
        /// Added to the root of the running square. Default 1e-8.
        eps: f64,
    },
    /// Gradient descent.
    Sgd {
        /// Decay of the running sum of gradients. Default 0.9.
        momentum: f64,
        /// Whether the update uses Nesterov's momentum. Default false.
        nesterov: bool,
    },
}

/// How the learning rate falls after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a period of a cosine.
    Cosine,
    /// No decay.
    None,
}

/// `[plan]`: how the model is cut over the peers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Planning {
    /// The method that cuts the model. Default `op-fence` where the devices are known or measured, else
    /// `equal-compute`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "scheduler_name")]
    pub scheduler: Option<Scheduler>,
    /// A plan to carry out as it is. The command line may name another plan, or a number of peers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
}

/// `[checkpoint]`: when a run is saved, besides at its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Checkpointing {
    /// Steps between two checkpoints; 0 for the end alone. Default 200.
    pub every: u64,
    /// Checkpoints that are kept. Default 3.
    pub keep: usize,
    /// Whether the checkpoint with the lowest validation loss is kept, too, and is the one that is used. Default false.
    pub keep_best: bool,
    /// Whether peers keep copies of each other's share. Default true.
    pub copies: bool,
}

/// `[eval]`: when the loss on held-out data is measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Eval {
    /// Steps between two evaluations; 0 for never. Default 100.
    pub every: u64,
    /// Batches of `train.batch` samples per evaluation; 0 for all held-out samples. Default 10.
    pub batches: u64,
}

impl Eval {
    /// Batches of one validation, of `held_out` samples in all.
    pub fn passes(&self, held_out: usize, batch: usize) -> u64 {
        let all = held_out.div_ceil(batch) as u64;
        match self {
            Self { every: 0, .. } => 0,
            Self { batches: 0, .. } => all,
            Self { batches, .. } => all.min(*batches),
        }
    }
}

fn or_auto(e: JobError) -> JobError {
    JobError { hint: format!("{}, or micro_batch = \"auto\", with which the planner chooses", e.hint), ..e }
}

impl Train {
    /// Reads the section. `length` is the `steps` of the file, where the command line may have other ones. Those say
    /// when the run stops: the length of the job stays as it is.
    pub(super) fn read(section: &Section<'_>, length: Option<u64>) -> Result<Self, JobError> {
        let auto = [("auto", None)].into_iter();
        let schedules: Vec<_> = auto.chain(Schedule::ALL.map(|s| (s.name(), Some(s)))).collect();
        let asked = section.count("steps", 1)?;
        let steps = length.filter(|_| asked.is_some()).or(asked).unwrap_or(1000);
        let stop =
            section.count("stop", 1)?.filter(|_| section.is_overridden("stop") || !section.is_overridden("steps"));
        let stop = stop.or(asked).unwrap_or(steps);
        let batch = section.size("batch", 1)?.unwrap_or(16);
        let default = divisors(batch).filter(|n| *n <= (batch / 8).max(1)).max().unwrap_or(1);
        let micro_batch = match section.is("micro_batch", "auto") {
            true => section.text("micro_batch")?.map(|_| Choice { value: default, open: true }),
            false => section.part("micro_batch", 1).map_err(or_auto)?.map(Choice::made),
        };
        let seed = section.count("seed", 0)?.unwrap_or(1);
        let schedule = section.choice("schedule", &schedules)?.flatten();
        let precisions = Precision::ALL.map(|p| (p.name(), p));
        if section.is("precision", "fp16") || section.is("precision", "f16") {
            return Err(section.error(
                "precision",
                "`train.precision`: fp16 has so small a range that gradients vanish in it without a loss scale, which there is not",
                "write precision = \"bf16\", which has the range of f32",
            ));
        }
        let train = Self {
            steps,
            stop,
            batch,
            default_micro_batch: micro_batch.is_none(),
            micro_batch: micro_batch.unwrap_or(Choice::made(default)),
            seed,
            schedule: Choice { value: schedule.unwrap_or_default(), open: schedule.is_none() },
            precision: section.choice("precision", &precisions)?.unwrap_or_default(),
            optimizer: OptimizerConfig::read(&section.section("optimizer")?, steps)?,
        };
        section.finish()?;
        let micro = train.micro_batch.value;
        if batch % micro != 0 {
            let nearest = nearest_divisor(batch, micro);
            return Err(section.error(
                "micro_batch",
                format!("`train.micro_batch` = {micro} does not divide `train.batch` = {batch}"),
                format!("write micro_batch = {nearest}, another divisor of {batch}, or \"auto\""),
            ));
        }
        Ok(train)
    }

    /// Whether the job leaves the micro-batch size to the program.
    pub fn may_choose_micro_batch(&self) -> bool {
        self.micro_batch.open || self.default_micro_batch
    }

    /// The micro-batch sizes to choose from, the default first. They cut the batch into 1 to 128 micro-batches, each
    /// count at least twice the one before.
    pub fn sizes(&self) -> Vec<usize> {
        let Choice { value, open } = self.micro_batch;
        let mut counts: Vec<usize> = Vec::new();
        for n in (1..=self.batch.min(128)).filter(|n| open && self.batch.is_multiple_of(*n)) {
            if counts.last().is_none_or(|last| n >= 2 * last) {
                counts.push(n);
            }
        }
        let others = counts.into_iter().map(|n| self.batch / n).filter(|size| *size != value);
        [value].into_iter().chain(others).collect()
    }

    /// The schedules to choose from, the default first.
    pub fn schedules(&self) -> Vec<Schedule> {
        let Choice { value, open } = self.schedule;
        let others = Schedule::ALL.into_iter().filter(|s| open && *s != value);
        [value].into_iter().chain(others).collect()
    }
}

impl OptimizerConfig {
    /// The rule as Programs hold it.
    pub fn update_rule(&self) -> Optimizer {
        let weight_decay = self.weight_decay;
        match self.rule {
            Rule::Adamw { betas: [beta1, beta2], eps } => {
                Optimizer::Adamw(AdamwStep { beta1, beta2, eps, weight_decay })
            }
            Rule::Sgd { momentum, nesterov } => Optimizer::Sgd(SgdStep { momentum, weight_decay, nesterov }),
        }
    }

    /// The learning rate of each update.
    pub fn learning_rate(&self) -> LearningRate {
        let cosine_until = (self.decay == Decay::Cosine).then_some(self.decay_steps);
        LearningRate { base: self.lr, warmup: self.warmup, cosine_until, min: self.min_lr }
    }

    /// The largest global norm of the gradient, if there is a limit.
    pub fn clip_norm(&self) -> Option<f64> {
        (self.clip > 0.0).then_some(self.clip)
    }

    fn read(section: &Section<'_>, steps: u64) -> Result<Self, JobError> {
        let fraction = |x: f64| (0.0..1.0).contains(&x);
        let amount = |key| section.number(key, "at least 0", |x| x >= 0.0);
        let positive = |key| section.number(key, "above 0", |x| x > 0.0);
        let adamw = section.choice("name", &[("adamw", true), ("sgd", false)])?.unwrap_or(true);
        let below_one = "at least 0 and below 1";
        let (rule, lr, weight_decay, clip) = if adamw {
            let betas = section.pair("betas", below_one, fraction)?.unwrap_or([0.9, 0.95]);
            let eps = positive("eps")?.unwrap_or(1e-8);
            (Rule::Adamw { betas, eps }, 3e-4, 0.1, 1.0)
        } else {
            let momentum = section.number("momentum", below_one, fraction)?.unwrap_or(0.9);
            let nesterov = section.flag("nesterov")?.unwrap_or(false);
            (Rule::Sgd { momentum, nesterov }, 0.1, 5e-4, 0.0)
        };
        let lr = positive("lr")?.unwrap_or(lr);
        let rates = format!("at least 0 and at most lr = {lr}");
        let min_lr = section.number("min_lr", &rates, |x| (0.0..=lr).contains(&x))?;
        let decays = [("cosine", Decay::Cosine), ("none", Decay::None)];
        let optimizer = Self {
            rule,
            lr,
            weight_decay: amount("weight_decay")?.unwrap_or(weight_decay),
            clip: amount("clip")?.unwrap_or(clip),
            warmup: section.count("warmup", 0)?.unwrap_or(0),
            decay: section.choice("decay", &decays)?.unwrap_or(Decay::None),
            decay_steps: section.count("decay_steps", 1)?.unwrap_or(steps),
            min_lr: min_lr.unwrap_or(lr / 10.0),
            groups: section.tables("groups")?.iter().map(ParameterGroupConfig::read).collect::<Result<_, _>>()?,
        };
        section.finish()?;
        Ok(optimizer)
    }
}

fn scheduler_name<S: Serializer>(scheduler: &Option<Scheduler>, serializer: S) -> Result<S::Ok, S::Error> {
    scheduler.map(Scheduler::name).serialize(serializer)
}

impl Planning {
    pub(super) fn read(section: &Section<'_>, files: &Files) -> Result<Self, JobError> {
        let scheduler = section.choice("scheduler", &Scheduler::ALL.map(|s| (s.name(), s)))?;
        let file = files.one(section, "file")?;
        section.finish()?;
        Ok(Self { scheduler, file })
    }
}

/// Reads `[compression]`, the codecs of activations and their gradients. `docs/job.md` describes the keys.
pub(super) fn compression(section: &Section<'_>) -> Result<Compression, JobError> {
    let compressor = section.choice("name", &Compressor::ALL.map(|c| (c.name(), c)))?.unwrap_or_default();
    if section.has("error_feedback") {
        let reason =
            "`compression.error_feedback`: the error of one sample's activation would be added to that of another";
        return Err(section.error("error_feedback", reason, "leave it out: each step has other samples"));
    }
    if section.has("shared_masks") {
        let reason = "`compression.shared_masks`: gradients always keep the places that top-k sent of the activation";
        return Err(section.error("shared_masks", reason, "leave it out, or write name = \"adatopk-published\""));
    }
    let budget = section.quantity("loss_budget", &SHARE, false)?.map(LossBudget::new);
    let compression = Compression {
        compressor,
        ratio: section.number("ratio", "at least 1", |x| x >= 1.0)?.unwrap_or(compressor.usual_ratio()),
        loss_budget: match budget {
            None => LossBudget::default(),
            Some(Some(budget)) => budget,
            Some(None) => {
                let reason = "`compression.loss_budget` is above 100 %";
                return Err(section.error("loss_budget", reason, "it is a share of the loss, such as \"1 %\""));
            }
        },
        guard: section.flag("guard")?.unwrap_or(compressor == Compressor::Auto),
        stochastic_rounding: section.flag("stochastic_rounding")?.unwrap_or(false),
        spectral_watch: section.count("spectral_watch", 0)?.unwrap_or(0),
    };
    section.finish()?;
    Ok(compression)
}

impl Checkpointing {
    pub(super) fn read(section: &Section<'_>) -> Result<Self, JobError> {
        let checkpointing = Self {
            every: section.count("every", 0)?.unwrap_or(200),
            keep: section.size("keep", 1)?.unwrap_or(3),
            keep_best: section.flag("keep_best")?.unwrap_or(false),
            copies: section.flag("copies")?.unwrap_or(true),
        };
        section.finish()?;
        Ok(checkpointing)
    }
}

impl Eval {
    pub(super) fn read(section: &Section<'_>) -> Result<Self, JobError> {
        let eval = Self {
            every: section.count("every", 0)?.unwrap_or(100),
            batches: section.count("batches", 0)?.unwrap_or(10),
        };
        section.finish()?;
        Ok(eval)
    }
}
