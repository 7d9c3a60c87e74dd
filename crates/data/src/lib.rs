//! Training and held-out data, in batches.
//!
//! A step's samples, their order and their augmentation depend only on the seed and on the number of samples drawn
//! before. So a resumed run draws the batches that the interrupted run would have drawn.

mod chats;
mod disk;
pub mod encoding;
mod images;
mod kind;
mod options;
mod order;
mod sample;
mod state;
mod template;
mod tensor_file;
mod tensors;
mod text;
mod tokenizer;
pub mod weights;

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use fusionllm_graph::units::counted;
use fusionllm_graph::{Advice, DType, GraphError, HostTensor, TensorType};

pub use disk::{DiskError, cannot_flush, flush, sync_directory, write_atomic, write_private, write_private_atomic};
pub use images::{CLASSES as CIFAR10_CLASSES, SIDE as IMAGE_SIZE};
pub use kind::{FileKind, Role};
pub use options::{Chats, Cifar10, Data, Documents, OnError, Tensors, Text, TrainOn, Validation};
pub use state::Differences;
pub use template::{ChatTemplate, Message, Rendered, TemplateError};
pub use tensor_file::{TensorFile, write_each, write_tensors};
pub use tokenizer::Tokenizer;

/// A label that counts neither in the loss nor in the accuracy.
pub const IGNORED: i64 = -100;

/// The data of a job.
pub struct Dataset {
    source: Source,
}

enum Source {
    Text(text::Corpus),
    Chats(chats::Corpus),
    Images(images::Images),
    Tensors(tensors::Tensors),
}

/// The samples of one pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// The tensors. For text: `input_ids` and `labels`, both i64 `[samples, context]`, where the labels are the next
    /// tokens. With documents apart, `position_ids` of the same type has the place of each token in its document. For
    /// chats: as for text, packed ones as documents apart, and the labels of what is not trained on are [`IGNORED`]. For images: `pixel_values`, f32
    /// `[samples, 3, 32, 32]`, and `labels`, i64 `[samples]`. For tensors: those of the files.
    pub tensors: Vec<(Cow<'static, str>, HostTensor)>,
}

/// A training sample of text or chats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// The place that it comes from, for messages.
    pub origin: String,
    /// Its tokens without padding, at most one more than the context: the last one is only predicted.
    pub tokens: Vec<u32>,
    /// Whether each token is trained on. The first one is never predicted.
    pub trained: Vec<bool>,
    /// Tokens at the end of a conversation that are left out, because it is longer than the context.
    pub cut: usize,
}

/// Whether a file of JSON lines has conversations, by its first line. A file that cannot be read has none.
pub fn has_chats(path: &Path) -> bool {
    chats::is_in(path)
}

impl Dataset {
    /// Opens and checks the files of `data`. `seed` decides order and augmentation.
    ///
    /// # Errors
    ///
    /// A file cannot be read, is empty, cut short or of another format, or there is too little data.
    pub fn open(data: &Data, seed: u64) -> Result<Self, DataError> {
        let source = match data {
            Data::Text(text) => Source::Text(text::Corpus::open(text, seed)?),
            Data::Chats(chats) => Source::Chats(chats::Corpus::open(chats, seed)?),
            Data::Cifar10(cifar10) => Source::Images(images::Images::open(cifar10, seed)?),
            Data::Tensors(tensors) => Source::Tensors(tensors::Tensors::open(tensors, seed)?),
        };
        Ok(Self { source })
    }

    /// The training samples from number `first` on, counted from the start of the run. Each epoch has another order.
    ///
    /// # Errors
    ///
    /// A file can no longer be read, or has changed. A conversation is broken, and such are not skipped.
    pub fn train_batch(&self, first: u64, samples: usize) -> Result<Batch, DataError> {
        match &self.source {
            Source::Text(corpus) => corpus.train_batch(first, samples),
            Source::Chats(chats) => chats.train_batch(first, samples),
            Source::Images(images) => images.train_batch(first, samples),
            Source::Tensors(tensors) => tensors.train_batch(first, samples),
        }
    }

    /// The held-out samples of these numbers, without augmentation: those of their tensors that are `wanted`, by name.
    /// There are none of numbers from [`Self::eval_samples`] on.
    ///
    /// # Errors
    ///
    /// The same as those of [`Self::train_batch`].
    pub fn held_out(&self, samples: &[usize], wanted: impl Fn(&str) -> bool) -> Result<Batch, DataError> {
        let mut batch = match &self.source {
            Source::Text(corpus) => corpus.held_out(samples)?,
            Source::Chats(chats) => chats.held_out(samples)?,
            Source::Images(images) => images.held_out(samples)?,
            Source::Tensors(tensors) => tensors.held_out(samples, &wanted)?,
        };
        batch.tensors.retain(|(name, _)| wanted(name));
        Ok(batch)
    }

