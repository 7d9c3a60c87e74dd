//! What a run tells whoever watches it.

use std::path::Path;

use fusionllm_plan::Plan;
use fusionllm_protocol::{Member, StepRecord};
use fusionllm_transport::Ticket;

use crate::data::Dataset;
use crate::model::Model;
use crate::run_dir::Summary;

/// What a person may want to see of a run.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// All that was given fits together, and the run has a directory.
    Opened {
        /// The directory.
        directory: &'a Path,
    },
    /// Joiners can come.
    Listening {
        /// What they are given.
        ticket: &'a Ticket,
        /// How many are wanted.
        wanted: usize,
    },
    /// One came.
    Joined {
        /// Who.
        member: &'a Member,
        /// How many are there.
        present: usize,
        /// How many are wanted.
        wanted: usize,
    },
    /// One left before the run began.
    Left {
        /// Who.
        name: &'a str,
    },
    /// Somebody was not let in.
    TurnedAway {
        /// Why.
        reason: &'a str,
    },
    /// All joiners are there; they measure their machines and the links between them.
    Measuring,
    /// The plan is made; peers load their shares.
    Planned {
        /// The plan.
        plan: &'a Plan,
        /// What is to be known of it, a sentence each.
        notes: &'a [String],
        /// Seconds a step is to take, where the machines are known.
        predicted_step_s: Option<f64>,
        /// The model.
        model: &'a Model,
        /// What it learns from.
        data: &'a Dataset,
    },
    /// All peers are ready.
    Started,
    /// A step is over.
    Step {
        /// Its record.
        record: &'a StepRecord,
        /// Targets (tokens, or images) a second.
        targets_per_s: f64,
    },
    /// Codecs of links change, or what speaks against them.
    Codecs {
        /// The first step that it holds for.
        step: u64,
        /// A sentence for each link.
        lines: &'a [String],
    },
    /// A validation is over.
    Evaluated {
        /// Batches trained on.
        step: u64,
        /// Mean loss over the held-out targets.
        val_loss: f64,
        /// Share of them that the largest logit hits.
        val_accuracy: f64,
    },
    /// Peers begin to send a checkpoint.
    Saving {
        /// Of which step.
        step: u64,
    },
    /// A checkpoint is whole.
    Saved {
        /// Of which step.
        step: u64,
    },
    /// The emulated links were not what the testbed says.
    Shortfall {
        /// What happened to them.
        reason: &'a str,
    },
    /// The user asked to stop.
    Stopping,
    /// All is done.
    Finished {
        /// What the run was.
        summary: &'a Summary,
    },
}

/// Is told what happens.
pub trait Observer {
    /// Something happened.
    fn event(&mut self, event: Event<'_>);
}
