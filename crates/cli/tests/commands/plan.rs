//! Plans given as files: replicas, uneven cuts, peers that are left out.

use std::fs;
use std::path::Path;

use insta::assert_snapshot;
use serde_json::{Value, json};

use super::{TINY, call, finished_run, losses};

/// The plan of the finished run, changed.
fn plan(at: &Path, change: impl FnOnce(&mut Value)) {
    let (directory, _) = finished_run();
    changed(&directory.join("run"), at, change);
}

/// The plan of a run, changed.
fn changed(run: &Path, at: &Path, change: impl FnOnce(&mut Value)) {
    let text = fs::read_to_string(run.join("plan.json")).unwrap();
    let mut plan: Value = serde_json::from_str(&text).unwrap();
    change(&mut plan);
    fs::write(at, plan.to_string()).unwrap();
}

/// Four micro-batches per step. One peer runs the first stage, two take turns at the second. The fourth device has no
/// stage, so the run does not wait for it.
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

    // The losses do not depend on which peer takes a turn.
    let (_, alone) = train("alone.json", "alone", &[]);
    assert_eq!(together, alone);
    assert!(together.len() == 6 && together[5].1.is_some());

    // A checkpoint has each value once. A run resumes from it with the same losses, however stages are shared out.
    let from = ["--resume", "together/checkpoints/step-3"];
    assert_eq!(train("replicas.json", "resumed", &from).1, together[3..]);
    assert_eq!(train("alone.json", "resumed-alone", &from).1, together[3..]);
}

/// Batch norm's statistics pass from each micro-batch's peer to the next one's. In an evaluation both peers have them,
/// and its second batch is not full.
#[test]
fn replicas_hand_on_what_forward_changes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    // A label and 3 * 32 * 32 bytes for each image, of any values.
    let images = |count: u32| -> Vec<u8> {
        let byte = |i: u32| if i.is_multiple_of(3073) { i / 3073 % 10 } else { i.wrapping_mul(2_654_435_761) >> 24 };
        (0..count * 3073).map(|i| byte(i) as u8).collect()
    };
    fs::write(dir.join("train.bin"), images(32)).unwrap();
    fs::write(dir.join("test.bin"), images(11)).unwrap();
    let job = "[model]\nfamily = \"resnet\"\ndepth = 18\nwidth = 4\n\
        [data]\nkind = \"cifar10\"\ntrain = [\"train.bin\"]\ntest = [\"test.bin\"]\n\
        [train]\nsteps = 4\nbatch = 8\nmicro_batch = 2\n[eval]\nevery = 2\n[checkpoint]\nevery = 2\n";
    fs::write(dir.join("job.toml"), job).unwrap();
    let train = |run: &str, args: &[&str]| {
        let ran = call(dir, &[&["train", "job.toml", "--run-dir", run][..], args].concat());
        assert_eq!(ran.status, 0, "{}", ran.err);
        losses(&dir.join(run))
    };
    train("two", &["--peers", "2"]);
    let turns = |of_first: Value, of_second: Value| {
        move |p: &mut Value| {
            p["stages"][0]["peers"] = of_first;
            p["stages"][1]["peers"] = of_second;
        }
    };
    changed(&dir.join("two"), &dir.join("replicas.json"), turns(json!([0, 1]), json!([1, 0, 1])));
    changed(&dir.join("two"), &dir.join("alone.json"), turns(json!([0, 0]), json!([0, 0, 0])));
    let together = train("together", &["--plan", "replicas.json"]);
    assert!(together.len() == 4 && together[1].1.is_some(), "{together:?}");
    assert_eq!(together, train("alone", &["--plan", "alone.json"]));
    let resumed = train("resumed", &["--plan", "replicas.json", "--resume", "together/checkpoints/step-2"]);
    assert_eq!(resumed, together[2..]);
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
    assert_snapshot!(refused(&nothing, &["--set=model.n_layer=3"]), @"error: plan: it is for another model or micro-batch size (its graph is DIGEST, this graph is DIGEST); make a new plan");
    assert_snapshot!(refused(&nothing, &["--set=train.batch=8"]), @"error: the plan is for 4 micro-batches a step, the job has 8; plan anew");
    assert!(refused(&nothing, &["--peers", "2"]).contains("'--plan <P.json>' cannot be used with '--peers <N>'"));
    assert_snapshot!(refused(&|p| p["stages"][1]["peers"] = json!([5]), &[]), @"error: plan: stage 1 names peer 5, but there are 2 peers");
    assert_snapshot!(refused(&|p| p["stages"][1]["peers"] = json!([0, 1, 0, 1, 0]), &[]), @"error: plan: stage 1 has 4 micro-batches for 5 turns; use more micro-batches");
    assert_snapshot!(refused(&|p| p["stages"][0]["nodes"][0] = json!(1), &[]), @"error: plan: node #1 is in two stages");
    let unknown = refused(&|p| p["schedule"] = json!("fast"), &[]);
    assert!(unknown.contains("unknown variant `fast`, expected one of `gpipe`, `1f1b`, `zb-h1`, `zb-h2`"), "{unknown}");
}

