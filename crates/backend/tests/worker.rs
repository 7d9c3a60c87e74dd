//! Workers that break the protocol. Each is a few lines of shell.

#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::time::Duration;

use fusionllm_backend::worker::{Patience, Worker};
use fusionllm_backend::{Backend, BackendError, Prepared, Segment, SegmentNode, open, worker_name};
use fusionllm_graph::ops::Unary;
use fusionllm_graph::{DType, HostTensor, TensorType};

/// The command of a worker that introduces itself, and then runs these commands.
fn after_hello(commands: &str) -> String {
    let hello = r#"{"hello": {"protocol": 2, "name": "fake", "version": "1", "device": "none", "memory_bytes": null,
        "dtypes": ["f32", "f8"], "operators": ["unary"]}}"#;
    shell(&format!("echo '{}'; {commands}", hello.replace('\n', "")))
}

fn shell(commands: &str) -> String {
    format!("sh -c \"{}\"", commands.replace('\\', r"\\").replace('"', "\\\""))
}

/// Takes requests and says that each was carried out.
const OBEY: &str = r#"while read request; do echo '{"done": {}}'; done"#;

fn upload(worker: &dyn Backend) -> Result<fusionllm_backend::Tensor, BackendError> {
    worker.upload(&HostTensor::from_f32([2], &[1.0, 2.0]).unwrap())
}

/// The error of a worker that takes `start` and its next request, and then runs these commands.
fn fails(commands: &str) -> String {
    let worker = Worker::start(&after_hello(&format!("read start; read request; {commands}"))).unwrap();
    let first = upload(&worker).unwrap_err().to_string();
    let again = upload(&worker).unwrap_err().to_string();
    assert_eq!(first, again, "the process is of no more use");
    first
}

#[test]
fn a_command_that_is_none() {
    let refused = |command: &str| Worker::start(command).err().unwrap().to_string();
    assert!(refused("no-such-program --device cuda").contains("it cannot be started"));
    assert!(refused("sh -c 'open quote").contains("a quote is not closed"));
    assert!(refused("").contains("no words"));
    let Err(BackendError::Worker { command, .. }) = open(&worker_name("no-such-program")) else { panic!() };
    assert_eq!(command, "no-such-program");
}

#[test]
fn a_worker_that_ends_says_why() {
    let error = fails("echo 'no room' >&2; echo 'on the device' >&2; exit 3");
    assert!(error.contains("it ended (exit status: 3)"), "{error}");
    assert!(error.ends_with("its last lines:\n  no room\n  on the device"), "{error}");
    let error = Worker::start(&shell("echo 'no module named x' >&2; exit 1")).err().unwrap().to_string();
    assert!(error.contains("it ended (exit status: 1); its last lines:\n  no module named x"), "{error}");
}

