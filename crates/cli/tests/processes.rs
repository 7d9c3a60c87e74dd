//! Training over processes of this machine that are connected by QUIC.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Output, Stdio};

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

/// Loss and validation loss of each step.
fn losses(run: &Path) -> Vec<(f64, Option<f64>)> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines()
        .map(|line| {
            let step: serde_json::Value = serde_json::from_str(line).unwrap();
            (step["loss"].as_f64().unwrap(), step["val_loss"].as_f64())
        })
        .collect()
}

/// Logs are in the spans of their generation and pass, so that a run that hangs can be followed.
#[test]
fn logs_follow_each_pass_at_the_broker_and_at_the_peers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let mut command = fusionllm();
    command.args(["train", "--steps", "2", "--peers", "2", "--run-dir"]).arg(&path).args(TINY);
    let output = finished(command.env("RUST_LOG", "fusionllm_node=trace"));
    let of_broker = String::from_utf8_lossy(&output.stderr).into_owned();
    let of_peer = std::fs::read_to_string(path.join("logs/peer-1.log")).unwrap();
    let of_pass = |log: &str, generation: &str, text: &str| {
        log.lines().any(|l| l.contains(generation) && l.contains(":pass{number=2 ") && l.contains(text))
    };
    for (log, generation, text) in [
        (&of_broker, "generation{number=1}", "is issued"),
        (&of_peer, "generation{number=1 peer=1}", "begins"),
        (&of_peer, "generation{number=1 peer=1}", " from member "),
        (&of_peer, "generation{number=1 peer=1}", "needs the verdict"),
        (&of_peer, "generation{number=1 peer=1}", "is done"),
    ] {
        assert!(of_pass(log, generation, text), "no line of pass 2 says {text:?}:\n{log}");
    }
    let done = |l: &str| l.contains(":pass{number=2}") && l.contains("is done peer=\"peer-1\"");
    assert!(of_broker.lines().any(done), "{of_broker}");
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
    let alone = run("1", "cpu");
    assert_eq!(alone.len(), 8);
    assert!(
        alone[3].1.is_some() && alone[7].1.is_some() && alone[4].1.is_none(),
        "validation after steps 4 and 8: {alone:?}"
    );
    assert_eq!(run("3", "cpu"), alone, "bit for bit");
}

#[test]
#[cfg(feature = "burn")]
fn frameworks_train_over_processes() {
    let directory = tempfile::tempdir().unwrap();
    let [alone, mixed] = [("1", "cpu"), ("4", "cpu,burn")].map(|(peers, backends)| {
        let path = directory.path().join(peers);
        let run = ["train", "--steps", "8", "--peers", peers, "--backend", backends, "--run-dir"];
        finished(fusionllm().args(run).arg(&path).args(TINY));
        losses(&path)
    });
    assert_eq!(alone.len(), 8);
    for ((mixed, _), (one, _)) in mixed.into_iter().zip(alone) {
        assert!((mixed - one).abs() < 1e-4 * one, "{mixed} {one}");
    }
}

/// Slow links and slow devices change the time of each operation. They change neither operands nor the order of sums.
#[test]
fn a_testbed_changes_no_loss() {
    let directory = tempfile::tempdir().unwrap();
    let testbed = directory.path().join("testbed.toml");
    let device = |name| {
        format!(
            "[[device]]\nname = \"{name}\"\ntflops = 0.1\nmemory_bandwidth = \"10 GB/s\"\nmemory = \"1 GiB\"\nslowdown = 2\n"
        )
    };
    let link = "[[link]]\nbetween = [\"far\", \"near\"]\nrate = \"8 Mbps\"\nlatency = \"5 ms\"\n";
    std::fs::write(&testbed, [device("near"), device("far"), link.into()].concat()).unwrap();
    let run = |name: &str, args: &[&str]| {
        let path = directory.path().join(name);
        finished(fusionllm().args(["train", "--steps", "4"]).args(args).arg("--run-dir").arg(&path).args(TINY));
        path
    };
    let free = run("free", &["--peers", "2"]);
    let shaped = run("shaped", &["--testbed", testbed.to_str().unwrap(), "--set=plan.scheduler=equal-compute"]);
    assert_eq!(losses(&shaped), losses(&free), "bit for bit");

    let summary: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(shaped.join("summary.json")).unwrap()).unwrap();
    let peers = summary["peers"].as_array().unwrap();
    assert_eq!(peers.iter().map(|p| p["name"].as_str().unwrap()).collect::<Vec<_>>(), ["near", "far"], "in its order");
    for peer in peers {
        assert!(peer["compute_s"].as_f64().unwrap() > 0.0, "{peer}");
        // Live tensors take more than the parameters. A process takes more than 1 MiB.
        let (live, resident) = (peer["peak_memory_bytes"].as_u64().unwrap(), peer["resident_memory_bytes"].as_u64());
        assert!(live > 10_000, "{peer}");
        assert!(resident.is_none_or(|r| r > 1 << 20), "{peer}");
    }
    // A step takes at least the time of its tensors on the slowest link and two latencies.
    let bytes = summary["links"].as_array().unwrap().iter().map(|l| l["bytes_per_step"].as_f64().unwrap());
    let least = bytes.fold(0.0, f64::max) / 1e6 + 2.0 * 5e-3;
    assert!(summary["median_step_s"].as_f64().unwrap() >= least, "{summary}");
}

