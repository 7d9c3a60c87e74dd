//! The job file and the testbed file.
//!
//! A job is read from TOML and from `--set section.key=value` overrides, and checked as a whole. It is written back
//! with every default filled in and every path absolute, so that the copy in a run directory is complete.
//! `docs/job.md` and `docs/testbed.md` describe all keys.

mod files;
mod gpus;
mod model;
mod network;
mod networking;
mod quantity;
mod reader;
mod sections;
mod testbed;

use std::path::Path;

use fusionllm_plan::Compression;
use serde::Serialize;

pub use model::{Family, ModelConfig};
pub use network::Network;
pub use networking::{Networking, parse_relay};
pub use reader::JobError;
pub use sections::{Checkpointing, Choice, Decay, Eval, OptimizerConfig, Planning, Rule, Train};

pub use quantity::{parse_period, parse_size};
pub use testbed::{Known, Testbed, load_profile};

use files::Files;
use reader::{Node, Section};

use crate::data::Data;

/// A whole job, with every default filled in.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    /// The network.
    pub model: ModelConfig,
    /// The data.
    pub data: Data,
    /// Steps, batches and the update rule.
    pub train: Train,
    /// How the model is cut over the peers.
    pub plan: Planning,
    /// Codecs for the links between peers.
    pub compression: Compression,
    /// When checkpoints are written.
    pub checkpoint: Checkpointing,
    /// When the loss on held-out data is measured.
    pub eval: Eval,
    /// How the machines reach each other.
    pub network: Networking,
}

