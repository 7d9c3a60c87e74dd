//! The curves of a run: its loss, and its speed.

use fusionllm_events::{Event, StepMetrics, Timed};
use fusionllm_graph::units;
use maud::{Markup, html};

use super::RunView;
use super::chart::{Chart, Curve, Mark, Shape};

/// The most marks over a curve. Of more, the last ones are shown.
const MAX_MARKS: usize = 40;

pub(super) fn loss(x: f64) -> String {
    match x.abs() {
        a if (0.01..1000.0).contains(&a) => format!("{x:.3}"),
        _ => format!("{x:.2e}"),
    }
}

/// The losses of steps.
pub(super) fn losses(name: &str, color: usize, metrics: &[StepMetrics]) -> Curve {
    let points = metrics.iter().map(|m| (m.step, m.loss)).collect();
    Curve { name: name.to_owned(), color, shape: Shape::Line, points }
}

pub(super) fn curves(run: &RunView<'_>) -> Markup {
    let marks = || marks(run.events);
    let validation = run.metrics.iter().filter(|m| m.val_loss.is_some()).map(|m| (m.step, m.val_loss)).collect();
    let validation = Curve { name: "validation".into(), color: 1, shape: Shape::Dots, points: validation };
    let mut curves = vec![losses("training", 0, run.metrics)];
    curves.extend(Some(validation).filter(|c| !c.points.is_empty()));
    let of_loss = Chart { title: "Loss".into(), format: loss, curves, marks: marks(), from_zero: false };

    let measured = run.metrics.iter().map(|m| (m.step, Some(m.step_s))).collect();
    let mut curves = vec![Curve { name: "measured".into(), color: 2, shape: Shape::Line, points: measured }];
    let predicted = predicted(run);
    if !predicted.is_empty() {
        curves.push(Curve { name: "predicted".into(), color: 3, shape: Shape::Dashed, points: predicted });
    }
    let of_time =
        Chart { title: "Time of a step".into(), format: units::seconds, curves, marks: marks(), from_zero: true };
    html! {
        @if run.metrics.is_empty() {
            h2 { "Curves" }
            p.empty { "No step is done yet." }
        } @else {
            h2 { "Curves" }
            div.charts { (of_loss.render()) (of_time.render()) }
        }
    }
}

/// The predicted time of a step, which changes with each plan.
fn predicted(run: &RunView<'_>) -> Vec<(u64, Option<f64>)> {
    let (Some(first), Some(last)) = (run.metrics.first(), run.metrics.last()) else { return Vec::new() };
    let mut points: Vec<(u64, Option<f64>)> = Vec::new();
    let (mut at, mut now) = (first.step, None);
    for Timed { event, .. } in run.events {
        match event {
            Event::Planned { predicted_step_s, .. } => now = *predicted_step_s,
            Event::Started { incidents } => {
                // Training may have gone back, so that the last plan is the one that counts.
                let from = incidents.iter().map(|i| i.restarted_at + 1).max().unwrap_or(first.step);
                at = from.clamp(first.step, last.step);
                points.retain(|(step, _)| *step < at);
                if let Some(before) = points.last().and_then(|(_, value)| *value) {
                    points.push((at, Some(before)));
                }
                points.push((at, now));
            }
            _ => {}
        }
    }
    if points.iter().all(|(_, value)| value.is_none()) {
        return Vec::new();
    }
    points.push((last.step.max(at), now));
    points
}

/// The events that a curve may show the effect of.
fn marks(events: &[Timed]) -> Vec<Mark> {
    let mark = |Timed { event, .. }: &Timed| {
        let (step, sign) = match event {
            Event::Lost { step, used: true, .. } => (*step, '✕'),
            Event::Started { incidents } => (incidents.first()?.restarted_at, '↻'),
            Event::Codecs { step, .. } => (*step, '◆'),
            Event::Step(metrics) if metrics.skipped => (metrics.step, '!'),
            Event::Poisoned { step, .. } | Event::NotSaved { step, .. } => (*step, '!'),
            _ => return None,
        };
        Some(Mark { step, sign, words: event.lines().join("; ") })
    };
    let mut marks: Vec<Mark> = events.iter().filter_map(mark).collect();
    marks.drain(..marks.len().saturating_sub(MAX_MARKS));
    marks
}
