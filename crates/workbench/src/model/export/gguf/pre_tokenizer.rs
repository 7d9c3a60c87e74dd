//! How a byte-level tokenizer cuts a text into words before it merges, as llama.cpp names the ways that it knows.

use serde_json::Value;

/// A way to cut texts.
struct PreTokenizer {
    /// llama.cpp's name of it (`tokenizer.ggml.pre`).
    name: &'static str,
    /// The steps of [`steps`].
    steps: &'static [&'static str],
    /// Whether a word that is a token is not merged.
    ignore_merges: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const GPT2_SHORT: &str = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// A step that leaves each byte a letter and cuts nothing.
const BYTES: &str = "bytes";

/// A step that cuts before and after each digit.
const DIGITS: &str = "digits";

const KNOWN: [PreTokenizer; 8] = [
    PreTokenizer { name: "gpt-2", steps: &[GPT2, BYTES], ignore_merges: false },
    PreTokenizer { name: "gpt-2", steps: &[GPT2_SHORT, BYTES], ignore_merges: false },
    PreTokenizer { name: "smollm", steps: &[DIGITS, GPT2, BYTES], ignore_merges: false },
    PreTokenizer { name: "llama-bpe", steps: &[LLAMA3, BYTES], ignore_merges: true },
    PreTokenizer { name: "smaug-bpe", steps: &[LLAMA3, BYTES], ignore_merges: false },
    PreTokenizer { name: "qwen2", steps: &[QWEN2, BYTES], ignore_merges: false },
    PreTokenizer { name: "qwen35", steps: &[QWEN35, BYTES], ignore_merges: false },
    // Without an expression of its own, it is that of GPT-2.
    PreTokenizer { name: "smollm", steps: &[DIGITS, GPT2_SHORT, BYTES], ignore_merges: false },
];

/// llama.cpp's name of the way in which a `tokenizer.json` cuts texts; `None` for one that it does not know. `merges`
/// says whether the tokenizer merges bytes at all.
pub(super) fn name(pre_tokenizer: &Value, ignore_merges: bool, merges: bool) -> Option<&'static str> {
    let steps = steps(pre_tokenizer)?;
    if !merges && steps.last().is_some_and(|step| step == BYTES) {
        // Where bytes stay alone, it does not matter where a text is cut.
        return Some(KNOWN[0].name);
    }
    KNOWN.iter().find(|known| known.steps == steps && known.ignore_merges == ignore_merges).map(|known| known.name)
}

/// The steps of a `pre_tokenizer`, each as the expression whose matches are words, or as a word for it. `None` if it
/// has others.
fn steps(pre_tokenizer: &Value) -> Option<Vec<String>> {
    let text = |key: &str| pre_tokenizer[key].as_str();
    let flag = |key: &str, default: bool| pre_tokenizer[key].as_bool().unwrap_or(default);
    match text("type")? {
        "Sequence" => {
            let parts = pre_tokenizer["pretokenizers"].as_array()?;
            Some(parts.iter().map(steps).collect::<Option<Vec<_>>>()?.concat())
        }
        // A space that is put before a text would be one that llama.cpp does not put there.
        "ByteLevel" if flag("add_prefix_space", true) => None,
        "ByteLevel" if flag("use_regex", true) => Some(vec![GPT2.to_owned(), BYTES.to_owned()]),
        "ByteLevel" => Some(vec![BYTES.to_owned()]),
        "Digits" if flag("individual_digits", false) => Some(vec![DIGITS.to_owned()]),
        "Split" => {
            let matches = matches!(
                (text("behavior")?, flag("invert", false)),
                // Words are the matches, or all between what does not match.
                ("Isolated", false) | ("Removed", true)
            );
            let pattern = pre_tokenizer["pattern"]["Regex"].as_str()?;
            matches.then(|| vec![pattern.to_owned()])
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ways_are_known_by_their_steps() {
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
        let gpt2 = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true});
        let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"});
        let all = |parts: Vec<&Value>| json!({"type": "Sequence", "pretokenizers": parts});
        let of = |json: &Value| name(json, false, true);
        assert_eq!(of(&gpt2), Some("gpt-2"));
        assert_eq!(of(&all(vec![&json!({"type": "Digits", "individual_digits": true}), &gpt2])), Some("smollm"));
        let llama3 = all(vec![&split(LLAMA3), &bytes]);
        assert_eq!([of(&llama3), name(&llama3, true, true)], [Some("smaug-bpe"), Some("llama-bpe")]);
        assert_eq!(of(&all(vec![&split(QWEN2), &bytes])), Some("qwen2"));
        // Nothing else is taken for one of them.
        assert_eq!(name(&gpt2, true, true), None);
        assert_eq!(of(&all(vec![&split(r"\p{L}+"), &bytes])), None);
        assert_eq!(of(&all(vec![&json!({"type": "Digits", "individual_digits": false}), &gpt2])), None);
        assert_eq!(of(&json!({"type": "ByteLevel", "use_regex": true})), None);
        assert_eq!(of(&Value::Null), None);
        // Without merges, each byte is a token wherever texts are cut.
        assert_eq!([of(&bytes), name(&bytes, false, false)], [None, Some("gpt-2")]);
    }
}
