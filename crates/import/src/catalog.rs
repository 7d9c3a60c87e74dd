//! The document that lists the supported operators.

use std::fmt::Write;

use crate::analysis::INLINED_CALLS;
use crate::aten;

/// The table of supported operators in Markdown, generated from the importer's own table.
pub fn operator_table() -> String {
    let mut out = String::from(
        "# Operators that imported models may use\n\n\
         This page is generated from the importer's own table in `crates/import/src/aten`. A test compares the\n\
         two, and `UPDATE_DOCS=1 cargo test -p fusionllm-import` writes this page again.\n\n\
         Each row names an operator and its supported overloads: composite operators as `torch.export` writes them,\n\
         and the operators that `run_decompositions()` leaves. Save what `torch.export.export` returns. An archive\n\
         after `run_decompositions()` has lost `detach` and `no_grad`, so the gradients of a model that uses them are\n\
         wrong, and the import warns about it. An `aten` operator also works in place, as `add_` does for `add`. An\n\
         import that meets another operator fails and names all that are missing.\n",
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
    let _ = write!(out, "\n## Graphs in graphs\n\nThe importer replaces each of these by the graph inside it:\n\n");
    for name in INLINED_CALLS {
        let _ = writeln!(out, "- `higher_order.{name}`");
    }
    let _ = writeln!(out, "\n{count} operators in all.");
    out
}
