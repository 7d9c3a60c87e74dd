//! Small cases of the importer against PyTorch's eager mode. `crates/import/stock/cases/` defines them.

use std::path::Path;
use std::sync::Arc;

use fusionllm_workbench::model::check::check;
use libtest_mimic::{Arguments, Failed, Trial};
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

/// A test for each case that the command line chooses. One process exports all of them.
pub(super) fn trials(python: &Path, arguments: &Arguments) -> Vec<Trial> {
    let (cases, directory) = super::exported::<Case>(python, "export_cases.py", "cases.json", arguments);
    let directory = Arc::new(directory);
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
    judged_archive(case, &file("pt2"), None, &file("safetensors"), show)?;
    let weights = file("weights.safetensors");
    match weights.is_file() {
        true => judged_archive(case, &file("other.pt2"), Some(&weights), &file("safetensors"), show)
            .map_err(|e| format!("with loaded weights: {}", e.message().unwrap_or_default()).into()),
        false => Ok(()),
    }
}

/// Whether an archive turned out as expected, with the weights of a file if one is given.
fn judged_archive(
    case: &Case,
    archive: &Path,
    weights: Option<&Path>,
    reference: &Path,
    show: bool,
) -> Result<(), Failed> {
    match (check(archive, weights, None, reference, "cpu", 1), &case.refused) {
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
