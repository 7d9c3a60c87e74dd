//! The report that a run prints at its end.

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use fusionllm_workbench::model::SavedModel;
use fusionllm_workbench::model::generate::{Generator, Sampling};
use fusionllm_workspace::run_dir::Summary;

use crate::again::Again;
use crate::backend::open_backend;
use crate::failure::Failure;
use crate::output::{complain, legible, print, word};
use crate::progress::History;
use crate::table::{Table, command_fact, fact, width, wrap_lines};
use crate::units::{bytes, seconds};

/// Prints a run's figures and, for language models, a sample of their text.
pub(crate) fn report(history: &History, again: &Again) -> Result<(), Failure> {
    let Some(summary) = &history.summary else { return Ok(()) };
    print(&text(summary, history))?;
    if let Some(prompt) = history.prompt.as_ref().filter(|_| !history.large) {
        sample(prompt, &history.directory)?;
    }
    let directory = history.directory.display();
    let files = format!("{directory}: metrics.jsonl, events.jsonl, summary.json, plan.json, checkpoints/");
    print(&format!("\n{}", fact("files:", &files)))?;
    if history.prompt.is_some() {
        let command = format!("fusionllm generate {} --prompt \"...\"", word(&history.directory));
        print(&command_fact("more text:", &command))?;
    }
    if history.chats {
        print(&command_fact("talk:", &format!("fusionllm chat {}", word(&history.directory))))?;
    }
    // A run that was interrupted continues to where it would have stopped, and then to the end of its job.
    let more = match summary.steps {
        n if n < history.steps => String::new(),
        n if n < history.length => format!(" --steps {}", history.length),
        n => format!(" --steps {}", n.saturating_mul(2)),
    };
    print(&command_fact("train on:", &format!("{}{more}", again.resume(&history.directory))))
}

fn text(summary: &Summary, history: &History) -> String {
    let unknown = || "?".to_string();
    let loss = |x: Option<f64>| x.map_or_else(unknown, |x| format!("{x:.3}"));
    let mut out = String::from("\n");
    let mut line = |name: &str, value: String| out += &fact(name, &value);
    line("steps", format!("{} in {}", history.losses.len(), seconds(history.took)));
    if summary.skipped_steps > 0 {
        line("skipped", skipped(summary, history.losses.len() as u64));
    }
    let curve = curve(&history.losses);
    // Skipped steps changed nothing, so their losses say nothing about the model.
    let first = loss(finite(history.losses.iter()));
    let last = loss(summary.loss_last.or_else(|| finite(history.losses.iter().rev())));
    // A resumed run shows its own first step, where the curve starts, and the loss of step 1 after it.
    let resumed = (history.losses.len() as u64) < summary.steps;
    let before = if resumed { format!("  (step 1: {})", loss(summary.loss_first)) } else { String::new() };
    line("loss", format!("{first} {curve} {last}{before}"));
    if let Some((step, val_loss, accuracy)) = history.validation {
        line("validation", format!("loss {val_loss:.3}{} after step {step}", fusionllm_events::accuracy(accuracy)));
    }
    let median = summary.median_step_s.map_or_else(unknown, seconds);
    let ratio = summary.training_overhead_ratio;
    let ratio = ratio.map_or(String::new(), |r| format!(", {:.0} % of the time in steps", 100.0 * r));
    line("a step", format!("{median}{ratio}"));

    let mut peers = Table::new(["peer", "backend", "operators", "computing", "memory"], [2, 3, 4]);
    for p in &summary.peers {
        peers.row([
            p.name.clone(),
            p.backend.clone(),
            p.operators.to_string(),
            p.compute_s.map_or_else(unknown, seconds),
            p.peak_memory_bytes.map_or_else(unknown, bytes),
        ]);
    }
    out += &format!("\n{peers}");
    if !summary.links.is_empty() {
        let mut links = Table::new(["from", "to", "codec", "a step"], [3]);
        for l in &summary.links {
            links.row([l.from.clone(), l.to.clone(), l.codec.clone(), l.bytes_per_step.map_or_else(unknown, bytes)]);
        }
        let all = summary.bytes_sent_per_step.map_or_else(unknown, bytes);
        links.row(["all".into(), String::new(), String::new(), all]);
        out += &format!("\n{links}");
    }
    out
}

