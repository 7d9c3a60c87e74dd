//! The progress of a run, printed on standard error. Standard output stays free for results.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fusionllm_data::{Data, Dataset, Tokenizer};
use fusionllm_graph::{Advice, Graph};
use fusionllm_node::{Event, Observer};
use fusionllm_plan::Plan;
use fusionllm_workspace::config::Job;
use fusionllm_workspace::run_dir::Summary;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::complain;
use crate::units::{bytes, count, counted, seconds};

/// Shows a run's events: a progress bar on a terminal, otherwise a line every few seconds.
pub(crate) struct Progress {
    bar: ProgressBar,
    steps: u64,
    batch: usize,
    /// Plural name of the targets, such as `tokens`.
    targets: &'static str,
    tokenizer: Option<Tokenizer>,
    /// Whether peers join from other machines, which takes the ticket.
    by_ticket: bool,
    pace: Pace,
    /// Without a bar: when the last line was written.
    last_line: Option<Instant>,
    sent: u64,
    history: History,
}

/// The facts that the report at the end needs.
#[derive(Default)]
pub(crate) struct History {
    /// The run directory.
    pub(crate) directory: PathBuf,
    /// Loss of each step.
    pub(crate) losses: Vec<f64>,
    /// The step of the first loss.
    pub(crate) first_step: Option<u64>,
    /// Step, loss and accuracy of the last validation.
    pub(crate) validation: Option<(u64, f64, Option<f64>)>,
    /// Seconds from the first step's start to the end.
    pub(crate) took: f64,
    /// The beginning of the held-out text. The model continues it in the report.
    pub(crate) prompt: Option<String>,
    /// The step at which the run stops.
    pub(crate) steps: u64,
    /// The length of the job.
    pub(crate) length: u64,
    pub(crate) summary: Option<Summary>,
}

impl Progress {
    pub(crate) fn new(job: &Job, by_ticket: bool) -> Self {
        let bar = ProgressBar::new(job.train.stop);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
            bar.set_style(style);
        }
        let (targets, tokenizer) = match &job.data {
            Data::Text(text) => ("tokens", Some(text.tokenizer.clone())),
            Data::Cifar10(_) => ("images", None),
            Data::Tensors(_) => ("targets", None),
        };
        Self {
            bar,
            steps: job.train.stop,
            batch: job.train.batch,
            targets,
            tokenizer,
            by_ticket,
            pace: Pace::default(),
            last_line: None,
            sent: 0,
            history: History { steps: job.train.stop, length: job.train.steps, ..History::default() },
        }
    }

    /// Clears the bar and returns what the run reported.
    pub(crate) fn into_history(self) -> History {
        self.bar.finish_and_clear();
        self.history
    }

    fn say(&self, line: impl AsRef<str>) {
        if self.bar.is_hidden() {
            complain(line.as_ref());
        } else {
            self.bar.println(line);
        }
    }

    fn wait_for(&self, what: String) {
        self.bar.set_message(what);
        self.bar.enable_steady_tick(Duration::from_millis(120));
    }

    fn step(&mut self, step: u64, loss: f64, rate: &str) {
        let now = Instant::now();
        let left = self.pace.step(now, step).map(|s| s * self.steps.saturating_sub(step) as f64);
        let left = left.map(|s| format!("  {} left", seconds(s.ceil()))).unwrap_or_default();
        let sent = format!("{} sent", bytes(self.sent));
        if !self.bar.is_hidden() {
            let val = self.history.validation.map(|(_, v, _)| format!("  val {v:.3}")).unwrap_or_default();
            self.bar.set_position(step);
            self.bar.set_prefix(left.trim().to_owned());
            self.bar.set_message(format!("loss {loss:.3}{val}   {rate}   {sent}"));
            return;
        }
        let since = self.last_line.map(|t| now - t);
        if step >= self.steps || is_due(since, self.pace.elapsed(now)) {
            self.last_line = Some(now);
            complain(format_args!("step {step}/{}: loss {loss:.4}  {rate}  {sent}{left}", self.steps));
        }
    }

    fn planned(&self, plan: &Plan, graph: &Graph, notes: &[String], predicted_step_s: Option<f64>) {
        let parameters: usize = graph.parameters().map(|v| graph.ty(v).numel()).sum();
        self.say(format!(
            "{}: {} parameters, {} in {} over {}",
            graph.name,
            count(parameters as f64),
            counted(graph.nodes.len(), "operator"),
            counted(plan.stages.len(), "stage"),
            counted(plan.peers.len(), "peer"),
        ));
        self.say(format!(
            "plan: {}, {} schedule, {}",
            plan.scheduler,
            plan.schedule.name(),
            counted(plan.micro_batches, "micro-batch")
        ));
        for note in notes {
            self.say(note);
        }
        if let Some(s) = predicted_step_s {
            self.say(format!("predicted: {} a step", seconds(s)));
        }
    }

    fn start(&mut self) {
        self.pace.start(Instant::now());
        self.bar.disable_steady_tick();
        let template = "{wide_bar:.cyan/blue} {pos}/{len}  {prefix}\n{wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style.progress_chars("━╸─"));
        }
        self.bar.set_message("the first step");
    }
}

