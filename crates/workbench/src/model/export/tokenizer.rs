//! The program's own tokenizers as Hugging Face's `tokenizers` and `transformers` read them.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Value, json};

use fusionllm_data::Tokenizer;

/// The content of `tokenizer.json`: a byte-level byte-pair encoding. The tokenizer for bytes has no merges.
pub(super) fn tokenizer_json(tokenizer: &Tokenizer) -> Value {
    let end = tokenizer.start_of_text();
    let ordinary = 0..end.unwrap_or(tokenizer.vocabulary() as u32);
    let tokens: Vec<Vec<u8>> = ordinary.map_while(|token| tokenizer.bytes(token)).collect();
    let mut vocabulary: BTreeMap<String, u32> = (0..).zip(&tokens).map(|(token, t)| (letters(t), token)).collect();
    let end = end.map(|token| (token, tokenizer.decode(&[token])));
    vocabulary.extend(end.iter().map(|(token, content)| (content.clone(), *token)));
    let special = |(token, content): &(u32, String)| {
        json!({
            "id": token, "content": content, "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        })
    };
    // GPT-2's expression cuts text into words before it merges. Bytes stay alone anyway.
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": end.is_some()});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": end.iter().map(special).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "vocab": vocabulary,
            "merges": merges(&tokens),
        },
    })
}

/// The content of `tokenizer_config.json`, for texts of up to `context` tokens.
pub(super) fn tokenizer_config_json(tokenizer: &Tokenizer, context: usize) -> Value {
    let end = tokenizer.start_of_text().map(|token| tokenizer.decode(&[token]));
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": end,
        "eos_token": end,
        // Otherwise the spaces before punctuation are lost in decoding.
        "clean_up_tokenization_spaces": false,
    })
}

/// Bytes as the letters of a byte-level vocabulary: those that print stand for themselves, and the others follow from
/// U+0100 on.
fn letters(bytes: &[u8]) -> String {
    let prints = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let letter = |b: u8| match prints(b) {
        true => char::from(b),
        false => char::from_u32(0x100 + (0..b).filter(|b| !prints(*b)).count() as u32).unwrap_or_default(),
    };
    bytes.iter().map(|b| letter(*b)).collect()
}

/// The two tokens of which each token of several bytes is made, in the order of the tokens. They are the parts that the
/// merges of lower tokens make of its bytes.
fn merges(tokens: &[Vec<u8>]) -> Vec<[String; 2]> {
    let ranks: HashMap<&[u8], usize> = tokens.iter().enumerate().map(|(rank, t)| (t.as_slice(), rank)).collect();
    let parts = |(rank, token): (usize, &Vec<u8>)| {
        // The places where the parts begin, and the end.
        let mut cuts: Vec<usize> = (0..=token.len()).collect();
        while cuts.len() > 3 {
            let pair = |i: usize| ranks.get(&token[cuts[i]..cuts[i + 2]]).filter(|r| **r < rank).map(|r| (*r, i));
            let (_, first) = (0..cuts.len() - 2).filter_map(pair).min()?;
            cuts.remove(first + 1);
        }
        match cuts[..] {
            [_, middle, _] => Some([letters(&token[..middle]), letters(&token[middle..])]),
            _ => None,
        }
    };
    tokens.iter().enumerate().filter_map(parts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_letters() {
        assert_eq!(letters(b"a\n \x7f\xa0\xad~\xff"), "aĊĠġłŃ~ÿ");
        let all: std::collections::BTreeSet<String> = (0..=255).map(|b| letters(&[b])).collect();
        assert_eq!(all.len(), 256);
    }

    /// The first and the last lines of the `merges.txt` that OpenAI published.
    #[test]
    fn the_merges_of_gpt2_are_those_that_were_published() {
        let json = tokenizer_json(&Tokenizer::Gpt2);
        let merges = json["model"]["merges"].as_array().unwrap();
        assert_eq!(merges.len(), 50_000);
        assert_eq!(merges[..4], [json!(["Ġ", "t"]), json!(["Ġ", "a"]), json!(["h", "e"]), json!(["i", "n"])]);
        assert_eq!(merges[49_998..], [json!(["Ġinform", "ants"]), json!(["Ġg", "azed"])]);
        assert_eq!(json["model"]["vocab"].as_object().unwrap().len(), 50_257);
        assert_eq!(tokenizer_json(&Tokenizer::Bytes)["model"]["merges"], json!([]));
    }
}
