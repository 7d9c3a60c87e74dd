//! Peers that compute with other frameworks, in processes of their own: NumPy and JAX, and PyTorch where it is
//! installed.
//!
//! Python is `FUSIONLLM_PYTHON`, or else the environment that `.ci/run python` makes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use fusionllm_backend::{Backend, open, worker_name};
use fusionllm_exec::ExecError;
use fusionllm_exec::local::{LocalRun, Training};
use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{CounterRng, DType, Graph, HostTensor, Precision, ValueKind, autodiff};
use fusionllm_import::ImportOptions;
use fusionllm_models::{Gpt2Config, ResNetConfig, ResNetStem};
use fusionllm_plan::{Schedule, compile, equal_compute};
use fusionllm_program::{LearningRate, Optimizer};
use fusionllm_workbench::model::imported::ImportedModel;
use requirements::Missing;

#[path = "../../backend/tests/support/backends.rs"]
mod backends;
#[path = "support/requirements.rs"]
mod requirements;

requirements::main!(
    numpy_passes_the_conformance_suite,
    jax_passes_a_part_of_the_conformance_suite,
    pytorch_passes_the_conformance_suite,
    pytorch_for_parallel_devices_passes_the_conformance_suite,
    pytorch_compiles_a_part_of_the_conformance_suite,
    frameworks_train_as_one,
    frameworks_with_pytorch_train_as_one,
    frameworks_train_as_one_in_bf16,
    a_run_computes_in_bf16,
    a_run_outlives_a_worker,
    a_worker_that_cannot_start_is_named,
    no_python_imports_from_the_current_directory,
    a_machine_joins_with_each_of_its_accelerators
);

const FUSIONLLM: &str = env!("CARGO_BIN_EXE_fusionllm");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The command line of Python with these modules.
fn python(requirement: &'static str, modules: &str) -> Result<String, Missing> {
    let python =
        std::env::var_os("FUSIONLLM_PYTHON").map_or_else(|| root().join("target/python/bin/python"), PathBuf::from);
    let imported = Command::new(&python).args(["-c", &format!("import {modules}")]).output();
    match imported {
        Ok(output) if output.status.success() => Ok(format!("'{}'", python.display())),
        _ => {
            let reason = format!("takes Python with {modules} at {}: see `.ci/run python`", python.display());
            Err(Missing { requirement, reason })
        }
    }
}

/// The command line of a worker.
fn worker(framework: &str) -> Result<String, Missing> {
    let python = match framework {
        "torch" => python("torch", "torch")?,
        _ => python("python", "numpy, jax")?,
    };
    let path = root().join("python");
    Ok(format!("env 'PYTHONPATH={}' {python} -m fusionllm_{framework}", path.display()))
}

fn open_worker(framework: &str) -> Result<Arc<dyn Backend>, Missing> {
    Ok(open(&worker_name(&worker(framework)?)).unwrap())
}

fn fusionllm(arguments: &[&str]) -> Output {
    Command::new(FUSIONLLM).args(arguments).output().unwrap()
}

fn conforms(framework: &str, arguments: &[&str]) -> Result<(), Missing> {
    check(&worker(framework)?, arguments);
    Ok(())
}

