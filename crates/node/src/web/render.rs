//! Draws a board as a page.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fusionllm_events::{StepMetrics, Timed};
use fusionllm_view::page::{self, Prediction, RunView};

use super::board::Board;

/// A drawing of a board.
pub(crate) struct Published {
    /// The whole document. Its script has the nonce that was given, and replaces the content of the element whose `id` is
    /// the name of a fragment by that fragment.
    pub(crate) page: Arc<str>,
    /// The parts that change. Viewers are sent those that differ from the ones that they have.
    pub(crate) fragments: BTreeMap<&'static str, Arc<str>>,
}

/// The least time between two predictions. Each takes many simulations, and a run may change its codecs often.
const BETWEEN: Duration = Duration::from_secs(30);

/// What takes too long to be made for every drawing.
#[derive(Default)]
pub(crate) struct Painter {
    /// The text of the plan that was read last, the generation, and when.
    plan: Option<(Arc<str>, u32, Instant)>,
    prediction: Option<Prediction>,
    /// The job, and its text.
    job: (Arc<str>, toml::Table),
}

impl Painter {
    /// Draws a board. The page's script is allowed by `nonce`, which nobody can guess.
    pub(crate) fn render(&mut self, board: &Board, nonce: &str) -> Published {
        self.read(board);
        let steps: Vec<StepMetrics> = board.steps.iter().cloned().collect();
        let validations: Vec<(u64, Option<f64>)> = board.validations.iter().map(|v| (v.0, v.1)).collect();
        let events: Vec<&Timed> = board.events.iter().map(Arc::as_ref).collect();
        let look = board.look.as_deref();
        let view = RunView {
            name: &board.directory,
            job: &self.job.1,
            metrics: &steps,
            validations: &validations,
            events: &events,
            prediction: self.prediction.as_ref(),
            last_step: board.last_step.as_ref().map(|(_, trace)| trace.as_ref()),
            summary: look.and_then(|look| look.summary.as_ref()),
            status: look.map(|look| &look.status),
        };
        let parts = page::parts(&view);
        let page = page::live(&view, &parts, nonce).into();
        let fragments = parts.into_iter().map(|(name, html)| (name, html.into_string().into())).collect();
        Published { page, fragments }
    }

    /// Reads the plan and the job, if they have changed.
    fn read(&mut self, board: &Board) {
        let generation = board.look.as_ref().map_or(0, |look| look.status.generation);
        // Other machines are seen at once.
        let late = |(text, of, when): &(Arc<str>, u32, Instant)| {
            *text != board.plan && (*of != generation || when.elapsed() >= BETWEEN)
        };
        if !board.plan.is_empty() && self.plan.as_ref().is_none_or(late) {
            // A plan that cannot be predicted has been told to the user elsewhere.
            self.prediction = Prediction::read(&board.plan).unwrap_or_default();
            self.plan = Some((board.plan.clone(), generation, Instant::now()));
        }
        if self.job.0 != board.job {
            self.job = (board.job.clone(), board.job.parse().unwrap_or_default());
        }
    }
}
