//! Prediction: what the planner predicts of a training run, beside what the run measures.
//!
//! It trains on the testbeds of `testbeds.rs` and prints step time, computing and memory with the errors of their
//! predictions. With repeats it prints the distribution of the errors over all runs, not the best run.
//!
//! ```console
//! $ cargo bench -p fusionllm-cli --bench prediction [-- --only TEXT --repeats N --steps N --results FILE --keep DIR]
//! ```
//!
//! `--only` takes the testbeds whose names contain the text. `--results` appends each run to a file, and the table then
//! covers all runs in the file: a long measurement can be made in pieces. One run of each testbed takes 15 minutes.
//! `--keep` keeps the files of each run, so that `fusionllm simulate` of another version can predict it once more.
//!
//! Devices are cores of this machine, slowed down. `fusionllm profile JOB.toml` measures each kind of device before each
//! run, because a shared machine's speed varies. A run is measured by the median of its later steps, since connections
//! find their rates in the first ones. Most links are emulated by the command itself. The testbeds called `kernel` use
//! network namespaces, whose links the kernel shapes. They need root, and are left out without it.
#![allow(clippy::unwrap_used, reason = "whoever runs this reads its source")]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use hosts::{Hosts, Running};
use serde_json::{Value, json};
use table::Run;
use testbeds::{Cut, Network, TESTBEDS, Testbed};

#[path = "../../tests/support/hosts.rs"]
mod hosts;
mod table;
mod testbeds;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

struct Options {
    only: String,
    repeats: usize,
    steps: String,
    results: Option<PathBuf>,
    keep: Option<PathBuf>,
}

struct Bench {
    fusionllm: PathBuf,
    directory: PathBuf,
    steps: String,
}

