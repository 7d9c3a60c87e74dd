//! The network of a job file or of a `config.json`, without its data.

use std::path::{Path, PathBuf};

use fusionllm_data::{Chats, Data, Documents, IMAGE_SIZE, Text, Tokenizer, Validation};
use fusionllm_graph::Advice;

use fusionllm_models::Decoder;

use super::data::{self, ModelFacts};
use super::files::Files;
use super::lora::{self, Lora};
use super::model::{self, Family, ModelConfig, read_gpt2};
use super::reader::{self, JobError, Section};
use super::sections::Train;

/// A network, and the facts by which its weights can be used.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// The network's family and settings.
    pub family: Family,
    /// The tokenizer of its text; `None` for images and for an unknown vocabulary.
    pub tokenizer: Option<Tokenizer>,
    /// Tokens per sample; for images, the length of their side.
    pub context: usize,
    /// Samples per micro-batch in training.
    pub micro_batch: usize,
    /// The weights that training starts from, which may no longer be there.
    pub weights: Option<PathBuf>,
    /// The adapters that are trained instead of the network's own parameters.
    pub lora: Option<Lora>,
    /// Whether the checkpoint with the lowest validation loss is the one to use.
    pub keep_best: bool,
    /// Patterns of the parameters that are not trained.
    pub freeze: Vec<String>,
}

impl Network {
    /// Whether a parameter, by its name, stays as it is in training.
    pub fn freezes(&self, parameter: &str) -> bool {
        lora::freezes(self.lora.as_ref(), &self.freeze, parameter)
    }

    /// The network that `path` leads to: a run directory, a checkpoint, a directory from Hugging Face, a job file or
    /// a `config.json`.
    ///
    /// # Errors
    ///
    /// `path` is none of these, or the errors of [`Self::of_job`] and [`Self::published`].
    pub fn at(path: &Path) -> Result<Self, JobError> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if path.is_dir() {
            // A checkpoint is at RUN/checkpoints/step-N.
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

    /// The network of a job file. Its data and weights may be missing.
    ///
    /// # Errors
    ///
    /// The errors of [`Job::load`](super::Job::load) in `[model]`, `[train]` and the names of sections.
    pub fn of_job(path: &Path) -> Result<Self, JobError> {
        let root = reader::parse(&path.display().to_string(), &super::read_file(path)?)?;
        let top = Section::top(&root);
        let (model, data, train) = (top.section("model")?, top.section("data")?, top.section("train")?);
        let lora = top.section("lora")?;
        for name in ["plan", "compression", "checkpoint", "eval", "network"] {
            top.section(name)?;
        }
        let files = Files::of_job(path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")), &top)?;
        top.finish()?;
        let data = data::without_files(&data, &files, ModelFacts::of(&model, &files)?)?;
        let family = ModelConfig::read_family(&model, &files, &data)?;
        let micro_batch = Train::read(&train, None)?.micro_batch.value;
        let (tokenizer, context) = match &data {
            Data::Text(Text { tokenizer, context, .. }) | Data::Chats(Chats { tokenizer, context, .. }) => {
                (Some(tokenizer.clone()), *context)
            }
            Data::Cifar10(_) => (None, IMAGE_SIZE),
            Data::Tensors(_) => (None, 1),
        };
        let weights = files.named(&model, "weights")?.or(files.named(&model, "path")?);
        let lora = Lora::read(&lora, &files)?;
        let keep_best = top.section("checkpoint")?.flag("keep_best")?.unwrap_or(false);
        let (freeze, _) = model::read_freezing(&model)?;
        Ok(Self { family, tokenizer, context, micro_batch, weights, lora, keep_best, freeze })
    }

    /// The network of a `config.json` from Hugging Face, for one sample of full length.
    ///
    /// # Errors
    ///
    /// The file cannot be read, it describes no model that this program computes, or the tokenizer beside it is broken.
    pub fn published(path: &Path) -> Result<Self, JobError> {
        let published = reader::parse_json(path)?;
        let weights = path.parent().map(Path::to_owned);
        if published.values.get("model_type").is_some_and(|name| name != "gpt2") {
            let decoder = Decoder::from_config(&published.values)
                .map_err(|e| model::at_key(&Section::top(&published.node), &e))?;
            let tokenizer = tokenizer_beside(path)?;
            return Ok(Self {
                context: decoder.longest(),
                family: Family::Decoder(Box::new(decoder)),
                tokenizer,
                micro_batch: 1,
                weights,
                lora: None,
                keep_best: false,
                freeze: Vec::new(),
            });
        }
        let empty = reader::parse(&path.display().to_string(), "")?;
        let text = Text {
            files: Vec::new(),
            // Hugging Face's defaults.
            tokenizer: Tokenizer::Gpt2,
            context: 1024,
            validation: Validation::Fraction(0.0),
            shuffle: true,
            documents: Documents::Joined,
        };
        let gpt2 = read_gpt2(&Section::top(&empty), &Data::Text(text), Some(&published.node), false)?;
        let own = match gpt2.vocab_size {
            // Vocabularies are often padded to a multiple of 64 or 128.
            50_257..=50_432 => Some(Tokenizer::Gpt2),
            256 => Some(Tokenizer::Bytes),
            _ => None,
        };
        let tokenizer = tokenizer_beside(path)?.or(own);
        let context = gpt2.n_positions;
        let (family, lora, freeze) = (Family::Gpt2(gpt2), None, Vec::new());
        Ok(Self { context, family, tokenizer, micro_batch: 1, weights, lora, keep_best: false, freeze })
    }
}

/// The tokenizer in the folder of a `config.json`, if there is one.
fn tokenizer_beside(config: &Path) -> Result<Option<Tokenizer>, JobError> {
    let folder = config.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let open = |folder| {
        Tokenizer::open(folder)
            .map_err(|e| JobError::new(config.display(), e.to_string(), e.hint().unwrap_or_default()))
    };
    data::has_tokenizer(folder).then(|| open(folder)).transpose()
}