impl Observer for Progress {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Opened { directory } => {
                self.say(format!("run directory: {}", directory.display()));
                self.history.directory = directory.to_owned();
            }
            Event::Listening { ticket, wanted } => {
                if self.by_ticket {
                    let peers = counted(wanted, "peer");
                    self.say(format!("waiting for {peers}; on each machine:\n\n  fusionllm join {ticket}\n"));
                }
                self.wait_for(format!("0 of {}", counted(wanted, "peer")));
            }
            Event::Continued { ticket, peers } => {
                let (peers, are) = (counted(peers, "peer"), if peers == 1 { "is" } else { "are" });
                self.say(format!("going on where the broker was killed, once its {peers} {are} back"));
                self.say(format!("more machines can join:\n\n  fusionllm join {ticket}\n"));
                self.wait_for("waiting for the peers to come back".to_owned());
            }
            Event::Joined { member, present, wanted, spare } => {
                if self.by_ticket || spare {
                    self.say(format!("{} joined ({}, {})", member.name, member.backend, member.device));
                }
                if !spare {
                    self.bar.set_message(format!("{present} of {}", counted(wanted, "peer")));
                }
            }
            Event::Silent { name, seconds: s } => self.say(format!("{name} has not answered for {}", seconds(s))),
            Event::Answers { name } => self.say(format!("{name} answers again")),
            Event::Lost { name, reason, used: false, .. } => self.say(format!("{name} is gone: {reason}")),
            Event::Lost { name, reason, step, .. } => {
                self.say(format!("lost {name} at step {step}: {reason}; the others take over its share"));
                self.wait_for("planning again".to_owned());
            }
            Event::LinkLost { from, to, reason } => {
                self.say(format!("{from} cannot reach {to} any more: {reason}; planning around it"));
            }
            Event::Waiting { reason } => {
                self.say(format!("waiting for more machines: {reason}"));
                self.wait_for("waiting for more machines".to_owned());
            }
            Event::Speed { name, times } if times > 1.5 => {
                self.say(format!(
                    "{name} computes {times:.1}x slower than at the start; is something else running there?"
                ));
            }
            Event::Speed { name, .. } => self.say(format!("{name} computes as fast as at the start again")),
            Event::Poisoned { name, step, what, advice } => self.say(format!("step {step}: {name} {what}; {advice}")),
            Event::Skipping { step, skipped, of, why } => {
                let why = why.map(|why| format!("; {why}")).unwrap_or_default();
                self.say(format!(
                    "step {step}: {skipped} of {of} steps were skipped so far, because the loss or a gradient was not \
                     finite, and the model learned nothing from them{why}"
                ));
            }
            Event::Better { names: [], gain_s } => {
                let gain = seconds(gain_s);
                self.say(format!(
                    "with other shares the run ends about {gain} earlier: changing the plan after this step"
                ));
            }
            Event::Better { names, gain_s } => {
                let (names, gain) = (names.join(", "), seconds(gain_s));
                self.say(format!("with {names} the run ends about {gain} earlier: changing the plan after this step"));
            }
            Event::Loading { sent, total } if total > 0 && self.bar.is_hidden() => {
                let due = is_due(self.last_line.map(|t| t.elapsed()), Duration::ZERO);
                if due && sent < total {
                    self.last_line = Some(Instant::now());
                    complain(format_args!("loading: {} of {} sent", bytes(sent), bytes(total)));
                }
            }
            Event::Loading { sent, total } if total > 0 => {
                self.bar.set_message(format!("loading: {} of {} sent", bytes(sent), bytes(total)));
            }
            Event::Codecs { step, lines } => {
                for line in lines {
                    self.say(format!("step {step}: {line}"));
                }
            }
            Event::TurnedAway { reason } => self.say(format!("turned a joiner away: {reason}")),
            Event::Measuring => {
                if self.bar.is_hidden() {
                    complain("measuring machines and links");
                }
                self.wait_for("measuring machines and links".to_string());
            }
            Event::Planned { plan, notes, predicted_step_s, model, data } => {
                self.planned(plan, &model.forward, notes, predicted_step_s);
                if self.history.losses.is_empty() {
                    self.say(data.to_string());
                    data.repeated(self.batch).iter().for_each(|note| self.say(note));
                }
                self.history.prompt = self.tokenizer.as_ref().and_then(|t| prompt(&opening(data, t), t));
                self.wait_for("loading".to_string());
            }
            Event::Started { incidents } => {
                if let Some(i) = incidents.first() {
                    let took = seconds(i.detected_s + i.replanned_s + i.restored_s);
                    self.say(format!("training goes on from step {}, {took} after the loss", i.restarted_at));
                }
                self.start();
            }
            Event::Step { record, samples_per_s, targets_per_s } => {
                self.sent += record.bytes_sent;
                let first = *self.history.first_step.get_or_insert(record.step);
                // Steps that were lost with a peer are done again.
                self.history.losses.truncate(record.step.saturating_sub(first) as usize);
                self.history.losses.push(record.loss);
                if !record.applied {
                    self.say(format!(
                        "step {}: the loss or a gradient is not finite; this update is skipped",
                        record.step
                    ));
                }
                let rate = match targets_per_s {
                    Some(rate) => format!("{} {}/s", count(rate), self.targets),
                    None => format!("{} samples/s", count(samples_per_s)),
                };
                self.step(record.step, record.loss, &rate);
            }
            Event::Evaluated { step, val_loss, val_accuracy } => {
                self.history.validation = Some((step, val_loss, val_accuracy));
                let loss = match val_loss.is_finite() {
                    true => format!("validation loss {val_loss:.4}"),
                    false => "the validation loss is not finite".to_owned(),
                };
                self.say(format!("step {step}: {loss}{}", accuracy(val_accuracy)));
            }
            // Over a slow link this takes longer than a step, and no step shows progress meanwhile.
            Event::Saving { step } if step >= self.steps => self.wait_for("fetching the trained model".to_owned()),
            Event::NotSaved { step, error } => {
                let then = if step < self.steps { "; training goes on" } else { "" };
                self.say(format!("the checkpoint of step {step} could not be written: {}{then}", error.one_line()));
            }
            Event::DiskFull { error } => {
                let reason = error.one_line();
                self.say(format!("the disk is full ({reason}); free some space: training goes on, and metrics wait"));
            }
            Event::DiskWritten => self.say("the disk has room again; all metrics are written"),
            Event::Saved { step } => tracing::info!(step, "checkpoint"),
            Event::Note { text } => self.say(format!("note: {text}")),
            Event::Stopping => self.say("saving and stopping; Ctrl-C again to stop at once"),
            Event::Finished { summary } => {
                self.history.took = self.pace.elapsed(Instant::now()).as_secs_f64();
                self.history.summary = Some(summary.clone());
                self.bar.finish_and_clear();
            }
            _ => {}
        }
    }
}

