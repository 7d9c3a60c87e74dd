//! Broker and joiners on hosts of their own: network namespaces with their own addresses, joined by a bridge.
//! Making them takes root and iproute2.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use hosts::{Hosts, Running};
use requirements::Missing;
use small_disk::SmallDisk;

#[path = "support/hosts.rs"]
mod hosts;
#[path = "support/requirements.rs"]
mod requirements;
#[path = "support/small_disk.rs"]
mod small_disk;

requirements::main!(
    a_broker_and_joiners_on_three_hosts_train,
    a_slow_uplink_is_found_by_measuring,
    peers_behind_one_line_share_it,
    a_run_outlives_cuts_sleeps_deaths_and_a_full_disk,
    a_checkpoint_that_a_full_disk_stops_says_so,
    a_run_starts_from_weights_and_is_resumed_over_slow_lines
);

const FUSIONLLM: &str = env!("CARGO_BIN_EXE_fusionllm");

/// A broker on the first host, a joiner on each of the others; the run's directory once it is over.
fn run(hosts: &Hosts, directory: &std::path::Path, settings: &[&str]) -> std::path::PathBuf {
    run_on(hosts, &(1..hosts.count).collect::<Vec<_>>(), directory, settings)
}

/// A broker on the first host, and joiners on these; the run's directory once it is over.
fn run_on(hosts: &Hosts, joiners: &[usize], directory: &std::path::Path, settings: &[&str]) -> std::path::PathBuf {
    let run = directory.join("run");
    let peers = joiners.len().to_string();
    let mut broker = Running(
        hosts
            .on(0, FUSIONLLM)
            .args(["broker", "--peers", &peers, "--steps", "5", "--run-dir"])
            .arg(&run)
            .args(["--set=model.n_layer=2", "--set=model.n_embd=16", "--set=model.n_head=2", "--set=data.context=16"])
            .args(["--set=train.batch=4", "--set=train.micro_batch=1", "--set=eval.every=0"])
            .args(["--set=plan.scheduler=equal-compute"])
            .args(settings)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(broker.0.stderr.take().unwrap());
    let ticket = loop {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the broker ended before it printed a ticket");
        if let Some((_, ticket)) = line.split_once("fusionllm join ") {
            break ticket.trim().to_string();
        }
    };
    let join = |(i, host): (usize, &usize)| {
        Running(hosts.on(*host, FUSIONLLM).args(["join", &ticket, "--name", &format!("host-{i}")]).spawn().unwrap())
    };
    let joiners: Vec<Running> = (1..).zip(joiners).map(join).collect();
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert!(broker.0.wait().unwrap().success(), "{rest}");
    for mut joiner in joiners {
        assert!(joiner.0.wait().unwrap().success());
    }
    run
}

fn read(run: &std::path::Path, file: &str) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(run.join(file)).unwrap()).unwrap()
}

/// Three hosts, where this user may make any.
fn hosts() -> Result<Hosts, Missing> {
    Hosts::make(3).ok_or_else(|| Missing {
        requirement: "root",
        reason: "making network namespaces takes Linux, root and iproute2".into(),
    })
}

fn a_broker_and_joiners_on_three_hosts_train() -> Result<(), Missing> {
    let hosts = hosts()?;
    let directory = tempfile::tempdir().unwrap();
    let run = run(&hosts, directory.path(), &[]);
    let summary = read(&run, "summary.json");
    assert_eq!(summary["steps"], 5);
    let peers: Vec<&str> = summary["peers"].as_array().unwrap().iter().filter_map(|p| p["name"].as_str()).collect();
    assert_eq!(peers, ["host-1", "host-2"]);
    let link = &summary["links"].as_array().unwrap()[0];
    assert!(link["bytes_per_step"].as_u64().unwrap() > 0, "{link}");
    Ok(())
}

/// The kernel slows down all that leaves the second host. The run measures this without a testbed file, and the
/// published rule compresses that link alone.
fn a_slow_uplink_is_found_by_measuring() -> Result<(), Missing> {
    let hosts = hosts()?;
    if !hosts.limit_from(2, 8.0) {
        return Err(Missing { requirement: "root", reason: "the kernel has no token buckets (sch_tbf)".into() });
    }
    let directory = tempfile::tempdir().unwrap();
    let run = run(&hosts, directory.path(), &["--set=compression.name=adatopk-published"]);
    let plan = read(&run, "plan.json");
    let device = |n: u32| serde_json::json!({ "device": n });
    let lines = plan["cluster"]["links"].as_array().unwrap();
    assert_eq!(lines.len(), 6);
    for line in lines {
        let bandwidth = line["bandwidth"].as_f64().unwrap();
        if line["from"] == device(1) {
            assert!((0.3e6..1.5e6).contains(&bandwidth), "{line}");
        } else {
            assert!(bandwidth > 3e6, "{line}");
        }
    }
    let codec = |from: &str| {
        let links = plan["links"].as_array().unwrap().iter();
        let mut of = links.filter(|l| l["from"] == from && l["to"] != "broker").map(|l| l["codec"].clone());
        of.next().unwrap()
    };
    assert_eq!((codec("host-1"), codec("host-2")), ("none".into(), "topk".into()));
    Ok(())
}

