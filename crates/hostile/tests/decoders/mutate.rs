//! Changes of valid bytes, as a seed decides.

use fusionllm_graph::ChoiceRng;
use fusionllm_hostile::Form;

/// Numbers that arithmetic on sizes gets wrong, as a variable-length integer and in eight bytes.
const NUMBERS: [u64; 12] =
    [0, 1, 2, 0x7f, 0xffff, u32::MAX as u64, 1 << 31, 1 << 40, 1 << 47, i64::MAX as u64, u64::MAX - 1, u64::MAX];

/// Words that readers of text get wrong.
const WORDS: [&str; 24] = [
    "0",
    "-1",
    "1",
    "-0.0",
    "1e308",
    "-1e308",
    "1e-320",
    "0.1",
    "65536",
    "4294967295",
    "1099511627776",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "nan",
    "inf",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\"\u{1f600}\"",
    "[[[[[[[[",
    "\\u0000",
];

/// The samples with some bytes changed. One seed makes the same bytes every time.
pub(crate) fn mutated(samples: &[Vec<u8>], form: Form, seed: u64) -> Vec<u8> {
    let mut rng = ChoiceRng::new(seed);
    let mut bytes = samples[rng.below(samples.len())].clone();
    for _ in 0..1 + rng.below(4) {
        let other = &samples[rng.below(samples.len())];
        match form {
            Form::Text if rng.below(4) > 0 => change_word(&mut bytes, other, &mut rng),
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

/// Replaces a word by a strange one, or by one of another sample.
fn change_word(bytes: &mut Vec<u8>, other: &[u8], rng: &mut ChoiceRng) {
    let (here, there) = (words(bytes), words(other));
    if here.is_empty() || there.is_empty() {
        return change_bytes(bytes, other, rng);
    }
    let (from, to) = here[rng.below(here.len())];
    let new = match rng.below(3) {
        0 => {
            let (from, to) = there[rng.below(there.len())];
            other[from..to].to_vec()
        }
        _ => rng.choose(&WORDS).as_bytes().to_vec(),
    };
    bytes.splice(from..to, new);
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
