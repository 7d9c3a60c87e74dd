//! Refuses files on which the library that reads a `tokenizer.json` panics.

use serde_json::Value;

use super::guard::parts;

/// Checks what the library takes for granted.
pub(super) fn check(json: &Value) -> Result<(), String> {
    let model = &json["model"];
    match model["type"].as_str() {
        _ if !model.is_object() => return Err("it has no `model`".into()),
        // Files of early versions do not say it.
        None | Some("BPE" | "Unigram" | "WordPiece" | "WordLevel") => {}
        Some(other) => return Err(format!("its model is \"{other}\", not BPE, Unigram, WordPiece or WordLevel")),
    }
    let prefix = model["continuing_subword_prefix"].as_str().unwrap_or_default();
    let merges = model["merges"].as_array().into_iter().flatten().map(parts);
    if let Some((left, right)) = merges.into_iter().find(|(_, right)| !right.starts_with(prefix)) {
        return Err(format!("it merges `{left}` with `{right}`, which does not begin with `{prefix}`"));
    }
    check_processor(&json["post_processor"])
}

/// A template names only tokens that it has in its table.
fn check_processor(processor: &Value) -> Result<(), String> {
    for part in processor["processors"].as_array().into_iter().flatten() {
        check_processor(part)?;
    }
    let pieces = ["single", "pair"].into_iter().filter_map(|key| processor[key].as_array()).flatten();
    let mut named = pieces.filter_map(|piece| piece["SpecialToken"]["id"].as_str());
    match named.find(|id| processor["special_tokens"].get(id).is_none()) {
        Some(id) => Err(format!("its post_processor does not say which token `{id}` is")),
        None => Ok(()),
    }
}
