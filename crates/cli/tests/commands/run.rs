//! A short run, and what can be done with it.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{TINY, call, finished_run, losses};

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn the_run_directory_keeps_the_contract() {
    let (directory, ran) = finished_run();
    let run = directory.join("run");
    for name in ["job.toml", "plan.json", "metrics.jsonl", "summary.json", "checkpoints/step-3/model.safetensors"] {
        assert!(run.join(name).is_file(), "{name} is missing");
    }
    assert!(!run.join("ticket").exists(), "the run takes no joiners any more");

    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().map(|l| l["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    for line in &lines {
        for key in ["loss", "step_s", "tokens_per_s"] {
            assert!(line[key].as_f64().unwrap() > 0.0, "{key} of {line}");
        }
        assert!(line["bytes_sent"].as_u64().unwrap() > 0, "{line}");
    }
    assert!(lines[2]["val_loss"].as_f64().unwrap() > 0.0 && lines[2]["val_accuracy"].is_f64(), "{}", lines[2]);

    let summary: Value = serde_json::from_str(&fs::read_to_string(run.join("summary.json")).unwrap()).unwrap();
    assert_eq!(ran.json(), summary, "--json prints the summary and nothing else");
    let expected = [
        "bytes_sent_per_step",
        "compression",
        "incidents",
        "links",
        "loss_first",
        "loss_last",
        "median_step_s",
        "micro_batches",
        "overhead_s",
        "peers",
        "predicted_step_s",
        "schedule",
        "scheduler",
        "skipped_steps",
        "steps",
        "training_overhead_ratio",
    ];
    assert_eq!(keys(&summary), expected);
    assert_eq!(summary["steps"], 3);
    assert_eq!(summary["loss_first"], lines[0]["loss"]);
    assert_eq!(summary["loss_last"], lines[2]["loss"]);
    assert_eq!(summary["bytes_sent_per_step"], lines[0]["bytes_sent"]);
    let peer = &summary["peers"][1];
    let expected = [
        "backend",
        "codec_s",
        "compute_s",
        "device",
        "name",
        "operators",
        "peak_memory_bytes",
        "predicted_compute_s",
        "predicted_memory_bytes",
        "resident_memory_bytes",
    ];
    assert_eq!(keys(peer), expected);
    assert_eq!((&peer["name"], &peer["backend"]), (&"peer-1".into(), &"cpu".into()));
    let link = &summary["links"][0];
    assert_eq!(
        keys(link),
        ["bytes_per_step", "codec", "from", "measured_bytes_per_s", "ratio", "relative_error", "to"]
    );

    let plan: Value = serde_json::from_str(&fs::read_to_string(run.join("plan.json")).unwrap()).unwrap();
    assert_eq!(plan["peers"], serde_json::json!(["peer-0", "peer-1"]));
}

/// The activities of each peer in the last step follow each other, and have one clock.
#[test]
fn the_last_step_is_kept() {
    let (directory, _) = finished_run();
    let read = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(directory.join("run").join(name)).unwrap()).unwrap()
    };
    let (trace, summary) = (read("last_step.json"), read("summary.json"));
    assert_eq!(trace["step"], 3);
    let seconds = |span: &Value| span[3].as_f64().unwrap() - span[2].as_f64().unwrap();
    for (peer, figures) in trace["peers"].as_array().unwrap().iter().zip(summary["peers"].as_array().unwrap()) {
        assert_eq!(peer["name"], figures["name"]);
        let spans = peer["spans"].as_array().unwrap();
        let of = |names: &[&str]| spans.iter().filter(|s| names.contains(&s[0].as_str().unwrap())).collect::<Vec<_>>();
        assert!(spans.windows(2).all(|w| w[0][3] == w[1][2]), "one follows the other: {spans:?}");
        // Computing that takes less than some microseconds counts for the computing before it.
        assert!(!of(&["forward", "backward", "weight_grad", "update"]).is_empty(), "{spans:?}");
        assert!(!of(&["verdict"]).is_empty(), "{spans:?}");
        let all: f64 = spans.iter().map(seconds).sum();
        assert!(all > 0.0 && of(&["wait", "verdict"]).into_iter().map(seconds).sum::<f64>() < all);
    }
    let verdicts: Vec<f64> = trace["peers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|peer| {
            let spans = peer["spans"].as_array().unwrap();
            spans.iter().rfind(|s| s[0] == "verdict").unwrap()[3].as_f64().unwrap()
        })
        .collect();
    assert!((verdicts[0] - verdicts[1]).abs() < 1e-9, "the verdict comes to both at once: {verdicts:?}");
    let arrivals = trace["peers"][1]["arrivals"].as_array().unwrap();
    assert!(arrivals.iter().any(|a| a[0] == 0 && a[1].as_u64() > Some(0)), "{arrivals:?}");
}

