//! `train` and `broker`.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use fusionllm_backend as backend;
use fusionllm_graph::units::counted;
use fusionllm_node::{BrokerOptions, Dashboard, Entry, LocalPeer, NodeError, Peers, Resume, conduct};
use fusionllm_plan::{Cluster, Plan};
use fusionllm_workbench::WorkbenchError;
use fusionllm_workspace::config::{Job, Known, Testbed};
use fusionllm_workspace::run_dir::{RunDir, read_summary};
use serde::Serialize;
use serde_json::json;

use crate::again::Again;
use crate::args::{BrokerArgs, Listening, RunArgs, TrainArgs};
use crate::backend::open_backend;
use crate::failure::Failure;
use crate::output::{complain, print_json};
use crate::progress::Progress;
use crate::report::report;
use crate::values::Advertised;

/// More peers than this on one machine only get in each other's way.
const MAX_LOCAL_PEERS: usize = 64;

fn job(run: &RunArgs, resume: Option<&Resume>) -> Result<Job, Failure> {
    let mut set = run.set.clone();
    set.extend(run.steps.map(|n| format!("train.steps={n}")));
    set.extend(run.seed.map(|s| format!("train.seed={s}")));
    let job = match (&run.job, resume) {
        (Some(path), _) => return load_job(path, &set, run.tethered),
        // A checkpoint carries the job it was made by.
        (None, Some(resume)) => Job::load(&resume.job(), &set),
        (None, None) => Job::quick_start(&set),
    };
    job.map_err(Failure::from)
}

/// Reads a job file, or a job from standard input if the path is `-`. `tethered`: a zero byte ends that job, since
/// standard input stays open.
pub(crate) fn load_job(path: &Path, set: &[String], tethered: bool) -> Result<Job, Failure> {
    if path.as_os_str() != "-" {
        return Job::load(path, set).map_err(Failure::from);
    }
    let (mut bytes, mut input) = (Vec::new(), std::io::stdin().lock());
    let read = if tethered { input.read_until(0, &mut bytes) } else { input.read_to_end(&mut bytes) };
    read.map_err(|e| Failure::input(format!("the job cannot be read from standard input: {e}")))?;
    bytes.pop_if(|last| tethered && *last == 0);
    Job::decode("standard input", bytes, Path::new("."), set).map_err(Failure::from)
}

/// The plan to carry out, if one is given: by an option, or by the job unless the number of peers says otherwise.
fn plan(job: &Job, run: &RunArgs, peers: Option<usize>) -> Result<Option<Plan>, Failure> {
    let path = run.plan.as_deref().or(job.plan.file.as_deref().filter(|_| peers.is_none()));
    let Some(path) = path else { return Ok(None) };
    let fail = |e: &dyn std::fmt::Display| {
        Failure::input(format!("{}: {e}", path.display())).hint("a plan is a file that `fusionllm plan -o` wrote")
    };
    let text = std::fs::read_to_string(path).map_err(|e| fail(&e))?;
    Plan::from_json(&text).map(|p| Some(p.without_idle())).map_err(|e| fail(&e))
}

pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| Failure::running(format!("cannot start threads: {e}")))
}

/// Trains on this machine.
pub(crate) fn train(args: TrainArgs, json: bool) -> Result<(), Failure> {
    let again = Again::train(&args);
    let resume = resume(&args.run, &again)?;
    if args.run.reserve {
        return reserve(resume.as_ref());
    }
    let job = job(&args.run, resume.as_ref())?;
    let plan = plan(&job, &args.run, args.peers)?;
    let names: Vec<String> = match &plan {
        Some(plan) => plan.peers.clone(),
        None => (0..args.peers.unwrap_or(4)).map(|i| format!("peer-{i}")).collect(),
    };
    let count = names.len();
    if count == 0 || count > MAX_LOCAL_PEERS {
        let what =
            if plan.is_some() { format!("the plan's {}", counted(count, "peer")) } else { format!("--peers {count}") };
        return Err(Failure::input(format!("{what} must lie in 1 to {MAX_LOCAL_PEERS}")));
    }
    let mut backends: Vec<String> = args.backend.clone();
    backends.extend(args.worker.iter().map(|command| backend::worker_name(command)));
    if backends.is_empty() {
        backends.extend(backend::names().first().map(|name| (*name).to_owned()));
    }
    for name in &backends {
        open_backend(name)?;
    }
    // The number of cores that this process may use.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let peers = match &args.testbed {
        Some(path) => Peers::Emulated { testbed: testbed(path, cores)?, backend: backends[0].clone() },
        None => {
            let threads = (cores / count).max(1);
            let peer = |(name, backend): (String, &String)| LocalPeer {
                name,
                backend: backend.clone(),
                threads,
                slowdown: 1.0,
            };
            Peers::Local(names.into_iter().zip(backends.iter().cycle()).map(peer).collect())
        }
    };
    let listen = Some(([127, 0, 0, 1], 0).into());
    let options = BrokerOptions { listen, plan, resume, ..BrokerOptions::new(peers) };
    run(&job, &args.run, json, options, &again)
}

/// The run or checkpoint to go on from, if the user names one.
fn resume(run: &RunArgs, again: &Again) -> Result<Option<Resume>, Failure> {
    run.resume.as_deref().map(Resume::find).transpose().map_err(|e| with_older(e, again))
}

