use std::fmt;

/// Text in aligned columns.
pub(crate) struct Table<const N: usize> {
    /// The headings first.
    rows: Vec<[String; N]>,
    right: Vec<usize>,
}

/// A cell longer than this pushes the rest of its own line instead of everybody's.
const WIDEST: usize = 44;

impl<const N: usize> Table<N> {
    /// With these headings; columns of numbers stand to the `right`.
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
            lengths.filter(|n| *n <= WIDEST).max().unwrap_or(0)
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
