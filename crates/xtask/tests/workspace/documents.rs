//! Documents can be read in any editor and are true: no line of a Markdown file is too long, and the paths and names of
//! the code that they cite exist.

use std::collections::BTreeSet;
use std::ops::Range;

use pulldown_cmark::{Event, Options, Parser, Tag};

use super::source::words;
use super::{files, root};

const MAX_CHARACTERS: usize = 120;

/// The elements of a document, with the bytes where they stand.
pub(super) fn elements(document: &str) -> impl Iterator<Item = (Event<'_>, Range<usize>)> {
    Parser::new_ext(document, Options::ENABLE_TABLES).into_offset_iter()
}

pub(super) fn line(document: &str, byte: usize) -> usize {
    1 + document[..byte].matches('\n').count()
}

/// Number and length of each line that is too long. Rows of tables and blocks of code cannot be wrapped.
fn long_lines(document: &str) -> Vec<(usize, usize)> {
    let kept = elements(document).filter_map(|(event, range)| match event {
        Event::Start(Tag::Table(_) | Tag::CodeBlock(_)) => Some(range),
        _ => None,
    });
    let kept: Vec<_> = kept.collect();
    let (mut long, mut end) = (Vec::new(), 0);
    for (number, line) in (1..).zip(document.split_inclusive('\n')) {
        end += line.len();
        let length = line.trim_end().chars().count();
        if length > MAX_CHARACTERS && !kept.iter().any(|range| range.contains(&(end - 1))) {
            long.push((number, length));
        }
    }
    long
}

#[test]
fn no_line_of_a_document_is_too_long() {
    let mut found = Vec::new();
    for (path, text) in files(&root(), "md") {
        let long = long_lines(&text);
        found.extend(long.into_iter().map(|(line, length)| format!("{path}:{line}: {length} characters")));
    }
    assert!(found.is_empty(), "lines of more than {MAX_CHARACTERS} characters:\n{}", found.join("\n"));
}

#[test]
fn long_lines_are_found_outside_tables_and_code() {
    let long = "é".repeat(MAX_CHARACTERS + 1);
    let fits = "é".repeat(MAX_CHARACTERS);
    let document =
        format!("{long}\n{fits}\n\n| a |\n| --- |\n| {long} |\n\n- b\n\n  ```text\n  {long}\n  ```\n\n  {long}\n");
    assert_eq!(long_lines(&document), [(1, 121), (14, 123)]);
}

/// The documents that describe the code. Others describe what users write, or what once was.
const ABOUT_THE_CODE: [&str; 4] = ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/decisions.md", "docs/worker.md"];

/// The endings of files whose paths are checked.
const PATH_ENDINGS: [&str; 6] = ["rs", "py", "md", "sh", "toml", "json"];

/// The texts between backticks, with the lines where they begin. Blocks of code are left out.
fn quotations(document: &str) -> impl Iterator<Item = (usize, String)> {
    elements(document).filter_map(|(event, range)| match event {
        Event::Code(text) => Some((line(document, range.start), text.into_string())),
        _ => None,
    })
}

/// Whether a quotation is the path of a file or folder of the workspace.
fn is_path(text: &str) -> bool {
    let word = text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
    word && text.contains('/')
        && !text.starts_with('/')
        && (text.ends_with('/') || PATH_ENDINGS.iter().any(|ending| text.ends_with(&format!(".{ending}"))))
}

/// The names of a quotation such as `Type`, `Type::member` or `Type::CONSTANT`; none if it is something else.
fn names(text: &str) -> Vec<&str> {
    let names: Vec<&str> = text.trim_end_matches("()").split("::").collect();
    let word = |name: &&str| {
        let mut letters = name.chars();
        letters.next().is_some_and(|c| c.is_ascii_alphabetic())
            && letters.all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    // A type has letters of both cases and no underscore.
    let is_type = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_uppercase())
            && !name.contains('_')
            && name.chars().any(|c| c.is_lowercase())
    };
    match names.iter().all(word) && names.iter().any(|name| is_type(name)) {
        true => names,
        false => Vec::new(),
    }
}

/// The citations of a document that the workspace lacks, with their lines.
fn missing(document: &str, exists: impl Fn(&str) -> bool, words: &BTreeSet<String>) -> Vec<(usize, String)> {
    let lacks = |text: &str| match is_path(text) {
        true => !exists(text),
        false => names(text).iter().any(|name| !words.contains(*name)),
    };
    quotations(document).filter(|(_, text)| lacks(text)).collect()
}

#[test]
fn what_documents_cite_exists() {
    let root = root();
    let sources = files(&root, "rs").into_values();
    let words: BTreeSet<String> = sources.flat_map(|text| words(text.parse().unwrap())).collect();
    // A document may leave out the folders in which a whole section is.
    let paths: Vec<String> =
        PATH_ENDINGS.iter().flat_map(|e| files(&root, e).into_keys()).map(|p| format!("/{p}")).collect();
    let exists = |cited: &str| {
        let end = format!("/{cited}");
        paths.iter().any(|path| if cited.ends_with('/') { path.contains(&end) } else { path.ends_with(&end) })
    };
    let mut found = Vec::new();
    for path in ABOUT_THE_CODE {
        let text = std::fs::read_to_string(root.join(path)).unwrap();
        let missing = missing(&text, exists, &words);
        found.extend(missing.into_iter().map(|(line, cited)| format!("{path}:{line}: {cited}")));
    }
    assert!(found.is_empty(), "cited in a document, and not there:\n{}", found.join("\n"));
}

#[test]
fn a_name_that_no_code_has_is_found() {
    let words = BTreeSet::from(["Plan", "validate", "Slot"].map(String::from));
    let document = "`Plan::validate()` and `Plan::check`, `a/b.rs` and `a/c.rs`, `Pl\n\nan`\n```text\n`Gone`\n```\n\
        `Gone`, `x = 1`, `SLACK`, `text/plain`, `Slot::\n`";
    let found = missing(document, |path| path == "a/b.rs", &words);
    assert_eq!(found, [(1, "Plan::check".to_owned()), (1, "a/c.rs".to_owned()), (7, "Gone".to_owned())]);
}
