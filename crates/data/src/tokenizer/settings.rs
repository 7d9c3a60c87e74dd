//! The settings beside a `tokenizer.json`: which tokens begin and end a text.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::DataError;

/// The names of the files that belong to a tokenizer. Those of the model have the numbers of tokens among their settings.
pub(super) const FILES: [&str; 6] =
    ["tokenizer.json", CONFIG, SPECIAL_TOKENS, "chat_template.jinja", GENERATION, MODEL];

const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const GENERATION: &str = "generation_config.json";
const MODEL: &str = "config.json";

/// The tokens that begin and end a text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Settings {
    /// The token at the start of a text (`bos_token`).
    pub(super) start: Option<u32>,
    /// The tokens that end a text (`eos_token`), the tokenizer's own first.
    pub(super) ends: Vec<u32>,
    /// The texts of special tokens by the keys that end in `_token`.
    pub(super) special: BTreeMap<String, String>,
}

/// A file of settings that cannot be used.
fn malformed(path: PathBuf, message: String) -> DataError {
    DataError::Malformed { path, message, hint: "fetch the folder of the tokenizer again, or remove this file" }
}

impl Settings {
    /// Reads the settings in `directory`. `token` finds a token by its text, and `exists` says whether there is one of
    /// a number.
    pub(super) fn read(
        directory: &Path,
        token: impl Fn(&str) -> Option<u32>,
        exists: impl Fn(u32) -> bool,
    ) -> Result<Self, DataError> {
        let read = |name: &str| {
            let path = directory.join(name);
            if !path.is_file() {
                return Ok(Value::Null);
            }
            let bytes = crate::read(&path)?;
            match serde_json::from_slice(&bytes) {
                Ok(Value::Object(settings)) => Ok(Value::Object(settings)),
                Ok(_) => Err(malformed(path, "it is no JSON object".into())),
                Err(e) => Err(malformed(path, format!("it is no JSON: {e}"))),
            }
        };
        let texts = [read(CONFIG)?, read(SPECIAL_TOKENS)?];
        let numbers = [read(GENERATION)?, read(MODEL)?];
        let content = |value: &Value| value.as_str().or(value["content"].as_str()).map(str::to_owned);
        let named = |key: &str| texts.iter().find_map(|settings| token(&content(&settings[key])?));
        let entries = texts.iter().rev().filter_map(Value::as_object).flatten();
        let special = entries.filter(|(key, _)| key.ends_with("_token"));
        let special = special.filter_map(|(key, value)| Some((key.clone(), content(value)?))).collect();
        let numbered = |key: &str| {
            numbers
                .iter()
                .map(|settings| numbers_in(&settings[key]))
                .find(|found| !found.is_empty())
                .unwrap_or_default()
        };
        let mut ends: Vec<u32> = named("eos_token").into_iter().collect();
        let others = numbered("eos_token_id").into_iter().filter(|end| exists(*end));
        for end in others {
            if !ends.contains(&end) {
                ends.push(end);
            }
        }
        let start = named("bos_token").or_else(|| numbered("bos_token_id").into_iter().find(|start| exists(*start)));
        Ok(Self { start, ends, special })
    }
}

/// One number, or a list of them.
fn numbers_in(value: &Value) -> Vec<u32> {
    let number = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Value::Array(values) => values.iter().filter_map(number).collect(),
        value => number(value).into_iter().collect(),
    }
}
