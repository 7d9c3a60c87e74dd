//! `[model]`: the network to train.

use std::borrow::Cow;
use std::path::PathBuf;

use fusionllm_data::{CIFAR10_CLASSES, Chats, Data, Text};
use fusionllm_graph::{GraphError, Precision};
use fusionllm_models::decoder::{ConfigError, MODEL_TYPES};
use fusionllm_models::{AttentionImplementation, Decoder, Gpt2Config, ResNetConfig, ResNetStem};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::files::{CONFIG, Files};
use super::lora::patterns;
use super::reader::{self, JobError, Json, NULL, Node, Section};
use super::{divisors, nearest_divisor};
use crate::run_dir::GRAPH;

/// The network, and the weights that it starts from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// The network.
    #[serde(flatten)]
    pub family: Family,
    /// The weights to start from, with Hugging Face's or torchvision's (ResNet) names: a safetensors file, the index of
    /// several, or a folder with one or the other. Without them, `train.seed` decides the first parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,
    /// Patterns of the parameters that are not trained. Default none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub freeze: Vec<String>,
    /// The type in which peers keep parameters that are not trained. Default f32.
    #[serde(skip_serializing_if = "is_default")]
    pub frozen_dtype: Precision,
}

fn is_default(dtype: &Precision) -> bool {
    *dtype == Precision::default()
}

/// A family of networks, with the settings of one member.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "family", rename_all = "lowercase")]
pub enum Family {
    /// A causal language model.
    Gpt2(Gpt2Config),
    /// An image classifier.
    Resnet(ResNetConfig),
    /// A model from `torch.export`.
    Imported {
        /// The `.pt2` archive. Training starts from the weights in it.
        file: PathBuf,
        /// The position or the name of the output that is the loss. Without it, it is one that can be trained.
        #[serde(skip_serializing_if = "Option::is_none")]
        loss: Option<String>,
    },
    /// Another causal language model, as its `config.json` describes it.
    #[serde(untagged, serialize_with = "write_decoder")]
    Decoder(Box<Decoder>),
}

impl Family {
    /// The decoder of a language model that this program builds. `None` for another network.
    ///
    /// # Errors
    ///
    /// A setting of the network is invalid.
    pub fn decoder(&self) -> Result<Option<Cow<'_, Decoder>>, GraphError> {
        match self {
            Self::Gpt2(config) => Ok(Some(Cow::Owned(config.decoder()?))),
            Self::Decoder(decoder) => Ok(Some(Cow::Borrowed(decoder))),
            Self::Resnet(_) | Self::Imported { .. } => Ok(None),
        }
    }
}

/// Writes the keys of a decoder's `config.json`, with its family.
fn write_decoder<S: Serializer>(decoder: &Decoder, serializer: S) -> Result<S::Ok, S::Error> {
    /// TOML has no null.
    fn with_words(value: &serde_json::Value) -> serde_json::Value {
        match value {
            serde_json::Value::Null => NULL.into(),
            serde_json::Value::Array(values) => values.iter().map(with_words).collect(),
            serde_json::Value::Object(values) => values.iter().map(|(key, v)| (key.clone(), with_words(v))).collect(),
            other => other.clone(),
        }
    }
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("family", decoder.model_type)?;
    for (key, value) in decoder.config.iter().filter(|(key, _)| *key != MODEL_TYPE) {
        map.serialize_entry(key, &with_words(value))?;
    }
    map.end()
}

/// The key of the family in a `config.json`.
const MODEL_TYPE: &str = "model_type";

/// The keys of `[model]` that no `config.json` has.
const OWN_KEYS: [&str; 6] = ["family", "path", "config", "weights", FREEZE, FROZEN_DTYPE];

/// The key of the parameters that are not trained.
const FREEZE: &str = "freeze";

/// The key of the type in which they are kept.
const FROZEN_DTYPE: &str = "frozen_dtype";

