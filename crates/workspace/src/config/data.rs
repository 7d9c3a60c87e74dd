//! The section `[data]`.

use std::path::{Path, PathBuf};

use fusionllm_data::{Cifar10, Data, Documents, Tensors, Text, Tokenizer, Validation};
use fusionllm_graph::Advice;

use super::files::{CONFIG, Files};
use super::model::FamilyName;
use super::reader::{JobError, Section, suggest};

/// The settings of `[model]` that decide about the data.
pub(super) struct ModelFacts {
    /// Whether the model takes images, which decides the default of `kind`.
    images: bool,
    /// The Hugging Face folder of the model, which may have its tokenizer.
    folder: Option<PathBuf>,
}

impl ModelFacts {
    pub(super) fn of(model: &Section<'_>, files: &Files) -> Result<Self, JobError> {
        let images = FamilyName::read(model)? == Some(FamilyName::Resnet);
        Ok(Self { images, folder: model.peek("path").map(|written| files.at(written)) })
    }
}

/// Whether a folder has a `tokenizer.json`, or what can be made into one. GPT-2's own files need not be read.
pub(super) fn has_tokenizer(folder: &Path) -> bool {
    ["tokenizer.json", "tokenizer.model"].iter().any(|name| folder.join(name).is_file())
}

/// The settings that decide about the network, without the files.
pub(super) fn without_files(section: &Section<'_>, files: &Files, model: ModelFacts) -> Result<Data, JobError> {
    match Kind::of(section, model.images)? {
        Kind::Cifar10 => {
            return Ok(Data::Cifar10(Cifar10 {
                train: Vec::new(),
                test: Vec::new(),
                augment: false,
                shuffle: true,
                group: 1,
            }));
        }
        Kind::Tensors => {
            return Ok(Data::Tensors(Tensors {
                files: Vec::new(),
                validation: Validation::Fraction(0.0),
                shuffle: true,
                group: 1,
            }));
        }
        Kind::Text => {}
    }
    let (tokenizer, context) = (tokenizer(section, files, &model)?, context(section)?);
    let validation = Validation::Fraction(0.0);
    let documents = Documents::Joined;
    Ok(Data::Text(Text { files: Vec::new(), tokenizer, context, validation, shuffle: true, documents }))
}

/// Reads the section.
pub(super) fn read(section: &Section<'_>, files: &Files, model: ModelFacts) -> Result<Data, JobError> {
    let kind = Kind::of(section, model.images)?;
    if kind == Kind::Tensors {
        let tensors = Tensors {
            files: files.many_within(section, "files", "safetensors")?.unwrap_or_default(),
            validation: validation(section, files, 0.0)?,
            shuffle: shuffle(section)?,
            group: group(section)?,
        };
        section.finish()?;
        if tensors.files.is_empty() {
            return Err(section.error(
                "files",
                "[data] names no files",
                "write files = [\"shards\"], a directory of safetensors files with a tensor for each of the model's inputs",
            ));
        }
        return Ok(Data::Tensors(tensors));
    }
    if kind == Kind::Cifar10 {
        let cifar10 = Cifar10 {
            train: files.many(section, "train")?.unwrap_or_default(),
            test: files.many(section, "test")?.unwrap_or_default(),
            augment: section.flag("augment")?.unwrap_or(true),
            shuffle: shuffle(section)?,
            group: group(section)?,
        };
        section.finish()?;
        if cifar10.train.is_empty() {
            return Err(section.error(
                "train",
                "[data] names no training images",
                "write train = [\"data_batch_*.bin\"], the files of CIFAR-10's binary version",
            ));
        }
        return Ok(Data::Cifar10(cifar10));
    }
    let validation = validation(section, files, 0.1)?;
    let tokenizer = tokenizer(section, files, &model)?;
    let text = Text {
        files: files.many(section, "files")?.unwrap_or_default(),
        context: context(section)?,
        validation,
        shuffle: shuffle(section)?,
        documents: documents(section, &tokenizer)?,
        tokenizer,
    };
    if section.has("group") {
        return Err(section.error(
            "group",
            "`data.group` is for rows of tensors and images; a text has none, only contexts that are cut from it",
            "leave group out, or write the rows to safetensors files with kind = \"tensors\"",
        ));
    }
    section.finish()?;
    if text.files.iter().any(|path| path.extension().is_some_and(|e| e == "safetensors")) {
        return Err(section.error(
            "files",
            "`data.files` names files of tensors, but `data.kind` is \"text\"",
            "write kind = \"tensors\" in [data]",
        ));
    }
    Ok(Data::Text(text))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Cifar10,
    Tensors,
}

