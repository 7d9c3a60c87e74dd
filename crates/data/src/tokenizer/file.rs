//! Tokenizers of Hugging Face's `tokenizers`, read from a `tokenizer.json`.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{Encoding, Model, Tokenizer};

use super::check::check;
use super::guard::without_special;
use super::settings::{FILES, Settings};
use super::windows::{Token, Windows};
use crate::DataError;

/// A `tokenizer.json`, and the settings beside it.
#[derive(Clone)]
pub struct TokenizerFile {
    /// The file or folder as a job names it.
    path: PathBuf,
    /// The `tokenizer.json`.
    file: PathBuf,
    /// The digest of the file's content.
    digest: blake3::Hash,
    settings: Settings,
    vocabulary: usize,
    opening: Vec<u32>,
    /// Reads special tokens as plain text.
    plain: Tokenizer,
    /// Finds special tokens in a text. Few need it, and it is as large as the other.
    special: OnceLock<Tokenizer>,
    decoder: Decoder,
}

/// The treatment of single tokens by the decoder.
#[derive(Debug, Clone)]
struct Decoder {
    /// Each letter of a token is a byte.
    byte_level: bool,
    /// Tokens such as `<0x0A>` are bytes.
    byte_fallback: bool,
    /// An ordinary token, after which others are decoded.
    anchor: Option<u32>,
}

/// The advice where there is no `tokenizer.json`, or a broken one.
const CONVERT: &str = "let transformers write one: python3 -c 'from transformers import AutoTokenizer; \
     AutoTokenizer.from_pretrained(\"DIR\").save_pretrained(\"DIR\")'";

fn malformed(path: &Path, message: impl Into<String>) -> DataError {
    DataError::Malformed { path: path.to_owned(), message: message.into(), hint: CONVERT }
}

/// Runs code of `tokenizers`, which may panic on a broken file that [`check`] does not know.
fn guarded<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err("its parts do not fit each other".into()))
}