/// `, accuracy 12.5 %`, or nothing for a model without classes.
pub(crate) fn accuracy(share: Option<f64>) -> String {
    share.map(|share| format!(", accuracy {:.1} %", 100.0 * share)).unwrap_or_default()
}

/// Whether to print another line: every 5 s, and less often the longer a run takes.
fn is_due(since_last: Option<Duration>, elapsed: Duration) -> bool {
    since_last.is_none_or(|since| since >= Duration::from_secs(5).max(elapsed / 20))
}

/// The speed of the last steps, with validations and checkpoints between them.
#[derive(Debug, Default)]
struct Pace {
    started: Option<Instant>,
    recent: VecDeque<(Instant, u64)>,
}

impl Pace {
    const STEPS: usize = 50;

    /// Begins, or begins again: a pause is not counted into the steps.
    fn start(&mut self, now: Instant) {
        self.started.get_or_insert(now);
        self.recent.clear();
    }

    /// Seconds per step, once two steps are done. The first one is slower.
    fn step(&mut self, now: Instant, step: u64) -> Option<f64> {
        self.recent.push_back((now, step));
        if self.recent.len() > Self::STEPS {
            self.recent.pop_front();
        }
        let &(then, first) = self.recent.front()?;
        (step > first).then(|| (now - then).as_secs_f64() / (step - first) as f64)
    }