#[test]
fn a_report_is_a_page() {
    let (directory, _) = finished_run();
    let ran = call(directory, &["report", "run", "-o", "run.html"]);
    assert_eq!(
        (ran.status, ran.out.starts_with("run.html: a page about 1 run, ")),
        (0, true),
        "{}{}",
        ran.out,
        ran.err
    );
    let page = fs::read_to_string(directory.join("run.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("<title>run · FusionLLM</title>"));
    for part in ["Loss", "Time of a step", "One training step", "measured", "peer-1", "train.optimizer.lr"] {
        assert!(page.contains(part), "{part} is missing");
    }
    let both = call(directory, &["report", "run", "run", "-o", "two.html", "--json"]).json();
    assert_eq!((&both["page"], &both["runs"]), (&"two.html".into(), &2.into()));

    let refused = call(directory, &["report", "nowhere"]).failure(2, directory);
    assert!(refused.contains("nowhere: there is no run here (job.toml is missing)"), "{refused}");
    let refused = call(directory, &["report", "run", "-o", "absent/run.html"]).failure(1, directory);
    assert!(refused.contains("absent/run.html: cannot be written"), "{refused}");
    call(directory, &["report"]).failure(2, directory);
}

/// A program that has files for a run asks for its directory first.
#[test]
fn a_directory_is_reserved_for_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let tiny =
        |args: &[&str]| call(dir.path(), &[&["train", "--json", "--peers=1", "--steps=1"], args, &TINY[..]].concat());
    let reserved = |directory: &str, new: bool| serde_json::json!({ "directory": directory, "new": new });
    assert_eq!(tiny(&["--reserve"]).json(), reserved("runs/0001", true));
    assert_eq!(call(dir.path(), &["broker", "--reserve", "--json"]).json(), reserved("runs/0002", true));
    tiny(&[]).json();
    tiny(&["--run-dir", "runs/0001"]).json();
    assert!(dir.path().join("runs/0003/summary.json").is_file() && dir.path().join("runs/0001/summary.json").is_file());

    let checkpoint = "runs/0001/checkpoints/step-1";
    for resumed in ["runs/0001", checkpoint] {
        assert_eq!(tiny(&["--resume", resumed, "--reserve"]).json(), reserved("runs/0001", false));
    }
    fs::rename(dir.path().join(checkpoint), dir.path().join("elsewhere")).unwrap();
    assert_eq!(tiny(&["--resume", "elsewhere", "--reserve"]).json(), reserved("runs/0004", true));
    let refused = tiny(&["--resume", "runs/0002", "--reserve"]).failure(2, dir.path());
    assert!(refused.contains("runs/0002: there is no checkpoint here"), "{refused}");
}

/// Without a terminal there is no bar, but lines that a program can find, and a report on standard output.
#[test]
fn people_get_lines_and_a_report() {
    let dir = tempfile::tempdir().unwrap();
    let precision = "--set=train.precision=bf16";
    let ran = call(dir.path(), &[&["train", "--steps", "2", "--peers", "1", precision], &TINY[..]].concat());
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert!(ran.err.contains("run directory: runs/0001\n"), "{}", ran.err);
    let steps: Vec<&str> = ran.err.lines().filter(|l| l.starts_with("step ") && l.contains("/2: loss ")).collect();
    assert_eq!(steps.len(), 2, "{}", ran.err);
    let note = "train.precision = \"bf16\": every peer computes products in bf16; this takes longer than \"f32\" on peer-0 (cpu)";
    assert!(ran.err.contains(note), "{}", ran.err);
    assert!(ran.err.contains(" in 1 stage over 1 peer\n"), "{}", ran.err);
    assert!(!ran.err.contains('\x1b') && !ran.out.contains('\x1b'), "colours are for terminals");
    for part in [
        "\nsteps       2 in ",
        "\nvalidation  loss ",
        "peer-0  cpu",
        "a sample that continues held-out text",
        "train on:   fusionllm train --peers 1 --resume runs/0001 --steps 4\n",
    ] {
        assert!(ran.out.contains(part), "{part:?} is missing in {}", ran.out);
    }
    assert!(!ran.out.contains("peer-1"), "{}", ran.out);
}

/// With steps of milliseconds, `every = 5` saved steps 5, 16 and 20: those that were due while a checkpoint was on its
/// way came late, or not at all.
#[test]
fn checkpoints_are_at_the_steps_that_the_job_names() {
    let dir = tempfile::tempdir().unwrap();
    let settings = ["--set=checkpoint.every=2", "--set=checkpoint.keep=20", "--set=train.batch=1"];
    let train = ["train", "--steps=25", "--peers=2", "--run-dir=run"];
    let ran = call(dir.path(), &[&train[..], &settings, &TINY].concat());
    assert_eq!(ran.status, 0, "{}", ran.err);
    let saved = fs::read_dir(dir.path().join("run/checkpoints")).unwrap();
    let saved = saved.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut saved: Vec<u64> = saved.map(|name| name.strip_prefix("step-").unwrap().parse().unwrap()).collect();
    saved.sort_unstable();
    assert_eq!(saved, (2..25).step_by(2).chain([25]).collect::<Vec<_>>());
}

/// `--steps` changed the job: after `--steps 20`, the learning rate had fallen to its minimum by step 20 of 40.
#[test]
fn a_run_in_two_parts_has_the_rates_of_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let job = "[model]\nn_layer = 1\nn_embd = 8\nn_head = 1\n[data]\ncontext = 8\n[eval]\nevery = 0\n\
               [train]\nbatch = 2\nsteps = 8\noptimizer = { warmup = 2, decay = \"cosine\" }\n";
    fs::write(dir.path().join("job.toml"), job).unwrap();
    let rates = |run: &str| {
        let metrics = fs::read_to_string(dir.path().join(run).join("metrics.jsonl")).unwrap();
        let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| (line["lr"].as_f64().unwrap(), line["loss"].as_f64().unwrap())).collect::<Vec<_>>()
    };
    let ran = |line: &str| {
        let ran = call(dir.path(), &line.split(' ').collect::<Vec<_>>());
        assert_eq!(ran.status, 0, "{}", ran.err);
        ran
    };
    ran("train job.toml --peers 1 --run-dir whole");
    let first = ran("train job.toml --peers 1 --run-dir parts --steps 4");
    let written = fs::read_to_string(dir.path().join("parts/job.toml")).unwrap();
    assert!(written.contains("[train]\nsteps = 8\nstop = 4\n"), "{written}");
    assert!(!first.err.contains("learning rate"), "{}", first.err);
    let again = call(dir.path(), &["train", "--peers", "1", "--resume", "parts"]).failure(2, dir.path());
    assert!(again.ends_with("hint: go on to the end of the job with --steps 8"), "{again}");
    let (_, command) = first.out.split_once("train on:   fusionllm ").unwrap();
    assert_eq!(command.trim_end(), "train --peers 1 --resume parts --steps 8");
    let whole = ran(command.trim_end());
    assert_eq!(rates("parts"), rates("whole"));

    // Beyond the end of the job, the rate stays where it is, and the run says so.
    let (_, command) = whole.out.split_once("train on:   fusionllm ").unwrap();
    let beyond = ran(command.trim_end());
    let note = "note: from step 9 to 16, the learning rate stays at its minimum of 3e-5: its decay ends at step 8 \
                (train.optimizer.decay_steps)\n";
    assert!(beyond.err.contains(note), "{}", beyond.err);
    assert_eq!(rates("parts")[..8], rates("whole"));
    assert!(rates("parts")[8..].iter().all(|(lr, _)| (lr - 3e-5).abs() < 1e-12), "{:?}", rates("parts"));
}