/// Two joiners on one host have its line in common. The run finds that out, measures the line by one of them at a time,
/// and plans for a site.
fn peers_behind_one_line_share_it() -> Result<(), Missing> {
    let hosts = hosts()?;
    if !hosts.limit_from(1, 8.0) || !hosts.limit_to(1, 16.0) {
        return Err(Missing { requirement: "root", reason: "the kernel has no token buckets (sch_tbf)".into() });
    }
    let directory = tempfile::tempdir().unwrap();
    let run = run_on(&hosts, &[1, 1, 2], directory.path(), &["--set=compression.name=adatopk"]);
    let cluster = &read(&run, "plan.json")["cluster"];
    let [site] = &cluster["sites"].as_array().unwrap()[..] else { panic!("{cluster}") };
    assert_eq!(site["name"], "line of host-1 and host-2");
    let rate = |line: &str| site[line]["bandwidth"].as_f64().unwrap();
    assert!((0.5e6..1.5e6).contains(&rate("uplink")) && (1e6..3e6).contains(&rate("downlink")), "{site}");
    let sites: Vec<_> = cluster["devices"].as_array().unwrap().iter().map(|d| d["site"].as_u64()).collect();
    assert_eq!(sites, [Some(0), Some(0), None]);
    for line in cluster["links"].as_array().unwrap() {
        let ends = [&line["from"], &line["to"]].map(|end| end["device"].as_u64());
        let behind = ends.map(|end| end.is_some_and(|device| device < 2));
        assert_eq!(line["bandwidth"].as_f64().unwrap() > 4e6, behind[0] == behind[1], "{line}");
    }
    Ok(())
}

fn losses(run: &std::path::Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].clone();
    text.lines().map(loss).collect()
}

/// Settings with which little is computed, and stages never have replicas.
const SMALL: [&str; 6] = [
    "--set=data.context=32",
    "--set=train.batch=4",
    "--set=train.micro_batch=1",
    "--set=eval.every=0",
    "--set=checkpoint.every=0",
    "--set=plan.scheduler=equal-compute",
];

/// A run whose output the test follows.
struct Watched {
    broker: Running,
    lines: BufReader<std::process::ChildStderr>,
    ticket: String,
    seen: String,
}

impl Watched {
    /// Starts a broker with these arguments on the first host, and a joiner on each of the others.
    fn start<S: AsRef<OsStr>>(hosts: &Hosts, arguments: impl IntoIterator<Item = S>) -> (Self, Vec<Running>) {
        let peers = (hosts.count - 1).to_string();
        let mut broker = hosts.on(0, FUSIONLLM);
        broker.args(["broker", "--peers", &peers]).args(arguments).stderr(Stdio::piped());
        let mut broker = Running(broker.spawn().unwrap());
        let lines = BufReader::new(broker.0.stderr.take().unwrap());
        let mut watched = Self { broker, lines, ticket: String::new(), seen: String::new() };
        let line = watched.wait_for("fusionllm join ");
        watched.ticket = line.split_whitespace().last().unwrap().to_owned();
        let joiners = (1..hosts.count).map(|i| watched.join(hosts, i)).collect();
        (watched, joiners)
    }

    fn join(&self, hosts: &Hosts, host: usize) -> Running {
        let name = format!("host-{host}");
        Running(hosts.on(host, FUSIONLLM).args(["join", &self.ticket, "--name", &name]).spawn().unwrap())
    }

    /// Reads the broker's output up to a line with this text.
    fn wait_for(&mut self, text: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "the broker never said {text:?}: {}", self.seen);
            self.seen += &line;
            if line.contains(text) {
                return line;
            }
        }
    }

    fn end(&mut self) {
        self.lines.read_to_string(&mut self.seen).unwrap();
        assert!(self.broker.0.wait().unwrap().success(), "{}", self.seen);
    }
}

