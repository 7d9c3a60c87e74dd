//! The page of a run for its owner. The run's broker serves it, or this process does.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fusionllm_protocol::{Answer, MAX_CONTROL_BYTES, Question};
use fusionllm_transport::{Endpoint, Ticket};
use fusionllm_view::page::{PART_NAMES, Recorded};
use fusionllm_workspace::run_dir::{RunFiles, RunRecord, read_dashboard};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::owner::{ANSWER_TIMEOUT, Found, OwnedRun, answer, close, endpoint, late, request, unexpected};
use crate::NodeError;
use crate::web::{Drawing, Listening, Server, Site, parts};

/// The time after which a broker that does not answer is asked again.
const RETRY: Duration = Duration::from_secs(1);

/// The time for which the broker is still asked when nobody watches, since a browser loads the page and then its parts.
const LINGER: Duration = Duration::from_secs(5);

/// The time in which a page of this machine accepts a connection.
const LOCAL_TIMEOUT: Duration = Duration::from_secs(1);

/// Where the page of a run is.
pub enum RunPage {
    /// The run's broker serves it on this machine, at this address.
    AtBroker(String),
    /// This process serves it.
    Here(Served),
}

/// A page that this process serves until this is dropped.
pub struct Served {
    /// The address that people open.
    pub url: String,
    _server: Server,
    /// The server goes on as long as this exists.
    _over: watch::Sender<bool>,
    /// The task that asks the broker ends with this.
    _mirror: JoinSet<()>,
}

impl OwnedRun {
    /// The page of the run. If its broker does not serve one on this machine, it is served at `at`, or on loopback.
    ///
    /// # Errors
    ///
    /// The state of the run is not known, as in [`OwnedRun::status`]; or the address cannot be listened at.
    pub async fn page(&self, at: Option<SocketAddr>) -> Result<RunPage, NodeError> {
        let found = self.status().await?;
        if let (Found::Running(_), Some(directory)) = (&found, &self.directory)
            && let Some(url) = read_dashboard(directory)?
            && is_open(&url).await
        {
            return Ok(RunPage::AtBroker(url));
        }
        let (site, mut mirror) = (Site::new(), JoinSet::new());
        match (found, &self.ticket) {
            (Found::Running(_), Some(ticket)) => {
                let mirror_of = Mirror::new(self.directory.clone(), ticket.clone(), site.clone());
                mirror.spawn(mirror_of.run());
            }
            _ => site.show(recorded(self.directory.as_deref().unwrap_or(Path::new("."))).await?),
        }
        let listening = match at {
            Some(addr) => Listening::at(addr).await?,
            None => Listening::local().await.map_err(NodeError::State)?,
        };
        let (over, is_over) = watch::channel(false);
        let url = listening.url();
        let server = Server::start(listening, site, None, is_over);
        Ok(RunPage::Here(Served { url, _server: server, _over: over, _mirror: mirror }))
    }
}

/// Whether somebody listens at the address of a page. The run directory may be on a disk that machines share, so the
/// address may be another machine's.
async fn is_open(url: &str) -> bool {
    let addr = url.strip_prefix("http://").and_then(|rest| rest.split('/').next()?.parse::<SocketAddr>().ok());
    match addr {
        Some(addr) => timeout(LOCAL_TIMEOUT, TcpStream::connect(addr)).await.is_ok_and(|stream| stream.is_ok()),
        None => false,
    }
}

/// The page of a run that nobody conducts.
async fn recorded(directory: &Path) -> Result<Drawing, NodeError> {
    let (directory, drawn) = (directory.to_owned(), Instant::now());
    let drawing = tokio::task::spawn_blocking(move || -> Result<Drawing, NodeError> {
        let run = Recorded::new(RunRecord::read(&directory)?);
        let parts = parts(&run.view(&run.events()));
        Ok(Drawing { name: run.name, parts, foreign: false, is_last: true, silent: None, drawn })
    });
    drawing.await.map_err(|e| NodeError::State(format!("the page cannot be drawn: {e}")))?
}

