//! The parts of a run's page.

use std::time::{Duration, UNIX_EPOCH};

use fusionllm_events::{Event, Timed};
use fusionllm_graph::units;
use fusionllm_plan::what_if_sentences;
use fusionllm_protocol::RunPhase;
use maud::{Markup, PreEscaped, html};

use super::tables::known;
use super::{Prediction, RunView, curves, tables};
use crate::picture::{self, Picture, Strip};

/// Events that the page lists. The run directory has all of them.
const MAX_EVENTS: usize = 200;

/// The names of the parts of a page, in their order.
pub const PART_NAMES: [&str; 9] = ["now", "curves", "cluster", "step", "peers", "links", "help", "events", "settings"];

/// The parts of the page of a run, in their order, each with the name of its element. A part without content is empty.
pub fn parts(run: &RunView<'_>) -> [(&'static str, Markup); 9] {
    PART_NAMES.map(|name| {
        let content = match name {
            "now" => now(run),
            "curves" => curves::curves(run),
            "cluster" => cluster(run),
            "step" => step(run),
            "peers" => tables::peers(run),
            "links" => tables::links(run),
            "help" => help(run),
            "events" => events(run),
            _ => tables::settings(run),
        };
        (name, content)
    })
}

/// A date, in words.
fn date(time: f64) -> String {
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs_f64(time.clamp(0.0, 1e11)))
}

/// The plan that the run has now: the last event of its kind.
fn planned<'a>(run: &RunView<'a>) -> Option<&'a Event> {
    run.events.iter().rev().map(|t| &t.event).find(|event| matches!(event, Event::Planned { .. }))
}

/// The phase in a word, and the class that colours it.
fn phase(run: &RunView<'_>) -> (&'static str, &'static str) {
    match run.status.map(|s| s.phase) {
        Some(RunPhase::Training) => ("training", "good"),
        Some(RunPhase::Waiting) => ("waiting for machines", "warn"),
        Some(phase) => (phase.name(), "idle"),
        None if run.summary.is_some() => ("over", "idle"),
        None => ("stopped", "warn"),
    }
}

fn now(run: &RunView<'_>) -> Markup {
    let (word, class) = phase(run);
    let mut subject = None;
    if let Some(Event::Planned { model, parameters, peers, scheduler, schedule, .. }) = planned(run) {
        let (count, over) = (units::count(*parameters as f64), units::counted(peers.len(), "peer"));
        subject = Some(format!("{model}, {count} parameters, over {over} · {scheduler}, {schedule}"));
    }
    // The status may be older than the steps.
    let step = run.metrics.last().map(|m| m.step).or(run.status.map(|s| s.step)).unwrap_or(0);
    let planned = || run.job.get("train")?.get("stop")?.as_integer()?.try_into().ok();
    let steps = run.status.map(|s| s.steps).or_else(planned);
    html! {
        header {
            h1 { (run.name) " " span.pill.(class) { (word) } }
            p {
                @if let Some(subject) = subject { (subject) }
                @if let Some(Timed { time, .. }) = run.events.first() { " · began " (date(*time)) }
            }
        }
        dl.tiles {
            (tile("Step", step.to_string(), steps.map(|n| format!("of {n}"))))
            @for (name, value, more) in figures(run) { (tile(name, value, more)) }
        }
        @if let Some(steps) = steps.filter(|n| *n > 0) {
            progress max=(steps) value=(step) aria-label="Steps done" {}
        }
    }
}

fn tile(name: &str, value: String, more: Option<String>) -> Markup {
    html! {
        div { dt { (name) } dd { (value) } @if let Some(more) = more { dd.more { (more) } } }
    }
}

/// The figures at the top of the page: a name, a value, and what stands below it.
fn figures(run: &RunView<'_>) -> Vec<(&'static str, String, Option<String>)> {
    let last = run.metrics.last();
    let validation = run.validations.last().and_then(|v| v.1);
    let median = run.status.map_or_else(|| run.summary?.median_step_s, |status| status.step_s);
    let step_s = median.or(last.map(|m| m.step_s));
    // A run that has ended expects nothing any more, but its summary has what was expected.
    let predicted = run.status.and_then(|s| s.predicted_step_s).or_else(|| run.summary?.predicted_step_s);
    let targets = match planned(run) {
        Some(Event::Planned { targets, .. }) => targets,
        _ => "tokens",
    };
    let sent = last.map(|m| units::bytes(m.bytes_sent));
    let mut figures = vec![
        (
            "Loss",
            known(last.and_then(|m| m.loss), curves::loss),
            validation.map(|loss| format!("validation {}", curves::loss(loss))),
        ),
        ("A step", known(step_s, units::seconds), predicted.map(|s| format!("predicted {}", units::seconds(s)))),
        ("Speed", known(last.map(|m| m.tokens_per_s), units::count), Some(format!("{targets} a second"))),
        ("Sent", sent.unwrap_or_else(|| "–".into()), Some("a step".to_owned())),
    ];
    let took = run.events.first().zip(run.events.last()).map(|(from, to)| to.time - from.time);
    figures.push(match run.status.and_then(|s| s.left_s) {
        Some(left) => ("Left", units::seconds(left), None),
        None => {
            let ratio = run.summary.and_then(|s| s.training_overhead_ratio);
            ("Time", known(took, units::seconds), ratio.map(|r| format!("{:.0} % of it in steps", 100.0 * r)))
        }
    });
    figures
}

