//! From text to tokens and back.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// The method that turns text into tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tokenizer {
    /// One token per byte, 256 in all, for any file and language.
    Bytes,
    /// GPT-2's byte-pair encoding with 50,257 tokens; the last is `<|endoftext|>`. The program holds its vocabulary.
    Gpt2,
}

/// Bytes of text per call of the byte-pair encoder. The regular expressions of the encoder overflow their stack on
/// much longer pieces.
const PIECE: usize = 64 << 10;

impl Tokenizer {
    /// The names in a job file.
    pub const NAMES: [(&'static str, Self); 2] = [("bytes", Self::Bytes), ("gpt2", Self::Gpt2)];

    /// The number of tokens, which are numbered from 0.
    pub fn vocabulary(self) -> usize {
        match self {
            Self::Bytes => 256,
            Self::Gpt2 => 50_257,
        }
    }

    /// The token before each document, if there is one.
    pub fn start_of_text(self) -> Option<u32> {
        match self {
            Self::Bytes => None,
            Self::Gpt2 => Some(50_256),
        }
    }

    /// The tokens of a text. Special tokens are read as plain text.
    pub fn encode(self, text: &str) -> Vec<u32> {
        match self {
            Self::Bytes => text.bytes().map(u32::from).collect(),
            Self::Gpt2 => {
                let bpe = tiktoken_rs::r50k_base_singleton();
                pieces(text).flat_map(|piece| bpe.encode_ordinary(piece)).collect()
            }
        }
    }

    /// The text of tokens. Incomplete characters and unknown tokens become U+FFFD.
    pub fn decode(self, tokens: &[u32]) -> String {
        let mut bytes = Vec::with_capacity(tokens.len() * 2);
        for &token in tokens {
            bytes.extend(self.bytes(token).unwrap_or_else(|| "\u{fffd}".into()));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of a token, which may end within a character; `None` for an unknown token.
    pub fn bytes(self, token: u32) -> Option<Vec<u8>> {
        match self {
            Self::Bytes => u8::try_from(token).ok().map(|b| vec![b]),
            Self::Gpt2 => tiktoken_rs::r50k_base_singleton().decode_bytes(&[token]).ok(),
        }
    }
}

impl FromStr for Tokenizer {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::NAMES.iter().find(|(n, _)| *n == name);
        known.map(|(_, t)| *t).ok_or_else(|| format!("it is one of {}", Self::NAMES.map(|(n, _)| n).join(", ")))
    }
}

impl fmt::Display for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bytes => "bytes",
            Self::Gpt2 => "gpt2",
        })
    }
}

/// Cuts a text into pieces with the same tokens. GPT-2's tokens have no space after another character, so a cut
/// before a space changes no token. Only a run of more than twice [`PIECE`] spaces or letters is cut inside.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let least = rest.floor_char_boundary(PIECE);
        let most = rest.floor_char_boundary(2 * PIECE);
        let mut before = ' ';
        let cut = rest[least..most].char_indices().find_map(|(i, c)| {
            let starts_blanks = c.is_whitespace() && !before.is_whitespace();
            before = c;
            starts_blanks.then_some(least + i)
        });
        let (piece, tail) = rest.split_at(cut.unwrap_or(most));
        rest = tail;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reference tokens come from OpenAI's encoder for GPT-2.
    #[test]
    fn gpt2_known_tokens() {
        let tokens = Tokenizer::Gpt2.encode("Hello world, it's 2024!\n\n  ok");
        assert_eq!(tokens, [15496, 995, 11, 340, 338, 48609, 0, 628, 220, 12876]);
        assert_eq!(Tokenizer::Gpt2.decode(&[50256]), "<|endoftext|>");
        assert_eq!(Tokenizer::Gpt2.encode("<|endoftext|>").len(), 7);
    }

    #[test]
    fn text_survives_both_ways() {
        let text = "fn main() {\n\tprintln!(\"Größe: {}\", '\u{1f980}');\n}\r\n\r\n    日本語  \n";
        for (_, tokenizer) in Tokenizer::NAMES {
            let tokens = tokenizer.encode(text);
            assert!(tokens.iter().all(|&t| (t as usize) < tokenizer.vocabulary()));
            assert_eq!(tokenizer.decode(&tokens), text);
        }
    }

    #[test]
    fn unknown_tokens_are_marked() {
        assert_eq!(Tokenizer::Bytes.decode(&[104, 256, 105]), "h\u{fffd}i");
        assert_eq!(Tokenizer::Gpt2.decode(&[15496, 60000]), "Hello\u{fffd}");
        assert_eq!(Tokenizer::Bytes.decode(&[0xe6, 0x97]), "\u{fffd}");
    }

    #[test]
    fn cutting_into_pieces_changes_no_token() {
        let text = "It is  so,\n\n  isn't it? 3.14 \t Grün\n".repeat(8000);
        assert!(pieces(&text).count() > 3);
        assert_eq!(pieces(&text).collect::<String>(), text);
        let whole = tiktoken_rs::r50k_base_singleton().encode_ordinary(&text);
        assert_eq!(Tokenizer::Gpt2.encode(&text), whole);
    }

    /// Regression: a file of spaces alone, or of one endless word, made the encoder's regular expression panic.
    #[test]
    fn endless_runs_are_encoded() {
        for run in [" ", "a", "é", "\u{3000}"] {
            let text = run.repeat(1_200_000);
            assert_eq!(Tokenizer::Gpt2.decode(&Tokenizer::Gpt2.encode(&text)), text);
        }
    }
}