/// Each disturbance lasts until the broker has noticed it, so that the test needs no clock.
fn a_run_outlives_cuts_sleeps_deaths_and_a_full_disk() -> Result<(), Missing> {
    let hosts = Hosts::make(4).ok_or_else(|| hosts().err().unwrap())?;
    let directory = tempfile::tempdir().unwrap();
    let disk = SmallDisk::mount(8)?;
    let (quiet, disturbed) = (directory.path().join("quiet"), disk.path().join("disturbed"));
    let arguments = |run: &std::path::Path| {
        let mut arguments: Vec<OsString> = ["--steps", "1500", "--run-dir"].map(OsString::from).into();
        arguments.push(run.into());
        arguments.extend(["--set=model.n_layer=4", "--set=model.n_embd=32", "--set=model.n_head=2"].map(Into::into));
        arguments.extend(SMALL.map(Into::into));
        arguments
    };
    let (mut run, joiners) = Watched::start(&hosts, arguments(&quiet));
    run.end();
    drop((run, joiners));

    let (mut run, mut joiners) = Watched::start(&hosts, arguments(&disturbed));
    run.wait_for("step ");
    // A cut that is shorter than the broker's patience costs only the wait.
    hosts.cut(2);
    run.wait_for("host-2 has not answered");
    hosts.heal(2);
    run.wait_for("host-2 answers again");
    // A machine that sleeps longer loses its share, and comes back as a spare or with a share.
    joiners[2].signal("-STOP");
    run.wait_for("lost host-3");
    joiners[2].signal("-CONT");
    run.wait_for("host-3 answers again");
    // A process that dies does not come back, but another one on that machine does. Meanwhile the disk is full.
    disk.fill();
    run.wait_for("the disk is full");
    joiners[0].signal("-9");
    run.wait_for("lost host-1 at step ");
    run.wait_for("training goes on");
    disk.empty();
    run.wait_for("the disk has room again");
    joiners[0] = run.join(&hosts, 1);
    run.wait_for("host-1 joined");
    run.end();
    assert!(losses(&disturbed) == losses(&quiet), "the losses differ: {}", run.seen);
    let summary = read(&disturbed, "summary.json");
    let incidents: Vec<&str> =
        summary["incidents"].as_array().unwrap().iter().filter_map(|i| i["peer"].as_str()).collect();
    assert!(incidents.starts_with(&["host-3", "host-1"]), "{summary}");
    Ok(())
}

/// The model takes more than the disk has: no checkpoint fits, and the run fails after its last step.
fn a_checkpoint_that_a_full_disk_stops_says_so() -> Result<(), Missing> {
    let disk = SmallDisk::mount(1)?;
    let mut train = Command::new(FUSIONLLM);
    train.args(["train", "--peers", "1", "--steps", "2", "--run-dir"]).arg(disk.path().join("run")).args(SMALL);
    let ran = train.arg("--set=checkpoint.every=1").output().unwrap();
    let said = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(1), "{said}");
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("could not be written: ")).collect();
    assert!(lines.iter().all(|line| line.contains("No space left on device")), "{said}");
    let goes_on: Vec<bool> = lines.iter().map(|line| line.ends_with("; training goes on")).collect();
    assert_eq!(goes_on, [true, false], "{said}");
    Ok(())
}

/// `scripts/slow_start.py` does the same with 1 GB.
fn a_run_starts_from_weights_and_is_resumed_over_slow_lines() -> Result<(), Missing> {
    let hosts = hosts()?;
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).into_os_string();
    let mut settings: Vec<OsString> =
        ["--set=model.n_layer=4", "--set=model.n_embd=160", "--set=model.n_head=2"].map(Into::into).into();
    settings.extend(SMALL.map(Into::into));
    settings.push("--set=train.optimizer.name=sgd".into());
    let mut made = Command::new(FUSIONLLM);
    made.args(["train", "--peers", "1", "--steps", "1", "--run-dir"]).arg(path("made")).args(&settings);
    assert!(made.stderr(Stdio::null()).stdout(Stdio::null()).status().unwrap().success());

    let mut weights = OsString::from("--set=model.weights=");
    weights.push(path("made/checkpoints/step-1/model.safetensors"));
    let start = |name: &str| {
        let mut arguments = vec!["--steps".into(), "3".into(), "--run-dir".into(), path(name), weights.clone()];
        arguments.extend(settings.clone());
        arguments
    };
    let resume = |name: &str| [OsString::from("--steps"), "6".into(), "--resume".into(), path(name)].to_vec();
    for name in ["fast", "slow"] {
        if name == "slow" && !(1..=2).all(|host| hosts.limit_from(host, 8.0) && hosts.limit_to(host, 8.0)) {
            return Err(Missing { requirement: "root", reason: "the kernel has no token buckets (sch_tbf)".into() });
        }
        for arguments in [start(name), resume(name)] {
            let (mut run, joiners) = Watched::start(&hosts, arguments);
            run.end();
            drop(joiners);
            // On a fast line, it may be over before anybody could read it.
            assert!(name == "fast" || run.seen.contains("loading: "), "no progress is shown: {}", run.seen);
        }
    }
    assert_eq!(losses(&directory.path().join("fast")).len(), 6);
    assert_eq!(losses(&directory.path().join("slow")), losses(&directory.path().join("fast")));
    Ok(())
}
