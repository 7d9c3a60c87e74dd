//! A tokenizer as llama.cpp reads it: byte-level byte-pair encodings (its model `gpt2`), and those that fall back to
//! bytes, like SentencePiece's (its model `llama`).

use std::collections::{HashMap, HashSet};
use std::fs;

use fusionllm_data::{DataError, DiskError, Tokenizer};
use serde_json::Value;

use super::super::tokenizer::tokenizer_json;
use super::file::{Item, Items};
use super::pre_tokenizer;
use crate::WorkbenchError;
use crate::model::SavedModel;

/// The letter of SentencePiece for a space.
const SPACE: &str = "\u{2581}";

/// The metadata of a tokenizer.
pub(super) struct Vocabulary {
    pub(super) items: Items,
    /// Sentences for the user about differences.
    pub(super) notes: Vec<String>,
}

/// The kind of a token, with llama.cpp's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    /// It is found in a text before all others.
    Own = 4,
    Unused = 5,
    Byte = 6,
}

/// A reason why llama.cpp cannot cut texts as a tokenizer does. It is a clause that follows "llama.cpp cannot cut texts
/// as this tokenizer does:".
type Refusal = String;

/// Reads the tokenizer of a model whose embedding has `size` rows.
///
/// # Errors
///
/// The tokenizer is unknown, its files cannot be read, or llama.cpp cannot cut texts as it does.
pub(super) fn read(model: &SavedModel, size: usize) -> Result<Vocabulary, WorkbenchError> {
    let place = model.path().display();
    let Some(tokenizer) = &model.network.tokenizer else {
        return Err(WorkbenchError::input_with_hint(
            format!("{place}: the model's tokenizer is unknown, and llama.cpp needs it in the same file"),
            "put the model's tokenizer.json and tokenizer_config.json beside its config.json",
        ));
    };
    let json = match tokenizer.files().first() {
        None => tokenizer_json(tokenizer),
        Some((_, path)) => {
            let bytes = fs::read(path).map_err(DiskError::at(path, "read"))?;
            serde_json::from_slice(&bytes).map_err(|e| {
                let hint = "fetch the folder of the tokenizer again";
                DataError::Malformed { path: path.clone(), message: format!("it is no JSON: {e}"), hint }
            })?
        }
    };
    let mut vocabulary = convert(tokenizer, &json, size).map_err(|reason| {
        WorkbenchError::input_with_hint(
            format!("{place}: llama.cpp cannot cut texts as this tokenizer does: {reason}"),
            "write the model for `transformers`: --format hf",
        )
    })?;
    if let Some(template) = model.chat_template()? {
        vocabulary.items.push(("tokenizer.chat_template".into(), Item::Text(template.source().to_owned())));
    }
    Ok(vocabulary)
}

