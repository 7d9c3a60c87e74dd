//! The process of a worker: its start, its messages, and its end.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::message::{Answer, Failed, Finished, Hello, PROTOCOL, Request};
use crate::BackendError;
use crate::machine::memory::MemoryKills;

/// The time for which a worker is waited for.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// The time until its first message. Large frameworks load slowly.
    pub start: Duration,
    /// Between two messages.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { start: Duration::from_secs(120), silence: Duration::from_secs(30) }
    }
}

/// An environment variable and its value. With it, Python imports nothing from the current directory. Otherwise anybody
/// who can write there could run a program of theirs as a module `json`.
pub(super) const SAFE_PATH: (&str, &str) = ("PYTHONSAFEPATH", "1");

/// The longest line that is read of a worker.
const MAX_LINE: u64 = 1 << 20;
/// How many lines of its standard error are kept, and how much of each.
const KEPT_LINES: usize = 12;
const KEPT_CHARS: usize = 300;

pub(super) struct Process {
    command: String,
    patience: Patience,
    child: Child,
    /// `None` once the process is to end.
    requests: Option<ChildStdin>,
    answers: Receiver<io::Result<Vec<u8>>>,
    last_words: Arc<Mutex<VecDeque<String>>>,
    /// Disconnected once all of the standard error was read.
    listening: Receiver<()>,
    killed: MemoryKills,
    /// The reason why nothing more can be asked.
    broken: Option<String>,
}

impl Process {
    pub(super) fn start(command: &str, patience: Patience) -> Result<(Self, Hello), BackendError> {
        let refuse = |reason: String| BackendError::Worker { command: command.into(), reason };
        let words = shlex::split(command).filter(|words| !words.is_empty());
        let words = words.ok_or_else(|| refuse("the command has no words, or a quote is not closed".into()))?;
        let mut child = Command::new(&words[0]);
        child.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        child.env(SAFE_PATH.0, SAFE_PATH.1);
        // Ctrl-C is for the peer, which needs its worker to leave in good order.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut child, 0);
        let killed = MemoryKills::start();
        let mut child = child.spawn().map_err(|e| refuse(format!("it cannot be started: {e}")))?;
        let last_words = Arc::default();
        let (listener, listening) = mpsc::channel();
        if let Some(stderr) = child.stderr.take() {
            let last_words = Arc::clone(&last_words);
            thread::spawn(move || {
                listen(stderr, &last_words);
                drop(listener);
            });
        }
        let (sender, answers) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || read_lines(stdout, &sender));
        }
        let requests = child.stdin.take();
        let command = command.into();
        let mut process =
            Self { command, patience, child, requests, answers, last_words, listening, killed, broken: None };
        let hello = match process.answer(patience.start)? {
            Answer::Hello(hello) => {
                let [name, version, device] =
                    [&hello.name, &hello.version, &hello.device].map(|text| printable(text, KEPT_CHARS));
                Hello { name, version, device, ..hello }
            }
            other => return Err(process.broken(format!("its first message is not hello, but {other:?}"))),
        };
        if hello.protocol != PROTOCOL {
            let (name, theirs) = (&hello.name, hello.protocol);
            let reason = format!(
                "{name} speaks version {theirs} of the worker protocol, and this program version {PROTOCOL}; install \
                 the same release of both"
            );
            return Err(process.broken(reason));
        }
        process.send(&Request::Start { protocol: PROTOCOL })?;
        Ok((process, hello))
    }

    /// Sends a request and waits for its answer. The outer error means that the process is of no more use.
    pub(super) fn ask(&mut self, request: &Request<'_>) -> Result<Result<Finished, Failed>, BackendError> {
        self.send(request)?;
        match self.answer(self.patience.silence)? {
            Answer::Done(done) => Ok(Ok(done)),
            Answer::Error(failed) => Ok(Err(Failed { reason: printable(&failed.reason, usize::MAX), ..failed })),
            other => Err(self.broken(format!("it answered with {other:?}"))),
        }
    }

    /// Sends a message, without waiting for an answer.
    pub(super) fn send(&mut self, request: &Request<'_>) -> Result<(), BackendError> {
        if let Some(reason) = &self.broken {
            return Err(self.error(reason.clone()));
        }
        let mut line = serde_json::to_vec(request).map_err(|e| self.error(e.to_string()))?;
        line.push(b'\n');
        let written = match &mut self.requests {
            Some(requests) => requests.write_all(&line).and_then(|()| requests.flush()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        // If the process has ended, its last output has the reason.
        written
            .or_else(|e| self.answer(self.patience.silence).and(Err(self.broken(format!("it takes no requests: {e}")))))
    }

    /// The next message, apart from signs of life.
    fn answer(&mut self, patience: Duration) -> Result<Answer, BackendError> {
        loop {
            let line = match self.answers.recv_timeout(patience) {
                Ok(Ok(line)) => line,
                Ok(Err(e)) => return Err(self.broken(format!("its messages cannot be read: {e}"))),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(self.broken(format!("it has been silent for {} s", patience.as_secs_f64())));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let Ok(status) = self.child.wait() else { return Err(self.broken("it ended".to_owned())) };
                    let verdict = self.killed.verdict(status, "").unwrap_or_else(|| status.to_string());
                    return Err(self.broken(format!("it ended ({verdict})")));
                }
            };
            match serde_json::from_slice(&line) {
                Ok(Answer::Alive {}) => {}
                Ok(answer) => return Ok(answer),
                Err(_) => {
                    let line = printable(String::from_utf8_lossy(&line).trim_end(), KEPT_CHARS);
                    return Err(self.broken(format!("it wrote {line:?} where a message was expected")));
                }
            }
        }
    }

    /// Ends the process, which is of no more use. Returns the error.
    fn broken(&mut self, reason: String) -> BackendError {
        self.requests = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A child of the process may keep its standard error open.
        let _ = self.listening.recv_timeout(Duration::from_secs(1));
        self.broken = Some(reason.clone());
        self.error(reason)
    }

    /// An error with the reason, and what the process last wrote to its standard error.
    pub(super) fn error(&self, mut reason: String) -> BackendError {
        let last_words = self.last_words.lock().unwrap_or_else(PoisonError::into_inner);
        if !last_words.is_empty() {
            reason += "; its last lines:";
        }
        for line in &*last_words {
            reason += "\n  ";
            reason += line;
        }
        BackendError::Worker { command: self.command.clone(), reason }
    }
}

