//! Text as one long sequence of tokens, cut into contexts.

mod documents;
mod tokens;

use std::fmt;

use fusionllm_graph::units::counted;
use fusionllm_graph::{CounterRng, HostTensor};

use super::order::Order;
use super::sample;
use super::{Batch, DataError, Documents, IGNORED, Text, Validation};
use documents::Reader;
use tokens::Tokens;

/// Training tokens and held-out tokens.
///
/// The last part of each file is held out, or whole files are. Small files count together: one gives what it and those
/// before it owe, once that fills a sample. The other parts follow each other, each after the
/// tokens that the tokenizer has before a document. Each epoch cuts the sequence at another offset, so that a token appears at
/// many positions over the epochs.
pub(super) struct Corpus {
    train: Tokens,
    held_out: Tokens,
    context: usize,
    /// The token that begins a document, if documents are kept apart.
    beginning: Option<u32>,
    order: Order,
    offsets: CounterRng,
    digest: String,
    files: usize,
    bytes: u64,
}

impl Corpus {
    pub(super) fn open(text: &Text, seed: u64) -> Result<Self, DataError> {
        let mut documents = Reader::new(&text.tokenizer);
        let [mut train, mut held_out] = [(); 2].map(|()| Tokens::new(text.tokenizer.vocabulary()));
        let fraction = match &text.validation {
            Validation::Fraction(fraction) => *fraction,
            Validation::Files(paths) => {
                for path in paths {
                    held_out.extend(documents.file(path)?);
                }
                0.0
            }
        };
        let mut owed = 0.0;
        let mut add = |documents: &Reader<'_>, mut tokens: Vec<u32>, is_last: bool| {
            owed += tokens.len() as f64 * fraction;
            // Small files owe too little for a sample, so they count together.
            let gives = is_last || owed > text.context as f64;
            let held = if gives { (owed as usize).min(tokens.len()) } else { 0 };
            owed -= held as f64;
            let rest = tokens.split_off(tokens.len() - held);
            train.extend(tokens);
            if !rest.is_empty() {
                held_out.extend(documents.before().chain(rest));
            }
        };
        for (path, after) in text.files.iter().zip((0..text.files.len()).rev()) {
            let tokens = documents.file(path)?;
            add(&documents, tokens, after == 0);
        }
        if text.files.is_empty() {
            let tokens = documents.document(sample::text())?;
            add(&documents, tokens, true);
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
        let (digest, files, bytes) = (documents.digest(), documents.files, documents.bytes);
        let beginning = match text.documents {
            Documents::Joined => None,
            Documents::Apart => documents.before().next(),
        };
        Ok(Self { train, held_out, context, beginning, order, offsets, digest, files, bytes })
    }

    pub(super) fn context(&self) -> usize {
        self.context
    }

    /// The names of a batch's tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        ["input_ids", "labels"].into_iter().chain(self.beginning.map(|_| "position_ids"))
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
            rows.push(&self.train.get(start..start + self.context + 1));
        }
        rows.into_batch(self)
    }

    /// The tokens of a sample, one more than it has labels.
    pub(super) fn example(&self, consumed: u64) -> Vec<u32> {
        let (epoch, sample) = self.order.at(consumed);
        let start = self.offset(epoch) + sample * self.context;
        // Each of them was a `u32` before.
        self.train.get(start..start + self.context + 1).into_iter().map(|token| token as u32).collect()
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
            rows.push(&self.held_out.get(start..end));
        }
        rows.into_batch(self)
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
    fn push(&mut self, tokens: &[i64]) {
        let labels = tokens.len().saturating_sub(1);
        let end = self.inputs.len() + self.context;
        self.inputs.extend(&tokens[..labels]);
        self.labels.extend(tokens.iter().skip(1));
        self.inputs.resize(end, 0);
        self.labels.resize(end, IGNORED);
    }

    fn into_batch(self, corpus: &Corpus) -> Result<Batch, DataError> {
        let shape = [self.inputs.len() / self.context, self.context];
        let positions = corpus.beginning.map(|beginning| self.positions(i64::from(beginning)));
        let tensors = [self.inputs, self.labels].into_iter().chain(positions);
        let named = corpus.names().zip(tensors).map(|(name, numbers)| {
            let tensor = HostTensor::from_i64(shape, &numbers)?;
            Ok((name.into(), tensor))
        });
        Ok(Batch { tensors: named.collect::<Result<_, DataError>>()? })
    }

    /// The place of each token in its document, or in the part of it that the sample has.
    fn positions(&self, beginning: i64) -> Vec<i64> {
        let in_sample = |tokens: &[i64]| {
            let mut next = 0;
            let place = tokens.iter().map(|token| {
                let place = if *token == beginning { 0 } else { next };
                next = place + 1;
                place
            });
            place.collect::<Vec<i64>>()
        };
        self.inputs.chunks(self.context).flat_map(in_sample).collect()
    }
}