/// The text says how busy machines and lines are. The lower bound is for programs, in JSON.
#[test]
fn a_plan_says_how_busy_machines_and_lines_are() {
    let dir = tempfile::tempdir().unwrap();
    let device = |name: &str| {
        format!(
            "[[device]]\nname = \"{name}\"\nsite = \"s\"\ntflops = 0.1\nmemory_bandwidth = \"10 GB/s\"\nmemory = \"1 GiB\"\n"
        )
    };
    let site = "[[site]]\nname = \"s\"\nrate = \"1 Gbps\"\n";
    fs::write(dir.path().join("t.toml"), device("a") + &device("b") + site).unwrap();
    fs::write(dir.path().join("job.toml"), "").unwrap();
    let plan = |more: &[&str]| call(dir.path(), &[&["plan", "job.toml", "--testbed", "t.toml"], more, &TINY].concat());
    let object = plan(&["--json"]).json();
    let figure = |name: &str| object[name].as_f64().unwrap();
    let (step, bound, gap) = (figure("predicted_step_s"), figure("lower_bound_step_s"), figure("gap"));
    assert!(bound > 0.0 && (gap - (step / bound - 1.0).max(0.0)).abs() < 1e-9, "{object}");
    let text = plan(&[]).out;
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(text.contains("COMPUTE") && text.contains("BUSY") && !text.contains("at least"), "{text}");
    let lines = object["lines"].as_array().unwrap();
    assert!(
        lines.iter().any(|l| l["line"] == "card of a, out" && l["predicted_busy_s"].as_f64().unwrap() > 0.0),
        "{object}"
    );
    assert!(text.contains("card of a, out") && text.contains("link a -> b"), "{text}");
}

/// A plan for 48 GPUs is no slower than one for their best hall alone. There, the closed form takes replicas for faster
/// than they are.
#[test]
fn more_devices_make_no_plan_slower() {
    let dir = tempfile::tempdir().unwrap();
    let job = "[model]\nfamily = \"gpt2\"\nvocab_size = 50257\n[data]\nkind = \"text\"\nfiles = [\"text\"]\ncontext = 1024\n\
               [train]\nbatch = 128\nmicro_batch = 2\n";
    let hall = "[[device]]\nname = \"alpha\"\ncount = 8\nsite = \"hall\"\ngpu = \"RTX 3090\"\n\
                [[site]]\nname = \"hall\"\nrate = \"10 Gbps\"\nlatency = \"0.1 ms\"\n";
    fs::write(dir.path().join("job.toml"), job).unwrap();
    fs::write(dir.path().join("hall.toml"), hall).unwrap();
    fs::write(dir.path().join("text"), "A word. ".repeat(20_000)).unwrap();
    let all = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/testbeds/48-gpus.toml");
    let [all, hall] = [all, "hall.toml"].map(|testbed| {
        let plan = call(dir.path(), &["plan", "job.toml", "--testbed", testbed, "--json"]).json();
        plan["predicted_step_s"].as_f64().unwrap()
    });
    assert!(all < 1.01 * hall, "{all} {hall}");
}