impl Drop for Process {
    /// A worker ends when its requests do. If it does not, it is killed.
    fn drop(&mut self) {
        self.requests = None;
        let ended = self.answers.recv_timeout(Duration::from_secs(2));
        if !matches!(ended, Err(RecvTimeoutError::Disconnected)) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// Passes on each line of the process's messages.
fn read_lines(stdout: ChildStdout, lines: &mpsc::Sender<io::Result<Vec<u8>>>) {
    let mut stdout = BufReader::new(stdout);
    loop {
        let mut line = Vec::new();
        let read = stdout.by_ref().take(MAX_LINE).read_until(b'\n', &mut line);
        let line = match read {
            Ok(0) => return,
            Ok(_) => Ok(line),
            Err(e) => Err(e),
        };
        if lines.send(line).is_err() {
            return;
        }
    }
}

/// Keeps the last lines of the process's standard error.
fn listen(stderr: impl Read, last_words: &Mutex<VecDeque<String>>) {
    let mut stderr = BufReader::new(stderr);
    let mut line = Vec::new();
    while stderr.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        let text = printable(String::from_utf8_lossy(&line).trim_end(), KEPT_CHARS);
        let mut last_words = last_words.lock().unwrap_or_else(PoisonError::into_inner);
        last_words.push_back(text);
        if last_words.len() > KEPT_LINES {
            last_words.pop_front();
        }
        line.clear();
    }
}

/// The text without the characters that a terminal would obey.
fn printable(text: &str, chars: usize) -> String {
    text.chars().filter(|c| !c.is_control() || *c == '\n').take(chars).collect()
}