/// The names of `activation_function`.
const ACTIVATIONS: [&str; 4] = ["gelu_new", "gelu", "relu", "silu"];

/// The name of a family in a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FamilyName {
    Gpt2,
    Resnet,
    Imported,
    Decoder,
}

impl FamilyName {
    /// Reads `family` of `[model]`, if it is there.
    pub(super) fn read(section: &Section<'_>) -> Result<Option<Self>, JobError> {
        let own = [("gpt2", Self::Gpt2), ("resnet", Self::Resnet), ("imported", Self::Imported)];
        let decoders = MODEL_TYPES.map(|name| (name, Self::Decoder));
        section.choice("family", &[&own[..], &decoders].concat())
    }
}

impl ModelConfig {
    pub(super) fn read(section: &Section<'_>, files: &Files, data: &Data) -> Result<Self, JobError> {
        let family = Self::read_family(section, files, data)?;
        let weights = files.file_or_folder(section, "weights")?.or(files.folder(section, "path")?);
        let (freeze, frozen_dtype) = read_freezing(section)?;
        Ok(Self { family, weights, freeze, frozen_dtype })
    }

    /// The `config.json` that a section names, itself or with its folder.
    fn published(section: &Section<'_>, files: &Files) -> Result<Option<Json>, JobError> {
        let folder = files.folder(section, "path")?.map(|folder| folder.join(CONFIG));
        files.one(section, "config")?.or(folder).map(|path| reader::parse_json(&path)).transpose()
    }

    /// The network alone. Its weights may be missing.
    pub(super) fn read_family(section: &Section<'_>, files: &Files, data: &Data) -> Result<Family, JobError> {
        let named = FamilyName::read(section)?;
        let is_text = !matches!(data, Data::Cifar10(_)) || section.has("path") || section.has("config");
        let writes_text = match named {
            None => is_text && !section.has("file"),
            Some(name) => matches!(name, FamilyName::Gpt2 | FamilyName::Decoder),
        };
        let published = if writes_text { Self::published(section, files)? } else { None };
        let default = match (data, &published) {
            _ if section.has("file") => FamilyName::Imported,
            (_, Some(Json { values, .. })) if values.get(MODEL_TYPE).is_none_or(|name| name == "gpt2") => {
                FamilyName::Gpt2
            }
            (_, Some(_)) => FamilyName::Decoder,
            (Data::Cifar10(_), None) => FamilyName::Resnet,
            _ => FamilyName::Gpt2,
        };
        let name = named.unwrap_or(default);
        section.path("weights")?;
        read_freezing(section)?;
        Ok(match name {
            FamilyName::Gpt2 => {
                Family::Gpt2(read_gpt2(section, data, published.as_ref().map(|json| &json.node), true)?)
            }
            FamilyName::Decoder => Family::Decoder(Box::new(read_decoder(section, data, published.as_ref())?)),
            FamilyName::Resnet => Family::Resnet(read_resnet(section)?),
            FamilyName::Imported => {
                let file = files.one_or_own(section, "file", GRAPH)?;
                let loss = section.position_or_name("loss")?;
                section.finish()?;
                let file = file.ok_or_else(|| {
                    section.error(
                        "file",
                        "[model] names no file",
                        "write file = \"PATH\" in [model], the path of an archive that torch.export.save wrote",
                    )
                })?;
                Family::Imported { file, loss }
            }
        })
    }
}

/// The patterns of the parameters that are not trained, and the type in which they are kept.
pub(super) fn read_freezing(section: &Section<'_>) -> Result<(Vec<String>, Precision), JobError> {
    let freeze = patterns(section, FREEZE, "write freeze = [\"embed_tokens\", \"layers.0\"], names or parts of them")?;
    let types = Precision::ALL.map(|p| (p.name(), p));
    Ok((freeze, section.choice(FROZEN_DTYPE, &types)?.unwrap_or_default()))
}

