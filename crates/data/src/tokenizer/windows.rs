//! Encodes a long text in windows, with the tokens of the whole.
//!
//! An encoder needs a hundred bytes of memory for each byte of a text, and works on one text with one thread. So a long
//! text is cut into windows that overlap, and several are encoded at once. Which places are safe to cut depends on the
//! tokenizer, so no place is taken for safe. Instead, two neighbours must have the same tokens all over the middle of
//! their overlap, and are joined there. If they differ, for example in a long row of equal letters, the windows grow.

use std::ops::Range;

/// A token, and its bytes in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) id: u32,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// The sizes of windows, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Windows {
    /// The length of a window.
    pub(super) length: usize,
    /// The part of it that the next window has, too.
    pub(super) overlap: usize,
    /// Windows that are encoded at once.
    pub(super) at_once: usize,
}

impl Windows {
    /// A hundred megabytes are enough to encode them.
    pub(super) const USUAL: Self = Self { length: 64 << 10, overlap: 4 << 10, at_once: 16 };

    /// Whether a text of this length is encoded in one piece.
    pub(super) fn hold(&self, length: usize) -> bool {
        length <= self.length + self.overlap
    }

    /// The tokens of a text, of which `keep` says what is wanted. `encode` returns those of each of its parts, with
    /// their bytes counted from the start of the part.
    pub(super) fn encode<T, E>(
        &self,
        text: &str,
        encode: impl Fn(Vec<&str>) -> Result<Vec<Vec<Token>>, E>,
        keep: impl Fn(&Token) -> T,
    ) -> Result<Vec<T>, E> {
        let mut kept = Vec::new();
        // The first window of a round, and the byte of it from which on its tokens are not in `kept`.
        let (mut start, mut settled) = (0, 0);
        let mut length = self.length;
        loop {
            let ranges = self.ranges(text, start, length);
            let encoded = encode(ranges.iter().map(|range| &text[range.clone()]).collect())?;
            let mut windows = ranges.iter().zip(encoded).map(|(range, tokens)| {
                let moved = |t: Token| Token { id: t.id, start: t.start + range.start, end: t.end + range.start };
                (range, tokens.into_iter().map(moved).collect::<Vec<Token>>())
            });
            let Some((mut last, mut open)) = windows.next() else { return Ok(kept) };
            open.drain(..first_from(&open, settled));
            length = self.length;
            for (range, mut next) in windows {
                let Some(place) = joint(&open, &next, range.start..last.end) else {
                    length = 2 * last.len();
                    break;
                };
                kept.extend(open[..first_from(&open, place)].iter().map(&keep));
                next.drain(..first_from(&next, place));
                (last, open, settled) = (range, next, place);
            }
            if last.end == text.len() {
                kept.extend(open.iter().map(&keep));
                return Ok(kept);
            }
            start = last.start;
        }
    }

    /// The windows of a round. The first one starts at `start`.
    fn ranges(&self, text: &str, mut start: usize, length: usize) -> Vec<Range<usize>> {
        let mut ranges = Vec::new();
        for _ in 0..self.at_once {
            let end = text.floor_char_boundary(start.saturating_add(length));
            ranges.push(start..end);
            if end == text.len() {
                break;
            }
            start = text.floor_char_boundary(end - self.overlap);
        }
        ranges
    }
}

/// The number of tokens before the first one that starts at `place` or later.
fn first_from(tokens: &[Token], place: usize) -> usize {
    tokens.iter().position(|token| token.start >= place).unwrap_or(tokens.len())
}

/// The place where the tokens of two windows are joined, if they are equal all over the middle of their overlap.
fn joint(left: &[Token], right: &[Token], overlap: Range<usize>) -> Option<usize> {
    let edge = overlap.len() / 4;
    let middle = |token: &&Token| (overlap.start + edge..overlap.end - edge).contains(&token.start);
    let mut both = left.iter().filter(middle).zip(right.iter().filter(middle));
    let equal = left.iter().filter(middle).eq(right.iter().filter(middle));
    both.next().filter(|_| equal).map(|(token, _)| token.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of three equal letters each, counted from the start of a row of them; a digit is a token by itself.
    fn triples(text: &str) -> Vec<Token> {
        let mut tokens: Vec<Token> = Vec::new();
        for (start, letter) in text.char_indices() {
            let end = start + letter.len_utf8();
            match tokens.last_mut() {
                Some(last) if last.id == u32::from(letter) && letter.is_alphabetic() && end - last.start <= 3 => {
                    last.end = end;
                }
                _ => tokens.push(Token { id: u32::from(letter), start, end }),
            }
        }
        tokens
    }

    fn in_windows(windows: &Windows, text: &str) -> (Vec<u32>, usize) {
        let work = std::cell::Cell::new(0);
        let encode = |parts: Vec<&str>| -> Result<_, ()> {
            work.set(work.get() + parts.iter().map(|part| part.len()).sum::<usize>());
            Ok(parts.into_iter().map(triples).collect())
        };
        (windows.encode(text, encode, |token| token.id).unwrap(), work.get())
    }

    #[test]
    fn windows_have_the_tokens_of_the_whole_text() {
        let windows = Windows { length: 100, overlap: 24, at_once: 3 };
        for long in [0, 10, 100, 333, 1000, 4000] {
            let text = format!("{}{}é{}", "ab1".repeat(300), "c".repeat(long), "1dd2eee3".repeat(400));
            let (tokens, work) = in_windows(&windows, &text);
            let whole: Vec<u32> = triples(&text).iter().map(|token| token.id).collect();
            assert_eq!(tokens, whole, "{long}");
            // Windows that grow are small again after the long row.
            assert!(work < 3 * text.len() + 12 * long, "{work} for {long}");
        }
        for short in ["", "a", "é1"] {
            assert_eq!(in_windows(&windows, short).0.len(), short.chars().count());
        }
    }
}
