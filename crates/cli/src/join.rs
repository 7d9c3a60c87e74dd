//! `join`.

use std::path::{Path, PathBuf};
use std::sync::Once;

use fusionllm_backend::{Backend, worker_name};
use fusionllm_graph::Advice;
use fusionllm_graph::units::{counted, seconds};
use fusionllm_node::{JoinEvent, JoinObserver, JoinOptions, NodeError, PartEnd, Participation, Ticket};
use fusionllm_plan::Device;
use fusionllm_workbench::machine::memory;
use fusionllm_workspace::config::load_profile;
use serde_json::json;
use tokio::task::JoinSet;

use crate::allocator;
use crate::args::JoinArgs;
use crate::backend::open_backend;
use crate::devices;
use crate::failure::Failure;
use crate::output::{complain, print, print_json, tell};
use crate::train::{check_listening, runtime};

/// The environment variable that may hold a joiner's ticket.
const TICKET_VARIABLE: &str = "FUSIONLLM_TICKET";

/// The outcome of one peer.
struct Part {
    framework: String,
    device: String,
    outcome: Result<Participation, NodeError>,
}

/// Takes part in a run, with one peer for each backend or worker.
pub(crate) fn join(args: JoinArgs, json: bool) -> Result<(), Failure> {
    let ticket: Ticket = ticket(args.ticket.clone())?.trim().parse().map_err(NodeError::Ticket)?;
    check_listening(&args.listening)?;
    if args.child || args.tethered {
        // A broker that has ended takes no share.
        fusionllm_node::tether(args.child);
    }
    if let Some(room) = args.memory.or_else(memory::for_tensors) {
        allocator::keep_freed_tensors(room);
    }
    let mut names = args.backend.clone();
    names.extend(args.worker.iter().map(|command| worker_name(command)));
    if names.is_empty() {
        names = devices::choose();
    }
    if names.len() > 1 {
        check_several(&args)?;
    }
    let count = names.len() as u64;
    let mut peers = Vec::new();
    for (i, name) in names.iter().enumerate() {
        let backend = open_backend(name)?;
        let profile = args.profile.as_deref().map(|path| measured(path, &*backend)).transpose()?;
        peers.push(JoinOptions {
            name: match &args.name {
                Some(name) if count > 1 => format!("{name}-{i}"),
                name => name.clone().unwrap_or_default(),
            },
            identity: args.identity.as_deref().map(|path| identity(path, i)),
            listen: args.listening.listen,
            advertise: args.listening.addresses(),
            pinned: args.pinned,
            slowdown: args.slowdown,
            profile,
            memory: args.memory.map(|bytes| bytes / count),
            observer: observer((count > 1).then(|| format!("{} on {}", backend.name(), backend.device().name))),
            ..JoinOptions::new(ticket.clone(), backend)
        });
    }
    for peer in &peers {
        tell(format_args!("joining with {} on {}", peer.backend.name(), peer.backend.device().name));
    }
    tell("the run's progress is shown where its broker runs");
    let parts = runtime()?.block_on(take_part(peers));
    report(parts, json)
}

/// The identity's file of the peer with this number in this process. The first one has the file that was named, so that
/// a machine keeps its key when it gets another device.
fn identity(path: &Path, peer: usize) -> PathBuf {
    let mut file = path.as_os_str().to_owned();
    if peer > 0 {
        file.push(format!("-{peer}"));
    }
    file.into()
}

/// Refuses options that belong to one peer if there are several peers, because they cannot share them.
fn check_several(args: &JoinArgs) -> Result<(), Failure> {
    let alone = [
        ("--profile", args.profile.is_some()),
        ("--listen", args.listening.listen.is_some()),
        ("--advertise", !args.listening.advertise.is_empty()),
    ];
    match alone.iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(Failure::input(format!("{option}: several peers cannot share it"))
            .hint("choose one with --backend or --worker, and start the others by commands of their own")),
        None => Ok(()),
    }
}

/// Lets all peers take part until the run ends for each.
async fn take_part(peers: Vec<JoinOptions>) -> Vec<Part> {
    let mut running = JoinSet::new();
    let mut parts = Vec::new();
    for options in peers {
        let (framework, device) = (options.backend.name().to_owned(), options.backend.device().name);
        running.spawn(async move { Part { framework, device, outcome: fusionllm_node::join(options).await } });
    }
    while let Some(ended) = running.join_next().await {
        match ended {
            Ok(part) => {
                if let (Err(e), false) = (&part.outcome, running.is_empty()) {
                    complain(format_args!("{} on {} is out: {}", part.framework, part.device, e.one_line()));
                }
                parts.push(part);
            }
            Err(e) => std::panic::resume_unwind(e.into_panic()),
        }
    }
    parts
}

