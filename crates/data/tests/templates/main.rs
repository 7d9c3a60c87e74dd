//! Templates of chats against `transformers`: texts, tokens, and which tokens are the model's.
//!
//! `crates/data/stock/templates.py` makes the cases. Python is `FUSIONLLM_PYTHON`, or else the environment that
//! `.ci/run python` makes. Arguments of the command line that are no options choose templates by their names.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use fusionllm_data::{ChatTemplate, Chats, Data, Dataset, Message, OnError, Tokenizer, TrainOn, Validation};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde::Deserialize;
use serde_json::{Value, json};

/// A conversation as `transformers` writes it.
#[derive(Deserialize)]
struct Case {
    messages: Vec<Value>,
    /// Without and with what asks for an answer; null where the template refuses.
    texts: [Option<String>; 2],
    tokens: Option<Vec<u32>>,
    mask: Option<Vec<u8>>,
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let python =
        std::env::var_os("FUSIONLLM_PYTHON").map_or_else(|| root.join("target/python/bin/python"), PathBuf::from);
    // TRL itself needs more than is installed, and only its files are read.
    let needs = "import importlib.util, sys, transformers; sys.exit(importlib.util.find_spec('trl') is None)";
    let usable = Command::new(&python).args(["-c", needs]).output();
    if !usable.is_ok_and(|output| output.status.success()) {
        return libtest_mimic::run(&arguments, vec![without_transformers(&python)]).exit_code();
    }
    let directory = tempfile::tempdir().unwrap();
    let mut make = Command::new(&python);
    make.arg(root.join("crates/data/stock/templates.py")).arg(directory.path()).args(&arguments.filter);
    let output = make.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let cases = fs::read(directory.path().join("cases.json")).unwrap();
    let cases: BTreeMap<String, Vec<Case>> = serde_json::from_slice(&cases).unwrap();
    let tokenizer = Tokenizer::open(directory.path()).unwrap();
    let trials = cases.into_iter().map(|(name, cases)| {
        let (file, tokenizer) = (directory.path().join(format!("{name}.jinja")), tokenizer.clone());
        Trial::test(name, move || compare(&file, &tokenizer, &cases))
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// The only test where there is no `transformers`: it is ignored, unless Python is required.
fn without_transformers(python: &Path) -> Trial {
    let reason = format!("takes Python with transformers and trl at {}: see `.ci/run python`", python.display());
    let required = std::env::var("FUSIONLLM_REQUIRE").unwrap_or_default();
    Trial::ignorable_test("texts_match_transformers", move || {
        if required.split(',').any(|name| name.trim() == "python") {
            return Err(format!("FUSIONLLM_REQUIRE asks for python: {reason}").into());
        }
        Ok(Completion::ignored_with(reason))
    })
}

fn compare(file: &Path, tokenizer: &Tokenizer, cases: &[Case]) -> Result<(), Failed> {
    let template = ChatTemplate::open(file, tokenizer)?;
    for (number, case) in cases.iter().enumerate() {
        let field = |message: &Value, key: &str| message[key].as_str().unwrap().to_owned();
        let messages: Vec<Message> =
            case.messages.iter().map(|m| Message::new(field(m, "role"), field(m, "content"))).collect();
        for (theirs, prompt) in case.texts.iter().zip([false, true]) {
            let ours = template.render(&messages, prompt);
            match (ours, theirs) {
                (Err(_), None) => {}
                (Ok(ours), Some(theirs)) if ours.text == *theirs => {}
                (ours, theirs) => {
                    let ours = ours.map(|rendered| rendered.text);
                    return Err(format!("conversation {number}, {prompt}:\n{ours:?}\n{theirs:?}").into());
                }
            }
        }
        let Some(tokens) = &case.tokens else { continue };
        let folder = tempfile::tempdir()?;
        let lines = folder.path().join("chats.jsonl");
        fs::write(&lines, format!("{}\n", json!({ "messages": case.messages })))?;
        let open = |train_on| {
            let chats = Chats {
                files: vec![lines.clone()],
                tokenizer: tokenizer.clone(),
                template: Some(template.clone()),
                context: 1 << 16,
                validation: Validation::Fraction(0.0),
                shuffle: false,
                packing: false,
                train_on,
                on_error: OnError::Fail,
            };
            Dataset::open(&Data::Chats(chats), 1)
        };
        let whole = match open(TrainOn::All) {
            Ok(data) => data.example(0)?.ok_or("no sample")?,
            // One token predicts no other.
            Err(_) if tokens.len() < 2 => continue,
            Err(e) => return Err(format!("conversation {number}: {e}").into()),
        };
        if whole.tokens != *tokens {
            return Err(format!("conversation {number}: tokens\n{:?}\n{tokens:?}", whole.tokens).into());
        }
        let Some(mask) = &case.mask else { continue };
        // The first token is never predicted.
        let theirs: Vec<bool> = (0..).zip(mask).map(|(place, mask)| place > 0 && *mask == 1).collect();
        match open(TrainOn::Answers) {
            Ok(data) => {
                let ours = data.example(0)?.ok_or("no sample")?.trained;
                if ours != theirs {
                    return Err(format!("conversation {number}: mask\n{ours:?}\n{theirs:?}").into());
                }
            }
            Err(_) if !theirs.contains(&true) => {}
            Err(e) => return Err(format!("conversation {number}: {e}").into()),
        }
    }
    Ok(())
}
