//! Peers behind routers: network namespaces whose addresses are translated. Making them takes root, iproute2 and
//! nftables.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, Stdio};

use hosts::{Hosts, Nat, Running};
use requirements::Missing;

#[path = "support/hosts.rs"]
mod hosts;
#[path = "support/requirements.rs"]
mod requirements;

requirements::main!(
    peers_behind_routers_meet_at_the_relay_and_then_connect_directly,
    a_broker_behind_a_router_is_found_at_the_relay,
    a_run_through_the_relay_outlives_its_restart
);

const FUSIONLLM: &str = env!("CARGO_BIN_EXE_fusionllm");

const JOB: [&str; 7] = [
    "--set=model.n_layer=4",
    "--set=model.n_embd=32",
    "--set=model.n_head=2",
    "--set=data.context=32",
    "--set=train.batch=4",
    "--set=train.micro_batch=1",
    "--set=eval.every=0",
];

/// A process whose output the test follows.
struct Followed<R> {
    process: Running,
    lines: BufReader<R>,
    seen: String,
}

impl<R: Read> Followed<R> {
    /// Reads the output up to a line with this text.
    fn wait_for(&mut self, text: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "there was no {text:?} in: {}", self.seen);
            self.seen += &line;
            if line.contains(text) {
                return line;
            }
        }
    }

    /// Waits for a good end.
    fn end(mut self) -> String {
        self.lines.read_to_string(&mut self.seen).unwrap();
        assert!(self.process.0.wait().unwrap().success(), "{}", self.seen);
        std::mem::take(&mut self.seen)
    }
}

/// The relay and the broker stand on the first host, and two joiners behind a router each.
struct World {
    hosts: Hosts,
    joiners: [usize; 2],
    directory: tempfile::TempDir,
}

