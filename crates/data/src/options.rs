//! The settings of a job's `[data]` section.

use std::path::PathBuf;

use serde::Serialize;

use super::{ChatTemplate, Tokenizer};

/// `[data]`: the data that the model is trained on.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Data {
    /// Text, for language models.
    Text(Text),
    /// Conversations, for language models.
    Chats(Chats),
    /// Images in CIFAR-10's binary format, for classifiers.
    Cifar10(Cifar10),
    /// Named tensors, for imported models.
    Tensors(Tensors),
}

/// Samples as rows of named tensors.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tensors {
    /// Safetensors files. Each holds one tensor per input of the model, with the input's name and one row per sample.
    pub files: Vec<PathBuf>,
    /// The held-out samples. Default none.
    pub validation: Validation,
    /// Whether each epoch draws the rows in another order. Default true. Otherwise they come in the order of the files.
    pub shuffle: bool,
    /// The number of rows that follow each other in a file and stay together in one micro-batch, in their order.
    /// Default 1. The order of the groups is shuffled.
    pub group: usize,
}

/// Text for next-token prediction.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Text {
    /// Text files. If empty, two of Shakespeare's plays are used, which are in the program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
    /// How text becomes tokens. Default `bytes`.
    pub tokenizer: Tokenizer,
    /// Tokens per sample. Default 128.
    pub context: usize,
    /// The held-out text. Default 0.1.
    pub validation: Validation,
    /// Whether each epoch draws the contexts in another order. Default true. Otherwise they follow each other.
    pub shuffle: bool,
    /// Whether the documents in one sample see each other. Default `joined`.
    pub documents: Documents,
}

/// Conversations, of which the model learns the answers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Chats {
    /// Files of JSON lines, each with a conversation. The job names one at least.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
    /// How text becomes tokens. Default that in the folder of `model.path`, or else `bytes`.
    pub tokenizer: Tokenizer,
    /// How messages become text. Default that in the folder of the tokenizer. Texts need none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<ChatTemplate>,
    /// Tokens per sample. Default 1024.
    pub context: usize,
    /// The held-out conversations. Default 0.1.
    pub validation: Validation,
    /// Whether each epoch draws the conversations in another order. Default true. Otherwise they come in the order of
    /// the files.
    pub shuffle: bool,
    /// Whether a sample to train on has as many conversations as fit into it, none of which sees another. Default
    /// false. The model gets the positions as `position_ids`.
    pub packing: bool,
    /// The part of a conversation that the model learns. Default the answers.
    pub train_on: TrainOn,
    /// The treatment of broken conversations. By default they are an error.
    pub on_error: OnError,
}

/// The part of a conversation that a model learns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainOn {
    /// Its own answers.
    #[default]
    Answers,
    /// All tokens.
    All,
}

/// The treatment of conversations that are broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// One is an error.
    #[default]
    Fail,
    /// They are left out.
    Skip,
}

/// Whether the documents in one sample of text see each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Documents {
    /// A token sees all tokens before it.
    #[default]
    Joined,
    /// A token sees those of its own document alone, and its position is counted from that document's start. The model
    /// gets the positions as `position_ids`.
    Apart,
}

/// The held-out data.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Validation {
    /// The last part of each file, as a fraction from 0 to below 1. For tensors and chats, the last part of all
    /// samples.
    Fraction(f64),
    /// Separate files.
    Files(Vec<PathBuf>),
}

/// CIFAR-10's binary files.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cifar10 {
    /// Training images, in one file at least.
    pub train: Vec<PathBuf>,
    /// Held-out images. Default none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub test: Vec<PathBuf>,
    /// Whether training images are mirrored and shifted at random. Default true.
    pub augment: bool,
    /// Whether each epoch draws the images in another order. Default true. Otherwise they come in the order of the
    /// files.
    pub shuffle: bool,
    /// The number of images that stay together, as for [`Tensors::group`]. Default 1.
    pub group: usize,
}

impl Data {
    /// How text becomes tokens, and the tokens of a sample; `None` for data that are no text.
    pub fn written(&self) -> Option<(&Tokenizer, usize)> {
        match self {
            Self::Text(Text { tokenizer, context, .. }) | Self::Chats(Chats { tokenizer, context, .. }) => {
                Some((tokenizer, *context))
            }
            Self::Cifar10(_) | Self::Tensors(_) => None,
        }
    }

    /// The number of rows that must be in one micro-batch.
    pub fn group(&self) -> usize {
        match self {
            Self::Text(_) | Self::Chats(_) => 1,
            Self::Cifar10(Cifar10 { group, .. }) | Self::Tensors(Tensors { group, .. }) => *group,
        }
    }
}