fn check(worker: &str, arguments: &[&str]) {
    let output = fusionllm(&[&["backend", "check", "--worker", worker], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn numpy_passes_the_conformance_suite() -> Result<(), Missing> {
    conforms("numpy", &[])
}

/// JAX compiles each case. All of them take some ten minutes. One in twelve is at least one for each operator.
fn jax_passes_a_part_of_the_conformance_suite() -> Result<(), Missing> {
    conforms("jax", &["--every", "12"])
}

fn pytorch_passes_the_conformance_suite() -> Result<(), Missing> {
    conforms("torch", &[])
}

/// The code that a GPU runs, on the processor: kernels that no order of threads may change, and checks that come late.
fn pytorch_for_parallel_devices_passes_the_conformance_suite() -> Result<(), Missing> {
    let here = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/tests/parallel_device.py");
    check(&worker("torch")?.replace("-m fusionllm_torch", &format!("'{here}'")), &["--every", "4"]);
    Ok(())
}

/// A C++ compiler takes seconds for each segment.
fn pytorch_compiles_a_part_of_the_conformance_suite() -> Result<(), Missing> {
    let compiler = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success());
    if !["g++", "clang++"].iter().any(compiler) {
        return Err(Missing { requirement: "torch", reason: "takes a C++ compiler".into() });
    }
    check(&format!("{} --compile", worker("torch")?), &["--every", "400"]);
    Ok(())
}

fn gpt2() -> Graph {
    let config =
        Gpt2Config { vocab_size: 31, n_positions: 12, n_embd: 16, n_layer: 3, n_head: 2, ..Gpt2Config::default() };
    config.build(2, 12, DType::F32).unwrap()
}

fn resnet() -> Graph {
    let config = ResNetConfig { depth: 18, num_classes: 10, stem: ResNetStem::Cifar, width: 4 };
    config.build(2, 16, DType::F32).unwrap()
}

/// The losses of a graph that is cut over peers with these backends. Batches are drawn with classes below `classes`.
fn losses(
    graph: &Graph,
    backends: &[Arc<dyn Backend>],
    classes: f64,
    mut initial: impl FnMut(&fusionllm_graph::Value) -> HostTensor,
) -> Vec<f64> {
    const MICRO_BATCHES: u32 = 2;
    let train = autodiff::differentiate(graph, graph.outputs["loss"]).unwrap();
    let names: Vec<String> = (0..backends.len()).map(|p| format!("p{p}")).collect();
    let plan = equal_compute(graph, &names, MICRO_BATCHES, Schedule::default()).unwrap();
    let adamw = AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let training = Training {
        optimizer: Optimizer::Adamw(adamw),
        // At a higher rate, one activation that rounds to the other side of 0 changes a ResNet's loss by more than
        // this.
        learning_rate: LearningRate { base: 2e-4, warmup: 5, cosine_until: Some(60), min: 1e-5 },
        clip: Some(1.0),
        seed: 7,
    };
    let programs = compile(&plan, graph, &train).unwrap();
    let mut run = LocalRun::new(programs, backends, training, |value| Ok::<_, ExecError>(initial(value))).unwrap();
    let rng = CounterRng::new(5);
    let step = |step: u64| {
        let batch: Vec<_> = (0..u64::from(MICRO_BATCHES))
            .map(|m| {
                let draw = |i: u64| f64::from(rng.uniform(i, 2 * step + m));
                let inputs = graph.inputs().map(|v| {
                    let value = graph.value(v);
                    let numbers = 0..value.ty.numel() as u64;
                    let shape = value.ty.shape.clone();
                    let tensor = match value.ty.dtype {
                        DType::I64 => HostTensor::from_i64(
                            shape,
                            &numbers.map(|i| (classes * draw(i)) as i64).collect::<Vec<_>>(),
                        ),
                        _ => HostTensor::from_f32(shape, &numbers.map(|i| draw(i) as f32 - 0.5).collect::<Vec<_>>()),
                    };
                    (value.name.clone(), tensor.unwrap())
                });
                let mut inputs: BTreeMap<String, HostTensor> = inputs.collect();
                inputs.insert("loss_weight".into(), HostTensor::from_f32([], &[0.5]).unwrap());
                inputs
            })
            .collect();
        run.step(&batch).unwrap().loss
    };
    (0..50).map(step).collect()
}

/// The losses of each step are those expected, within a share of them.
fn assert_close(losses: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    for (step, (got, expected)) in losses.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= tolerance * expected.abs(), "{what}, step {step}: {got}, not {expected}");
    }
}

/// Fifty steps of three models in a precision, over peers with these backends, have the losses of the default backend
/// alone in f32, within `tolerance` as a share of them.
fn train_together(mixed: &[Arc<dyn Backend>], precision: Precision, tolerance: f64) {
    let drawn = |value: &fusionllm_graph::Value| match &value.kind {
        ValueKind::Parameter(init) | ValueKind::Buffer(init) => init.draw(1, &value.name, &value.ty).unwrap(),
        _ => panic!("{:?} has no initial value", value.name),
    };
    let file = root().join("testdata/zoo/llama.pt2");
    let imported = ImportedModel::open(&file, None, ImportOptions::default()).unwrap();
    let llama = imported.imported().graph.clone();
    let alone = vec![open("cpu").unwrap(); mixed.len()];
    for (model, graph, classes) in [("gpt2", gpt2(), 31.0), ("resnet", resnet(), 10.0), ("llama.pt2", llama, 32.0)] {
        let [expected, got] = [(&alone[..], Precision::F32), (mixed, precision)].map(|(backends, precision)| {
            let graph = graph.clone().in_precision(precision, Precision::F32).unwrap();
            let mut imported = ImportedModel::open(&file, None, ImportOptions::default()).unwrap();
            losses(&graph, backends, classes, |value| match model {
                "llama.pt2" => imported.initial(value).unwrap(),
                _ => drawn(value),
            })
        });
        assert_close(&got, &expected, tolerance, model);
    }
}