    /// The place that a training sample comes from, for messages. `consumed` samples were drawn before it.
    pub fn train_origin(&self, consumed: u64) -> String {
        match &self.source {
            Source::Tensors(tensors) => tensors.train_origin(consumed),
            Source::Chats(chats) => chats.train_origin(consumed),
            Source::Text(_) | Source::Images(_) => format!("training sample {consumed}"),
        }
    }

    /// The place of the first number of a training batch that is not finite: the file, the row and the tensor. Text and
    /// images have none. Data are searched only after a step was skipped, because a model may expect such numbers. For
    /// example, a mask of attention is 0 and -infinity.
    pub fn not_finite(&self, first: u64, samples: usize) -> Option<String> {
        let Source::Tensors(tensors) = &self.source else { return None };
        let batch = tensors.train_batch(first, samples).ok()?;
        let find = |what: &str, is_wanted: fn(f64) -> bool| {
            batch.tensors.iter().filter(|(_, tensor)| tensor.dtype().is_float()).find_map(|(name, tensor)| {
                let numbers = tensor.to_f64();
                let at = numbers.iter().position(|x| is_wanted(*x))?;
                let origin = match tensor.shape().first() {
                    Some(rows) => tensors.train_origin(first + (at / (numbers.len() / rows)) as u64),
                    None => "every file".to_owned(),
                };
                Some(format!("{origin}: `{name}` holds {what}"))
            })
        };
        find("NaN", f64::is_nan).or_else(|| find("an infinite number", f64::is_infinite))
    }

    /// A training sample of text or chats as the model sees it. `consumed` samples were drawn before it. Other data
    /// have none.
    ///
    /// # Errors
    ///
    /// The same as those of [`Self::train_batch`].
    pub fn example(&self, consumed: u64) -> Result<Option<Example>, DataError> {
        let (origin, tokens, trained, cut) = match &self.source {
            Source::Images(_) | Source::Tensors(_) => return Ok(None),
            Source::Text(corpus) => {
                let tokens = corpus.example(consumed);
                let trained = (0..tokens.len()).map(|place| place > 0).collect();
                (self.train_origin(consumed), tokens, trained, 0)
            }
            Source::Chats(chats) => {
                let (origin, chats::Written { tokens, mut trained, cut }) = chats.example(consumed)?;
                if let Some(first) = trained.first_mut() {
                    *first = false;
                }
                (origin, tokens, trained, cut)
            }
        };
        Ok(Some(Example { origin, tokens, trained, cut }))
    }

    /// A sentence about a batch that is larger than the training data.
    pub fn repeated(&self, batch: usize) -> Option<String> {
        let samples = self.train_samples();
        let there = counted(samples, "sample");
        let more =
            format!("train.batch = {batch} is more than the {there} to train on, so each step repeats some of them");
        (samples < batch).then_some(more)
    }

    /// The place that a held-out sample comes from, for messages.
    pub fn eval_origin(&self, index: usize) -> String {
        match &self.source {
            Source::Tensors(tensors) => tensors.eval_origin(index),
            Source::Chats(chats) => chats.eval_origin(index),
            Source::Text(_) | Source::Images(_) => format!("held-out sample {index}"),
        }
    }

    /// Samples per epoch of training. If conversations are packed, this is an estimate.
    pub fn train_samples(&self) -> usize {
        match &self.source {
            Source::Text(corpus) => corpus.train_samples(),
            Source::Chats(chats) => chats.train_samples(),
            Source::Images(images) => images.train_samples(),
            Source::Tensors(tensors) => tensors.train_samples(),
        }
    }

    /// Held-out samples.
    pub fn eval_samples(&self) -> usize {
        match &self.source {
            Source::Text(corpus) => corpus.eval_samples(),
            Source::Chats(chats) => chats.eval_samples(),
            Source::Images(images) => images.eval_samples(),
            Source::Tensors(tensors) => tensors.eval_samples(),
        }
    }

    /// Names and types of a batch's tensors, in the order of [`Batch::tensors`].
    pub fn inputs(&self, samples: usize) -> Vec<(Cow<'static, str>, TensorType)> {
        match &self.source {
            Source::Text(corpus) => {
                let ids = TensorType::new(DType::I64, [samples, corpus.context()]);
                corpus.names().map(|name| (name.into(), ids.clone())).collect()
            }
            Source::Chats(chats) => {
                let ids = TensorType::new(DType::I64, [samples, chats.context()]);
                chats.names().map(|name| (name.into(), ids.clone())).collect()
            }
            Source::Images(_) => vec![
                ("pixel_values".into(), TensorType::new(DType::F32, [samples, 3, images::SIDE, images::SIDE])),
                ("labels".into(), TensorType::new(DType::I64, [samples])),
            ],
            Source::Tensors(tensors) => tensors.inputs(samples),
        }
    }