/// The directory and the last step of a run that is over, if nothing is asked but that it goes on. Supervisors ask so
/// after every restart, and try again what fails. Who types `train --resume` wants to hear how to train on.
fn over<'a>(run: &RunArgs, resume: Option<&'a Resume>, job: &Job) -> Option<(&'a Path, u64)> {
    let asks_for_more = run.job.is_some() || run.steps.is_some() || !run.set.is_empty() || run.run_dir.is_some();
    resume.filter(|_| !asks_for_more)?.over(job)
}

/// Says that a run is over, or prints its summary.
fn say_over((run, step): (&Path, u64), json: bool) -> Result<(), Failure> {
    let directory = run.display();
    let steps = counted(step, "step");
    complain(format_args!("{directory}: the run is over, after {steps}; --steps asks for more"));
    match read_summary(run).map_err(NodeError::from)? {
        Some(summary) if json => print_json(&summary),
        None if json => print_json(&json!({ "steps": step })),
        _ => Ok(()),
    }
}

/// The directory that a run has before it begins.
#[derive(Serialize)]
struct Reserved {
    directory: PathBuf,
    /// Whether it was made for a new run, which takes it with `--run-dir`.
    new: bool,
}

/// Prints the directory of the run that goes on, or makes that of a new one.
fn reserve(resume: Option<&Resume>) -> Result<(), Failure> {
    let reserved = match resume.and_then(Resume::run) {
        Some(run) => Reserved { directory: run.to_owned(), new: false },
        None => Reserved { directory: RunDir::reserve().map_err(NodeError::from)?, new: true },
    };
    print_json(&reserved)
}

/// The failure, with the command that goes on from an older checkpoint if the newest one is damaged.
fn with_older(error: NodeError, again: &Again) -> Failure {
    let older = match &error {
        NodeError::Workbench(WorkbenchError::Checkpoint(e)) => e.older(),
        _ => None,
    };
    let failure = Failure::from(error);
    match older {
        Some((step, path)) => failure.hint(format!(
            "the checkpoint of step {step} is there, too; go on from it: {}",
            again.resume_as_typed(&path)
        )),
        None => failure,
    }
}

/// Reads a testbed that this machine can stand in for.
fn testbed(path: &Path, cores: usize) -> Result<Cluster, Failure> {
    let fail = |e: String| Failure::input(format!("{}: {e}", path.display()));
    let testbed = Testbed::load(path)?.cluster;
    let asked: f64 = testbed.devices().iter().map(|d| 1.0 / d.slowdown).sum();
    if asked > cores as f64 {
        let least = testbed.devices().len() as f64 / cores as f64;
        return Err(fail(format!(
            "its devices ask for {asked:.1} cores, and this machine has {cores}: they would only wait for each other"
        ))
        .hint(format!(
            "each device asks for one core divided by its slowdown; slowdown = {least:.1} for each would do"
        )));
    }
    for (device, name) in testbed.devices().iter().filter_map(|d| Some((&d.name, d.backend.as_deref()?))) {
        backend::open(name).map_err(|e| fail(format!("backend {name:?} of device {device:?}: {e}")))?;
    }
    Ok(testbed)
}

/// Conducts a run over several machines.
pub(crate) fn broker(args: BrokerArgs, json: bool) -> Result<(), Failure> {
    if args.peers == Some(0) {
        return Err(Failure::input("--peers 0: a run needs at least one peer"));
    }
    check_listening(&args.listening)?;
    let known = args.testbed.as_deref().map(Known::load).transpose().map_err(NodeError::from)?;
    let resume = resume(&args.run, &Again::broker(&args, args.peers))?;
    if args.run.reserve {
        return reserve(resume.as_ref());
    }
    let job = job(&args.run, resume.as_ref())?;
    if let Some(over) = over(&args.run, resume.as_ref(), &job) {
        return say_over(over, json);
    }
    let plan = plan(&job, &args.run, args.peers)?;
    let left = resume.as_ref().and_then(Resume::peers);
    let count = plan.as_ref().map_or(args.peers.or(left).unwrap_or(2), |p| p.peers.len());
    let again = Again::broker(&args, Some(count));
    let entry = Entry { valid: args.limits.ticket_expires, uses: args.limits.ticket_uses, allow: args.allow };
    let (listen, advertise) = (args.listening.listen, args.listening.addresses());
    let peers = Peers::Joiners(count);
    let options = BrokerOptions { listen, advertise, plan, known, entry, resume, ..BrokerOptions::new(peers) };
    run(&job, &args.run, json, options, &again)
}

pub(crate) fn check_listening(listening: &Listening) -> Result<(), Failure> {
    let useless = |a: &&Advertised| a.addresses.iter().any(|addr| addr.port() == 0 || addr.ip().is_unspecified());
    match listening.advertise.iter().find(useless) {
        Some(addr) => Err(Failure::input(format!("--advertise {addr}: no machine can connect to that address"))
            .hint("give the address and port that lead here from outside, and the port here with --listen")),
        None => Ok(()),
    }
}

fn run(job: &Job, args: &RunArgs, json: bool, options: BrokerOptions, again: &Again) -> Result<(), Failure> {
    // The job was read from standard input, if it stood there.
    if args.tethered {
        fusionllm_node::tether(false);
    }
    let mut progress = Progress::new(job, matches!(options.peers, Peers::Joiners(_)));
    let dashboard = args.dashboard.unwrap_or(Dashboard::Local);
    let options = BrokerOptions { directory: args.run_dir.clone(), dashboard, ..options };
    runtime()?.block_on(conduct(job, options, &mut progress)).map_err(|e| with_older(e, again))?;
    let history = progress.into_history();
    match &history.summary {
        Some(summary) if json => print_json(summary),
        _ => report(&history, again),
    }
}
