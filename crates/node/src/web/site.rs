//! The drawings of a run and those who watch them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fusionllm_transport::Secret;
use tokio::sync::{Mutex, oneshot, watch};

use super::board::{Look, SharedBoard};
use super::render::{Published, render};
use crate::relay::secret_text;

/// The least time between two drawings.
const BETWEEN: Duration = Duration::from_millis(500);

/// The time for which a look at the run is good enough.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long the broker's loop may take to answer. It is busy before the first step and after the last one.
const LOOK_PATIENCE: Duration = Duration::from_secs(1);

/// How long a visitor waits for the first drawing.
const PATIENCE: Duration = Duration::from_secs(5);

/// Asks the broker's loop to look at the run, and to answer here.
pub(crate) type Ask = Box<dyn Fn(oneshot::Sender<Look>) + Send + Sync>;

/// What the server's tasks share.
pub(super) struct Site {
    board: SharedBoard,
    ask: Ask,
    /// When the run was looked at last.
    looked: Mutex<Option<Instant>>,
    /// The newest drawing.
    drawings: watch::Sender<Option<Arc<Drawing>>>,
    /// How many watch.
    viewers: watch::Sender<usize>,
}

/// A drawing of the board.
pub(super) struct Drawing {
    pub(super) published: Published,
    /// The nonce of the page's script.
    pub(super) nonce: String,
    /// Whether the run is over, so that no other drawing follows.
    pub(super) is_last: bool,
    /// When the board was copied.
    drawn: Instant,
}

/// Somebody for whom drawings are made, until it is dropped.
pub(super) struct Viewer {
    site: Arc<Site>,
    drawings: watch::Receiver<Option<Arc<Drawing>>>,
}

impl Site {
    pub(super) fn new(board: SharedBoard, ask: Ask) -> Arc<Self> {
        let (drawings, viewers) = (watch::Sender::new(None), watch::Sender::new(0));
        Arc::new(Self { board, ask, looked: Mutex::new(None), drawings, viewers })
    }

    pub(super) fn board(&self) -> &SharedBoard {
        &self.board
    }

    /// Draws while somebody watches, until the run is over, and then once more.
    pub(super) async fn draw(self: Arc<Self>, mut over: watch::Receiver<bool>) {
        let mut viewers = self.viewers.subscribe();
        let draw = async {
            // The site has the sender.
            while viewers.wait_for(|count| *count > 0).await.is_ok() {
                self.look().await;
                self.drawn(false).await;
                tokio::time::sleep(BETWEEN).await;
            }
        };
        tokio::select! {
            () = draw => {}
            _ = over.wait_for(|over| *over) => {}
        }
        self.drawn(true).await;
    }

    async fn drawn(&self, is_last: bool) {
        let (drawn, nonce) = (Instant::now(), secret_text(&Secret::generate()));
        let board = self.board.lock().clone();
        let drawing = tokio::task::spawn_blocking(move || {
            let published = render(&board, &nonce);
            Drawing { published, nonce, is_last, drawn }
        });
        match drawing.await {
            Ok(drawing) => drop(self.drawings.send_replace(Some(Arc::new(drawing)))),
            Err(e) => tracing::error!("the page cannot be drawn: {e}"),
        }
    }

    /// Has the broker's loop look at the run, unless it did so just before.
    pub(super) async fn look(&self) {
        // Others wait here, and then need not ask.
        let mut looked = self.looked.lock().await;
        if looked.is_some_and(|when| when.elapsed() < LOOK_EVERY) {
            return;
        }
        let (answer, answered) = oneshot::channel();
        (self.ask)(answer);
        if let Ok(Ok(look)) = tokio::time::timeout(LOOK_PATIENCE, answered).await {
            self.board.lock().look = Some(Arc::new(look));
        }
        *looked = Some(Instant::now());
    }
}

impl Viewer {
    pub(super) fn new(site: &Arc<Site>) -> Self {
        let drawings = site.drawings.subscribe();
        site.viewers.send_modify(|count| *count += 1);
        Self { site: site.clone(), drawings }
    }

    /// A drawing that is fresh, if one comes in time.
    pub(super) async fn fresh(&mut self) -> Option<Arc<Drawing>> {
        let is_fresh = |drawing: &Option<Arc<Drawing>>| {
            drawing.as_ref().is_some_and(|drawing| drawing.is_last || drawing.drawn.elapsed() < 2 * BETWEEN)
        };
        let drawing = tokio::time::timeout(PATIENCE, self.drawings.wait_for(is_fresh)).await.ok()?.ok()?;
        drawing.clone()
    }

    /// The next drawing, which may be many after the last one.
    pub(super) async fn next(&mut self) -> Option<Arc<Drawing>> {
        self.drawings.changed().await.ok()?;
        self.drawings.borrow_and_update().clone()
    }
}

impl Drop for Viewer {
    fn drop(&mut self) {
        self.site.viewers.send_modify(|count| *count -= 1);
    }
}
