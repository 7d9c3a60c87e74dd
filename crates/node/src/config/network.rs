//! The network of a job or of a published configuration, wherever its data are by now.

use std::path::Path;

use fusionllm_graph::{DType, Graph, GraphError};

use super::files::Files;
use super::model::{Family, Model, read_gpt2};
use super::reader::{self, JobError, Section};
use super::sections::{Data, Text, Train, Validation};
use crate::data::{IMAGE_SIZE, Tokenizer};

/// What it takes to build a network and to use its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// Which network.
    pub family: Family,
    /// How its text becomes numbers: unknown for images, and where a published vocabulary is neither GPT-2's nor the bytes.
    pub tokenizer: Option<Tokenizer>,
    /// Tokens it learns to see at once; the side of an image.
    pub context: usize,
    /// Samples that pass through together in training.
    pub micro_batch: usize,
}

impl Network {
    /// Of whatever `path` leads to: a run's directory, a checkpoint's, one as Hugging Face publishes them, a job file
    /// or a `config.json`.
    ///
    /// # Errors
    ///
    /// It is none of these, or as [`Self::of_job`] and [`Self::published`].
    pub fn at(path: &Path) -> Result<Self, JobError> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if path.is_dir() {
            // A checkpoint stands in RUN/checkpoints/step-N.
            let run = path.ancestors().nth(2).filter(|_| path.join("manifest.json").exists());
            let job = [Some(path.as_path()), run].into_iter().flatten().map(|dir| dir.join("job.toml"));
            if let Some(job) = job.into_iter().find(|job| job.is_file()) {
                return Self::of_job(&job);
            }
            let config = path.join("config.json");
            if config.is_file() {
                return Self::published(&config);
            }
            return Err(JobError::new(
                path.display(),
                "there is no model here: neither job.toml nor config.json",
                "give a run directory such as runs/0001, a checkpoint in it, or a directory from Hugging Face",
            ));
        }
        match path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
            true => Self::published(&path),
            false => Self::of_job(&path),
        }
    }

    /// Of a job file. Neither its data nor the weights it starts from need to be there.
    ///
    /// # Errors
    ///
    /// What [`Job::load`](super::Job::load) would find wrong with `[model]`, `[train]` and the names of sections.
    pub fn of_job(path: &Path) -> Result<Self, JobError> {
        let root = reader::parse(&path.display().to_string(), &super::read_file(path)?)?;
        let top = Section::top(&root);
        let (model, data, train) = (top.section("model")?, top.section("data")?, top.section("train")?);
        for name in ["plan", "compression", "checkpoint", "eval"] {
            top.section(name)?;
        }
        top.finish()?;
        let files = Files::from(path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")));
        let data = Data::without_files(&data, model.is("family", "resnet"))?;
        let family = Model::read_family(&model, &files, &data)?;
        let micro_batch = Train::read(&train)?.micro_batch.value;
        let (tokenizer, context) = match &data {
            Data::Text(text) => (Some(text.tokenizer), text.context),
            Data::Cifar10(_) => (None, IMAGE_SIZE),
            Data::Tensors(_) => (None, 1),
        };
        Ok(Self { family, tokenizer, context, micro_batch })
    }

    /// Of a `config.json` as Hugging Face publishes them, for one sample of full length.
    ///
    /// # Errors
    ///
    /// It cannot be read, or its model is no GPT-2 that ours computes.
    pub fn published(path: &Path) -> Result<Self, JobError> {
        let published = reader::parse_json(path)?;
        let empty = reader::parse(&path.display().to_string(), "")?;
        let text = Text {
            files: Vec::new(),
            // Hugging Face's defaults.
            tokenizer: Tokenizer::Gpt2,
            context: 1024,
            validation: Validation::Fraction(0.0),
        };
        let gpt2 = read_gpt2(&Section::top(&empty), &Data::Text(text), Some(&published))?;
        let tokenizer = match gpt2.vocab_size {
            // Vocabularies are often padded to a multiple of 64 or 128.
            50_257..=50_432 => Some(Tokenizer::Gpt2),
            256 => Some(Tokenizer::Bytes),
            _ => None,
        };
        Ok(Self { context: gpt2.n_positions, family: Family::Gpt2(gpt2), tokenizer, micro_batch: 1 })
    }

    /// The forward graph for `samples` samples of `context` tokens (or images of that side) at once.
    ///
    /// # Errors
    ///
    /// The settings describe no network, or `context` is longer than it sees.
    pub fn forward(&self, samples: usize, context: usize) -> Result<Graph, GraphError> {
        match &self.family {
            Family::Gpt2(config) => config.build(samples, context, DType::F32),
            Family::Resnet(config) => config.build(samples, context, DType::F32),
            Family::Imported { file } => crate::imported::graph(file, samples),
        }
    }
}