impl Job {
    /// Reads the job file at `path` and applies `overrides` such as `section.key=value`, in order. Relative paths
    /// start at the job file's directory.
    ///
    /// # Errors
    ///
    /// The first problem: bad TOML, an unknown setting, a wrong type, a value out of range, a contradiction, or a
    /// missing file.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, JobError> {
        let name = path.display().to_string();
        let text = read_file(path)?;
        let directory = path.parent().filter(|p| !p.as_os_str().is_empty());
        Self::parse(&name, &text, directory.unwrap_or(Path::new(".")), overrides)
    }

    /// Reads a job from `text`. Messages call it `name`, and relative paths start at `directory`.
    ///
    /// # Errors
    ///
    /// As [`Self::load`].
    pub fn parse(name: &str, text: &str, directory: &Path, overrides: &[String]) -> Result<Self, JobError> {
        Self::read(reader::parse(name, text)?, directory, overrides)
    }

    /// The job that runs when none is named: a byte-level GPT-2 of 0.8 million parameters, trained on the sample
    /// text. Relative paths in `overrides` start at the working directory.
    ///
    /// # Errors
    ///
    /// An override is wrong.
    pub fn quick_start(overrides: &[String]) -> Result<Self, JobError> {
        let name = "the quick start's job";
        Self::parse(name, include_str!("quick_start.toml"), Path::new("."), overrides)
    }

    fn read(mut root: Node, directory: &Path, overrides: &[String]) -> Result<Self, JobError> {
        for setting in overrides {
            root.set(setting)?;
        }
        let top = Section::top(&root);
        let files = Files::from(directory);
        let sections = Sections { model: top.section("model")?, data: top.section("data")? };
        let train = top.section("train")?;
        let plan = top.section("plan")?;
        let compression = top.section("compression")?;
        let checkpoint = top.section("checkpoint")?;
        let eval = top.section("eval")?;
        let network = top.section("network")?;
        top.finish()?;

        // The data come first, as some defaults of the model depend on them.
        let data = Data::read(&sections.data, &files, sections.model.is("family", "resnet"))?;
        let job = Self {
            model: ModelConfig::read(&sections.model, &files, &data)?,
            data,
            train: Train::read(&train)?,
            plan: Planning::read(&plan, &files)?,
            compression: sections::compression(&compression)?,
            checkpoint: Checkpointing::read(&checkpoint)?,
            eval: Eval::read(&eval)?,
            network: Networking::read(&network)?,
        };
        job.check(&sections)?;
        Ok(job)
    }

    /// Micro-batches per step.
    pub fn micro_batches(&self) -> u32 {
        (self.train.batch / self.train.micro_batch.value) as u32
    }

    /// Checks settings of different sections against each other.
    fn check(&self, at: &Sections<'_>) -> Result<(), JobError> {
        self.check_groups(at)?;
        match (&self.model.family, &self.data) {
            (Family::Gpt2(gpt2), Data::Text(text)) => {
                let vocabulary = text.tokenizer.vocabulary();
                if gpt2.vocab_size < vocabulary {
                    return Err(at.model.error(
                        "vocab_size",
                        format!(
                            "`model.vocab_size` is {}, but the tokenizer \"{}\" has {vocabulary} tokens",
                            gpt2.vocab_size, text.tokenizer
                        ),
                        format!("write vocab_size = {vocabulary}, or leave it out"),
                    ));
                }
                if text.context > gpt2.n_positions {
                    return Err(at.data.error(
                        "context",
                        format!("`data.context` is {}, but the model has {} positions", text.context, gpt2.n_positions),
                        "lower data.context, or raise model.n_positions",
                    ));
                }
                Ok(())
            }
            (Family::Resnet(resnet), Data::Cifar10(_)) => {
                if resnet.num_classes < crate::data::CIFAR10_CLASSES {
                    return Err(at.model.error(
                        "num_classes",
                        format!("`model.num_classes` is {}, but CIFAR-10 has 10", resnet.num_classes),
                        "write num_classes = 10, or leave it out",
                    ));
                }
                Ok(())
            }
            // The inputs of an imported model are known once it is read.
            (Family::Imported { .. }, _) => Ok(()),
            (Family::Gpt2(_) | Family::Resnet(_), Data::Tensors(_)) => Err(at.data.error(
                "kind",
                "tensors are for models from elsewhere, which say what they take",
                "write file = \"model.pt2\" in [model], or another kind of data",
            )),
            (Family::Gpt2(_), Data::Cifar10(_)) => Err(at.data.error(
                "kind",
                "a gpt2 learns from text, not from images",
                "write kind = \"text\" in [data], or family = \"resnet\" in [model]",
            )),
            (Family::Resnet(_), Data::Text(_)) => Err(at.data.error(
                "kind",
                "a resnet learns from images, not from text",
                "write kind = \"cifar10\" in [data], or family = \"gpt2\" in [model]",
            )),
        }
    }

    /// A group of rows must be in one micro-batch.
    fn check_groups(&self, at: &Sections<'_>) -> Result<(), JobError> {
        let (group, batch) = (self.data.group(), self.train.batch);
        let Choice { value: micro_batch, open } = self.train.micro_batch;
        if group == 1 || (!open && micro_batch.is_multiple_of(group)) {
            return Ok(());
        }
        let fitting = (1..=batch).find(|n| batch.is_multiple_of(*n) && n.is_multiple_of(group));
        let hint = match fitting {
            Some(size) => format!("write micro_batch = {size} in [train], or another multiple of {group}"),
            None => format!("write a multiple of {group} for batch and micro_batch in [train]"),
        };
        let message = match open {
            true => format!("`train.micro_batch` is \"auto\", but `data.group` = {group} needs a size"),
            false => {
                format!("`train.micro_batch` = {micro_batch} does not hold whole groups of `data.group` = {group}")
            }
        };
        Err(at.data.error("group", message, hint))
    }

    /// The job as TOML, which [`Self::load`] reads back from any directory.
    ///
    /// # Errors
    ///
    /// A path is not UTF-8, or a number exceeds 63 bits.
    pub fn to_toml(&self) -> Result<String, JobError> {
        toml::to_string(self).map_err(|e| {
            JobError::new("job.toml", format!("the job cannot be written: {e}"), "rename the file, or lower the number")
        })
    }
}

fn read_file(path: &Path) -> Result<String, JobError> {
    std::fs::read_to_string(path).map_err(|e| {
        JobError::new(
            path.display(),
            format!("the job file cannot be read: {e}"),
            "give the path of a job file, or none at all for the quick start",
        )
    })
}

/// The sections whose settings are checked against each other.
struct Sections<'a> {
    model: Section<'a>,
    data: Section<'a>,
}

#[cfg(test)]
mod tests;