fn convert(tokenizer: &Tokenizer, json: &Value, size: usize) -> Result<Vocabulary, Refusal> {
    let model = &json["model"];
    let kind = model["type"].as_str().unwrap_or("BPE");
    if kind != "BPE" {
        return Err(format!("it is a {kind} model, and only BPE can be written"));
    }
    let affix = ["continuing_subword_prefix", "end_of_word_suffix"]
        .into_iter()
        .find(|key| model[key].as_str().is_some_and(|affix| !affix.is_empty()));
    if let Some(key) = affix {
        return Err(format!("it has a `{key}`"));
    }
    let mut notes = Vec::new();
    let mut tokens = tokens(json, size, &mut notes)?;
    let merges = merges(model)?;
    let name = name(json)?.map(|name| ("general.name".to_owned(), Item::Text(name.to_owned())));
    let mut items: Items = name.into_iter().collect();
    let mut add = |key: &str, item: Item| items.push((format!("tokenizer.ggml.{key}"), item));
    if model["byte_fallback"] == true {
        let prefix = sentence_piece(json, &mut tokens, &mut notes)?;
        add("model", Item::Text("llama".into()));
        add("pre", Item::Text("default".into()));
        add("scores", Item::F32s(scores(&tokens, &merges)?));
        add("add_space_prefix", Item::Bool(prefix));
    } else {
        match json["normalizer"]["type"].as_str() {
            None => {}
            Some("NFC") => notes.push(
                "the tokenizer composes accents with their letters (NFC), and llama.cpp takes texts as they are".into(),
            ),
            Some(other) => return Err(format!("its normalizer is {other}")),
        }
        let ignored = model["ignore_merges"] == true;
        let pre = pre_tokenizer::name(&json["pre_tokenizer"], ignored, !merges.is_empty());
        let pre = pre.ok_or("its pre_tokenizer cuts texts into words in a way that has no name there")?;
        add("model", Item::Text("gpt2".into()));
        add("pre", Item::Text(pre.into()));
        add("merges", Item::Texts(merges.iter().map(|[left, right]| format!("{left} {right}")).collect()));
    }
    let ends = ends(tokenizer, &tokens, &mut notes)?;
    let start = tokenizer.start_of_text().filter(|token| (*token as usize) < size);
    let opening = tokenizer.opening();
    if !(opening.is_empty() || start.is_some_and(|start| opening == [start])) {
        return Err(format!(
            "it puts the tokens {opening:?} before a text, and llama.cpp can only put bos_token there"
        ));
    }
    // Where a number is missing, llama.cpp takes one that is fixed, and may be that of an ordinary token.
    add("bos_token_id", Item::U32(start.unwrap_or(ends[0])));
    for (key, end) in ["eos_token_id", "eot_token_id", "eom_token_id"].into_iter().zip(&ends) {
        add(key, Item::U32(*end));
    }
    let special = tokenizer.special_texts();
    for (key, name) in [("unknown_token_id", "unk_token"), ("padding_token_id", "pad_token")] {
        let text = special.iter().find(|(special, _)| special == name).map(|(_, text)| text);
        let token = text.and_then(|text| tokenizer.token(text)).filter(|token| (*token as usize) < size);
        if let Some(token) = token {
            add(key, Item::U32(token));
        }
    }
    add("add_bos_token", Item::Bool(!opening.is_empty()));
    add("add_eos_token", Item::Bool(false));
    add("token_type", Item::I32s(tokens.iter().map(|(_, kind)| *kind as i32).collect()));
    add("tokens", Item::Texts(tokens.into_iter().map(|(text, _)| text).collect()));
    Ok(Vocabulary { items, notes })
}

/// The tokens that end a text. There is at least one, and at most as many as the format has names for.
fn ends(tokenizer: &Tokenizer, tokens: &[(String, Kind)], notes: &mut Vec<String>) -> Result<Vec<u32>, Refusal> {
    let known: Vec<u32> = tokenizer.ends().iter().copied().filter(|end| (*end as usize) < tokens.len()).collect();
    if known.len() > 3 {
        notes.push(format!("llama.cpp has names for 3 tokens that end a text, so {:?} do not end it", &known[3..]));
    }
    if !known.is_empty() {
        return Ok(known.into_iter().take(3).collect());
    }
    // The letter of a byte that no text in UTF-8 has.
    let never = |(text, kind): &(String, Kind)| *kind == Kind::Unused || text == "ÿ";
    match tokens.iter().position(never) {
        Some(token) => {
            notes.push(format!("the tokenizer names no token that ends a text, so it is {token}, which no text has"));
            Ok(vec![token as u32])
        }
        None => Err("it names no token that ends a text, and llama.cpp would take an ordinary one".into()),
    }
}

/// The name of a model (`general.name`) after whose added tokens llama.cpp takes no spaces, as after those of Phi-3.
/// `None` if none takes spaces.
///
/// # Errors
///
/// Some do, but others than Phi-3's.
fn name(json: &Value) -> Result<Option<&'static str>, Refusal> {
    /// Tokens of Phi-3 after which spaces are kept.
    const KEEPING: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];
    /// A token of Phi-3 after which they are not. Without these four, llama.cpp does not open such a file.
    const TAKING: &str = "</s>";
    let added = || json["added_tokens"].as_array().into_iter().flatten();
    let text = |token: &'_ Value| token["content"].as_str().unwrap_or_default().to_owned();
    let takes = |token: &Value| token["rstrip"] == true;
    let Some(first) = added().find(|token| takes(token)) else { return Ok(None) };
    let there: HashSet<String> = added().map(text).collect();
    let is_phi3 = KEEPING.into_iter().chain([TAKING]).all(|needed| there.contains(needed))
        && added().all(|token| takes(token) != KEEPING.contains(&text(token).as_str()));
    if is_phi3 { Ok(Some("Phi-3")) } else { Err(format!("its token {:?} has `rstrip`", text(first))) }
}

