//! The files that a run writes into its directory while it trains. A full disk delays them and does not end the run.

use std::collections::VecDeque;
use std::io::ErrorKind;

use fusionllm_data::DiskError;
use fusionllm_events::{Event, StepMetrics, Timed};
use fusionllm_workspace::run_dir::RunDir;

use crate::NodeError;

/// Most lines that wait for room on the disk. They take some 30 MB.
const MAX_WAITING: usize = 100_000;

/// The most events that this process writes. Members can make some as often as they like.
const MAX_EVENTS: usize = 100_000;

/// The most joiners that were turned away and are written. Anybody can be turned away as often as he likes.
const MAX_TURNED_AWAY: usize = 1_000;

/// A change of the disk: full, or with room again.
#[derive(Debug)]
pub(crate) enum DiskNews {
    /// The disk is full, and the run goes on.
    Full(NodeError),
    /// All lines and files that waited are written.
    Written,
}

/// The files that change while a run goes on, and the content that could not be written to them yet.
pub(crate) struct Ledger {
    run: RunDir,
    lines: VecDeque<StepMetrics>,
    events: VecDeque<Timed>,
    /// Events so far, and joiners that were turned away among them.
    told: (usize, usize),
    job: Option<String>,
    plan: Option<String>,
    full: bool,
    news: Option<DiskNews>,
}

impl Ledger {
    pub(crate) fn new(run: RunDir) -> Self {
        Self {
            run,
            lines: VecDeque::new(),
            events: VecDeque::new(),
            told: (0, 0),
            job: None,
            plan: None,
            full: false,
            news: None,
        }
    }

    pub(crate) fn run(&self) -> &RunDir {
        &self.run
    }

    /// Adds the metrics of a step.
    pub(crate) fn record(&mut self, metrics: StepMetrics) -> Result<(), NodeError> {
        self.lines.push_back(metrics);
        let written = self.write();
        self.allow_full(written)
    }

    /// Adds an event, unless there were so many that others must mean to fill the disk. If that fails for another reason
    /// than a full disk, the next step reports it, since it fails too. Returns whether the event was added.
    pub(crate) fn tell(&mut self, event: Timed) -> bool {
        let (told, turned_away) = &mut self.told;
        let is_stranger = matches!(event.event, Event::TurnedAway { .. });
        if *told >= MAX_EVENTS || (is_stranger && *turned_away >= MAX_TURNED_AWAY) {
            return false;
        }
        (*told, *turned_away) = (*told + 1, *turned_away + usize::from(is_stranger));
        self.events.push_back(event);
        let written = self.write();
        let _ = self.allow_full(written);
        true
    }

    /// Replaces the job.
    pub(crate) fn replace_job(&mut self, toml: String) -> Result<(), NodeError> {
        self.job = Some(toml);
        let written = self.write();
        self.allow_full(written)
    }

    /// Replaces the plan.
    pub(crate) fn replace_plan(&mut self, json: String) -> Result<(), NodeError> {
        self.plan = Some(json);
        let written = self.write();
        self.allow_full(written)
    }

    /// Drops the metrics of all steps after this one.
    pub(crate) fn rewind(&mut self, step: u64) -> Result<(), NodeError> {
        self.lines.retain(|metrics| metrics.step <= step);
        Ok(self.run.rewind(step)?)
    }

    /// The change of the disk since the last call.
    pub(crate) fn take_news(&mut self) -> Option<DiskNews> {
        self.news.take()
    }

    /// Writes all lines and files that wait.
    ///
    /// # Errors
    ///
    /// The disk is still full, or fails.
    pub(crate) fn write(&mut self) -> Result<(), DiskError> {
        if let Some(job) = &self.job {
            self.run.write_job(job)?;
            self.job = None;
        }
        if let Some(plan) = &self.plan {
            self.run.write_plan(plan)?;
            self.plan = None;
        }
        while let Some(event) = self.events.front() {
            self.run.tell(event)?;
            self.events.pop_front();
        }
        while let Some(metrics) = self.lines.front() {
            self.run.record(metrics)?;
            self.lines.pop_front();
        }
        Ok(())
    }

    fn allow_full(&mut self, written: Result<(), DiskError>) -> Result<(), NodeError> {
        match written {
            Ok(()) if self.full => (self.full, self.news) = (false, Some(DiskNews::Written)),
            Ok(()) => {}
            Err(e) if !is_full(&e) || self.lines.len() + self.events.len() > MAX_WAITING => return Err(e.into()),
            Err(_) if self.full => {}
            Err(e) => (self.full, self.news) = (true, Some(DiskNews::Full(e.into()))),
        }
        Ok(())
    }
}

fn is_full(error: &DiskError) -> bool {
    matches!(error.source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use fusionllm_workspace::run_dir::read_events;

    use super::*;

    #[test]
    fn strangers_do_not_fill_the_file_of_events() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run");
        let mut ledger = Ledger::new(RunDir::create(Some(&path), "").unwrap());
        for _ in 0..MAX_TURNED_AWAY + 500 {
            ledger.tell(Timed::now(Event::TurnedAway { reason: "wrong ticket".into() }));
        }
        ledger.tell(Timed::now(Event::Saved { step: 7 }));
        let events = read_events(&path).unwrap();
        assert_eq!(events.len(), MAX_TURNED_AWAY + 1);
        assert_eq!(events[MAX_TURNED_AWAY].event, Event::Saved { step: 7 });
    }
}