fn cluster(run: &RunView<'_>) -> Markup {
    html! {
        @if let Some(Prediction { saved, simulation, changes }) = run.prediction {
            h2.unseen { "The cluster and the plan" }
            @let notes = &saved.origin.notes;
            (frame("The cluster", &picture::cluster(&saved.cluster, &saved.plan, simulation, changes, notes)))
        }
    }
}

fn step(run: &RunView<'_>) -> Markup {
    html! {
        @if let Some(picture) = step_picture(run) {
            h2.unseen { "A step" }
            (frame("A step", &picture))
        }
    }
}

/// The last step as it was predicted and as it was measured, as far as each is known.
fn step_picture(run: &RunView<'_>) -> Option<Picture> {
    let measured = run.last_step.map(Strip::measured);
    let predicted = run.prediction.map(|p| Strip::predicted(&p.simulation));
    let names: Vec<&str> = match (run.last_step, run.prediction) {
        (Some(trace), _) => trace.peers.iter().map(|p| p.name.as_str()).collect(),
        (None, Some(p)) => p.saved.cluster.devices().iter().map(|d| d.name.as_str()).collect(),
        (None, None) => return None,
    };
    // A prediction for other peers has rows of its own, which nobody has measured.
    let same = |p: &Prediction| p.saved.cluster.devices().iter().map(|d| &d.name).eq(&names);
    let predicted = predicted.filter(|_| run.prediction.is_some_and(same));
    let strips: Vec<Strip> = predicted.into_iter().chain(measured).collect();
    Some(picture::timeline(&names, &strips))
}

/// A picture in a frame that scrolls on its own where the page is narrow.
fn frame(name: &str, picture: &Picture) -> Markup {
    html! {
        div.scroll.picture tabindex="0" role="region" aria-label=(name) { (PreEscaped(picture.embedded())) }
    }
}

fn help(run: &RunView<'_>) -> Markup {
    html! {
        @if let Some(Prediction { saved, changes, .. }) = run.prediction {
            h2 { "What would help" }
            ul {
                @for line in what_if_sentences(&saved.cluster, changes).iter().chain(&saved.origin.notes) {
                    li { (line) }
                }
            }
        }
    }
}

/// The class of a line about an event, by which it is coloured.
fn class(event: &Event) -> &'static str {
    match event {
        Event::Lost { .. } | Event::LinkLost { .. } | Event::Poisoned { .. } | Event::Skipping { .. } => "bad",
        Event::NotSaved { .. } | Event::DiskFull { .. } => "bad",
        Event::Silent { .. } | Event::Waiting { .. } | Event::DiskLow { .. } | Event::CheckpointLeftOut { .. } => {
            "warn"
        }
        Event::TurnedAway { .. } => "warn",
        _ => "",
    }
}

fn events(run: &RunView<'_>) -> Markup {
    let start = run.events.first().map_or(0.0, |t| t.time);
    let told = run.events.iter().rev().filter_map(|timed| {
        // The terminal shows these two as parts of another line.
        let lines = match &timed.event {
            Event::Saved { step } => vec![format!("checkpoint of step {step} is saved")],
            Event::Finished { steps } => vec![format!("the run is over after {}", units::counted(*steps, "step"))],
            event => event.lines(),
        };
        (!lines.is_empty()).then_some((timed, lines))
    });
    // One more shows whether there are any.
    let told: Vec<_> = told.take(MAX_EVENTS + 1).collect();
    html! {
        @if !told.is_empty() {
            h2 { "What happened" }
            div.scroll.log tabindex="0" role="region" aria-label="What happened" {
                ol {
                    // The newest comes first.
                    @for (Timed { time, event }, lines) in told.iter().take(MAX_EVENTS) {
                        li.(class(event)) {
                            time title=(date(*time)) { "+" (units::seconds((time - start).max(0.0))) }
                            span { @for line in lines { (line) br; } }
                        }
                    }
                }
                @if told.len() > MAX_EVENTS { p.note { "Earlier ones are in events.jsonl." } }
            }
        }
    }
}
