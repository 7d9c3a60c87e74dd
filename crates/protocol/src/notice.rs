//! The events that a run reports of its members, and the cost of lost members.

use fusionllm_events::Event;

use crate::MemberId;

/// The reason why a generation ended before the run did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IncidentKind {
    /// A peer's connection ended.
    Lost,
    /// A peer did not answer for too long.
    Silent,
    /// A peer broke the protocol, failed or stalled.
    Expelled,
    /// The run's owner put a peer out.
    Kicked,
    /// Two peers cannot reach each other.
    Link,
    /// A peer left in good order.
    Left,
    /// The broker was started again.
    Broker,
}

impl IncidentKind {
    /// The name in `summary.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Silent => "silent",
            Self::Expelled => "expelled",
            Self::Kicked => "kicked",
            Self::Link => "link",
            Self::Left => "left",
            Self::Broker => "broker",
        }
    }
}

/// An interruption of training. Times are in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Incident {
    /// The kind of the incident.
    pub kind: IncidentKind,
    /// The member that it happened to.
    pub member: MemberId,
    /// The last step that was complete.
    pub step: u64,
    /// The step that training went back to.
    pub restarted_at: u64,
    /// Seconds from the last sign of life until the broker acted.
    pub detected_s: f64,
    /// Seconds from then until there was a new plan.
    pub replanned_s: f64,
    /// Seconds from then until all peers were ready.
    pub restored_s: f64,
    /// Seconds of training that were lost: from the cut that training went back to, until the last sign of life.
    pub lost_work_s: f64,
}

/// An incident that is not over.
#[derive(Debug)]
pub(crate) struct Open {
    incident: Incident,
    since: f64,
}

impl Open {
    /// `heard` is the time of the last sign of life.
    pub(crate) fn begin(kind: IncidentKind, member: MemberId, step: u64, heard: f64, now: f64) -> Self {
        let incident = Incident {
            kind,
            member,
            step,
            restarted_at: step,
            detected_s: now - heard,
            replanned_s: 0.0,
            restored_s: 0.0,
            lost_work_s: 0.0,
        };
        Self { incident, since: now }
    }

    /// The time of the last sign of life.
    pub(crate) fn heard(&self) -> f64 {
        self.since - self.incident.detected_s - self.incident.replanned_s
    }

    pub(crate) fn planned(&mut self, now: f64) {
        self.incident.replanned_s += now - self.since;
        self.since = now;
    }

    /// Training goes back to a step that was complete `lost_work_s` before the last sign of life. The last time counts.
    pub(crate) fn goes_back(&mut self, step: u64, lost_work_s: f64) {
        self.incident.restarted_at = step;
        self.incident.lost_work_s = lost_work_s;
    }

    pub(crate) fn over(mut self, now: f64) -> Incident {
        self.incident.restored_s = now - self.since;
        self.incident
    }
}

/// Something that people should know.
#[derive(Debug, Clone, PartialEq)]
pub enum Notice {
    /// An event that the broker tells as it is.
    Event(Event),
    /// A member has not answered for some seconds. The broker looks whether its machine still answers.
    Silent {
        /// The member.
        member: MemberId,
        /// Seconds.
        seconds: f64,
    },
    /// A member is gone.
    Lost {
        /// The member.
        member: MemberId,
        /// Why.
        reason: String,
        /// Whether it had a share of the model.
        used: bool,
        /// The last step that was complete.
        step: u64,
    },
    /// A skipped step shows where a number was first not finite, or which peer sends one without a reason. It is told
    /// again only if another skipped step shows something else. The broker adds which data were the cause.
    Poisoned {
        /// The peer, or `None` for the broker.
        member: Option<MemberId>,
        /// The step, counted from 1.
        step: u64,
        /// What happened, in words that follow the name of the peer or the broker.
        what: String,
        /// Advice to the user.
        advice: &'static str,
        /// The micro-batch whose data are the cause, as far as the steps beside it show.
        micro_batch: Option<u32>,
    },
    /// All peers of a generation are ready.
    Started {
        /// The generation.
        generation: u32,
        /// The incidents that made the generation necessary. There are none for the first generation, or for one with
        /// more members.
        incidents: Vec<Incident>,
    },
}

/// A member's text as it may appear in a message for people: one line of limited length.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().take(1000).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
