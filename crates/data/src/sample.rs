//! The text to train on when a job names no files.

/// Twenty documents of this project, frozen at one version, because the quick start's losses depend on every byte.
pub(super) fn documents() -> impl Iterator<Item = &'static str> {
    include_str!("sample.txt").split('\u{c}')
}
