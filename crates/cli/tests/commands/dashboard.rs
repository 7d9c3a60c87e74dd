//! `dashboard`: the page of a run, wherever the run is.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};

use crate::runs::Endless;
use crate::{call, command, finished_run};

/// A command that serves a page until this is dropped.
struct Serving {
    process: Child,
    /// Where it serves the page, such as `127.0.0.1:8800`.
    host: String,
}

impl Serving {
    fn start(directory: &Path, run: &str) -> Self {
        let args = ["dashboard", run, "--dashboard", "127.0.0.1:0", "--json"];
        let mut process = command(directory, &args).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let told: serde_json::Value = serde_json::from_str(&line).unwrap();
        let host = told["address"].as_str().unwrap().strip_prefix("http://").unwrap().trim_end_matches('/').to_owned();
        Self { process, host }
    }

    fn ask(&self, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.host).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.host).unwrap();
        stream
    }

    /// The head and the body of an answer.
    fn get(&self, path: &str) -> String {
        let mut text = String::new();
        self.ask(path).read_to_string(&mut text).unwrap();
        text
    }

    /// The events of the stream: the name of each, and its first line.
    fn events(&self) -> impl Iterator<Item = (String, String)> {
        let mut lines = BufReader::new(self.ask("/events")).lines().map_while(Result::ok);
        std::iter::from_fn(move || {
            let name = lines.find_map(|line| line.strip_prefix("event: ").map(str::to_owned))?;
            Some((name, lines.next()?))
        })
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// The step on the page, from the line of its part `now`.
fn step(line: &str) -> u64 {
    let (_, tile) = line.split_once("<dt>Step</dt><dd>").unwrap();
    tile.split('<').next().unwrap().parse().unwrap()
}

#[test]
fn a_run_without_a_page_is_shown_to_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Endless::start(dir.path(), &["--dashboard=off"]);
    let ticket = fs::read_to_string(dir.path().join("run/owner-ticket")).unwrap();
    let pages = [Serving::start(dir.path(), "run"), Serving::start(dir.path(), ticket.trim())];
    for page in &pages {
        let document = page.get("/");
        assert!(document.starts_with("HTTP/1.1 200 ") && document.contains("<section id=\"now\"></section>"));
        assert!(document.contains("script-src 'nonce-"), "{document}");
        assert!(page.get("/metrics").starts_with("HTTP/1.1 404 "));
        let mut steps = page.events().filter(|(name, _)| name == "now").map(|(_, line)| step(&line));
        let first = steps.next().unwrap();
        assert!(steps.any(|step| step > first + 1), "the steps grow");
    }
    let streams = pages.each_ref().map(|page| page.events());
    run.stop();
    for stream in streams {
        assert_eq!(stream.last().unwrap().0, "over");
    }
    // The page stays.
    let again = pages[0].events().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!((again.contains(&"now".to_owned()), again.last().unwrap().as_str()), (true, "over"));
}

#[test]
fn the_page_of_a_run_on_this_machine_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let _run = Endless::start(dir.path(), &["--dashboard=127.0.0.1:0"]);
    let address = fs::read_to_string(dir.path().join("run/dashboard")).unwrap();
    let ran = call(dir.path(), &["dashboard", "run"]);
    assert_eq!((ran.status, ran.out), (0, format!("the run's page: {address}")), "{}", ran.err);
    assert_eq!(call(dir.path(), &["dashboard", "run", "--json"]).json()["address"], address.trim());
}

#[test]
fn a_broker_that_is_gone_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Endless::start(dir.path(), &["--dashboard=off"]);
    let page = Serving::start(dir.path(), "run");
    let mut events = page.events();
    assert!(events.any(|(name, _)| name == "now"));
    run.kill();
    assert!(events.any(|(name, _)| name == "silent"));
}

#[test]
fn a_run_that_has_ended_is_shown_as_it_is() {
    let (directory, _) = finished_run();
    let page = Serving::start(directory, "run");
    let document = page.get("/");
    for part in ["<title>run · FusionLLM</title>", "Time of a step", "measured", "train.optimizer.lr"] {
        assert!(document.contains(part), "{part} is missing");
    }
    assert!(!document.contains("EventSource"), "nothing follows");
}

#[test]
fn what_is_no_run_has_no_page() {
    let dir = tempfile::tempdir().unwrap();
    for run in [".", "nowhere"] {
        let status = call(dir.path(), &["status", run]).failure(2, dir.path());
        assert_eq!(call(dir.path(), &["dashboard", run]).failure(2, dir.path()), status);
    }
    let (directory, _) = finished_run();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let refused = call(directory, &["dashboard", "run", "--dashboard", &addr]).failure(2, directory);
    assert!(refused.contains(&format!("--dashboard {addr}: cannot listen at this address")), "{refused}");
}
