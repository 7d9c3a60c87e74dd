//! Attackers beside a run of processes: it ends, with the losses of a run that nobody attacks.
//! `cargo bench -p fusionllm-cli --bench attack` measures what they cost.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use attackers::{Attack, Attackers};

#[path = "support/attackers.rs"]
mod attackers;

fn fusionllm() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusionllm"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Trains a few steps, and returns their losses. The attackers begin before anybody joins.
fn losses(run: &Path, attackers: impl FnOnce(&str) -> Vec<Attackers>) -> Vec<f64> {
    let mut broker = fusionllm()
        .args(["broker", "--peers", "2", "--steps", "40", "--run-dir"])
        .arg(run)
        .args(["--set=model.n_layer=2", "--set=model.n_embd=16", "--set=model.n_head=2", "--set=data.context=16"])
        .args(["--set=train.batch=4", "--set=train.micro_batch=1", "--set=eval.every=0"])
        .args(["--set=plan.scheduler=equal-compute"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(broker.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("fusionllm join ") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "the broker ended before it printed a ticket");
    }
    let ticket = line.split_whitespace().last().unwrap();
    let (attackers, stop) = (attackers(ticket), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for of_a_kind in &attackers {
            scope.spawn(|| of_a_kind.run(32.0, &stop));
        }
        let join = |name| fusionllm().args(["join", ticket, "--name", name]).stderr(Stdio::null()).spawn().unwrap();
        let joiners: Vec<Child> = ["a", "b"].map(join).into();
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        stop.store(true, Relaxed);
        assert!(broker.wait().unwrap().success(), "{rest}");
        for mut joiner in joiners {
            assert!(joiner.wait().unwrap().success(), "{rest}");
        }
    });
    assert!(attackers.iter().all(|of_a_kind| of_a_kind.done() > 0), "some attackers did nothing");
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap();
    text.lines().map(loss).collect()
}

#[test]
fn attackers_change_no_loss() {
    let directory = tempfile::tempdir().unwrap();
    let quiet = losses(&directory.path().join("quiet"), |_| Vec::new());
    assert_eq!(quiet.len(), 40);
    let all = |ticket: &str| Attack::ALL.map(|attack| Attackers::new(attack, ticket)).into();
    assert_eq!(losses(&directory.path().join("attacked"), all), quiet, "bit for bit");
}
