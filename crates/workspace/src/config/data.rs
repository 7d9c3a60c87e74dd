//! The section `[data]`.

use std::path::{Path, PathBuf};

use fusionllm_data::{
    ChatTemplate, Chats, Cifar10, Data, DataError, Documents, OnError, Tensors, Text, Tokenizer, TrainOn, Validation,
    has_chats,
};
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
        Ok(Self { images, folder: model.peek("path").map(|written| files.at(model, "path", written)) })
    }
}

/// Whether a folder has a `tokenizer.json`, or what can be made into one. GPT-2's own files need not be read.
pub(super) fn has_tokenizer(folder: &Path) -> bool {
    ["tokenizer.json", "tokenizer.model"].iter().any(|name| folder.join(name).is_file())
}

/// The settings that decide about the network, without the files.
pub(super) fn without_files(section: &Section<'_>, files: &Files, model: ModelFacts) -> Result<Data, JobError> {
    let kind = Kind::of(section, files, model.images)?;
    match kind {
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
        Kind::Text | Kind::Chats => {}
    }
    let (tokenizer, context) = (tokenizer(section, files, &model)?, context(section, kind)?);
    let validation = Validation::Fraction(0.0);
    let documents = Documents::Joined;
    Ok(Data::Text(Text { files: Vec::new(), tokenizer, context, validation, shuffle: true, documents }))
}

/// Reads the section.
pub(super) fn read(section: &Section<'_>, files: &Files, model: ModelFacts) -> Result<Data, JobError> {
    let kind = Kind::of(section, files, model.images)?;
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
    if kind == Kind::Chats {
        return chats(section, files, &model).map(Data::Chats);
    }
    let validation = validation(section, files, 0.1)?;
    let tokenizer = tokenizer(section, files, &model)?;
    let text = Text {
        files: files.many(section, "files")?.unwrap_or_default(),
        context: context(section, kind)?,
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

fn chats(section: &Section<'_>, files: &Files, model: &ModelFacts) -> Result<Chats, JobError> {
    let tokenizer = tokenizer(section, files, model)?;
    let chats = Chats {
        files: files.many(section, "files")?.unwrap_or_default(),
        template: template(section, files, model, &tokenizer)?,
        context: context(section, Kind::Chats)?,
        validation: validation(section, files, 0.1)?,
        shuffle: shuffle(section)?,
        packing: section.flag("packing")?.unwrap_or(false),
        train_on: section
            .choice("train_on", &[("answers", TrainOn::Answers), ("all", TrainOn::All)])?
            .unwrap_or_default(),
        on_error: section.choice("on_error", &[("fail", OnError::Fail), ("skip", OnError::Skip)])?.unwrap_or_default(),
        tokenizer,
    };
    section.finish()?;
    if chats.files.is_empty() {
        return Err(section.error(
            "files",
            "[data] names no files",
            "write files = [\"chats.jsonl\"], files with a conversation on each line",
        ));
    }
    Ok(chats)
}

/// The template that is named, or else that of the tokenizer's folder or of the model's.
fn template(
    section: &Section<'_>,
    files: &Files,
    model: &ModelFacts,
    tokenizer: &Tokenizer,
) -> Result<Option<ChatTemplate>, JobError> {
    const KEY: &str = "template";
    let broken = |e: DataError| section.error(KEY, e.to_string(), e.hint().unwrap_or_default());
    if let Some(path) = files.file_or_folder(section, KEY)? {
        return ChatTemplate::open(&path, tokenizer).map(Some).map_err(broken);
    }
    let own = tokenizer.files().first().and_then(|(_, file)| file.parent().map(Path::to_owned));
    for folder in own.iter().chain(&model.folder).filter(|folder| folder.is_dir()) {
        if let Some(template) = ChatTemplate::find(folder, tokenizer).map_err(broken)? {
            return Ok(Some(template));
        }
    }
    Ok(None)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Chats,
    Cifar10,
    Tensors,
}

impl Kind {
    /// `images` says whether the model takes images, which decides the default. Otherwise the files do.
    fn of(section: &Section<'_>, files: &Files, images: bool) -> Result<Self, JobError> {
        let kinds =
            [("text", Self::Text), ("chats", Self::Chats), ("cifar10", Self::Cifar10), ("tensors", Self::Tensors)];
        if let Some(kind) = section.choice("kind", &kinds)? {
            return Ok(kind);
        }
        if images {
            return Ok(Self::Cifar10);
        }
        // An error in the paths is told later.
        let files = files.many(section, "files").ok().flatten().unwrap_or_default();
        let are_lines = files.iter().all(|path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl")));
        let are_chats = are_lines && files.first().is_some_and(|path| has_chats(path));
        Ok(if are_chats { Self::Chats } else { Self::Text })
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
    let path = files.at(section, KEY, written);
    if !path.exists() {
        let message = format!("`data.tokenizer` cannot be \"{written}\": {} is not there", path.display());
        return Err(section.error(KEY, message, suggest(written, &names, lead)));
    }
    opened(&path)
}

fn context(section: &Section<'_>, kind: Kind) -> Result<usize, JobError> {
    // A conversation is one sample.
    let default = if kind == Kind::Chats { 1024 } else { 128 };
    Ok(section.size("context", 1)?.unwrap_or(default))
}