/// Joiners measure what the testbed file does not say of themselves and their links, and the planner chooses the open
/// settings. A resumed run keeps these settings.
#[test]
fn joiners_are_measured_and_planned_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let profile = directory.path().join("profile.toml");
    let device = "[[device]]\nname = \"a\"\nbackend = \"cpu\"\ntflops = 0.01\nmemory_bandwidth = \"9 GB/s\"\nmemory = \"1 GiB\"\n";
    std::fs::write(&profile, device).unwrap();
    let testbed = directory.path().join("testbed.toml");
    let known = "[[device]]\nname = \"a\"\n[[device]]\nname = \"c\"\nmemory = \"500 MiB\"\n\
                 [[link]]\nfrom = \"c\"\nto = \"a\"\nrate = \"80 Mbps\"\n";
    std::fs::write(&testbed, known).unwrap();
    let mut broker = fusionllm()
        .args(["broker", "--peers", "3", "--steps", "4", "--testbed"])
        .arg(&testbed)
        .arg("--run-dir")
        .arg(&path)
        .args(TINY)
        .args(["--set=train.micro_batch=auto", "--set=plan.scheduler=op-fence"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(broker.stderr.take().unwrap());
    let ticket = loop {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the broker ended before it printed a ticket");
        if let Some((_, ticket)) = line.split_once("fusionllm join ") {
            break ticket.trim().to_string();
        }
    };
    let mut join = |name: &str| {
        let mut command = fusionllm();
        command
            .args(["join", &ticket, "--name", name, "--memory", "600 MiB"])
            .stderr(Stdio::null())
            .stdout(Stdio::null());
        if name != "a" {
            command.arg("--profile").arg(&profile);
        }
        command.spawn().unwrap()
    };
    let joiners = ["a", "b", "c"].map(&mut join);
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert!(broker.wait().unwrap().success(), "{rest}");
    for mut joiner in joiners {
        assert!(joiner.wait().unwrap().success(), "{rest}");
    }
    let read = |name: &str| std::fs::read_to_string(path.join(name)).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&read("summary.json")).unwrap();
    assert_eq!(
        (&summary["scheduler"], summary["predicted_step_s"].as_f64().unwrap() > 0.0),
        (&"op-fence".into(), true)
    );
    let plan: serde_json::Value = serde_json::from_str(&read("plan.json")).unwrap();
    let devices = plan["cluster"]["devices"].as_array().unwrap();
    assert!(devices.iter().all(|d| d["memory"] == if d["name"] == "c" { 500 << 20 } else { 600 << 20 }), "{plan}");
    let end = |name: &str| serde_json::json!({ "device": devices.iter().position(|d| d["name"] == name) });
    for line in plan["cluster"]["links"].as_array().unwrap() {
        let known = line["from"] == end("c") && line["to"] == end("a");
        assert_eq!(line["bandwidth"] == 1e7, known, "{line}");
    }
    let profiled = |d: &serde_json::Value| d["rates"]["matmul"] == 1e10;
    assert!(devices.iter().all(|d| profiled(d) == (d["name"] != "a")), "{plan}");
    // Both directions between each pair of devices, and between each device and the broker.
    assert_eq!(
        plan["cluster"]["links"].as_array().unwrap().len(),
        devices.len() * (devices.len() - 1) + 2 * devices.len()
    );
    let simulated = finished(fusionllm().arg("simulate").arg(path.join("plan.json")).arg("--json"));
    let simulated: serde_json::Value = serde_json::from_slice(&simulated.stdout).unwrap();
    assert_eq!(simulated["predicted_step_s"], summary["predicted_step_s"]);

    let chosen = |job: &str| -> Vec<String> {
        let lines = job.lines().filter(|l| l.starts_with("micro_batch =") || l.starts_with("schedule ="));
        lines.map(str::to_owned).collect()
    };
    let first = chosen(&read("job.toml"));
    assert!(first.len() == 2 && !first.iter().any(|l| l.contains("auto")), "{first:?}");
    finished(
        fusionllm()
            .args(["train", "--peers", "1", "--set=plan.scheduler=equal-compute", "--steps", "6", "--resume"])
            .arg(&path),
    );
    assert_eq!(chosen(&read("job.toml")), first);
    assert_eq!(losses(&path).len(), 6);
}

