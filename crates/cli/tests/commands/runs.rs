//! Lists of runs, and how a run that is over is shown.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use serde_json::Value;

use super::{TINY, call, command, finished_run};

/// Copies the files of the finished run that a list reads, with another job.
fn copy(run: &Path, to: &Path, change: impl Fn(String) -> String) {
    fs::create_dir_all(to).unwrap();
    for name in ["metrics.jsonl", "events.jsonl", "summary.json"] {
        fs::copy(run.join(name), to.join(name)).unwrap();
    }
    fs::write(to.join("job.toml"), change(fs::read_to_string(run.join("job.toml")).unwrap())).unwrap();
}

#[test]
fn runs_are_listed_with_the_settings_in_which_they_differ() {
    let (finished, _) = finished_run();
    let dir = tempfile::tempdir().unwrap();
    let runs = dir.path().join("runs");
    copy(&finished.join("run"), &runs.join("0001"), |job| job);
    copy(&finished.join("run"), &runs.join("0002"), |job| job.replace("seed = 1", "seed = 77"));
    fs::remove_file(runs.join("0002/summary.json")).unwrap();
    fs::create_dir(runs.join("left-over")).unwrap();

    let ran = call(dir.path(), &["runs"]);
    assert_eq!((ran.status, ran.err.as_str()), (0, "runs/left-over: job.toml is missing\n"));
    let lines: Vec<Vec<&str>> = ran.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 3, "{}", ran.out);
    assert_eq!(lines[0], ["run", "state", "step", "loss", "val", "took", "started", "seed"]);
    assert_eq!((lines[1][..3].join(" "), *lines[1].last().unwrap()), ("0001 over 3/3".into(), "1"));
    assert_eq!((lines[2][..3].join(" "), *lines[2].last().unwrap()), ("0002 stopped 3/3".into(), "77"));

    let listed = call(dir.path(), &["runs", "runs", "--json"]).json();
    let names: Vec<&Value> = listed["runs"].as_array().unwrap().iter().map(|run| &run["name"]).collect();
    assert_eq!(names, ["0001", "0002"]);
    assert_eq!(listed["differing"], serde_json::json!(["train.seed"]));
    assert_eq!(listed["runs"][1]["settings"], serde_json::json!({ "train.seed": 77 }));
    assert!(listed["runs"][0]["val_loss"].is_f64() && listed["runs"][0]["took_s"].is_f64(), "{listed}");
    assert_eq!(listed["broken"][0]["directory"], "runs/left-over");
}

#[test]
fn a_directory_without_runs_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let none = call(dir.path(), &["runs"]);
    assert_eq!(none.out, "runs: no runs are here yet; `fusionllm train` makes one in runs/\n");
    assert_eq!(none.status, 0);
    let elsewhere = call(dir.path(), &["runs", "elsewhere"]).failure(2, dir.path());
    assert!(elsewhere.starts_with("error: elsewhere: there is no such directory\nhint: "), "{elsewhere}");
}

#[test]
fn a_run_that_is_over_is_watched_once() {
    let (directory, _) = finished_run();
    let status = call(directory, &["status", "run"]);
    let watched = call(directory, &["status", "run", "--watch"]);
    assert_eq!((watched.status, watched.out), (0, status.out));
    let object = call(directory, &["status", "run", "--watch", "--json"]).json();
    assert_eq!(object, call(directory, &["status", "run", "--json"]).json());
}

/// A run that goes on until this is dropped.
pub(crate) struct Endless {
    train: Child,
    /// Reads what the run says, since whoever writes must be read.
    reader: Option<JoinHandle<usize>>,
}

impl Endless {
    /// Starts the run, and waits for its first step.
    pub(crate) fn start(directory: &Path, more: &[&str]) -> Self {
        let train =
            ["train", "--steps=1000000", "--peers=2", "--run-dir=run", "--set=eval.every=0", "-v", "--tethered"];
        let mut train = command(directory, &[&train[..], &TINY, more].concat());
        train.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut train = train.spawn().unwrap();
        let mut said = BufReader::new(train.stderr.take().unwrap()).lines().map(Result::unwrap);
        said.find(|line| line.starts_with("step 1/")).unwrap();
        Self { train, reader: Some(std::thread::spawn(move || said.count())) }
    }

    /// Kills the broker, and its peers with it.
    pub(crate) fn kill(&mut self) {
        self.train.kill().unwrap();
    }

    /// Asks the run to stop.
    pub(crate) fn stop(&mut self) {
        drop(self.train.stdin.take());
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        self.stop();
        self.train.wait().unwrap();
        self.reader.take().map(JoinHandle::join);
    }
}

