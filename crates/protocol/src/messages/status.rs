//! The answers of a broker to the run's owner, above all the status of the run.

use serde::{Deserialize, Serialize};

/// The broker's message to an owner. It is the only one, unless it is a page. The broker then closes the connection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// The request was not carried out.
    Refused {
        /// Why.
        reason: String,
    },
    /// The run at this moment.
    Status(Box<RunStatus>),
    /// It is done.
    Done {
        /// One sentence that says what was done.
        what: String,
    },
    /// A new ticket.
    Ticket {
        /// The ticket's text.
        text: String,
    },
    /// The run's page as it is now.
    Page {
        /// The parts that differ from those that were sent on this connection: the name of each, and its HTML.
        parts: Vec<(String, String)>,
        /// Whether the run is over, so that no other page follows.
        is_last: bool,
    },
}

/// Whether a member can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    /// The member is connected, and answers.
    Present,
    /// The member is connected, and has not answered for too long. It is present again once it answers.
    Silent,
    /// The member's connection has ended. It may come back.
    Away,
    /// The member may not come back.
    Out,
}

/// The phase of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunPhase {
    /// It waits for members.
    Waiting,
    /// Machines and links are measured.
    Measuring,
    /// A plan is made.
    Planning,
    /// Peers load their shares.
    Loading,
    /// Peers train.
    Training,
    /// All steps are done, or the run was stopped, and the last checkpoint is on its way.
    Saving,
    /// The run has ended.
    Over,
}

impl RunPhase {
    /// The name for people and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Measuring => "measuring",
            Self::Planning => "planning",
            Self::Loading => "loading",
            Self::Training => "training",
            Self::Saving => "saving",
            Self::Over => "over",
        }
    }
}

/// A run at one moment. Unknown figures are `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunStatus {
    /// The phase of the run.
    pub phase: RunPhase,
    /// The number of the run's membership and plan.
    pub generation: u32,
    /// Steps done.
    pub step: u64,
    /// Steps in total.
    pub steps: u64,
    /// Loss of the last step.
    pub loss: Option<f64>,
    /// Seconds of a step: the median of the last ones.
    pub step_s: Option<f64>,
    /// Predicted seconds of a step.
    pub predicted_step_s: Option<f64>,
    /// Seconds until the last step is done, while the peers train.
    pub left_s: Option<f64>,
    /// The step of the last checkpoint that is whole.
    pub saved: Option<u64>,
    /// The step of the checkpoint on its way.
    pub saving: Option<u64>,
    /// Bytes of the model that the broker has sent while peers load, and bytes in total.
    pub loading: Option<(u64, u64)>,
    /// Members that the run waits for before its first step.
    pub wanted: u64,
    /// The members that are not gone for good, in the order in which they came; at most [`MAX_LISTED`].
    pub members: Vec<MemberStatus>,
    /// Members that are not listed.
    pub more_members: u64,
    /// The last interruptions of training, at most [`MAX_LISTED`].
    pub incidents: Vec<IncidentStatus>,
    /// Earlier interruptions.
    pub more_incidents: u64,
}

/// Most members, and most incidents, in a [`RunStatus`]. More would not fit a message.
pub const MAX_LISTED: usize = 1000;

/// A member at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// The member's name.
    pub name: String,
    /// Whether it can be used.
    pub standing: Standing,
    /// The backend's name.
    pub backend: String,
    /// The device's name.
    pub device: String,
    /// The member's place in the plan; `None` for a spare.
    pub peer: Option<u32>,
    /// Bytes of the parameters, buffers and optimizer state that it owns; `None` for a spare.
    pub share_bytes: Option<u64>,
    /// Forward and backward operators that it computes; `None` for a spare.
    pub operators: Option<u64>,
    /// Seconds that it computes in a step: the median of the last ones.
    pub compute_s: Option<f64>,
    /// Predicted seconds that it computes in a step.
    pub predicted_compute_s: Option<f64>,
    /// Measured operations per second of a matrix product.
    pub flops: Option<f64>,
    /// Measured bytes per second on its fastest link to another machine.
    pub bytes_per_s: Option<f64>,
    /// Seconds since it was last heard; `None` if it is not connected.
    pub silent_s: Option<f64>,
}

/// An interruption of training. See [`Incident`](crate::Incident).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct IncidentStatus {
    /// The kind of the incident: [`IncidentKind::name`](crate::IncidentKind::name).
    pub kind: String,
    /// The name of the peer that it happened to.
    pub peer: String,
    /// The last step that was complete.
    pub step: u64,
    /// The step that training went back to.
    pub restarted_at: u64,
    /// Seconds from the last sign of life until all peers were ready again.
    pub pause_s: f64,
    /// Seconds of training that were lost besides.
    pub lost_work_s: f64,
}
