//! Documents can be read in any editor: no line of a Markdown file is too long.

use super::{files, root};

const MAX_CHARACTERS: usize = 120;

/// Number and length of each line that is too long. Rows of tables and blocks of code cannot be wrapped.
fn long_lines(document: &str) -> Vec<(usize, usize)> {
    let mut in_code = false;
    let mut long = Vec::new();
    for (number, line) in (1..).zip(document.lines()) {
        let start = line.trim_start();
        if start.starts_with("```") {
            in_code = !in_code;
        }
        let length = line.chars().count();
        if !in_code && !start.starts_with('|') && length > MAX_CHARACTERS {
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
    let document = format!("{long}\n{fits}\n| {long} |\n```text\n{long}\n```\n  {long}\n");
    assert_eq!(long_lines(&document), [(1, 121), (7, 123)]);
}
