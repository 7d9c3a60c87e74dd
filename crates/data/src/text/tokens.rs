//! Many tokens in little memory.

use std::ops::Range;

/// Tokens of a corpus, in two bytes each if the vocabulary allows it, and in four otherwise.
pub(super) enum Tokens {
    Narrow(Vec<u16>),
    Wide(Vec<u32>),
}

impl Tokens {
    /// None yet. Each of them will be below `vocabulary`.
    pub(super) fn new(vocabulary: usize) -> Self {
        match vocabulary <= 1 << u16::BITS {
            true => Self::Narrow(Vec::new()),
            false => Self::Wide(Vec::new()),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Narrow(tokens) => tokens.len(),
            Self::Wide(tokens) => tokens.len(),
        }
    }

    pub(super) fn extend(&mut self, more: impl IntoIterator<Item = u32>) {
        match self {
            // No tokenizer has a token outside its vocabulary.
            Self::Narrow(tokens) => tokens.extend(more.into_iter().map(|token| token as u16)),
            Self::Wide(tokens) => tokens.extend(more),
        }
    }

    /// Some of the tokens, as numbers of a batch.
    pub(super) fn get(&self, range: Range<usize>) -> Vec<i64> {
        match self {
            Self::Narrow(tokens) => tokens[range].iter().map(|token| i64::from(*token)).collect(),
            Self::Wide(tokens) => tokens[range].iter().map(|token| i64::from(*token)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_vocabularies_keep_their_tokens() {
        for (vocabulary, wide) in [(256, false), (65_536, false), (65_537, true), (262_144, true)] {
            let mut tokens = Tokens::new(vocabulary);
            tokens.extend([0, 7, vocabulary as u32 - 1]);
            assert_eq!(tokens.get(1..3), [7, vocabulary as i64 - 1]);
            assert_eq!((tokens.len(), matches!(tokens, Tokens::Wide(_))), (3, wide));
        }
    }
}