/// The steps that changed nothing, of this many, and the reason. Steps that were done again count twice.
fn skipped(summary: &Summary, steps: u64) -> String {
    let n = summary.skipped_steps;
    let of = steps.max(n);
    let why = summary.skipped_because.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let percent = 100.0 * n as f64 / of as f64;
    format!(
        "{n} of {of} steps ({percent:.0} %) taught the model nothing, as the loss or a gradient was not finite{why}"
    )
}

/// The first number that is one.
fn finite<'a>(mut losses: impl Iterator<Item = &'a f64>) -> Option<f64> {
    losses.find(|loss| loss.is_finite()).copied()
}

/// Prints the text that the newest checkpoint writes after `prompt`. A run without a sample has not failed.
fn sample(prompt: &str, directory: &Path) -> Result<(), Failure> {
    const LONGEST: Duration = Duration::from_secs(15);
    const CHARACTERS: usize = 400;
    let started = Instant::now();
    let mut text = String::new();
    let mut write = || -> Result<(), Failure> {
        let mut generator =
            Generator::new(SavedModel::open(directory, None)?, open_backend(fusionllm_backend::names()[0])?, None)?;
        let sampling = Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, seed: 1 };
        generator.generate(prompt, &sampling, CHARACTERS, &[], |piece| {
            text += piece;
            text.chars().count() < CHARACTERS && started.elapsed() < LONGEST
        })?;
        Ok(())
    };
    if let Err(failure) = write() {
        complain(format_args!("no sample: {}", failure.message()));
        return Ok(());
    }
    let (bold, plain) = if std::io::stdout().is_terminal() { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
    // The prompt stands in the first line, which is the same whether or not it is bold.
    let text = wrap_lines(&format!("{}{}", legible(prompt), legible(&text)), width() - 2).replace('\n', "\n  ");
    let rest = text.strip_prefix(&legible(prompt)).map(|rest| format!("{bold}{}{plain}{rest}", legible(prompt)));
    print(&format!("\na sample that continues held-out text:\n\n  {}\n", rest.unwrap_or(text)))
}

/// The losses as a small picture. An arrow if all are equal.
fn curve(losses: &[f64]) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    const WIDTH: usize = 32;
    let width = losses.len().min(WIDTH);
    let means: Vec<f64> = (0..width)
        .map(|i| {
            let part = &losses[i * losses.len() / width..(i + 1) * losses.len() / width];
            part.iter().sum::<f64>() / part.len() as f64
        })
        .collect();
    let finite = means.iter().copied().filter(|m| m.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), m| (l.min(m), h.max(m)));
    if low >= high {
        return "->".into();
    }
    let level = |m: f64| match m.is_finite() {
        true => LEVELS[(((m - low) / (high - low) * 7.0).round() as usize).min(7)],
        false => '!',
    };
    means.into_iter().map(level).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The report said "loss NaN" of a run whose last update was skipped and whose model was sound.
    #[test]
    fn losses_of_skipped_steps_are_left_out() {
        let losses = [f64::NAN, 3.0, 2.0, f64::INFINITY];
        assert_eq!((finite(losses.iter()), finite(losses.iter().rev())), (Some(3.0), Some(2.0)));
        assert_eq!(finite([f64::NAN].iter()), None);
    }

    #[test]
    fn a_curve_falls_from_high_to_low() {
        assert_eq!(curve(&[7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]), "█▇▆▅▄▃▂▁");
        assert_eq!(curve(&[2.0, f64::NAN, 1.0]), "█!▁");
        assert_eq!(curve(&[2.0; 5]), "->");
        assert_eq!(curve(&[]), "->");
        let long: Vec<f64> = (0..10_000).map(|i| 1.0 / (1.0 + i as f64)).collect();
        assert_eq!(curve(&long).chars().count(), 32);
    }
}