impl World {
    fn make(nat: Nat) -> Result<Self, Missing> {
        let missing = || Missing {
            requirement: "root",
            reason: "making hosts behind routers takes Linux, root, iproute2 and nftables".into(),
        };
        let mut hosts = Hosts::make(3).ok_or_else(missing)?;
        let joiners = [hosts.behind(1, nat).ok_or_else(missing)?, hosts.behind(2, nat).ok_or_else(missing)?];
        Ok(Self { hosts, joiners, directory: tempfile::tempdir().unwrap() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Starts the relay, and returns it with its URL.
    fn relay(&self) -> (Running, String) {
        let mut command = self.hosts.on(0, FUSIONLLM);
        command.args(["relay", "--listen", "10.77.0.1:3340", "--json", "--secret"]).arg(self.path("relay.secret"));
        let mut process = Running(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let started: serde_json::Value = serde_json::from_str(&line).unwrap();
        (process, started["url"].as_str().unwrap().to_owned())
    }

    /// Starts the broker on a host, and returns it with its ticket.
    fn broker(&self, host: usize, peers: &str, relay: &str, steps: &str) -> (Followed<ChildStderr>, String) {
        let mut command = self.hosts.on(host, FUSIONLLM);
        command.args(["broker", "--peers", peers, "--steps", steps, "--run-dir"]).arg(self.path("run")).args(JOB);
        command.arg(format!("--set=network.relay={relay}")).arg("--set=plan.scheduler=equal-compute");
        // Links are measured for this codec, which at a ratio of 1 changes nothing.
        command.args(["--set=compression.name=adatopk", "--set=compression.ratio=1"]);
        let mut process = Running(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
        let lines = BufReader::new(process.0.stderr.take().unwrap());
        let mut broker = Followed { process, lines, seen: String::new() };
        let line = broker.wait_for("fusionllm join ");
        (broker, line.split_whitespace().last().unwrap().to_owned())
    }

    /// Starts both joiners.
    fn join(&self, ticket: &str) -> [Running; 2] {
        [0, 1].map(|i| self.join_as(i, ticket))
    }

    /// Starts a joiner. What it logs is in the file `joiner-0` or `joiner-1`.
    fn join_as(&self, i: usize, ticket: &str) -> Running {
        let name = format!("joiner-{i}");
        let log = File::create(self.path(&name)).unwrap();
        let mut command = self.hosts.on(self.joiners[i], FUSIONLLM);
        command.args(["join", ticket, "--name", &name]).env("RUST_LOG", "fusionllm_node=info");
        Running(command.stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }

    fn logs(&self) -> String {
        ["joiner-0", "joiner-1"].map(|name| std::fs::read_to_string(self.path(name)).unwrap()).concat()
    }

    /// The findings of `fusionllm doctor` on a joiner's host.
    fn doctor(&self, ticket: &str) -> serde_json::Value {
        let mut command = self.hosts.on(self.joiners[0], FUSIONLLM);
        let output = command.args(["doctor", ticket, "--json"]).stderr(Stdio::null()).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The losses of the same training by processes of one host.
    fn plain_losses(&self, steps: &str) -> Vec<serde_json::Value> {
        let run = self.path("plain");
        let mut command = Command::new(FUSIONLLM);
        command.args(["train", "--peers", "2", "--steps", steps, "--run-dir"]).arg(&run).args(JOB);
        assert!(command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
        losses(&run)
    }
}

/// Both joiners had a share.
fn both_took_part(run: &Path) -> bool {
    let text = std::fs::read_to_string(run.join("summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&text).unwrap();
    let peers: Vec<_> = summary["peers"].as_array().unwrap().iter().map(|peer| peer["name"].clone()).collect();
    peers == ["joiner-0", "joiner-1"]
}

fn losses(run: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].clone();
    text.lines().map(loss).collect()
}

/// Without the relay they do not reach each other at all, so that is where they meet.
fn peers_behind_routers_meet_at_the_relay_and_then_connect_directly() -> Result<(), Missing> {
    let world = World::make(Nat::SamePort)?;
    let (mut broker, ticket) = world.broker(0, "2", "none", "40");
    let joiners = world.join(&ticket);
    broker.wait_for("error: cluster: no link leads from joiner-");
    drop((broker, joiners));
    assert!(!world.path("run").exists(), "a run that never began leaves no directory");

    let (relay, url) = world.relay();
    let (broker, ticket) = world.broker(0, "2", &url, "40");

    let found = world.doctor(&ticket);
    assert_eq!((&found["nat"], &found["broker"]["relayed"]), (&"same-port".into(), &false.into()), "{found}");
    assert_eq!(found["relay"]["works"], true, "{found}");
    assert!(found["seen_as"][0].as_str().unwrap().starts_with("10.77.0.2:"), "{found}");
    assert!(found["broker"]["clock_ahead_s"].as_f64().unwrap().abs() < 5.0, "{found}");

    let joiners = world.join(&ticket);
    let said = broker.end();
    assert!(!said.contains("the relay"), "{said}");
    for mut joiner in joiners {
        assert!(joiner.0.wait().unwrap().success());
    }
    let logs = world.logs();
    let direct = |router: &str| logs.contains(&format!("path=Direct at=Some(10.77.0.{router}:"));
    assert!(direct("2") || direct("3"), "{logs}");
    assert!(both_took_part(&world.path("run")), "{said}");
    assert!(losses(&world.path("run")) == world.plain_losses("40"), "the losses differ: {said}");
    drop(relay);
    Ok(())
}

fn a_broker_behind_a_router_is_found_at_the_relay() -> Result<(), Missing> {
    let world = World::make(Nat::SamePort)?;
    let (relay, url) = world.relay();
    let (broker, ticket) = world.broker(world.joiners[0], "1", &url, "10");
    let mut joiner = world.join_as(1, &ticket);
    let said = broker.end();
    assert!(joiner.0.wait().unwrap().success(), "{said}");
    let log = std::fs::read_to_string(world.path("joiner-1")).unwrap();
    assert!(log.contains("path=Direct at=Some(10.77.0.2:"), "{log}");
    drop(relay);
    Ok(())
}

fn a_run_through_the_relay_outlives_its_restart() -> Result<(), Missing> {
    let world = World::make(Nat::PortPerPeer)?;
    let (relay, url) = world.relay();
    let (mut broker, ticket) = world.broker(0, "2", &url, "600");
    let found = world.doctor(&ticket);
    assert_eq!(found["nat"], "port-per-peer", "{found}");

    let joiners = world.join(&ticket);
    broker.wait_for("reach each other only through the relay: ");
    broker.wait_for("step ");
    relay.signal("-9");
    drop(relay);
    let (relay, same) = world.relay();
    assert_eq!(same, url);
    let said = broker.end();
    for mut joiner in joiners {
        assert!(joiner.0.wait().unwrap().success());
    }
    assert!(both_took_part(&world.path("run")), "{said}");
    assert!(losses(&world.path("run")) == world.plain_losses("600"), "the losses differ: {said}");
    drop(relay);
    Ok(())
}
