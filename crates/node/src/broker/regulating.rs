//! The thread that suits codecs to the links: no verdict waits for the simulator that it asks.

use std::sync::mpsc;

use fusionllm_plan::{Plan, PlanError, SavedPlan};
use fusionllm_protocol::{Action, AppliedCodecs, Broker, CodecChange, CodecUpdate, Regulator, StepRecord};
use tokio::sync::mpsc::UnboundedSender;

use super::Incoming;
use crate::NodeError;
use crate::observer::{Event, Observer};
use crate::store::Store;

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
                    Ok(Some(recoding)) => drop(events.send(Incoming::CodecUpdate(recoding))),
                    Err(e) => return tracing::warn!("codecs stay as they are: {e}"),
                }
            }
        };
        let thread = std::thread::Builder::new().name("regulator".into()).spawn(work);
        thread.map_err(|e| NodeError::State(format!("cannot start a thread: {e}")))?;
        Ok(Self { steps })
    }

    /// Passes on the steps that are over.
    pub(super) fn steps(&self, actions: &[Action]) {
        for action in actions {
            if let Action::Step(record) = action {
                // A thread that gave up has said why.
                let _ = self.steps.send(record.clone());
            }
        }
    }
}

/// Tells peers and people of other codecs, or people of what speaks against those there are.
pub(super) fn recode(
    recoding: CodecUpdate,
    broker: &mut Broker,
    plan: &mut Plan,
    store: &mut Store,
    observer: &mut dyn Observer,
) -> Result<Vec<Action>, NodeError> {
    let lines: Vec<String> = recoding.changes.iter().map(|change| sentence(plan, change)).collect();
    let (mut step, mut told) = (broker.position().step + 1, Vec::new());
    if recoding.changes_codecs() {
        // With the last steps under way there is nothing to change any more.
        let Some(AppliedCodecs { version, step: first, actions }) = broker.set_codecs(&recoding.codecs) else {
            return Ok(Vec::new());
        };
        (plan.version, plan.codecs) = (version, recoding.codecs);
        store.plan(&rewritten(&store.plan_text()?, plan)?)?;
        (step, told) = (first, actions);
    }
    observer.event(Event::Codecs { step, lines: &lines });
    store.codecs(step, lines);
    Ok(told)
}

/// What people are told of a change.
/// The plan's file with other codecs, and what is predicted with them if it says what for.
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
