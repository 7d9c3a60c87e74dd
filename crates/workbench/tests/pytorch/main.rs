//! Our numbers against those of PyTorch: small cases of the importer (`cases.rs`), and losses of whole batches that are
//! cut into micro-batches (`batches.rs`).
//!
//! Python is `FUSIONLLM_PYTHON`, or else the environment that `.ci/run python` makes. Arguments of the command line
//! that are no options choose tests: only those whose names contain one of them are exported and compared.
//! `--nocapture` prints the message of every refused case.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Completion, Trial};
use serde::de::DeserializeOwned;
use tempfile::TempDir;

mod batches;
mod cases;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let python =
        std::env::var_os("FUSIONLLM_PYTHON").map_or_else(|| root().join("target/python/bin/python"), PathBuf::from);
    let usable = Command::new(&python).args(["-c", "import torch, safetensors"]).output();
    let trials = match usable {
        Ok(output) if output.status.success() => {
            let mut trials = cases::trials(&python, &arguments);
            trials.extend(batches::trials(&python, &arguments));
            trials
        }
        _ => vec![without_pytorch(&python)],
    };
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Has a script of `crates/import/stock` export what the command line chooses. Returns its list and the directory.
fn exported<T: DeserializeOwned>(python: &Path, script: &str, list: &str, arguments: &Arguments) -> (Vec<T>, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let mut export = Command::new(python);
    export.arg(root().join("crates/import/stock").join(script)).arg(directory.path());
    let output = export.args(&arguments.filter).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = std::fs::read(directory.path().join(list)).unwrap();
    (serde_json::from_slice(&listed).unwrap(), directory)
}

/// The only test where there is no PyTorch: it is ignored, unless PyTorch is required.
fn without_pytorch(python: &Path) -> Trial {
    let reason = format!("takes Python with torch and safetensors at {}: see `.ci/run python`", python.display());
    let required = std::env::var("FUSIONLLM_REQUIRE").unwrap_or_default();
    Trial::ignorable_test("numbers_match_pytorch", move || {
        if required.split(',').any(|name| name.trim() == "torch") {
            return Err(format!("FUSIONLLM_REQUIRE asks for torch: {reason}").into());
        }
        Ok(Completion::ignored_with(reason))
    })
}
