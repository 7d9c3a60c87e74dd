//! Draws a board as a page.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use fusionllm_events::{StepMetrics, Timed};
use fusionllm_view::page::{self, Prediction, RunView};

use super::board::Board;
use super::site::Parts;

/// The parts of a run's page.
pub(crate) fn parts(view: &RunView<'_>) -> Parts {
    page::parts(view).into_iter().map(|(name, html)| (name, html.into_string().into())).collect()
}

/// The least time between two predictions. Each takes many simulations, and a run may change its codecs often.
const BETWEEN: Duration = Duration::from_secs(30);

/// How long a drawing waits for a prediction. Small plans are predicted in this time. For a cluster of many devices it
/// takes seconds, and nobody waits for the page so long.
const PATIENCE: Duration = Duration::from_millis(300);

/// A painter of pages. It keeps the prediction and the job, which take too long to be read for every drawing.
#[derive(Default)]
pub(crate) struct Painter {
    /// The text of the plan that was read last, the generation, and when.
    plan: Option<(Arc<str>, u32, Instant)>,
    prediction: Option<Prediction>,
    /// The prediction that a thread is making.
    coming: Option<Receiver<Option<Prediction>>>,
    /// The job, and its text.
    job: (Arc<str>, toml::Table),
}

impl Painter {
    /// Draws a board.
    pub(crate) fn render(&mut self, board: &Board) -> Parts {
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
        parts(&view)
    }

    /// Reads the plan and the job, if they have changed.
    fn read(&mut self, board: &Board) {
        let generation = board.look.as_ref().map_or(0, |look| look.status.generation);
        // Other machines are seen at once.
        let late = |(text, of, when): &(Arc<str>, u32, Instant)| {
            *text != board.plan && (*of != generation || when.elapsed() >= BETWEEN)
        };
        let mut patience = Duration::ZERO;
        if !board.plan.is_empty() && self.coming.is_none() && self.plan.as_ref().is_none_or(late) {
            if self.plan.as_ref().is_none_or(|(_, of, _)| *of != generation) {
                self.prediction = None;
            }
            self.plan = Some((board.plan.clone(), generation, Instant::now()));
            self.coming = predict(board.plan.clone());
            patience = PATIENCE;
        }
        if let Some(coming) = &self.coming {
            match coming.recv_timeout(patience) {
                Ok(prediction) => (self.prediction, self.coming) = (prediction, None),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.coming = None,
            }
        }
        if self.job.0 != board.job {
            self.job = (board.job.clone(), board.job.parse().unwrap_or_default());
        }
    }
}

/// Has a thread predict a plan. A plan that cannot be predicted has been told to the user elsewhere.
fn predict(plan: Arc<str>) -> Option<Receiver<Option<Prediction>>> {
    let (sender, coming) = channel();
    // Nobody may be there any more to receive it.
    let work = move || drop(sender.send(Prediction::read(&plan).unwrap_or_default()));
    let thread = std::thread::Builder::new().name("predict".into()).spawn(work);
    thread.is_ok().then_some(coming)
}