/// Each status of a run that goes on is an object on a line. The watch ends with the run.
#[test]
fn a_run_is_watched_until_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Endless::start(dir.path(), &[]);
    let mut watch =
        command(dir.path(), &["status", "run", "--watch", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut shown = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    assert_eq!(shown.next().unwrap()["phase"], "training");
    assert_eq!(shown.next().unwrap()["phase"], "training");
    run.stop();
    let last = shown.last().unwrap();
    assert_eq!(last["phase"], "over", "{last}");
    assert!(watch.wait().unwrap().success());
}

/// Calls the command on a terminal of 80 columns, by the tool `script` of util-linux, which every Linux has.
#[cfg(target_os = "linux")]
fn on_terminal(directory: &Path, args: &[&str]) -> Command {
    let quoted: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
    let line = format!("stty cols 80 rows 24; exec '{}' {}", env!("CARGO_BIN_EXE_fusionllm"), quoted.join(" "));
    let mut script = Command::new("script");
    script.current_dir(directory).args(["-qec", &line, "/dev/null"]).env_remove("RUST_LOG").env("NO_COLOR", "1");
    script.stdin(Stdio::piped()).stdout(Stdio::piped());
    script
}

#[cfg(target_os = "linux")]
#[test]
fn no_line_is_wider_than_a_terminal() {
    let (directory, _) = finished_run();
    for args in [
        &["--help"][..],
        &["status", "run"],
        &["graph", "show", "run", "--backward"],
        &["train", "--set", "train.stepz=4"],
        &["status", "nothing"],
        &["join", "nothing", "--memory", "much"],
    ] {
        // Standard input stays open, as that of a terminal does.
        let script = on_terminal(directory, args).spawn().unwrap().wait_with_output().unwrap();
        let shown = String::from_utf8(script.stdout).unwrap();
        let wide: Vec<&str> = shown.lines().filter(|line| line.trim_end().chars().count() > 80).collect();
        assert!(wide.is_empty(), "{args:?}: {wide:#?}");
        let elsewhere = call(directory, args);
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&shown), words(&format!("{}{}", elsewhere.out, elsewhere.err)), "no word is cut in two");
    }
}

/// The usual screen comes back with the last status, and without an error.
#[cfg(target_os = "linux")]
#[test]
fn a_watch_leaves_the_terminal_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let _run = Endless::start(dir.path(), &[]);
    let mut script = on_terminal(dir.path(), &["status", "run", "--watch"]).spawn().unwrap();
    let (mut keys, mut screen) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
    let mut shown = Vec::new();
    while !String::from_utf8_lossy(&shown).contains("training") {
        let mut bytes = [0; 4096];
        let read = screen.read(&mut bytes).unwrap();
        assert!(read > 0, "{}", String::from_utf8_lossy(&shown));
        shown.extend(&bytes[..read]);
    }
    keys.write_all(b"\x03").unwrap();
    screen.read_to_end(&mut shown).unwrap();
    assert!(script.wait().unwrap().success());
    let shown = String::from_utf8(shown).unwrap();
    let (_, screen) = shown.split_once("\x1b[?1049h\x1b[?25l").expect(&shown);
    let (_, usual) = screen.split_once("\x1b[?25h\x1b[?1049l").expect(&shown);
    assert!(usual.starts_with("phase       training\r\n") && !usual.contains('\x1b'), "{usual:?}");
}

#[test]
fn quiet_commands_print_results_alone() {
    let dir = tempfile::tempdir().unwrap();
    let train = ["train", "--steps=2", "--peers=2", "--run-dir=run", "--quiet"];
    let ran = call(dir.path(), &[&train[..], &TINY].concat());
    assert_eq!((ran.status, ran.err.as_str()), (0, ""));
    assert!(ran.out.starts_with("\nsteps       2 in "), "{}", ran.out);
    let wrong = call(dir.path(), &["train", "none.toml", "-q"]).failure(2, dir.path());
    assert!(wrong.starts_with("error: none.toml"), "{wrong}");
    let both = call(dir.path(), &["train", "-q", "-v"]).failure(2, dir.path());
    assert!(both.contains("cannot be used with"), "{both}");
}

#[test]
fn verbose_commands_print_log_lines() {
    let log = |args: &[&str]| {
        let args = [&["train", "--steps=2", "--peers=1", "--set=checkpoint.every=1"], args, &TINY].concat();
        let dir = tempfile::tempdir().unwrap();
        let ran = command(dir.path(), &args).output().unwrap();
        String::from_utf8(ran.stderr).unwrap()
    };
    let (usual, verbose, more) = (log(&[]), log(&["-v"]), log(&["-vv"]));
    assert!(!usual.contains(" INFO "), "{usual}");
    assert!(
        verbose.contains(" INFO ") && verbose.contains(" fusionllm_node::") && !verbose.contains(" DEBUG "),
        "{verbose}"
    );
    assert!(more.contains(" INFO "), "{more}");
    assert!(more.lines().filter(|line| line.contains("DEBUG")).all(|line| line.contains(" fusionllm")), "{more}");
}