/// A run that trains.
#[cfg(unix)]
struct ActiveRun {
    process: Child,
    lines: BufReader<ChildStderr>,
}

/// Starts a run and waits for its first validation.
#[cfg(unix)]
fn start_training(command: &mut Command) -> ActiveRun {
    let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("validation") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the run ended early");
    }
    ActiveRun { process, lines }
}

#[cfg(unix)]
impl ActiveRun {
    /// Reads on until this run has a checkpoint.
    fn read_until_saved(&mut self, run: &Path) {
        let is_saved = |entry: std::io::Result<std::fs::DirEntry>| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            name.strip_prefix("step-").is_some_and(|step| step.parse::<u64>().is_ok())
        };
        let mut line = String::new();
        while !std::fs::read_dir(run.join("checkpoints")).is_ok_and(|mut entries| entries.any(is_saved)) {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "the run ended early");
        }
    }

    /// Its exit status and the rest of its output.
    fn end(&mut self) -> (ExitStatus, String) {
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).unwrap();
        (self.process.wait().unwrap(), rest)
    }
}

/// The random numbers of codecs depend on the message, not on the process. So processes and threads get the same bits.
#[test]
fn compressed_losses_over_processes_are_those_over_threads() {
    use fusionllm_data::Dataset;
    use fusionllm_exec::local::{LocalRun, Training};
    use fusionllm_graph::{HostTensor, TensorType, ValueKind};
    use fusionllm_plan::{compile, equal_compute};
    use fusionllm_workbench::model::Model;
    use fusionllm_workspace::config::Job;

    let (steps, peers) = (4, 3);
    // Without decay, all parameters have the optimizer's own settings, which the threads use.
    let own = ["--set=compression.name=int4-hadamard", "--set=eval.every=0", "--set=train.optimizer.weight_decay=0.0"];
    let settings: Vec<&str> = TINY.into_iter().chain(own).collect();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let mut command = fusionllm();
    command.args(["train", "--steps", &steps.to_string(), "--peers", &peers.to_string(), "--run-dir"]).arg(&path);
    finished(command.args(&settings));
    let over_processes: Vec<f64> = losses(&path).into_iter().map(|l| l.0).collect();

    let overrides: Vec<String> = settings.iter().map(|s| s.trim_start_matches("--set=").to_owned()).collect();
    let job = Job::quick_start(&[overrides, vec![format!("train.steps={steps}")]].concat()).unwrap();
    let (data, model) =
        (Dataset::open(&job.data, job.train.seed).unwrap(), Model::build(&job, job.train.micro_batch.value).unwrap());
    let (batch, size) = (job.train.batch, job.train.micro_batch.value);
    let names: Vec<String> = (0..peers).map(|p| format!("peer-{p}")).collect();
    let mut plan = equal_compute(&model.forward, &names, (batch / size) as u32, job.train.schedule.value).unwrap();
    let programs = compile(&plan, &model.forward, &model.train).unwrap();
    plan.codecs = job.compression.choose(&programs, None, job.train.optimizer.update_rule()).unwrap();
    assert!(!plan.codecs.is_empty());
    let training = Training {
        optimizer: job.train.optimizer.update_rule(),
        learning_rate: job.train.optimizer.learning_rate(),
        clip: job.train.optimizer.clip_norm(),
        seed: job.train.seed,
    };
    let backends: Vec<_> = (0..peers).map(|_| fusionllm_backend::open("cpu").unwrap()).collect();
    let programs = compile(&plan, &model.forward, &model.train).unwrap();
    let mut cluster = LocalRun::new(programs, &backends, training, |value| {
        Ok(match &value.kind {
            ValueKind::Parameter(init) | ValueKind::Buffer(init) => {
                init.draw(job.train.seed, &value.name, &value.ty)?
            }
            _ => model.train.graph.constants[&value.name].clone(),
        })
    })
    .unwrap();
    let over_threads: Vec<f64> = (0..steps)
        .map(|step| {
            let batch_of_step = data.train_batch(step * batch as u64, batch).unwrap();
            let micro_batches: Vec<_> = (0..batch / size)
                .map(|m| {
                    let part = |t: &HostTensor| {
                        let row = t.bytes().len() / batch;
                        let shape: Vec<usize> = std::iter::once(size).chain(t.shape()[1..].iter().copied()).collect();
                        let bytes = t.bytes()[m * size * row..(m + 1) * size * row].to_vec();
                        HostTensor::from_bytes(TensorType::new(t.dtype(), shape), bytes).unwrap()
                    };
                    let mut tensors: std::collections::BTreeMap<String, HostTensor> =
                        batch_of_step.tensors.iter().map(|(name, t)| (name.to_string(), part(t))).collect();
                    // In text, every position has a target.
                    let weight = size as f64 / batch as f64;
                    let ty = model.train.graph.ty(model.train.loss_weight).dtype;
                    tensors.insert("loss_weight".into(), HostTensor::scalar(ty, weight).unwrap());
                    tensors
                })
                .collect();
            cluster.step(&micro_batches).unwrap().loss
        })
        .collect();
    assert_eq!(over_processes, over_threads);
    let summary: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path.join("summary.json")).unwrap()).unwrap();
    assert_eq!(summary["compression"], "int4-hadamard");
    let forward = summary["links"].as_array().unwrap().iter().find(|l| l["from"] == "peer-0").unwrap();
    assert_eq!(forward["codec"], "int4-hadamard");
    assert!(forward["ratio"].as_f64().unwrap() > 1.5, "{forward}");
}

