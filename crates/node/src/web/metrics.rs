//! The figures of a run in Prometheus's text format, version 0.0.4.
//!
//! Figures that come from events are declared with the events. Those of the run's state are here.

use std::collections::BTreeSet;
use std::fmt::Write;

use fusionllm_events::Kind;
use fusionllm_protocol::{MemberStatus, Standing};
use fusionllm_workspace::run_dir::PeerSummary;

use super::board::{Board, Look};

/// Writes all figures of a board.
pub(super) fn exposition(board: &Board) -> String {
    let mut text = Exposition::default();
    let version = env!("CARGO_PKG_VERSION");
    text.family("fusionllm_build_info", "gauge", "The version of the broker.");
    text.sample("fusionllm_build_info", &[("version", version)], 1.0);
    for (figure, values) in board.figures.iter() {
        let kind = match figure.kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Histogram(_) => "histogram",
        };
        text.family(figure.name, kind, figure.help);
        for (label, value) in values {
            let labels = if figure.label.is_empty() { &[][..] } else { &[(figure.label, label)] };
            let Kind::Histogram(bounds) = figure.kind else {
                text.sample(figure.name, labels, value.value);
                continue;
            };
            let bucket = format!("{}_bucket", figure.name);
            for (bound, count) in bounds.iter().zip(&value.up_to) {
                text.sample(&bucket, &[("le", &bound.to_string())], *count as f64);
            }
            text.sample(&bucket, &[("le", "+Inf")], value.count as f64);
            text.sample(&format!("{}_sum", figure.name), labels, value.value);
            text.sample(&format!("{}_count", figure.name), labels, value.count as f64);
        }
    }
    if let Some(look) = &board.look {
        run(&mut text, look);
        members(&mut text, &look.status.members);
        if let Some(summary) = &look.summary {
            peers(&mut text, &summary.peers);
            text.family("fusionllm_link_bytes_per_second", "gauge", "Measured rate of a link while it sends.");
            for link in &summary.links {
                let labels = [("from", link.from.as_str()), ("to", link.to.as_str())];
                text.known("fusionllm_link_bytes_per_second", &labels, link.measured_bytes_per_s);
            }
        }
    }
    text.out
}

fn run(text: &mut Exposition, look: &Look) {
    let status = &look.status;
    text.family("fusionllm_target_step", "gauge", "The step at which the run stops.");
    text.sample("fusionllm_target_step", &[], status.steps as f64);
    text.family("fusionllm_generation", "gauge", "The number of the run's membership and plan.");
    text.sample("fusionllm_generation", &[], f64::from(status.generation));
    text.family("fusionllm_remaining_seconds", "gauge", "Seconds until the last step is done.");
    text.known("fusionllm_remaining_seconds", &[], status.left_s);
    text.family("fusionllm_phase_info", "gauge", "1 for the phase that the run is in.");
    text.sample("fusionllm_phase_info", &[("phase", status.phase.name())], 1.0);
}

/// The standings of members. Those that are out are no members any more.
const STANDINGS: [(Standing, &str); 3] =
    [(Standing::Present, "present"), (Standing::Silent, "silent"), (Standing::Away, "away")];

fn members(text: &mut Exposition, members: &[MemberStatus]) {
    text.family("fusionllm_peers", "gauge", "Members of the run, spares among them, by standing.");
    for (standing, name) in STANDINGS {
        let count = members.iter().filter(|m| m.standing == standing).count();
        text.sample("fusionllm_peers", &[("standing", name)], count as f64);
    }
    text.family("fusionllm_peer_info", "gauge", "1 for each member, with its backend and device.");
    for m in members {
        let labels = [("peer", m.name.as_str()), ("backend", &m.backend), ("device", &m.device)];
        text.sample("fusionllm_peer_info", &labels, 1.0);
    }
    let rows: [(&str, &str, fn(&MemberStatus) -> Option<f64>); 4] = [
        ("fusionllm_peer_compute_seconds", "Median seconds that a peer computes in a step.", |m| m.compute_s),
        ("fusionllm_peer_predicted_compute_seconds", "Seconds that a peer is predicted to compute in a step.", |m| {
            m.predicted_compute_s
        }),
        ("fusionllm_peer_silent_seconds", "Seconds since a member was last heard.", |m| m.silent_s),
        ("fusionllm_peer_share_bytes", "Bytes of the parameters, buffers and optimizer state of a peer.", |m| {
            m.share_bytes.map(|bytes| bytes as f64)
        }),
    ];
    for (name, help, value) in rows {
        text.family(name, "gauge", help);
        members.iter().for_each(|m| text.known(name, &[("peer", &m.name)], value(m)));
    }
}

fn peers(text: &mut Exposition, peers: &[PeerSummary]) {
    let rows: [(&str, &str, fn(&PeerSummary) -> Option<u64>); 3] = [
        ("fusionllm_peer_memory_bytes", "Peak of the bytes that a peer has allocated.", |p| p.peak_memory_bytes),
        ("fusionllm_peer_predicted_memory_bytes", "Predicted peak of the bytes that a peer allocates.", |p| {
            p.predicted_memory_bytes
        }),
        ("fusionllm_peer_resident_memory_bytes", "Peak resident memory of a peer's process.", |p| {
            p.resident_memory_bytes
        }),
    ];
    for (name, help, value) in rows {
        text.family(name, "gauge", help);
        peers.iter().for_each(|p| text.known(name, &[("peer", &p.name)], value(p).map(|bytes| bytes as f64)));
    }
}

/// The text so far.
#[derive(Default)]
struct Exposition {
    out: String,
    /// The samples of the present family. Prometheus refuses a whole text with one of them twice.
    seen: BTreeSet<String>,
}

impl Exposition {
    /// Begins a family: the samples of a name.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.seen.clear();
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn known(&mut self, name: &str, labels: &[(&str, &str)], value: Option<f64>) {
        if let Some(value) = value {
            self.sample(name, labels, value);
        }
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let mut sample = name.to_owned();
        for (i, (label, value)) in labels.iter().enumerate() {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(sample, "{}{label}=\"{value}\"", if i == 0 { '{' } else { ',' });
        }
        sample += if labels.is_empty() { "" } else { "}" };
        if self.seen.insert(sample.clone()) {
            // Rust writes NaN as Prometheus does, and infinity is not among our figures.
            let _ = writeln!(self.out, "{sample} {value}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_samples_are_there_once() {
        let mut text = Exposition::default();
        text.family("x", "gauge", "A figure.");
        text.sample("x", &[("peer", "a\"b\\c\nd"), ("to", "é")], 1.5);
        text.sample("x", &[("peer", "a\"b\\c\nd"), ("to", "é")], 2.5);
        text.sample("x", &[], 1e9);
        let lines = "# HELP x A figure.\n# TYPE x gauge\nx{peer=\"a\\\"b\\\\c\\nd\",to=\"é\"} 1.5\nx 1000000000\n";
        assert_eq!(text.out, lines);
    }
}