fn frameworks_train_as_one() -> Result<(), Missing> {
    let mut backends = backends::backends();
    backends.push(open_worker("jax")?);
    backends.push(open_worker("numpy")?);
    train_together(&backends, Precision::F32, 1e-4);
    Ok(())
}

fn frameworks_with_pytorch_train_as_one() -> Result<(), Missing> {
    let mut backends = backends::backends();
    backends.push(open_worker("torch")?);
    backends.push(open_worker("jax")?);
    train_together(&backends, Precision::F32, 1e-4);
    Ok(())
}

fn frameworks_train_as_one_in_bf16() -> Result<(), Missing> {
    let cpu = open("cpu").unwrap();
    train_together(&[cpu.clone(), cpu, open_worker("jax")?], Precision::Bf16, 0.01);
    Ok(())
}

/// Trains a small GPT-2 for 30 steps over three peers. Returns the losses, the incidents, and what was said.
fn train(run: &Path, options: &[&str]) -> (Vec<f64>, serde_json::Value, String) {
    let small = [
        "train",
        "--peers=3",
        "--steps=30",
        "--run-dir",
        run.to_str().unwrap(),
        "--set=model.n_layer=2",
        "--set=model.n_embd=16",
        "--set=model.n_head=2",
        "--set=data.context=16",
        "--set=train.batch=4",
        "--set=train.micro_batch=1",
        "--set=eval.every=0",
    ];
    let output = fusionllm(&[&small, options].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64();
    let losses: Vec<f64> = metrics.lines().filter_map(loss).collect();
    assert_eq!(losses.len(), 30);
    let summary = std::fs::read(run.join("summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_slice(&summary).unwrap();
    (losses, summary["incidents"].clone(), said)
}

fn a_run_computes_in_bf16() -> Result<(), Missing> {
    let directory = tempfile::tempdir().unwrap();
    let command = worker("jax")?;
    let train = |precision: &str| {
        let precision_option = format!("--set=train.precision={precision}");
        let options = ["--backend", "cpu,cpu", "--worker", &command, &precision_option];
        train(&directory.path().join(precision), &options).0
    };
    let (exact, rounded) = (train("f32"), train("bf16"));
    assert_ne!(exact, rounded);
    assert_close(&rounded, &exact, 0.01, "gpt2");
    Ok(())
}

/// The process ends in the middle of a segment. Its peer leaves, and the others go on with the losses they would have.
fn a_run_outlives_a_worker() -> Result<(), Missing> {
    let dies = "import os, fusionllm_worker as worker; runs = [0]; run = worker.Worker.run\n\
                def counted(self, request):\n    \
                    runs[0] += 1\n    \
                    runs[0] < 60 or os._exit(3)\n    \
                    run(self, request)\n\
                worker.Worker.run = counted\n\
                import runpy; runpy.run_module('fusionllm_numpy', run_name='__main__')";
    let directory = tempfile::tempdir().unwrap();
    let train = |name: &str, options: &[&str]| train(&directory.path().join(name), options);
    let command = worker("numpy")?;
    let command = command.replace("-m fusionllm_numpy", &format!("-c \"{dies}\""));
    let (expected, ..) = train("quiet", &[]);
    let (losses, incidents, said) = train("disturbed", &["--backend", "cpu,cpu", "--worker", &command]);
    assert_close(&losses, &expected, 1e-4, "gpt2");
    assert_eq!(incidents.as_array().map(Vec::len), Some(1), "{incidents}");
    assert!(said.contains("it ended (exit status: 3)"), "{said}");
    Ok(())
}

fn a_worker_that_cannot_start_is_named() -> Result<(), Missing> {
    let output = fusionllm(&["train", "--peers", "2", "--worker", "no-such-program --fast"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(r#"worker "no-such-program --fast": it cannot be started"#), "{said}");
    Ok(())
}

/// A person who can write to the directory in which somebody else joins must not choose what that other person runs.
fn no_python_imports_from_the_current_directory() -> Result<(), Missing> {
    let python = python("python", "numpy")?;
    let directory = tempfile::tempdir().unwrap();
    for module in ["json", "runpy", "fusionllm_worker", "fusionllm_numpy", "numpy", "sitecustomize"] {
        let text = format!("open('{module} was run', 'w').close()\n");
        std::fs::write(directory.path().join(module).with_extension("py"), text).unwrap();
    }
    let succeeds = |arguments: &[&str]| {
        let output = Command::new(FUSIONLLM)
            .args(arguments)
            .current_dir(directory.path())
            .env("FUSIONLLM_PYTHON", python.trim_matches('\''))
            .env("PYTHONPATH", root().join("python"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let listed = succeeds(&["profile", "--list", "--json"]);
    assert!(listed.contains("fusionllm_numpy"), "{listed}");
    succeeds(&["backend", "check", "--every", "1000", "--worker", &format!("{python} -m fusionllm_numpy")]);
    let files = std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().file_name());
    let run: Vec<_> = files.filter(|name| name.to_string_lossy().ends_with("was run")).collect();
    assert!(run.is_empty(), "{run:?}");
    Ok(())
}

/// This Python says that it has two accelerators. Each of them is NumPy.
fn a_machine_joins_with_each_of_its_accelerators() -> Result<(), Missing> {
    let directory = tempfile::tempdir().unwrap();
    let found = |device: &str, accelerator: bool| {
        serde_json::json!({
            "name": "numpy", "version": "2", "device": device, "memory_bytes": 1_u64 << 30, "accelerator": accelerator,
            "arguments": ["-m", "fusionllm_numpy"],
        })
    };
    let workers = [found("Tachyon 9000", true), found("processor", false), found("Tachyon 9001", true)];
    let listing = directory.path().join("listing.json");
    std::fs::write(&listing, serde_json::json!({ "workers": workers }).to_string()).unwrap();
    let python = directory.path().join("python");
    let script = format!(
        "#!/bin/sh\ncase \"$2\" in *fusionllm_worker*) cat '{}';; *) exec {} \"$@\";; esac\n",
        listing.display(),
        self::python("python", "numpy")?
    );
    std::fs::write(&python, script).unwrap();
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let with_listing = |arguments: &[&str]| {
        let mut command = Command::new(FUSIONLLM);
        command.args(arguments).env("FUSIONLLM_PYTHON", &python).env("PYTHONPATH", root().join("python"));
        command
    };

    let listed = with_listing(&["profile", "--list", "--json"]).output().unwrap();
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let best: Vec<&str> = listed["best"].as_array().unwrap().iter().map(|b| b["device"].as_str().unwrap()).collect();
    assert_eq!(best, ["Tachyon 9000", "Tachyon 9001"]);

    let run = directory.path().join("run");
    let broker = ["broker", "--peers", "2", "--steps", "3", "--run-dir", run.to_str().unwrap()];
    let small = ["--set=model.n_layer=1", "--set=model.n_embd=8", "--set=data.context=8", "--set=eval.every=0"];
    let mut broker = Command::new(FUSIONLLM)
        .args(broker)
        .args(small)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // The ticket stands on a line of its own.
    let said = std::io::BufReader::new(broker.stderr.take().unwrap());
    let mut lines = std::io::BufRead::lines(said).map(Result::unwrap);
    let ticket = lines.find_map(|line| line.trim().strip_prefix("fusionllm join ").map(str::to_owned)).unwrap();
    let joined = with_listing(&["join", &ticket, "--name", "gpu", "--json"]).output().unwrap();
    let rest: Vec<String> = lines.collect();
    assert!(broker.wait().unwrap().success(), "{rest:#?}");
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    let joined: serde_json::Value = serde_json::from_slice(&joined.stdout).unwrap();
    assert_eq!(joined["peers"].as_array().map(Vec::len), Some(2), "{joined}");
    let summary: serde_json::Value = serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
    let peers: BTreeMap<&str, &str> = summary["peers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|peer| (peer["name"].as_str().unwrap(), peer["backend"].as_str().unwrap()))
        .collect();
    assert_eq!(peers, BTreeMap::from([("gpu-0", "numpy"), ("gpu-1", "numpy")]));

    // One key is one member of a run, so each peer has its own. The run is over, but the keys are made first.
    let key = directory.path().join("me.key");
    let joined = with_listing(&["join", &ticket, "--identity", key.to_str().unwrap()]).output().unwrap();
    assert_eq!(joined.status.code(), Some(1), "{}", String::from_utf8_lossy(&joined.stderr));
    let key_of = |path: &str| std::fs::read(directory.path().join(path)).unwrap();
    assert_ne!(key_of("me.key"), key_of("me.key-1"));
    Ok(())
}