impl TokenizerFile {
    /// Reads the file `path`, or the `tokenizer.json` in the folder `path`.
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let file = if path.is_dir() { path.join(FILES[0]) } else { path.to_owned() };
        let is_json = file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
        if !is_json || (path.is_dir() && !file.is_file()) {
            let message = if path.is_dir() { "there is no tokenizer.json here" } else { "this is no tokenizer.json" };
            return Err(malformed(path, message));
        }
        let bytes = crate::read(&file)?;
        let digest = blake3::hash(&bytes);
        let json = serde_json::from_slice(&bytes).map_err(|e| malformed(&file, format!("it is no JSON: {e}")))?;
        drop(bytes);
        let (plain, vocabulary) = guarded(|| load(json)).map_err(|e| malformed(&file, format!("no tokenizer: {e}")))?;
        let directory = file.parent().unwrap_or(Path::new("."));
        let settings = Settings::read(directory, |t| plain.token_to_id(t), |id| plain.id_to_token(id).is_some())?;
        let mut tokenizer = Self {
            path: path.to_owned(),
            decoder: Decoder::of(&plain),
            file,
            digest,
            settings,
            vocabulary,
            opening: Vec::new(),
            plain,
            special: OnceLock::new(),
        };
        (tokenizer.opening, tokenizer.decoder.anchor) = tokenizer.probe()?;
        Ok(tokenizer)
    }

    /// The tokens that are put before a text, and an ordinary token.
    fn probe(&self) -> Result<(Vec<u32>, Option<u32>), DataError> {
        let encode = |special| self.run(|| self.plain.encode_fast("a", special));
        let (plain, framed) = (encode(false)?, encode(true)?);
        let (plain, framed) = (plain.get_ids(), framed.get_ids());
        let before = (0..framed.len()).find(|i| framed[*i..].starts_with(plain)).unwrap_or(0);
        Ok((framed[..before].to_vec(), plain.last().copied()))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn at(&self, path: &Path) -> Self {
        Self { path: path.to_owned(), ..self.clone() }
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(super) fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    pub(super) fn opening(&self) -> &[u32] {
        &self.opening
    }

    pub(super) fn files(&self) -> Vec<(&'static str, PathBuf)> {
        let beside = FILES.into_iter().skip(1).map(|name| (name, self.file.with_file_name(name)));
        let there = beside.filter(|(_, path)| path.is_file());
        std::iter::once((FILES[0], self.file.clone())).chain(there).collect()
    }

    pub(super) fn token(&self, content: &str) -> Option<u32> {
        self.plain.token_to_id(content)
    }

    /// Runs the library on a text.
    fn run<T>(&self, encode: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, DataError> {
        guarded(|| encode().map_err(|e| e.to_string())).map_err(|e| DataError::Malformed {
            path: self.file.clone(),
            message: format!("a text cannot be encoded: {e}"),
            hint: "use a tokenizer that has a token for unknown characters",
        })
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.encode_in(Windows::USUAL, text)
    }

    /// The tokens of a text, which is encoded in windows of these sizes.
    pub(super) fn encode_in(&self, windows: Windows, text: &str) -> Result<Vec<u32>, DataError> {
        self.ids(&self.plain, windows, text)
    }

    pub(super) fn encode_with_special(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.ids(self.special(), Windows::USUAL, text)
    }

    pub(super) fn encode_with_places(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, DataError> {
        let special = self.special();
        let keep = |token: &Token| (token.id, token.start..token.end);
        if Windows::USUAL.hold(text.len()) {
            let encoded = self.run(|| special.encode(text, false))?;
            return Ok(tokens(&encoded).iter().map(keep).collect());
        }
        self.in_windows(special, Windows::USUAL, text, keep)
    }

    /// The tokenizer that finds special tokens in a text.
    fn special(&self) -> &Tokenizer {
        self.special.get_or_init(|| {
            let mut special = self.plain.clone();
            special.set_encode_special_tokens(false);
            special
        })
    }

    fn ids(&self, tokenizer: &Tokenizer, windows: Windows, text: &str) -> Result<Vec<u32>, DataError> {
        if windows.hold(text.len()) {
            return Ok(self.run(|| tokenizer.encode_fast(text, false))?.get_ids().to_vec());
        }
        self.in_windows(tokenizer, windows, text, |token| token.id)
    }

    /// The tokens of a long text, of which `keep` says what is wanted.
    fn in_windows<T>(
        &self,
        tokenizer: &Tokenizer,
        windows: Windows,
        text: &str,
        keep: impl Fn(&Token) -> T,
    ) -> Result<Vec<T>, DataError> {
        let encode = |parts: Vec<&str>| {
            let encoded = self.run(|| tokenizer.encode_batch(parts, false))?;
            Ok(encoded.iter().map(tokens).collect())
        };
        windows.encode(text, encode, keep)
    }

    pub(super) fn encode_all(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        let mut all = Vec::with_capacity(texts.len());
        for group in texts.chunk_by(|a, b| [a, b].iter().all(|text| Windows::USUAL.hold(text.len()))) {
            match group {
                [text] => all.push(self.encode(text)?),
                group => {
                    let encoded = self.run(|| self.plain.encode_batch_fast(group.to_vec(), false))?;
                    all.extend(encoded.iter().map(|encoding| encoding.get_ids().to_vec()));
                }
            }
        }
        Ok(all)
    }

    /// The text of tokens; `None` if one is unknown.
    pub(super) fn decode(&self, tokens: &[u32]) -> Option<String> {
        let known = tokens.iter().all(|token| self.plain.id_to_token(*token).is_some());
        known.then(|| self.decoded(tokens)).flatten()
    }

    fn decoded(&self, tokens: &[u32]) -> Option<String> {
        self.run(|| self.plain.decode(tokens, false)).ok()
    }

    pub(super) fn bytes(&self, token: u32) -> Option<Vec<u8>> {
        if let Some(added) = self.plain.get_added_vocabulary().get_added_tokens_decoder().get(&token) {
            return Some(added.content.clone().into_bytes());
        }
        let word = self.plain.get_model().id_to_token(token)?;
        if self.decoder.byte_level {
            return Some(word.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| word.into_bytes()));
        }
        let hexadecimal = word.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|n| n.len() == 2);
        let byte = hexadecimal.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        if let Some(byte) = byte.filter(|_| self.decoder.byte_fallback) {
            return Some(vec![byte]);
        }
        // The first token of a text may lose a space, so the token is decoded after another one.
        let text = self.decoder.anchor.and_then(|anchor| {
            let (alone, both) = (self.decoded(&[anchor])?, self.decoded(&[anchor, token])?);
            both.strip_prefix(&alone).map(str::to_owned)
        });
        text.or_else(|| self.decoded(&[token])).map(String::into_bytes)
    }
}

/// The tokenizer without truncation, padding, chance and special tokens in plain text, and the size of its vocabulary.
fn load(mut json: Value) -> Result<(Tokenizer, usize), String> {
    check(&json)?;
    for key in ["truncation", "padding"] {
        json[key] = Value::Null;
    }
    if json["model"].get("dropout").is_some() {
        json["model"]["dropout"] = Value::Null;
    }
    let mut tokenizer = Tokenizer::deserialize(&json).map_err(|e| e.to_string())?;
    // The numbers of added tokens follow from the model's whole vocabulary.
    let vocabulary = tokenizer.get_vocab(true).into_values().max().map_or(0, |largest| largest as usize + 1);
    if let Some(model) = without_special(json) {
        tokenizer.with_model(serde_json::from_value::<ModelWrapper>(model).map_err(|e| e.to_string())?);
    }
    tokenizer.set_encode_special_tokens(true);
    Ok((tokenizer, vocabulary))
}

/// The tokens of an encoded text, and their bytes in it.
fn tokens(encoding: &Encoding) -> Vec<Token> {
    let places = encoding.get_ids().iter().zip(encoding.get_offsets());
    places.map(|(&id, &(start, end))| Token { id, start, end }).collect()
}

impl Decoder {
    fn of(tokenizer: &Tokenizer) -> Self {
        let json = serde_json::to_value(tokenizer.get_decoder()).unwrap_or_default();
        let has = |kind: &str| {
            let parts = json["decoders"].as_array().into_iter().flatten();
            parts.chain([&json]).any(|decoder| decoder["type"] == kind)
        };
        Self { byte_level: has("ByteLevel"), byte_fallback: has("ByteFallback"), anchor: None }
    }
}

/// The byte that a letter of a byte-level vocabulary stands for. Bytes that print are their own letters. The letters of
/// the others follow each other from U+0100 on.
fn byte_of(letter: char) -> Option<u8> {
    let code = u32::from(letter);
    u8::try_from(match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    })
    .ok()
}

/// Two files of the same content are one tokenizer.
impl PartialEq for TokenizerFile {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest && self.settings == other.settings
    }
}

impl fmt::Debug for TokenizerFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenizerFile({})", self.path.display())
    }
}
