//! Small cases of the importer against PyTorch's eager mode. `crates/import/stock/cases/` defines them.
//!
//! Python is `FUSIONLLM_PYTHON`, or else the environment that `.ci/run python` makes. Arguments of the command line
//! that are no options choose cases: only those whose names contain one of them are exported and compared.
//! `--nocapture` prints the message of every refused case.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use fusionllm_node::check::check;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde::Deserialize;
use tempfile::TempDir;

/// A case, as `export_cases.py` lists it.
#[derive(Deserialize)]
struct Case {
    name: String,
    /// The name of its files.
    stem: String,
    /// A part of the importer's message, where the importer is to refuse it.
    refused: Option<String>,
    /// A part of PyTorch's message, where PyTorch is to refuse it.
    pytorch: Option<String>,
    tolerance: f64,
    /// PyTorch's message when it refused.
    failure: Option<String>,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let python =
        std::env::var_os("FUSIONLLM_PYTHON").map_or_else(|| root().join("target/python/bin/python"), PathBuf::from);
    let usable = Command::new(&python).args(["-c", "import torch, safetensors"]).output();
    let trials = match usable {
        Ok(output) if output.status.success() => exported(&python, &mut arguments),
        _ => vec![without_pytorch(&python)],
    };
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The only test where there is no PyTorch: it is ignored, unless PyTorch is required.
fn without_pytorch(python: &Path) -> Trial {
    let reason = format!("takes Python with torch and safetensors at {}: see `.ci/run python`", python.display());
    let required = std::env::var("FUSIONLLM_REQUIRE").unwrap_or_default();
    Trial::ignorable_test("small_cases_match_pytorch", move || {
        if required.split(',').any(|name| name.trim() == "torch") {
            return Err(format!("FUSIONLLM_REQUIRE asks for torch: {reason}").into());
        }
        Ok(Completion::ignored_with(reason))
    })
}

/// A test for each case that the command line chooses. One process exports all of them.
fn exported(python: &Path, arguments: &mut Arguments) -> Vec<Trial> {
    let directory = Arc::new(tempfile::tempdir().unwrap());
    let mut export = Command::new(python);
    export.arg(root().join("crates/import/stock/export_cases.py")).arg(directory.path());
    let output = export.args(&arguments.filter).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = std::fs::read(directory.path().join("cases.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_slice(&listed).unwrap();
    let show = arguments.nocapture;
    let trial = |case: Case| {
        let kind = match (&case.refused, &case.pytorch) {
            (Some(_), _) => "is refused",
            (_, Some(_)) => "PyTorch refuses",
            _ => "matches",
        };
        let directory = directory.clone();
        Trial::test(case.name.clone(), move || judged(&case, &directory, show)).with_kind(kind)
    };
    cases.into_iter().map(trial).collect()
}

/// Whether a case turned out as expected.
fn judged(case: &Case, directory: &TempDir, show: bool) -> Result<(), Failed> {
    match (&case.pytorch, &case.failure) {
        (Some(expected), Some(said)) if said.contains(expected) => return Ok(()),
        (Some(expected), Some(said)) => return Err(format!("PyTorch was to say {expected:?}, but said: {said}").into()),
        (None, Some(said)) => return Err(format!("PyTorch refuses it: {said}").into()),
        (Some(_), None) => return Err("PyTorch was to refuse it, but does not".into()),
        (None, None) => {}
    }
    let file = |extension: &str| directory.path().join(&case.stem).with_extension(extension);
    let result = check(&file("pt2"), None, &file("safetensors"), "cpu", 1);
    match (result, &case.refused) {
        (Ok(result), _) if result.error().is_nan() || result.error() > case.tolerance => {
            Err(format!("WRONG: {result:#?}").into())
        }
        (Ok(_), None) => Ok(()),
        (Ok(_), Some(_)) => Err("it was to be refused, but matches PyTorch".into()),
        (Err(error), Some(expected)) => {
            let said = error.to_string();
            if show {
                println!("{}: {said}", case.name);
            }
            if said.contains(expected) {
                Ok(())
            } else {
                Err(format!("it was to say {expected:?}, but said: {said}").into())
            }
        }
        (Err(error), None) => Err(format!("refused: {error}").into()),
    }
}
