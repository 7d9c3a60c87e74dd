//! What a person sees of a run: on standard error, so that standard output stays clean.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fusionllm_node::config::Job;
use fusionllm_node::{Event, Observer};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Shows a run's events.
pub(crate) struct Progress {
    bar: ProgressBar,
    directory: PathBuf,
    json: bool,
    /// Whether people have to bring the peers, and need the ticket for it.
    by_ticket: bool,
    last_val: Option<f64>,
    bytes: u64,
}

impl Progress {
    pub(crate) fn new(job: &Job, json: bool, by_ticket: bool, directory: &Path) -> Self {
        let bar = ProgressBar::new(job.train.steps);
        bar.set_style(
            ProgressStyle::with_template("{spinner} {msg}").unwrap_or_else(|_| ProgressStyle::default_spinner()),
        );
        Self { bar, directory: directory.to_path_buf(), json, by_ticket, last_val: None, bytes: 0 }
    }

    fn say(&self, line: impl AsRef<str>) {
        if self.bar.is_hidden() {
            eprintln!("{}", line.as_ref());
        } else {
            self.bar.println(line);
        }
    }

    fn wait_for(&self, what: String) {
        self.bar.set_message(what);
        self.bar.enable_steady_tick(Duration::from_millis(120));
    }
}

impl Observer for Progress {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Listening { ticket, wanted } => {
                self.say(format!("run directory: {}", self.directory.display()));
                if self.by_ticket {
                    self.say(format!("waiting for {wanted} peer(s); on each machine:\n\n  fusionllm join {ticket}\n"));
                }
                self.wait_for(format!("0 of {wanted} peers"));
            }
            Event::Joined { member, present, wanted } => {
                if self.by_ticket {
                    self.say(format!("{} joined ({}, {})", member.name, member.backend, member.device));
                }
                self.bar.set_message(format!("{present} of {wanted} peers"));
            }
            Event::Left { name } => self.say(format!("{name} left")),
            Event::TurnedAway { reason } => self.say(format!("turned a joiner away: {reason}")),
            Event::Planned { plan, model } => {
                let parameters: usize = model.forward.parameters().map(|v| model.forward.ty(v).numel()).sum();
                self.say(format!(
                    "{}: {:.2} M parameters, {} operators in {} stages over {} peers ({})",
                    model.forward.name,
                    parameters as f64 / 1e6,
                    model.forward.nodes.len(),
                    plan.stages.len(),
                    plan.peers.len(),
                    plan.scheduler
                ));
                self.bar.set_message("loading".to_string());
            }
            Event::Started => {
                self.bar.disable_steady_tick();
                let template = "{wide_bar:.cyan/blue} {pos}/{len}  {msg}  {eta} left";
                if let Ok(style) = ProgressStyle::with_template(template) {
                    self.bar.set_style(style);
                }
                self.bar.reset_eta();
            }
            Event::Step { record, targets_per_s } => {
                self.bytes += record.bytes_sent;
                let val = self.last_val.map(|v| format!("  val {v:.3}")).unwrap_or_default();
                self.bar.set_message(format!(
                    "loss {:.3}{val}  {targets_per_s:.0}/s  {} sent",
                    record.loss,
                    HumanBytes(self.bytes)
                ));
                self.bar.set_position(record.step);
                if !record.applied {
                    self.say(format!("step {}: loss or gradient is not finite; the update was left out", record.step));
                } else if self.bar.is_hidden() && (record.step.is_multiple_of(50) || record.step == 1) && !self.json {
                    eprintln!("step {}: loss {:.4}, {targets_per_s:.0}/s", record.step, record.loss);
                }
            }
            Event::Evaluated { step, val_loss, val_accuracy } => {
                self.last_val = Some(val_loss);
                self.say(format!("step {step}: validation loss {val_loss:.4}, accuracy {:.1} %", 100.0 * val_accuracy));
            }
            Event::Saved { step } => tracing::info!(step, "checkpoint"),
            Event::Stopping => self.say("saving and stopping; Ctrl-C again to stop at once"),
            Event::Finished { summary } => {
                self.bar.finish_and_clear();
                if self.json {
                    if let Ok(text) = serde_json::to_string(summary) {
                        println!("{text}");
                    }
                    return;
                }
                let show = |x: Option<f64>| x.map_or("?".into(), |x| format!("{x:.3}"));
                self.say(format!(
                    "{} steps: loss {} -> {}, {} s a step, {} sent a step",
                    summary.steps,
                    show(summary.loss_first),
                    show(summary.loss_last),
                    show(summary.median_step_s),
                    HumanBytes(summary.bytes_sent_per_step.unwrap_or(0))
                ));
                for p in &summary.peers {
                    self.say(format!(
                        "  {:<12} {:<11} {:>4} operators  {:>7} s computing a step  {:>10} at most",
                        p.name,
                        p.backend,
                        p.operators,
                        show(p.compute_s),
                        HumanBytes(p.peak_memory_bytes.unwrap_or(0)).to_string()
                    ));
                }
            }
            _ => {}
        }
    }
}