/// The texts and kinds of all tokens, by number.
fn tokens(json: &Value, size: usize, notes: &mut Vec<String>) -> Result<Vec<(String, Kind)>, Refusal> {
    let mut found: Vec<Option<(String, Kind)>> = vec![None; size];
    let mut outside = 0;
    let mut put = |number: &Value, text: &str, kind: Kind| {
        let number = number.as_u64().and_then(|number| usize::try_from(number).ok());
        match number.and_then(|number| found.get_mut(number)) {
            Some(place) => *place = Some((text.to_owned(), kind)),
            None => outside += 1,
        }
    };
    let ordinary = json["model"]["vocab"].as_object();
    for (text, number) in ordinary.into_iter().flatten() {
        put(number, text, Kind::Normal);
    }
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let text = token["content"].as_str().unwrap_or_default();
        if let Some(key) = ["lstrip", "single_word"].into_iter().find(|key| token[key] == true) {
            return Err(format!("its token {text:?} has `{key}`"));
        }
        put(&token["id"], text, if token["special"] == true { Kind::Control } else { Kind::Own });
    }
    if outside > 0 {
        notes.push(format!("{outside} tokens are left out, because the model has only {size} embeddings"));
    }
    let mut texts: HashSet<String> = found.iter().flatten().map(|(text, _)| text.clone()).collect();
    if texts.len() < found.iter().flatten().count() {
        return Err("two of its tokens have one text".into());
    }
    let filled = found.into_iter().enumerate().map(|(number, token)| {
        token.unwrap_or_else(|| {
            let mut text = format!("[PAD{number}]");
            while !texts.insert(text.clone()) {
                text.push('_');
            }
            (text, Kind::Unused)
        })
    });
    Ok(filled.collect())
}

/// The pairs that are merged, the first ones first.
fn merges(model: &Value) -> Result<Vec<[&str; 2]>, Refusal> {
    let all = model["merges"].as_array().into_iter().flatten();
    all.map(pair).collect::<Option<_>>().ok_or_else(|| "one of its merges is no pair".into())
}

/// A pair, as a list or, in older files, as a text with a space.
fn pair(merge: &Value) -> Option<[&str; 2]> {
    match merge.as_str() {
        Some(text) => text.split_once(' ').map(<[&str; 2]>::from),
        None => Some([merge[0].as_str()?, merge[1].as_str()?]),
    }
}

/// Checks that a tokenizer treats spaces and unknown characters as SentencePiece does, and names the kinds of its
/// tokens. Returns whether a space is put before a text.
fn sentence_piece(json: &Value, tokens: &mut [(String, Kind)], notes: &mut Vec<String>) -> Result<bool, Refusal> {
    if json["model"]["ignore_merges"] == true {
        return Err("it does not merge words that are tokens".into());
    }
    let prefix = prefix(json)?;
    if prefix == Prefix::Sometimes {
        notes.push(
            "llama.cpp also puts a space before text that begins with one or follows a special token, so such texts \
             may get other tokens than here"
                .into(),
        );
    }
    let unknown = json["model"]["unk_token"].as_str();
    let mut bytes = 0;
    let merged = |text: &str| json["model"]["vocab"].get(text).is_some();
    for (text, kind) in tokens {
        if is_byte(text) {
            *kind = Kind::Byte;
            bytes += 1;
        } else if Some(text.as_str()) == unknown {
            *kind = Kind::Unknown;
        } else if *kind == Kind::Own && text.contains(SPACE) && merged(text) {
            // A text has it only as the letters that stand for spaces, which are merged to it.
            *kind = Kind::Normal;
        }
    }
    if bytes != 256 {
        return Err(format!("it has tokens for {bytes} bytes, and not for all 256"));
    }
    Ok(prefix != Prefix::Never)
}

fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// Where a space is put that a text does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prefix {
    Never,
    /// Before the text, unless it begins with a space. After special tokens perhaps.
    Sometimes,
    /// Before the text, and after each special token.
    Always,
}

fn prefix(json: &Value) -> Result<Prefix, Refusal> {
    let normalizers = parts(&json["normalizer"], "normalizers");
    let pre_tokenizers = parts(&json["pre_tokenizer"], "pretokenizers");
    let (mut prefix, mut replaced) = (Prefix::Never, false);
    for part in normalizers {
        match part["type"].as_str().unwrap_or_default() {
            "Prepend" if part["prepend"] == SPACE => prefix = Prefix::Always,
            "Replace" if part["pattern"]["String"] == " " && part["content"] == SPACE => replaced = true,
            other => return Err(format!("its normalizer has a {other} that SentencePiece lacks")),
        }
    }
    for part in pre_tokenizers {
        match part["type"].as_str().unwrap_or_default() {
            // No space is left to cut at.
            "Split" if replaced && part["pattern"]["String"] == " " => {}
            "Metaspace" if part["replacement"] == SPACE && part["split"] == false => {
                replaced = true;
                prefix = match part["prepend_scheme"].as_str() {
                    Some("never") => Prefix::Never,
                    Some("first" | "always") => Prefix::Sometimes,
                    _ => return Err("the `prepend_scheme` of its Metaspace is unknown".into()),
                };
            }
            other => return Err(format!("its pre_tokenizer has a {other} that SentencePiece lacks")),
        }
    }
    match replaced {
        true => Ok(prefix),
        false => Err(format!("it does not write spaces as {SPACE}")),
    }
}

/// The parts of a sequence, or the one part.
fn parts<'a>(json: &'a Value, key: &str) -> Vec<&'a Value> {
    match json {
        Value::Null => Vec::new(),
        json if json["type"] == "Sequence" => json[key].as_array().into_iter().flatten().collect(),
        json => vec![json],
    }
}

/// The scores by which llama.cpp merges: of two neighbours whose texts together are a token, those whose token has the
/// highest score are merged first. The token of an earlier merge has a higher one.
///
/// # Errors
///
/// The merges are not all pairs of tokens whose texts together are a token, or those that make one token do not follow
/// each other. Then scores cannot say them.
fn scores(tokens: &[(String, Kind)], merges: &[[&str; 2]]) -> Result<Vec<f32>, Refusal> {
    let differ = |text: &str| format!("it merges to {text:?} in an order or from parts that SentencePiece has not");
    let places: HashMap<&str, usize> = tokens.iter().enumerate().map(|(i, (text, _))| (text.as_str(), i)).collect();
    let mut scores = vec![0.0; tokens.len()];
    let mut counts: HashMap<usize, usize> = HashMap::new();
    let (mut last, mut rank) = (None, 0);
    for [left, right] in merges {
        let text = [*left, *right].concat();
        let place = *places.get(text.as_str()).ok_or_else(|| differ(&text))?;
        if last != Some(place) {
            rank += 1;
            scores[place] = -(rank as f32);
            if counts.contains_key(&place) {
                return Err(differ(&text));
            }
            last = Some(place);
        }
        *counts.entry(place).or_default() += 1;
    }
    for (place, (text, _)) in tokens.iter().enumerate().filter(|(_, (_, kind))| *kind == Kind::Normal) {
        let cuts = text.char_indices().skip(1).map(|(cut, _)| text.split_at(cut));
        let pairs = cuts.filter(|(left, right)| places.contains_key(left) && places.contains_key(right)).count();
        if counts.get(&place).copied().unwrap_or(0) != pairs {
            return Err(differ(text));
        }
    }
    Ok(scores)
}
