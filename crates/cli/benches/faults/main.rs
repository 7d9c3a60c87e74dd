//! Faults: one run that is disturbed again and again, beside the same run undisturbed.
//!
//! A broker and its joiners stand on hosts of their own, which are network namespaces. Random faults hit them, one
//! every few seconds: processes are killed and started again, put to sleep, and cut off, the broker's among them. The
//! run has to end by itself, with the losses of the undisturbed run.
//!
//! ```console
//! $ cargo bench -p fusionllm-cli --bench faults [-- --seed N --faults N --peers N --steps N --results FILE]
//! ```
//!
//! `--results` also writes the figures to a file, as JSON. It takes root and iproute2, and nft for cuts between two
//! joiners. A run of 20 faults takes about ten minutes.
#![allow(clippy::unwrap_used, reason = "whoever runs this reads its source")]

use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fusionllm_graph::units::bytes;
use hosts::{Hosts, Running};
use serde_json::Value;

#[path = "../../tests/support/hosts.rs"]
mod hosts;

const FUSIONLLM: &str = env!("CARGO_BIN_EXE_fusionllm");

/// The longest time without a step. A machine that sleeps for a minute costs less.
const PATIENCE: Duration = Duration::from_secs(180);

struct Options {
    seed: u64,
    faults: usize,
    peers: usize,
    steps: usize,
    results: Option<PathBuf>,
}

fn options() -> Result<Options, String> {
    let mut options = Options { seed: 1, faults: 20, peers: 4, steps: 6000, results: None };
    // Cargo adds `--bench`.
    let mut given: VecDeque<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    while let Some(name) = given.pop_front() {
        if name == "--results" {
            options.results = Some(given.pop_front().ok_or("--results takes a file")?.into());
            continue;
        }
        let value = given.pop_front().and_then(|v| v.parse().ok()).ok_or(format!("{name} needs a number"))?;
        match name.as_str() {
            "--seed" => options.seed = value,
            "--faults" => options.faults = value as usize,
            "--peers" => options.peers = value as usize,
            "--steps" => options.steps = value as usize,
            _ => return Err(format!("unknown option {name}")),
        }
    }
    Ok(options)
}

/// A fault. Hosts are numbered from 1 on, and the broker is on host 0. Times are in seconds.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Kill(usize),
    KillTwo(usize, usize),
    Sleep(usize, u64),
    CutOff(usize, u64),
    Part(usize, usize, u64),
    RestartBroker(u64),
}

/// A small generator of pseudo-random numbers, so that a seed names a storm.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % bound as u64) as usize
    }

    fn fault(&mut self, peers: usize) -> Fault {
        let one = 1 + self.below(peers);
        let other = 1 + (one - 1 + 1 + self.below(peers - 1)) % peers;
        match self.below(12) {
            0..3 => Fault::Kill(one),
            3 => Fault::KillTwo(one, other),
            4..7 => Fault::Sleep(one, [2, 5, 60][self.below(3)]),
            7..9 => Fault::CutOff(one, [3, 10, 40][self.below(3)]),
            9 => Fault::CutOff(0, [3, 10, 40][self.below(3)]),
            10 => Fault::Part(one, other, [3, 10, 40][self.below(3)]),
            _ => Fault::RestartBroker([0, 5][self.below(2)]),
        }
    }
}

/// A run on hosts.
struct Storm<'a> {
    hosts: &'a Hosts,
    run: PathBuf,
    broker: Running,
    /// Joiner `i` is on host `i + 1`.
    joiners: Vec<Running>,
}

