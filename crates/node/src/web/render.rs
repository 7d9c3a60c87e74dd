//! Draws a board as a page.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

use super::board::Board;

/// A drawing of a board.
pub(crate) struct Published {
    /// The whole document. Its script has the nonce that was given, and replaces the element whose `id` is the name of a
    /// fragment by that fragment.
    pub(crate) page: Arc<str>,
    /// The parts that change. Viewers are sent those that differ from the ones that they have.
    pub(crate) fragments: BTreeMap<&'static str, Arc<str>>,
}

/// The events that are shown, the last ones.
const SHOWN: usize = 100;

const SCRIPT: &str = "
const events = new EventSource('/events');
const replace = event => document.getElementById(event.type).outerHTML = event.data;
['status', 'happened'].forEach(name => events.addEventListener(name, replace));
events.addEventListener('over', () => events.close());
";

/// Draws a board. The page's script is allowed by `nonce`, which nobody can guess.
pub(crate) fn render(board: &Board, nonce: &str) -> Published {
    let fragments: BTreeMap<&'static str, Arc<str>> =
        BTreeMap::from([("happened", happened(board).into()), ("status", status(board).into())]);
    let title = escape(&board.directory);
    let page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title></head>\n\
         <body><h1>{title}</h1>\n{}\n{}\n<script nonce=\"{nonce}\">{SCRIPT}</script></body></html>\n",
        fragments["status"], fragments["happened"]
    );
    Published { page: page.into(), fragments }
}

fn status(board: &Board) -> String {
    let mut html = "<section id=\"status\">".to_owned();
    if let Some(metrics) = board.steps.last() {
        let loss = metrics.loss.map_or_else(|| "not finite".to_owned(), |loss| format!("{loss:.4}"));
        let best = board.steps.iter().filter_map(|m| m.loss).fold(f64::INFINITY, f64::min);
        let _ = write!(html, "<p>step {}: loss {loss}, at best {best:.4}</p>", metrics.step);
    }
    if let Some(look) = &board.look {
        let _ = write!(html, "<p>{} of {} steps</p><ul>", look.status.phase.name(), look.status.steps);
        for member in &look.status.members {
            let _ = write!(html, "<li>{}</li>", escape(&member.name));
        }
        html += "</ul>";
    }
    html + "</section>"
}

fn happened(board: &Board) -> String {
    let mut html = "<ul id=\"happened\">".to_owned();
    for event in board.events.iter().rev().take(SHOWN).rev() {
        for line in event.event.lines() {
            let _ = write!(html, "\n<li>{}</li>", escape(&line));
        }
    }
    html + "</ul>"
}

/// A text as HTML has it, between tags and in quoted attributes.
fn escape(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => html += "&amp;",
            '<' => html += "&lt;",
            '>' => html += "&gt;",
            '"' => html += "&quot;",
            '\'' => html += "&#39;",
            c => html.push(c),
        }
    }
    html
}