/// Keys of the job file replace those of `config.json`. Vocabulary and positions follow the data where neither has them.
fn read_decoder(section: &Section<'_>, data: &Data, published: Option<&Json>) -> Result<Decoder, JobError> {
    let (context, vocabulary) = sizes(data);
    let mut config = published.map(|json| json.values.clone()).unwrap_or_default();
    config.extend(section.written_besides(&OWN_KEYS));
    if let Some(family) = section.text("family")? {
        let theirs = published.and_then(|json| json.values.get(MODEL_TYPE)).and_then(serde_json::Value::as_str);
        if let Some(theirs) = theirs.filter(|theirs| *theirs != family) {
            let message = format!("`model.family` is \"{family}\", but the config.json describes a {theirs}");
            return Err(section.error("family", message, "leave family out: config.json has it"));
        }
        config.insert(MODEL_TYPE.to_owned(), family.into());
    }
    for (key, size) in [(VOCABULARY, vocabulary), (POSITIONS, context)] {
        config.entry(key).or_insert(size.into());
    }
    let theirs = published.map(|json| Section::top(&json.node));
    let at = |key: &str| theirs.as_ref().filter(|_| !section.has(key)).unwrap_or(section);
    let decoder = Decoder::from_config(&config).map_err(|e| at_key(at(&e.key), &e))?;
    let too_small = |key: &str, size: usize, reason: String| {
        at(key).error(key, format!("`{key}` = {size} is too small: {reason}"), "raise it, or lower the other")
    };
    if decoder.vocab_size < vocabulary {
        let reason = format!("the tokenizer has {vocabulary} tokens");
        return Err(too_small(VOCABULARY, decoder.vocab_size, reason));
    }
    if decoder.longest() < context {
        return Err(too_small(POSITIONS, decoder.longest(), format!("data.context is {context} tokens")));
    }
    Ok(decoder)
}

/// The key of the size of the vocabulary in a `config.json`.
const VOCABULARY: &str = "vocab_size";

/// The key of the number of positions in a `config.json`.
const POSITIONS: &str = "max_position_embeddings";

/// The error about a key of a `config.json`, at its place.
pub(super) fn at_key(section: &Section<'_>, e: &ConfigError) -> JobError {
    section.error(&e.key, &e.message, &e.hint)
}

/// The tokens of a sample and of the vocabulary.
fn sizes(data: &Data) -> (usize, usize) {
    match data {
        Data::Text(Text { tokenizer, context, .. }) | Data::Chats(Chats { tokenizer, context, .. }) => {
            (*context, tokenizer.vocabulary())
        }
        // The caller refuses this combination later.
        Data::Cifar10(_) | Data::Tensors(_) => (1, 1),
    }
}

