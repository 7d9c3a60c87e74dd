//! `report`: a page about runs.

use fusionllm_events::Timed;
use fusionllm_view::page::{self, Recorded, RunView};
use fusionllm_workspace::run_dir::RunRecord;

use crate::args::ReportArgs;
use crate::failure::Failure;
use crate::output::{complain, print, print_json};
use crate::units::{bytes, counted};

/// Writes the page.
pub(crate) fn report(args: &ReportArgs, json: bool) -> Result<(), Failure> {
    let runs = args.runs.iter().map(|run| RunRecord::read(run).map(Recorded::new)).collect::<Result<Vec<_>, _>>()?;
    for Recorded { name, prediction, .. } in &runs {
        if let Err(e) = prediction {
            complain(format_args!("{name}: the page has no prediction: {e}"));
        }
    }
    let events: Vec<Vec<&Timed>> = runs.iter().map(Recorded::events).collect();
    let views: Vec<RunView<'_>> = runs.iter().zip(&events).map(|(run, events)| run.view(events)).collect();
    let page = page::report(&views);
    let path = args.output.display();
    std::fs::write(&args.output, &page)
        .map_err(|e| Failure::running(format!("{path}: cannot be written")).because(&e))?;
    if json {
        return print_json(&serde_json::json!({ "page": path.to_string(), "runs": runs.len(), "bytes": page.len() }));
    }
    print(&format!("{path}: a page about {}, {}\n", counted(runs.len(), "run"), bytes(page.len() as u64)))
}
