//! The job file and the testbed file.
//!
//! A job is read from TOML and from `--set section.key=value` overrides, and checked as a whole. It is written back
//! with every default filled in and every path absolute, so that the copy in a run directory is complete.
//! `docs/job.md` and `docs/testbed.md` describe all keys.

mod data;
mod files;
mod gpus;
mod lora;
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

use data::ModelFacts;
pub use lora::Lora;
pub use model::{Family, ModelConfig};
pub use network::Network;
pub use networking::{Networking, parse_relay};
pub use reader::{JobError, word_of_others};
pub use sections::{Checkpointing, Choice, Decay, Eval, OptimizerConfig, ParameterGroupConfig, Planning, Rule, Train};

pub use quantity::{parse_period, parse_size};
pub use testbed::{Known, Testbed, load_profile};

use crate::run_dir::TOKENIZER;
use files::Files;
use reader::{Node, Section};

use fusionllm_data::{ChatTemplate, Data};

/// A whole job, with every default filled in.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    /// The network.
    pub model: ModelConfig,
    /// The adapters that are trained instead of the network's own parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora>,
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

    /// Reads a job from the bytes of a file, which must be UTF-8.
    ///
    /// # Errors
    ///
    /// The same as those of [`Self::load`].
    pub fn decode(name: &str, bytes: Vec<u8>, directory: &Path, overrides: &[String]) -> Result<Self, JobError> {
        Self::parse(name, &reader::decode(name, bytes)?, directory, overrides)
    }

    /// Reads a job from `text`. Messages call it `name`, and relative paths start at `directory`.
    ///
    /// # Errors
    ///
    /// The same as those of [`Self::load`].
    pub fn parse(name: &str, text: &str, directory: &Path, overrides: &[String]) -> Result<Self, JobError> {
        Self::read(reader::parse(name, text)?, directory, overrides)
    }

    /// The job that runs when none is named: a byte-level GPT-2 of 0.8 million parameters, trained on the sample
    /// text. If the overrides name a Hugging Face folder, its model is trained instead, with smaller steps. They may name
    /// another network as well. Relative paths in `overrides` start at the working directory.
    ///
    /// # Errors
    ///
    /// An override is wrong.
    pub fn quick_start(overrides: &[String]) -> Result<Self, JobError> {
        let name = "the quick start's job";
        let names = |wanted: &str| {
            overrides
                .iter()
                .filter_map(|setting| setting.split_once('='))
                .any(|(key, value)| key.trim() == wanted && value.trim().trim_matches(['"', '\'']) != "gpt2")
        };
        let text = if names("model.path") {
            include_str!("quick_folder.toml")
        } else if ["model.family", "model.config", "model.file"].into_iter().any(names) {
            // The settings of the GPT-2 are those of no other network.
            include_str!("quick_start.toml")
        } else {
            concat!(include_str!("quick_model.toml"), include_str!("quick_start.toml"))
        };
        // An override, so that one of the user's is the length of the job.
        let overrides = [&["train.steps=400".to_owned()], overrides].concat();
        Self::parse(name, text, Path::new("."), &overrides)
    }

    fn read(mut root: Node, directory: &Path, overrides: &[String]) -> Result<Self, JobError> {
        let file = root.clone();
        for setting in overrides {
            root.set(setting)?;
        }
        let top = Section::top(&root);
        let files = Files::of_job(directory, &top)?;
        let sections = Sections { model: top.section("model")?, data: top.section("data")? };
        let lora = top.section("lora")?;
        let train = top.section("train")?;
        let plan = top.section("plan")?;
        let compression = top.section("compression")?;
        let checkpoint = top.section("checkpoint")?;
        let eval = top.section("eval")?;
        let network = top.section("network")?;
        top.finish()?;

        // The settings that decide about others are checked before them.
        sections.model.misspelt(&["family", "file"])?;
        sections.data.misspelt(&["kind"])?;
        // The data come first, because some defaults of the model depend on them.
        let data = data::read(&sections.data, &files, ModelFacts::of(&sections.model, &files)?)?;
        let job = Self {
            model: ModelConfig::read(&sections.model, &files, &data)?,
            lora: Lora::read(&lora, &files)?,
            data,
            train: Train::read(&train, Section::top(&file).section("train")?.count("steps", 1)?)?,
            plan: Planning::read(&plan, &files)?,
            compression: sections::compression(&compression)?,
            checkpoint: Checkpointing::read(&checkpoint)?,
            eval: Eval::read(&eval)?,
            network: Networking::read(&network)?,
        };
        job.check(&sections)?;
        Ok(job)
    }

    /// Whether a parameter of the network, by its name, stays as it is.
    pub fn freezes(&self, parameter: &str) -> bool {
        lora::freezes(self.lora.as_ref(), &self.model.freeze, parameter)
    }

    /// Micro-batches per step.
    pub fn micro_batches(&self) -> u32 {
        (self.train.batch / self.train.micro_batch.value) as u32
    }

    /// Checks settings of different sections against each other.
    fn check(&self, at: &Sections<'_>) -> Result<(), JobError> {
        self.check_groups(at)?;
        match (&self.model.family, &self.data) {
            (Family::Gpt2(_) | Family::Decoder(_), Data::Text(_) | Data::Chats(_)) => Ok(()),
            (Family::Resnet(_), Data::Cifar10(_)) => Ok(()),
            // The inputs of an imported model are known once it is read.
            (Family::Imported { .. }, _) => Ok(()),
            (Family::Gpt2(_) | Family::Decoder(_) | Family::Resnet(_), Data::Tensors(_)) => Err(at.data.error(
                "kind",
                "`data.kind`: tensors are for models from elsewhere, which say what they take",
                "write file = \"model.pt2\" in [model], or another kind of data",
            )),
            (Family::Gpt2(_) | Family::Decoder(_), Data::Cifar10(_)) => Err(at.data.error(
                "kind",
                "`data.kind`: a language model learns from text, not from images",
                "write kind = \"text\" in [data], or family = \"resnet\" in [model]",
            )),
            (Family::Resnet(_), Data::Text(_) | Data::Chats(_)) => Err(at.data.error(
                "kind",
                "`data.kind`: a resnet learns from images, not from text",
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
        let fitting = divisors(batch).filter(|n| n.is_multiple_of(group)).min();
        let hint = match fitting {
            Some(size) => format!("write micro_batch = {size} in [train], or another multiple of {group}"),
            None if group > batch && open => "write group = 1, or a size for micro_batch in [train]".to_owned(),
            None if group > batch => format!("write group = {micro_batch}, or another divisor of it"),
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

    /// The job as TOML for a file of a run, whose directory is `run` as seen from that file. The run has the files of a
    /// tokenizer and of a template of its own ([`RunDir::keep_tokenizer`](crate::run_dir::RunDir::keep_tokenizer)).
    ///
    /// # Errors
    ///
    /// The errors of [`Self::to_toml`].
    pub fn to_toml_in_run(&self, run: &Path) -> Result<String, JobError> {
        let mut job = self.clone();
        let own = run.join(TOKENIZER);
        match &mut job.data {
            Data::Text(text) => text.tokenizer = text.tokenizer.at(&own),
            Data::Chats(chats) => {
                chats.tokenizer = chats.tokenizer.at(&own);
                chats.template = chats.template.as_ref().map(|template| template.at(&own.join(ChatTemplate::FILE)));
            }
            Data::Cifar10(_) | Data::Tensors(_) => {}
        }
        job.to_toml()
    }
}

fn read_file(path: &Path) -> Result<String, JobError> {
    reader::read_text(path, "the job file", "give the path of a job file, or none at all for the quick start")
}

/// The divisors of a number above 0, in no order. The root of a square comes twice.
fn divisors(n: usize) -> impl Iterator<Item = usize> {
    let root = move |i: &usize| i.checked_mul(*i).is_some_and(|square| square <= n);
    (1..).take_while(root).filter(move |i| n.is_multiple_of(*i)).flat_map(move |i| [i, n / i])
}

/// The divisor of `n` that is nearest to a number; of two, the smaller one.
fn nearest_divisor(n: usize, wanted: usize) -> usize {
    divisors(n).min_by_key(|d| (d.abs_diff(wanted), *d)).unwrap_or(1)
}

/// The sections whose settings are checked against each other.
struct Sections<'a> {
    model: Section<'a>,
    data: Section<'a>,
}

#[cfg(test)]
mod tests;
