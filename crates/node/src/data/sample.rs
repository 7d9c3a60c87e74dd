//! The text to train on when none is named.

/// Some of the project's own documents and sources: every build carries them, wherever it runs.
pub(super) const SAMPLE: &[&str] = &[
    include_str!("../../../../ARCHITECTURE.md"),
    include_str!("../../../../README.md"),
    include_str!("../checkpoint/mod.rs"),
    include_str!("../checkpoint/tests.rs"),
    include_str!("../checkpoint/writer.rs"),
    include_str!("../config/files.rs"),
    include_str!("../config/mod.rs"),
    include_str!("../config/model.rs"),
    include_str!("../config/reader.rs"),
    include_str!("../config/sections.rs"),
    include_str!("../config/tests.rs"),
    include_str!("../disk.rs"),
    include_str!("../run_dir.rs"),
    include_str!("../weights.rs"),
    include_str!("images.rs"),
    include_str!("mod.rs"),
    include_str!("order.rs"),
    include_str!("tests.rs"),
    include_str!("text.rs"),
    include_str!("tokenizer.rs"),
];