/// A damaged newest checkpoint stopped a resume. The advice, followed to the letter, goes on from the older one.
#[test]
fn a_run_goes_on_from_an_older_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let train = ["train", "--steps", "4", "--peers", "1", "--set=checkpoint.every=2", "--run-dir", "run"];
    assert_eq!(call(dir.path(), &[&train[..], &TINY].concat()).status, 0);
    let newest = dir.path().join("run/checkpoints/step-4/model.safetensors");
    let before = losses(&dir.path().join("run"));
    let mut bytes = fs::read(&newest).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&newest, bytes).unwrap();
    let ran = call(dir.path(), &["train", "--peers", "1", "--steps", "6", "--resume", "run"]);
    assert_eq!(ran.status, 2, "the tensor is found damaged where it is read: {}", ran.err);
    let (_, command) = ran.err.trim_end().split_once("go on from it: fusionllm ").unwrap();
    assert_eq!(command, "train --steps 6 --peers 1 --resume run/checkpoints/step-2");
    let ran = call(dir.path(), &command.split(' ').collect::<Vec<_>>());
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert_eq!(losses(&dir.path().join("run"))[..3], before[..3]);
    assert_eq!(losses(&dir.path().join("run")).len(), 6);
    assert!(dir.path().join("run/checkpoints/step-6").is_dir());
}