    /// Whether the order of [`inputs`](Self::inputs) means something: first the model's inputs, then its targets.
    pub fn are_inputs_ordered(&self) -> bool {
        !matches!(self.source, Source::Tensors(_))
    }

    /// A digest of all file contents, as 64 hexadecimal digits. A resumed run compares it to detect changed data.
    pub fn digest(&self) -> &str {
        match &self.source {
            Source::Text(corpus) => corpus.digest(),
            Source::Chats(chats) => chats.digest(),
            Source::Images(images) => images.digest(),
            Source::Tensors(tensors) => tensors.digest(),
        }
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dataset({self})")
    }
}

/// One line that describes the data.
impl fmt::Display for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Source::Text(corpus) => corpus.fmt(f),
            Source::Chats(chats) => chats.fmt(f),
            Source::Images(images) => images.fmt(f),
            Source::Tensors(tensors) => tensors.fmt(f),
        }
    }
}

/// The reason why data cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file cannot be read.
    #[error("{}: cannot be read", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A file has the wrong content.
    #[error("{}: {message}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// A description of the error, and its place in the file.
        message: String,
        /// Advice to the user.
        hint: &'static str,
    },
    /// A file is of another kind.
    #[error("{}: this is {}, not {role}", path.display(), kind.name)]
    OtherKind {
        /// The file.
        path: PathBuf,
        /// Its kind.
        kind: FileKind,
        /// The kind that it is taken for.
        role: Role,
    },
    /// The files are valid, but hold too little.
    #[error("{message}")]
    TooLittle {
        /// The amount that there is, and the amount that is needed.
        message: String,
        /// Advice to the user.
        hint: &'static str,
    },
    /// Conversations are broken.
    #[error("{message}")]
    Broken {
        /// Their number, and the first of them: file, line and problem.
        message: String,
        /// Advice to the user.
        hint: String,
    },
    /// The rows are no whole groups.
    #[error("{message}")]
    Ungrouped {
        /// The rows, and their number.
        message: String,
        /// Advice to the user.
        hint: &'static str,
    },
    /// A file of tensors cannot be used.
    #[error(transparent)]
    Weights(#[from] crate::weights::WeightsError),
    /// A tensor of a batch cannot be built.
    #[error(transparent)]
    Tensor(#[from] GraphError),
}

impl Advice for DataError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Unreadable { .. } => Some("check the path and that you may read the file".into()),
            Self::Malformed { hint, .. } | Self::TooLittle { hint, .. } | Self::Ungrouped { hint, .. } => {
                Some((*hint).into())
            }
            Self::OtherKind { path, kind, role } => Some(kind.hint(*role, path).into()),
            Self::Broken { hint, .. } => Some(hint.into()),
            Self::Weights(e) => e.hint(),
            Self::Tensor(_) => None,
        }
    }
}

/// Refuses rows that are no whole groups. `which` names them.
fn check_groups(which: fmt::Arguments<'_>, rows: usize, group: usize) -> Result<(), DataError> {
    if rows.is_multiple_of(group.max(1)) {
        return Ok(());
    }
    Err(DataError::Ungrouped {
        message: format!("{which}: {rows} rows are no whole groups of {group} (`data.group`)"),
        hint: "write a divisor of the number of rows for data.group, or remove the rows of the last, incomplete group",
    })
}

/// The advice about text that is not in UTF-8.
const NOT_UTF_8: &str = "convert the file to UTF-8, such as with iconv -f ISO-8859-1 -t UTF-8 OLD > NEW, or fetch it again if it \
     was cut short";

/// Refuses a file with these first bytes that is no text.
fn check_text(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    if let Some(encoding) = encoding::wide(bytes) {
        let message = format!("the text is in {}, not in UTF-8", encoding.name);
        return Err(DataError::Malformed { path: path.to_owned(), message, hint: encoding.hint });
    }
    match FileKind::of(bytes, Role::Text) {
        Some(kind) => Err(DataError::OtherKind { path: path.to_owned(), kind, role: Role::Text }),
        None => Ok(()),
    }
}

/// Reads a file that must not be empty.
fn read(path: &Path) -> Result<Vec<u8>, DataError> {
    let bytes = std::fs::read(path).map_err(|source| DataError::Unreadable { path: path.to_owned(), source })?;
    if bytes.is_empty() {
        return Err(DataError::Malformed {
            path: path.to_owned(),
            message: "the file is empty".into(),
            hint: "fill it, or leave it out of [data]",
        });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
