//! Text as one long sequence of tokens, cut into contexts.

use std::fmt;
use std::path::Path;

use fusionllm_graph::units::counted;
use fusionllm_graph::{CounterRng, HostTensor};

use super::order::Order;
use super::sample;
use super::{Batch, DataError, IGNORED, Text, Tokenizer, Validation};

/// Training tokens and held-out tokens.
///
/// The last part of each file is held out, or whole files are. The other parts follow each other, each after the
/// tokenizer's start token if it has one. Each epoch cuts the sequence at another offset, so that a token appears at
/// many positions over the epochs.
pub(super) struct Corpus {
    train: Vec<u16>,
    held_out: Vec<u16>,
    context: usize,
    order: Order,
    offsets: CounterRng,
    digest: String,
    files: usize,
    bytes: u64,
}

impl Corpus {
    pub(super) fn open(text: &Text, seed: u64) -> Result<Self, DataError> {
        let mut rows = Rows { tokenizer: text.tokenizer, hasher: blake3::Hasher::new(), files: 0, bytes: 0 };
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        let fraction = match &text.validation {
            Validation::Fraction(fraction) => *fraction,
            Validation::Files(paths) => {
                for path in paths {
                    held_out.extend(rows.file(path)?);
                }
                0.0
            }
        };
        let mut add = |tokens: Vec<u16>| {
            let kept = tokens.len() - (tokens.len() as f64 * fraction) as usize;
            train.extend_from_slice(&tokens[..kept]);
            if kept < tokens.len() {
                held_out.extend(text.tokenizer.start_of_text().map(|t| t as u16));
                held_out.extend_from_slice(&tokens[kept..]);
            }
        };
        for path in &text.files {
            add(rows.file(path)?);
        }
        if text.files.is_empty() {
            for document in sample::documents() {
                add(rows.document(document));
            }
        }

        let context = text.context;
        if train.len() <= context {
            return Err(DataError::TooLittle {
                message: format!(
                    "the text to train on has {} tokens, but one sample takes {} (`data.context` and the token after it)",
                    train.len(),
                    context + 1
                ),
                hint: "name more text in data.files, lower data.context, or lower data.validation",
            });
        }
        let held_out_wanted =
            text.validation != Validation::Fraction(0.0) && text.validation != Validation::Files(Vec::new());
        if held_out_wanted && held_out.len() < 2 {
            return Err(DataError::TooLittle {
                message: format!(
                    "the held-out text has {} tokens, too few to predict one from another",
                    held_out.len()
                ),
                hint: "raise data.validation, or write validation = 0 to hold nothing out",
            });
        }
        let order = Order::new(seed, samples(train.len(), context), 1, text.shuffle);
        let offsets = CounterRng::for_name(seed, "data.offset");
        let digest = rows.hasher.finalize().to_hex().to_string();
        let (files, bytes) = (rows.files, rows.bytes);
        Ok(Self { train, held_out, context, order, offsets, digest, files, bytes })
    }

    pub(super) fn context(&self) -> usize {
        self.context
    }

    pub(super) fn digest(&self) -> &str {
        &self.digest
    }

    #[cfg(test)]
    pub(super) fn tokens(&self) -> usize {
        self.train.len() + self.held_out.len()
    }

    pub(super) fn train_samples(&self) -> usize {
        samples(self.train.len(), self.context)
    }

    pub(super) fn eval_samples(&self) -> usize {
        self.held_out.len().saturating_sub(1).div_ceil(self.context)
    }

    pub(super) fn train_batch(&self, first: u64, samples: usize) -> Result<Batch, DataError> {
        let mut rows = Contexts::new(self.context, samples);
        for consumed in first..first + samples as u64 {
            let (epoch, sample) = self.order.at(consumed);
            let start = self.offset(epoch) + sample * self.context;
            rows.push(&self.train[start..=start + self.context]);
        }
        rows.into_batch()
    }

    /// The start of an epoch's first context. It leaves room for all contexts of the epoch.
    fn offset(&self, epoch: u64) -> usize {
        let used = self.train_samples() * self.context + 1;
        let room = (self.train.len() - used).min(self.context - 1) as u32;
        (self.offsets.block(epoch, 0)[0] % (room + 1)) as usize
    }