#[test]
fn text_comes_from_checkpoints() {
    let (directory, _) = finished_run();
    let text = |checkpoint: &str, args: &[&str]| {
        let args = [&["generate", checkpoint, "--prompt", "fn main", "--tokens", "40", "--json"], args].concat();
        call(directory, &args).json()["text"].as_str().unwrap().to_owned()
    };
    let first = text("run", &[]);
    // A byte a token; bytes that are no letter become one, or wait for the next.
    assert!((1..=40).contains(&first.chars().count()), "{first:?}");
    assert_eq!(text("run/checkpoints/step-3", &[]), first, "the same seed gives the same text");
    assert_ne!(text("run", &["--seed", "2"]), first);
    let likeliest = text("run", &["--temperature", "0"]);
    assert_eq!(text("run", &["--top-k", "1", "--seed", "9"]), likeliest);

    let plain = call(directory, &["generate", "run", "--prompt", "fn main", "--tokens", "40"]);
    assert_eq!((plain.status, plain.out), (0, format!("fn main{first}\n")));
}

#[test]
#[cfg(feature = "burn")]
fn frameworks_generate_the_same_text() {
    let (directory, _) = finished_run();
    let [ours, theirs] = ["cpu", "burn"].map(|backend| {
        let args = ["generate", "run", "--prompt", "fn main", "--tokens", "40", "--temperature", "0", "--json"];
        call(directory, &[&args[..], &["--backend", backend]].concat()).json()["text"].as_str().unwrap().to_owned()
    });
    assert_eq!(ours, theirs);
}