impl Kind {
    /// `images` says whether the model takes images, which decides the default.
    fn of(section: &Section<'_>, images: bool) -> Result<Self, JobError> {
        let kinds = [("text", Self::Text), ("cifar10", Self::Cifar10), ("tensors", Self::Tensors)];
        Ok(section.choice("kind", &kinds)?.unwrap_or(if images { Self::Cifar10 } else { Self::Text }))
    }
}

fn validation(section: &Section<'_>, files: &Files, default: f64) -> Result<Validation, JobError> {
    // A text that is a number was meant as a number.
    if !section.is_text_or_list("validation") || section.is_quoted_number("validation") {
        let valid = |x| (0.0..1.0).contains(&x);
        let fraction = section.number("validation", "at least 0 and below 1, or the paths of files", valid)?;
        return Ok(Validation::Fraction(fraction.unwrap_or(default)));
    }
    Ok(Validation::Files(files.many(section, "validation")?.unwrap_or_default()))
}

fn documents(section: &Section<'_>, tokenizer: &Tokenizer) -> Result<Documents, JobError> {
    let kinds = [("joined", Documents::Joined), ("apart", Documents::Apart)];
    let documents = section.choice("documents", &kinds)?.unwrap_or_default();
    if documents == Documents::Apart && tokenizer.before_document().is_empty() {
        return Err(section.error(
            "documents",
            "documents cannot be kept apart: this tokenizer has no token between them",
            "use a tokenizer with one, such as tokenizer = \"gpt2\", or leave `documents` out",
        ));
    }
    Ok(documents)
}

fn shuffle(section: &Section<'_>) -> Result<bool, JobError> {
    Ok(section.flag("shuffle")?.unwrap_or(true))
}

fn group(section: &Section<'_>) -> Result<usize, JobError> {
    Ok(section.part("group", 1)?.unwrap_or(1))
}

/// The tokenizer that a name or a path names.
fn tokenizer(section: &Section<'_>, files: &Files, model: &ModelFacts) -> Result<Tokenizer, JobError> {
    const KEY: &str = "tokenizer";
    let names = Tokenizer::NAMES.map(|(name, _)| name);
    let lead = "it is the path of a tokenizer.json or of its folder, or it is one of";
    let opened = |path: &Path| {
        Tokenizer::open(path).map_err(|e| section.error(KEY, e.to_string(), e.hint().unwrap_or_default()))
    };
    let Some(written) = section.name_among(KEY, &names, lead)? else {
        // A model that has learnt from tokens would learn nothing from bytes. A folder that is none is reported later.
        let Some(folder) = model.folder.as_deref().filter(|folder| folder.join(CONFIG).is_file()) else {
            return Ok(Tokenizer::Bytes);
        };
        if !has_tokenizer(folder) {
            let message = format!("{} has no tokenizer.json, and `data.tokenizer` is not written", folder.display());
            return Err(section.error(KEY, message, suggest("", &names, lead)));
        }
        return opened(folder);
    };
    if let Some(known) = Tokenizer::of_name(written) {
        return Ok(known);
    }
    let path = files.at(written);
    if !path.exists() {
        let message = format!("`data.tokenizer` cannot be \"{written}\": {} is not there", path.display());
        return Err(section.error(KEY, message, suggest(written, &names, lead)));
    }
    opened(&path)
}

fn context(section: &Section<'_>) -> Result<usize, JobError> {
    Ok(section.size("context", 1)?.unwrap_or(128))
}
