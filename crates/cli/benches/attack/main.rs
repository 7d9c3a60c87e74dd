//! Attacks: the steps of one run, in turns with and without strangers that attack its broker.
//!
//! Broker, joiners and attackers are processes of this machine. First comes a run that nobody attacks. In the second
//! run, each attack lasts some seconds, with a quiet time before it. The run has the first core, and the attackers have
//! the second one. It takes Linux and `taskset`.
//!
//! ```console
//! $ cargo bench -p fusionllm-cli --bench attack
//! $ cargo bench -p fusionllm-cli --bench attack -- --connections 1000 --packets 2000 --slow 64
//! ```
//!
//! `--results FILE` also writes the figures to a file, as JSON.
#![allow(clippy::unwrap_used, reason = "whoever runs this reads its source")]

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use attackers::{Attack, Attackers};
use cpu_time::ProcessTime;
use serde_json::Value;

#[path = "../../tests/support/attackers.rs"]
mod attackers;

const FUSIONLLM: &str = env!("CARGO_BIN_EXE_fusionllm");

struct Options {
    steps: usize,
    peers: usize,
    /// Seconds of each turn.
    seconds: f64,
    /// Connections of strangers per second.
    connections: f64,
    /// Forged packets per second.
    packets: f64,
    /// Slow connections at once.
    slow: f64,
    results: Option<PathBuf>,
}

fn options(mut given: VecDeque<String>) -> Result<Options, String> {
    let (steps, peers, seconds) = (6000, 3, 10.0);
    let mut options = Options { steps, peers, seconds, connections: 100.0, packets: 2000.0, slow: 32.0, results: None };
    while let Some(name) = given.pop_front() {
        if name == "--results" {
            options.results = Some(given.pop_front().ok_or("--results takes a file")?.into());
            continue;
        }
        let value: f64 = given.pop_front().and_then(|v| v.parse().ok()).ok_or(format!("{name} needs a number"))?;
        match name.as_str() {
            "--steps" => options.steps = value as usize,
            "--peers" => options.peers = value as usize,
            "--seconds" => options.seconds = value,
            "--connections" => options.connections = value,
            "--packets" => options.packets = value,
            "--slow" => options.slow = value,
            _ => return Err(format!("unknown option {name}")),
        }
    }
    Ok(options)
}

impl Options {
    fn rate(&self, attack: Attack) -> f64 {
        match attack {
            Attack::Strangers => self.connections,
            Attack::Forged => self.packets,
            Attack::Slow => self.slow,
        }
    }
}

/// A command that keeps to one core, so that attackers take no time from the run by their own computing.
fn on_core(core: usize, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", &core.to_string()]).arg(program);
    command
}

/// A process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Run {
    directory: PathBuf,
    broker: Running,
    _joiners: Vec<Running>,
}

impl Run {
    fn start(directory: PathBuf, options: &Options) -> Self {
        let log = File::create(directory.with_extension("log")).unwrap();
        let broker = on_core(0, FUSIONLLM)
            .args(["broker", "--peers", &options.peers.to_string(), "--steps", &options.steps.to_string(), "--run-dir"])
            .arg(&directory)
            .args(["--set=model.n_layer=6", "--set=model.n_embd=96", "--set=model.n_head=4", "--set=data.context=32"])
            .args(["--set=train.batch=8", "--set=train.micro_batch=2", "--set=eval.every=0"])
            // Its stages never have replicas, so the losses keep their bits.
            .args(["--set=checkpoint.every=0", "--set=plan.scheduler=equal-compute"])
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log.try_clone().unwrap())
            .spawn();
        let mut run = Self { directory, broker: Running(broker.unwrap()), _joiners: Vec::new() };
        while run.ticket().is_none() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let join = |i: usize| {
            let (ticket, log) = (run.ticket().unwrap(), log.try_clone().unwrap());
            let mut command = on_core(0, FUSIONLLM);
            command.args(["join", &ticket, "--name", &format!("peer-{i}")]).stdin(Stdio::null());
            Running(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
        };
        run._joiners = (0..options.peers).map(join).collect();
        while run.steps().is_empty() {
            assert!(run.goes_on(), "see {}", run.directory.with_extension("log").display());
            std::thread::sleep(Duration::from_millis(20));
        }
        run
    }

    fn ticket(&self) -> Option<String> {
        let ticket = std::fs::read_to_string(self.directory.join("ticket")).ok()?;
        ticket.ends_with('\n').then(|| ticket.trim().to_owned())
    }

    fn goes_on(&mut self) -> bool {
        match self.broker.0.try_wait().unwrap() {
            None => true,
            Some(status) => {
                assert!(status.success(), "{status}; see {}", self.directory.with_extension("log").display());
                false
            }
        }
    }

    fn steps(&self) -> Vec<Step> {
        steps(&self.directory)
    }
}

#[derive(Clone, Copy)]
struct Step {
    loss: f64,
    seconds: f64,
}

fn steps(run: &Path) -> Vec<Step> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let step = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        Some(Step { loss: line["loss"].as_f64()?, seconds: line["step_s"].as_f64()? })
    };
    text.lines().map_while(step).collect()
}

/// A process of attackers. It attacks from one line of its input to the next.
struct Attacker {
    process: Running,
    lines: BufReader<ChildStdout>,
}

