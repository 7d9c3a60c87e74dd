//! From text to tokens and back.

mod check;
mod file;
mod gpt2;
mod guard;
mod settings;
mod windows;

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Serialize, Serializer};

use super::DataError;
use file::TokenizerFile;

/// The method that turns text into tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum Tokenizer {
    /// One token per byte, 256 in all, for any file and language.
    Bytes,
    /// GPT-2's byte-pair encoding with 50,257 tokens; the last is `<|endoftext|>`. The program holds its vocabulary.
    Gpt2,
    /// A `tokenizer.json` of Hugging Face's `tokenizers`, and the settings beside it.
    File(Arc<TokenizerFile>),
}

impl Tokenizer {
    /// The names in a job file, which names other tokenizers by their paths.
    pub const NAMES: [(&'static str, Self); 2] = [("bytes", Self::Bytes), ("gpt2", Self::Gpt2)];

    /// The tokenizer of a name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::NAMES.into_iter().find(|(n, _)| *n == name).map(|(_, tokenizer)| tokenizer)
    }

    /// Reads a `tokenizer.json`, or that of a folder. The settings beside it are read if they are there:
    /// `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and `config.json`.
    ///
    /// # Errors
    ///
    /// There is no such file, or it or a file beside it is broken.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        Ok(Self::File(Arc::new(TokenizerFile::open(path)?)))
    }

    /// The file of the tokenizer and those beside it that say more, with the names that `transformers` gives them. The
    /// model's `config.json` is among them. The program's own tokenizers have none.
    pub fn files(&self) -> Vec<(&'static str, PathBuf)> {
        match self {
            Self::Bytes | Self::Gpt2 => Vec::new(),
            Self::File(file) => file.files(),
        }
    }

    /// The same tokenizer, written in a job as the path `path`. One that has no file stays as it is.
    #[must_use]
    pub fn at(&self, path: &Path) -> Self {
        match self {
            Self::Bytes | Self::Gpt2 => self.clone(),
            Self::File(file) => Self::File(Arc::new(file.at(path))),
        }
    }

    /// The number of tokens, which are numbered from 0: the largest number and 1. Some may mean nothing.
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Bytes => 256,
            Self::Gpt2 => gpt2::END_OF_TEXT as usize + 1,
            Self::File(file) => file.vocabulary(),
        }
    }

    /// The token at the start of a text, if there is one (`bos_token`).
    pub fn start_of_text(&self) -> Option<u32> {
        match self {
            Self::Bytes => None,
            Self::Gpt2 => Some(gpt2::END_OF_TEXT),
            Self::File(file) => file.settings().start,
        }
    }

    /// The token at the end of a text, if there is one (`eos_token`).
    pub fn end_of_text(&self) -> Option<u32> {
        self.ends().first().copied()
    }

    /// All tokens that end a generated text. The first is [`Self::end_of_text`].
    pub fn ends(&self) -> &[u32] {
        match self {
            Self::Bytes => &[],
            Self::Gpt2 => &[gpt2::END_OF_TEXT],
            Self::File(file) => &file.settings().ends,
        }
    }

    /// The tokens that the tokenizer puts before each text, such as Llama's `<s>`. The methods that encode leave them
    /// out.
    pub fn opening(&self) -> &[u32] {
        match self {
            Self::Bytes | Self::Gpt2 => &[],
            Self::File(file) => file.opening(),
        }
    }

    /// The tokens before each document of a corpus: the end of the one before, and [`Self::opening`].
    pub fn before_document(&self) -> Vec<u32> {
        let end = self.end_of_text();
        let opening = self.opening().iter().copied().filter(|token| Some(*token) != end);
        end.into_iter().chain(opening).collect()
    }

    /// The token whose text this is.
    pub fn token(&self, content: &str) -> Option<u32> {
        match self {
            Self::File(file) => file.token(content),
            Self::Bytes | Self::Gpt2 => match self.encode_with_special(content).ok()?[..] {
                [token] => Some(token),
                _ => None,
            },
        }
    }

    /// The tokens of a text. Special tokens are read as plain text, and none are added.
    ///
    /// # Errors
    ///
    /// The text has characters that no token stands for.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::Gpt2 => Ok(gpt2::encode(text)),
            Self::File(file) => file.encode(text),
        }
    }

    /// The tokens of several texts, each as from [`Self::encode`]. All processors work on many short texts.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::encode`].
    pub fn encode_all(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        match self {
            Self::Bytes | Self::Gpt2 => texts.iter().map(|text| self.encode(text)).collect(),
            Self::File(file) => file.encode_all(texts),
        }
    }

    /// The tokens of a text in which the text of a special token stands for that token, as a chat's template has it.
    /// None are added.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::encode`].
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match self {
            Self::Bytes => self.encode(text),
            Self::Gpt2 => Ok(gpt2::encode_with_special(text)),
            Self::File(file) => file.encode_with_special(text),
        }
    }

    /// The tokens of [`Self::encode_with_special`], each with its bytes in the text. Several tokens of one character
    /// have the same bytes.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::encode`].
    pub fn encode_with_places(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, DataError> {
        if let Self::File(file) = self {
            return file.encode_with_places(text);
        }
        let mut end = 0;
        let place = |token: u32| {
            let start = end;
            // Each byte of the text is in one token.
            end += self.bytes(token).map_or(0, |bytes| bytes.len());
            (token, start..end)
        };
        Ok(self.encode_with_special(text)?.into_iter().map(place).collect())
    }

    /// The texts of special tokens by their names, such as `bos_token`, as the templates of chats have them.
    pub fn special_texts(&self) -> Vec<(String, String)> {
        match self {
            Self::Bytes => Vec::new(),
            Self::Gpt2 => ["bos_token", "eos_token", "unk_token"]
                .map(|name| (name.to_owned(), self.decode(&[gpt2::END_OF_TEXT])))
                .into(),
            Self::File(file) => file.settings().special.clone().into_iter().collect(),
        }
    }

    /// The text of tokens. Incomplete characters and unknown tokens become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        if let Self::File(file) = self
            && let Some(text) = file.decode(tokens)
        {
            return text;
        }
        let mut bytes = Vec::with_capacity(tokens.len() * 2);
        for &token in tokens {
            bytes.extend(self.bytes(token).unwrap_or_else(|| "\u{fffd}".into()));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that a token adds to a text, which may end within a character; `None` for an unknown token.
    pub fn bytes(&self, token: u32) -> Option<Vec<u8>> {
        match self {
            Self::Bytes => u8::try_from(token).ok().map(|b| vec![b]),
            Self::Gpt2 => gpt2::bytes(token),
            Self::File(file) => file.bytes(token),
        }
    }
}

/// The name or the path in a job file.
impl fmt::Display for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes => f.write_str("bytes"),
            Self::Gpt2 => f.write_str("gpt2"),
            Self::File(file) => file.path().display().fmt(f),
        }
    }
}

impl Serialize for Tokenizer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bytes | Self::Gpt2 => serializer.collect_str(self),
            // Unlike its text, it must be UTF-8.
            Self::File(file) => file.path().serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests;
