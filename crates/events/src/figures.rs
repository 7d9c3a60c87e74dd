//! The figures that monitoring reads, each with the events that it comes from.

use std::collections::BTreeMap;

use crate::{Event, StepMetrics};

/// How the values of a figure come together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// The last value counts.
    Gauge,
    /// Values add up.
    Counter,
    /// Values are counted by their size, up to each of these bounds.
    Histogram(&'static [f64]),
}

/// A figure of a run.
pub struct Figure {
    /// Its name, with its unit, as Prometheus's conventions want it.
    pub name: &'static str,
    /// How its values come together.
    pub kind: Kind,
    /// Its meaning.
    pub help: &'static str,
    /// The name of the label that tells values apart; empty if there is only one value.
    pub label: &'static str,
    /// The values that an event has, each with its label.
    of: for<'e> fn(&'e Event) -> Vec<(&'e str, f64)>,
}

/// Bounds for the seconds of a step, from a model for trials to a large one over slow links.
const STEP_SECONDS: &[f64] = &[0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0];

/// All figures that come from events. Counters begin at 0 with the broker's process.
pub const FIGURES: &[Figure] = &[
    gauge("fusionllm_step", "Steps done.", |e| of_step(e, |m| Some(m.step as f64))),
    gauge("fusionllm_loss", "Mean loss over the targets of the last step.", |e| of_step(e, |m| m.loss)),
    gauge("fusionllm_gradient_norm", "Global norm of the gradient of the last step, before clipping.", |e| {
        of_step(e, |m| m.grad_norm)
    }),
    gauge("fusionllm_learning_rate", "Learning rate of the last step.", |e| of_step(e, |m| Some(m.lr))),
    // A summary could not be added up over runs, and its quantiles would be fixed here.
    Figure {
        name: "fusionllm_step_seconds",
        kind: Kind::Histogram(STEP_SECONDS),
        help: "Durations of steps.",
        label: "",
        of: |e| of_step(e, |m| Some(m.step_s)),
    },
    counter("fusionllm_steps_total", "Steps computed; those done again after a loss count again.", |e| {
        of_step(e, |_| Some(1.0))
    }),
    counter("fusionllm_skipped_steps_total", "Steps skipped, because the loss or a gradient was not finite.", |e| {
        of_step(e, |m| Some(f64::from(u8::from(m.skipped))))
    }),
    counter("fusionllm_tokens_total", "Tokens trained on; images or samples, where the data have no tokens.", |e| {
        of_step(e, |m| Some((m.tokens_per_s * m.step_s).round()))
    }),
    counter("fusionllm_sent_bytes_total", "Bytes of tensors sent between peers.", |e| {
        of_step(e, |m| Some(m.bytes_sent as f64))
    }),
    gauge("fusionllm_validation_loss", "Mean loss over the held-out targets.", |e| match e {
        Event::Evaluated { val_loss, .. } => one(*val_loss),
        _ => Vec::new(),
    }),
    gauge("fusionllm_validation_accuracy_ratio", "Fraction of held-out targets with the largest logit.", |e| match e {
        Event::Evaluated { val_accuracy, .. } => one(*val_accuracy),
        _ => Vec::new(),
    }),
    gauge("fusionllm_predicted_step_seconds", "Duration of a step that the planner predicts.", |e| match e {
        Event::Planned { predicted_step_s, .. } => one(*predicted_step_s),
        _ => Vec::new(),
    }),
    gauge("fusionllm_checkpoint_step", "Step of the last checkpoint that is whole.", |e| match e {
        Event::Saved { step } => one(Some(*step as f64)),
        _ => Vec::new(),
    }),
    counter("fusionllm_failed_checkpoints_total", "Checkpoints that could not be written.", |e| match e {
        Event::NotSaved { .. } => one(Some(1.0)),
        _ => Vec::new(),
    }),
    Figure {
        name: "fusionllm_incidents_total",
        kind: Kind::Counter,
        help: "Interruptions of training, by kind.",
        label: "kind",
        of: |e| match e {
            Event::Started { incidents } => incidents.iter().map(|i| (i.kind.as_str(), 1.0)).collect(),
            _ => Vec::new(),
        },
    },
    counter("fusionllm_lost_seconds_total", "Seconds of pauses and of lost work that incidents cost.", |e| match e {
        Event::Started { incidents } => {
            one(Some(incidents.iter().map(|i| i.detected_s + i.replanned_s + i.restored_s + i.lost_work_s).sum()))
        }
        _ => Vec::new(),
    }),
    counter("fusionllm_turned_away_total", "Joiners that were refused.", |e| match e {
        Event::TurnedAway { .. } => one(Some(1.0)),
        _ => Vec::new(),
    }),
];