/// Top-k with one entry in a hundred does harm. The run reports it and changes to milder codecs.
#[test]
fn a_codec_that_is_too_strong_gives_way() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let settings = ["name=topk", "ratio=100", "guard=true", "spectral_watch=50"];
    let settings = settings.map(|s| format!("--set=compression.{s}"));
    let mut command = fusionllm();
    let testbed = directory.path().join("testbed.toml");
    let devices = ["peer-0", "peer-1"].map(|name| {
        format!("[[device]]\nname = \"{name}\"\nsite = \"a\"\ntflops = 0.1\nmemory_bandwidth = \"10 GB/s\"\nmemory = \"1 GiB\"\nslowdown = 2\n")
    });
    let site = "[[site]]\nname = \"a\"\nrate = \"100 Mbps\"\nlatency = \"0 ms\"\n";
    std::fs::write(&testbed, devices.concat() + site).unwrap();
    command.args(["train", "--steps", "100", "--run-dir"]).arg(&path).args(TINY).args(settings);
    command.args(["--set=plan.scheduler=equal-compute", "--testbed"]).arg(&testbed);
    let said = String::from_utf8(finished(&mut command).stderr).unwrap();
    let text = std::fs::read_to_string(path.join("metrics.jsonl")).unwrap();
    let steps: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let changes: Vec<(u64, &str)> = steps
        .iter()
        .flat_map(|s| {
            s["codecs"].as_array().into_iter().flatten().map(|c| (s["step"].as_u64().unwrap(), c.as_str().unwrap()))
        })
        .collect();
    let forward: Vec<_> = changes.iter().filter(|c| c.1.starts_with("link peer-0 -> peer-1: ")).collect();
    assert!(forward[0].1.contains(": topk 100x -> topk 50x: the relative error of its tensors is "), "{changes:?}");
    assert!(forward[0].0 > 3 && forward.windows(2).all(|w| w[0].0 + 3 <= w[1].0), "one rung at a time: {changes:?}");
    let (step, line) = forward[0];
    assert!(said.contains(&format!("step {step}: {line}")), "{said}");
    // Spectra are reported for each compressed direction.
    let spectra = steps[49]["spectra"].as_array().unwrap();
    assert!(
        spectra.iter().any(|s| s["from"] == "peer-0" && s["to"] == "peer-1" && s["before"].as_f64() >= Some(1.0)),
        "{}",
        steps[49]
    );

    let read = |name| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(path.join(name)).unwrap()).unwrap()
    };
    let (plan, summary) = (read("plan.json"), read("summary.json"));
    assert!(plan["version"].as_u64().unwrap() > 1, "{plan}");
    assert!(plan["cluster"].is_object() && plan["predicted_step_s"].is_f64(), "still for these devices: {plan}");
    let link = &summary["links"][0];
    assert!(link["ratio"].as_f64().unwrap() < 60.0 && link["relative_error"].as_f64().unwrap() > 0.0, "{link}");
}

