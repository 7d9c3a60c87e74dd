//! Keeps a model from making a special token of plain text.
//!
//! Special tokens are found in a text before its words are, and that search can be turned off. But a model may have them
//! in its vocabulary as words of their own: the text `</s>` of a corpus would then be the end of the text after all.

use std::collections::BTreeSet;

use serde_json::Value;

/// The model of a `tokenizer.json` without the words that are special tokens; `None` if it makes none of them anyway.
/// The unknown token stays, which stands for plain text.
pub(super) fn without_special(mut json: Value) -> Option<Value> {
    let mut model = json["model"].take();
    let unknown = match &model["unk_id"] {
        Value::Number(id) => model["vocab"][id.as_u64()? as usize][0].as_str(),
        _ => model["unk_token"].as_str(),
    };
    let unknown = unknown.map(str::to_owned);
    let added = json["added_tokens"].as_array().into_iter().flatten();
    let special = added.filter(|token| token["special"] == true).filter_map(|token| token["content"].as_str());
    let special: BTreeSet<&str> = special.filter(|content| Some(*content) != unknown.as_deref()).collect();
    let ignores_merges = model["ignore_merges"] == true;
    let before = (count(&model["vocab"]), count(&model["merges"]));
    let mut blanks = 0;
    if let Some(merges) = model["merges"].as_array_mut() {
        // A word of several letters comes from a merge.
        merges.retain(|merge| {
            let (left, right) = parts(merge);
            ![left, right, &format!("{left}{right}")].iter().any(|word| special.contains(*word))
        });
        if ignores_merges && let Some(vocabulary) = model["vocab"].as_object_mut() {
            vocabulary.retain(|word, _| !special.contains(word.as_str()));
        }
    } else if let Some(vocabulary) = model["vocab"].as_object_mut() {
        vocabulary.retain(|word, _| !special.contains(word.as_str()));
    } else {
        // The place in the list is the number of a token, so the word becomes one that no text has.
        for entry in model["vocab"].as_array_mut().into_iter().flatten() {
            if entry[0].as_str().is_some_and(|word| special.contains(word)) {
                entry[0] = "".into();
                blanks += 1;
            }
        }
    }
    let changed = blanks > 0 || before != (count(&model["vocab"]), count(&model["merges"]));
    changed.then_some(model)
}

fn count(value: &Value) -> usize {
    value.as_array().map_or_else(|| value.as_object().map_or(0, serde_json::Map::len), Vec::len)
}

/// The words that a merge joins: `["a", "b"]`, or `"a b"` in older files.
pub(super) fn parts(merge: &Value) -> (&str, &str) {
    match merge {
        Value::String(both) => both.split_once(' ').unwrap_or_default(),
        pair => (pair[0].as_str().unwrap_or_default(), pair[1].as_str().unwrap_or_default()),
    }
}