fn report(parts: Vec<Part>, json: bool) -> Result<(), Failure> {
    let (mut done, mut sentences) = (Vec::new(), Vec::new());
    for Part { framework, device, outcome } in parts {
        let part = outcome?;
        let (end, step) = match part.end {
            PartEnd::Over { step, .. } => ("over", Some(step)),
            PartEnd::Left => ("left", None),
        };
        let took_part = part.took_part;
        done.push(json!({ "backend": framework, "device": device, "took_part": took_part, "end": end, "step": step }));
        sentences.push((took_part, sentence(&part)));
    }
    // If there are several peers, one that took part tells most.
    sentences.sort_by_key(|(took_part, _)| !took_part);
    match &done[..] {
        [one] if json => print_json(one),
        _ if json => print_json(&json!({ "peers": done })),
        _ => print(&sentences.first().map_or_else(String::new, |(_, sentence)| format!("{sentence}\n"))),
    }
}

/// A sentence about the end of the run for this machine.
fn sentence(part: &Participation) -> String {
    let how = match part.end {
        PartEnd::Left => return "this machine has left; the run goes on without it".into(),
        PartEnd::Over { step, steps } if step < steps => {
            format!("the run was stopped after step {step} of {steps}, and is saved there")
        }
        PartEnd::Over { step, .. } => format!("the run is over, after {}", counted(step, "step")),
    };
    match part.took_part {
        true => how,
        false => format!("{how}; this machine was a spare, and had no share of the model"),
    }
}

/// Shows the events of one peer. `name` tells it from others of this process.
fn observer(name: Option<String>) -> JoinObserver {
    let no_room = Once::new();
    JoinObserver::new(move |event| {
        let say = |line: String| match &name {
            Some(name) => complain(format_args!("{name}: {line}")),
            None => complain(line),
        };
        match event {
            JoinEvent::Waiting { at, seconds: s } => {
                say(format!("the broker at {at} has not answered for {}; still trying", seconds(s.round())));
            }
            JoinEvent::LeftOut(left_out) => say(format!("{left_out} (--memory says how much a run may use)")),
            JoinEvent::BrokerLost { reason } => {
                say(format!("lost the broker: {reason}; this machine keeps its copies and tries to reach it again"))
            }
            JoinEvent::BrokerBack => say("the broker is back".into()),
            JoinEvent::CopiesInMemory { reason } => no_room.call_once(|| {
                say(format!("copies for other machines take memory, as the disk has no room for them: {reason}"));
            }),
            JoinEvent::MemoryShort { room } => {
                allocator::return_freed_memory();
                allocator::keep_freed_tensors(room);
            }
            JoinEvent::Leaving => on_leaving(),
            _ => {}
        }
    })
}

/// Says once that this machine leaves, however many peers it has.
fn on_leaving() {
    static SAID: Once = Once::new();
    SAID.call_once(|| complain("leaving; the run goes on without this machine (Ctrl-C again to leave at once)"));
}

/// The text of the ticket, from an argument, standard input or the environment. Arguments stand in the list of
/// processes, which other users can read.
pub(crate) fn ticket(argument: Option<String>) -> Result<String, Failure> {
    match argument.as_deref() {
        Some("-") => {
            let mut line = String::new();
            let read = std::io::stdin().read_line(&mut line);
            read.map_err(|e| Failure::input(format!("cannot read the ticket from standard input: {e}")))?;
            Ok(line)
        }
        Some(ticket) => Ok(ticket.into()),
        None => std::env::var(TICKET_VARIABLE).map_err(|_| {
            Failure::input("there is no ticket")
                .hint(format!("give the line that the broker printed as an argument, or in {TICKET_VARIABLE}"))
        }),
    }
}

/// The profile's device that this process is: of its backend, with as many of its threads as were measured.
fn measured(path: &Path, backend: &dyn Backend) -> Result<Device, Failure> {
    let devices = load_profile(path)?;
    let (name, threads) = (backend.name(), backend.device().threads.unwrap_or(1));
    let fitting = devices.into_iter().filter(|(n, d)| *n <= threads && d.backend.as_deref() == Some(name));
    fitting.max_by_key(|(n, _)| *n).map(|(_, device)| device).ok_or_else(|| {
        Failure::input(format!(
            "{}: it has no device of backend {name} with at most {}",
            path.display(),
            counted(threads, "thread")
        ))
        .hint(format!("measure this machine with `fusionllm profile --backend {name} -o DEVICE.toml`"))
    })
}