    fn elapsed(&self, now: Instant) -> Duration {
        self.started.map_or(Duration::ZERO, |s| now - s)
    }
}

/// The first held-out tokens; without held-out data, the first training tokens.
fn opening(data: &Dataset, tokenizer: &Tokenizer) -> Vec<u32> {
    let batch = if data.eval_samples() > 0 { data.held_out(&[0], |_| true) } else { data.train_batch(0, 1) };
    let tensors = batch.map(|b| b.tensors).unwrap_or_default();
    let ids = tensors.into_iter().find(|(name, _)| *name == "input_ids").and_then(|(_, t)| t.to_i64());
    let tokens = ids.unwrap_or_default().into_iter().filter_map(|t| u32::try_from(t).ok());
    let between = tokenizer.before_document();
    tokens.filter(|t| !between.contains(t)).collect()
}

/// A few words from the start of a line.
fn prompt(opening: &[u32], tokenizer: &Tokenizer) -> Option<String> {
    const LONGEST: usize = 60;
    let text = tokenizer.decode(opening);
    // Held-out text may begin and end in the middle of a line.
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let whole = lines.get(1..lines.len().saturating_sub(1)).unwrap_or_default();
    let worthy = |line: &&&str| line.chars().filter(|c| c.is_alphanumeric()).count() >= 12;
    let line = whole.iter().find(worthy).or(lines.iter().max_by_key(|line| line.len()))?;
    let line = line.trim_start_matches(char::REPLACEMENT_CHARACTER);
    let end = match line.len() > LONGEST {
        true => line[..line.floor_char_boundary(LONGEST)].rfind(char::is_whitespace),
        false => None,
    };
    let words = line[..end.unwrap_or(line.floor_char_boundary(LONGEST))].trim();
    (!words.is_empty()).then(|| words.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_a_line_or_its_beginning() {
        let cut = |text: &str| prompt(&Tokenizer::Bytes.encode(text).unwrap(), &Tokenizer::Bytes);
        assert_eq!(cut("alf a line\nHAMLET:\n  To be, or not to be\nThat is").unwrap(), "To be, or not to be");
        assert_eq!(cut("ut too short\nno\nlines are worth it").unwrap(), "lines are worth it");
        let long = format!("x\n{}", "one and another ".repeat(9));
        assert_eq!(cut(&format!("{long}\nx")).unwrap(), "one and another one and another one and another one and");
        assert_eq!(cut(&"é".repeat(100)).unwrap(), "é".repeat(30));
        assert_eq!(cut(" \n \n"), None);
        assert_eq!(cut(""), None);
    }

    #[test]
    fn the_pace_is_that_of_the_last_steps() {
        let start = Instant::now();
        let at = |s: f64| start + Duration::from_secs_f64(s);
        let mut pace = Pace::default();
        pace.start(start);
        // A resumed run begins anywhere, and its first step is slow.
        assert_eq!(pace.step(at(9.0), 201), None);
        assert_eq!(pace.step(at(11.0), 202), Some(2.0));
        for i in 0..100u64 {
            pace.step(at(11.0 + i as f64 * 0.5), 203 + i);
        }
        assert!((pace.step(at(61.0), 303).unwrap() - 0.5).abs() < 1e-9);
        assert_eq!(pace.elapsed(at(61.0)), Duration::from_secs(61));
    }

    #[test]
    fn lines_grow_rare() {
        let s = Duration::from_secs;
        assert!(is_due(None, s(0)));
        assert!(!is_due(Some(s(4)), s(4)) && is_due(Some(s(5)), s(5)));
        assert!(!is_due(Some(s(5)), s(200)) && is_due(Some(s(10)), s(200)));
    }
}
