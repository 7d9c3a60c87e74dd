//! The newest drawing of a run's page, and those who watch.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

/// The least time between two drawings.
pub(super) const BETWEEN: Duration = Duration::from_millis(500);

/// The parts of a page in their order: the name of each, and its HTML.
pub(crate) type Parts = Vec<(&'static str, Arc<str>)>;

/// The state that all who draw a page and all who watch it share.
pub(crate) struct Site {
    /// The newest drawing.
    drawings: watch::Sender<Option<Arc<Drawing>>>,
    /// How many watch.
    viewers: watch::Sender<usize>,
}

/// The page of a run at one moment.
pub(crate) struct Drawing {
    /// The title of the page.
    pub(crate) name: String,
    pub(crate) parts: Parts,
    /// Whether the parts come from another machine.
    pub(crate) foreign: bool,
    /// Whether the run is over, so that no other drawing follows.
    pub(crate) is_last: bool,
    /// Since when the broker has not answered; `None` if it answers.
    pub(crate) silent: Option<SystemTime>,
    /// When it was drawn.
    pub(crate) drawn: Instant,
}

/// Somebody for whom drawings are made, until it is dropped.
pub(crate) struct Viewer {
    site: Arc<Site>,
    drawings: watch::Receiver<Option<Arc<Drawing>>>,
    came: Instant,
}

impl Site {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { drawings: watch::Sender::new(None), viewers: watch::Sender::new(0) })
    }

    /// Shows a drawing to all viewers.
    pub(crate) fn show(&self, drawing: Drawing) {
        self.drawings.send_replace(Some(Arc::new(drawing)));
    }

    /// Waits until somebody watches.
    pub(crate) async fn is_watched(&self) {
        // The site has the sender.
        let _ = self.viewers.subscribe().wait_for(|count| *count > 0).await;
    }

    /// Waits until nobody watches.
    pub(crate) async fn is_left(&self) {
        let _ = self.viewers.subscribe().wait_for(|count| *count == 0).await;
    }
}

impl Viewer {
    pub(crate) fn new(site: &Arc<Site>) -> Self {
        let drawings = site.drawings.subscribe();
        site.viewers.send_modify(|count| *count += 1);
        Self { site: site.clone(), drawings, came: Instant::now() }
    }

    /// The first drawing that was fresh when this viewer came, or that was begun later. Drawing takes long where the
    /// machine is busy, so it does not matter how old the drawing is by now.
    pub(crate) async fn fresh(&mut self) -> Option<Arc<Drawing>> {
        let came = self.came;
        let is_fresh = |d: &Arc<Drawing>| d.is_last || d.silent.is_some() || d.drawn + 2 * BETWEEN > came;
        self.drawings.wait_for(|drawing| drawing.as_ref().is_some_and(is_fresh)).await.ok()?.clone()
    }

    /// The next drawing, which may be many after the last one.
    pub(crate) async fn next(&mut self) -> Option<Arc<Drawing>> {
        self.drawings.changed().await.ok()?;
        self.drawings.borrow_and_update().clone()
    }
}

impl Drop for Viewer {
    fn drop(&mut self) {
        self.site.viewers.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a drawing that took long was never fresh, so the page could not be read on a busy machine.
    #[tokio::test]
    async fn a_drawing_is_fresh_if_it_was_begun_after_the_viewer_came() {
        let site = Site::new();
        let mut viewer = Viewer::new(&site);
        let came = viewer.came;
        viewer.came = came + Duration::from_secs(10);
        let show = |drawn| {
            let name = "run".to_owned();
            site.show(Drawing { name, parts: Vec::new(), foreign: false, is_last: false, silent: None, drawn });
        };
        show(came);
        assert!(tokio::time::timeout(Duration::ZERO, viewer.fresh()).await.is_err(), "ten seconds before it came");
        viewer.came = came.checked_sub(Duration::from_secs(10)).unwrap();
        show(came.checked_sub(Duration::from_secs(8)).unwrap());
        assert!(tokio::time::timeout(Duration::ZERO, viewer.fresh()).await.is_ok(), "it took eight seconds");
    }
}
