//! Text in columns and lines that fit an ordinary terminal.

use std::fmt;

/// Columns of a terminal that nobody has widened.
pub(crate) const WIDTH: usize = 80;

/// The text in lines of at most `width` characters, broken at blanks. All lines but the first are indented.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            Some(_) => lines.push(format!("  {word}")),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// One of several facts below each other: a name, and its value in a column of values.
pub(crate) fn fact(name: &str, value: &str) -> String {
    format!("{name:<12}{value}\n")
}

/// Text in aligned columns.
pub(crate) struct Table<const N: usize> {
    /// The headings first.
    rows: Vec<[String; N]>,
    right: Vec<usize>,
}

/// A longer cell widens its own row alone.
const MAX_COLUMN_WIDTH: usize = 44;

impl<const N: usize> Table<N> {
    /// A table with these headings. The columns numbered in `right` are aligned to the right.
    pub(crate) fn new(headings: [&str; N], right: impl Into<Vec<usize>>) -> Self {
        Self { rows: vec![headings.map(String::from)], right: right.into() }
    }

    pub(crate) fn row(&mut self, cells: [String; N]) {
        self.rows.push(cells);
    }
}

impl<const N: usize> fmt::Display for Table<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = |cell: &String| cell.chars().count();
        let widths: [usize; N] = std::array::from_fn(|i| {
            let lengths = self.rows.iter().map(|row| length(&row[i]));
            lengths.filter(|n| *n <= MAX_COLUMN_WIDTH).max().unwrap_or(0)
        });
        for row in &self.rows {
            let mut line = String::new();
            for (i, (cell, width)) in row.iter().zip(widths).enumerate() {
                let padded =
                    if self.right.contains(&i) { format!("  {cell:>width$}") } else { format!("  {cell:<width$}") };
                line += &padded;
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_at_blanks() {
        assert_eq!(wrap("one two three four", 9), ["one two", "  three", "  four"]);
        assert_eq!(wrap("averylongword x", 5), ["averylongword", "  x"]);
        assert_eq!(wrap("", 5), [""]);
    }
}