impl<'a> Storm<'a> {
    fn start(hosts: &'a Hosts, run: PathBuf, steps: usize) -> Self {
        let log = File::create(run.with_extension("log")).unwrap();
        let broker = hosts
            .on(0, FUSIONLLM)
            .args(["broker", "--peers", &(hosts.count - 1).to_string(), "--steps", &steps.to_string(), "--run-dir"])
            .arg(&run)
            .args(["--set=model.n_layer=6", "--set=model.n_embd=96", "--set=model.n_head=4", "--set=data.context=32"])
            .args(["--set=train.batch=8", "--set=train.micro_batch=2", "--set=eval.every=0"])
            // Its stages never have replicas, so the losses keep their bits.
            .args(["--set=checkpoint.every=500", "--set=plan.scheduler=equal-compute"])
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn();
        let mut storm = Self { hosts, run, broker: Running(broker.unwrap()), joiners: Vec::new() };
        while storm.ticket().is_none() {
            std::thread::sleep(Duration::from_millis(20));
        }
        storm.joiners = (1..hosts.count).map(|host| storm.join(host)).collect();
        storm
    }

    fn ticket(&self) -> Option<String> {
        let ticket = std::fs::read_to_string(self.run.join("ticket")).ok()?;
        ticket.ends_with('\n').then(|| ticket.trim().to_owned())
    }

    fn join(&self, host: usize) -> Running {
        let log = self.run.with_extension(format!("host-{host}.log"));
        let log = File::options().create(true).append(true).open(log).unwrap();
        let mut command = self.hosts.on(host, FUSIONLLM);
        command.args(["join", &self.ticket().unwrap(), "--name", &format!("host-{host}")]).stderr(log);
        Running(command.spawn().unwrap())
    }

    fn process(&self, host: usize) -> &Running {
        if host == 0 { &self.broker } else { &self.joiners[host - 1] }
    }

