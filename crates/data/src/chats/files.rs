//! Files of lines, of which only the places are kept in memory.

use std::fs::{File, Metadata};
use std::io::{Read, Seek, SeekFrom};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::SystemTime;

use super::line::Problem;
use crate::{DataError, NOT_UTF_8};

/// Bytes that are looked at together by one thread.
const BLOCK: usize = 4 << 20;

/// The longest line, in bytes.
const LONGEST: usize = 64 << 20;

/// Threads that look at a file. The disk is no faster.
const THREADS: usize = 4;

/// Problems of a file that are told apart.
pub(super) const TOLD: usize = 5;

/// A file of lines.
pub(super) struct Lines {
    path: PathBuf,
    file: Mutex<File>,
    state: (u64, Option<SystemTime>),
    /// The first byte of each line, and the end of the file.
    starts: Vec<u64>,
}

/// The lines that were found in a file.
#[derive(Default)]
pub(super) struct Found {
    /// The lines that can be used, counted from 0.
    pub(super) usable: Vec<u32>,
    /// The number of those that are broken.
    pub(super) broken: usize,
    /// The first of them, with their numbers from 1.
    pub(super) first: Vec<(usize, Problem)>,
}

/// The lines that were found in a block.
#[derive(Default)]
struct Part {
    lengths: Vec<u32>,
    found: Found,
}

impl Lines {
    /// Reads a file once, and has each of its lines checked by `check`. Empty lines are left out. `hasher` gets all
    /// bytes.
    pub(super) fn open(
        path: &Path,
        hasher: &mut blake3::Hasher,
        check: impl Fn(&str) -> Result<(), Problem> + Sync,
    ) -> Result<(Self, Found), DataError> {
        let unreadable = |source| DataError::Unreadable { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(unreadable)?;
        let state = state(&file.metadata().map_err(unreadable)?);
        let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS);
        let (mut starts, mut found, mut rest) = (vec![0], Found::default(), Vec::new());
        let mut bytes = 0;
        loop {
            let mut blocks = Vec::new();
            while blocks.len() < threads {
                let Some(block) = next_block(&mut file, &mut rest).map_err(unreadable)? else { break };
                if block.len() > LONGEST {
                    let message = format!("line {} is longer than {} MiB", starts.len(), LONGEST >> 20);
                    let hint = "write one JSON object on each line, with line breaks between them";
                    return Err(DataError::Malformed { path: path.to_owned(), message, hint });
                }
                blocks.push(block);
            }
            if let Some(block) = blocks.first().filter(|_| bytes == 0) {
                crate::check_text(path, block)?;
            }
            if blocks.is_empty() {
                break;
            }
            let parts = thread::scope(|scope| {
                let looks: Vec<_> = blocks.iter().map(|block| scope.spawn(|| look(block, &check))).collect();
                for block in &blocks {
                    hasher.update(block);
                }
                // A thread ends with a panic only where the program is wrong.
                let part = |look: thread::ScopedJoinHandle<'_, Part>| look.join().unwrap_or_else(|e| resume_unwind(e));
                looks.into_iter().map(part).collect::<Vec<Part>>()
            });
            for part in parts {
                let first = starts.len() - 1;
                for length in part.lengths {
                    bytes += u64::from(length);
                    starts.push(bytes);
                }
                found.usable.extend(part.found.usable.iter().map(|line| line + first as u32));
                found.broken += part.found.broken;
                let told = part.found.first.into_iter().map(|(number, problem)| (number + first, problem));
                found.first.extend(told.take(TOLD - found.first.len().min(TOLD)));
            }
        }
        // The lengths distinguish files whose contents join to the same bytes.
        hasher.update(&bytes.to_le_bytes());
        if bytes == 0 {
            let hint = "fill it, or leave it out of [data]";
            return Err(DataError::Malformed { path: path.to_owned(), message: "the file is empty".into(), hint });
        }
        if u32::try_from(starts.len()).is_err() {
            let message = "the file has more than 4 billion lines".into();
            return Err(DataError::Malformed { path: path.to_owned(), message, hint: "cut the file in several" });
        }
        starts.shrink_to_fit();
        Ok((Self { path: path.to_owned(), file: Mutex::new(file), state, starts }, found))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The number of lines, empty ones among them.
    pub(super) fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// The bytes of the file.
    pub(super) fn bytes(&self) -> u64 {
        self.starts.last().copied().unwrap_or_default()
    }

    /// Reads the line of this number, counted from 0.
    pub(super) fn read(&self, line: usize) -> Result<String, DataError> {
        let unreadable = |source| DataError::Unreadable { path: self.path.clone(), source };
        let changed = || DataError::Malformed {
            path: self.path.clone(),
            message: "the file has changed since it was opened".into(),
            hint: "bring back the file as it was and resume the run, or start a new run with the changed file",
        };
        let mut bytes = vec![0; (self.starts[line + 1] - self.starts[line]) as usize];
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if state(&file.metadata().map_err(unreadable)?) != self.state {
            return Err(changed());
        }
        file.seek(SeekFrom::Start(self.starts[line])).map_err(unreadable)?;
        file.read_exact(&mut bytes).map_err(unreadable)?;
        String::from_utf8(bytes).map_err(|_| changed())
    }
}

/// The marks by which a changed file is known: its length, and the time when it was written.
fn state(metadata: &Metadata) -> (u64, Option<SystemTime>) {
    (metadata.len(), metadata.modified().ok())
}

/// The next lines of a file: about a block, and as much as it takes to end with a line. `rest` has what is read of the
/// line after them. The last line may have no end.
fn next_block(file: &mut File, rest: &mut Vec<u8>) -> std::io::Result<Option<Vec<u8>>> {
    let mut block = std::mem::take(rest);
    loop {
        let read = file.take(BLOCK as u64).read_to_end(&mut block)?;
        if read == 0 {
            return Ok((!block.is_empty()).then_some(block));
        }
        // What was there before has no end of a line.
        let fresh = block.len() - read;
        if let Some(end) = block[fresh..].iter().rposition(|byte| *byte == b'\n') {
            *rest = block.split_off(fresh + end + 1);
            return Ok(Some(block));
        }
        if block.len() > LONGEST {
            return Ok(Some(block));
        }
    }
}

/// Checks the lines of a block.
fn look(block: &[u8], check: impl Fn(&str) -> Result<(), Problem>) -> Part {
    let mut part = Part::default();
    for (number, line) in block.split_inclusive(|byte| *byte == b'\n').enumerate() {
        // No line is longer than `LONGEST`.
        part.lengths.push(line.len() as u32);
        if line.trim_ascii().is_empty() {
            continue;
        }
        let checked = match std::str::from_utf8(line) {
            Ok(text) => check(text),
            Err(e) => {
                let message = format!("byte {} of the line is not UTF-8", e.valid_up_to());
                Err(Problem::new(message, NOT_UTF_8))
            }
        };
        match checked {
            Ok(()) => part.found.usable.push(number as u32),
            Err(problem) => {
                part.found.broken += 1;
                if part.found.first.len() < TOLD {
                    part.found.first.push((number + 1, problem));
                }
            }
        }
    }
    part
}
