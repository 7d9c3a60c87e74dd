//! The drawer of a run's page, which works while somebody watches.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, oneshot, watch};
use tokio::time::timeout;

use super::board::{Look, SharedBoard};
use super::render::Painter;
use super::site::{BETWEEN, Drawing, Site};

/// The time for which a look at the run is good enough.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long the broker's loop may take to answer. It is busy before the first step and after the last one.
const LOOK_PATIENCE: Duration = Duration::from_secs(1);

/// Asks the broker's loop to look at the run, and to answer here.
pub(crate) type Ask = Box<dyn Fn(oneshot::Sender<Look>) + Send + Sync>;

/// Draws the page of a run for the site.
pub(crate) struct Drawer {
    board: SharedBoard,
    ask: Ask,
    painter: Arc<std::sync::Mutex<Painter>>,
    /// When the run was looked at last.
    looked: Mutex<Option<Instant>>,
    site: Arc<Site>,
}

impl Drawer {
    pub(super) fn new(board: SharedBoard, ask: Ask, site: Arc<Site>) -> Arc<Self> {
        Arc::new(Self { board, ask, painter: Arc::default(), looked: Mutex::default(), site })
    }

    pub(super) fn board(&self) -> &SharedBoard {
        &self.board
    }

    /// Draws while somebody watches, until the run is over, and then once more for those who do.
    pub(super) async fn draw(self: Arc<Self>, mut over: watch::Receiver<bool>) {
        let draw = async {
            loop {
                self.site.is_watched().await;
                self.look().await;
                self.drawn(false).await;
                tokio::time::sleep(BETWEEN).await;
            }
        };
        tokio::select! {
            () = draw => {}
            _ = over.wait_for(|over| *over) => {}
        }
        self.site.is_watched().await;
        self.drawn(true).await;
    }

    async fn drawn(&self, is_last: bool) {
        let drawn = Instant::now();
        let board = self.board.lock().clone();
        let painter = self.painter.clone();
        let drawing = tokio::task::spawn_blocking(move || {
            // A painter that panicked has at worst an old prediction.
            let parts = painter.lock().unwrap_or_else(PoisonError::into_inner).render(&board);
            Drawing { name: board.directory, parts, foreign: false, is_last, silent: None, drawn }
        });
        match drawing.await {
            Ok(drawing) => self.site.show(drawing),
            Err(e) => tracing::error!("the page cannot be drawn: {e}"),
        }
    }

    /// Asks the broker's loop to look at the run, unless it did so just before.
    pub(super) async fn look(&self) {
        // Others wait here, and then need not ask.
        let mut looked = self.looked.lock().await;
        if looked.is_some_and(|when| when.elapsed() < LOOK_EVERY) {
            return;
        }
        let (answer, answered) = oneshot::channel();
        (self.ask)(answer);
        if let Ok(Ok(look)) = timeout(LOOK_PATIENCE, answered).await {
            self.board.lock().looked(look);
        }
        *looked = Some(Instant::now());
    }
}