fn main() -> Outcome<()> {
    let options = options()?;
    let directory = std::env::temp_dir().join(format!("fusionllm-prediction-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let fusionllm = PathBuf::from(env!("CARGO_BIN_EXE_fusionllm"));
    let mut bench = Bench { fusionllm, directory: directory.clone(), steps: options.steps };
    let mut runs = match &options.results {
        Some(file) if file.exists() => read_results(file)?,
        _ => Vec::new(),
    };
    let chosen = || TESTBEDS.iter().filter(|t| t.name.contains(&options.only));
    if chosen().next().is_none() {
        let names = TESTBEDS.iter().map(|t| t.name).collect::<Vec<_>>().join("\n  ");
        return Err(format!("no testbed's name contains {:?}; these are the names:\n  {names}", options.only).into());
    }
    for repeat in 0..options.repeats {
        for testbed in chosen() {
            if let Some(keep) = &options.keep {
                bench.directory = keep.join(testbed.name.replace(' ', "-")).join(repeat.to_string());
                std::fs::create_dir_all(&bench.directory)?;
            }
            let run = match bench.run(testbed) {
                Ok((summary, step_s)) => Run::new(testbed.name, &summary, step_s),
                Err(e) => {
                    println!("{}: {e}", testbed.name);
                    continue;
                }
            };
            println!("{}", run.line());
            if let Some(file) = &options.results {
                let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
                writeln!(file, "{}", serde_json::to_string(&run)?)?;
            }
            runs.push(run);
        }
    }
    std::fs::remove_dir_all(&directory)?;
    table::print(&runs);
    Ok(())
}

fn options() -> Outcome<Options> {
    let mut options = Options { only: String::new(), repeats: 1, steps: "14".to_owned(), results: None, keep: None };
    let mut arguments = std::env::args().skip(1).filter(|a| a != "--bench");
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{argument} takes a value"))?;
        match argument.as_str() {
            "--only" => options.only = value,
            "--repeats" => options.repeats = value.parse()?,
            "--steps" => options.steps = value,
            "--results" => options.results = Some(value.into()),
            "--keep" => options.keep = Some(std::path::absolute(value)?),
            other => {
                let known = "--only, --repeats, --steps, --results and --keep";
                return Err(format!("{other} is not one of {known}").into());
            }
        }
    }
    Ok(options)
}

fn read_results(file: &Path) -> Outcome<Vec<Run>> {
    Ok(std::fs::read_to_string(file)?.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

impl Bench {
    /// Profiles the devices and trains: the run's summary, and the median of its later steps.
    fn run(&self, testbed: &Testbed) -> Outcome<(Value, f64)> {
        let job = self.write("job.toml", &testbed.job())?;
        if matches!(testbed.model, testbeds::Model::Resnet { .. }) {
            self.write_images()?;
        }
        self.measure(testbed, &job)?;
        let file =
            self.write("testbed.toml", &testbed.file(testbed.devices.len(), |slowdown| self.profile(slowdown)))?;
        let run = self.directory.join("run");
        let _ = std::fs::remove_dir_all(&run);
        let summary = match testbed.network {
            Network::Kernel { rate } => self.run_in_namespaces(testbed, rate, &job, &file, &run)?,
            Network::Mesh { .. } | Network::Homes { .. } => {
                let mut command = self.train(&job, &file, &run, &self.steps);
                if let Cut::Stages(stages) = testbed.cut {
                    command.arg("--plan").arg(self.replicated(testbed, stages, &job)?);
                }
                serde_json::from_slice(&succeed(&mut command)?)?
            }
        };
        Ok((summary, later_steps(&run)?))
    }

    fn write(&self, name: &str, text: &str) -> Outcome<PathBuf> {
        let path = self.directory.join(name);
        std::fs::write(&path, text)?;
        Ok(path)
    }

    /// 64 images of noise, each with its label. The content of images does not change the time they take.
    fn write_images(&self) -> Outcome<()> {
        let byte = |i: u32| if i.is_multiple_of(3073) { (i / 3073 % 10) as u8 } else { (i * 7 % 251) as u8 };
        let images: Vec<u8> = (0..64 * 3073).map(byte).collect();
        Ok(std::fs::write(self.directory.join("train.bin"), images)?)
    }

    /// Measures each kind of device of a testbed, one after another. Together they compute less than this machine can,
    /// so they hardly disturb each other.
    fn measure(&self, testbed: &Testbed, job: &Path) -> Outcome<()> {
        let mut slowdowns = testbed.devices.to_vec();
        slowdowns.sort_by(f64::total_cmp);
        slowdowns.dedup();
        for slowdown in slowdowns {
            let mut profile = Command::new(&self.fusionllm);
            profile.arg("profile").arg(job).args(["--backend", fusionllm_backend::names()[0], "--threads", "1"]);
            profile.args(["--slowdown", &slowdown.to_string(), "-o"]).arg(self.profile(slowdown));
            succeed(&mut profile)?;
        }
        Ok(())
    }

    fn profile(&self, slowdown: f64) -> PathBuf {
        self.directory.join(format!("device-{slowdown}.toml"))
    }

    fn train(&self, job: &Path, testbed: &Path, run: &Path, steps: &str) -> Command {
        let mut command = Command::new(&self.fusionllm);
        command.arg("train").arg(job).arg("--testbed").arg(testbed).arg("--run-dir").arg(run);
        command.args(["--steps", steps, "--json"]);
        command
    }

    /// A plan for the first devices, one for each stage, with the other devices as their replicas.
    fn replicated(&self, testbed: &Testbed, stages: usize, job: &Path) -> Outcome<PathBuf> {
        let file = self.write("stages.toml", &testbed.file(stages, |slowdown| self.profile(slowdown)))?;
        let path = self.directory.join("replicas.json");
        let mut command = Command::new(&self.fusionllm);
        command.arg("plan").arg(job).arg("--testbed").arg(&file).args(["--scheduler", "equal-compute", "-o"]);
        succeed(command.arg(&path))?;
        let mut plan: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        let names: Vec<String> = (0..testbed.devices.len()).map(|i| format!("peer-{i}")).collect();
        plan["peers"] = json!(names);
        for stage in plan["stages"].as_array_mut().ok_or("a plan without stages")? {
            let first = stage["peers"][0].as_u64().ok_or("a stage without peers")?;
            let peers = first..testbed.devices.len() as u64;
            stage["peers"] = json!(peers.step_by(stages).collect::<Vec<_>>());
        }
        std::fs::write(&path, plan.to_string())?;
        Ok(path)
    }

    /// Trains with broker and joiners in namespaces, whose links the kernel shapes.
    fn run_in_namespaces(&self, testbed: &Testbed, rate: f64, job: &Path, file: &Path, run: &Path) -> Outcome<Value> {
        let count = testbed.devices.len();
        let planned = self.directory.join("planned.json");
        let mut plan = Command::new(&self.fusionllm);
        let predicted: Value = serde_json::from_slice(&succeed(
            plan.arg("plan").arg(job).arg("--testbed").arg(file).arg("-o").arg(&planned).arg("--json"),
        )?)?;
        let hosts = Hosts::make(count + 1)
            .filter(|hosts| (0..=count).all(|host| hosts.limit_from(host, rate) && hosts.limit_to(host, rate)))
            .ok_or("left out, because network namespaces need root, iproute2 and sch_tbf")?;
        let mut broker = hosts.on(count, &self.fusionllm);
        broker.arg("broker").arg(job).args(["--steps", &self.steps]);
        broker.arg("--plan").arg(&planned).arg("--run-dir").arg(run);
        let mut broker = Running(broker.stderr(Stdio::piped()).stdout(Stdio::null()).spawn()?);
        let mut lines = BufReader::new(broker.0.stderr.take().ok_or("no standard error")?);
        let mut heard = String::new();
        let ticket = loop {
            let mut line = String::new();
            if lines.read_line(&mut line)? == 0 {
                return Err(format!("the broker ended: {heard}").into());
            }
            if let Some((_, ticket)) = line.split_once("fusionllm join ") {
                break ticket.trim().to_owned();
            }
            heard += &line;
        };
        let joiners = (0..count).map(|i| {
            let mut join = hosts.on(i, &self.fusionllm);
            join.arg("join").arg(&ticket).args(["--name", &format!("peer-{i}")]);
            join.args(["--slowdown", &testbed.devices[i].to_string()]).env("RAYON_NUM_THREADS", "1");
            join.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(Running)
        });
        let joiners: Vec<Running> = joiners.collect::<Result<_, _>>()?;
        lines.read_to_string(&mut heard)?;
        if !broker.0.wait()?.success() {
            return Err(heard.into());
        }
        drop(joiners);
        let mut summary: Value = serde_json::from_slice(&std::fs::read(run.join("summary.json"))?)?;
        summary["predicted_step_s"] = predicted["predicted_step_s"].clone();
        for (peer, plan) in summary["peers"]
            .as_array_mut()
            .into_iter()
            .flatten()
            .zip(predicted["peers"].as_array().into_iter().flatten())
        {
            for figure in ["predicted_compute_s", "predicted_memory_bytes"] {
                peer[figure] = plan[figure].clone();
            }
        }
        Ok(summary)
    }
}

/// The median of the later half of a run's steps.
fn later_steps(run: &Path) -> Outcome<f64> {
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl"))?;
    let lines = metrics.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let steps: Vec<f64> = lines.iter().filter_map(|line| line["step_s"].as_f64()).collect();
    Ok(table::median(steps[steps.len() / 2..].to_vec()))
}

/// The standard output of a command that must succeed.
fn succeed(command: &mut Command) -> Outcome<Vec<u8>> {
    stdout_of(command.stdin(Stdio::null()).output()?)
}

fn stdout_of(output: Output) -> Outcome<Vec<u8>> {
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned().into()),
    }
}
