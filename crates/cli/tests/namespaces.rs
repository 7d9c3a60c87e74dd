//! Broker and joiners on hosts of their own: network namespaces with their own addresses, joined by a bridge. It takes root.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

fn ip(args: &str) -> bool {
    Command::new("ip").args(args.split_whitespace()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

/// Hosts on one bridge; gone when dropped.
struct Hosts {
    tag: String,
    count: usize,
}

impl Hosts {
    /// `None` where this user may not make any.
    fn make(count: usize) -> Option<Self> {
        // Tests run beside each other.
        static MADE: AtomicU32 = AtomicU32::new(0);
        let tag = format!("fl{}{}", std::process::id() % 100_000, MADE.fetch_add(1, Relaxed));
        let hosts = Self { tag, count };
        let switch = hosts.name("s");
        if !ip(&format!("netns add {switch}")) {
            return None;
        }
        let made = ip(&format!("-n {switch} link add br0 type bridge"))
            && ip(&format!("-n {switch} link set br0 up"))
            && (0..count).all(|i| {
                let host = hosts.name(&i.to_string());
                ip(&format!("netns add {host}"))
                    && ip(&format!("-n {host} link set lo up"))
                    && ip(&format!("-n {host} link add eth0 type veth peer name p{i} netns {switch}"))
                    && ip(&format!("-n {host} addr add 10.77.0.{}/24 dev eth0", i + 1))
                    && ip(&format!("-n {host} link set eth0 up"))
                    && ip(&format!("-n {switch} link set p{i} master br0"))
                    && ip(&format!("-n {switch} link set p{i} up"))
            });
        made.then_some(hosts)
    }

    fn name(&self, host: &str) -> String {
        format!("{}-{host}", self.tag)
    }

    fn on(&self, host: usize) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name(&host.to_string()), env!("CARGO_BIN_EXE_fusionllm")]);
        command.stdin(Stdio::null());
        command
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for i in 0..self.count {
            ip(&format!("netns del {}", self.name(&i.to_string())));
        }
        ip(&format!("netns del {}", self.name("s")));
    }
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A broker on the first host, a joiner on each of the others; the run's directory once it is over.
fn run(hosts: &Hosts, directory: &std::path::Path, settings: &[&str]) -> std::path::PathBuf {
    let run = directory.join("run");
    let peers = (hosts.count - 1).to_string();
    let mut broker = Running(
        hosts
            .on(0)
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
    let joiners: Vec<Running> = (1..hosts.count)
        .map(|i| Running(hosts.on(i).args(["join", &ticket, "--name", &format!("host-{i}")]).spawn().unwrap()))
        .collect();
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

#[test]
fn a_broker_and_joiners_on_three_hosts_train() {
    let Some(hosts) = Hosts::make(3) else {
        eprintln!("skipped: making network namespaces takes root and iproute2");
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let run = run(&hosts, directory.path(), &[]);
    let summary = read(&run, "summary.json");
    assert_eq!(summary["steps"], 5);
    let peers: Vec<&str> = summary["peers"].as_array().unwrap().iter().filter_map(|p| p["name"].as_str()).collect();
    assert_eq!(peers, ["host-1", "host-2"]);
    let link = &summary["links"].as_array().unwrap()[0];
    assert!(link["bytes_per_step"].as_u64().unwrap() > 0, "{link}");
}

/// What leaves the second host goes through a bucket of the kernel's: measuring tells it from all others, and AdaTopK compresses it alone, without any testbed file.
#[test]
fn a_slow_uplink_is_found_by_measuring() {
    let Some(hosts) = Hosts::make(3) else {
        eprintln!("skipped: making network namespaces takes root and iproute2");
        return;
    };
    let bucket = ["netns", "exec", &hosts.name("2"), "tc", "qdisc", "add", "dev", "eth0", "root"];
    let rate = ["tbf", "rate", "8mbit", "burst", "16kb", "latency", "100ms"];
    if !Command::new("ip").args(bucket).args(rate).stderr(Stdio::null()).status().is_ok_and(|s| s.success()) {
        eprintln!("skipped: the kernel has no token buckets");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let run = run(&hosts, directory.path(), &["--set=compression.name=adatopk"]);
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
    assert_eq!((codec("host-1"), codec("host-2")), ("none".into(), "adatopk".into()));
}
