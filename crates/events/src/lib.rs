//! The events of a run, each declared once.
//!
//! [`Event`] has each event with its fields and their units. [`Event::lines`] has the words for people. The lines of the
//! terminal and of `events.jsonl` come from this list. A line of `metrics.jsonl` is the content of [`Event::Step`], with the
//! validation that follows it, and the incidents of `summary.json` are those of [`Event::Started`]. [`FIGURES`] says which
//! of these numbers monitoring reads, and under which names.

mod figures;
mod records;

use std::time::{SystemTime, UNIX_EPOCH};

use fusionllm_graph::units::{bytes, count, counted, seconds};
use serde::{Deserialize, Serialize};

pub use figures::{FIGURES, Figure, Figures, Kind, Value};
pub use records::{IncidentSummary, Spectrum, StepMetrics};

/// Something that happens in a run. Peers have their names, bytes are bytes, and times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// All input fits together, and the run has a directory.
    Opened {
        /// The run directory.
        directory: String,
    },
    /// The broker waits for its first joiners.
    Listening {
        /// How many it waits for.
        wanted: usize,
    },
    /// The run goes on where an earlier broker was killed, once its peers are back.
    Continued {
        /// The number of peers that trained.
        peers: usize,
    },
    /// A joiner came, or a member came back.
    Joined {
        /// Its name.
        peer: String,
        /// Its backend.
        backend: String,
        /// Its device.
        device: String,
        /// Members present.
        present: usize,
        /// Members that the run waits for before it starts.
        wanted: usize,
        /// Whether the run has started before it.
        spare: bool,
    },
    /// A joiner was refused.
    TurnedAway {
        /// The reason.
        reason: String,
    },
    /// All joiners are present and measure their machines and links.
    Measuring,
    /// The plan is made, and peers load their shares.
    Planned {
        /// The name of the model.
        model: String,
        /// Its trained numbers.
        parameters: u64,
        /// Its operators.
        operators: u64,
        /// The peers, in the order of the plan.
        peers: Vec<String>,
        /// The number of stages.
        stages: u64,
        /// The scheduler that made the plan.
        scheduler: String,
        /// The pipeline schedule.
        schedule: String,
        /// Micro-batches per step.
        micro_batches: u32,
        /// The unit of `tokens_per_s` in `metrics.jsonl`: tokens, images, targets or samples.
        targets: String,
        /// Sentences about the plan.
        notes: Vec<String>,
        /// The predicted duration of a step, where the machines are known.
        predicted_step_s: Option<f64>,
    },
    /// All peers are ready.
    Started {
        /// The interruptions that made a new generation necessary; none for the first one.
        incidents: Vec<IncidentSummary>,
    },
    /// A step is done.
    Step(Box<StepMetrics>),
    /// An evaluation is done.
    Evaluated {
        /// Steps done so far.
        step: u64,
        /// Mean loss over the held-out targets; `None` if it is not finite.
        val_loss: Option<f64>,
        /// The fraction of held-out targets for which the largest logit is right; `None` for a model without classes or
        /// with unknown targets.
        val_accuracy: Option<f64>,
    },
    /// Codecs change, or the regulator warns about one.
    Codecs {
        /// The first step with the new codecs.
        step: u64,
        /// One sentence per link.
        lines: Vec<String>,
    },
    /// A member has not answered for some seconds.
    Silent {
        /// Its name.
        peer: String,
        /// Seconds.
        seconds: f64,
    },
    /// A member answers again.
    Answers {
        /// Its name.
        peer: String,
    },
    /// A member is gone.
    Lost {
        /// Its name.
        peer: String,
        /// Why.
        reason: String,
        /// Whether it had a share of the model that others take over.
        used: bool,
        /// The last step that was complete.
        step: u64,
    },
    /// Two peers cannot reach each other any more. The run regroups.
    LinkLost {
        /// The peer that says so.
        from: String,
        /// The other one.
        to: String,
        /// Why.
        reason: String,
    },
    /// The run waits for more members.
    Waiting {
        /// Why.
        reason: String,
    },
    /// A peer computes at another speed than before.
    Speed {
        /// Its name.
        peer: String,
        /// Its seconds of computing over those at the start.
        times: f64,
    },
    /// The run changes to a better plan.
    Better {
        /// The members that come in.
        peers: Vec<String>,
        /// Predicted seconds that it saves.
        gain_s: f64,
    },
    /// A skipped step shows where a number was first not finite. It is told if that is new.
    Poisoned {
        /// The peer's name, or that of the broker.
        peer: String,
        /// The step.
        step: u64,
        /// The finding, in words that follow the name.
        what: String,
        /// Advice to the user.
        advice: String,
    },
    /// Steps are skipped again and again, because the loss or a gradient is not finite.
    Skipping {
        /// The last one.
        step: u64,
        /// How many were skipped.
        skipped: u64,
        /// Of how many.
        of: u64,
        /// The last place where a number was first not finite, with advice.
        why: Option<String>,
    },
    /// Peers begin to send a checkpoint.
    Saving {
        /// The step of the checkpoint.
        step: u64,
    },
    /// A checkpoint is whole.
    Saved {
        /// The step of the checkpoint.
        step: u64,
    },
    /// A checkpoint could not be written.
    NotSaved {
        /// The step of the checkpoint.
        step: u64,
        /// Why.
        reason: String,
        /// Whether training goes on.
        goes_on: bool,
    },
    /// A checkpoint was due while too many others were on their way to the disk. It is told for the first one.
    CheckpointLeftOut {
        /// Its step.
        step: u64,
        /// How many were on their way.
        under_way: usize,
    },
    /// The disk of a peer is nearly full.
    DiskLow {
        /// Its name.
        peer: String,
        /// Free bytes.
        free_bytes: u64,
    },
    /// The disk is full. Training goes on, and the content that could not be written waits in memory.
    DiskFull {
        /// The file that cannot be written, and the reason.
        reason: String,
    },
    /// The disk has room again, and the content that waited is written.
    DiskWritten,
    /// Something else that people should know.
    Note {
        /// A sentence without a full stop.
        text: String,
    },
    /// The user asked to stop.
    Stopping,
    /// The run is over.
    Finished {
        /// Steps done.
        steps: u64,
    },
}