impl Attacker {
    fn start(attack: Attack, ticket: &str, rate: f64) -> Self {
        let mut command = on_core(1, std::env::current_exe().unwrap());
        command.args(["--attack", &name(attack), ticket, &rate.to_string()]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap());
        assert!(lines.read_line(&mut String::new()).unwrap() > 0, "the attackers are not ready");
        Self { process: Running(process), lines }
    }

    fn next(&mut self) {
        let _ = self.process.0.stdin.as_mut().unwrap().write_all(b"\n");
    }

    /// Ends the attack. Returns what was done so far, and the seconds of processor time.
    fn stop(&mut self) -> (f64, f64) {
        self.next();
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        let mut numbers = line.split_whitespace().map(|n| n.parse::<f64>().unwrap());
        (numbers.next().unwrap(), numbers.next().unwrap())
    }
}

/// Runs attackers, in the process that [`Attacker::start`] starts.
fn attack(named: &str, ticket: &str, rate: f64) {
    let attack = Attack::ALL.into_iter().find(|attack| name(*attack) == named).unwrap();
    let attackers = Attackers::new(attack, ticket);
    println!("ready");
    let mut lines = std::io::stdin().lines();
    while lines.next().is_some() {
        let (begun, stop) = (ProcessTime::now(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| attackers.run(rate, &stop));
            lines.next();
            stop.store(true, Relaxed);
        });
        println!("{} {}", attackers.done(), begun.elapsed().as_secs_f64());
    }
}

fn name(attack: Attack) -> String {
    format!("{attack:?}").to_lowercase()
}

/// The results of all turns of one kind.
#[derive(Default)]
struct Turns {
    seconds: f64,
    /// Seconds of each step that was in such a turn from its begin to its end.
    steps: Vec<f64>,
    done: f64,
    processor_s: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Result<(), String> {
    // Cargo adds `--bench`.
    let given: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    if let [first, name, ticket, rate] = &given[..]
        && first == "--attack"
    {
        attack(name, ticket, rate.parse().unwrap());
        return Ok(());
    }
    let options = options(given.into())?;
    let directory = std::env::temp_dir().join(format!("fusionllm-attack-{}", std::process::id()));
    std::fs::create_dir_all(&directory).map_err(|e| e.to_string())?;
    println!("logs: {}", directory.display());

    let begun = Instant::now();
    let mut quiet = Run::start(directory.join("quiet"), &options);
    while quiet.goes_on() {
        std::thread::sleep(Duration::from_millis(100));
    }
    let undisturbed = quiet.steps();
    println!("nobody attacks: {} steps in {:.0} s", undisturbed.len(), begun.elapsed().as_secs_f64());

    let begun = Instant::now();
    let mut run = Run::start(directory.join("attacked"), &options);
    let ticket = run.ticket().unwrap();
    let mut attackers = Attack::ALL.map(|attack| Attacker::start(attack, &ticket, options.rate(attack)));
    let mut turns: BTreeMap<Option<usize>, Turns> = BTreeMap::new();
    let order = (0..Attack::ALL.len()).flat_map(|attack| [None, Some(attack)]).cycle();
    for turn in order {
        let (from, begun) = (run.steps().len(), Instant::now());
        if let Some(attack) = turn {
            attackers[attack].next();
        }
        while run.goes_on() && begun.elapsed().as_secs_f64() < options.seconds {
            std::thread::sleep(Duration::from_millis(20));
        }
        let of_kind = turns.entry(turn).or_default();
        of_kind.seconds += begun.elapsed().as_secs_f64();
        let steps = run.steps();
        if let Some(attack) = turn {
            let (done, processor_s) = attackers[attack].stop();
            of_kind.done = done;
            of_kind.processor_s += processor_s;
        }
        // The first step began before the turn.
        of_kind.steps.extend(steps.iter().skip(from + 1).map(|step| step.seconds));
        if !run.goes_on() {
            break;
        }
    }
    let disturbed = run.steps();
    println!("in turns: {} steps in {:.0} s", disturbed.len(), begun.elapsed().as_secs_f64());

    let quiet_s = median(turns[&None].steps.clone());
    println!(
        "{:<10} {:>6} {:>10} {:>6} {:>9} {:>16}",
        "attack", "steps", "median", "ratio", "attempts", "processor time"
    );
    let mut rows = Vec::new();
    for (attack, of_kind) in &turns {
        let median = median(of_kind.steps.clone());
        println!(
            "{:<10} {:>6} {:>7.2} ms {:>6.3} {:>9} {:>9.1} % of one",
            attack.map_or("none".into(), |a| name(Attack::ALL[a])),
            of_kind.steps.len(),
            1e3 * median,
            median / quiet_s,
            of_kind.done,
            100.0 * of_kind.processor_s / of_kind.seconds,
        );
        rows.extend(attack.map(|a| {
            serde_json::json!({
                "attack": name(Attack::ALL[a]), "rate": options.rate(Attack::ALL[a]), "ratio": median / quiet_s,
                "attempts": of_kind.done, "steps": of_kind.steps.len(),
            })
        }));
    }
    let differ = undisturbed.iter().zip(&disturbed).filter(|(a, b)| a.loss.to_bits() != b.loss.to_bits()).count();
    let losses = undisturbed.len().max(disturbed.len());
    println!("{differ} of {losses} losses differ");
    if let Some(file) = options.results {
        let figures = serde_json::json!({ "rows": rows, "losses": losses, "losses_that_differ": differ });
        std::fs::write(&file, figures.to_string()).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(())
}