    pub(super) fn held_out(&self, samples: &[usize]) -> Result<Batch, DataError> {
        let mut rows = Contexts::new(self.context, samples.len());
        for sample in samples.iter().filter(|sample| **sample < self.eval_samples()) {
            let start = sample * self.context;
            let end = (start + self.context + 1).min(self.held_out.len());
            rows.push(&self.held_out[start..end]);
        }
        rows.into_batch()
    }
}

/// The number of contexts in `tokens` tokens. It is one less than the maximum, if that is positive, so that the
/// offset can vary.
fn samples(tokens: usize, context: usize) -> usize {
    ((tokens - 1) / context - 1).max(1)
}

impl fmt::Display for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = self.bytes as f64 / 1e6;
        let files = counted(self.files, "file");
        let (train, held_out) = (self.train.len(), self.held_out.len());
        write!(f, "{files} of text, {megabytes:.2} MB: {train} tokens to train on, {held_out} held out")
    }
}

/// Reads documents and notes their digest.
struct Rows {
    tokenizer: Tokenizer,
    hasher: blake3::Hasher,
    files: usize,
    bytes: u64,
}

impl Rows {
    fn file(&mut self, path: &Path) -> Result<Vec<u16>, DataError> {
        let bytes = super::read(path)?;
        if let Some(encoding) = crate::encoding::wide(&bytes) {
            return Err(DataError::Malformed {
                path: path.to_owned(),
                message: format!("the text is in {}, not in UTF-8", encoding.name),
                hint: encoding.hint,
            });
        }
        if self.tokenizer == Tokenizer::Bytes {
            self.note(&bytes);
            return Ok(bytes.into_iter().map(u16::from).collect());
        }
        let text = String::from_utf8(bytes).map_err(|e| DataError::Malformed {
            path: path.to_owned(),
            message: format!("byte {} is not UTF-8", e.utf8_error().valid_up_to()),
            hint: "convert the file to UTF-8 (or fetch it again if it was cut short), or write tokenizer = \"bytes\"",
        })?;
        Ok(self.document(&text))
    }

    fn document(&mut self, text: &str) -> Vec<u16> {
        self.note(text.as_bytes());
        let start = self.tokenizer.start_of_text();
        // Both vocabularies are below 2^16.
        start.into_iter().chain(self.tokenizer.encode(text)).map(|t| t as u16).collect()
    }

    fn note(&mut self, bytes: &[u8]) {
        self.files += 1;
        self.bytes += bytes.len() as u64;
        // The lengths distinguish files whose contents join to the same bytes.
        self.hasher.update(&(bytes.len() as u64).to_le_bytes());
        self.hasher.update(bytes);
    }
}

/// A batch under construction.
struct Contexts {
    context: usize,
    inputs: Vec<i64>,
    labels: Vec<i64>,
}

impl Contexts {
    fn new(context: usize, samples: usize) -> Self {
        let room = context * samples;
        let (inputs, labels) = (Vec::with_capacity(room), Vec::with_capacity(room));
        Self { context, inputs, labels }
    }

    /// Adds a sample with one token more than it has labels. Padding fills up the context.
    fn push(&mut self, tokens: &[u16]) {
        let labels = tokens.len().saturating_sub(1);
        let end = self.inputs.len() + self.context;
        self.inputs.extend(tokens[..labels].iter().map(|&t| i64::from(t)));
        self.labels.extend(tokens.iter().skip(1).map(|&t| i64::from(t)));
        self.inputs.resize(end, 0);
        self.labels.resize(end, IGNORED);
    }

    fn into_batch(self) -> Result<Batch, DataError> {
        let shape = [self.inputs.len() / self.context, self.context];
        let inputs = HostTensor::from_i64(shape, &self.inputs)?;
        let labels = HostTensor::from_i64(shape, &self.labels)?;
        Ok(Batch { tensors: vec![("input_ids".into(), inputs), ("labels".into(), labels)] })
    }
}