/// A line of `events.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    /// Seconds since 1970, in UTC.
    pub time: f64,
    /// The event.
    #[serde(flatten)]
    pub event: Event,
}

impl Timed {
    /// An event that happens now.
    pub fn now(event: Event) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { time: since.as_millis() as f64 / 1e3, event }
    }
}

impl Event {
    /// A note.
    pub fn note(text: impl Into<String>) -> Self {
        Self::Note { text: text.into() }
    }

    /// Whether `metrics.jsonl` has it, so that `events.jsonl` need not.
    pub fn is_metric(&self) -> bool {
        matches!(self, Self::Step(_) | Self::Evaluated { .. })
    }

    /// Whether it happens in a run in which nothing goes wrong. Its words may be left out for who wants quiet.
    pub fn is_routine(&self) -> bool {
        match self {
            Self::Started { incidents } => incidents.is_empty(),
            Self::Step(metrics) => !metrics.skipped,
            Self::Evaluated { val_loss, .. } => val_loss.is_some(),
            Self::Opened { .. }
            | Self::Listening { .. }
            | Self::Continued { .. }
            | Self::Joined { .. }
            | Self::Measuring
            | Self::Planned { .. }
            | Self::Codecs { .. }
            | Self::Better { .. }
            | Self::Saving { .. }
            | Self::Saved { .. }
            | Self::Finished { .. } => true,
            Self::TurnedAway { .. }
            | Self::Silent { .. }
            | Self::Answers { .. }
            | Self::Lost { .. }
            | Self::LinkLost { .. }
            | Self::Waiting { .. }
            | Self::Speed { .. }
            | Self::Poisoned { .. }
            | Self::Skipping { .. }
            | Self::NotSaved { .. }
            | Self::CheckpointLeftOut { .. }
            | Self::DiskLow { .. }
            | Self::DiskFull { .. }
            | Self::DiskWritten
            | Self::Note { .. }
            | Self::Stopping => false,
        }
    }

