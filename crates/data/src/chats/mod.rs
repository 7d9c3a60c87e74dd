//! Conversations, one a sample.
//!
//! When the files are opened, each line is read once, its form is checked, and its place is noted. A conversation is
//! written by the template and encoded only when it is drawn, so memory does not grow with the files.

mod files;
mod line;
mod writer;

use std::fmt;
use std::ops::Range;
use std::path::Path;

use fusionllm_graph::HostTensor;
use fusionllm_graph::units::counted;

use crate::order::Order;
use crate::{Batch, Chats, DataError, IGNORED, OnError, TrainOn, Validation};
use files::{Lines, TOLD};
use line::{Conversation, Problem};
use writer::{Failure, Writer};

pub(crate) use writer::Written;

/// Conversations of each part that are written and encoded when the files are opened, so that common trouble shows
/// before the first step.
const CHECKED: usize = 256;

/// Bytes of a file that are looked at to tell whether it has conversations.
const LOOKED_AT: u64 = 1 << 20;

/// The advice about broken conversations, after that about the first of them.
const SKIP: &str = "or write on_error = \"skip\" in [data] to leave such lines out";

/// Conversations to train on and held-out ones.
pub(super) struct Corpus {
    /// Those to train on, and after them those of validation alone.
    files: Vec<Lines>,
    /// The lines with conversations, counted over all files.
    conversations: Vec<u32>,
    train: Range<usize>,
    held_out: Range<usize>,
    order: Order,
    writer: Writer,
    on_error: OnError,
    digest: String,
    notes: Notes,
}

/// The counts in the line about the data.
#[derive(Default)]
struct Notes {
    /// Conversations that are left out because they are broken.
    broken: usize,
    /// Conversations that were written and encoded.
    checked: usize,
    /// Checked conversations that are longer than the context.
    cut: usize,
}

/// Lines that are broken, for a message.
#[derive(Default)]
struct Broken {
    count: usize,
    lines: Vec<String>,
    hint: &'static str,
}

impl Broken {
    fn add(&mut self, path: &Path, number: usize, problem: &Problem) {
        if self.lines.is_empty() {
            self.hint = problem.hint;
        }
        if self.lines.len() < TOLD {
            self.lines.push(format!("{}, line {number}: {}", path.display(), problem.message));
        }
    }

    /// The error that tells of them. It begins with `title`.
    fn error(self, title: impl fmt::Display) -> DataError {
        let more = self.count - self.lines.len();
        let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
        let message = format!("{title}:\n  {}{more}", self.lines.join("\n  "));
        DataError::Broken { message, hint: format!("{}; {SKIP}", self.hint) }
    }

    /// The beginning of the error: how many of how many are broken.
    fn title(&self, whole: impl fmt::Display) -> String {
        format!("{} of {whole} {} broken", self.count, if self.count == 1 { "is" } else { "are" })
    }
}

/// Whether the first line of a file is a conversation.
pub(super) fn is_in(path: &Path) -> bool {
    use std::io::{BufRead, BufReader, Read};
    let Ok(file) = std::fs::File::open(path) else { return false };
    let mut lines = BufReader::new(file.take(LOOKED_AT)).lines().map_while(Result::ok);
    lines.find(|line| !line.trim().is_empty()).is_some_and(|line| Conversation::is_in(&line))
}