/// Shows what the broker of a run draws.
struct Mirror {
    directory: Option<PathBuf>,
    ticket: Ticket,
    site: Arc<Site>,
    parts: BTreeMap<&'static str, Arc<str>>,
    /// Since when the broker has not answered.
    silent: Option<SystemTime>,
}

/// The reason why a broker is no longer asked.
#[derive(PartialEq, Eq)]
enum End {
    /// Nobody watches.
    Left,
    /// The run is over.
    Over,
}

impl Mirror {
    fn new(directory: Option<PathBuf>, ticket: Ticket, site: Arc<Site>) -> Self {
        Self { directory, ticket, site, parts: PART_NAMES.map(|name| (name, "".into())).into(), silent: None }
    }

    /// Asks the broker while somebody watches, until the run is over.
    async fn run(mut self) {
        loop {
            self.site.is_watched().await;
            match self.follow().await {
                Ok(End::Over) => return,
                Ok(End::Left) => continue,
                Err(e) => tracing::info!("the broker does not show the page: {e}"),
            }
            // Without viewers, nobody heard of the end.
            if let Some(directory) = &self.directory
                && RunFiles::read(directory).is_ok_and(|files| files.over)
                && let Ok(drawing) = recorded(directory).await
            {
                return self.site.show(drawing);
            }
            self.silent.get_or_insert_with(SystemTime::now);
            self.show(false);
            sleep(RETRY).await;
        }
    }

    async fn follow(&mut self) -> Result<End, NodeError> {
        let endpoint = endpoint().await?;
        let end = self.read(&endpoint).await;
        close(&endpoint, &end).await;
        end
    }

    async fn read(&mut self, endpoint: &Endpoint) -> Result<End, NodeError> {
        let (connection, mut lanes) = request(endpoint, &self.ticket, Question::Page).await?;
        let site = self.site.clone();
        let mut left = std::pin::pin!(is_deserted(&site));
        let end = loop {
            let answer = tokio::select! {
                () = &mut left => break Ok(End::Left),
                answer = timeout(ANSWER_TIMEOUT, answer(&mut lanes)) => answer,
            };
            match answer.unwrap_or_else(|_| Err(late())).and_then(|answer| self.take(answer)) {
                Ok(false) => {}
                Ok(true) => break Ok(End::Over),
                Err(e) => break Err(e),
            }
        };
        connection.close("");
        end
    }

    /// Takes and shows the news about the page. Returns whether the run is over.
    fn take(&mut self, answer: Answer) -> Result<bool, NodeError> {
        let Answer::Page { parts, is_last } = answer else { return Err(unexpected(&answer)) };
        for (name, html) in parts {
            let known = PART_NAMES.into_iter().find(|known| *known == name);
            let known = known.ok_or_else(|| NodeError::Protocol("a part of the page is unknown".into()))?;
            self.parts.insert(known, html.into());
        }
        if self.parts.values().map(|html| html.len() as u64).sum::<u64>() > MAX_CONTROL_BYTES {
            return Err(NodeError::Protocol("the page is too large".into()));
        }
        self.silent = None;
        self.show(is_last);
        Ok(is_last)
    }

    fn show(&self, is_last: bool) {
        let name = self.directory.as_ref().map_or("a run".to_owned(), |directory| directory.display().to_string());
        let parts = self.parts.iter().map(|(name, html)| (*name, html.clone())).collect();
        let drawn = Instant::now();
        self.site.show(Drawing { name, parts, foreign: true, is_last, silent: self.silent, drawn });
    }
}

/// Waits until nobody has watched for a while.
async fn is_deserted(site: &Site) {
    loop {
        site.is_left().await;
        if timeout(LINGER, site.is_watched()).await.is_err() {
            return;
        }
    }
}
