//! Pages about runs.

#![allow(clippy::unwrap_used)]

use fusionllm_view::page::{self, RunView};
use run::Run;

#[path = "support/run.rs"]
mod run;

/// The elements of a page that are open when they should not be. Void elements of HTML are closed by themselves.
fn unclosed(page: &str) -> Vec<String> {
    const VOID: [&str; 4] = ["meta", "link", "br", "!DOCTYPE"];
    let mut open: Vec<String> = Vec::new();
    let body = page.split("<style>").next().unwrap().to_owned() + page.split("</style>").nth(1).unwrap();
    let body = body.split("<script").next().unwrap();
    for tag in body.split('<').skip(1) {
        let tag = tag.split('>').next().unwrap();
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "{tag}");
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name.to_owned());
        }
    }
    open
}

#[test]
fn names_of_strangers_are_escaped() {
    let run = Run::new(60, 3);
    for page in [
        page::report(&[run.view()]),
        page::report(&[run.view(), run.view()]),
        page::served(
            "a <img",
            &page::parts(&run.view()).map(|(name, html)| (name, html.into_string())),
            "a-nonce",
            true,
        ),
    ] {
        assert!(!page.contains("<img"), "a name became an element");
        assert!(!page.contains("onerror=alert(1)>\"'"), "a name left its attribute");
        assert!(page.contains("&lt;img src=x onerror=alert(1)&gt;"));
        assert_eq!(unclosed(&page), ["html", "body"]);
    }
}

#[test]
fn a_page_needs_nothing_else() {
    let run = Run::new(60, 3);
    let page = page::report(&[run.view()]);
    for outside in ["http://", "https://", "//cdn", "@import", "url("] {
        let found = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!found.contains(outside), "{outside}");
    }
}

#[test]
fn a_large_run_is_a_small_page() {
    let run = Run::new(10_000, 100);
    let page = page::report(&[run.view()]);
    assert!(page.len() < 300_000, "{} bytes", page.len());
    assert_eq!(unclosed(&page), ["html", "body"]);
}

/// The part of a page with this name.
fn part(run: &RunView<'_>, name: &str) -> String {
    page::parts(run).into_iter().find(|(id, _)| *id == name).unwrap().1.into_string()
}

#[test]
fn a_run_without_anything_has_a_page() {
    let run = RunView {
        name: "empty",
        job: &toml::Table::new(),
        metrics: &[],
        validations: &[],
        events: &[],
        prediction: None,
        last_step: None,
        summary: None,
        status: None,
    };
    let page = page::report(&[run, run]);
    assert!(page.contains("No step is done yet"));
    assert_eq!(part(&run, "step"), "");
}

#[test]
fn what_happened_stands_on_the_curve() {
    let run = Run::new(60, 3);
    let curves = part(&run.view(), "curves");
    assert!(
        curves.contains("✕") && curves.contains("↻"),
        "the loss of a peer, and the step that training went back to"
    );
    let peers = part(&run.view(), "peers");
    assert!(peers.contains("<span class=\"pill bad\">lost</span>"), "{peers}");
    let step = part(&run.view(), "step");
    assert!(step.contains("predicted") && step.contains("measured"));
}

#[test]
fn runs_are_compared_by_the_settings_that_differ() {
    let (one, two) = (Run::new(60, 3), Run::new(40, 3));
    let page = page::report(&[one.view(), two.view()]);
    let head = page.split("<thead>").nth(1).unwrap().split("</thead>").next().unwrap();
    assert!(head.contains("train.steps") && !head.contains("model.family"), "{head}");
}
