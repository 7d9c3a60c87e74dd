//! All that the page of a run is drawn from.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fusionllm_events::{Event, Figures, StepMetrics, Timed};
use fusionllm_protocol::RunStatus;
use fusionllm_workspace::run_dir::{StepTrace, Summary};

/// The most points of a series. A curve on a screen shows fewer.
const MAX_POINTS: usize = 20_000;

/// The time for which the picture of a step stays. It is the largest part of the page, and people look at it longer.
const STEP_FOR: Duration = Duration::from_secs(10);

/// The most events that earlier processes of a run have left and that are shown, the last ones.
const MAX_EARLIER_EVENTS: usize = 100_000;

/// The state of a run that its page shows. A copy is cheap: what is large is shared.
#[derive(Debug, Clone, Default)]
pub(crate) struct Board {
    /// The run directory.
    pub(crate) directory: String,
    /// The steps so far, of a resumed run from its first one on. Their sentences about codecs are left out, because
    /// events have them.
    pub(crate) steps: Series<StepMetrics>,
    /// The validations: step, loss and accuracy.
    pub(crate) validations: Series<(u64, Option<f64>, Option<f64>)>,
    /// The events that `events.jsonl` has. The ledger bounds those of this process.
    pub(crate) events: Vec<Arc<Timed>>,
    /// The figures that monitoring reads. They begin with this process.
    pub(crate) figures: Figures,
    /// The job file, with every choice made.
    pub(crate) job: Arc<str>,
    /// The plan file of the present generation.
    pub(crate) plan: Arc<str>,
    /// The state of the run when somebody last asked for it; `None` before the broker's loop begins.
    pub(crate) look: Option<Arc<Look>>,
    /// The activities of the peers in a step not long ago, and the time when they were noted.
    pub(crate) last_step: Option<(Instant, Arc<StepTrace>)>,
}

/// The figures of a run at one moment.
#[derive(Debug)]
pub(crate) struct Look {
    /// The answer that the run's owner gets.
    pub(crate) status: RunStatus,
    /// The summary that the run would have if it ended now; `None` before the first plan.
    pub(crate) summary: Option<Summary>,
    /// The activities of the peers in the last step; `None` before it.
    pub(crate) last_step: Option<StepTrace>,
}

impl Board {
    /// Takes over the steps and events of earlier processes of this run.
    pub(crate) fn take_over(&mut self, steps: Vec<StepMetrics>, events: Vec<Timed>) {
        for metrics in steps {
            let validation = (metrics.step, metrics.val_loss, metrics.val_accuracy);
            self.step(metrics);
            if validation.1.is_some() {
                self.validations.push(validation);
            }
        }
        let left_out = events.len().saturating_sub(MAX_EARLIER_EVENTS);
        self.events = events.into_iter().skip(left_out).map(Arc::new).collect();
    }

    /// Notes an event. `kept` says whether the events' file has it, if it is no metric.
    pub(crate) fn happened(&mut self, event: Timed, kept: bool) {
        self.figures.add(&event.event);
        match event.event {
            Event::Step(metrics) => self.step(*metrics),
            Event::Evaluated { step, val_loss, val_accuracy } => {
                if let Some(metrics) = self.steps.last_mut().filter(|metrics| metrics.step == step) {
                    (metrics.val_loss, metrics.val_accuracy) = (val_loss, val_accuracy);
                }
                self.validations.push((step, val_loss, val_accuracy));
            }
            _ if kept => self.events.push(Arc::new(event)),
            _ => {}
        }
    }

    /// Notes a look at the run.
    pub(crate) fn looked(&mut self, mut look: Look) {
        let old = self.last_step.as_ref().is_none_or(|(when, _)| when.elapsed() >= STEP_FOR);
        if let Some(trace) = look.last_step.take().filter(|_| old) {
            self.last_step = Some((Instant::now(), Arc::new(trace)));
        }
        self.look = Some(Arc::new(look));
    }