    /// The words for people, line by line. There are none for an event of which other words tell, such as a step.
    pub fn lines(&self) -> Vec<String> {
        let line = match self {
            Self::Opened { directory } => format!("run directory: {directory}"),
            Self::Continued { peers } => {
                let are = if *peers == 1 { "is" } else { "are" };
                format!("going on where the broker was killed, once its {} {are} back", counted(*peers, "peer"))
            }
            Self::Joined { peer, backend, device, .. } => format!("{peer} joined ({backend}, {device})"),
            Self::TurnedAway { reason } => format!("turned a joiner away: {reason}"),
            Self::Measuring => "measuring machines and links".to_owned(),
            Self::Planned {
                model,
                parameters,
                operators,
                peers,
                stages,
                scheduler,
                schedule,
                micro_batches,
                notes,
                predicted_step_s,
                targets: _,
            } => {
                let mut lines = vec![
                    format!(
                        "{model}: {} parameters, {} in {} over {}",
                        count(*parameters as f64),
                        counted(*operators, "operator"),
                        counted(*stages, "stage"),
                        counted(peers.len(), "peer"),
                    ),
                    format!("plan: {scheduler}, {schedule} schedule, {}", counted(*micro_batches, "micro-batch")),
                ];
                lines.extend(notes.iter().cloned());
                lines.extend(predicted_step_s.map(|s| format!("predicted: {} a step", seconds(s))));
                return lines;
            }
            Self::Started { incidents } => match incidents.first() {
                Some(i) => {
                    let took = seconds(i.detected_s + i.replanned_s + i.restored_s);
                    format!("training goes on from step {}, {took} after the loss", i.restarted_at)
                }
                None => return Vec::new(),
            },
            Self::Step(metrics) if metrics.skipped => {
                format!("step {}: the loss or a gradient is not finite; this update is skipped", metrics.step)
            }
            Self::Evaluated { step, val_loss, val_accuracy } => {
                let loss = match val_loss {
                    Some(loss) => format!("validation loss {loss:.4}"),
                    None => "the validation loss is not finite".to_owned(),
                };
                format!("step {step}: {loss}{}", accuracy(*val_accuracy))
            }
            Self::Codecs { step, lines } => return lines.iter().map(|line| format!("step {step}: {line}")).collect(),
            Self::Silent { peer, seconds: s } => format!("{peer} has not answered for {}", seconds(*s)),
            Self::Answers { peer } => format!("{peer} answers again"),
            Self::Lost { peer, reason, used: false, .. } => format!("{peer} is gone: {reason}"),
            Self::Lost { peer, reason, step, .. } => {
                format!("lost {peer} at step {step}: {reason}; the others take over its share")
            }
            Self::LinkLost { from, to, reason } => {
                format!("{from} cannot reach {to} any more: {reason}; planning around it")
            }
            Self::Waiting { reason } => format!("waiting for more machines: {reason}"),
            Self::Speed { peer, times } if *times > 1.5 => {
                format!("{peer} computes {times:.1}x slower than at the start; is something else running there?")
            }
            Self::Speed { peer, .. } => format!("{peer} computes as fast as at the start again"),
            Self::Better { peers, gain_s } => {
                let with = if peers.is_empty() { "other shares".to_owned() } else { peers.join(", ") };
                let gain = seconds(*gain_s);
                format!("with {with} the run ends about {gain} earlier: changing the plan after this step")
            }
            Self::Poisoned { peer, step, what, advice } => format!("step {step}: {peer} {what}; {advice}"),
            Self::Skipping { step, skipped, of, why } => {
                let why = why.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
                format!(
                    "step {step}: {skipped} of {of} steps were skipped so far, because the loss or a gradient was not \
                     finite, and the model learned nothing from them{why}"
                )
            }
            Self::NotSaved { step, reason, goes_on } => {
                let then = if *goes_on { "; training goes on" } else { "" };
                format!("the checkpoint of step {step} could not be written: {reason}{then}")
            }
            Self::CheckpointLeftOut { step, under_way } => {
                let are = if *under_way == 1 { "is" } else { "are" };
                format!(
                    "note: the checkpoint of step {step} is left out: {} {are} still on the way to the disk, and \
                     training does not wait; a larger checkpoint.every leaves time for each",
                    counted(*under_way, "checkpoint")
                )
            }
            Self::DiskLow { peer, free_bytes } => {
                let free = bytes(*free_bytes);
                format!(
                    "the disk of {peer} is nearly full: {free} are left; copies that find no room stay in its memory"
                )
            }
            Self::DiskFull { reason } => {
                format!("the disk is full ({reason}); free some space: training goes on, and metrics wait")
            }
            Self::DiskWritten => "the disk has room again; all metrics are written".to_owned(),
            Self::Note { text } => format!("note: {text}"),
            Self::Stopping => "saving and stopping; Ctrl-C again to stop at once".to_owned(),
            Self::Listening { .. }
            | Self::Step(_)
            | Self::Saving { .. }
            | Self::Saved { .. }
            | Self::Finished { .. } => return Vec::new(),
        };
        vec![line]
    }
}

/// `, accuracy 12.5 %`, or nothing for a model without classes.
pub fn accuracy(share: Option<f64>) -> String {
    share.map(|share| format!(", accuracy {:.1} %", 100.0 * share)).unwrap_or_default()
}
