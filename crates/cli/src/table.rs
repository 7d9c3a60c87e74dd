//! Text in columns and lines that fit the terminal.

use std::fmt;

use console::Term;

/// Columns of a terminal that nobody has widened, and of what is no terminal.
const USUAL_WIDTH: usize = 80;

/// No line is broken at fewer columns, however narrow the terminal.
const LEAST_WIDTH: usize = 40;

/// A shortened cell keeps at least this many characters.
const LEAST_COLUMN: usize = 8;

/// The column at which the values of facts begin.
const FACTS: usize = 12;

/// The columns of the terminal at standard output, or the usual ones.
pub(crate) fn width() -> usize {
    columns(&Term::stdout()).unwrap_or(USUAL_WIDTH)
}

/// The columns of a terminal. `None` for a file or a pipe.
pub(crate) fn columns(terminal: &Term) -> Option<usize> {
    // Tests expect the same lines on every terminal.
    let size = terminal.size_checked().filter(|_| !cfg!(test));
    size.map(|(_, columns)| usize::from(columns).max(LEAST_WIDTH))
}

/// The text in lines of at most `width` characters, broken at blanks. All lines but the first are indented.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    wrap_under(text, width, 2)
}

/// The same, with an indent of this many blanks.
pub(crate) fn wrap_under(text: &str, width: usize, indent: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let length = word.chars().count();
        // A word that no line has room for, such as a ticket, stays in its command.
        let is_too_long = indent + length > width;
        match lines.last_mut() {
            Some(line) if is_too_long || line.chars().count() + 1 + length <= width => {
                line.push(' ');
                line.push_str(word);
            }
            Some(_) => lines.push(format!("{:indent$}{word}", "")),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Each line of the text in lines of at most `width` characters. The text has no line's end at its own end.
pub(crate) fn wrap_lines(text: &str, width: usize) -> String {
    text.split('\n').flat_map(|line| wrap(line, width)).collect::<Vec<_>>().join("\n")
}

/// One of several facts below each other: a name, and its value in a column of values.
pub(crate) fn fact(name: &str, value: &str) -> String {
    let lines = wrap_under(&format!("{name:<FACTS$}{value}"), width(), FACTS);
    lines.join("\n") + "\n"
}

/// A fact that is a command. A line that is too long for the terminal goes on after a backslash, as a shell reads it.
/// A command with quotes is left as it is, because the lines must not end inside them.
pub(crate) fn command_fact(name: &str, command: &str) -> String {
    let line = format!("{name:<FACTS$}{command}");
    match columns(&Term::stdout()).filter(|_| !command.contains(['\'', '"'])) {
        Some(columns) => wrap_under(&line, columns - 2, FACTS + 2).join(" \\\n") + "\n",
        None => line + "\n",
    }
}

/// The text with an ellipsis in its middle, where it has more than `width` characters: names that begin alike often
/// differ at their ends.
pub(crate) fn shorten(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let end: String = text.chars().skip(length - kept / 2).collect();
    text.chars().take(kept - kept / 2).chain(['…']).chain(end.chars()).collect()
}

/// Text in aligned columns, which are together not wider than the terminal.
pub(crate) struct Table {
    /// The headings first. All rows have as many cells.
    rows: Vec<Vec<String>>,
    right: Vec<usize>,
}

impl Table {
    /// A table with these headings. The columns numbered in `right` are aligned to the right. They hold numbers, which
    /// are never shortened.
    pub(crate) fn new<'a>(headings: impl IntoIterator<Item = &'a str>, right: impl Into<Vec<usize>>) -> Self {
        Self { rows: vec![headings.into_iter().map(String::from).collect()], right: right.into() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The widths of the columns, the widest texts shortened as far as the terminal asks for.
    fn widths(&self, room: usize) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |i: usize| self.rows.iter().filter_map(|row| row.get(i)).map(|cell| cell.chars().count()).max();
        let mut widths: Vec<usize> = (0..columns).map(|i| width(i).unwrap_or(0)).collect();
        while widths.iter().map(|width| width + 2).sum::<usize>() > room {
            let texts = (0..columns).filter(|i| !self.right.contains(i) && widths[*i] > LEAST_COLUMN);
            let Some(widest) = texts.max_by_key(|i| widths[*i]) else { break };
            widths[widest] -= 1;
        }
        widths
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths(width());
        for row in &self.rows {
            let mut line = String::new();
            for (i, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let cell = shorten(cell, *width);
                line +=
                    &if self.right.contains(&i) { format!("  {cell:>width$}") } else { format!("  {cell:<width$}") };
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
        assert_eq!(wrap("join averylongword now", 5), ["join averylongword", "  now"]);
        assert_eq!(wrap("", 5), [""]);
        assert_eq!(wrap_lines("one two three\n  four\n", 9), "one two\n  three\n  four\n");
    }

    #[test]
    fn a_long_value_goes_on_in_its_column() {
        assert_eq!(fact("loss", "2.5"), "loss        2.5\n");
        let long = fact("files", &"word ".repeat(20));
        let lines: Vec<&str> = long.lines().collect();
        assert_eq!(lines[0].len(), 76);
        assert!(lines[1].starts_with("            word word"), "{long}");
    }

    #[test]
    fn long_names_are_shortened_in_the_middle() {
        assert_eq!(shorten("transformer.h.0.weight", 22), "transformer.h.0.weight");
        assert_eq!(shorten("transformer.h.0.weight", 11), "trans…eight");
        assert_eq!(shorten("größer", 4), "gr…r");
        assert_eq!(shorten("ab", 1), "…");
    }

    #[test]
    fn tables_are_not_wider_than_the_terminal() {
        let mut table = Table::new(["name", "device", "bytes"], [2]);
        table.row(["a".repeat(70), "b".repeat(50), "123456789012345".into()]);
        table.row(["short".into(), "short".into(), "1".into()]);
        let text = table.to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains('…') && text.contains("  123456789012345\n"), "{text}");
        let mut narrow = Table::new(["name"; 12], []);
        narrow.row(std::iter::repeat_n("123456789".to_owned(), 12));
        assert!(narrow.to_string().contains("1234…789"), "columns keep {LEAST_COLUMN} characters: {narrow}");
    }
}
