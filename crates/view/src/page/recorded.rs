//! A run that nobody asks for its state: its files say all.

use fusionllm_events::Timed;
use fusionllm_plan::PlanError;
use fusionllm_workspace::run_dir::RunRecord;

use super::{Prediction, RunView, validations};

/// A run as its directory describes it, with what its page needs besides.
#[derive(Debug)]
pub struct Recorded {
    /// The name by which people find the run.
    pub name: String,
    /// The content of the directory.
    pub record: RunRecord,
    validations: Vec<(u64, Option<f64>)>,
    /// The prediction for the run's plan. A page does without it if the plan is one of another version.
    pub prediction: Result<Option<Prediction>, PlanError>,
}

impl Recorded {
    /// Makes the prediction, which takes a while.
    pub fn new(record: RunRecord) -> Self {
        let prediction = record.plan.as_ref().map_or(Ok(None), |plan| Prediction::read(plan));
        let name = record.directory.display().to_string();
        Self { name, validations: validations(&record.metrics), record, prediction }
    }

    /// The events in the form that a view has.
    pub fn events(&self) -> Vec<&Timed> {
        self.record.events.iter().collect()
    }

    /// The run as a page shows it.
    pub fn view<'a>(&'a self, events: &'a [&'a Timed]) -> RunView<'a> {
        RunView {
            name: &self.name,
            job: &self.record.job,
            metrics: &self.record.metrics,
            validations: &self.validations,
            events,
            prediction: self.prediction.as_ref().ok().and_then(Option::as_ref),
            last_step: self.record.last_step.as_ref(),
            summary: self.record.summary.as_ref(),
            status: None,
        }
    }
}
