//! The peers, links and settings of a run as tables.

use fusionllm_graph::units;
use fusionllm_protocol::{MemberStatus, Standing};
use fusionllm_workspace::run_dir::{LinkSummary, PeerSummary};
use maud::{Markup, html};

use super::RunView;

/// Rows of a table at most. A file with all of them is in the run directory.
const MAX_ROWS: usize = 200;

/// A figure, or a dash if it is not known.
pub(super) fn known(figure: Option<f64>, words: impl Fn(f64) -> String) -> String {
    figure.map_or_else(|| "–".to_owned(), words)
}

fn size(figure: Option<u64>) -> String {
    known(figure.map(|n| n as f64), |n| units::bytes(n as u64))
}

/// A part of the table that is left out.
fn more(count: usize) -> Markup {
    html! {
        @if count > MAX_ROWS { p.note { "and " (count - MAX_ROWS) " more, which summary.json has" } }
    }
}

/// A table in a frame that scrolls on its own where the page is narrow.
pub(super) fn table(name: &str, heads: &[&str], rows: &Markup) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(name) {
            table {
                thead { tr { @for head in heads { th scope="col" { (head) } } } }
                tbody { (rows) }
            }
        }
    }
}

/// How a member stands, in one word and with the class that colours it.
fn standing(member: &MemberStatus) -> (String, &'static str) {
    match (member.standing, member.silent_s) {
        (Standing::Present, Some(s)) if s >= 3.0 => (format!("silent for {}", units::seconds(s.floor())), "warn"),
        (Standing::Present, _) if member.peer.is_none() => ("spare".into(), "idle"),
        (Standing::Present, _) => ("present".into(), "good"),
        (Standing::Silent, Some(s)) => (format!("silent for {}", units::seconds(s.floor())), "warn"),
        (Standing::Silent, None) => ("silent".into(), "warn"),
        (Standing::Away, _) => ("lost".into(), "bad"),
        (Standing::Out, _) => ("out".into(), "bad"),
    }
}

pub(super) fn peers(run: &RunView<'_>) -> Markup {
    let figures = run.summary.map(|s| &s.peers[..]).unwrap_or_default();
    let members = run.status.map(|s| &s.members[..]).unwrap_or_default();
    let of = |peer: &PeerSummary| members.iter().find(|m| m.name == peer.name);
    // A member that has no share, or that has lost it, has no figures.
    let rest = members.iter().filter(|m| figures.iter().all(|p| p.name != m.name));
    let without: Vec<(PeerSummary, &MemberStatus)> = rest.map(|m| (known_of(m), m)).collect();
    let with = figures.iter().map(|p| (p, of(p)));
    let all: Vec<_> = with.chain(without.iter().map(|(p, m)| (p, Some(*m)))).collect();
    let heads = ["Peer", "State", "Backend", "Device", "Operators", "Computing a step", "Memory"];
    let rows = html! {
        @for (peer, member) in all.iter().take(MAX_ROWS) {
            tr {
                th scope="row" { (peer.name) }
                (state(*member, run))
                td { (peer.backend) }
                td { (peer.device) }
                td.n { (known((peer.operators > 0).then_some(peer.operators as f64), |n| n.to_string())) }
                td.n {
                    (known(peer.compute_s, units::seconds))
                    (beside(peer.predicted_compute_s.map(units::seconds)))
                }
                td.n {
                    (size(peer.peak_memory_bytes))
                    (beside(peer.predicted_memory_bytes.map(units::bytes)))
                }
            }
        }
    };
    html! {
        @if !all.is_empty() {
            h2 { "Peers" }
            (table("Peers", &heads, &rows))
            (more(all.len()))
        }
    }
}

/// The figures of a member that its summary does not have.
fn known_of(member: &MemberStatus) -> PeerSummary {
    PeerSummary {
        name: member.name.clone(),
        backend: member.backend.clone(),
        device: member.device.clone(),
        operators: member.operators.unwrap_or(0),
        compute_s: member.compute_s,
        predicted_compute_s: member.predicted_compute_s,
        ..PeerSummary::default()
    }
}

fn state(member: Option<&MemberStatus>, run: &RunView<'_>) -> Markup {
    let (word, class) = match member {
        Some(member) => standing(member),
        None if run.status.is_some() => ("–".to_owned(), "idle"),
        None => ("trained".to_owned(), "good"),
    };
    html! { td { span.pill.(class) { (word) } } }
}

/// The prediction, which stands smaller beside a measurement.
fn beside(predicted: Option<String>) -> Markup {
    html! { @if let Some(predicted) = predicted { small { "predicted " (predicted) } } }
}

pub(super) fn links(run: &RunView<'_>) -> Markup {
    let mut links: Vec<&LinkSummary> = run.summary.map(|s| s.links.iter().collect()).unwrap_or_default();
    links.sort_by_key(|l| std::cmp::Reverse(l.bytes_per_step));
    let heads = ["From", "To", "Codec", "Ratio", "A step", "Rate while sending"];
    let rows = html! {
        @for link in links.iter().take(MAX_ROWS) {
            tr {
                th scope="row" { (link.from) }
                td { (link.to) }
                td { (link.codec) }
                td.n { (known(link.ratio, |r| format!("{r:.1}"))) }
                td.n { (size(link.bytes_per_step)) }
                td.n {
                    (known(link.measured_bytes_per_s, units::rate))
                    (beside(predicted_rate(run, link)))
                }
            }
        }
    };
    html! {
        @if !links.is_empty() {
            h2 { "Links" }
            (table("Links", &heads, &rows))
            (more(links.len()))
        }
    }
}

/// The rate that the plan was made with.
fn predicted_rate(run: &RunView<'_>, link: &LinkSummary) -> Option<String> {
    let cluster = &run.prediction?.saved.cluster;
    let rate = cluster.link(cluster.find(&link.from)?, cluster.find(&link.to)?)?.bandwidth;
    rate.is_finite().then(|| units::rate(rate))
}

pub(super) fn settings(run: &RunView<'_>) -> Markup {
    let settings = fusionllm_workspace::run_dir::settings(run.job);
    let rows = html! {
        @for (key, value) in settings {
            tr { th scope="row" { (key) } td { code { (value) } } }
        }
    };
    html! {
        @if !run.job.is_empty() {
            details {
                summary { h2 { "Settings" } }
                (table("Settings", &["Key", "Value"], &rows))
            }
        }
    }
}