#[test]
fn garbage_is_shown() {
    let error = fails("echo 'Loading weights... 12 %'");
    assert!(error.contains(r#"it wrote "Loading weights... 12 %" where a message was expected"#), "{error}");
    let error = fails(r"printf 'a\033[31mb\n'");
    assert!(error.contains(r#""a[31mb""#), "terminals obey nothing of it: {error}");
}

#[test]
fn a_line_without_an_end_is_cut() {
    let error = fails("head -c 3000000 /dev/zero | tr '\\0' x");
    assert!(error.len() < 1000 && error.contains("where a message was expected"), "{error}");
}

#[test]
fn a_silent_worker_is_ended() {
    let patience = Patience { silence: Duration::from_millis(100), ..Patience::default() };
    // The worker is silent until its requests end.
    let worker = Worker::start_with(&after_hello("cat > /dev/null"), patience).unwrap();
    let error = upload(&worker).unwrap_err().to_string();
    assert!(error.contains("it has been silent for 0.1 s"), "{error}");
}

#[test]
fn signs_of_life_are_no_answers() {
    let busy = r#"for i in 1 2 3; do echo '{"alive": {}}'; done"#;
    let worker = Worker::start(&after_hello(&format!("{busy}; read start; {busy}; {OBEY}"))).unwrap();
    upload(&worker).unwrap();
}

#[test]
fn another_version_is_refused() {
    // Version 1 knew no `forget`, and waits for no request without an answer.
    for version in [1, 7] {
        let hello = after_hello("").replace(r#"\"protocol\": 2"#, &format!(r#"\"protocol\": {version}"#));
        let error = Worker::start(&hello).err().unwrap().to_string();
        let versions = format!("fake speaks version {version} of the worker protocol, and this program version 2");
        assert!(error.contains(&versions), "{error}");
    }
}

#[test]
fn an_error_names_the_operator_and_what_to_do() {
    let failed = r#"{"error": {"reason": "4 GiB are too many", "node": 0, "kind": "memory"}}"#;
    // `start` has no answer. The exchange file, the tensor and the segment are fine.
    let prepare = r#"read start; for i in 1 2 3; do read request; echo '{"done": {}}'; done"#;
    let worker = Worker::start(&after_hello(&format!("{prepare}; read run; echo '{failed}'; {OBEY}"))).unwrap();
    let x = upload(&worker).unwrap();
    let exp = |x| worker.run(&Unary::Exp.into(), vec![x], &[TensorType::new(DType::F32, [2])]);
    let error = exp(x).unwrap_err().to_string();
    assert!(error.starts_with("exp on fake: 4 GiB are too many; give this peer less"), "{error}");
    exp(upload(&worker).unwrap()).unwrap();
}

#[test]
fn a_result_of_another_type_is_noticed() {
    let wrong = r#"read start; read exchange; echo '{"done": {}}'; read upload; echo '{"done": {}}';
        read download; echo '{"done": {"type": {"dtype": "f32", "shape": [3]}}}'; cat > /dev/null"#;
    let worker = Worker::start(&after_hello(wrong)).unwrap();
    let x = upload(&worker).unwrap();
    let error = worker.download(&x).unwrap_err().to_string();
    assert!(error.contains("it sent f32[3] instead of f32[2]"), "{error}");
}

#[test]
fn tensors_of_others_are_refused() {
    let cpu = open("cpu").unwrap();
    let [one, other] =
        [OBEY, OBEY].map(|commands| Worker::start(&after_hello(&format!("read start; {commands}"))).unwrap());
    for foreign in [upload(&*cpu).unwrap(), upload(&other).unwrap()] {
        let error = one.download(&foreign).unwrap_err().to_string();
        assert_eq!(error, "fake cannot take this tensor: it belongs to another backend");
    }
    let error = one.upload(&HostTensor::zeros(TensorType::new(DType::F64, [2]))).unwrap_err().to_string();
    assert_eq!(error, "fake cannot take this tensor: it does not hold f64");
}

/// A tensor that is no longer needed leaves the device with the next segment, or before the next tensor comes.
#[test]
fn dropped_tensors_are_freed() {
    // Every answer repeats the request to standard error, and the last one ends the worker.
    let echo =
        r#"read start; for i in 1 2 3 4 5 6 7; do read request; echo '{"done": {}}'; echo \"$request\" >&2; done"#;
    let worker = Worker::start(&after_hello(&echo.replace(r#"\""#, "\""))).unwrap();
    let ty = [TensorType::new(DType::F32, [2])];
    let kept = upload(&worker).unwrap();
    let first = worker.run(&Unary::Exp.into(), vec![kept.clone()], &ty).unwrap().remove(0);
    let _second = worker.run(&Unary::Exp.into(), vec![first], &ty).unwrap();
    drop(kept);
    upload(&worker).unwrap();
    let error = worker.synchronize().unwrap_err().to_string();
    let runs: Vec<&str> = error.lines().filter(|line| line.contains("\"run\"")).collect();
    assert!(runs[0].contains(r#""inputs":[1],"outputs":[2],"free":[]"#), "{error}");
    assert!(runs[1].contains(r#""inputs":[2],"outputs":[3],"free":[2]"#), "{error}");
    assert!(error.contains(r#"{"free":{"tensors":[1]}}"#), "{error}");
}

/// The next request of any kind tells a worker that a segment was dropped. The worker does not answer that.
#[test]
fn dropped_segments_are_forgotten() {
    let echo = r#"read start; while read request; do echo "$request" >&2; case $request in
        *forget*) ;;
        *synchronize*) exit 1;;
        *) echo '{"done": {}}';;
        esac; done"#;
    let worker = Worker::start(&after_hello(&echo.replace('\n', " "))).unwrap();
    let ty = TensorType::new(DType::F32, [2]);
    let node = SegmentNode { op: Unary::Exp.into(), inputs: vec![0], outputs: vec![ty.clone()] };
    let exp = Segment { inputs: vec![ty], nodes: vec![node], outputs: vec![1] };
    let run = |segment: &Prepared| {
        worker.run_segment(segment, vec![upload(&worker).unwrap()], &mut |_| ControlFlow::Continue(()))
    };
    let [first, second, third] = [exp.clone(), exp.clone(), exp].map(|segment| worker.prepare(segment).unwrap());
    run(&first).unwrap();
    drop((first, third));
    run(&second).unwrap();
    drop(second);
    let error = worker.synchronize().unwrap_err().to_string();
    let said: Vec<&str> = error.lines().map(str::trim).collect();
    let at = |text: &str| said.iter().position(|line| line.contains(text)).unwrap_or_else(|| panic!("{text}: {error}"));
    assert!(at(r#"{"forget":{"segments":[1,3]}}"#) < at(r#"{"run":{"segment":2"#), "{error}");
    assert!(at(r#"{"run":{"segment":2"#) < at(r#"{"forget":{"segments":[2]}}"#), "{error}");
    assert_eq!(said.iter().filter(|line| line.starts_with("{\"forget\":")).count(), 2, "each is told once: {error}");
}
