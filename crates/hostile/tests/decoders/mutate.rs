//! Changes of valid bytes, which a seed decides.

use fusionllm_graph::ChoiceRng;
use fusionllm_hostile::Form;

/// Numbers that arithmetic on sizes gets wrong, as a variable-length integer and in eight bytes.
const NUMBERS: [u64; 12] =
    [0, 1, 2, 0x7f, 0xffff, u32::MAX as u64, 1 << 31, 1 << 40, 1 << 47, i64::MAX as u64, u64::MAX - 1, u64::MAX];

/// Numbers that readers of text get wrong, after a few that they get right.
const FIGURES: [&str; 24] = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "7",
    "8",
    "16",
    "64",
    "1000",
    "-1",
    "-2",
    "-0.0",
    "0.1",
    "1e308",
    "-1e308",
    "1e-320",
    "65536",
    "4294967295",
    "1099511627776",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
];

/// Words that readers of text get wrong.
const WORDS: [&str; 12] =
    ["nan", "inf", "null", "true", "false", "[]", "{}", "\"\"", "\"\u{1f600}\"", "[[[[[[[[", "\\u0000", "[1, 0, 3]"];

/// The samples with some bytes changed. One seed makes the same bytes every time.
pub(crate) fn mutated(samples: &[Vec<u8>], form: Form, seed: u64) -> Vec<u8> {
    let mut rng = ChoiceRng::new(seed);
    let mut bytes = samples[rng.below(samples.len())].clone();
    for _ in 0..1 + rng.below(4) {
        let other = &samples[rng.below(samples.len())];
        match form {
            Form::Text if rng.below(16) > 0 => change_word(&mut bytes, other, &mut rng),
            _ => change_bytes(&mut bytes, other, &mut rng),
        }
    }
    bytes
}

fn change_bytes(bytes: &mut Vec<u8>, other: &[u8], rng: &mut ChoiceRng) {
    let at = rng.below(bytes.len() + 1);
    let next = (at + 1).min(bytes.len());
    match rng.below(9) {
        0 => bytes.truncate(at),
        1 | 2 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
        3 if at < bytes.len() => bytes[at] = rng.choose(&[0, 1, 2, 0x7f, 0x80, 0xff]),
        4 => drop(bytes.splice(at..next, variable_length(rng.choose(&NUMBERS)))),
        5 => {
            let end = (at + 8).min(bytes.len());
            bytes.splice(at..end, rng.choose(&NUMBERS).to_le_bytes());
        }
        6 => drop(bytes.drain(at..(at + 1 + rng.below(8)).min(bytes.len()))),
        7 => drop(bytes.splice(at..at, piece(other, 64, rng))),
        _ => {
            let end = (at + rng.below(64)).min(bytes.len());
            bytes.splice(at..end, piece(other, 64, rng));
        }
    }
}

fn piece(of: &[u8], most: usize, rng: &mut ChoiceRng) -> Vec<u8> {
    let from = rng.below(of.len() + 1);
    of[from..(from + rng.below(most)).min(of.len())].to_vec()
}

/// Seven bits in each byte, the lowest first. The top bit says that more follow.
fn variable_length(mut n: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while n > 0x7f {
        bytes.push(n as u8 | 0x80);
        n >>= 7;
    }
    bytes.push(n as u8);
    bytes
}

/// Replaces a number by another, or a word by a strange one or one of another sample.
fn change_word(bytes: &mut Vec<u8>, other: &[u8], rng: &mut ChoiceRng) {
    let (here, there) = (words(bytes), words(other));
    let is_figure = |&(from, _): &(usize, usize)| bytes[from].is_ascii_digit() || bytes[from] == b'-';
    let figures: Vec<_> = here.iter().copied().filter(is_figure).collect();
    let (places, new) = match rng.below(8) {
        0 if !there.is_empty() => {
            let (from, to) = there[rng.below(there.len())];
            (here, &other[from..to])
        }
        1 => (here, rng.choose(&WORDS).as_bytes()),
        _ => (figures, rng.choose(&FIGURES).as_bytes()),
    };
    if places.is_empty() {
        return change_bytes(bytes, other, rng);
    }
    let (from, to) = places[rng.below(places.len())];
    bytes.splice(from..to, new.iter().copied());
}

/// Begin and end of each number, name and quoted text.
fn words(bytes: &[u8]) -> Vec<(usize, usize)> {
    let in_word = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-' | b'+');
    let mut words = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let length = match bytes[at] {
            b'"' => bytes[at + 1..].iter().position(|b| *b == b'"').map_or(bytes.len() - at, |n| n + 2),
            _ => bytes[at..].iter().take_while(|b| in_word(**b)).count(),
        };
        if length > 0 {
            words.push((at, at + length));
        }
        at += length.max(1);
    }
    words
}