/// The process number of the joiner with this name.
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
fn a_run_outlives_a_killed_peer_bit_for_bit() {
    outlives_a_killed_peer(&[]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_run_in_bf16_outlives_a_killed_peer_bit_for_bit() {
    outlives_a_killed_peer(&["--set=train.precision=bf16"]);
}

/// Frozen parameters come from a file, and after the loss from where they are kept.
#[test]
#[cfg(target_os = "linux")]
fn a_run_with_adapters_outlives_a_killed_peer_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("base");
    finished(fusionllm().args(["train", "--steps=1", "--peers=1", "--run-dir"]).arg(&base).args(TINY));
    let weights = format!("--set=model.weights={}", base.join("checkpoints/step-1/model.safetensors").display());
    outlives_a_killed_peer(&[&weights, "--set=lora.rank=4", "--set=model.frozen_dtype=bf16"]);
}

/// The others take over its share, and no loss differs from those of a run without the kill.
#[cfg(target_os = "linux")]
fn outlives_a_killed_peer(options: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let [whole, disturbed] = ["whole", "disturbed"].map(|name| directory.path().join(name));
    let start = |path: &Path| {
        let mut command = fusionllm();
        command.args(["train", "--steps", "400", "--peers", "3", "--set=checkpoint.every=20", "--run-dir"]);
        command.arg(path).args(TINY).args(options);
        command
    };
    finished(&mut start(&whole));
    let mut run = start_training(&mut start(&disturbed));
    // Its share is then somewhere else, too.
    run.read_until_saved(&disturbed);
    let pid = joiner(&run.process, "peer-1").expect("the joiner runs");
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    let (status, rest) = run.end();
    assert_eq!(status.code(), Some(0), "{rest}");
    assert!(losses(&disturbed) == losses(&whole), "the losses differ: {rest}");
    let summary = std::fs::read_to_string(disturbed.join("summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    let [incident] = &summary["incidents"].as_array().unwrap()[..] else { panic!("{summary}") };
    assert_eq!(incident["peer"], "peer-1");
    assert!(incident["restored_bytes"].as_u64() > Some(0), "two peers took over its share: {incident}");
    let names: Vec<&str> = summary["peers"].as_array().unwrap().iter().filter_map(|p| p["name"].as_str()).collect();
    assert_eq!(names, ["peer-0", "peer-2"]);
    let model = |run: &Path| std::fs::read(run.join("checkpoints/step-400/model.safetensors")).unwrap();
    assert!(model(&disturbed) == model(&whole), "the models differ");
}

/// A broker with joiners of these names on this machine.
#[cfg(unix)]
struct Joined {
    broker: Child,
    joiners: Vec<Child>,
}

#[cfg(unix)]
impl Joined {
    fn start(run: &Path, options: &[&str], names: &[&str]) -> Self {
        let mut command = fusionllm();
        command.args(["broker", "--listen=127.0.0.1:0", "--peers", &names.len().to_string(), "--run-dir"]);
        let broker = command.arg(run).args(TINY).args(options).stderr(Stdio::null()).stdout(Stdio::null()).spawn();
        let broker = broker.unwrap();
        let ticket = loop {
            match std::fs::read_to_string(run.join("ticket")) {
                Ok(ticket) if ticket.ends_with('\n') => break ticket,
                _ => std::thread::yield_now(),
            }
        };
        let join = |name: &&str| {
            let mut command = fusionllm();
            command.args(["join", ticket.trim(), "--name", name]).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        Self { broker, joiners: names.iter().map(join).collect() }
    }

    /// Waits until the peers have copies of a cut. While it trains, the broker writes its state only then.
    fn wait_for_a_copied_cut(run: &Path) {
        let read = |file: &str| std::fs::read(run.join(file)).unwrap_or_default();
        while read("metrics.jsonl").is_empty() {
            std::thread::yield_now();
        }
        let before = read("state");
        while read("state") == before {
            std::thread::yield_now();
        }
    }
}

/// The largest resident memory of a process so far, in bytes; `None` once it has ended.
#[cfg(target_os = "linux")]
fn peak_memory(process: &Child) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib << 10)
}

/// The weights go from a file to the peer and come back as a checkpoint. The broker holds a piece of them at a time.
#[test]
#[cfg(target_os = "linux")]
fn a_brokers_memory_does_not_grow_with_the_model() {
    let directory = tempfile::tempdir().unwrap();
    // The token embedding alone has 140 MB.
    let options = ["--steps=1", "--set=model.n_embd=64", "--set=model.vocab_size=550000", "--set=eval.every=0"];
    let large = [&options[..], &["--set=train.batch=1", "--set=train.optimizer.name=sgd"]].concat();
    let first = directory.path().join("first");
    finished(fusionllm().args(["train", "--peers=1", "--run-dir"]).arg(&first).args(TINY).args(&large));
    let weights = format!("--set=model.weights={}", first.join("checkpoints/step-1/model.safetensors").display());
    let second = directory.path().join("second");
    let run = Joined::start(&second, &[&large[..], &[&weights]].concat(), &["a"]);
    let mut peak = 0;
    while let Some(memory) = peak_memory(&run.broker) {
        peak = memory;
        std::thread::yield_now();
    }
    for mut process in run.joiners.into_iter().chain([run.broker]) {
        assert!(process.wait().unwrap().success());
    }
    let saved = std::fs::metadata(second.join("checkpoints/step-1/model.safetensors")).unwrap().len();
    assert!(saved > 134 << 20 && (1..120 << 20).contains(&peak), "{peak} bytes of memory for {saved} of weights");
}

/// The broker is killed and started again. Its peers come back by themselves with what they have, and no loss differs
/// from those of a run without the kill.
#[test]
#[cfg(target_os = "linux")]
fn a_run_outlives_its_broker_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let [whole, disturbed] = ["whole", "disturbed"].map(|name| directory.path().join(name));
    // A measured plan may have another number of turns, and then other bits.
    const EQUAL: &str = "--set=plan.scheduler=equal-number";
    let options = ["--steps=2500", "--set=checkpoint.every=0", "--set=eval.every=500", EQUAL];
    finished(fusionllm().args(["train", "--peers=1", "--run-dir"]).arg(&whole).args(TINY).args(options));
    let mut run = Joined::start(&disturbed, &options, &["a", "b"]);
    Joined::wait_for_a_copied_cut(&disturbed);
    run.broker.kill().unwrap();
    run.broker.wait().unwrap();
    for secret in ["state", "broker-key", "ticket", "owner-ticket"] {
        let mode = std::os::unix::fs::PermissionsExt::mode(&disturbed.join(secret).metadata().unwrap().permissions());
        assert_eq!(mode & 0o077, 0, "others may read {secret}");
    }
    let ticket = std::fs::read_to_string(disturbed.join("ticket")).unwrap();
    let output = finished(fusionllm().args(["broker", "--listen=127.0.0.1:0", "--resume"]).arg(&disturbed));
    for joiner in run.joiners {
        let joined = joiner.wait_with_output().unwrap();
        assert!(joined.status.success());
        assert_eq!(String::from_utf8_lossy(&joined.stdout), "the run is over, after 2500 steps\n");
        let said = String::from_utf8_lossy(&joined.stderr);
        assert!(said.contains("lost the broker: ") && said.contains("\nthe broker is back\n"), "{said}");
        assert!(!said.contains(" WARN ") && !said.contains("ERROR "), "logs are for those who ask: {said}");
    }
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("once its 2 peers are back") && said.contains(ticket.trim()), "{said}");
    assert!(!said.contains(" WARN ") && !said.contains("ERROR "), "{said}");
    let report = String::from_utf8_lossy(&output.stdout);
    let advice =
        format!("fusionllm broker --peers 2 --listen 127.0.0.1:0 --resume {} --steps 5000", disturbed.display());
    assert!(report.contains(&advice), "{report}");
    assert!(losses(&disturbed) == losses(&whole), "the losses differ: {said}");
    let summary = std::fs::read_to_string(disturbed.join("summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    let [incident] = &summary["incidents"].as_array().unwrap()[..] else { panic!("{summary}") };
    assert_eq!(incident["kind"], "broker");
    assert!(incident["restarted_at"].as_u64() > Some(0), "it goes on from a cut: {incident}");
    assert_eq!(incident["restored_bytes"], 0, "each peer has its share itself: {incident}");
    let again = incident["step"].as_u64() > incident["restarted_at"].as_u64();
    assert_eq!(incident["lost_work_s"].as_f64() > Some(0.0), again, "steps that are done again take time: {incident}");
    let model = |run: &Path| std::fs::read(run.join("checkpoints/step-2500/model.safetensors")).unwrap();
    assert!(model(&disturbed) == model(&whole), "the models differ");
    assert!(!disturbed.join("state").exists(), "a run that is over needs no state");

    let late = fusionllm().args(["join", ticket.trim()]).output().unwrap();
    let said = String::from_utf8_lossy(&late.stderr);
    assert_eq!(late.status.code(), Some(1), "{said}");
    assert!(said.contains(": nobody listens there\nhint: the run has ended, or "), "{said}");
}

/// Both ends of a link keep the places that top-k sent of an activation, until the gradient goes back. After the break,
/// they begin anew.
#[test]
#[cfg(target_os = "linux")]
fn a_compressed_run_outlives_its_broker_bit_for_bit() {
    for precision in ["f32", "bf16"] {
        let directory = tempfile::tempdir().unwrap();
        let [whole, disturbed, exact] = ["whole", "disturbed", "exact"].map(|name| directory.path().join(name));
        let precision = format!("--set=train.precision={precision}");
        let options = [
            "--steps=800",
            "--set=checkpoint.every=0",
            "--set=eval.every=400",
            "--set=plan.scheduler=equal-number",
            "--set=compression.ratio=7",
            &precision,
            "--set=compression.name=topk",
        ];
        let train = |run: &Path, options: &[&str]| {
            finished(fusionllm().args(["train", "--peers=2", "--run-dir"]).arg(run).args(TINY).args(options));
        };
        train(&whole, &options);
        train(&exact, &options[..6]);
        assert!(losses(&whole) != losses(&exact), "the codec changes the losses");
        let mut run = Joined::start(&disturbed, &options, &["peer-0", "peer-1"]);
        Joined::wait_for_a_copied_cut(&disturbed);
        run.broker.kill().unwrap();
        run.broker.wait().unwrap();
        finished(fusionllm().args(["broker", "--listen=127.0.0.1:0", "--resume"]).arg(&disturbed));
        for joiner in run.joiners {
            assert!(joiner.wait_with_output().unwrap().status.success());
        }
        let summary = std::fs::read_to_string(disturbed.join("summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        assert_eq!(summary["incidents"][0]["kind"], "broker", "{summary}");
        assert!(losses(&disturbed) == losses(&whole), "{precision}: the losses differ");
        let model = |run: &Path| std::fs::read(run.join("checkpoints/step-800/model.safetensors")).unwrap();
        assert!(model(&disturbed) == model(&whole), "{precision}: the models differ");
    }
}

/// The owner looks into a run, puts a peer out, and stops the run. Its directory then says how to go on.
#[test]
#[cfg(unix)]
fn an_owner_looks_and_puts_a_peer_out() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let mut command = fusionllm();
    command.args(["train", "--steps", "1000000", "--peers", "3", "--run-dir"]).arg(&path).args(TINY);
    let mut run = start_training(&mut command);
    let ask = |args: &[&str]| {
        let [command, rest @ ..] = args else { panic!("no command") };
        let output = finished(fusionllm().arg(command).arg(&path).args(rest));
        String::from_utf8(output.stdout).unwrap()
    };
    let status = || serde_json::from_str::<serde_json::Value>(&ask(&["status", "--json"])).unwrap();
    let names = |status: &serde_json::Value| -> Vec<String> {
        status["members"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap().to_owned()).collect()
    };
    let before = status();
    assert_eq!((&before["phase"], &before["steps"]), (&"training".into(), &1_000_000.into()));
    let mut members = names(&before);
    members.sort();
    assert_eq!(members, ["peer-0", "peer-1", "peer-2"]);
    let text = ask(&["status"]);
    assert!(text.contains("of 1000000") && text.contains("peer-1") && text.contains("standing"), "{text}");

    assert!(ask(&["kick", "peer-1"]).starts_with("peer-1 is out of the run"));
    let after = status();
    assert!(!names(&after).contains(&"peer-1".to_owned()), "{after}");
    assert!(Command::new("kill").args(["-INT", &run.process.id().to_string()]).status().unwrap().success());
    let (code, rest) = run.end();
    assert_eq!(code.code(), Some(0), "{rest}");
    let summary = std::fs::read_to_string(path.join("summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    let incidents: Vec<_> = summary["incidents"].as_array().unwrap().iter().map(|i| (&i["kind"], &i["peer"])).collect();
    assert_eq!(incidents, [(&"kicked".into(), &"peer-1".into())]);

    let text = ask(&["status"]);
    assert!(text.contains("over") && text.contains("is safe") && text.contains("--resume"), "{text}");
    let refused = fusionllm().arg("kick").arg(&path).arg("peer-0").output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
}

/// Nobody is left to train. The error names the last peer, and says what is safe.
#[test]
#[cfg(target_os = "linux")]
fn a_run_without_peers_says_what_is_safe() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let args = ["train", "--steps", "1000000", "--peers", "1", "--set=checkpoint.every=2"];
    let mut run = start_training(fusionllm().args(args).arg("--run-dir").arg(&path).args(TINY));
    // Old checkpoints are removed, so a certain one may never be seen.
    let saved = || {
        let names = std::fs::read_dir(path.join("checkpoints")).into_iter().flatten().flatten();
        let steps = names.filter_map(|e| e.file_name().to_str()?.strip_prefix("step-")?.parse::<u64>().ok());
        steps.max().is_some_and(|step| step >= 6)
    };
    while !saved() {
        std::thread::yield_now();
    }
    let pid = joiner(&run.process, "peer-0").expect("the joiner runs");
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    let (status, rest) = run.end();
    assert_eq!(status.code(), Some(1), "{rest}");
    let error = rest.lines().find(|l| l.starts_with("error:")).unwrap_or_else(|| panic!("no error line in {rest}"));
    assert!(error.contains("peer-0"), "{error}");
    let hint = rest.lines().find(|l| l.starts_with("hint:")).unwrap_or_else(|| panic!("no hint in {rest}"));
    assert!(hint.contains("is safe; go on with --resume"), "{hint}");
    let last = losses(&path).len();
    assert!(last >= 4, "{last} steps were recorded");
}

/// A run is stopped by Ctrl-C and resumed with another number of peers. Its losses and its model are those of a run
/// without the stop.
#[test]
#[cfg(unix)]
fn an_interrupted_run_goes_on_with_other_peers_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let [whole, parts] = ["whole", "parts"].map(|name| directory.path().join(name));
    let start = |peers: &str, path: &Path| {
        let mut command = fusionllm();
        command.args(["train", "--steps", "300", "--peers", peers, "--run-dir"]).arg(path).args(TINY);
        command
    };
    finished(&mut start("1", &whole));
    let mut run = start_training(&mut start("2", &parts));
    assert!(Command::new("kill").args(["-INT", &run.process.id().to_string()]).status().unwrap().success());
    let (status, rest) = run.end();
    assert_eq!(status.code(), Some(0), "{rest}");
    let stopped_at = losses(&parts).len();
    assert!((4..300).contains(&stopped_at), "{stopped_at} steps were done");
    finished(fusionllm().args(["train", "--peers", "3", "--resume"]).arg(&parts));
    // An interrupted run skips the validation that is due at that step.
    let but_for_the_last = |run| {
        let mut losses = losses(run);
        losses[stopped_at - 1].1 = None;
        losses
    };
    assert!(
        but_for_the_last(&parts) == but_for_the_last(&whole),
        "stopped after {stopped_at} steps, the losses differ"
    );
    let model = |run: &Path| std::fs::read(run.join("checkpoints/step-300/model.safetensors")).unwrap();
    assert!(model(&parts) == model(&whole), "stopped after {stopped_at} steps, the models differ");
}

/// A limit of the shell on file sizes stands in for a full disk.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_harms_no_earlier_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    finished(fusionllm().args(["train", "--steps", "4", "--peers", "1", "--run-dir"]).arg(&path).args(TINY));
    let before = std::fs::read(path.join("checkpoints/step-4/model.safetensors")).unwrap();
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_fusionllm")])
        .args(["train", "--peers", "1", "--steps", "8", "--resume"])
        .arg(&path)
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    let error = message.lines().find(|l| l.starts_with("error:")).unwrap_or_else(|| panic!("no error in {message}"));
    assert!(error.contains("step-8.partial"), "{error}");
    assert!(message.contains("\ncaused by: File too large"), "{message}");
    assert!(message.contains("\nhint: free some space"), "{message}");
    let kept: Vec<_> = std::fs::read_dir(path.join("checkpoints")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(kept, ["step-4"], "no half checkpoint stays");
    assert!(std::fs::read(path.join("checkpoints/step-4/model.safetensors")).unwrap() == before);
    finished(fusionllm().args(["train", "--peers", "2", "--steps", "8", "--resume"]).arg(&path));
    assert_eq!(losses(&path).len(), 8);
}