type Of = for<'e> fn(&'e Event) -> Vec<(&'e str, f64)>;

const fn gauge(name: &'static str, help: &'static str, of: Of) -> Figure {
    Figure { name, kind: Kind::Gauge, help, label: "", of }
}

const fn counter(name: &'static str, help: &'static str, of: Of) -> Figure {
    Figure { name, kind: Kind::Counter, help, label: "", of }
}

fn one(value: Option<f64>) -> Vec<(&'static str, f64)> {
    value.map(|value| ("", value)).into_iter().collect()
}

fn of_step(event: &Event, value: impl Fn(&StepMetrics) -> Option<f64>) -> Vec<(&'static str, f64)> {
    match event {
        Event::Step(metrics) => one(value(metrics)),
        _ => Vec::new(),
    }
}

/// The values of a figure under one label.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Value {
    /// The last value of a gauge; the sum of the others.
    pub value: f64,
    /// Of a histogram: how many values there were, and for each bound those of at most that size.
    pub count: u64,
    /// See `count`.
    pub up_to: Vec<u64>,
}

/// The values of all figures so far.
#[derive(Debug, Clone, Default)]
pub struct Figures {
    /// By the figure's place in [`FIGURES`] and the label.
    values: BTreeMap<(usize, String), Value>,
}

impl Figures {
    /// Adds what an event has.
    pub fn add(&mut self, event: &Event) {
        for (place, figure) in FIGURES.iter().enumerate() {
            for (label, x) in (figure.of)(event) {
                let value = self.values.entry((place, label.to_owned())).or_default();
                match figure.kind {
                    Kind::Gauge => value.value = x,
                    Kind::Counter => value.value += x,
                    Kind::Histogram(bounds) => {
                        value.value += x;
                        value.count += 1;
                        value.up_to.resize(bounds.len(), 0);
                        let counts = value.up_to.iter_mut().zip(bounds);
                        counts.filter(|(_, bound)| x <= **bound).for_each(|(count, _)| *count += 1);
                    }
                }
            }
        }
    }

    /// The values of each figure that has any, with their labels. A counter without a label has one from the start.
    pub fn iter(&self) -> impl Iterator<Item = (&'static Figure, Vec<(&str, Value)>)> {
        FIGURES.iter().enumerate().map(|(place, figure)| {
            let of_figure = self.values.range((place, String::new())..(place + 1, String::new()));
            let mut values: Vec<_> = of_figure.map(|((_, label), value)| (label.as_str(), value.clone())).collect();
            if values.is_empty() && figure.kind == Kind::Counter && figure.label.is_empty() {
                values.push(("", Value::default()));
            }
            (figure, values)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IncidentSummary;

    fn values(figures: &Figures, name: &str) -> Vec<(String, f64)> {
        let all = figures.iter().filter(|(figure, _)| figure.name == name);
        all.flat_map(|(_, values)| values).map(|(label, value)| (label.to_owned(), value.value)).collect()
    }

    #[test]
    fn figures_follow_from_events() {
        let mut figures = Figures::default();
        assert_eq!(values(&figures, "fusionllm_tokens_total"), [(String::new(), 0.0)]);
        assert_eq!(values(&figures, "fusionllm_loss"), []);
        for (step, step_s) in [(1, 0.02), (2, 3.0), (3, 1000.0)] {
            let metrics = StepMetrics { step, step_s, loss: Some(5.0), tokens_per_s: 100.0, ..StepMetrics::default() };
            figures.add(&Event::Step(Box::new(metrics)));
        }
        let incident = |kind: &str| IncidentSummary { kind: kind.into(), lost_work_s: 2.0, ..Default::default() };
        figures.add(&Event::Started { incidents: vec![incident("lost"), incident("left"), incident("lost")] });
        assert_eq!(values(&figures, "fusionllm_step"), [(String::new(), 3.0)]);
        assert_eq!(values(&figures, "fusionllm_tokens_total"), [(String::new(), 100_302.0)]);
        let kinds = [("left".to_owned(), 1.0), ("lost".to_owned(), 2.0)];
        assert_eq!(values(&figures, "fusionllm_incidents_total"), kinds);
        assert_eq!(values(&figures, "fusionllm_lost_seconds_total"), [(String::new(), 6.0)]);
        let (_, steps) = figures.iter().find(|(figure, _)| figure.name == "fusionllm_step_seconds").unwrap();
        assert_eq!((steps[0].1.count, steps[0].1.value), (3, 1003.02));
        assert_eq!(steps[0].1.up_to, [0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
    }

    #[test]
    fn names_are_told_apart_and_have_their_units() {
        for (place, figure) in FIGURES.iter().enumerate() {
            assert!(FIGURES[..place].iter().all(|other| other.name != figure.name), "{}", figure.name);
            assert_eq!(figure.kind == Kind::Counter, figure.name.ends_with("_total"), "{}", figure.name);
        }
    }
}
