//! The page of a run, as browsers, Prometheus and strangers meet it over loopback.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use fusionllm_events::Event;
use fusionllm_node::{BrokerOptions, Dashboard, JoinOptions, Observer, Peers, conduct, join};
use fusionllm_transport::Ticket;
use fusionllm_workspace::config::Job;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// Nothing here takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A name that would be an attack if it stood on the page as it is.
const HOSTILE: &str = "<img src=x onerror=\"alert(1)\">&'";

/// A line that the broker tells people.
enum Told {
    Page(String),
    Ticket(Ticket),
}

struct Watcher(UnboundedSender<Told>);

impl Observer for Watcher {
    fn event(&mut self, _: &Event) {}

    fn dashboard(&mut self, url: &str) {
        let _ = self.0.send(Told::Page(url.to_owned()));
    }

    fn invite(&mut self, ticket: &Ticket) {
        let _ = self.0.send(Told::Ticket(ticket.clone()));
    }
}

/// A run with a page. It waits for one peer.
struct Scene {
    /// The address that people are told.
    url: String,
    /// Where the page is served.
    addr: SocketAddr,
    ticket: Ticket,
    directory: PathBuf,
}

/// Plays a scene with a broker whose page is served at `at`. `comes_to_end` says whether the scene has the run trained.
async fn play<F: Future<Output = ()>>(at: Dashboard, comes_to_end: bool, scene: impl FnOnce(Scene) -> F) {
    let settings = [
        "model.n_layer=2",
        "model.n_embd=16",
        "model.n_head=2",
        "data.context=16",
        "train.batch=4",
        "train.micro_batch=1",
        "train.steps=3",
        "eval.every=3",
        "eval.batches=1",
    ];
    let job = Job::quick_start(&settings.map(str::to_owned)).unwrap();
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("run");
    let (said, mut told) = unbounded_channel();
    let options = BrokerOptions {
        listen: Some((Ipv4Addr::LOCALHOST, 0).into()),
        directory: Some(directory.clone()),
        dashboard: at,
        ..BrokerOptions::new(Peers::Joiners(1))
    };
    let mut watcher = Watcher(said);
    let broker = conduct(&job, options, &mut watcher);
    let play = async {
        let Some(Told::Page(url)) = told.recv().await else { panic!("no page comes first") };
        let Some(Told::Ticket(ticket)) = told.recv().await else { panic!("no ticket follows") };
        let host = url.strip_prefix("http://").unwrap().split('/').next().unwrap();
        let addr = (Ipv4Addr::LOCALHOST, host.parse::<SocketAddr>().unwrap().port()).into();
        let file = std::fs::read_to_string(directory.join("dashboard")).unwrap();
        assert_eq!(file, format!("{url}\n"));
        scene(Scene { url, addr, ticket, directory: directory.clone() }).await;
    };
    let both = async {
        if comes_to_end {
            let (ended, ()) = tokio::join!(broker, play);
            ended.unwrap();
            assert!(!directory.join("dashboard").exists());
        } else {
            tokio::select! {
                ended = broker => panic!("the run ended: {ended:?}"),
                () = play => {}
            }
        }
    };
    tokio::time::timeout(PATIENCE, both).await.expect("stuck");
}

/// An answer: its head, in lower case, and its body.
#[derive(Debug)]
struct Answer {
    head: String,
    body: String,
}

impl Answer {
    fn status(&self) -> u16 {
        self.head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    fn header(&self, name: &str) -> &str {
        let line = self.head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.unwrap_or_else(|| panic!("no {name} in {}", self.head))
    }
}

impl Scene {
    async fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// The answer to a request with these lines, after which the server closes the connection.
    async fn ask(&self, request: &str) -> Answer {
        let mut stream = self.send(request).await;
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer to {request}: {text:?}"));
        Answer { head: head.to_lowercase(), body: body.to_owned() }
    }

    /// Asks for a path with the right `Host` and these lines besides.
    async fn get(&self, path: &str, lines: &str) -> Answer {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: {}\r\n{lines}\r\n", self.addr)).await
    }

