//! What the planner predicts, and what happens: trains on testbeds and prints both beside each other.
//!
//! ```console
//! $ cargo bench -p fusionllm-cli --bench prediction [-- --only TEXT --steps N]
//! ```
//!
//! Most testbeds are emulated by the command itself. The last two are network namespaces whose links the kernel's token buckets shape; these take root, and are left
//! out without it. Devices are cores of this machine, slowed down, with the figures that `fusionllm profile JOB.toml` measured just before, of all of them at once as they train: on a
//! machine that is shared, those of minutes ago may be a quarter off. The first five steps are slower, as processes take their memory from the system: the median of
//! many does not see them. It all takes a quarter of an hour.
#![allow(clippy::unwrap_used, reason = "whoever runs this reads its source")]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use hosts::{Hosts, Running};
use serde_json::{Value, json};

#[path = "../tests/support/hosts.rs"]
mod hosts;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A model and how it is trained, as settings over the quick start's job.
const GPT2: &[&str] = &[
    "model.n_layer=4",
    "model.n_embd=192",
    "model.n_head=4",
    "data.context=128",
    "train.batch=16",
    "train.micro_batch=2",
    "train.optimizer.warmup=0",
];
const GPT2_LONG: &[&str] = &[
    "model.n_layer=8",
    "model.n_embd=128",
    "model.n_head=4",
    "data.context=128",
    "train.batch=16",
    "train.micro_batch=1",
    "train.optimizer.warmup=0",
];
const RESNET: &[&str] = &["train.batch=16", "train.micro_batch=4"];

/// What one trains on.
struct Case {
    name: &'static str,
    resnet: bool,
    settings: &'static [&'static str],
    /// Slowdown of each device.
    devices: &'static [f64],
    /// What joins them.
    network: Network,
    how: How,
}

/// How the graph is cut.
#[derive(PartialEq)]
enum How {
    /// For the shortest step.
    Best,
    /// Evenly, where the shortest step would leave devices out, and with them the links that are to be tried.
    Everywhere,
    /// Over the first half of the devices; the second half are their replicas.
    Replicas,
}

enum Network {
    /// Each device to each other, in Mbps and ms.
    Mesh(f64, f64),
    /// Each two devices share a site; what leaves it shares an uplink, in Mbps and ms.
    Homes(f64, f64),
    /// As homes of one device each, in namespaces, with uplinks that the kernel shapes, in Mbps.
    Kernel(f64),
}

const CASES: &[Case] = &[
    Case {
        name: "2 peers, 8 Mbps 20 ms",
        resnet: false,
        settings: GPT2,
        devices: &[2.0, 2.0],
        network: Network::Mesh(8.0, 20.0),
        how: How::Everywhere,
    },
    Case {
        name: "2 peers, 1 Gbps 0 ms",
        resnet: false,
        settings: GPT2,
        devices: &[3.0, 3.0],
        network: Network::Mesh(1000.0, 0.0),
        how: How::Best,
    },
    Case {
        name: "4 uneven peers, 100 Mbps 5 ms",
        resnet: false,
        settings: GPT2_LONG,
        devices: &[3.0, 6.0, 4.0, 8.0],
        network: Network::Mesh(100.0, 5.0),
        how: How::Best,
    },
    Case {
        name: "4 peers in 2 homes, 20 Mbps 10 ms shared",
        resnet: false,
        settings: GPT2,
        devices: &[4.0; 4],
        network: Network::Homes(20.0, 10.0),
        how: How::Everywhere,
    },
    Case {
        name: "8 peers in 4 homes, 50 Mbps 50 ms shared",
        resnet: false,
        settings: GPT2_LONG,
        devices: &[8.0; 8],
        network: Network::Homes(50.0, 50.0),
        how: How::Everywhere,
    },
    Case {
        name: "2 x 2 replicas, 50 Mbps 5 ms",
        resnet: false,
        settings: GPT2,
        devices: &[4.0; 4],
        network: Network::Mesh(50.0, 5.0),
        how: How::Replicas,
    },
    Case {
        name: "ResNet, 3 uneven peers, 100 Mbps 2 ms",
        resnet: true,
        settings: RESNET,
        devices: &[3.0, 4.0, 6.0],
        network: Network::Mesh(100.0, 2.0),
        how: How::Best,
    },
    Case {
        name: "kernel: 2 peers, 20 Mbps",
        resnet: false,
        settings: GPT2,
        devices: &[3.0, 3.0],
        network: Network::Kernel(20.0),
        how: How::Everywhere,
    },
    Case {
        name: "kernel: 3 uneven peers, 100 Mbps",
        resnet: false,
        settings: GPT2_LONG,
        devices: &[3.0, 6.0, 4.0],
        network: Network::Kernel(100.0),
        how: How::Best,
    },
];

