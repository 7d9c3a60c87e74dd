//! The jobs in `examples/`, each in a short version.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::{call, losses};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").canonicalize().unwrap()
}

/// Trains an example with these settings in a run directory of its own: loss and validation loss of each step.
fn train(job: &str, set: &[&str]) -> Vec<(f64, Option<f64>)> {
    let directory = tempfile::tempdir().unwrap();
    let job = examples().join(job).display().to_string();
    let set: Vec<String> = set.iter().map(|s| format!("--set={s}")).collect();
    let set = set.iter().map(String::as_str);
    let args: Vec<&str> = ["train", &job, "--run-dir", "run"].into_iter().chain(set).collect();
    let ran = call(directory.path(), &args);
    assert_eq!(ran.status, 0, "{}", ran.err);
    losses(&directory.path().join("run"))
}

#[test]
fn every_job_is_tested() {
    let mut jobs = Vec::new();
    let mut folders = vec![examples()];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "toml") {
                let text = fs::read_to_string(&path).unwrap();
                if text.contains("[model]") {
                    jobs.push(path.strip_prefix(examples()).unwrap().to_owned());
                }
            }
        }
    }
    jobs.sort();
    let tested = ["cifar10.toml", "resnet101/job.toml", "three-homes/job.toml", "tinyshakespeare.toml"];
    assert_eq!(jobs, tested.map(PathBuf::from), "a job in examples/ has no test here");
}

#[test]
fn tinyshakespeare_learns() {
    let losses = train(
        "tinyshakespeare.toml",
        &[
            "train.steps=100",
            "model.n_embd=64",
            "model.n_layer=2",
            "data.context=64",
            "train.optimizer.warmup=10",
            "eval.every=100",
            "eval.batches=4",
        ],
    );
    let (_, validation) = losses[losses.len() - 1];
    // The frequencies of single bytes alone give 3.3.
    assert!(losses[0].0 > 5.0 && validation.unwrap() < 3.0, "{losses:?}");
}

/// Images in CIFAR-10's layout. Each class has a brightness of its own, and each image some noise.
fn images(count: usize) -> Vec<u8> {
    let image = |i: usize| {
        let class = i * 7 % 10;
        let pixel = move |p: usize| (20 * class + (i * 31 + p * p * 17) % 40) as u8;
        [class as u8].into_iter().chain((0..3 * 32 * 32).map(pixel))
    };
    (0..count).flat_map(image).collect()
}

#[test]
fn cifar10_learns() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, count: usize| {
        let path = directory.path().join(name);
        fs::write(&path, images(count)).unwrap();
        format!("[{:?}]", path.display().to_string())
    };
    let losses = train(
        "cifar10.toml",
        &[
            &format!("data.train={}", file("train.bin", 320)),
            &format!("data.test={}", file("test.bin", 63)),
            "train.steps=40",
            "train.optimizer.decay_steps=40",
            "model.width=8",
            "train.batch=32",
            "train.micro_batch=8",
            "train.optimizer.warmup=5",
            "eval.every=40",
            "eval.batches=0",
        ],
    );
    // Chance gives ln 10, 2.3. All 63 images count, though they do not fill the last batch.
    let (_, validation) = losses[losses.len() - 1];
    assert!(validation.unwrap() < 2.0, "{losses:?}");
}

/// A file in the safetensors format: its header with the places of the tensors, then their bytes.
fn shard(samples: usize) -> Vec<u8> {
    let pixels: Vec<u8> =
        (0..samples * 3 * 32 * 32).flat_map(|i| ((i * 37 % 101) as f32 / 50.0 - 1.0).to_le_bytes()).collect();
    let labels: Vec<u8> = (0..samples).flat_map(|i| (i as i64 % 3).to_le_bytes()).collect();
    let end = pixels.len() + labels.len();
    let header = json!({
        "x": { "dtype": "F32", "shape": [samples, 3, 32, 32], "data_offsets": [0, pixels.len()] },
        "y": { "dtype": "I64", "shape": [samples], "data_offsets": [pixels.len(), end] },
    });
    let header = header.to_string().into_bytes();
    [(header.len() as u64).to_le_bytes().to_vec(), header, pixels, labels].concat()
}

/// With a small ResNet that PyTorch exported, because export.py needs PyTorch.
#[test]
fn resnet101_trains() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("0.safetensors");
    fs::write(&data, shard(16)).unwrap();
    let model = examples().join("../testdata/zoo/resnet_tiny.pt2").canonicalize().unwrap();
    let losses = train(
        "resnet101/job.toml",
        &[
            &format!("model.file={:?}", model.display().to_string()),
            &format!("data.files=[{:?}]", data.display().to_string()),
            "train.steps=10",
            "train.batch=4",
            "train.micro_batch=2",
            "train.optimizer.warmup=0",
        ],
    );
    assert_eq!(losses.len(), 10);
    assert!(losses[9].0 < losses[0].0, "{losses:?}");
}

#[test]
fn three_homes_are_planned_for() {
    let folder = examples().join("three-homes");
    let plan =
        call(&folder, &["plan", "job.toml", "--testbed", "testbed.toml", "--json", "--set=model.n_layer=4"]).json();
    assert!(plan["predicted_step_s"].as_f64().unwrap() > 0.0, "{plan}");
}

#[test]
fn every_testbed_can_be_planned_for() {
    let testbeds = examples().join("testbeds");
    let mut planned = 0;
    for path in fs::read_dir(&testbeds).unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_some_and(|e| e == "toml") {
            let testbed = path.display().to_string();
            let args = ["plan", "../tinyshakespeare.toml", "--testbed", &testbed, "--json", "--set=model.n_layer=1"];
            let plan = call(&testbeds, &args).json();
            assert!(plan["predicted_step_s"].as_f64().unwrap() > 0.0, "{testbed}: {plan}");
            planned += 1;
        }
    }
    assert!(planned >= 4, "{planned}");
}
