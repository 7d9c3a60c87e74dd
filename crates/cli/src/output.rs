//! Standard output and standard error, either of which may be closed at any time.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use console::Term;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::failure::Failure;
use crate::table::{columns, wrap_lines};

/// How much a command says besides its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Volume {
    /// Warnings and errors.
    Quiet,
    /// Progress as well.
    Usual,
    /// Log lines as well.
    Verbose,
}

static VOLUME: OnceLock<Volume> = OnceLock::new();

/// Sets the volume of this process, once.
pub(crate) fn set_volume(volume: Volume) {
    let _ = VOLUME.set(volume);
}

pub(crate) fn volume() -> Volume {
    VOLUME.get().copied().unwrap_or(Volume::Usual)
}

/// Writes text as it is to standard output, at once.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe => Failure::Closed,
        _ => Failure::running(format!("standard output cannot be written: {e}")),
    })
}

/// Writes an object to standard output: one line when another program reads it, indented for people.
pub(crate) fn print_json(object: &impl Serialize) -> Result<(), Failure> {
    if !io::IsTerminal::is_terminal(&io::stdout()) {
        return print_json_line(object);
    }
    print(&format!("{}\n", serde_json::to_string_pretty(object).map_err(not_json)?))
}

/// Writes an object to standard output, as one of several lines.
pub(crate) fn print_json_line(object: &impl Serialize) -> Result<(), Failure> {
    print(&format!("{}\n", serde_json::to_string(object).map_err(not_json)?))
}

/// The failure to write a result.
pub(crate) fn not_json(e: serde_json::Error) -> Failure {
    Failure::running(format!("the result cannot be written as JSON: {e}"))
}

/// Writes a line to standard error, broken at blanks where the terminal ends. If nobody listens there, nobody can be
/// told.
pub(crate) fn complain(line: impl fmt::Display) {
    let line = line.to_string();
    let line = columns(&Term::stderr()).map_or_else(|| line.clone(), |columns| wrap_lines(&line, columns));
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes a line about the progress to standard error, unless the user wants quiet.
pub(crate) fn tell(line: impl fmt::Display) {
    if volume() != Volume::Quiet {
        complain(line);
    }
}

/// Writes a sentence that people should read, whatever else goes on.
pub(crate) fn note(sentence: impl fmt::Display) {
    complain(format_args!("note: {sentence}"));
}

/// The time after which a command says what it is doing.
const PATIENCE: Duration = Duration::from_secs(2);

/// Does work that may take long. After two seconds it says so on standard error, and on a terminal for how long already.
pub(crate) fn patiently<T>(doing: &'static str, work: impl FnOnce() -> T) -> T {
    let (done, end) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if end.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) || volume() == Volume::Quiet {
                return;
            }
            let style =
                ProgressStyle::with_template("{spinner} {msg}, {elapsed}").unwrap_or(ProgressStyle::default_spinner());
            let bar = ProgressBar::new_spinner().with_style(style).with_elapsed(PATIENCE).with_message(doing);
            if bar.is_hidden() {
                tell(doing);
            }
            bar.enable_steady_tick(Duration::from_millis(100));
            let _ = end.recv();
            bar.finish_and_clear();
        });
        let result = work();
        drop(done);
        result
    })
}

/// A word of a command as a shell reads it.
pub(crate) fn word(text: impl AsRef<OsStr>) -> String {
    let text = text.as_ref().to_string_lossy();
    // No word of a shell has a zero byte, which is all that cannot be quoted.
    shlex::try_quote(&text).map_or_else(|_| text.to_string(), Into::into)
}

/// Text with its control characters, which could do anything to a terminal, replaced by their pictures, such as `␛`;
/// lines stay lines.
pub(crate) fn legible(text: &str) -> String {
    let picture = |c: char| match c {
        '\n' | '\t' => c,
        '\0'..' ' => char::from_u32(u32::from('␀') + u32::from(c)).unwrap_or(c),
        '\u{7f}' => '␡',
        c if c.is_control() => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    text.chars().map(picture).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_not_sent() {
        assert_eq!(legible("a\tb\nc\r\u{1b}[31m\0\u{7f}\u{9b}é"), "a\tb\nc␍␛[31m␀␡\u{fffd}é");
    }
}