impl Corpus {
    pub(super) fn open(chats: &Chats, seed: u64) -> Result<Self, DataError> {
        let Chats { tokenizer, template, context, train_on, on_error, .. } = chats;
        let (context, train_on, on_error) = (*context, *train_on, *on_error);
        let writer = Writer { tokenizer: tokenizer.clone(), template: template.clone(), context, train_on };
        let mut hasher = blake3::Hasher::new();
        if let Some(template) = template {
            hasher.update(template.source().as_bytes());
        }
        let (mut files, mut conversations, mut broken) = (Vec::new(), Vec::new(), Broken::default());
        let mut before = 0;
        let mut add = |path: &Path| {
            let answer = train_on == TrainOn::Answers;
            let (lines, found) = Lines::open(path, &mut hasher, |line| Conversation::read(line, answer).map(|_| ()))?;
            conversations.extend(found.usable.iter().map(|line| line + before));
            broken.count += found.broken;
            found.first.iter().for_each(|(number, problem)| broken.add(lines.path(), *number, problem));
            before = u32::try_from(before as usize + lines.len()).map_err(|_| DataError::TooLittle {
                message: "the files have more than 4 billion lines together".into(),
                hint: "name fewer files in data.files",
            })?;
            files.push(lines);
            Ok::<usize, DataError>(conversations.len())
        };
        let mut end = 0;
        for path in &chats.files {
            end = add(path)?;
        }
        let held = match &chats.validation {
            // At least one, if any are wanted.
            Validation::Fraction(fraction) if *fraction > 0.0 => ((end as f64 * fraction) as usize).max(1).min(end),
            Validation::Fraction(_) => 0,
            Validation::Files(paths) => {
                let first = end;
                let mut last = end;
                for path in paths {
                    last = add(path)?;
                }
                end = last;
                last - first
            }
        };
        conversations.shrink_to_fit();
        let lines = conversations.len() + broken.count;
        let notes = Notes { broken: broken.count, ..Notes::default() };
        if broken.count > 0 && (on_error == OnError::Fail || conversations.is_empty()) {
            let title = broken.title(format_args!("{lines} lines"));
            return Err(broken.error(title));
        }
        let (train, held_out) = (0..end - held, end - held..end);
        let digest = hasher.finalize().to_hex().to_string();
        let order = Order::new(seed, 1, 1, chats.shuffle);
        let mut corpus = Self { files, conversations, train, held_out, order, writer, on_error, digest, notes };
        corpus.check()?;
        if corpus.train.is_empty() {
            return Err(DataError::TooLittle {
                message: "there is no conversation to train on".into(),
                hint: "name more files in data.files, or lower data.validation",
            });
        }
        let wanted = chats.validation != Validation::Fraction(0.0) && chats.validation != Validation::Files(Vec::new());
        if wanted && corpus.held_out.is_empty() {
            return Err(DataError::TooLittle {
                message: "there is no held-out conversation".into(),
                hint: "name files with conversations, or write validation = 0 to hold nothing out",
            });
        }
        corpus.order = Order::new(seed, corpus.train.len(), 1, chats.shuffle);
        Ok(corpus)
    }

    /// Writes and encodes the first conversations of each part. Broken ones are an error, or are left out.
    fn check(&mut self) -> Result<(), DataError> {
        let (mut checked, mut cut) = (0, 0);
        let mut broken = Broken::default();
        let mut is_broken = vec![false; self.conversations.len()];
        for part in [self.train.clone(), self.held_out.clone()] {
            for place in part.take(CHECKED) {
                checked += 1;
                match self.write(place) {
                    Ok(written) => cut += usize::from(written.cut > 0),
                    Err(Failure::Data(error)) => return Err(error),
                    Err(Failure::Broken(problem)) => {
                        let (file, line) = self.place(place);
                        broken.add(file.path(), line + 1, &problem);
                        broken.count += 1;
                        is_broken[place] = true;
                    }
                }
            }
        }
        (self.notes.checked, self.notes.cut) = (checked, cut);
        if broken.count > 0 && (self.on_error == OnError::Fail || broken.count == self.conversations.len()) {
            let title = broken.title(format_args!("the first {checked} conversations"));
            return Err(broken.error(title));
        }
        self.notes.broken += broken.count;
        let left = |part: &Range<usize>| is_broken[part.clone()].iter().filter(|broken| !**broken).count();
        let (train, held_out) = (left(&self.train), left(&self.held_out));
        let mut broken = is_broken.iter();
        self.conversations.retain(|_| broken.next() == Some(&false));
        (self.train, self.held_out) = (0..train, train..train + held_out);
        Ok(())
    }

    /// The file and the line, counted from 0, of the conversation at this place.
    fn place(&self, place: usize) -> (&Lines, usize) {
        let mut line = self.conversations[place] as usize;
        for file in &self.files {
            if line < file.len() {
                return (file, line);
            }
            line -= file.len();
        }
        // Each line is one of a file.
        (&self.files[0], 0)
    }

    fn write(&self, place: usize) -> Result<Written, Failure> {
        let (file, line) = self.place(place);
        self.writer.write(&file.read(line)?)
    }