struct Bench {
    fusionllm: PathBuf,
    directory: PathBuf,
    steps: String,
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let (mut only, mut steps) = (String::new(), "16".to_owned());
    while let Some(argument) = arguments.next() {
        if argument == "--bench" {
            continue; // cargo passes it
        }
        let value = arguments.next().ok_or_else(|| format!("{argument} takes a value"))?;
        match argument.as_str() {
            "--only" => only = value,
            "--steps" => steps = value,
            other => return Err(format!("{other} is none of --only and --steps").into()),
        }
    }
    let fusionllm = PathBuf::from(env!("CARGO_BIN_EXE_fusionllm"));
    let directory = std::env::temp_dir().join(format!("fusionllm-prediction-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let bench = Bench { fusionllm, directory, steps };
    println!("{:42} {:5} {:^30} {:^9} {:^40} {:^7}", "", "peers", "a step", "computing", "memory, at worst", "machine");
    println!(
        "{:42} {:5} {:>10} {:>10} {:>8} {:>9}  {:>10} {:>10} {:>7} {:>10}",
        "", "", "predicted", "measured", "", "", "predicted", "measured", "", "resident"
    );
    for case in CASES.iter().filter(|c| c.name.contains(&only)) {
        let job = bench.directory.join("job.toml");
        std::fs::write(&job, bench.job(case)?)?;
        let before = bench.measure(case, &job)?;
        let summary = bench.run(case, &job);
        let after = bench.measure(case, &job)?;
        match summary {
            Ok(summary) => print_row(case.name, &summary, after / before - 1.0),
            Err(e) => println!("{:42} {e}", case.name),
        }
    }
    std::fs::remove_dir_all(&bench.directory)?;
    Ok(())
}

/// How many peers hold operators, step times, the error of the busiest peer's computing, the memory of the peer whose prediction is worst, and by how much the machine became faster or
/// slower meanwhile.
fn print_row(name: &str, summary: &Value, drift: f64) {
    let number = |v: &Value, key: &str| v[key].as_f64().unwrap_or(f64::NAN);
    let percent = |predicted: f64, measured: f64| 100.0 * (predicted / measured - 1.0);
    let (predicted, measured) = (number(summary, "predicted_step_s"), number(summary, "median_step_s"));
    // Who holds no operator has joined, and that is all.
    let peers = || summary["peers"].as_array().into_iter().flatten().filter(|p| p["operators"] != 0);
    let taking_part = peers().count();
    let computing = peers().map(|p| [number(p, "predicted_compute_s"), number(p, "compute_s")]);
    let [foreseen, computed] = computing.max_by(|a, b| a[1].total_cmp(&b[1])).unwrap_or([f64::NAN; 2]);
    let memory = peers().map(|p| {
        [number(p, "predicted_memory_bytes"), number(p, "peak_memory_bytes"), number(p, "resident_memory_bytes")]
    });
    let error = |[p, m, _]: &[f64; 3]| percent(*p, *m);
    let worst = memory.max_by(|a, b| error(a).abs().total_cmp(&error(b).abs())).unwrap_or([f64::NAN; 3]);
    let [held, peak, resident] = worst.map(|x| x / f64::from(1 << 20));
    println!(
        "{name:42} {taking_part:>5} {predicted:>8.3} s {measured:>8.3} s {:>+7.1}% {:>+8.1}%  {held:>6.1} MiB {peak:>6.1} MiB {:>+6.1}% {resident:>6.1} MiB {:>+6.1}%",
        percent(predicted, measured),
        percent(foreseen, computed),
        error(&worst),
        100.0 * drift
    );
}

impl Bench {
    /// Measures all devices of a testbed at once, with their rests. Returns how many times a second they would run each of the job's kinds of operators.
    fn measure(&self, case: &Case, job: &Path) -> Outcome<f64> {
        let profiles = case.devices.iter().enumerate().map(|(i, slowdown)| {
            let mut profile = Command::new(&self.fusionllm);
            profile.arg("profile").arg(job).args(["--json", "--backend", "burn-cpu", "--threads", "1"]);
            profile.args(["--slowdown", &slowdown.to_string(), "-o"]).arg(self.profile(i));
            profile.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
        });
        let mut seconds = 0.0;
        for profile in profiles.collect::<Result<Vec<_>, _>>()? {
            let measured: Value = serde_json::from_slice(&said(profile.wait_with_output()?)?)?;
            let operators = measured["devices"][0]["device"]["operators"].as_object().ok_or("the profile is empty")?;
            let own = operators.iter().filter(|(kind, _)| kind.contains(" -> "));
            seconds += own.filter_map(|(_, curve)| curve[0][1].as_f64()).sum::<f64>();
        }
        Ok(1.0 / seconds)
    }

    fn profile(&self, device: usize) -> PathBuf {
        self.directory.join(format!("device-{device}.toml"))
    }

    /// The run's summary.
    fn run(&self, case: &Case, job: &Path) -> Outcome<Value> {
        let testbed = self.testbed("testbed.toml", case, case.devices)?;
        let run = self.directory.join("run");
        let _ = std::fs::remove_dir_all(&run);
        match case.network {
            Network::Kernel(rate) => self.run_in_namespaces(case, rate, job, &testbed, &run),
            _ => {
                let mut command = self.train(job, &testbed, &run, &self.steps);
                if case.how == How::Replicas {
                    command.arg("--plan").arg(self.replicated(case, job)?);
                }
                let out = succeed(&mut command)?;
                Ok(serde_json::from_slice(&out)?)
            }
        }
    }

    fn train(&self, job: &Path, testbed: &Path, run: &Path, steps: &str) -> Command {
        let mut command = Command::new(&self.fusionllm);
        command.arg("train").arg(job).arg("--testbed").arg(testbed).arg("--run-dir").arg(run);
        command.args(["--steps", steps, "--json"]);
        command
    }

    /// The job file: what is not set is as in the quick start, which carries its text.
    fn job(&self, case: &Case) -> Outcome<String> {
        let mut text = String::new();
        if case.resnet {
            // A label and an image of noise each: what is in the images does not change how long they take.
            let images: Vec<u8> = (0..64 * 3073u32)
                .map(|i| if i % 3073 == 0 { (i / 3073 % 10) as u8 } else { (i * 7 % 251) as u8 })
                .collect();
            std::fs::write(self.directory.join("train.bin"), images)?;
            text +=
                "model = { family = \"resnet\", depth = 18 }\ndata = { kind = \"cifar10\", train = \"train.bin\" }\n";
        } else {
            text += "model = { family = \"gpt2\" }\ndata = { kind = \"text\" }\n";
        }
        if case.how == How::Everywhere {
            text += "plan = { scheduler = \"equal-compute\" }\n";
        }
        text += "eval = { every = 0 }\ncheckpoint = { every = 1000000 }\n";
        let mut document: toml::Table = text.parse()?;
        for setting in case.settings {
            let (path, value) = setting.split_once('=').unwrap();
            let (mut table, mut rest) = (&mut document, path);
            while let Some((section, key)) = rest.split_once('.') {
                let section = table.entry(section).or_insert_with(|| toml::Value::Table(toml::Table::new()));
                (table, rest) = (section.as_table_mut().unwrap(), key);
            }
            let value = value.parse::<i64>().map_or_else(|_| value.into(), toml::Value::from);
            table.insert(rest.to_owned(), value);
        }
        Ok(document.to_string())
    }

    fn testbed(&self, file: &str, case: &Case, devices: &[f64]) -> Outcome<PathBuf> {
        let mut text = String::new();
        for (i, slowdown) in devices.iter().enumerate() {
            let site = match case.network {
                Network::Mesh(..) => "all".to_owned(),
                Network::Homes(..) => format!("home-{}", i / 2),
                Network::Kernel(_) => format!("host-{i}"),
            };
            writeln!(
                text,
                "[[device]]\nname = \"peer-{i}\"\nsite = \"{site}\"\nprofile = {:?}\nthreads = 1\nslowdown = {slowdown}",
                self.profile(i)
            )?;
        }
        match case.network {
            Network::Mesh(rate, latency) => {
                writeln!(text, "[[site]]\nname = \"all\"\nrate = \"{rate} Mbps\"\nlatency = \"{latency} ms\"")?;
            }
            Network::Homes(rate, latency) => {
                for home in 0..devices.len().div_ceil(2) {
                    writeln!(
                        text,
                        "[[site]]\nname = \"home-{home}\"\nrate = \"1 Gbps\"\nuplink = {{ rate = \"{rate} Mbps\", latency = \"{latency} ms\" }}"
                    )?;
                }
            }
            Network::Kernel(rate) => {
                for host in 0..=devices.len() {
                    writeln!(text, "[[site]]\nname = \"host-{host}\"\nuplink = {{ rate = \"{rate} Mbps\" }}")?;
                }
                writeln!(text, "[broker]\nat = \"host-{}\"", devices.len())?;
            }
        }
        let path = self.directory.join(file);
        std::fs::write(&path, text)?;
        Ok(path)
    }

    /// A plan for the first half of the devices, each stage of which a device of the second half holds too.
    fn replicated(&self, case: &Case, job: &Path) -> Outcome<PathBuf> {
        let half = case.devices.len() / 2;
        let testbed = self.testbed("half.toml", case, &case.devices[..half])?;
        let run = self.directory.join("half");
        let _ = std::fs::remove_dir_all(&run);
        succeed(&mut self.train(job, &testbed, &run, "1"))?;
        let mut plan: Value = serde_json::from_slice(&std::fs::read(run.join("plan.json"))?)?;
        let names: Vec<String> = (0..case.devices.len()).map(|i| format!("peer-{i}")).collect();
        plan["peers"] = json!(names);
        for stage in plan["stages"].as_array_mut().ok_or("a plan without stages")? {
            let first = stage["peers"][0].as_u64().ok_or("a stage without peers")?;
            stage["peers"] = json!([first, first + half as u64]);
        }
        let path = self.directory.join("replicas.json");
        std::fs::write(&path, plan.to_string())?;
        Ok(path)
    }

    /// Broker and joiners on hosts of their own, whose links the kernel shapes.
    fn run_in_namespaces(&self, case: &Case, rate: f64, job: &Path, testbed: &Path, run: &Path) -> Outcome<Value> {
        let count = case.devices.len();
        let planned = self.directory.join("planned.json");
        let mut plan = Command::new(&self.fusionllm);
        let predicted: Value = serde_json::from_slice(&succeed(
            plan.arg("plan").arg(job).arg("--testbed").arg(testbed).arg("-o").arg(&planned).arg("--json"),
        )?)?;
        let hosts = Hosts::make(count + 1)
            .filter(|hosts| (0..=count).all(|host| hosts.limit_from(host, rate) && hosts.limit_to(host, rate)))
            .ok_or("left out: network namespaces take root, iproute2 and sch_tbf")?;
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
            join.args(["--slowdown", &case.devices[i].to_string()]).env("RAYON_NUM_THREADS", "1");
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

/// What the command printed, if it succeeded.
fn succeed(command: &mut Command) -> Outcome<Vec<u8>> {
    said(command.stdin(Stdio::null()).output()?)
}

fn said(output: Output) -> Outcome<Vec<u8>> {
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned().into()),
    }
}
