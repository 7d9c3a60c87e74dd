//! Answers HTTP requests for the page of a run, within bounds.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, LOCATION, REFERRER_POLICY, SET_COOKIE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{Html, IntoResponse, Response, Sse};
use axum::routing::get;
use fusionllm_transport::Secret;
use fusionllm_view::page::{PART_NAMES, served};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use n0_future::stream;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

use super::drawer::Drawer;
use super::guard::{Admitted, Guard};
use super::listener::Listening;
use super::metrics::exposition;
use super::site::{Drawing, Site, Viewer};
use crate::relay::secret_text;

/// The most connections at once. Others are closed.
const MAX_CONNECTIONS: usize = 64;

/// The most bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;

/// The time in which a visitor has to say what it wants.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest connection, so that none that is stuck keeps its place. A browser connects its stream again.
const LONGEST: Duration = Duration::from_secs(600);

/// How long a visitor waits for the page. A stream of events waits for its first one as long as it takes.
const PATIENCE: Duration = Duration::from_secs(5);

/// The time in which viewers read that the run is over.
pub(super) const FAREWELL: Duration = Duration::from_secs(1);

/// The pause after a connection could not be accepted, such as when too many files are open.
const PAUSE: Duration = Duration::from_millis(100);

/// The time between two comments on a stream without news, by which a viewer that is gone is found.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The time after which a browser connects again.
const RETRY: Duration = Duration::from_secs(2);

const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");

/// A server that runs.
pub(crate) struct Server {
    task: JoinHandle<()>,
}

impl Server {
    /// Serves the site until `over` tells so. `figures` are those that Prometheus reads, where they are known.
    pub(crate) fn start(
        at: Listening,
        site: Arc<Site>,
        figures: Option<Arc<Drawer>>,
        over: watch::Receiver<bool>,
    ) -> Self {
        let Listening { socket, addr, token } = at;
        let router = router(Arc::new(Guard { addr, token }), site, figures);
        Self { task: tokio::spawn(accept(socket, router, over)) }
    }

    /// Waits until the last viewers have read that the run is over.
    pub(super) async fn closed(self) {
        // It fails if the server panicked, and then it is closed, too.
        let _ = self.task.await;
    }
}

/// Accepts connections until the run is over. Each is for one request, so its place is free again soon.
async fn accept(listener: TcpListener, router: Router, mut over: watch::Receiver<bool>) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD).keep_alive(false);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let (graceful, mut connections) = (GracefulShutdown::new(), JoinSet::new());
    let mut over = pin!(over.wait_for(|over| *over));
    loop {
        let accepted = tokio::select! {
            _ = &mut over => break,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        while connections.try_join_next().is_some() {}
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        // Without it, a small fragment would wait for the last one's acknowledgement.
        let _ = stream.set_nodelay(true);
        let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router.clone()));
        let connection = graceful.watch(connection);
        connections.spawn(async move {
            // A visitor that is gone, or that does not speak HTTP, is nobody's concern.
            let _ = timeout(LONGEST, connection).await;
            drop(place);
        });
    }
    drop(listener);
    let _ = timeout(FAREWELL, graceful.shutdown()).await;
}

fn router(guard: Arc<Guard>, site: Arc<Site>, figures: Option<Arc<Drawer>>) -> Router {
    let mut router = Router::new().route("/", get(page)).route("/events", get(events)).with_state(site);
    if let Some(figures) = figures {
        router = router.route("/metrics", get(metrics).with_state(figures));
    }
    router
        .fallback(async || (StatusCode::NOT_FOUND, "there is nothing here\n"))
        .layer(from_fn_with_state(guard, guarded))
}

/// Lets a request in, or refuses it. Every answer forbids what no page of ours needs.
async fn guarded(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let mut response = match guard.check(&head) {
        Ok(Admitted::Visitor) => next.run(Request::from_parts(head, body)).await,
        Ok(Admitted::FirstVisit(cookie)) => {
            (StatusCode::SEE_OTHER, [(LOCATION, "/".to_owned()), (SET_COOKIE, cookie)]).into_response()
        }
        Err(refusal) => refusal.into_response(),
    };
    let headers = response.headers_mut();
    headers.entry(CONTENT_SECURITY_POLICY).or_insert_with(|| HeaderValue::from_static("default-src 'none'"));
    for (name, value) in [
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (RESOURCE_POLICY, "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// The page as it is now.
async fn page(State(site): State<Arc<Site>>) -> Response {
    let Ok(Some(drawing)) = timeout(PATIENCE, Viewer::new(&site).fresh()).await else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the page cannot be drawn at present\n").into_response();
    };
    let nonce = secret_text(&Secret::generate());
    let policy = format!(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let Drawing { name, parts, foreign, is_last, .. } = drawing.as_ref();
    let page = match foreign {
        false => served(name, parts, &nonce, !is_last),
        // A part that ends within a tag would make our script's nonce its own. What the script puts into the page later
        // cannot.
        true => served(name, &PART_NAMES.map(|name| (name, "")), &nonce, true),
    };
    ([(CONTENT_SECURITY_POLICY, policy)], Html(page)).into_response()
}

/// The fragments of the page, and those that change from then on.
async fn events(State(site): State<Arc<Site>>) -> impl IntoResponse {
    let viewer = Viewer::new(&site);
    let (has, queue) = (BTreeMap::new(), VecDeque::new());
    let reader = Reader { viewer, has, queue, begun: false, silent: false, is_over: false };
    let events = stream::unfold(reader, async |mut reader| Some((Ok::<_, Infallible>(reader.next().await?), reader)));
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
}

/// The figures that Prometheus reads.
async fn metrics(State(figures): State<Arc<Drawer>>) -> impl IntoResponse {
    figures.look().await;
    let text = exposition(&figures.board().lock());
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

/// A viewer of the stream, and what it has.
struct Reader {
    viewer: Viewer,
    has: BTreeMap<&'static str, Arc<str>>,
    /// The rest of the drawing that is being sent.
    queue: VecDeque<Event>,
    begun: bool,
    /// Whether it knows that the broker does not answer.
    silent: bool,
    is_over: bool,
}

impl Reader {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            if self.is_over {
                return None;
            }
            let drawing = if self.begun { self.viewer.next().await? } else { self.viewer.fresh().await? };
            self.take(&drawing);
        }
    }

    fn take(&mut self, drawing: &Drawing) {
        if !std::mem::replace(&mut self.begun, true) {
            self.queue.push_back(Event::default().retry(RETRY));
        }
        let silent = drawing.silent.is_some();
        if std::mem::replace(&mut self.silent, silent) != silent {
            let ms =
                drawing.silent.and_then(|since| since.duration_since(UNIX_EPOCH).ok()).map(|since| since.as_millis());
            let event = Event::default().event(if silent { "silent" } else { "heard" });
            self.queue.push_back(event.data(ms.unwrap_or(0).to_string()));
        }
        for (name, html) in &drawing.parts {
            if self.has.get(name) != Some(html) {
                self.has.insert(name, html.clone());
                self.queue.push_back(Event::default().event(name).data(html));
            }
        }
        if drawing.is_last {
            self.is_over = true;
            self.queue.push_back(Event::default().event("over").data("over"));
        }
    }
}
