//! `train`, `broker` and `join`.

use std::net::SocketAddr;
use std::path::Path;

use fusionllm_backend as backend;
use fusionllm_node::checkpoint::Checkpoint;
use fusionllm_node::config::Job;
use fusionllm_node::{BrokerOptions, JoinOptions, LocalPeer, NodeError, conduct};

use crate::args::{BrokerArgs, JoinArgs, RunArgs, TrainArgs};
use crate::failure::Failure;
use crate::generate::open_backend;
use crate::output::{complain, print, print_json};
use crate::progress::Progress;
use crate::report::report;

/// More peers than this on one machine only get in each other's way.
const MAX_LOCAL_PEERS: usize = 64;

fn job(run: &RunArgs) -> Result<Job, Failure> {
    let mut set = run.set.clone();
    set.extend(run.steps.map(|n| format!("train.steps={n}")));
    set.extend(run.seed.map(|s| format!("train.seed={s}")));
    let job = match (&run.job, &run.resume) {
        (Some(path), _) => Job::load(path, &set),
        // A checkpoint carries the job it was made by.
        (None, Some(path)) => {
            Job::load(&Checkpoint::find(path).map_err(NodeError::from)?.path().join("job.toml"), &set)
        }
        (None, None) => Job::quick_start(&set),
    };
    job.map_err(|e| Failure::Input(e.to_string()))
}

fn plan(path: Option<&Path>) -> Result<Option<fusionllm_plan::Plan>, Failure> {
    let Some(path) = path else { return Ok(None) };
    let fail = |e: String| {
        Failure::Input(format!("{}: {e}\n  hint: --plan takes a file that `fusionllm plan -o` wrote", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    fusionllm_plan::Plan::from_json(&text).map(Some).map_err(|e| fail(e.to_string()))
}

fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| Failure::Running(format!("cannot start threads: {e}")))
}

/// Trains on this machine.
pub(crate) fn train(args: TrainArgs, json: bool) -> Result<(), Failure> {
    if args.peers == 0 || args.peers > MAX_LOCAL_PEERS {
        return Err(Failure::Input(format!("--peers {} must lie in 1 to {MAX_LOCAL_PEERS}", args.peers)));
    }
    let default = [backend::names().first().copied().unwrap_or_default().to_owned()];
    let backends = if args.backend.is_empty() { &default[..] } else { &args.backend };
    for name in backends {
        open_backend(Some(name))?;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let local = (0..args.peers)
        .map(|i| LocalPeer {
            name: format!("peer-{i}"),
            backend: backends[i % backends.len()].clone(),
            threads: (cores / args.peers).max(1),
        })
        .collect();
    run(&args.run, json, args.peers, Some(([127, 0, 0, 1], 0).into()), local)
}

/// Conducts a run over several machines.
pub(crate) fn broker(args: BrokerArgs, json: bool) -> Result<(), Failure> {
    if args.peers == 0 {
        return Err(Failure::Input("--peers 0: a run needs at least one peer".into()));
    }
    run(&args.run, json, args.peers, args.listen, Vec::new())
}

fn run(
    args: &RunArgs,
    json: bool,
    peers: usize,
    listen: Option<SocketAddr>,
    local: Vec<LocalPeer>,
) -> Result<(), Failure> {
    let job = job(args)?;
    let mut progress = Progress::new(&job, local.is_empty());
    let options = BrokerOptions {
        peers,
        listen,
        plan: plan(args.plan.as_deref())?,
        local,
        directory: args.run_dir.clone(),
        resume: args.resume.as_deref().map(Checkpoint::find).transpose().map_err(NodeError::from)?,
    };
    runtime()?.block_on(conduct(&job, options, &mut progress))?;
    let history = progress.into_history();
    match &history.summary {
        Some(summary) if json => print_json(summary),
        _ => report(&history),
    }
}

/// Takes part in a run.
pub(crate) fn join(args: JoinArgs, json: bool) -> Result<(), Failure> {
    let ticket = args.ticket.parse().map_err(|e| Failure::Input(format!("{e}")))?;
    let backend = open_backend(args.backend.as_deref())?;
    let (name, device) = (backend.name(), backend.device().name);
    complain(format_args!("joining with {name} on {device}; the run's progress is shown where its broker runs"));
    let options = JoinOptions { ticket, backend, name: args.name.unwrap_or_default(), endpoint: Default::default() };
    runtime()?.block_on(fusionllm_node::join(options))?;
    if json {
        return print_json(&serde_json::json!({ "backend": name, "device": device }));
    }
    print("the run is over\n")
}
