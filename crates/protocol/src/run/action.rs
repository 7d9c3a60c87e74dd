//! The actions that a run asks of the broker's driver.

use fusionllm_plan::Cluster;

use fusionllm_events::Event;

use crate::{BatchId, EvalRecord, MemberId, Notice, Order, StepRecord, ToPeer, TrainingProgress};

/// An action for the broker's driver.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send a message to a member.
    Send(MemberId, ToPeer),
    /// Stream the batch of the pass with this number to the peers that read it, and call
    /// [`Run::set_weights`](crate::Run::set_weights).
    Feed(u64, BatchId),
    /// Record a completed step.
    Step(StepRecord),
    /// Record a completed evaluation.
    Evaluated(EvalRecord),
    /// Expect snapshots of this step.
    BeginCheckpoint(u64),
    /// All snapshots have arrived: complete the checkpoint, and call
    /// [`Run::checkpoint_committed`](crate::Run::checkpoint_committed).
    Commit(TrainingProgress),
    /// Forget the checkpoint in progress.
    AbandonCheckpoint(u64),
    /// Close a member's connection, after what was sent to it.
    Dismiss(MemberId),
    /// Make a plan for these members, and call [`Run::planned`](crate::Run::planned) or
    /// [`Run::not_planned`](crate::Run::not_planned).
    Plan {
        /// The members.
        members: Vec<MemberId>,
        /// Their machines and links, if they are measured: device `i` is member `i` of the list.
        cluster: Option<Cluster>,
        /// Sentences about them.
        notes: Vec<String>,
    },
    /// Training goes back, so the records of later steps are void.
    Rewind(TrainingProgress),
    /// Write [`Run::state`](crate::Run::state) to the disk before the next action.
    Persist,
    /// A generation begins: send every member its assignment.
    Assign(Order),
    /// Tell people about this.
    Notice(Notice),
    /// The run is complete.
    Finish(TrainingProgress),
    /// The run failed for this reason.
    Fail(String),
    /// The run was to stop, and its newest step could not be saved for this reason. Another broker may go on with it:
    /// members who have more than the disk keep it, and nobody tells them to go.
    Suspend(String),
}

impl Action {
    /// Tells an event as it is.
    pub(super) fn event(event: Event) -> Self {
        Self::Notice(Notice::Event(event))
    }
}
