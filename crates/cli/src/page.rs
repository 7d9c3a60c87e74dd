//! `report`: a page about runs.

use std::path::Path;

use fusionllm_plan::SavedPlan;
use fusionllm_view::page::{self, Prediction, RunView};
use fusionllm_workspace::run_dir::RunRecord;

use crate::args::ReportArgs;
use crate::failure::Failure;
use crate::output::{complain, print, print_json};
use crate::units::{bytes, counted};

/// A run with what its page needs besides.
struct Run {
    name: String,
    record: RunRecord,
    prediction: Option<Prediction>,
}

impl Run {
    fn read(directory: &Path) -> Result<Self, Failure> {
        let record = RunRecord::read(directory)?;
        let name = directory.display().to_string();
        Ok(Self { prediction: prediction(&record, &name), record, name })
    }

    fn view(&self) -> RunView<'_> {
        RunView {
            name: &self.name,
            job: &self.record.job,
            metrics: &self.record.metrics,
            events: &self.record.events,
            prediction: self.prediction.as_ref(),
            last_step: self.record.last_step.as_ref(),
            summary: self.record.summary.as_ref(),
            status: None,
        }
    }
}

/// The prediction for a run's plan. There is none where machines were not known. The page does without it, too, if the
/// plan is one of another version.
fn prediction(record: &RunRecord, name: &str) -> Option<Prediction> {
    let text = record.plan.as_ref()?;
    let known = serde_json::from_str::<serde_json::Value>(text).is_ok_and(|plan| plan.get("cluster").is_some());
    if !known {
        return None;
    }
    let made = SavedPlan::from_json(text).and_then(Prediction::new);
    made.inspect_err(|e| complain(format_args!("{name}: the page has no prediction: {e}"))).ok()
}

/// Writes the page.
pub(crate) fn report(args: &ReportArgs, json: bool) -> Result<(), Failure> {
    let runs = args.runs.iter().map(|run| Run::read(run)).collect::<Result<Vec<_>, _>>()?;
    let views: Vec<RunView<'_>> = runs.iter().map(Run::view).collect();
    let page = page::report(&views);
    let path = args.output.display();
    std::fs::write(&args.output, &page)
        .map_err(|e| Failure::running(format!("{path}: cannot be written")).because(&e))?;
    if json {
        return print_json(&serde_json::json!({ "page": path.to_string(), "runs": runs.len(), "bytes": page.len() }));
    }
    print(&format!("{path}: a page about {}, {}\n", counted(runs.len(), "run"), bytes(page.len() as u64)))
}
