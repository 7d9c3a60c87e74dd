//! Checks of the workspace's text: crates, modules and documents. They need no kernel and no binary.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod circles;
mod crates;
mod documents;
mod links;
mod source;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The workspace's directory.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The text of each file below `directory` with this extension, by its path from there, with `/` between folders.
/// Build outputs, runs and hidden folders do not count.
fn files(directory: &Path, extension: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut open = vec![directory.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
            if entry.file_type().unwrap().is_dir() {
                if !name.starts_with('.') && name != "target" && name != "runs" {
                    open.push(path);
                }
            } else if path.extension().is_some_and(|e| e == extension) {
                let parts = path.strip_prefix(directory).unwrap().iter().map(|part| part.to_str().unwrap());
                found.insert(parts.collect::<Vec<_>>().join("/"), fs::read_to_string(&path).unwrap());
            }
        }
    }
    found
}