    async fn join(&self) {
        let backend = fusionllm_backend::open("cpu").unwrap();
        let options = JoinOptions {
            memory: Some(1 << 30),
            name: HOSTILE.into(),
            ..JoinOptions::new(self.ticket.clone(), backend)
        };
        join(options).await.unwrap();
    }
}

/// Reads a stream until `text` has come, or to its end.
async fn read_until(stream: &mut TcpStream, so_far: &mut String, text: &str) {
    while !so_far.contains(text) {
        let mut bytes = vec![0; 1 << 16];
        let count = stream.read(&mut bytes).await.unwrap();
        assert!(count > 0, "the stream ended before {text:?}: {so_far}");
        so_far.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
    }
}

const LOOPBACK: Dashboard = Dashboard::At(SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0));

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn viewers_follow_a_run_to_its_end() {
    play(LOOPBACK, true, async |scene| {
        assert_eq!(scene.url, format!("http://{}/", scene.addr));
        let page = scene.get("/", "").await;
        assert_eq!(page.status(), 200);
        assert!(page.body.contains("<!DOCTYPE html>") && page.body.contains("waiting"), "{}", page.body);

        let request = format!("GET /events HTTP/1.1\r\nHost: {}\r\n\r\n", scene.addr);
        let (mut stream, mut text) = (scene.send(&request).await, String::new());
        read_until(&mut stream, &mut text, "event: now\n").await;
        assert!(text.to_lowercase().contains("content-type: text/event-stream\r\n"), "{text}");
        assert!(text.contains("retry: 2000\n"), "{text}");

        // A viewer that never reads holds nobody up.
        let _idle = scene.send(&request).await;

        let mut figures = None;
        let watching = async {
            read_until(&mut stream, &mut text, "joined").await;
            figures = Some(scene.get("/metrics", "").await);
            read_until(&mut stream, &mut text, "event: over\n").await;
            // It ends by itself.
            while stream.read(&mut [0; 256]).await.unwrap() > 0 {}
        };
        tokio::join!(scene.join(), watching);
        assert!(text.contains("<dt>Step</dt><dd>3</dd>"), "{text}");
        // The name comes to the page as text.
        assert!(!text.contains("<img"), "{text}");
        assert!(text.contains("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;' joined"), "{text}");

        let figures = figures.unwrap();
        assert_eq!(figures.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
        for line in ["# TYPE fusionllm_step_seconds histogram\n", "\nfusionllm_peers{standing=\"present\"} "] {
            assert!(figures.body.contains(line), "no {line:?} in {}", figures.body);
        }
        let summary = std::fs::read_to_string(scene.directory.join("summary.json")).unwrap();
        assert!(summary.contains("\"steps\": 3"), "{summary}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_may_run_its_own_script_alone() {
    play(LOOPBACK, false, async |scene| {
        let pages = [scene.get("/", "").await, scene.get("/", "").await, scene.get("/nowhere", "").await];
        for page in &pages {
            assert_eq!(page.header("x-content-type-options"), "nosniff");
            assert_eq!(page.header("referrer-policy"), "no-referrer");
            assert_eq!(page.header("cache-control"), "no-store");
            assert!(page.header("content-security-policy").starts_with("default-src 'none'"));
        }
        assert_eq!(pages[2].status(), 404);
        let policy = pages[0].header("content-security-policy");
        let nonce = policy.split("'nonce-").nth(1).unwrap().split('\'').next().unwrap();
        assert!(pages[0].body.contains(&format!("<script nonce=\"{nonce}\">")), "{policy} {}", pages[0].body);
        for part in ["frame-ancestors 'none'", "form-action 'none'", "base-uri 'none'", "connect-src 'self'"] {
            assert!(policy.contains(part), "{policy}");
        }
        let head = scene.ask(&format!("HEAD / HTTP/1.1\r\nHost: {}\r\n\r\n", scene.addr)).await;
        assert_eq!((head.status(), head.body.as_str()), (200, ""));
        let post = scene.ask(&format!("POST / HTTP/1.1\r\nHost: {}\r\nContent-Length: 0\r\n\r\n", scene.addr)).await;
        assert_eq!(post.status(), 405);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_was_bound_again_leads_nowhere() {
    play(LOOPBACK, false, async |scene| {
        let port = scene.addr.port();
        for path in ["/", "/events", "/metrics"] {
            for host in [format!("evil.example:{port}"), "localhost".into(), format!("127.0.0.1:{}", port ^ 1)] {
                let answer = scene.ask(&format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
                assert_eq!(answer.status(), 403, "{path} {host}");
                assert!(!answer.body.contains("fusionllm_"), "{}", answer.body);
            }
            assert_eq!(scene.ask(&format!("GET {path} HTTP/1.0\r\n\r\n")).await.status(), 400);
        }
        let metrics = scene.ask(&format!("GET /metrics HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n")).await;
        assert_eq!(metrics.status(), 200);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_other_sites_read_nothing() {
    play(LOOPBACK, false, async |scene| {
        for path in ["/events", "/metrics"] {
            for line in ["Origin: http://evil.example\r\n", "Origin: null\r\n", "Sec-Fetch-Site: cross-site\r\n"] {
                assert_eq!(scene.get(path, line).await.status(), 403, "{path} {line}");
            }
        }
        let own = format!("Origin: http://{}\r\nSec-Fetch-Site: same-origin\r\n", scene.addr);
        let answer = scene.get("/metrics", &own).await;
        assert_eq!(answer.status(), 200);
        assert!(!answer.head.contains("access-control-allow-origin"), "{}", answer.head);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_machines_need_the_token() {
    play(Dashboard::At((Ipv4Addr::UNSPECIFIED, 0).into()), false, async |scene| {
        let (_, token) = scene.url.split_once("/?token=").unwrap();
        let wrong = "a".repeat(token.len());
        for path in ["/", "/events", "/metrics", "/nowhere"] {
            assert_eq!(scene.get(path, "").await.status(), 401, "a stranger, {path}");
            let bearer = format!("Authorization: Bearer {wrong}\r\n");
            assert_eq!(scene.get(path, &bearer).await.status(), 401, "{path}");
            let cookie = format!("Cookie: fusionllm-{}={wrong}\r\n", scene.addr.port());
            assert_eq!(scene.get(path, &cookie).await.status(), 401, "{path}");
        }
        assert_eq!(scene.get(&format!("/?token={wrong}"), "").await.status(), 401);

        let first = scene.get(&format!("/?token={token}"), "").await;
        assert_eq!((first.status(), first.header("location")), (303, "/"));
        let set = first.header("set-cookie");
        assert!(set.ends_with("; httponly; samesite=strict; path=/"), "{set}");
        let cookie = format!("Cookie: {}\r\n", set.split(';').next().unwrap());
        let page = scene.get("/", &cookie).await;
        assert_eq!(page.status(), 200);
        assert!(!page.body.contains(token));
        assert_eq!(scene.get("/metrics", &format!("Authorization: Bearer {token}\r\n")).await.status(), 200);
        let named = format!("GET / HTTP/1.1\r\nHost: broker.example\r\n{cookie}\r\n");
        assert_eq!(scene.ask(&named).await.status(), 200);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn visitors_have_bounds() {
    play(LOOPBACK, false, async |scene| {
        // A head that never ends is not read on, whether it comes fast or never.
        let long = format!("GET / HTTP/1.1\r\nHost: {}\r\nX: {}", scene.addr, "x".repeat(64 << 10));
        let mut stream = TcpStream::connect(scene.addr).await.unwrap();
        let _ = stream.write_all(long.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
        let (mut slow, mut rest) = (scene.send("GET / HT").await, Vec::new());
        let _ = slow.read_to_end(&mut rest).await;

        // The last of too many is closed, and those before it stay.
        let request = format!("GET /events HTTP/1.1\r\nHost: {}\r\n\r\n", scene.addr);
        let mut viewers = Vec::new();
        for _ in 0..64 {
            let (mut stream, mut text) = (scene.send(&request).await, String::new());
            read_until(&mut stream, &mut text, "HTTP/1.1 200").await;
            viewers.push((stream, text));
        }
        let mut late = TcpStream::connect(scene.addr).await.unwrap();
        let _ = late.write_all(request.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = late.read_to_end(&mut answer).await;
        assert_eq!(answer, b"");
        // Its first event may have come with the head.
        let (mut first, mut text) = viewers.swap_remove(0);
        read_until(&mut first, &mut text, "event: now\n").await;
    })
    .await;
}
