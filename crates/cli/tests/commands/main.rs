//! The command as its users call it: what it prints, where, and with which exit status.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod bad_files;
mod bad_input;
mod dashboard;
mod data;
mod examples;
mod graph;
mod help;
mod imported;
mod offload;
mod places;
mod plan;
mod run;
mod runs;
mod weights;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The result of a call.
struct Ran {
    status: i32,
    out: String,
    err: String,
}

/// Calls the command in `directory` with these arguments.
fn call(directory: &Path, args: &[&str]) -> Ran {
    let output = command(directory, args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let status = output.status.code().expect("no signal ends it");
    Ran { status, out: text(output.stdout), err: text(output.stderr) }
}

fn command(directory: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusionllm"));
    command.current_dir(directory).args(args).stdin(Stdio::null()).env_remove("RUST_LOG");
    command
}

impl Ran {
    /// The message of a call that failed with this status. `DIR` replaces the test's directory.
    fn failure(&self, status: i32, directory: &Path) -> String {
        assert_eq!(self.status, status, "{}", self.err);
        assert_eq!(self.out, "", "a failure has nothing for standard output");
        assert!(!self.err.contains("panicked"), "{}", self.err);
        let directory = directory.canonicalize().unwrap();
        self.err.replace(&directory.display().to_string(), "DIR").trim_end().to_owned()
    }

    /// The one JSON object on standard output.
    fn json(&self) -> serde_json::Value {
        assert_eq!(self.status, 0, "{}", self.err);
        let value: serde_json::Value = serde_json::from_str(&self.out).unwrap();
        assert!(value.is_object(), "{value}");
        value
    }
}

/// A model small enough that a step takes milliseconds.
const TINY: [&str; 7] = [
    "--set=model.n_layer=2",
    "--set=model.n_embd=16",
    "--set=model.n_head=2",
    "--set=data.context=16",
    "--set=train.batch=4",
    "--set=train.micro_batch=1",
    "--set=eval.batches=1",
];

/// Loss and validation loss of each step of a run.
fn losses(run: &Path) -> Vec<(f64, Option<f64>)> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let line = |line| -> (f64, Option<f64>) {
        let step: serde_json::Value = serde_json::from_str(line).unwrap();
        (step["loss"].as_f64().unwrap(), step["val_loss"].as_f64())
    };
    text.lines().map(line).collect()
}

/// A run of three steps over two peers, and its output. All tests read the same run.
fn finished_run() -> &'static (PathBuf, Ran) {
    static RUN: OnceLock<(PathBuf, Ran)> = OnceLock::new();
    RUN.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("commands-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let args = ["train", "--steps", "3", "--peers", "2", "--run-dir", "run", "--json"];
        let ran = call(&directory, &[&args[..], &TINY].concat());
        assert_eq!(ran.status, 0, "{}", ran.err);
        (directory.canonicalize().unwrap(), ran)
    })
}