    fn step(&mut self, metrics: StepMetrics) {
        self.steps.push(StepMetrics { codecs: Vec::new(), ..metrics });
    }

    /// Training goes back to a step: later ones are done again.
    pub(crate) fn rewind(&mut self, step: u64) {
        self.steps.rewind(|metrics| metrics.step <= step);
        self.validations.rewind(|(of, ..)| *of <= step);
    }
}

/// A board that the broker's loop and the server share. It is locked for as long as a line is added or a copy is made.
#[derive(Debug, Clone, Default)]
pub(crate) struct SharedBoard(Arc<Mutex<Board>>);

impl SharedBoard {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Board> {
        // A panic elsewhere leaves at worst a line out.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The points of a curve, which stay few however long the run is. Once they are too many, every second one is dropped,
/// and of those that follow, every second one, fourth one, and so on is kept. The last one is always there.
#[derive(Debug, Clone)]
pub(crate) struct Series<T> {
    kept: Vec<T>,
    /// The last point, if it is not among those.
    last: Option<T>,
    /// Of how many points one is kept.
    every: usize,
    /// Points since the last one that was kept.
    since: usize,
}

impl<T> Default for Series<T> {
    fn default() -> Self {
        Self { kept: Vec::new(), last: None, every: 1, since: 0 }
    }
}

impl<T> Series<T> {
    pub(crate) fn push(&mut self, point: T) {
        self.since += 1;
        if self.since < self.every && !self.kept.is_empty() {
            self.last = Some(point);
            return;
        }
        (self.since, self.last) = (0, None);
        self.kept.push(point);
        if self.kept.len() > MAX_POINTS {
            let mut stays = false;
            // The first one stays, and so does the last one, since the bound is even.
            self.kept.retain(|_| {
                stays = !stays;
                stays
            });
            self.every *= 2;
        }
    }

    /// Drops the last points, until one stays.
    fn rewind(&mut self, stays: impl Fn(&T) -> bool) {
        self.last.take_if(|point| !stays(point));
        while self.kept.pop_if(|point| !stays(point)).is_some() {}
    }

    #[cfg(test)]
    fn last(&self) -> Option<&T> {
        self.last.as_ref().or(self.kept.last())
    }

    fn last_mut(&mut self) -> Option<&mut T> {
        self.last.as_mut().or(self.kept.last_mut())
    }

    /// The points, in their order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.kept.iter().chain(&self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> StepMetrics {
        StepMetrics { step, loss: Some(1.0 / step as f64), ..StepMetrics::default() }
    }

    #[test]
    fn a_million_points_stay_few_and_even() {
        let mut series = Series::default();
        for point in 0..1_000_000u64 {
            series.push(point);
        }
        let points: Vec<u64> = series.iter().copied().collect();
        assert!(points.len() <= MAX_POINTS + 1 && points.len() > MAX_POINTS / 2, "{}", points.len());
        assert_eq!((points[0], series.last()), (0, Some(&999_999)));
        let (last, even) = points.split_last().unwrap();
        assert_eq!(*last, 999_999);
        assert!(even.windows(2).all(|pair| pair[1] - pair[0] == 64), "{:?}", &even[..4]);
    }

    #[test]
    fn steps_that_are_done_again_are_there_once() {
        let mut board = Board::default();
        (1..=9).for_each(|i| board.happened(Timed::now(Event::Step(Box::new(step(i)))), false));
        board.happened(Timed::now(Event::Evaluated { step: 9, val_loss: Some(2.0), val_accuracy: None }), false);
        assert_eq!(board.steps.last().unwrap().val_loss, Some(2.0));
        board.rewind(6);
        board.happened(Timed::now(Event::Step(Box::new(step(7)))), false);
        let steps: Vec<u64> = board.steps.iter().map(|m| m.step).collect();
        assert_eq!(steps, [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(board.validations.iter().count(), 0);
    }
}
