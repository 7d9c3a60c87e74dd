//! Codec changes during a run. A thread of its own asks the simulator, so that no verdict waits for it.

use std::sync::mpsc;

use fusionllm_plan::{Plan, SavedPlan};
use fusionllm_protocol::{CodecChange, CodecUpdate, Regulator, StepRecord};
use fusionllm_workbench::planning::Planned;

use crate::NodeError;

/// The regulator's decision after a step.
pub(super) struct NewCodecs {
    /// Sentences about the changes and warnings.
    pub(super) lines: Vec<String>,
    /// The plan with its new codecs, and the text of its file; `None` if there are only warnings.
    pub(super) plan: Option<(Plan, String)>,
}

/// Hands finished steps to the regulator's thread, which ends when this is dropped.
pub(super) struct CodecAdvisor {
    steps: mpsc::Sender<StepRecord>,
}

impl CodecAdvisor {
    /// Starts the thread, which hands its decisions about the plan to `decided`. It ends after an error.
    pub(super) fn start(
        planned: &Planned,
        decided: impl Fn(Result<NewCodecs, NodeError>) + Send + 'static,
    ) -> Result<Self, NodeError> {
        let optimizer = planned.job.train.optimizer.update_rule();
        let mut regulator = Regulator::new(&planned.plan, planned.programs.clone(), planned.cluster.clone(), optimizer);
        let mut plan_file = PlanFile { plan: planned.plan.clone(), saved: planned.saved() };
        let (steps, records) = mpsc::channel();
        let work = move || {
            for record in records {
                let update = match regulator.step(&record) {
                    Ok(None) => continue,
                    Ok(Some(update)) => plan_file.update(update),
                    Err(e) => Err(e.into()),
                };
                let failed = update.is_err();
                decided(update);
                if failed {
                    return;
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

/// A plan with its last codecs, and everything else that its file holds.
struct PlanFile {
    plan: Plan,
    /// The contents of the file where the machines are known.
    saved: Option<SavedPlan>,
}

impl PlanFile {
    /// Puts the update into words and, if codecs change, into the plan. The state machine counts versions in the same
    /// way: each change of codecs makes the next one.
    fn update(&mut self, update: CodecUpdate) -> Result<NewCodecs, NodeError> {
        let lines = update.changes.iter().map(|change| sentence(&self.plan, change)).collect();
        if !update.changes_codecs() {
            return Ok(NewCodecs { lines, plan: None });
        }
        self.plan.version += 1;
        self.plan.codecs = update.codecs;
        let text = match &mut self.saved {
            Some(saved) => {
                saved.plan = self.plan.clone();
                saved.to_json(&saved.simulate(false)?)?
            }
            None => self.plan.to_json()?,
        };
        Ok(NewCodecs { lines, plan: Some((self.plan.clone(), text)) })
    }
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
