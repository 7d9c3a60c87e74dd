//! Several runs side by side.

use fusionllm_graph::units;
use fusionllm_workspace::run_dir::differing_settings;
use maud::{Markup, html};

use super::chart::Chart;
use super::tables::{known, table};
use super::{RunView, curves};

/// Settings that follow from others.
const FOLLOWING: [&str; 1] = ["train.stop"];

/// The losses of runs in one chart, and a table of their figures and of the settings in which they differ.
pub(super) fn table_and_chart(runs: &[RunView<'_>]) -> Markup {
    let all = runs.iter().enumerate().map(|(i, run)| curves::losses(run.name, i, run.metrics)).collect();
    let title = "Training loss".to_owned();
    let chart = Chart { title, format: curves::loss, curves: all, marks: Vec::new(), from_zero: false };
    let differ = differing_settings(runs.iter().map(|run| run.job));
    let differ: Vec<_> = differ.into_iter().filter(|s| !FOLLOWING.contains(&s.key.as_str())).collect();
    let mut heads = vec!["Run", "Steps", "Loss", "Validation", "A step", "Predicted", "Sent a step"];
    heads.extend(differ.iter().map(|setting| setting.key.as_str()));
    let rows = html! {
        @for (i, run) in runs.iter().enumerate() {
            @let last = run.metrics.last();
            @let validation = run.metrics.iter().rev().find_map(|m| m.val_loss);
            @let step_s = run.summary.and_then(|s| s.median_step_s).or(last.map(|m| m.step_s));
            tr {
                th scope="row" { span.{ "c" (i % 6) } { i.line {} } (run.name) }
                td.n { (last.map_or(0, |m| m.step)) }
                td.n { (known(last.and_then(|m| m.loss), curves::loss)) }
                td.n { (known(validation, curves::loss)) }
                td.n { (known(step_s, units::seconds)) }
                td.n { (known(run.summary.and_then(|s| s.predicted_step_s), units::seconds)) }
                td.n { (known(last.map(|m| m.bytes_sent as f64), |n| units::bytes(n as u64))) }
                @for setting in &differ { td { code { (setting.shown(i)) } } }
            }
        }
    };
    html! {
        section { div.charts { (chart.render()) } }
        section { h2 { "Figures, and settings that differ" } (table("Figures of the runs", &heads, &rows)) }
    }
}
