//! The progress of a run, printed on standard error. Standard output stays free for results.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use console::Term;
use fusionllm_data::{Data, Dataset, Tokenizer};
use fusionllm_events::{Event, StepMetrics};
use fusionllm_node::{Observer, Ticket};
use fusionllm_workbench::model::Model;
use fusionllm_workspace::config::Job;
use fusionllm_workspace::run_dir::Summary;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::{Volume, complain, tell, volume};
use crate::table::{columns, wrap_lines};
use crate::units::{bytes, count, counted, seconds};

/// The most bytes of parameters that a broker reads back at the end of a run.
const LARGEST_HELD: u64 = 128 << 20;

/// Shows a run's events: a progress bar on a terminal, otherwise a line every few seconds.
pub(crate) struct Progress {
    bar: ProgressBar,
    steps: u64,
    batch: usize,
    /// The unit of a step's speed, such as `tokens`.
    targets: String,
    /// The ticket with which joiners connect.
    ticket: Option<String>,
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
    /// Whether the model learns from chats, so that people talk with it.
    pub(crate) chats: bool,
    /// Whether the model is too large for this machine to hold it for the report.
    pub(crate) large: bool,
    /// The step at which the run stops.
    pub(crate) steps: u64,
    /// The length of the job.
    pub(crate) length: u64,
    pub(crate) summary: Option<Summary>,
}

impl Progress {
    pub(crate) fn new(job: &Job, by_ticket: bool) -> Self {
        // Log lines would write over a bar.
        let target = match volume() {
            Volume::Usual => ProgressDrawTarget::stderr(),
            Volume::Quiet | Volume::Verbose => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(job.train.stop), target);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
            bar.set_style(style);
        }
        let tokenizer = match &job.data {
            Data::Text(text) => Some(text.tokenizer.clone()),
            // A text that a model of chats continues says little of how it answers.
            Data::Chats(_) | Data::Cifar10(_) | Data::Tensors(_) => None,
        };
        Self {
            bar,
            steps: job.train.stop,
            batch: job.train.batch,
            targets: String::new(),
            ticket: None,
            tokenizer,
            by_ticket,
            pace: Pace::default(),
            last_line: None,
            sent: 0,
            history: History {
                chats: matches!(job.data, Data::Chats(_)),
                steps: job.train.stop,
                length: job.train.steps,
                ..History::default()
            },
        }
    }

    /// Clears the bar and returns what the run reported.
    pub(crate) fn into_history(self) -> History {
        self.bar.finish_and_clear();
        self.history
    }

    fn say(&self, line: impl AsRef<str>) {
        let line = line.as_ref();
        match columns(&Term::stderr()).filter(|_| !self.bar.is_hidden()) {
            Some(columns) => self.bar.println(wrap_lines(line, columns)),
            None => complain(line),
        }
    }

    /// Says what someone who wants quiet need not hear.
    fn tell(&self, line: impl AsRef<str>) {
        if volume() != Volume::Quiet {
            self.say(line);
        }
    }

    /// Without this line nobody could join, so it comes in any case.
    fn invitation(&self, ticket: &str) {
        self.say(format!("  fusionllm join {ticket}"));
        self.tell("");
    }

    fn wait_for(&self, what: String) {
        self.bar.set_message(what);
        self.bar.enable_steady_tick(Duration::from_millis(120));
    }

    fn step(&mut self, metrics: &StepMetrics) {
        let (step, loss) = (metrics.step, metrics.loss.unwrap_or(f64::NAN));
        let rate = format!("{} {}/s", count(metrics.tokens_per_s), self.targets);
        self.sent += metrics.bytes_sent;
        let first = *self.history.first_step.get_or_insert(step);
        // Steps that were lost with a peer are done again.
        self.history.losses.truncate(step.saturating_sub(first) as usize);
        self.history.losses.push(loss);
        let now = Instant::now();
        let left = self.pace.step(now, step).map(|s| s * self.steps.saturating_sub(step) as f64).filter(|s| *s > 0.0);
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
            tell(format_args!("step {step}/{}: loss {loss:.4}  {rate}  {sent}{left}", self.steps));
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
    fn event(&mut self, event: &Event) {
        let is_shown = match event {
            Event::Joined { spare: false, .. } if !self.by_ticket => false,
            // The bar says it.
            Event::Measuring if !self.bar.is_hidden() => false,
            event => volume() != Volume::Quiet || !event.is_routine(),
        };
        event.lines().iter().filter(|_| is_shown).for_each(|line| self.say(line));
        match event {
            Event::Listening { wanted } => {
                let peers = counted(*wanted, "peer");
                if let Some(ticket) = self.ticket.as_ref().filter(|_| self.by_ticket) {
                    self.tell(format!("waiting for {peers}; on each machine:\n"));
                    self.invitation(ticket);
                }
                self.wait_for(format!("0 of {peers}"));
            }
            Event::Continued { .. } => {
                if let Some(ticket) = &self.ticket {
                    self.tell("more machines can join:\n");
                    self.invitation(ticket);
                }
                self.wait_for("waiting for the peers to come back".to_owned());
            }
            Event::Joined { present, wanted, spare: false, .. } => {
                self.bar.set_message(format!("{present} of {}", counted(*wanted, "peer")));
            }
            Event::Lost { used: true, .. } => self.wait_for("planning again".to_owned()),
            Event::Waiting { .. } => self.wait_for("waiting for more machines".to_owned()),
            Event::Measuring => self.wait_for("measuring machines and links".to_owned()),
            Event::Planned { targets, parameters, .. } => {
                self.targets.clone_from(targets);
                // The machine of a broker need not have room for the model that others train.
                self.history.large = self.by_ticket && 4 * parameters > LARGEST_HELD;
            }
            Event::Started { .. } => self.start(),
            Event::Step(metrics) => self.step(metrics),
            Event::Evaluated { step, val_loss, val_accuracy } => {
                self.history.validation = Some((*step, val_loss.unwrap_or(f64::NAN), *val_accuracy));
            }
            // Over a slow link this takes longer than a step, and no step shows progress meanwhile.
            Event::Saving { step } if *step >= self.steps => self.wait_for("fetching the trained model".to_owned()),
            Event::Saved { step } => tracing::info!(step, "checkpoint"),
            _ => {}
        }
    }

    fn opened(&mut self, directory: &Path) {
        self.history.directory = directory.to_owned();
    }

    fn dashboard(&mut self, url: &str) {
        self.tell(format!("the run's page: {url}"));
    }

    fn invite(&mut self, ticket: &Ticket) {
        self.ticket = Some(ticket.to_string());
    }

    fn planned(&mut self, _model: &Model, data: &Dataset) {
        if self.history.losses.is_empty() {
            self.tell(data.to_string());
            data.repeated(self.batch).iter().for_each(|note| self.say(note));
        }
        self.history.prompt = self.tokenizer.as_ref().and_then(|t| prompt(&opening(data, t), t));
        self.wait_for("loading".to_owned());
    }

    fn loading(&mut self, sent: u64, total: u64) {
        let so_far = format!("loading: {} of {} sent", bytes(sent), bytes(total));
        if total > 0 && !self.bar.is_hidden() {
            self.bar.set_message(so_far);
        } else if sent < total && is_due(self.last_line.map(|t| t.elapsed()), Duration::ZERO) {
            self.last_line = Some(Instant::now());
            tell(so_far);
        }
    }

    fn finished(&mut self, summary: &Summary) {
        self.history.took = self.pace.elapsed(Instant::now()).as_secs_f64();
        self.history.summary = Some(summary.clone());
        self.bar.finish_and_clear();
    }
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