    /// The conversation at a place of a part. If it is broken and such are skipped, the next one in the files that is
    /// not broken takes its place; after the last of the part comes its first.
    fn draw(&self, part: &Range<usize>, at: usize) -> Result<(usize, Written), DataError> {
        let mut broken = Broken::default();
        for more in 0..part.len() {
            let place = part.start + (at + more) % part.len();
            match self.write(place) {
                Ok(written) => return Ok((place, written)),
                Err(Failure::Data(error)) => return Err(error),
                Err(Failure::Broken(problem)) => {
                    let (file, line) = self.place(place);
                    broken.add(file.path(), line + 1, &problem);
                    broken.count += 1;
                    if self.on_error == OnError::Fail {
                        break;
                    }
                }
            }
        }
        // No part that is drawn from is empty.
        Err(match broken.count {
            1 => broken.error("a conversation is broken"),
            count => broken.error(format_args!("all {count} conversations are broken")),
        })
    }

    pub(super) fn context(&self) -> usize {
        self.writer.context
    }

    pub(super) fn digest(&self) -> &str {
        &self.digest
    }

    pub(super) fn train_samples(&self) -> usize {
        self.train.len()
    }

    pub(super) fn eval_samples(&self) -> usize {
        self.held_out.len()
    }

    /// The sample of the draw after `consumed` draws, and the place that it comes from, in words.
    pub(super) fn example(&self, consumed: u64) -> Result<(String, Written), DataError> {
        let (_, sample) = self.order.at(consumed);
        let (place, written) = self.draw(&self.train, sample)?;
        Ok((self.origin(place), written))
    }

    pub(super) fn train_batch(&self, first: u64, samples: usize) -> Result<Batch, DataError> {
        let at = (first..first + samples as u64).map(|consumed| self.order.at(consumed).1);
        self.batch(&self.train, at)
    }

    pub(super) fn held_out(&self, samples: &[usize]) -> Result<Batch, DataError> {
        self.batch(&self.held_out, samples.iter().copied().filter(|sample| *sample < self.eval_samples()))
    }

    /// The conversations at these places of a part. Padding fills up the context.
    fn batch(&self, part: &Range<usize>, at: impl Iterator<Item = usize>) -> Result<Batch, DataError> {
        let context = self.context();
        let (mut inputs, mut labels) = (Vec::new(), Vec::new());
        for at in at {
            let Written { tokens, trained, .. } = self.draw(part, at)?.1;
            let end = inputs.len() + context;
            inputs.extend(tokens[..tokens.len() - 1].iter().map(|token| i64::from(*token)));
            let label = |(token, trained): (&u32, &bool)| if *trained { i64::from(*token) } else { IGNORED };
            labels.extend(tokens.iter().zip(&trained).skip(1).map(label));
            inputs.resize(end, 0);
            labels.resize(end, IGNORED);
        }
        let shape = [inputs.len() / context, context];
        let named = [("input_ids", inputs), ("labels", labels)].into_iter().map(|(name, numbers)| {
            let tensor = HostTensor::from_i64(shape, &numbers)?;
            Ok((name.into(), tensor))
        });
        Ok(Batch { tensors: named.collect::<Result<_, DataError>>()? })
    }

    pub(super) fn train_origin(&self, consumed: u64) -> String {
        self.origin(self.train.start + self.order.at(consumed).1)
    }

    pub(super) fn eval_origin(&self, index: usize) -> String {
        match index < self.held_out.len() {
            true => self.origin(self.held_out.start + index),
            false => format!("held-out conversation {index}"),
        }
    }

    fn origin(&self, place: usize) -> String {
        let (file, line) = self.place(place);
        format!("{}, line {}", file.path().display(), line + 1)
    }
}

impl fmt::Display for Corpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = self.files.iter().map(Lines::bytes).sum::<u64>() as f64 / 1e6;
        let files = counted(self.files.len(), "file");
        let (train, held_out) = (counted(self.train.len(), "conversation"), self.held_out.len());
        write!(f, "{files} of chats, {megabytes:.2} MB: {train} to train on, {held_out} held out")?;
        let Notes { broken, checked, cut } = self.notes;
        if broken > 0 {
            write!(f, ", {broken} broken and left out")?;
        }
        if cut > 0 {
            write!(f, "; of the first {checked}, {cut} are cut to {} tokens", self.context())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