    fn suffer(&mut self, fault: Fault) {
        let pause = |seconds| std::thread::sleep(Duration::from_secs(seconds));
        match fault {
            Fault::Kill(host) => self.kill(&[host]),
            Fault::KillTwo(one, other) => self.kill(&[one, other]),
            Fault::Sleep(host, seconds) => {
                self.process(host).signal("-STOP");
                pause(seconds);
                self.process(host).signal("-CONT");
            }
            Fault::CutOff(host, seconds) => {
                self.hosts.cut(host);
                pause(seconds);
                self.hosts.heal(host);
            }
            Fault::Part(one, other, seconds) => {
                self.hosts.part(one, other);
                pause(seconds);
                self.hosts.unite(one, other);
            }
            Fault::RestartBroker(seconds) => {
                self.broker.signal("-9");
                self.broker.0.wait().unwrap();
                pause(seconds);
                let log = File::options().append(true).open(self.run.with_extension("log")).unwrap();
                let mut command = self.hosts.on(0, FUSIONLLM);
                command.args(["broker", "--resume"]).arg(&self.run);
                self.broker = Running(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
            }
        }
    }

    /// Kills joiners, and starts them again a few seconds later.
    fn kill(&mut self, hosts: &[usize]) {
        for host in hosts {
            self.process(*host).signal("-9");
        }
        std::thread::sleep(Duration::from_secs(8));
        for host in hosts {
            self.joiners[host - 1] = self.join(*host);
        }
    }

    fn steps(&self) -> usize {
        losses(&self.run).len()
    }

    /// Waits until training goes on, or the run is over. Returns whether it goes on.
    fn goes_on(&mut self) -> bool {
        let (begun, before) = (Instant::now(), self.steps());
        loop {
            if let Some(status) = self.broker.0.try_wait().unwrap() {
                assert!(
                    status.success(),
                    "the broker ended: {status}; see {}",
                    self.run.with_extension("log").display()
                );
                return false;
            }
            // After going back, the number of steps first falls.
            let now = self.steps();
            if now > before || (now < before && begun.elapsed() > Duration::from_secs(15)) {
                return true;
            }
            assert!(begun.elapsed() < PATIENCE, "no step for {PATIENCE:?}; see {}", self.run.display());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn end(mut self) -> Value {
        assert!(self.broker.0.wait().unwrap().success(), "see {}", self.run.with_extension("log").display());
        serde_json::from_str(&std::fs::read_to_string(self.run.join("summary.json")).unwrap()).unwrap()
    }
}

fn losses(run: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let loss = |line: &str| serde_json::from_str::<Value>(line).ok()?["loss"].as_f64();
    text.lines().map_while(loss).collect()
}

fn main() -> Result<(), String> {
    let options = options()?;
    let nft = Command::new("nft").arg("--version").output().is_ok();
    let hosts = Hosts::make(options.peers + 1).ok_or("making network namespaces takes Linux, root and iproute2")?;
    let directory = std::env::temp_dir().join(format!("fusionllm-faults-{}", std::process::id()));
    std::fs::create_dir_all(&directory).map_err(|e| e.to_string())?;
    println!("logs: {}", directory.display());

    let begun = Instant::now();
    let quiet = Storm::start(&hosts, directory.join("quiet"), options.steps);
    let quiet_run = quiet.run.clone();
    let of_quiet = quiet.end();
    let quiet_s = begun.elapsed().as_secs_f64();
    println!("undisturbed: {} steps in {quiet_s:.0} s", of_quiet["steps"]);

    let mut rng = Rng(options.seed);
    let begun = Instant::now();
    let mut storm = Storm::start(&hosts, directory.join("storm"), options.steps);
    let run = storm.run.clone();
    let mut done = 0;
    while storm.goes_on() && done < options.faults {
        std::thread::sleep(Duration::from_secs(3 + rng.below(6) as u64));
        let fault = rng.fault(options.peers);
        if matches!(fault, Fault::Part(..)) && !nft {
            continue;
        }
        done += 1;
        println!("{:5.0} s, step {:5}: {fault:?}", begun.elapsed().as_secs_f64(), storm.steps());
        storm.suffer(fault);
    }
    let summary = storm.end();
    let storm_s = begun.elapsed().as_secs_f64();
    println!("disturbed by {done} faults: {} steps in {storm_s:.0} s", summary["steps"]);
    for incident in summary["incidents"].as_array().into_iter().flatten() {
        let seconds = |key: &str| incident[key].as_f64().unwrap_or(f64::NAN);
        println!(
            "{:>9} {:<12} at step {:5}, back to {:5}: detected {:5.2} s, planned {:5.2} s, restored {} in {:5.2} s, lost {:5.2} s",
            incident["kind"].as_str().unwrap_or_default(),
            incident["peer"].as_str().unwrap_or_default(),
            incident["step"],
            incident["restarted_at"],
            seconds("detected_s"),
            seconds("replanned_s"),
            bytes(incident["restored_bytes"].as_u64().unwrap_or_default()),
            seconds("restored_s"),
            seconds("lost_work_s"),
        );
    }
    let (undisturbed, disturbed) = (losses(&quiet_run), losses(&run));
    let differ = undisturbed.iter().zip(&disturbed).filter(|(a, b)| a != b).count();
    let last = |losses: &[f64]| losses.last().copied().unwrap_or(f64::NAN);
    println!(
        "last loss {:.6}, undisturbed {:.6}; {differ} of {} losses differ",
        last(&disturbed),
        last(&undisturbed),
        options.steps
    );
    println!("training overhead ratio {:.3}", quiet_s / storm_s);
    if let Some(file) = options.results {
        let incidents = summary["incidents"].as_array().into_iter().flatten();
        let sum = |incident: &Value| -> Option<f64> {
            ["detected_s", "replanned_s", "restored_s"].iter().map(|key| incident[key].as_f64()).sum()
        };
        let figures = serde_json::json!({
            "faults": done, "steps": options.steps, "storm_s": storm_s, "quiet_s": quiet_s, "losses_that_differ": differ,
            "losses": disturbed.len(), "until_training_goes_on_s": incidents.filter_map(sum).collect::<Vec<_>>(),
        });
        std::fs::write(&file, figures.to_string()).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(())
}
