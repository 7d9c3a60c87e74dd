//! GPT-2's byte-pair encoding, whose vocabulary the program holds.

/// The token before each document.
pub(super) const END_OF_TEXT: u32 = 50_256;

/// The text of [`END_OF_TEXT`].
const END_OF_TEXT_CONTENT: &str = "<|endoftext|>";

/// Bytes of text per call of the byte-pair encoder. The regular expressions of the encoder overflow their stack on
/// much longer pieces.
const PIECE: usize = 64 << 10;

/// The tokens of a text.
pub(super) fn encode(text: &str) -> Vec<u32> {
    let bpe = tiktoken_rs::r50k_base_singleton();
    pieces(text).flat_map(|piece| bpe.encode_ordinary(piece)).collect()
}

/// The tokens of a text with special tokens in it.
pub(super) fn encode_with_special(text: &str) -> Vec<u32> {
    let parts: Vec<Vec<u32>> = text.split(END_OF_TEXT_CONTENT).map(encode).collect();
    parts.join(&END_OF_TEXT)
}

/// The bytes of a token; `None` for an unknown token.
pub(super) fn bytes(token: u32) -> Option<Vec<u8>> {
    tiktoken_rs::r50k_base_singleton().decode_bytes(&[token]).ok()
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

    #[test]
    fn cutting_into_pieces_changes_no_token() {
        let text = "It is  so,\n\n  isn't it? 3.14 \t Grün\n".repeat(8000);
        assert!(pieces(&text).count() > 3);
        assert_eq!(pieces(&text).collect::<String>(), text);
        let whole = tiktoken_rs::r50k_base_singleton().encode_ordinary(&text);
        assert_eq!(encode(&text), whole);
    }

    #[test]
    fn special_tokens_are_tokens_only_if_asked_for() {
        let text = "one<|endoftext|>two<|endoftext|>";
        assert_eq!(encode_with_special(text), [505, 50256, 11545, 50256]);
        assert_eq!(encode_with_special(""), [0; 0]);
        assert!(!encode(text).contains(&END_OF_TEXT));
    }
}
