//! Training and held-out data, as batches that any position of a run can be asked for.
//!
//! Which samples a step trains on, how they are shuffled and augmented, is a function of the seed
//! and of how many samples came before. So the whole state of the sampler is one number, and a
//! resumed run draws the batches that the interrupted one would have drawn.

mod images;
mod order;
mod sample;
mod tensors;
mod text;
mod tokenizer;

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use fusionllm_graph::{DType, GraphError, HostTensor, TensorType};

pub use images::{CLASSES as CIFAR10_CLASSES, SIDE as IMAGE_SIZE};
pub use tokenizer::Tokenizer;

use crate::config::Data;

/// A label that counts neither in the loss nor in the accuracy.
pub const IGNORED: i64 = -100;

/// The data of a job, in memory.
pub struct Dataset {
    source: Source,
}

enum Source {
    Text(text::Corpus),
    Images(images::Images),
    Tensors(tensors::Tensors),
}

/// The samples that pass through the model together.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// For text `input_ids` and `labels`, both i64 `[samples, context]`, the labels being the next
    /// tokens; for images `pixel_values`, f32 `[samples, 3, 32, 32]`, and `labels`, i64 `[samples]`; for tensors
    /// what the files have.
    pub tensors: Vec<(Cow<'static, str>, HostTensor)>,
    /// How many labels are not [`IGNORED`].
    pub targets: u64,
}

impl Dataset {
    /// Reads and checks the files of `data`; `seed` decides order and augmentation.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, is empty, cut short or of another format, or too little text.
    pub fn open(data: &Data, seed: u64) -> Result<Self, DataError> {
        let source = match data {
            Data::Text(text) => Source::Text(text::Corpus::open(text, seed)?),
            Data::Cifar10(cifar10) => Source::Images(images::Images::open(cifar10, seed)?),
            Data::Tensors(tensors) => Source::Tensors(tensors::Tensors::open(tensors, seed)?),
        };
        Ok(Self { source })
    }

    /// The samples from the `first` on that a run draws, counted from its start; every epoch is in
    /// another order.
    ///
    /// # Errors
    ///
    /// None for a dataset that opened; the type is that of building tensors.
    pub fn train_batch(&self, first: u64, samples: usize) -> Result<Batch, DataError> {
        match &self.source {
            Source::Text(corpus) => corpus.train_batch(first, samples),
            Source::Images(images) => images.train_batch(first, samples),
            Source::Tensors(tensors) => tensors.train_batch(first, samples),
        }
    }

    /// The held-out samples in their own order, without augmentation, `samples` at a time. What the last
    /// batch lacks is filled up with labels that are [`IGNORED`]. Empty if nothing is held out.
    pub fn eval_batches(&self, samples: usize) -> impl Iterator<Item = Result<Batch, DataError>> + Send + '_ {
        let samples = samples.max(1);
        let batches = self.eval_samples().div_ceil(samples);
        (0..batches).map(move |i| self.eval_batch(i * samples, samples))
    }

    /// The held-out samples from the `first` on, as [`Self::eval_batches`] gives them.
    ///
    /// # Errors
    ///
    /// As for [`Self::train_batch`].
    pub fn eval_batch(&self, first: usize, samples: usize) -> Result<Batch, DataError> {
        match &self.source {
            Source::Text(corpus) => corpus.eval_batch(first, samples),
            Source::Images(images) => images.eval_batch(first, samples),
            Source::Tensors(tensors) => tensors.eval_batch(first, samples),
        }
    }

    /// Samples in an epoch of training.
    pub fn train_samples(&self) -> usize {
        match &self.source {
            Source::Text(corpus) => corpus.train_samples(),
            Source::Images(images) => images.train_samples(),
            Source::Tensors(tensors) => tensors.train_samples(),
        }
    }

    /// Samples held out; 0 if there are none to measure on.
    pub fn eval_samples(&self) -> usize {
        match &self.source {
            Source::Text(corpus) => corpus.eval_samples(),
            Source::Images(images) => images.eval_samples(),
            Source::Tensors(tensors) => tensors.eval_samples(),
        }
    }

    /// Names and types of a batch's tensors, in the order of [`Batch::tensors`].
    pub fn inputs(&self, samples: usize) -> Vec<(Cow<'static, str>, TensorType)> {
        match &self.source {
            Source::Text(corpus) => {
                let ids = TensorType::new(DType::I64, [samples, corpus.context()]);
                vec![("input_ids".into(), ids.clone()), ("labels".into(), ids)]
            }
            Source::Images(_) => vec![
                ("pixel_values".into(), TensorType::new(DType::F32, [samples, 3, images::SIDE, images::SIDE])),
                ("labels".into(), TensorType::new(DType::I64, [samples])),
            ],
            Source::Tensors(tensors) => tensors.inputs(samples),
        }
    }

    /// A digest (64 hexadecimal digits) of the files' contents in their order, by which a resumed run notices
    /// that the data have changed.
    pub fn digest(&self) -> &str {
        match &self.source {
            Source::Text(corpus) => corpus.digest(),
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

/// One line for a person: what there is to train and to measure on.
impl fmt::Display for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Source::Text(corpus) => corpus.fmt(f),
            Source::Images(images) => images.fmt(f),
            Source::Tensors(tensors) => tensors.fmt(f),
        }
    }
}

/// What is wrong with the data, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file cannot be read.
    #[error("{}: cannot be read: {source}\n  hint: check the path and that you may read the file", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file does not hold what it should.
    #[error("{}: {message}\n  hint: {hint}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and where in it.
        message: String,
        /// What to do.
        hint: &'static str,
    },
    /// The files are sound, but there is too little in them.
    #[error("{message}\n  hint: {hint}")]
    TooLittle {
        /// How much there is and how much it takes.
        message: String,
        /// What to do.
        hint: &'static str,
    },
    /// A file of tensors cannot be used.
    #[error(transparent)]
    Weights(#[from] crate::weights::WeightsError),
    /// A batch cannot be made a tensor.
    #[error(transparent)]
    Tensor(#[from] GraphError),
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
