//! Broker and joiners on hosts of their own: network namespaces with their own addresses, joined by a bridge.
//! Making them takes root and iproute2.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use hosts::{Hosts, Running};
use requirements::Missing;

#[path = "support/hosts.rs"]
mod hosts;
#[path = "support/requirements.rs"]
mod requirements;

requirements::main!(a_broker_and_joiners_on_three_hosts_train, a_slow_uplink_is_found_by_measuring);

const FUSIONLLM: &str = env!("CARGO_BIN_EXE_fusionllm");

/// A broker on the first host, a joiner on each of the others; the run's directory once it is over.
fn run(hosts: &Hosts, directory: &std::path::Path, settings: &[&str]) -> std::path::PathBuf {
    let run = directory.join("run");
    let peers = (hosts.count - 1).to_string();
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
    let joiners: Vec<Running> = (1..hosts.count)
        .map(|i| {
            Running(hosts.on(i, FUSIONLLM).args(["join", &ticket, "--name", &format!("host-{i}")]).spawn().unwrap())
        })
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

/// The kernel slows down all that leaves the second host. The run measures this without a testbed file, and AdaTopK
/// compresses that link alone.
fn a_slow_uplink_is_found_by_measuring() -> Result<(), Missing> {
    let hosts = hosts()?;
    if !hosts.limit_from(2, 8.0) {
        return Err(Missing { requirement: "root", reason: "the kernel has no token buckets (sch_tbf)".into() });
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
    Ok(())
}
