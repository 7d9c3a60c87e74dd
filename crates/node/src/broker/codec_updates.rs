//! Codec changes during a run. A thread of its own asks the simulator, so that no verdict waits for it.

use std::sync::mpsc;

use fusionllm_plan::{Plan, PlanError, SavedPlan};
use fusionllm_protocol::{Action, AppliedCodecs, CodecChange, CodecUpdate, Regulator, Run, StepRecord};
use tokio::sync::mpsc::UnboundedSender;

use super::Incoming;
use super::observer::{Event, Observer};
use super::store::Store;
use crate::NodeError;

/// Hands finished steps to the regulator's thread, which ends when this is dropped.
pub(super) struct CodecAdvisor {
    steps: mpsc::Sender<StepRecord>,
}

impl CodecAdvisor {
    /// Starts the thread, which sends its updates for this generation to `events`.
    pub(super) fn start(
        generation: u32,
        mut regulator: Regulator,
        events: UnboundedSender<Incoming>,
    ) -> Result<Self, NodeError> {
        let (steps, records) = mpsc::channel();
        let work = move || {
            for record in records {
                match regulator.step(&record) {
                    Ok(None) => {}
                    // The run may be over.
                    Ok(Some(update)) => drop(events.send(Incoming::CodecUpdate(generation, update))),
                    Err(e) => return drop(events.send(Incoming::Note(format!("codecs stay as they are: {e}")))),
                }
            }
        };
        let thread = std::thread::Builder::new().name("regulator".into()).spawn(work);
        thread.map_err(|e| NodeError::State(format!("cannot start a thread: {e}")))?;
        Ok(Self { steps })
    }

    /// Passes on a finished step.
    pub(super) fn observe(&self, record: &StepRecord) {
        // If the thread has stopped, it told the reason.
        let _ = self.steps.send(record.clone());
    }
}

/// Sends peers their new codecs, if any change, and reports the update.
pub(super) fn apply(
    update: CodecUpdate,
    run: &mut Run,
    plan: &mut Plan,
    store: &mut Store,
    observer: &mut dyn Observer,
) -> Result<Vec<Action>, NodeError> {
    let lines: Vec<String> = update.changes.iter().map(|change| sentence(plan, change)).collect();
    let (mut step, mut messages) = (run.progress().step + 1, Vec::new());
    if update.changes_codecs() {
        // If only the last steps are in flight, nothing is left to change.
        let Some(AppliedCodecs { version, step: first, actions }) = run.set_codecs(&update.codecs) else {
            return Ok(Vec::new());
        };
        (plan.version, plan.codecs) = (version, update.codecs);
        store.plan(rewritten(&store.plan_text()?, plan)?)?;
        (step, messages) = (first, actions);
    }
    observer.event(Event::Codecs { step, lines: &lines });
    store.codecs(step, lines);
    Ok(messages)
}

/// The plan file with the new codecs, and with a new prediction if it holds the machines.
fn rewritten(text: &str, plan: &Plan) -> Result<String, PlanError> {
    let Ok(saved) = SavedPlan::from_json(text) else {
        return plan.to_json();
    };
    let saved = SavedPlan { plan: plan.clone(), ..saved };
    saved.to_json(&saved.simulate(false)?)
}

fn sentence(plan: &Plan, change: &CodecChange) -> String {
    let CodecChange { from, to, before, now, reason } = change;
    let name = |p: usize| plan.peers.get(p).map_or("?", String::as_str);
    let link = format!("link {} -> {}", name(from.0 as usize), name(to.0 as usize));
    match before == now {
        true => format!("{link} ({now}): {reason}"),
        false => format!("{link}: {before} -> {now}: {reason}"),
    }
}
