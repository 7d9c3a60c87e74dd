//! The thread that suits codecs to the links: no verdict waits for the simulator that it asks.

use std::sync::mpsc;

use fusionllm_plan::Plan;
use fusionllm_protocol::{Change, Regulator, StepRecord};
use tokio::sync::mpsc::UnboundedSender;

use super::Incoming;
use crate::NodeError;

/// Hands steps to the thread, which ends with this.
pub(super) struct Regulating {
    steps: mpsc::Sender<StepRecord>,
}

impl Regulating {
    /// Starts the thread. What it wants changed goes to `events`.
    pub(super) fn start(mut regulator: Regulator, events: UnboundedSender<Incoming>) -> Result<Self, NodeError> {
        let (steps, records) = mpsc::channel();
        let work = move || {
            for record in records {
                match regulator.step(&record) {
                    Ok(None) => {}
                    // The run may be over.
                    Ok(Some(recoding)) => drop(events.send(Incoming::Recoding(recoding))),
                    Err(e) => return tracing::warn!("codecs stay as they are: {e}"),
                }
            }
        };
        let thread = std::thread::Builder::new().name("regulator".into()).spawn(work);
        thread.map_err(|e| NodeError::State(format!("cannot start a thread: {e}")))?;
        Ok(Self { steps })
    }

    /// A step is over.
    pub(super) fn step(&self, record: &StepRecord) {
        // A thread that gave up has said why.
        let _ = self.steps.send(record.clone());
    }
}

/// What people are told of a change.
pub(super) fn sentence(plan: &Plan, change: &Change) -> String {
    let Change { from, to, before, now, cause } = change;
    let name = |p: usize| plan.peers.get(p).map_or("?", String::as_str);
    let link = format!("link {} -> {}", name(from.0 as usize), name(to.0 as usize));
    match before == now {
        true => format!("{link} ({now}): {cause}"),
        false => format!("{link}: {before} -> {now}: {cause}"),
    }
}
