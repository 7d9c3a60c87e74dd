//! Events of a run, for whoever watches it.

use std::path::Path;

use fusionllm_data::Dataset;
use fusionllm_plan::Plan;
use fusionllm_protocol::{Member, StepRecord};
use fusionllm_transport::Ticket;
use fusionllm_workbench::model::Model;
use fusionllm_workspace::run_dir::{IncidentSummary, Summary};

use crate::NodeError;

/// An event of a run.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// All input fits together, and the run has a directory.
    Opened {
        /// The run directory.
        directory: &'a Path,
    },
    /// The broker listens for joiners.
    Listening {
        /// The ticket with which joiners connect.
        ticket: &'a Ticket,
        /// The number of joiners that the run waits for.
        wanted: usize,
    },
    /// The run goes on where an earlier broker was killed, once its peers are back.
    Continued {
        /// The ticket with which more joiners connect.
        ticket: &'a Ticket,
        /// The number of peers that trained.
        peers: usize,
    },
    /// A joiner came, or a member came back.
    Joined {
        /// The member.
        member: &'a Member,
        /// Members present.
        present: usize,
        /// Members that the run waits for before it starts.
        wanted: usize,
        /// Whether the run has started before it.
        spare: bool,
    },
    /// A member has not answered for some seconds.
    Silent {
        /// Its name.
        name: &'a str,
        /// Seconds.
        seconds: f64,
    },
    /// A member answers again.
    Answers {
        /// Its name.
        name: &'a str,
    },
    /// A member is gone.
    Lost {
        /// Its name.
        name: &'a str,
        /// Why.
        reason: &'a str,
        /// Whether it had a share of the model. Then the run regroups.
        used: bool,
        /// The last step that was complete.
        step: u64,
    },
    /// Two peers cannot reach each other any more. The run regroups.
    LinkLost {
        /// The peer that says so.
        from: &'a str,
        /// The other one.
        to: &'a str,
        /// Why.
        reason: &'a str,
    },
    /// The run waits for more members.
    Waiting {
        /// Why.
        reason: &'a str,
    },
    /// A peer computes at another speed than before.
    Speed {
        /// Its name.
        name: &'a str,
        /// Its seconds of computing over those at the start.
        times: f64,
    },
    /// A skipped step shows where a number was first not finite. It is told if that is new.
    Poisoned {
        /// The peer's name, or that of the broker.
        name: &'a str,
        /// The step.
        step: u64,
        /// What happened, in words that follow the name.
        what: &'a str,
        /// Advice to the user.
        advice: &'a str,
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
        why: Option<&'a str>,
    },
    /// The run changes to a better plan.
    Better {
        /// The members that come in.
        names: &'a [&'a str],
        /// Predicted seconds that it saves.
        gain_s: f64,
    },
    /// Peers load their shares.
    Loading {
        /// Bytes that the broker has sent.
        sent: u64,
        /// Bytes that it sends in total.
        total: u64,
    },
    /// A joiner was refused.
    TurnedAway {
        /// The reason.
        reason: &'a str,
    },
    /// All joiners are present and measure their machines and links.
    Measuring,
    /// The plan is made, and peers load their shares.
    Planned {
        /// The plan.
        plan: &'a Plan,
        /// Sentences about the plan.
        notes: &'a [String],
        /// The predicted seconds per step, where the machines are known.
        predicted_step_s: Option<f64>,
        /// The model that is trained.
        model: &'a Model,
        /// The data that it is trained on.
        data: &'a Dataset,
    },
    /// All peers are ready.
    Started {
        /// The incidents that made a new generation necessary; none for the first one.
        incidents: &'a [IncidentSummary],
    },
    /// A step is done.
    Step {
        /// The figures of the step.
        record: &'a StepRecord,
        /// Samples per second.
        samples_per_s: f64,
        /// Targets per second: tokens, or images. `None` if an imported model does not tell what its targets are.
        targets_per_s: Option<f64>,
    },
    /// Codecs change, or the regulator warns about one.
    Codecs {
        /// The first step with the new codecs.
        step: u64,
        /// One sentence per link.
        lines: &'a [String],
    },
    /// An evaluation is done.
    Evaluated {
        /// Steps done so far.
        step: u64,
        /// Mean loss over the held-out targets.
        val_loss: f64,
        /// The fraction of held-out targets for which the largest logit is right; `None` for a model without classes or
        /// with unknown targets.
        val_accuracy: Option<f64>,
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
    /// A checkpoint could not be written. Training goes on.
    NotSaved {
        /// The step of the checkpoint.
        step: u64,
        /// Why.
        error: &'a NodeError,
    },
    /// The disk is full. Training goes on, and the content that could not be written waits in memory.
    DiskFull {
        /// The file that cannot be written, and the reason.
        error: &'a NodeError,
    },
    /// The disk has room again, and the content that waited is written.
    DiskWritten,
    /// Something else that people should know.
    Note {
        /// A sentence without a full stop.
        text: &'a str,
    },
    /// The user asked to stop.
    Stopping,
    /// The run is over.
    Finished {
        /// The figures of the run.
        summary: &'a Summary,
    },
}

/// Receives the events of a run.
pub trait Observer {
    /// Handles one event.
    fn event(&mut self, event: Event<'_>);
}
