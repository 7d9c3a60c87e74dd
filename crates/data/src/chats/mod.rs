//! Conversations, one a sample, or several that do not see each other.
//!
//! When the files are opened, each line is read once, its form is checked, and its place is noted. A conversation is
//! written by the template and encoded only when it is drawn, so memory does not grow with the files.

mod files;
mod line;
mod writer;

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

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
    packs: Option<Packs>,
    writer: Writer,
    on_error: OnError,
    digest: String,
    notes: Notes,
}

/// The samples into which conversations are packed. Each has as many as fit of those that are drawn one after another.
///
/// How many these are is only known when they are encoded. So the first call for a late sample encodes all before it.
struct Packs {
    /// The draw that each sample begins with, for the samples up to the next one.
    starts: Mutex<Vec<u64>>,
    /// Samples per epoch, by the lengths of the conversations that are checked.
    per_epoch: usize,
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
        let Chats { tokenizer, template, context, train_on, on_error, packing, .. } = chats;
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
        let packs = packing.then(|| Packs { starts: Mutex::new(vec![0]), per_epoch: 0 });
        let mut corpus = Self { files, conversations, train, held_out, order, packs, writer, on_error, digest, notes };
        let lengths = corpus.check()?;
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
        if let Some(packs) = &mut corpus.packs {
            let samples = corpus.train.len() * packed(&lengths, context);
            packs.per_epoch = samples.div_ceil(lengths.len().max(1)).max(1);
        }
        Ok(corpus)
    }

    /// Writes and encodes the first conversations of each part. Broken ones are an error, or are left out. Returns the
    /// lengths of those to train on.
    fn check(&mut self) -> Result<Vec<usize>, DataError> {
        let (mut checked, mut cut, mut lengths) = (0, 0, Vec::new());
        let mut broken = Broken::default();
        let mut is_broken = vec![false; self.conversations.len()];
        for part in [self.train.clone(), self.held_out.clone()] {
            for place in part.take(CHECKED) {
                checked += 1;
                match self.write(place) {
                    Ok(written) => {
                        cut += usize::from(written.cut > 0);
                        lengths.extend(self.train.contains(&place).then_some(written.places()));
                    }
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
        Ok(lengths)
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
        self.packs.as_ref().map_or(self.train.len(), |packs| packs.per_epoch)
    }

    /// The names of a batch's tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        ["input_ids", "labels"].into_iter().chain(self.packs.as_ref().map(|_| "position_ids"))
    }

    pub(super) fn eval_samples(&self) -> usize {
        self.held_out.len()
    }

    /// A training sample, and the place that it comes from, in words. `consumed` samples were drawn before it.
    pub(super) fn example(&self, consumed: u64) -> Result<(String, Written), DataError> {
        let sample = self.sample(consumed)?;
        let mut all = Written { tokens: Vec::new(), trained: Vec::new(), cut: 0 };
        for (_, written) in &sample {
            all.tokens.extend(&written.tokens);
            all.trained.extend(written.trained.iter().enumerate().map(|(place, trained)| place > 0 && *trained));
            all.cut += written.cut;
        }
        Ok((self.origins(&sample), all))
    }

    /// The conversations of a training sample, with their places.
    fn sample(&self, number: u64) -> Result<Vec<(usize, Written)>, DataError> {
        let Some(packs) = &self.packs else { return Ok(vec![self.draw(&self.train, self.order.at(number).1)?]) };
        let mut starts = packs.starts.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let next = starts.len() - 1;
            let at = next.min(usize::try_from(number).unwrap_or(usize::MAX));
            let sample = self.pack(starts[at])?;
            if at == next {
                let end = starts[at] + sample.len() as u64;
                starts.push(end);
            }
            if at as u64 == number {
                return Ok(sample);
            }
        }
    }

    /// The conversations from a draw on that fit into one sample. They are of one epoch, so none is in it twice.
    fn pack(&self, first: u64) -> Result<Vec<(usize, Written)>, DataError> {
        let (mut sample, mut room) = (Vec::new(), self.context());
        let (epoch, mut at) = self.order.at(first);
        loop {
            let (place, written) = self.draw(&self.train, at)?;
            let fits = written.places() <= room;
            if fits {
                room -= written.places();
                sample.push((place, written));
            }
            let (next_epoch, next) = self.order.at(first + sample.len() as u64);
            // A conversation is cut to the context, so the first one fits.
            if !fits || next_epoch != epoch {
                return Ok(sample);
            }
            at = next;
        }
    }

    pub(super) fn train_batch(&self, first: u64, samples: usize) -> Result<Batch, DataError> {
        let numbers = first..first + samples as u64;
        self.batch(numbers.map(|number| self.sample(number)).collect::<Result<_, _>>()?)
    }

    pub(super) fn held_out(&self, samples: &[usize]) -> Result<Batch, DataError> {
        let there = samples.iter().filter(|sample| **sample < self.eval_samples());
        let drawn = there.map(|sample| Ok(vec![self.draw(&self.held_out, *sample)?]));
        self.batch(drawn.collect::<Result<_, DataError>>()?)
    }

    /// The tensors of these samples. Padding fills up the context.
    fn batch(&self, samples: Vec<Vec<(usize, Written)>>) -> Result<Batch, DataError> {
        let context = self.context();
        let shape = [samples.len(), context];
        let (mut inputs, mut labels, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        for sample in samples {
            let end = inputs.len() + context;
            for (_, Written { tokens, trained, .. }) in sample {
                inputs.extend(tokens[..tokens.len() - 1].iter().map(|token| i64::from(*token)));
                let label = |(token, trained): (&u32, &bool)| if *trained { i64::from(*token) } else { IGNORED };
                labels.extend(tokens.iter().zip(&trained).skip(1).map(label));
                positions.extend(0..tokens.len() as i64 - 1);
            }
            // Padding is a document of its own.
            positions.extend(0..(end - inputs.len()) as i64);
            inputs.resize(end, 0);
            labels.resize(end, IGNORED);
        }
        let named = self.names().zip([inputs, labels, positions]).map(|(name, numbers)| {
            let tensor = HostTensor::from_i64(shape, &numbers)?;
            Ok((name.into(), tensor))
        });
        Ok(Batch { tensors: named.collect::<Result<_, DataError>>()? })
    }

    pub(super) fn train_origin(&self, consumed: u64) -> String {
        match self.sample(consumed) {
            Ok(sample) => self.origins(&sample),
            Err(_) => format!("training sample {consumed}"),
        }
    }

    /// The places of a sample's conversations.
    fn origins(&self, sample: &[(usize, Written)]) -> String {
        let first = sample.first().map_or_else(String::new, |(place, _)| self.origin(*place));
        match sample.len() {
            0 | 1 => first,
            more => format!("{first}, and {}", counted(more - 1, "other")),
        }
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
        if let Some(packs) = &self.packs {
            write!(f, ", packed into about {}", counted(packs.per_epoch, "sample"))?;
        }
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

/// The number of samples into which conversations of these lengths are packed, in this order.
fn packed(lengths: &[usize], context: usize) -> usize {
    let (mut samples, mut room) = (0, 0);
    for length in lengths {
        if *length > room {
            (samples, room) = (samples + 1, context);
        }
        room -= (*length).min(room);
    }
    samples
}

#[cfg(test)]
mod tests;