#[test]
fn an_exported_model_is_the_same_model() {
    let (directory, _) = finished_run();
    let dir = tempfile::tempdir().unwrap();
    let run = directory.join("run").display().to_string();
    let ran = call(dir.path(), &["export", &run, "--format", "hf", "-o", "out", "--json"]);
    assert_eq!(ran.json()["step"], 3);
    let config: Value = serde_json::from_str(&fs::read_to_string(dir.path().join("out/config.json")).unwrap()).unwrap();
    assert_eq!((&config["model_type"], &config["n_embd"]), (&"gpt2".into(), &16.into()));
    assert_eq!(config["architectures"], serde_json::json!(["GPT2LMHeadModel"]));
    assert_eq!(config["eos_token_id"], Value::Null, "bytes have no token for an end");
    let greedy = |at: &str, from: &Path| {
        let args = ["generate", at, "--prompt", "fn", "--tokens", "20", "--temperature", "0"];
        let ran = call(from, &args);
        assert_eq!(ran.status, 0, "{}", ran.err);
        ran.out
    };
    assert_eq!(greedy("out", dir.path()), greedy("run", directory));

    let again = call(dir.path(), &["export", &run, "--format", "hf", "-o", "out"]);
    assert!(again.failure(2, dir.path()).starts_with("error: out: there is a config.json already\nhint: "));
    let wrong = call(dir.path(), &["export", &run, "--format", "torchvision", "-o", "other"]);
    assert!(
        wrong
            .failure(2, dir.path())
            .ends_with("torchvision has no GPT-2\nhint: write it for `transformers`: --format hf")
    );
    assert!(!dir.path().join("other").exists());
}

/// A run with a tokenizer from a file needs that file at its start alone.
#[test]
fn a_run_has_its_own_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/tokenizers/byte_level");
    let given = dir.path().join("given");
    fs::create_dir(&given).unwrap();
    let files: Vec<_> = fs::read_dir(&made).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    for name in &files {
        fs::copy(made.join(name), given.join(name)).unwrap();
    }
    fs::write(dir.path().join("a.jsonl"), "{\"text\": \"one two, it's 3\"}\n".repeat(40)).unwrap();
    let job = "[data]\nfiles = [\"a.jsonl\"]\ntokenizer = \"given\"\n[train]\nsteps = 2\n";
    fs::write(dir.path().join("job.toml"), job).unwrap();
    let tiny = |args: &[&str]| call(dir.path(), &[args, &TINY[..]].concat());
    tiny(&["train", "job.toml", "--peers=1", "--run-dir=run", "--json", "--steps=1"]).json();
    fs::remove_dir_all(&given).unwrap();
    // The run may have moved.
    fs::rename(dir.path().join("run"), dir.path().join("moved")).unwrap();

    for checkpoint in ["moved", "moved/checkpoints/step-1"] {
        let args = ["generate", checkpoint, "--prompt=one<|im_end|>", "--tokens=3", "--json"];
        assert!(call(dir.path(), &args).json()["tokens"].as_u64().is_some());
    }
    let exported = call(dir.path(), &["export", "moved", "-o", "out", "--json"]).json();
    for name in files {
        let name = name.to_str().unwrap();
        assert_eq!(fs::read(made.join(name)).unwrap(), fs::read(dir.path().join("out").join(name)).unwrap(), "{name}");
        assert!(exported["files"].as_array().unwrap().contains(&name.into()), "{exported}");
    }
    let config: Value = serde_json::from_slice(&fs::read(dir.path().join("out/config.json")).unwrap()).unwrap();
    assert_eq!((&config["bos_token_id"], &config["eos_token_id"]), (&0.into(), &2.into()));
    // The exported folder has a model with its tokenizer, too.
    call(dir.path(), &["generate", "out", "--prompt=one", "--tokens=3", "--json"]).json();
    call(dir.path(), &["train", "--resume=moved", "--peers=1", "--steps=2", "--json"]).json();
}
