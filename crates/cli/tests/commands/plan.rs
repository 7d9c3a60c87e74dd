//! Runs by a given plan: replicas, uneven cuts, peers that are left out.

use std::fs;
use std::path::Path;

use insta::assert_snapshot;
use serde_json::{Value, json};

use super::{TINY, call, finished_run};

/// The plan of the finished run, changed.
fn plan(at: &Path, change: impl FnOnce(&mut Value)) {
    let (directory, _) = finished_run();
    let text = fs::read_to_string(directory.join("run/plan.json")).unwrap();
    let mut plan: Value = serde_json::from_str(&text).unwrap();
    change(&mut plan);
    fs::write(at, plan.to_string()).unwrap();
}

/// Losses and validation losses of a run.
fn losses(run: &Path) -> Vec<(f64, Option<f64>)> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let line = |line| -> (f64, Option<f64>) {
        let step: Value = serde_json::from_str(line).unwrap();
        (step["loss"].as_f64().unwrap(), step["val_loss"].as_f64())
    };
    text.lines().map(line).collect()
}

/// Four micro-batches a step: one peer runs the first stage, two take turns at the second; nobody waits for the fourth device.
#[test]
fn replicas_train_over_processes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    plan(&dir.join("replicas.json"), |p| {
        p["peers"] = json!(["attic", "lab-1", "home", "lab-0"]);
        p["stages"][0]["peers"] = json!([2]);
        p["stages"][1]["peers"] = json!([3, 1]);
        p["schedule"] = json!("zb-h1");
    });
    plan(&dir.join("alone.json"), |p| {
        p["peers"] = json!(["alone"]);
        p["stages"][0]["peers"] = json!([0]);
        p["stages"][1]["peers"] = json!([0, 0]);
    });
    let train = |plan: &str, run: &str, more: &[&str]| {
        let args = ["train", "--plan", plan, "--run-dir", run, "--json", "--steps", "6", "--set=checkpoint.every=3"];
        let ran = call(dir, &[&args[..], more, &TINY].concat());
        assert_eq!(ran.status, 0, "{}", ran.err);
        (ran.json(), losses(&dir.join(run)))
    };
    let (summary, together) = train("replicas.json", "together", &[]);
    let names: Vec<&str> = summary["peers"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["lab-1", "home", "lab-0"], "in the plan's order, without the one that holds no stage");
    let used: Value = serde_json::from_str(&fs::read_to_string(dir.join("together/plan.json")).unwrap()).unwrap();
    assert_eq!(used["peers"], json!(["lab-1", "home", "lab-0"]));
    assert_eq!(used["stages"][1]["peers"], json!([2, 0]));

    // Who takes the turns decides nothing.
    let (_, alone) = train("alone.json", "alone", &[]);
    assert_eq!(together, alone);
    assert!(together.len() == 6 && together[5].1.is_some());

    // From a checkpoint to which every value came once, a run goes on with the same losses, whoever has its shares then.
    let from = ["--resume", "together/checkpoints/step-3"];
    assert_eq!(train("replicas.json", "resumed", &from).1, together[3..]);
    assert_eq!(train("alone.json", "resumed-alone", &from).1, together[3..]);
}

#[test]
fn a_job_can_name_its_plan() {
    let dir = tempfile::tempdir().unwrap();
    plan(&dir.path().join("p.json"), |p| p["peers"] = json!(["left", "right"]));
    let train = |args: &[&str]| call(dir.path(), &[&["train", "--steps", "1", "--json"], args, &TINY].concat()).json();
    let with = train(&["--set=plan.file=p.json"]);
    assert_eq!((&with["peers"][0]["name"], &with["peers"][1]["name"]), (&json!("left"), &json!("right")));
    let without = train(&["--set=plan.file=p.json", "--peers", "1"]);
    assert_eq!(without["peers"][0]["name"], "peer-0");
    assert_eq!(without["loss_first"], with["loss_first"]);
}

#[test]
fn a_plan_that_does_not_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let refused = |change: &dyn Fn(&mut Value), args: &[&str]| {
        plan(&dir.join("p.json"), change);
        let error =
            call(dir, &[&["train", "--plan", "p.json", "--steps", "1"], &TINY[..], args].concat()).failure(2, dir);
        let digest = |word: &&str| word.len() >= 32 && word.chars().all(|c| c.is_ascii_hexdigit());
        let digests: Vec<&str> = error.split(|c: char| !c.is_alphanumeric()).filter(digest).collect();
        digests.iter().fold(error.clone(), |e, d| e.replace(d, "DIGEST"))
    };
    let nothing = |_: &mut Value| {};
    assert_snapshot!(refused(&nothing, &["--set=model.n_layer=3"]), @"error: plan: it was made for another model or micro-batch size (graph DIGEST, this one is DIGEST); plan anew");
    assert_snapshot!(refused(&nothing, &["--set=train.batch=8"]), @"error: the plan is for 4 micro-batches a step, the job has 8; plan anew");
    assert!(refused(&nothing, &["--peers", "2"]).contains("'--plan <P.json>' cannot be used with '--peers <N>'"));
    assert_snapshot!(refused(&|p| p["stages"][1]["peers"] = json!([5]), &[]), @"error: plan: stage 1 names peer 5, of 2");
    assert_snapshot!(refused(&|p| p["stages"][1]["peers"] = json!([0, 1, 0, 1, 0]), &[]), @"error: plan: stage 1 deals 4 micro-batches to 5 peers; use more micro-batches");
    assert_snapshot!(refused(&|p| p["stages"][0]["nodes"][0] = json!(1), &[]), @"error: plan: node #1 stands in two stages");
    let unknown = refused(&|p| p["schedule"] = json!("fast"), &[]);
    assert!(unknown.contains("unknown variant `fast`, expected one of `gpipe`, `1f1b`, `zb-h1`"), "{unknown}");
}
