//! Runs over real processes and real QUIC on this machine.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

fn fusionllm() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusionllm"));
    command.stdin(Stdio::null());
    command
}

/// A model small enough that a step takes milliseconds.
const TINY: [&str; 8] = [
    "--set=model.n_layer=2",
    "--set=model.n_embd=16",
    "--set=model.n_head=2",
    "--set=data.context=16",
    "--set=train.batch=4",
    "--set=train.micro_batch=1",
    "--set=eval.every=4",
    "--set=eval.batches=2",
];

fn finished(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    output
}

/// (loss, val_loss) of every step.
fn losses(run: &Path) -> Vec<(f64, Option<f64>)> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines()
        .map(|line| {
            let step: serde_json::Value = serde_json::from_str(line).unwrap();
            (step["loss"].as_f64().unwrap(), step["val_loss"].as_f64())
        })
        .collect()
}

#[test]
fn losses_over_processes_are_those_of_one_peer() {
    let directory = tempfile::tempdir().unwrap();
    let run = |peers: &str, backend: &str| {
        let path = directory.path().join(format!("{peers}-{backend}"));
        finished(
            fusionllm()
                .args(["train", "--steps", "8", "--peers", peers, "--backend", backend, "--run-dir"])
                .arg(&path)
                .args(TINY),
        );
        losses(&path)
    };
    let alone = run("1", "burn-cpu");
    assert_eq!(alone.len(), 8);
    assert!(
        alone[3].1.is_some() && alone[7].1.is_some() && alone[4].1.is_none(),
        "validation after steps 4 and 8: {alone:?}"
    );
    assert_eq!(run("3", "burn-cpu"), alone, "bit for bit");
    if cfg!(feature = "candle") {
        for ((mixed, _), (one, _)) in run("4", "burn-cpu,candle-cpu").into_iter().zip(alone) {
            assert!((mixed - one).abs() < 1e-4 * one, "{mixed} {one}");
        }
    }
}

/// The process of a run's joiner of this name.
#[cfg(target_os = "linux")]
fn joiner(broker: &Child, name: &str) -> Option<String> {
    let children = std::fs::read_dir(format!("/proc/{}/task", broker.id())).ok()?;
    for task in children.flatten() {
        let list = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for pid in list.split_whitespace() {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if line.split(|b| *b == 0).any(|a| a == name.as_bytes()) {
                return Some(pid.to_string());
            }
        }
    }
    None
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_peer_ends_the_run_and_is_named() {
    use std::io::{BufRead, BufReader, Read};

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let mut broker = fusionllm()
        .args(["train", "--steps", "1000000", "--peers", "3", "--set=checkpoint.every=2", "--run-dir"])
        .arg(&path)
        .args(TINY)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(broker.stderr.take().unwrap());
    // The first validation is reported once training is under way.
    let mut line = String::new();
    while !line.contains("validation") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the run ended early");
    }
    let pid = joiner(&broker, "peer-1").expect("the joiner runs");
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    let status = broker.wait().unwrap();
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert_eq!(status.code(), Some(1), "{rest}");
    let error = rest.lines().find(|l| l.starts_with("error:")).unwrap_or_else(|| panic!("no error line in {rest}"));
    assert!(error.contains("peer-1"), "{error}");
    let last = losses(&path).len();
    assert!(last >= 4, "{last} steps were recorded");
}