/// The defaults are Hugging Face's, except three. Vocabulary and positions follow the data. Heads have 64 channels,
/// or the next larger size that divides the width. If it `must_fit`, the model takes whole samples of the data.
pub(super) fn read_gpt2(
    section: &Section<'_>,
    data: &Data,
    published: Option<&Node>,
    must_fit: bool,
) -> Result<Gpt2Config, JobError> {
    if let Some(node) = published {
        check_published(&Section::top(node))?;
    }
    // A key of the job file replaces that of `config.json`.
    let backed = published.map(|node| section.backed_by(node));
    let section = backed.as_ref().unwrap_or(section);
    let dropout = |key| -> Result<f64, JobError> {
        let valid = |p| (0.0..1.0).contains(&p);
        Ok(section.number(key, "at least 0 and below 1", valid)?.unwrap_or(0.1))
    };
    let positive = |key| section.number(key, "above 0", |x| x > 0.0);

    let (context, vocabulary) = sizes(data);
    let at_least = |key, size: usize, reason: &str| {
        let read = section.size(key, if must_fit { size as u64 } else { 1 });
        read.map_err(|e| because(e, &format!("{reason} {size} tokens")))
    };
    let n_embd = section.size("n_embd", 1)?.unwrap_or(768);
    let most_heads = (n_embd / 64).max(1);
    let n_head = divisors(n_embd).filter(|heads| *heads <= most_heads).max().unwrap_or(1);
    let activations = ACTIVATIONS.map(|name| (name, name));
    let attentions = [("sdpa", AttentionImplementation::Sdpa), ("eager", AttentionImplementation::Eager)];
    let gpt2 = Gpt2Config {
        n_layer: section.size("n_layer", 1)?.unwrap_or(12),
        n_embd,
        n_head: section.part("n_head", 1)?.unwrap_or(n_head),
        n_inner: section.size("n_inner", 1)?,
        vocab_size: at_least("vocab_size", vocabulary, "the tokenizer has")?.unwrap_or(vocabulary),
        n_positions: at_least("n_positions", context, "data.context is")?.unwrap_or(context),
        resid_pdrop: dropout("resid_pdrop")?,
        embd_pdrop: dropout("embd_pdrop")?,
        attn_pdrop: dropout("attn_pdrop")?,
        layer_norm_epsilon: positive("layer_norm_epsilon")?.unwrap_or(1e-5),
        activation_function: section.choice("activation_function", &activations)?.unwrap_or("gelu_new").to_owned(),
        tie_word_embeddings: section.flag("tie_word_embeddings")?.unwrap_or(true),
        initializer_range: positive("initializer_range")?.unwrap_or(0.02),
        attn_implementation: section.choice("_attn_implementation", &attentions)?.unwrap_or_default(),
    };
    section.finish()?;
    if n_embd % gpt2.n_head != 0 {
        let key = if section.has("n_head") { "n_head" } else { "n_embd" };
        return Err(section.error(
            key,
            format!("`model.n_head` = {} does not divide `model.n_embd` = {n_embd}", gpt2.n_head),
            format!("write n_head = {}, or another divisor of {n_embd}", nearest_divisor(n_embd, gpt2.n_head)),
        ));
    }
    Ok(gpt2)
}

/// The error with the reason for a limit.
fn because(e: JobError, reason: &str) -> JobError {
    match e.hint.starts_with("it must be") {
        true => JobError { hint: format!("{}: {reason}", e.hint), ..e },
        false => e,
    }
}

/// Refuses a `config.json` whose model this program would compute differently.
fn check_published(config: &Section<'_>) -> Result<(), JobError> {
    let hint = "use the configuration of a plain GPT-2";
    if config.has("model_type") && !config.is("model_type", "gpt2") {
        return Err(config.error("model_type", "`model_type` is not \"gpt2\"", hint));
    }
    let fixed =
        [("scale_attn_weights", true), ("scale_attn_by_inverse_layer_idx", false), ("add_cross_attention", false)];
    for (key, value) in fixed {
        if config.flag(key)?.is_some_and(|v| v != value) {
            return Err(config.error(key, format!("`{key}` = {} is not supported", !value), hint));
        }
    }
    Ok(())
}

fn read_resnet(section: &Section<'_>) -> Result<ResNetConfig, JobError> {
    let stems = [("imagenet", ResNetStem::Imagenet), ("cifar", ResNetStem::Cifar)];
    let classes = |e| because(e, &format!("CIFAR-10 has {CIFAR10_CLASSES} classes"));
    let resnet = ResNetConfig {
        depth: section.one_of("depth", "ResNet-", &[18, 34, 50, 101, 152])?.unwrap_or(18),
        num_classes: section.size("num_classes", CIFAR10_CLASSES as u64).map_err(classes)?.unwrap_or(CIFAR10_CLASSES),
        // The default fits CIFAR-10's small images.
        stem: section.choice("stem", &stems)?.unwrap_or(ResNetStem::Cifar),
        width: section.size("width", 1)?.unwrap_or(64),
    };
    section.finish()?;
    Ok(resnet)
}
