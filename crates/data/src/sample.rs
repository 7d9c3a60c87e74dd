//! The text to train on when a job names no files: Shakespeare's plays `Richard II` and `Romeo and Juliet`.

/// The file that has both plays, one after the other. The examples train on all of it.
const PLAYS: &[u8] = include_bytes!("../../../examples/data/tinyshakespeare.txt");

/// The first byte of `Richard II` there.
const START: usize = 317_027;

/// The bytes of both plays. The nine tenths that are trained on by default end with a speech, so the held-out text
/// begins with one.
const LENGTH: usize = 259_432;

/// A copy of these bytes alone, so that the program does not carry the other plays.
static SAMPLE: [u8; LENGTH] = match PLAYS.split_at(START).1.first_chunk() {
    Some(plays) => *plays,
    None => [b'?'; LENGTH],
};

pub(super) fn text() -> &'static str {
    std::str::from_utf8(&SAMPLE).unwrap_or_default()
}
