//! Processes of a run that tests start, signal, and wait for together with all that these start.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// The settings of a model small enough that a step takes milliseconds.
pub(crate) const TINY: [&str; 9] = [
    "--steps=1000000",
    "--set=model.n_layer=2",
    "--set=model.n_embd=16",
    "--set=model.n_head=2",
    "--set=data.context=16",
    "--set=train.batch=4",
    "--set=train.micro_batch=1",
    "--set=eval.every=40",
    "--set=eval.batches=2",
];

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The directory of a run, and a pipe that every process of it holds open.
pub(crate) struct Scene {
    pub(crate) directory: tempfile::TempDir,
}

/// A process that was started in a scene.
pub(crate) struct Process {
    child: Child,
    err: BufReader<ChildStderr>,
    /// The pipe that it and all that it started hold open.
    pipe: PathBuf,
    /// Gets a message once the process, and all that it started, have ended.
    gone: mpsc::Receiver<()>,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.directory.path().join("run")
    }

    /// Starts a command of the program. `prefix` is a command that starts it, such as `nohup`.
    pub(crate) fn start(&self, prefix: &[&str], args: &[&str]) -> Process {
        self.start_words(&[prefix, &[env!("CARGO_BIN_EXE_fusionllm")], args].concat(), &[])
    }

    /// Starts any program, with these variables in its environment.
    pub(crate) fn start_words(&self, words: &[&str], variables: &[(&str, String)]) -> Process {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let pipe = self.directory.path().join(format!("pipe-{number}"));
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let mut child = Command::new("sh");
        child.args(["-c", "exec 3> \"$0\"; exec \"$@\""]).arg(&pipe).args(words).envs(variables.iter().cloned());
        child.current_dir(self.directory.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = child.spawn().unwrap();
        // The shell waits for somebody who reads.
        let mut opened = File::open(&pipe).unwrap();
        let (sender, gone) = mpsc::channel();
        std::thread::spawn(move || {
            opened.read_to_end(&mut Vec::new()).unwrap();
            sender.send(()).ok();
        });
        let err = BufReader::new(child.stderr.take().unwrap());
        Process { child, err, pipe, gone }
    }

    pub(crate) fn train(&self, prefix: &[&str]) -> Process {
        self.start(prefix, &[&["train", "--peers", "2", "--run-dir", "run"][..], &TINY].concat())
    }

    /// Starts a broker and two joiners. Returns them once they train.
    pub(crate) fn broker(&self, settings: &[&str]) -> (Process, [Process; 2]) {
        let args = ["broker", "--listen", "127.0.0.1:0", "--peers", "2", "--run-dir", "run"];
        // Both joiners compute on this machine's processor. A plan that counts that leaves one of them out.
        let both = ["--set=plan.scheduler=equal-compute"];
        let mut broker = self.start(&[], &[&args[..], &TINY, &both, settings].concat());
        let ticket = broker.line("fusionllm join ").trim().to_owned();
        let joiners = ["a", "b"].map(|name| self.join(&ticket, name));
        broker.line("validation");
        (broker, joiners)
    }

    pub(crate) fn join(&self, ticket: &str, name: &str) -> Process {
        self.start(&[], &["join", ticket, "--listen", "127.0.0.1:0", "--name", name])
    }

    /// The output of a command of the program.
    pub(crate) fn output(&self, args: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fusionllm"));
        let output = command.args(args).current_dir(self.directory.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The last step in the run's metrics.
    pub(crate) fn last_step(&self) -> u64 {
        let text = std::fs::read_to_string(self.run().join("metrics.jsonl")).unwrap();
        let line: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        line["step"].as_u64().unwrap()
    }

    /// The newest step that is saved; 0 if none is.
    pub(crate) fn saved_step(&self) -> u64 {
        let checkpoints = std::fs::read_dir(self.run().join("checkpoints")).into_iter().flatten();
        let step = |name: String| name.strip_prefix("step-")?.parse::<u64>().ok();
        checkpoints.filter_map(|entry| step(entry.unwrap().file_name().into_string().unwrap())).max().unwrap_or(0)
    }
}

impl Process {
    /// Waits for a line with this text. Returns what stands behind it.
    pub(crate) fn line(&mut self, text: &str) -> String {
        let mut said = String::new();
        loop {
            let mut line = String::new();
            assert!(self.err.read_line(&mut line).unwrap() > 0, "it ended before it said {text:?}:\n{said}");
            if let Some((_, rest)) = line.split_once(text) {
                return rest.to_owned();
            }
            said += &line;
        }
    }

    pub(crate) fn signal(&self, signal: &str) {
        self.signals(&[signal]);
    }

    /// Sends signals, one right after the other.
    pub(crate) fn signals(&self, signals: &[&str]) {
        let lines: Vec<String> = signals.iter().map(|signal| format!("kill -s {signal} {}", self.child.id())).collect();
        assert!(Command::new("sh").args(["-ec", &lines.join("\n")]).status().unwrap().success());
    }

    /// Waits for its end, and for that of all it started. Returns its status and what it still said.
    pub(crate) fn end(mut self) -> (ExitStatus, String) {
        let mut rest = String::new();
        self.err.read_to_string(&mut rest).unwrap();
        let status = self.child.wait().unwrap();
        self.gone.recv_timeout(PATIENCE).expect("a process that it started lives on");
        (status, rest)
    }

    /// Kills it and all that it started, as the end of a control group does.
    pub(crate) fn kill_all(mut self) {
        for process in std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path()) {
            let holds = |fd: std::fs::DirEntry| std::fs::read_link(fd.path()).is_ok_and(|file| file == self.pipe);
            if std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten().any(holds) {
                let pid: Option<u32> = process.file_name().unwrap().to_str().unwrap().parse().ok();
                if let Some(pid) = pid.filter(|pid| *pid != std::process::id()) {
                    Command::new("kill").args(["-s", "KILL", &pid.to_string()]).status().unwrap();
                }
            }
        }
        self.child.wait().unwrap();
        self.gone.recv_timeout(PATIENCE).expect("a process that it started lives on");
    }

    pub(crate) fn ends_well(self) -> String {
        let (status, rest) = self.end();
        assert!(status.success(), "{status}: {rest}");
        rest
    }
}
