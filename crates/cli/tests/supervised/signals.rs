//! Signals, closed terminals and killed parents.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::scene::{Scene, TINY};

const SIGNALS: [&str; 3] = ["HUP", "QUIT", "TERM"];

#[test]
fn every_signal_saves_a_local_run_and_leaves_no_process() {
    for signal in SIGNALS.into_iter().chain(["INT", "XCPU"]) {
        let scene = Scene::new();
        let mut run = scene.train(&[]);
        run.line("validation");
        run.signal(signal);
        let rest = run.ends_well();
        assert!(rest.contains("saving and stopping"), "{signal}: {rest}");
        assert_eq!(scene.saved_step(), scene.last_step(), "{signal}");
        assert!(scene.last_step() < 1_000_000);
    }
}

/// A terminal that closes, `timeout`, `srun` and a program that passes Ctrl-C on all tell a process twice.
#[test]
fn what_is_said_twice_is_done_once() {
    for signals in [["HUP", "HUP"], ["TERM", "TERM"], ["INT", "INT"], ["INT", "TERM"], ["TERM", "INT"]] {
        let scene = Scene::new();
        let mut run = scene.train(&[]);
        run.line("validation");
        run.signals(&signals);
        run.ends_well();
        assert_eq!(scene.saved_step(), scene.last_step(), "{signals:?}");
    }
}

#[test]
fn local_peers_end_with_the_process_that_started_them() {
    let scene = Scene::new();
    let mut run = scene.train(&[]);
    run.line("validation");
    run.signal("KILL");
    let (status, _) = run.end();
    assert_eq!(status.signal(), Some(9));
}

#[test]
fn nohup_lets_a_run_outlive_its_terminal() {
    let scene = Scene::new();
    let mut run = scene.train(&["nohup"]);
    run.line("validation");
    run.signal("HUP");
    // The signal was there first, so it would have ended the run before the next validations.
    for _ in 0..3 {
        run.line("validation");
    }
    run.signal("TERM");
    run.ends_well();
    assert_eq!(scene.saved_step(), scene.last_step());
}

/// A limit on files, as of `ulimit -f`, would otherwise end the process with a signal and no word.
#[test]
fn a_file_that_may_not_grow_is_an_error() {
    let scene = Scene::new();
    let limit = ["sh", "-c", "ulimit -f 100; exec \"$@\"", "sh"];
    let (status, rest) = scene.train(&limit).end();
    assert_eq!(status.code(), Some(1), "{rest}");
    assert!(rest.contains("File too large"), "{rest}");
}

/// As the package for Python starts it: the job comes through standard input, which then stays open.
#[test]
fn a_tethered_run_saves_and_stops_when_its_tether_is_cut() {
    for tether in ["exec tail -f /dev/null", "exit"] {
        let scene = Scene::new();
        let pipe = scene.directory.path().join("input");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        // A process that holds the tether, and is killed.
        let mut holder = Command::new("sh");
        holder.args(["-c", &format!("exec > \"$0\"; printf '[train]\\nsteps = 1000000\\n\\0'; {tether}")]).arg(&pipe);
        let mut holder = holder.stdin(Stdio::null()).spawn().unwrap();
        let args = ["sh", "-c", "exec \"$@\" < input", "sh"];
        let mut run = scene
            .start(&args, &[&["train", "-", "--tethered", "--peers", "2", "--run-dir", "run"], &TINY[1..]].concat());
        if tether == "exit" {
            // It is cut before anything has begun.
            let (status, rest) = run.end();
            assert_eq!(status.code(), Some(1), "{rest}");
            assert_eq!(scene.saved_step(), 0);
        } else {
            run.line("validation");
            holder.kill().unwrap();
            run.ends_well();
            assert_eq!(scene.saved_step(), scene.last_step());
        }
        holder.wait().unwrap();
    }
}

#[test]
fn every_signal_saves_a_brokers_run_and_sends_its_joiners_home() {
    for signal in SIGNALS {
        let scene = Scene::new();
        let (broker, joiners) = scene.broker(&[]);
        broker.signal(signal);
        broker.ends_well();
        assert_eq!(scene.saved_step(), scene.last_step(), "{signal}");
        joiners.into_iter().for_each(|joiner| drop(joiner.ends_well()));
    }
}

/// The unit of systemd does so on purpose: the joiners wait for the broker through a reboot.
#[test]
fn joiners_wait_for_a_broker_that_was_killed() {
    let scene = Scene::new();
    let (broker, mut joiners) = scene.broker(&[]);
    broker.signal("KILL");
    broker.end();
    for joiner in &mut joiners {
        joiner.line("lost the broker");
    }
    let mut broker = scene.start(&[], &["broker", "--resume", "run"]);
    broker.line("training goes on");
    broker.signal("TERM");
    broker.ends_well();
    assert_eq!(scene.saved_step(), scene.last_step());
    joiners.into_iter().for_each(|joiner| drop(joiner.ends_well()));
}

#[test]
fn every_signal_lets_a_joiner_hand_its_share_over() {
    for signal in SIGNALS {
        let scene = Scene::new();
        let (mut broker, [a, b]) = scene.broker(&[]);
        a.signal(signal);
        let rest = a.ends_well();
        assert!(rest.contains("leaving; the run goes on without this machine"), "{signal}: {rest}");
        broker.line("validation");
        broker.signal("TERM");
        broker.ends_well();
        assert_eq!(scene.saved_step(), scene.last_step());
        b.ends_well();
        let summary = std::fs::read_to_string(scene.run().join("summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        let incident = &summary["incidents"][0];
        assert_eq!((&incident["kind"], &incident["lost_work_s"]), (&"left".into(), &0.0.into()), "{incident}");
    }
}

/// Supervisors send one signal, and then kill.
#[test]
fn a_broker_that_has_lost_all_joiners_ends_at_the_first_signal() {
    for at_once in [true, false] {
        let scene = Scene::new();
        let (mut broker, joiners) = scene.broker(&["--set=checkpoint.every=20"]);
        // The second line of a validation. The scene has read the first.
        broker.line("step 80:");
        joiners.iter().for_each(|joiner| joiner.signal("KILL"));
        joiners.into_iter().for_each(|joiner| drop(joiner.end()));
        if !at_once {
            broker.line("lost ");
        }
        broker.signal("TERM");
        let (status, rest) = broker.end();
        let saved = scene.saved_step();
        assert_eq!(saved % 20, 0);
        if !status.success() {
            assert_eq!(status.code(), Some(1), "{rest}");
            assert!(rest.contains("error: stopped without another checkpoint: the run was at step "), "{rest}");
            assert!(rest.contains(&format!("step {saved} is safe; go on with --resume run")), "{rest}");
        }
    }
}

/// The choice of a micro-batch for so many devices takes the planner many seconds.
#[test]
fn an_interrupted_plan_is_the_best_so_far() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusionllm"));
    command.args(["plan", "--set=train.micro_batch=auto"]).arg(examples.join("three-homes/job.toml"));
    command.arg("--testbed").arg(examples.join("testbeds/48-gpus.toml"));
    let mut plan = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(plan.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains("Ctrl-C shows the best plan so far")));
    let sent = Command::new("kill").args(["-INT", &plan.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = plan.wait_with_output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && shown.contains(" a step\n"), "{shown}");
    assert!(shown.contains("planning was stopped, so there may be a faster plan"), "{shown}");
}
