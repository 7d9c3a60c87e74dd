//! A link of a document to another file of the repository leads somewhere, and so does an `#anchor`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use pulldown_cmark::{Event, Tag, TagEnd};

use super::documents::{elements, line};
use super::{files, root};

/// Where the links of a document lead, with their lines. Links to the web are left out.
fn links(document: &str) -> impl Iterator<Item = (usize, String)> {
    elements(document).filter_map(|(event, range)| match event {
        Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) if !dest_url.contains(':') => {
            Some((line(document, range.start), dest_url.into_string()))
        }
        _ => None,
    })
}

/// The anchors that GitHub makes of a document's headings: one that is there already gets a number.
fn anchors(document: &str) -> BTreeSet<String> {
    let (mut anchors, mut heading) = (BTreeSet::new(), String::new());
    for (event, _) in elements(document) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading.clear(),
            Event::Text(text) | Event::Code(text) => heading += &text.to_lowercase().replace(' ', "-"),
            Event::End(TagEnd::Heading(_)) => {
                heading.retain(|c| c.is_alphanumeric() || c == '-' || c == '_');
                let numbered = (1..).map(|number| format!("{heading}-{number}"));
                let fresh = std::iter::once(heading.clone()).chain(numbered).find(|name| !anchors.contains(name));
                anchors.extend(fresh);
            }
            _ => {}
        }
    }
    anchors
}

/// The links of the document at `path` that lead nowhere, with their lines.
fn dead(path: &str, documents: &BTreeMap<String, String>) -> Vec<(usize, String)> {
    let root = root();
    let leads = |link: &str| {
        let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
        let folder = Path::new(path).parent().unwrap();
        let target = if target.is_empty() { root.join(path) } else { root.join(folder).join(target) };
        let Ok(target) = target.canonicalize() else { return false };
        let Ok(target) = target.strip_prefix(&root) else { return false };
        let anchors = documents.get(target.to_str().unwrap()).map(|text| anchors(text)).unwrap_or_default();
        anchor.is_empty() || anchors.contains(anchor)
    };
    links(&documents[path]).filter(|(_, link)| !leads(link)).collect()
}

#[test]
fn links_lead_somewhere() {
    let documents = files(&root(), "md");
    let mut found = Vec::new();
    for path in documents.keys() {
        found.extend(dead(path, &documents).into_iter().map(|(line, link)| format!("{path}:{line}: {link}")));
    }
    assert!(found.is_empty(), "links that lead nowhere:\n{}", found.join("\n"));
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let text = "# The `Plan`, again!\n\n[a](../README.md) [b](worker.md#messages) [c](../deploy)\n\n## Again\n\n## Again\n\
        [d](#the-plan-again) [e](#again-1) [f](https://example.com/gone.md) ![g](images/plan.svg)\n\n```text\n[h](gone.md)\n```\n\
        [i](README.md) ![j](images/gone.svg) [k](#again-2)\n[l](../README.md#gone) [m][n] [o](../..) [p](/README.md)\n\n[n]: gone.md\n";
    let documents = [("docs/job.md", text), ("docs/worker.md", "# Messages\n"), ("README.md", "# Gone too\n")];
    let documents = documents.map(|(path, text)| (path.to_owned(), text.to_owned())).into();
    let found = dead("docs/job.md", &documents);
    let found: Vec<_> = found.iter().map(|(line, link)| (*line, &link[..])).collect();
    assert_eq!(
        found,
        [
            (13, "README.md"),
            (13, "images/gone.svg"),
            (13, "#again-2"),
            (14, "../README.md#gone"),
            (14, "gone.md"),
            (14, "../.."),
            (14, "/README.md")
        ]
    );
}
