//! The metrics of a run as TensorBoard reads them.
//!
//! ```text
//! file     records, the first with the version, the second with the step at which it starts
//! record   8 bytes   the length of the event, little-endian, as are all numbers
//!          4         masked CRC-32C of these bytes
//!          n         the event
//!          4         masked CRC-32C of the event
//!
//! Event    1: double   seconds since 1970          Summary  1: repeated Value
//!          2: int64    step                        Value    1: string   name
//!          3: string   version of the file                  2: float    value
//!          5: Summary  values of the step          SessionLog
//!          7: SessionLog                                    1: enum     1 is START
//! ```
//!
//! Events are messages of protocol buffers. TensorBoard reads the files of a directory in the order of their names. Where
//! a session starts at a step, it drops that step and all later ones that it has read before.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use fusionllm_data::DiskError;
use fusionllm_events::StepMetrics;

/// The version from which on TensorBoard heeds the start of a session.
const VERSION: &[u8] = b"brain.Event:2";

/// The folder with a run's files, and the file that is written.
#[derive(Debug)]
pub(super) struct TensorBoard {
    folder: PathBuf,
    /// The file of this session, and its length. It is opened with the first step.
    file: Option<(File, u64)>,
    /// The first reason why a step was left out, until somebody asks, and whether there was any.
    left_out: (Option<DiskError>, bool),
}

impl TensorBoard {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, file: None, left_out: (None, false) }
    }

    /// Adds a step. These files repeat `metrics.jsonl`, so a step that cannot be written is left out.
    pub(super) fn record(&mut self, metrics: &StepMetrics) {
        if let Err(error) = self.try_record(metrics)
            && !std::mem::replace(&mut self.left_out.1, true)
        {
            self.left_out.0 = Some(DiskError::at(&self.folder, "written")(error));
        }
    }

    /// Training goes back. The next step starts another file, and thereby drops those that it does again.
    pub(super) fn rewind(&mut self) {
        self.file = None;
    }

    /// The reason why steps are left out. It is returned once.
    pub(super) fn take_left_out(&mut self) -> Option<DiskError> {
        self.left_out.0.take()
    }

    fn try_record(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        let (mut file, length) = match self.file.take() {
            Some(file) => file,
            None => open(&self.folder, metrics.step)?,
        };
        let records = record(&scalars(metrics));
        // The disk may have room for a part of it.
        let written = file.write_all(&records).inspect_err(|_| drop(file.set_len(length)));
        if written.is_ok() {
            self.file = Some((file, length + records.len() as u64));
        }
        written
    }
}

/// Begins a file after all others in a folder, for the steps from `step` on.
fn open(folder: &Path, step: u64) -> io::Result<(File, u64)> {
    fs::create_dir_all(folder)?;
    // Numbers keep their order even if the clock was put back.
    let number = fs::read_dir(folder)?.count() + 1;
    let path = folder.join(format!("events.out.tfevents.{number:010}.fusionllm"));
    let mut file = File::options().append(true).create_new(true).open(&path)?;
    let start = [record(&event(0, 3, VERSION)), record(&event(step, 7, &[1 << 3, 1]))].concat();
    file.write_all(&start).inspect_err(|_| drop(fs::remove_file(&path)))?;
    Ok((file, start.len() as u64))
}

/// The event with a step's numbers.
fn scalars(metrics: &StepMetrics) -> Vec<u8> {
    let values = [
        ("loss", metrics.loss),
        ("val_loss", metrics.val_loss),
        ("val_accuracy", metrics.val_accuracy),
        ("step_s", Some(metrics.step_s)),
        ("tokens_per_s", Some(metrics.tokens_per_s)),
        ("bytes_sent", Some(metrics.bytes_sent as f64)),
        ("lr", Some(metrics.lr)),
        ("grad_norm", metrics.grad_norm),
    ];
    let mut summary = Vec::new();
    for (name, value) in values.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        let mut content = Vec::new();
        field(&mut content, 1, name.as_bytes());
        content.push(2 << 3 | 5);
        content.extend((value as f32).to_le_bytes());
        field(&mut summary, 1, &content);
    }
    event(metrics.step, 5, &summary)
}

/// An event of a step that happens now and has one field with this content.
fn event(step: u64, number: u8, content: &[u8]) -> Vec<u8> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let mut event = vec![1 << 3 | 1];
    event.extend(seconds.to_le_bytes());
    event.push(2 << 3);
    varint(&mut event, step);
    field(&mut event, number, content);
    event
}

/// Adds a field of bytes.
fn field(message: &mut Vec<u8>, number: u8, content: &[u8]) {
    message.push(number << 3 | 2);
    varint(message, content.len() as u64);
    message.extend(content);
}

fn varint(message: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        message.push(number as u8 | 0x80);
        number >>= 7;
    }
    message.push(number as u8);
}

fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), event, &masked(event)].concat()
}

/// The masked checksum, so that a checksum of data with checksums does not vanish.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// CRC-32C (Castagnoli), bit by bit: a step has some two hundred bytes. `crc32fast` has another polynomial.
fn crc32c(bytes: &[u8]) -> u32 {
    let bit = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), bit))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From RFC 3720, appendix B.4, and the usual check.
    #[test]
    fn checksums_are_those_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn what_cannot_be_written_is_left_out_and_said_once() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().join("tensorboard");
        fs::write(&folder, "in the way").unwrap();
        let mut board = TensorBoard::new(folder.clone());
        board.record(&StepMetrics::default());
        assert_eq!(board.take_left_out().unwrap().path, folder);
        board.record(&StepMetrics::default());
        assert!(board.take_left_out().is_none());
        fs::remove_file(&folder).unwrap();
        board.record(&StepMetrics::default());
        board.rewind();
        board.record(&StepMetrics::default());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
    }
}
