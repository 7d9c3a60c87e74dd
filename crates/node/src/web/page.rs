//! The page of a run beside its broker: who draws it, and who serves it.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::board::SharedBoard;
use super::drawer::{Ask, Drawer};
use super::listener::Listening;
use super::server::{FAREWELL, Server};
use super::site::Site;

/// The page of a run that this process conducts. Its owner sees it from anywhere. A server is there if one is wanted.
pub(crate) struct Page {
    site: Arc<Site>,
    over: watch::Sender<bool>,
    drawer: JoinHandle<()>,
    server: Option<Server>,
}

impl Page {
    pub(crate) fn start(board: SharedBoard, ask: Ask, at: Option<Listening>) -> Self {
        let site = Site::new();
        let drawer = Drawer::new(board, ask, site.clone());
        let (over, is_over) = watch::channel(false);
        let server = at.map(|at| Server::start(at, site.clone(), Some(drawer.clone()), is_over.clone()));
        Self { site, over, drawer: tokio::spawn(drawer.draw(is_over)), server }
    }

    pub(crate) fn site(&self) -> &Arc<Site> {
        &self.site
    }

    /// Tells viewers that the run is over, gives them a moment, and closes.
    pub(crate) async fn stop(self) {
        self.over.send_replace(true);
        let server = async {
            if let Some(server) = self.server {
                server.closed().await;
            }
        };
        // A viewer that has not gone by then waits for nothing.
        let _ = tokio::join!(timeout(FAREWELL, self.site.is_left()), server);
        self.drawer.abort();
    }
}
