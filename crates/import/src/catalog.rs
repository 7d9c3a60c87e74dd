use std::fmt::Write;

use crate::aten;
use crate::program::INLINED;

/// The table of supported operators in Markdown, generated from the translations themselves.
pub fn operators() -> String {
    let mut out = String::from(
        "# Operators that imported models may use\n\n\
         This page is generated from the importer's own table (`crates/import/src/aten`); a test holds it against that. An operator stands with the\n\
         overloads that are known, as `torch.export` writes them: composite ones as exported, and those that `run_decompositions()` leaves. The form in\n\
         place (`add_` for `add`) is known with each.\n",
    );
    let mut count = 0;
    let libraries = aten::ATEN.iter().map(|(title, entries)| (format!("{title} (`aten`)"), "aten", *entries));
    let others = aten::OTHERS.iter().map(|(library, entries)| (format!("`{library}`"), *library, *entries));
    for (title, library, entries) in libraries.chain(others) {
        // Writing to a string does not fail.
        let _ = write!(out, "\n## {title}\n\n| operator | overloads |\n| --- | --- |\n");
        let mut rows: Vec<(&str, String)> = entries.iter().map(|e| (e.name, e.overloads.join(", "))).collect();
        rows.sort();
        for (name, overloads) in rows {
            count += 1;
            let _ =
                writeln!(out, "| `{library}.{name}` | {} |", if overloads.is_empty() { "–".into() } else { overloads });
        }
    }
    let _ = write!(out, "\n## Graphs in graphs\n\nThese are replaced by what they hold: ");
    let names: Vec<String> = INLINED.iter().map(|n| format!("`higher_order.{n}`")).collect();
    let _ = writeln!(out, "{}.\n\n{count} operators in all.", names.join(", "));
    out
}
